//! Mixtures of experts: every token passes through a few of many small gated networks, each
//! `down(activation(gate_up(x)))`, and their outputs are added with the router's weights.

use tch::Tensor;

use crate::error::{Error, Result};
use crate::numerics::Mxfp4;
use crate::scope::{ExpertActivation, ExpertShape, GateUp, Routing};

mod check;
mod grouped;
mod looped;
mod packed;
mod slots;

pub(crate) use packed::EXPANSION_BYTES;

/// How experts are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExpertKernel {
    /// Expert by expert in the order of their numbers, each adding to the running sum in the compute
    /// dtype, as transformers' eager experts do. The host waits once per call. In fp32 a layer's experts in
    /// one call and in several give the same bits, forward and backward. Packed matrices are expanded one at a
    /// time, in backward again.
    Loop,
    /// bf16 and fp16: all experts in one product, and the sum over a token's experts in fp32. On CUDA in bf16
    /// the activation is computed in fp32 too, and rounded once. The host does not wait on devices for which
    /// libtorch has such a product (bf16, compute capability 9 and 10); elsewhere libtorch loops. What does not
    /// fit (another dtype, weights stored in another one, widths that are no multiple of 8) is computed as in
    /// [`ExpertKernel::Loop`]. Packed matrices are expanded some at a time, in backward again; the host waits
    /// once per call.
    Grouped,
    /// Packed matrices, bf16, on CUDA: kernels of our own that read the packed codes and expand them on the
    /// fly. The host does not wait. What does not fit, or where there are no such kernels, is computed as in
    /// [`ExpertKernel::Grouped`].
    Fused,
    /// [`ExpertKernel::Fused`] for few tokens per expert, [`ExpertKernel::Grouped`] for many.
    #[default]
    Auto,
}

/// A product of two thin matrices beside each matrix of a stack: `scaling * b a`.
#[derive(Debug)]
pub struct LowRankFactors {
    /// `[num_experts, rank, in_features]`
    pub a: Tensor,
    /// `[num_experts, out_features, rank]`
    pub b: Tensor,
    /// Factor on the product.
    pub scaling: f64,
}

/// One matrix of each expert, frozen.
#[derive(Debug)]
pub enum ExpertWeight<'a> {
    /// `[num_experts, out_features, in_features]`, any strides, any dtype of real numbers.
    Dense(&'a Tensor),
    /// Likewise, packed. It is never expanded whole, and nothing expanded is kept for backward.
    Packed(Mxfp4),
}

impl ExpertWeight<'_> {
    /// `[num_experts, out_features, in_features]`
    fn size(&self) -> Vec<i64> {
        match self {
            Self::Dense(weight) => weight.size(),
            Self::Packed(packed) => packed.size(),
        }
    }
}

/// One matrix of each expert, its bias, and what an adapter adds to it.
#[derive(Debug)]
pub struct ExpertStack<'a> {
    /// The matrices.
    pub weight: ExpertWeight<'a>,
    /// `[num_experts, out_features]`, compute dtype.
    pub bias: Option<Tensor>,
    /// In the compute dtype.
    pub factors: Option<LowRankFactors>,
}

/// One call of [`experts`].
#[derive(Debug)]
pub struct ExpertCall<'a> {
    /// `[tokens, hidden_size]`, compute dtype.
    pub x: &'a Tensor,
    /// Which experts each token goes to. Experts outside the range of `shape` take no part.
    pub routing: &'a Routing,
    /// What the experts are.
    pub shape: &'a ExpertShape,
    /// Gate and up projection of each, fused: `2 * intermediate_size` rows of `hidden_size`.
    pub gate_up: ExpertStack<'a>,
    /// The projection back: `hidden_size` rows of `intermediate_size`.
    pub down: ExpertStack<'a>,
    /// What is added to, like `x`; `None`: zeros.
    pub sum: Option<&'a Tensor>,
}

/// `sum + Σ weight * down(activation(gate_up(x)))`, biases included, over the experts of each token that are in the range of
/// the call's shape: `[tokens, hidden_size]` in the dtype of `x`.
///
/// # Errors
/// [`Error::Tensor`] naming `gate_up_proj`, `down_proj`, a bias of theirs, `x`, `routing` or `sum` when one does
/// not fit.
pub fn experts(kernel: ExpertKernel, call: &ExpertCall<'_>) -> Result<Tensor> {
    call.check()?;
    if call.routing.experts.numel() == 0 || call.shape.experts.is_empty() {
        return call.start();
    }
    match kernel {
        ExpertKernel::Grouped | ExpertKernel::Fused | ExpertKernel::Auto if grouped::fits(call) => {
            grouped::run(kernel, call)
        }
        _ => looped::run(call),
    }
}

impl ExpertCall<'_> {
    fn top_k(&self) -> i64 {
        self.routing.experts.size()[1]
    }

    /// The sum before any of these experts.
    fn start(&self) -> Result<Tensor> {
        match self.sum {
            Some(sum) => Ok(sum.shallow_clone()),
            None => Ok(self.x.f_zeros_like()?),
        }
    }

    /// `activation(gate) * up` of the fused projection `[rows, 2 * intermediate_size]`, every operation rounded.
    fn activate(&self, fused: &Tensor) -> Result<Tensor> {
        let &ExpertShape { gate_up, activation, .. } = self.shape;
        let halves = match gate_up {
            GateUp::Concatenated => fused.f_chunk(2, 1)?,
            GateUp::Interleaved => fused.f_view([fused.size()[0], -1, 2])?.f_unbind(2)?,
        };
        match (&halves[..], activation) {
            ([gate, up], ExpertActivation::Silu) => Ok(gate.f_silu()?.f_mul(up)?),
            ([gate, up], ExpertActivation::ClampedSwiglu { alpha, limit }) => {
                let gate = gate.f_clamp_max(limit)?;
                let up = up.f_clamp(-limit, limit)?;
                let gate = gate.f_mul(&gate.f_mul_scalar(alpha)?.f_sigmoid()?)?;
                Ok(up.f_add_scalar(1)?.f_mul(&gate)?)
            }
            _ => Err(Error::usage("gate and up projection are not two")),
        }
    }
}
