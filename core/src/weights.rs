//! The weight table: which checkpoint tensor goes to which block under which name.
//!
//! A family writes one literal table. From it core derives the block layout, the check that a
//! checkpoint is complete and has the right shapes, the adapter sites and the synthetic checkpoint.

use std::ops::Range;

use crate::block::{BlockIndex, Placement};
use crate::dtype::Dtype;
use crate::site::Site;

/// What a tensor is for. Decides how `synth` fills it and whether an adapter may attach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Weight `[out_features, in_features]` of a linear: an adapter site. Drawn from a normal distribution.
    Linear,
    /// Token embedding `[num_embeddings, hidden_size]`. Drawn from a normal distribution.
    Embedding,
    /// Scale of a norm: close to one.
    NormScale,
    /// Bias: close to zero.
    Bias,
    /// Not a weight in the checkpoint's dtype but something that is stored in this one: packed codes,
    /// whole-number tables, masks.
    Buffer(Dtype),
}

impl Role {
    /// The dtype of a [`Role::Buffer`].
    pub fn buffer_dtype(self) -> Option<Dtype> {
        match self {
            Self::Buffer(dtype) => Some(dtype),
            Self::Linear | Self::Embedding | Self::NormScale | Self::Bias => None,
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
    /// What it is for.
    pub role: Role,
}

/// A [`Row`], for tables that read as tables.
pub fn row<'a>(checkpoint: &'a str, local: &'a str, role: Role, shape: &[usize]) -> Row<'a> {
    Row { checkpoint, local, shape: shape.to_vec(), role }
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
            self.push(name, Placement::Streamed, Some(layer), rows);
        }
        self
    }

    /// Adds a block that stays on the device. Its names are visible from every block.
    #[must_use]
    pub fn resident(mut self, name: &str, rows: &[Row<'_>]) -> Self {
        self.push(name, Placement::Resident, None, rows);
        self
    }

    /// Adds tables of which only rows are looked up, by [`Scope::embedding`](crate::scope::Scope::embedding).
    #[must_use]
    pub fn gathered(mut self, name: &str, rows: &[Row<'_>]) -> Self {
        self.push(name, Placement::Gathered, None, rows);
        self
    }

    /// Adds what only [`Model::final_hidden`](crate::family::Model::final_hidden) and
    /// [`Model::logits`](crate::family::Model::logits) use. At most one block.
    #[must_use]
    pub fn head(mut self, name: &str, rows: &[Row<'_>]) -> Self {
        self.push(name, Placement::Head, None, rows);
        self
    }

    /// Adds one block.
    pub fn push(
        &mut self,
        name: &str,
        placement: Placement,
        layer: Option<usize>,
        rows: &[Row<'_>],
    ) {
        let number = layer.map(|layer| layer.to_string()).unwrap_or_default();
        let block = BlockIndex(self.blocks.len());
        self.blocks.push(BlockPlan { name: name.replace("{n}", &number), placement, layer });
        self.weights.extend(rows.iter().map(|row| Weight {
            checkpoint: row.checkpoint.replace("{n}", &number),
            shape: row.shape.clone(),
            slice: None,
            block,
            local: row.local.to_owned(),
            role: row.role,
        }));
    }

    /// How many blocks are streamed.
    pub fn num_streamed(&self) -> usize {
        self.blocks.iter().filter(|block| block.placement == Placement::Streamed).count()
    }

    /// Every linear as an adapter site, in table order.
    pub fn linear_sites(&self) -> Vec<Site> {
        let linears = self.weights.iter().filter(|weight| weight.role == Role::Linear);
        linears
            .filter_map(|weight| {
                let [out_features, in_features] = weight.shape[..] else { return None };
                Some(Site {
                    block: weight.block,
                    layer: self.blocks[weight.block.0].layer,
                    local: weight.local.strip_suffix(".weight")?.to_owned(),
                    module: weight.checkpoint.strip_suffix(".weight")?.to_owned(),
                    in_features,
                    out_features,
                })
            })
            .collect()
    }
}
