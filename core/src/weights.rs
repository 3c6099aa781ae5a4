//! The weight table: which checkpoint tensor goes to which block under which name.
//!
//! A family writes one literal table. From it core derives the block layout, the check that a
//! checkpoint is complete and has the right shapes, the adapter sites and the synthetic checkpoint.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::block::{BlockIndex, Placement};
use crate::dtype::Dtype;
use crate::site::{Site, SiteKind};

/// How the fused weights of experts lie in files. On the device they are always seen as
/// `[num_experts, out_features, in_features]`, without a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpertLayout {
    /// `[num_experts, in_features, out_features]`
    InOut,
    /// `[num_experts, out_features, in_features]`
    OutIn,
}

/// What a tensor is for. Decides how `synth` fills it and whether an adapter may attach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Weight `[out_features, in_features]` of a linear: an adapter site. Drawn from a normal distribution.
    Linear,
    /// Token embedding `[num_embeddings, hidden_size]`. Drawn from a normal distribution.
    Embedding,
    /// Weight `[num_experts, out_features]` of a router: a linear, which PEFT reaches as a parameter. Drawn
    /// from a normal distribution.
    Router,
    /// Fused weights of a layer's experts, or of a group of them, published in this layout: an adapter
    /// site that PEFT reaches as a parameter. Files may hold the other layout. Drawn from a normal
    /// distribution.
    Experts(ExpertLayout),
    /// Codes of fused experts packed in MXFP4, `[num_experts, out_features, in_features / 32, 16]`, U8: an
    /// adapter site like [`Role::Experts`]. The name ends in `_blocks`, in the block and in the checkpoint.
    Mxfp4Blocks,
    /// Their exponents, one per 32 codes, `[num_experts, out_features, in_features / 32]`, U8. The name ends
    /// in `_scales`.
    Mxfp4Scales,
    /// Scale of a norm: close to one.
    NormScale,
    /// Bias: close to zero.
    Bias,
    /// Not a weight in the checkpoint's dtype but something that is stored in this one: packed codes,
    /// whole-number tables, masks.
    Buffer(Dtype),
}

impl Role {
    /// The dtype of what is stored in one of its own.
    pub fn buffer_dtype(self) -> Option<Dtype> {
        match self {
            Self::Buffer(dtype) => Some(dtype),
            Self::Mxfp4Blocks | Self::Mxfp4Scales => Some(Dtype::U8),
            Self::Linear
            | Self::Router
            | Self::Experts(_)
            | Self::Embedding
            | Self::NormScale
            | Self::Bias => None,
        }
    }
}

/// One line of a family's table: `{n}` in a name stands for the number of the block.
#[derive(Debug, Clone)]
pub struct Row<'a> {
    /// Name in the checkpoint.
    pub checkpoint: &'a str,
    /// Name inside the block.
    pub local: &'a str,
    /// Shape in the checkpoint.
    pub shape: Vec<usize>,
    /// Which part of the outermost dimension belongs to the block; `None`: all.
    pub slice: Option<Range<usize>>,
    /// What it is for.
    pub role: Role,
}

impl Row<'_> {
    /// The same row for a part of the outermost dimension.
    #[must_use]
    pub fn part(mut self, slice: Range<usize>) -> Self {
        self.slice = Some(slice);
        self
    }
}

/// A [`Row`], for tables that read as tables.
pub fn row<'a>(checkpoint: &'a str, local: &'a str, role: Role, shape: &[usize]) -> Row<'a> {
    Row { checkpoint, local, shape: shape.to_vec(), slice: None, role }
}

/// One checkpoint tensor, or a slice of one, in its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Weight {
    /// Name in the checkpoint.
    pub checkpoint: String,
    /// Shape in the checkpoint.
    pub shape: Vec<usize>,
    /// Which part of the outermost dimension belongs here; `None`: all.
    pub slice: Option<Range<usize>>,
    /// The block it goes to.
    pub block: BlockIndex,
    /// Name inside that block.
    pub local: String,
    /// What it is for.
    pub role: Role,
}

/// A block before its sizes are known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockPlan {
    /// Name for messages.
    pub name: String,
    /// Whether it is streamed.
    pub placement: Placement,
    /// Decoder layer that it belongs to.
    pub layer: Option<usize>,
    /// Whether it is visited only in passes with pictures. Such blocks come before all others.
    pub only_with_vision: bool,
    /// Whether it treats every token alone. All micro-batches then pass through it as one: state tensors
    /// `[batch, sequence, ..]` arrive as `[1, tokens, ..]`, the tokens of all micro-batches, and are handed
    /// out the same way; tensors of other shapes stay aside. The context is empty.
    pub is_tokenwise: bool,
}

impl BlockPlan {
    /// A block for every pass and micro-batch.
    pub fn new(name: impl Into<String>, placement: Placement, layer: Option<usize>) -> Self {
        Self { name: name.into(), placement, layer, only_with_vision: false, is_tokenwise: false }
    }

    /// The same block, for passes with pictures alone.
    #[must_use]
    pub fn only_with_vision(self) -> Self {
        Self { only_with_vision: true, ..self }
    }

    /// The same block, which treats every token alone.
    #[must_use]
    pub fn tokenwise(self) -> Self {
        Self { is_tokenwise: true, ..self }
    }
}

/// Which checkpoint tensor goes to which block under which name.
///
/// Streamed blocks come first, in the order of a forward pass; a checkpoint tensor may occur several
/// times (tied weights, slices).
#[derive(Debug, Clone)]
pub struct WeightTable {
    /// Element type of the published checkpoint, which `synth` writes. A checkpoint at hand may differ.
    pub dtype: Dtype,
    /// The blocks in order.
    pub blocks: Vec<BlockPlan>,
    /// Every tensor of every block.
    pub weights: Vec<Weight>,
}

impl WeightTable {
    /// An empty table for a checkpoint published in `dtype`.
    pub fn new(dtype: Dtype) -> Self {
        Self { dtype, blocks: Vec::new(), weights: Vec::new() }
    }

    /// Adds one streamed block per decoder layer. `name` and the rows contain `{n}`.
    #[must_use]
    pub fn layers(mut self, name: &str, num_layers: usize, rows: &[Row<'_>]) -> Self {
        for layer in 0..num_layers {
            self.add(BlockPlan::new(name, Placement::Streamed, Some(layer)), layer, rows);
        }
        self
    }

    /// Adds a block that stays on the device. Its names are visible from every block.
    #[must_use]
    pub fn resident(mut self, name: &str, rows: &[Row<'_>]) -> Self {
        self.add(BlockPlan::new(name, Placement::Resident, None), 0, rows);
        self
    }

    /// Adds tables of which only rows are looked up, by [`Scope::embedding`](crate::scope::Scope::embedding).
    #[must_use]
    pub fn gathered(mut self, name: &str, rows: &[Row<'_>]) -> Self {
        self.add(BlockPlan::new(name, Placement::Gathered, None), 0, rows);
        self
    }

    /// Adds what only [`Model::final_hidden`](crate::family::Model::final_hidden) and
    /// [`Model::logits`](crate::family::Model::logits) use. At most one block.
    #[must_use]
    pub fn head(mut self, name: &str, rows: &[Row<'_>]) -> Self {
        self.add(BlockPlan::new(name, Placement::Head, None), 0, rows);
        self
    }

    /// Adds one block. `number` takes the place of `{n}` in its name and in those of the rows.
    pub fn add(&mut self, plan: BlockPlan, number: usize, rows: &[Row<'_>]) {
        let number = number.to_string();
        let block = BlockIndex(self.blocks.len());
        self.blocks.push(BlockPlan { name: plan.name.replace("{n}", &number), ..plan });
        self.weights.extend(rows.iter().map(|row| Weight {
            checkpoint: row.checkpoint.replace("{n}", &number),
            shape: row.shape.clone(),
            slice: row.slice.clone(),
            block,
            local: row.local.to_owned(),
            role: row.role,
        }));
    }

    /// How many blocks are only for passes with pictures: the first ones.
    pub fn num_vision_blocks(&self) -> usize {
        self.blocks.iter().take_while(|block| block.only_with_vision).count()
    }

    /// How many blocks are streamed.
    pub fn num_streamed(&self) -> usize {
        self.blocks.iter().filter(|block| block.placement == Placement::Streamed).count()
    }

    /// Every place where an adapter may attach, in table order: linears, routers and experts.
    ///
    /// The experts of a layer in several blocks are a site in each of them. PEFT nests its wrappers in the
    /// order in which a module declares its parameters, so the table lists them in this order too.
    pub fn sites(&self) -> Vec<Site> {
        self.weights.iter().filter_map(|weight| self.site(weight)).collect()
    }

    fn site(&self, weight: &Weight) -> Option<Site> {
        let module = |name: &str| name.strip_suffix(".weight").map(str::to_owned);
        let experts = |weight: &Weight| {
            let num_experts = *weight.shape.first()?;
            let experts = weight.slice.clone().unwrap_or(0..num_experts);
            Some(SiteKind::Experts { num_experts, experts })
        };
        let (kind, local, path) = match weight.role {
            Role::Linear => (SiteKind::Linear, module(&weight.local)?, module(&weight.checkpoint)?),
            Role::Router => {
                (SiteKind::Parameter, module(&weight.local)?, weight.checkpoint.clone())
            }
            Role::Experts(_) => (experts(weight)?, weight.local.clone(), weight.checkpoint.clone()),
            Role::Mxfp4Blocks => {
                let unpacked = |name: &str| name.strip_suffix("_blocks").map(str::to_owned);
                (experts(weight)?, unpacked(&weight.local)?, unpacked(&weight.checkpoint)?)
            }
            Role::Embedding
            | Role::NormScale
            | Role::Bias
            | Role::Mxfp4Scales
            | Role::Buffer(_) => return None,
        };
        let (out_features, in_features) = match (weight.role, &weight.shape[..]) {
            (Role::Experts(ExpertLayout::InOut), &[_, inner, outer]) => (outer, inner),
            (Role::Experts(ExpertLayout::OutIn), &[_, outer, inner]) => (outer, inner),
            (Role::Mxfp4Blocks, &[_, outer, groups, half]) => (outer, groups * half * 2),
            (Role::Linear | Role::Router, &[outer, inner]) => (outer, inner),
            _ => return None,
        };
        let plan = &self.blocks[weight.block.0];
        let (layer, is_vision) = (plan.layer, plan.only_with_vision);
        let block = weight.block;
        Some(Site { block, layer, local, module: path, kind, is_vision, in_features, out_features })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_experts_are_sites_under_the_name_that_they_have_unpacked() {
        let name = |part: &str| format!("l.{{n}}.mlp.experts.down_proj_{part}");
        let rows = [
            (Role::Mxfp4Blocks, "blocks", vec![4, 6, 3, 16]),
            (Role::Mxfp4Scales, "scales", vec![4, 6, 3]),
            (Role::Bias, "bias", vec![4, 6]),
        ];
        let rows =
            rows.map(|(role, part, shape)| (role, name(part), format!("down_{part}"), shape));
        let rows: Vec<_> = (rows.iter())
            .map(|(role, checkpoint, local, shape)| row(checkpoint, local, *role, shape).part(2..4))
            .collect();
        let sites = WeightTable::new(Dtype::BF16).layers("l.{n}", 1, &rows).sites();
        let [site] = &sites[..] else { panic!("{sites:?}") };
        assert_eq!((&*site.local, &*site.module), ("down", "l.0.mlp.experts.down_proj"));
        assert_eq!(site.kind, SiteKind::Experts { num_experts: 4, experts: 2..4 });
        assert_eq!((site.in_features, site.out_features), (96, 6));
        let dtypes: Vec<_> = rows.iter().map(|row| row.role.buffer_dtype()).collect();
        assert_eq!(dtypes, [Some(Dtype::U8), Some(Dtype::U8), None]);
    }

    #[test]
    fn linears_routers_and_experts_are_sites_and_experts_of_each_block_are_their_own() {
        let [m, h, e] = [6, 8, 4];
        let first = [
            row("l.{n}.q.weight", "q.weight", Role::Linear, &[h, h]),
            row("l.{n}.norm.weight", "norm.weight", Role::NormScale, &[h]),
            row("l.{n}.mlp.gate.weight", "mlp.gate.weight", Role::Router, &[e, h]),
        ];
        let mut table = WeightTable::new(Dtype::BF16);
        let tower = [row("v.fc.weight", "fc.weight", Role::Linear, &[h, m])];
        let plan = BlockPlan::new("vision", Placement::Streamed, None).only_with_vision();
        table.add(plan, 0, &tower);
        table.add(BlockPlan::new("l.{n}", Placement::Streamed, Some(0)), 0, &first);
        for group in 0..2 {
            let rows = [
                row("l.0.up", "up", Role::Experts(ExpertLayout::InOut), &[e, h, 2 * m]),
                row("l.0.down", "down", Role::Experts(ExpertLayout::OutIn), &[e, h, m]),
            ];
            let rows = rows.map(|row| row.part(2 * group..2 * group + 2));
            let plan = BlockPlan::new("l.0.{n}", Placement::Streamed, Some(0)).tokenwise();
            table.add(plan, group, &rows);
        }
        let sites = table.sites();
        let seen: Vec<_> = (sites.iter())
            .map(|site| {
                let size = (site.in_features, site.out_features);
                (site.block.0, &*site.local, &*site.module, site.is_vision, size)
            })
            .collect();
        let expected = [
            (0, "fc", "v.fc", true, (m, h)),
            (1, "q", "l.0.q", false, (h, h)),
            (1, "mlp.gate", "l.0.mlp.gate.weight", false, (h, e)),
            (2, "up", "l.0.up", false, (h, 2 * m)),
            (2, "down", "l.0.down", false, (m, h)),
            (3, "up", "l.0.up", false, (h, 2 * m)),
            (3, "down", "l.0.down", false, (m, h)),
        ];
        assert_eq!(seen, expected);
        assert_eq!(sites[2].kind, SiteKind::Parameter);
        assert_eq!(sites[5].kind, SiteKind::Experts { num_experts: 4, experts: 2..4 });
        assert_eq!(
            (sites[1].parameter(), sites[5].parameter()),
            ("l.0.q.weight".into(), "l.0.up".into())
        );
    }
}
