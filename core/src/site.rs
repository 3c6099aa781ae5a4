//! Sites: the places where an adapter may attach.

use crate::block::BlockIndex;

/// A place where an adapter may attach: one linear of one block.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Site {
    /// The block that holds the weight.
    pub block: BlockIndex,
    /// Layer that the block belongs to, counted from 0; `None` outside the decoder layers (the head).
    pub layer: Option<usize>,
    /// Name inside the block, as a family passes it to `Scope::linear`: `self_attn.q_proj`.
    pub local: String,
    /// Module path as PEFT sees it: `model.language_model.layers.3.self_attn.q_proj`.
    pub module: String,
    /// Width of the input.
    pub in_features: usize,
    /// Width of the output.
    pub out_features: usize,
}
