//! The hinge between families and everything else.
//!
//! A family says *which* linear; the host knows *how*: in which format the weight was staged, whether
//! an adapter sits there, which kernel computes it. A family that needs an `if format` or an
//! `if adapter` has found a fault in this trait.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::context::Context;
use crate::error::Result;

/// What one attention call needs beyond queries, keys and values.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct AttentionOptions<'a> {
    /// Factor on the scores, usually `head_dim^-0.5`.
    pub scale: f64,
    /// Positions that a query sees, counted back from its own, which is one of them. `None`: all that the
    /// pattern allows.
    pub window: Option<usize>,
    /// A score per head that takes part in the softmax and has no value, `[num_attention_heads]`, compute
    /// dtype. It is not scaled. `None`: there is none.
    pub sinks: Option<&'a Tensor>,
}

impl<'a> AttentionOptions<'a> {
    /// Plain attention with this factor on the scores.
    pub fn new(scale: f64) -> Self {
        Self { scale, window: None, sinks: None }
    }

    /// The same over a sliding window of so many positions.
    #[must_use]
    pub fn window(self, window: Option<usize>) -> Self {
        Self { window, ..self }
    }

    /// The same with attention sinks.
    #[must_use]
    pub fn sinks(self, sinks: &'a Tensor) -> Self {
        Self { sinks: Some(sinks), ..self }
    }
}

/// Which experts each token goes to.
#[derive(Debug)]
pub struct Routing {
    /// `[tokens, top_k]`, Int64, numbers among all experts of the layer; those of one token differ.
    pub experts: Tensor,
    /// Factor on each one's output, `[tokens, top_k]`, compute dtype.
    pub weights: Tensor,
}

/// How gate and up projection lie in the rows of one fused matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateUp {
    /// All gate rows, then all up rows.
    Concatenated,
    /// Gate and up rows in turn.
    Interleaved,
}

/// What lies between the two projections of an expert.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ExpertActivation {
    /// `silu(gate) * up`
    Silu,
    /// `(up + 1) * gate * sigmoid(alpha * gate)`, with the gate cut off above `limit` and `up` on both
    /// sides; what is cut off has no gradient. Of gpt-oss.
    ClampedSwiglu {
        /// Factor in the sigmoid.
        alpha: f64,
        /// Where gate and up are cut off.
        limit: f64,
    },
}

/// What the experts of a block are.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertShape {
    /// Those of all the layer's experts that are in the block; the first one is the first of the tensor.
    pub experts: Range<usize>,
    /// How gate and up projection lie in the fused matrix.
    pub gate_up: GateUp,
    /// What is computed between the projections.
    pub activation: ExpertActivation,
}

/// What a family's code computes with while a block is on the device.
///
/// The host implements it; a plugin receives it as a trait object, so that device state and caches
/// exist once in the process. Names are local to the block, with the resident tensors visible from
/// every block. Tensors returned are valid until the call into the family returns: a family keeps
/// none of them.
pub trait Scope {
    /// `x W^T + b` with the weight `{site}.weight`, the bias `{site}.bias` if the block has one, and
    /// whatever adapter is attached there.
    ///
    /// `x` is `[.., in_features]` in the compute dtype; the result is `[.., out_features]`.
    ///
    /// # Errors
    /// [`Error::Tensor`](crate::Error::Tensor) when the block has no such weight or `x` does not fit it.
    fn linear(&self, site: &str, x: &Tensor) -> Result<Tensor>;

    /// Rows of the embedding `{site}.weight` `[num_embeddings, hidden_size]` for `ids` (Int64, any
    /// shape), in the compute dtype: `[ids.., hidden_size]`. A table of a
    /// [`Placement::Gathered`](crate::block::Placement::Gathered) block may lie in host memory, where no
    /// other method finds it.
    ///
    /// # Errors
    /// [`Error::Tensor`](crate::Error::Tensor) when there is no such weight.
    fn embedding(&self, site: &str, ids: &Tensor) -> Result<Tensor>;

    /// A plain tensor such as a norm weight; real numbers come in the compute dtype.
    ///
    /// # Errors
    /// [`Error::Tensor`](crate::Error::Tensor) when the block has no such tensor.
    fn tensor(&self, name: &str) -> Result<Tensor>;

    /// A plain tensor exactly as stored, for the few that a model card keeps in another dtype.
    ///
    /// # Errors
    /// [`Error::Tensor`](crate::Error::Tensor) when the block has no such tensor.
    fn stored_tensor(&self, name: &str) -> Result<Tensor>;

    /// Softmax attention under the pattern of `context`.
    ///
    /// `query` is `[batch, num_attention_heads, sequence, head_dim]`; `key` and `value` have
    /// `num_key_value_heads`, which divides the former (grouped-query attention).
    /// `site` names the attention within the block, for kernels that keep something per site.
    /// The result has the shape of `query`, with the head dimension of `value`.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch) when the shapes do not fit.
    fn attention(
        &self,
        site: &str,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        context: &Context,
        options: &AttentionOptions<'_>,
    ) -> Result<Tensor>;

    /// The weighted outputs of a block's experts, added to `sum`.
    ///
    /// The weights are `{site}.gate_up_proj` and `{site}.down_proj`
    /// ([`Role::Experts`](crate::weights::Role::Experts)), or packed, `{site}.gate_up_proj_blocks` and
    /// `{site}.gate_up_proj_scales` ([`Role::Mxfp4Blocks`](crate::weights::Role::Mxfp4Blocks)) and the same
    /// for the other; biases `{site}.gate_up_proj_bias` and `{site}.down_proj_bias`, `[num_experts,
    /// out_features]`, are added where the block has them. An adapter may sit on either projection. `x` is
    /// `[tokens, hidden_size]` in the compute dtype and so is the result. `sum` is what the blocks before
    /// put out for the same tokens; `None` begins with zeros. In fp32 experts add in the order of their
    /// numbers, so that layers in one and in several blocks give the same bits; in 16 bits the host may add
    /// more exactly than one after another would.
    ///
    /// # Errors
    /// [`Error::Tensor`](crate::Error::Tensor) when the weights do not fit.
    fn experts(
        &self,
        site: &str,
        x: &Tensor,
        routing: &Routing,
        shape: &ExpertShape,
        sum: Option<&Tensor>,
    ) -> Result<Tensor>;

    /// The dtype of activations.
    fn compute_kind(&self) -> Kind;

    /// Where everything is computed.
    fn device(&self) -> Device;
}
