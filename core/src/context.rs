//! What all blocks of one micro-batch share.

use tch::Tensor;

use crate::state::NamedTensors;

/// Which positions may see which, apart from a layer's own window.
///
/// A description, not a matrix: kernels that know causality never see a mask of
/// `[sequence, sequence]`.
#[derive(Debug, Default)]
pub struct AttentionPattern {
    /// Positions see only themselves and earlier ones.
    pub causal: bool,
    /// Which positions are tokens, `[batch, sequence]`, Bool, on the device. `None`: all.
    pub key_mask: Option<Tensor>,
    /// Which packed sample a position belongs to, `[batch, sequence]`, Int64, on the device.
    /// Positions see only their own sample. `None`: one sample per row.
    pub segments: Option<Tensor>,
}

/// What all blocks of one micro-batch share: rope tables, mask description, features for later layers.
///
/// A tensor in it may ask for gradients; the executor returns the sum over all blocks.
#[derive(Debug, Default)]
pub struct Context {
    /// Family-chosen tensors, for example `cos` and `sin`.
    pub tensors: NamedTensors,
    /// Counts and lengths that shape the computation, on the host. They ask for no gradients.
    pub on_host: NamedTensors,
    /// The mask description that [`Scope::attention`](crate::scope::Scope::attention) applies.
    pub attention: AttentionPattern,
}

impl Clone for Context {
    fn clone(&self) -> Self {
        let share = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::shallow_clone);
        Self {
            tensors: self.tensors.clone(),
            on_host: self.on_host.clone(),
            attention: AttentionPattern {
                causal: self.attention.causal,
                key_mask: share(&self.attention.key_mask),
                segments: share(&self.attention.segments),
            },
        }
    }
}
