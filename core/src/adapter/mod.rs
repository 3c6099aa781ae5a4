//! Adapters: small trainable changes on frozen linears and experts.

use std::fmt;
use std::ops::Range;
use std::path::Path;

use tch::{Kind, Tensor};

use crate::block::BlockIndex;
use crate::error::Result;
use crate::numerics::LowRankFactors;

mod lora;
mod peft;
mod random;
mod targets;
#[cfg(test)]
mod tests;

pub use lora::{Lora, LoraOptions, LoraShape};
pub use targets::{LayerRule, ModuleRule};

/// A trainable tensor and the blocks that use it.
#[derive(Debug)]
pub struct Trainable {
    /// Unique name; for PEFT adapters the key in `adapter_model.safetensors`.
    pub name: String,
    /// The blocks whose forward reads it. More than one when blocks share it. A block that is not
    /// streamed stands for the head: its linears get gradients where `final_hidden` and `logits` use them.
    pub blocks: Vec<BlockIndex>,
    /// The fp32 master: a leaf on the engine's device that requires gradients.
    pub tensor: Tensor,
}

/// What an adapter needs to know of one call.
#[derive(Debug, Clone, Copy)]
pub struct AdapterCall<'a> {
    /// The block that is running.
    pub block: BlockIndex,
    /// The site inside it, as the family named it.
    pub site: &'a str,
    /// Seed for this (run, step, block, micro-batch); the recompute gets the same one.
    /// `None`: dropout is off.
    pub dropout_seed: Option<u64>,
}

/// Small trainable changes on frozen linears.
///
/// Gradients never come back through the adapter itself: the executor asks libtorch for the gradients
/// of [`Adapter::trainables`] and hands them to a sink.
pub trait Adapter: Send + fmt::Debug {
    /// All trainable tensors, in a fixed order.
    fn trainables(&self) -> &[Trainable];

    /// The output of the linear at `call.site`, changed. `x` `[.., in_features]` and
    /// `output` `[.., out_features]` are in the compute dtype, and so is the result.
    /// Returns `output` itself where nothing is attached.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch) when libtorch refuses.
    fn linear(&self, call: AdapterCall<'_>, x: &Tensor, output: Tensor) -> Result<Tensor>;

    /// What is added to the matrices at `call.site` of the layer's experts with these numbers, in `kind`,
    /// with a graph. The one matrix of a linear or a router has the number 0; [merging](mod@crate::merge)
    /// asks for it. `None` where nothing is attached, which is the default.
    ///
    /// # Errors
    /// [`Error::Adapter`](crate::Error::Adapter) when the adapter was made for fewer experts.
    fn expert_factors(
        &self,
        _call: AdapterCall<'_>,
        _experts: Range<usize>,
        _kind: Kind,
    ) -> Result<Option<LowRankFactors>> {
        Ok(None)
    }

    /// Writes the adapter as PEFT reads it into the folder `directory`, whole or not at all.
    /// `base_model` goes into its configuration.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) when the folder cannot be written.
    fn export(&self, directory: &Path, base_model: &str) -> Result<()>;
}
