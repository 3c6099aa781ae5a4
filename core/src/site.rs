//! Sites: the places where an adapter may attach.

use std::ops::Range;

use crate::block::BlockIndex;

/// What is adapted, and how PEFT reaches it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SiteKind {
    /// A linear module: PEFT's `target_modules`.
    Linear,
    /// The matrix of a module that is no linear, such as a router: PEFT's `target_parameters`.
    Parameter,
    /// Fused experts, of which `experts` are in the block: PEFT's `target_parameters`.
    Experts {
        /// Experts of the whole layer.
        num_experts: usize,
        /// Those in this block.
        experts: Range<usize>,
    },
}

/// A place where an adapter may attach: one linear, or the fused experts, of one block.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Site {
    /// The block that holds the weight.
    pub block: BlockIndex,
    /// Layer that the block belongs to, counted from 0; `None` outside the decoder layers (the head).
    pub layer: Option<usize>,
    /// Name inside the block, as a family passes it to `Scope::linear`: `self_attn.q_proj`.
    pub local: String,
    /// Path as PEFT sees it: of the module for a linear, `model.language_model.layers.3.self_attn.q_proj`, of
    /// the parameter for the other kinds, `model.language_model.layers.3.mlp.experts.gate_up_proj`.
    pub module: String,
    /// What it is.
    pub kind: SiteKind,
    /// Whether it is in a block that is visited only in passes with pictures.
    pub is_vision: bool,
    /// Width of the input; of one expert where there are several.
    pub in_features: usize,
    /// Width of the output, likewise.
    pub out_features: usize,
}

impl Site {
    /// Path of the weight as PEFT's `target_parameters` see it.
    pub fn parameter(&self) -> String {
        match self.kind {
            SiteKind::Linear => format!("{}.weight", self.module),
            SiteKind::Parameter | SiteKind::Experts { .. } => self.module.clone(),
        }
    }

    /// Experts of the whole layer; 1 where there are none.
    pub fn num_experts(&self) -> usize {
        match self.kind {
            SiteKind::Linear | SiteKind::Parameter => 1,
            SiteKind::Experts { num_experts, .. } => num_experts,
        }
    }
}
