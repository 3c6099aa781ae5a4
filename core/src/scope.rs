//! The hinge between families and everything else.
//!
//! A family says *which* linear; the host knows *how*: in which format the weight was staged, whether
//! an adapter sits there, which kernel computes it. A family that needs an `if format` or an
//! `if adapter` has found a fault in this trait.

use tch::{Device, Kind, Tensor};

use crate::context::Context;
use crate::error::Result;

/// What one attention call needs beyond queries, keys and values.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct AttentionOptions {
    /// Factor on the scores, usually `head_dim^-0.5`.
    pub scale: f64,
}

impl AttentionOptions {
    /// Plain attention with this factor on the scores.
    pub fn new(scale: f64) -> Self {
        Self { scale }
    }
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
        options: &AttentionOptions,
    ) -> Result<Tensor>;

    /// The dtype of activations.
    fn compute_kind(&self) -> Kind;

    /// Where everything is computed.
    fn device(&self) -> Device;
}
