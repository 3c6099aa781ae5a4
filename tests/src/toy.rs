//! A toy model whose blocks cover what the engine must cope with: uneven sizes, integer and boolean
//! buffers, tied tensors, no parameters at all, and layers cut into three blocks.

use std::path::Path;

use blockstreamer_core::Result;
use blockstreamer_core::adapter::{Adapter, AdapterCall, Trainable};
use blockstreamer_core::batch::Batch;
use blockstreamer_core::block::{BlockIndex, Placement};
use blockstreamer_core::context::Context;
use blockstreamer_core::device::{dropout, upload};
use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::family::{Model, ModelDimensions};
use blockstreamer_core::scope::Scope;
use blockstreamer_core::state::{HIDDEN, State};
use blockstreamer_core::weights::{BlockPlan, WeightTable};
use tch::{Device, Kind, Tensor};

/// Width of the hidden states.
pub const HIDDEN_SIZE: i64 = 8;
/// Size of the vocabulary.
pub const VOCAB_SIZE: i64 = 11;

/// Names of the streamed blocks.
pub const BLOCK_NAMES: [&str; 12] = [
    "part.0", "part.1", "part.2", "part.3", "part.4", "part.5", "part.6", "part.7", "part.8",
    "part.9", "part.10", "part.11",
];

/// What one block computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// `h + down(tanh(up(h)))` with this inner width.
    Mlp(i64),
    /// `tanh(1.5 h)`: no parameters.
    Plain,
    /// Permutes features by an Int64 buffer where a Bool buffer says so.
    Permute,
    /// `h + b(tanh(a(h)))` with `a` and `b` the same matrix, also across blocks, stored as BF16.
    Tied,
    /// `h * extra` with a tensor of the context.
    Extra,
    /// First third of a layer: keeps the residual, makes the normed hidden.
    Split1,
    /// Second third: makes a gate and a partial result.
    Split2,
    /// Last third: puts them together.
    Split3,
    /// Returns a view of its own weight as a state tensor.
    Alias,
    /// As [`Part::Split2`], for the tokens of all micro-batches at a time.
    Tokens2,
    /// As [`Part::Split3`], likewise.
    Tokens3,
    /// `p + tanh(see(p))` on pictures, for passes that have any.
    See,
    /// Adds the mean of the pictures to the hidden states and hands them on as a feature.
    Merge,
    /// Adds the mean of the feature, where there is one.
    Recall,
}

impl Part {
    fn tensors(self, block: usize) -> Vec<(&'static str, Tensor)> {
        let h = HIDDEN_SIZE;
        let seed = block as f64 + 1.0;
        match self {
            Self::Mlp(inner) => vec![
                ("up.weight", wave(&[inner, h], seed)),
                ("down.weight", wave(&[h, inner], seed + 0.5)),
            ],
            Self::Plain | Self::Extra | Self::Merge | Self::Recall => vec![],
            Self::See => vec![("see.weight", wave(&[h, h], seed))],
            Self::Permute => vec![
                ("order", Tensor::from_slice(&[3_i64, 1, 0, 2, 7, 6, 5, 4])),
                ("moved", Tensor::from_slice(&[true, false, true, true, false, true, true, false])),
            ],
            Self::Tied => {
                let shared = wave(&[h, h], 0.7).to_kind(Kind::BFloat16);
                vec![("a.weight", shared.shallow_clone()), ("b.weight", shared)]
            }
            Self::Split1 => vec![("norm", wave(&[h], seed))],
            Self::Split2 | Self::Tokens2 => {
                vec![
                    ("gate.weight", wave(&[h, h], seed)),
                    ("value.weight", wave(&[h, h], seed + 0.3)),
                ]
            }
            Self::Split3 | Self::Tokens3 => vec![("out.weight", wave(&[h, h], seed))],
            Self::Alias => vec![("up.weight", wave(&[h, h], seed))],
        }
    }
}

/// A model made of such blocks.
#[derive(Debug, Clone)]
pub struct ToyModel {
    /// The streamed blocks in order.
    pub parts: Vec<Part>,
}

impl ToyModel {
    /// One of everything but [`Part::Alias`].
    pub fn mixed() -> Self {
        use Part::{Extra, Mlp, Permute, Plain, Split1, Split2, Split3, Tied};
        let parts =
            vec![Mlp(5), Permute, Plain, Tied, Extra, Split1, Split2, Split3, Tied, Mlp(24)];
        Self { parts }
    }

    /// Layers cut into three blocks each.
    pub fn split(num_layers: usize) -> Self {
        Self { parts: [Part::Split1, Part::Split2, Part::Split3].repeat(num_layers) }
    }

    /// Pictures in two blocks, then layers of which two thirds treat tokens alone.
    pub fn seeing() -> Self {
        use Part::{Merge, Mlp, Recall, See, Split1, Tokens2, Tokens3};
        let parts = vec![
            See,
            See,
            Merge,
            Split1,
            Tokens2,
            Tokens3,
            Recall,
            Split1,
            Tokens2,
            Tokens3,
            Mlp(5),
        ];
        Self { parts }
    }

    /// Whether a block is only for passes with pictures.
    pub fn is_for_vision(&self, block: usize) -> bool {
        matches!(self.parts[block], Part::See | Part::Merge)
    }

    /// Equal MLP blocks.
    pub fn equal(num_blocks: usize) -> Self {
        Self { parts: vec![Part::Mlp(16); num_blocks] }
    }
}

impl Model for ToyModel {
    fn dimensions(&self) -> ModelDimensions {
        ModelDimensions {
            hidden_size: HIDDEN_SIZE as usize,
            vocab_size: VOCAB_SIZE as usize,
            num_hidden_layers: self.parts.len(),
            num_experts: 0,
            num_experts_per_tok: 0,
            max_position_embeddings: 64,
            initializer_range_ppm: 20_000,
        }
    }

    fn weights(&self) -> Result<WeightTable> {
        let mut table = WeightTable::new(Dtype::F32);
        for (block, part) in self.parts.iter().enumerate() {
            let plan = BlockPlan::new(BLOCK_NAMES[block], Placement::Streamed, None);
            table.blocks.push(match part {
                Part::Tokens2 | Part::Tokens3 => plan.tokenwise(),
                _ if self.is_for_vision(block) => plan.only_with_vision(),
                _ => plan,
            });
        }
        Ok(table)
    }

    fn ignores(&self, _name: &str) -> Result<bool> {
        Ok(false)
    }

    fn embed(&self, scope: &dyn Scope, batch: &Batch) -> Result<(Context, State)> {
        let hidden = scope.embedding("embed", &batch.input_ids)?;
        let mut context = Context::default();
        let extra = upload(&wave(&[HIDDEN_SIZE], 9.0), scope.device())?;
        context.tensors.insert("extra", extra.f_to_kind(scope.compute_kind())?);
        let mut state = State::new().with(HIDDEN, hidden);
        if let Some(images) = &batch.images {
            state.insert("pictures", images.pixels.f_to_kind(scope.compute_kind())?);
        }
        Ok((context, state))
    }

    fn forward_block(
        &self,
        block: BlockIndex,
        scope: &dyn Scope,
        context: &Context,
        mut state: State,
    ) -> Result<State> {
        let hidden = state.take(HIDDEN)?;
        let next = match self.parts[block.0] {
            Part::Mlp(_) => {
                let inner = scope.linear("up", &hidden)?.f_tanh()?;
                hidden.f_add(&scope.linear("down", &inner)?)?
            }
            Part::Plain => hidden.f_mul_scalar(1.5)?.f_tanh()?,
            Part::Permute => {
                let permuted = hidden.f_index_select(-1, &scope.tensor("order")?)?;
                permuted.f_where_self(&scope.tensor("moved")?, &hidden)?
            }
            Part::Tied => {
                let inner = scope.linear("a", &hidden)?.f_tanh()?;
                hidden.f_add(&scope.linear("b", &inner)?)?
            }
            Part::Extra => hidden.f_mul(context.tensors.get("extra")?)?,
            Part::Split1 => {
                state.insert("residual", hidden.shallow_clone());
                hidden.f_mul(&scope.tensor("norm")?)?
            }
            Part::Split2 | Part::Tokens2 => {
                state.insert("gate", scope.linear("gate", &hidden)?.f_sigmoid()?);
                // The choice of a discrete index flows along and asks for no gradient.
                state.insert("choice", hidden.f_argmax(-1, true)?);
                scope.linear("value", &hidden)?
            }
            Part::Split3 | Part::Tokens3 => {
                let gate = state.take("gate")?;
                let chosen = hidden.f_gather(-1, &state.take("choice")?, false)?;
                let mixed = hidden.f_mul(&gate)?.f_add(&chosen)?;
                state.take("residual")?.f_add(&scope.linear("out", &mixed)?)?
            }
            Part::See => {
                let pictures = state.take("pictures")?;
                let seen = scope.linear("see", &pictures)?.f_tanh()?;
                state.insert("pictures", pictures.f_add(&seen)?);
                hidden
            }
            Part::Merge => {
                let pictures = state.take("pictures")?;
                let merged = hidden.f_add(&pictures.f_mean_dim(0, false, None)?)?;
                state.insert("feature", pictures);
                merged
            }
            Part::Recall => match state.find("feature") {
                Some(_) => hidden.f_add(&state.take("feature")?.f_mean_dim(0, false, None)?)?,
                None => hidden,
            },
            Part::Alias => {
                state.insert("weight", scope.tensor("up.weight")?);
                scope.linear("up", &hidden)?
            }
        };
        Ok(state.with(HIDDEN, next))
    }

    fn final_hidden(
        &self,
        scope: &dyn Scope,
        _context: &Context,
        mut state: State,
    ) -> Result<Tensor> {
        Ok(state.take(HIDDEN)?.f_mul(&scope.tensor("final_norm")?)?)
    }

    fn logits(&self, scope: &dyn Scope, hidden: &Tensor) -> Result<Tensor> {
        scope.linear("head", hidden)
    }
}

/// Deterministic values between -0.6 and 0.6.
pub fn wave(shape: &[i64], seed: f64) -> Tensor {
    let numbers = Tensor::arange(shape.iter().product::<i64>(), (Kind::Float, Device::Cpu));
    ((numbers * 1.7 + seed).sin() * 0.6).view(shape)
}

/// Name, placement and named tensors of a block.
pub type Block = (&'static str, Placement, Vec<(&'static str, Tensor)>);

/// The blocks of a toy model for `RamSource::from_tensors`: the streamed ones, then the head, so that its
/// index is the number of streamed blocks, then the table to gather from and a resident.
pub fn blocks_of(model: &ToyModel) -> Vec<Block> {
    let streamed = model.parts.iter().enumerate();
    let streamed = streamed
        .map(|(block, part)| (BLOCK_NAMES[block], Placement::Streamed, part.tensors(block)));
    let table = |seed| wave(&[VOCAB_SIZE, HIDDEN_SIZE], seed);
    let others = [
        ("head", Placement::Head, vec![("head.weight", table(3.0))]),
        ("embedding", Placement::Gathered, vec![("embed.weight", table(5.0))]),
        ("norm", Placement::Resident, vec![("final_norm", wave(&[HIDDEN_SIZE], 4.0))]),
    ];
    streamed.chain(others).collect()
}

/// An adapter for tests: `output * scale + dropout(output)` at chosen sites, with scales of their own, shared
/// over blocks, or registered and never used.
#[derive(Debug)]
pub struct Probe {
    trainables: Vec<Trainable>,
    probability: f64,
}

impl Probe {
    /// A scale `[1]` of its own in each of `blocks`, one more that they all share, and one unused.
    pub fn new(blocks: &[usize], probability: f64, device: Device) -> Self {
        let leaf =
            |value: f32| Tensor::from_slice(&[value]).to_device(device).set_requires_grad(true);
        let indices =
            |blocks: &[usize]| blocks.iter().map(|block| BlockIndex(*block)).collect::<Vec<_>>();
        let mut trainables: Vec<Trainable> = blocks
            .iter()
            .map(|block| Trainable {
                name: format!("own.{block}"),
                blocks: indices(&[*block]),
                tensor: leaf(0.9 + *block as f32 * 0.01),
            })
            .collect();
        for name in ["shared", "unused"] {
            trainables.push(Trainable {
                name: name.into(),
                blocks: indices(blocks),
                tensor: leaf(1.1),
            });
        }
        Self { trainables, probability }
    }
}

impl Adapter for Probe {
    fn trainables(&self) -> &[Trainable] {
        &self.trainables
    }

    fn linear(&self, call: AdapterCall<'_>, _x: &Tensor, output: Tensor) -> Result<Tensor> {
        let own = format!("own.{}", call.block);
        let find = |name: &str| self.trainables.iter().find(|trainable| trainable.name == name);
        let (Some(own), Some(shared)) = (find(&own), find("shared")) else { return Ok(output) };
        let scale = own.tensor.f_mul(&shared.tensor)?.f_to_kind(output.kind())?;
        let dropped = match call.dropout_seed {
            Some(seed) => dropout(&output, self.probability, seed ^ call.site.len() as u64)?,
            None => output.shallow_clone(),
        };
        Ok(dropped.f_mul(&scale)?)
    }

    fn export(&self, _directory: &Path, _base_model: &str) -> Result<()> {
        Ok(())
    }
}
