//! Clipping gradients by their common norm.

use tch::{Device, Kind, Tensor};

use crate::device::{norms, scale};
use crate::error::{Error, Result};

/// Scales fp32 gradients in place so that the Euclidean norm over all of them is at most `max_norm`,
/// as `torch.nn.utils.clip_grad_norm_` does: by `min(1, max_norm / (norm + 1e-6))`.
///
/// Returns the norm before clipping, a scalar on the gradients' device; the host does not wait for it.
/// With an infinite `max_norm` it only measures. A norm that is not finite is the caller's to notice.
///
/// # Errors
/// [`Error::Usage`] unless `max_norm > 0`; [`Error::Torch`] when libtorch refuses.
pub fn clip_gradient_norm(gradients: &[Tensor], max_norm: f64) -> Result<Tensor> {
    if max_norm.is_nan() || max_norm <= 0.0 {
        let message = format!("the largest gradient norm must be greater than 0, not {max_norm}");
        return Err(Error::usage(message));
    }
    let _guard = tch::no_grad_guard();
    if gradients.is_empty() {
        return Ok(Tensor::f_zeros([0; 0], (Kind::Float, Device::Cpu))?);
    }
    let gradients: Vec<&Tensor> = gradients.iter().collect();
    let norm = Tensor::f_stack(&norms(&gradients)?, 0)?.f_norm()?;
    if max_norm.is_finite() {
        let factor = norm.f_add_scalar(1e-6)?.f_reciprocal()?.f_mul_scalar_(max_norm)?;
        let factor = factor.f_clamp_max(1.0)?;
        scale(&gradients, &factor)?;
    }
    Ok(norm)
}
