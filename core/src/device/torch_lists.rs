//! Calls into the C++ shim over many tensors at once: a few kernels for all of them instead of a few for
//! each.

use std::ffi::c_int;

use tch::Tensor;
use torch_sys::C_tensor;

use super::torch_shim::{ErrorBuffer, checked, pointers};
use crate::error::Result;

unsafe extern "C" {
    fn bs_foreach_norm(
        tensors: *const *const C_tensor,
        count: usize,
        results: *mut *mut C_tensor,
        error: *const ErrorBuffer,
    ) -> c_int;
    fn bs_foreach_mul(
        tensors: *const *const C_tensor,
        count: usize,
        factor: *const C_tensor,
        error: *const ErrorBuffer,
    ) -> c_int;
    fn bs_fused_adam(
        values: *const *const C_tensor,
        gradients: *const *const C_tensor,
        means: *const *const C_tensor,
        squares: *const *const C_tensor,
        count: usize,
        num_steps: *const C_tensor,
        step: *const AdamStep,
        error: *const ErrorBuffer,
    ) -> c_int;
}

/// The Euclidean norm of each tensor, as scalars on its device.
///
/// # Errors
/// [`Error::Torch`](crate::Error::Torch) when libtorch refuses.
pub(crate) fn norms(tensors: &[&Tensor]) -> Result<Vec<Tensor>> {
    let mut results = vec![std::ptr::null_mut(); tensors.len()];
    let tensors = pointers(tensors);
    checked(|error| {
        // SAFETY: every pointer comes from a tensor borrowed for this call, and the shim writes as many
        // results as there are tensors.
        unsafe { bs_foreach_norm(tensors.as_ptr(), tensors.len(), results.as_mut_ptr(), error) }
    })?;
    // SAFETY: the shim succeeded, so each result is a new handle that it gave away.
    Ok(results.into_iter().map(|result| unsafe { Tensor::from_ptr(result) }).collect())
}

/// Multiplies every tensor in place by the scalar `factor`, which is on their device.
///
/// # Errors
/// [`Error::Torch`](crate::Error::Torch) when libtorch refuses.
pub(crate) fn scale(tensors: &[&Tensor], factor: &Tensor) -> Result<()> {
    let tensors = pointers(tensors);
    checked(|error| {
        // SAFETY: every pointer comes from a tensor borrowed for this call.
        unsafe { bs_foreach_mul(tensors.as_ptr(), tensors.len(), factor.as_ptr(), error) }
    })
}

/// The numbers of one step of Adam. The layout is that of the shim's struct.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct AdamStep {
    pub(crate) learning_rate: f64,
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) weight_decay: f64,
    pub(crate) eps: f64,
    /// Whether weight decay is apart from the gradient: a C `int`.
    pub(crate) decoupled: c_int,
}

/// The tensors of one parameter, all of one shape and on one device.
#[derive(Debug)]
pub(crate) struct AdamTensors<'a> {
    pub(crate) value: &'a Tensor,
    /// In the layout of the others.
    pub(crate) gradient: Tensor,
    pub(crate) mean: &'a Tensor,
    pub(crate) square: &'a Tensor,
}

/// Updates parameters and moments in place. `num_steps` (fp32, a scalar on their device) counts this step.
///
/// # Errors
/// [`Error::Torch`](crate::Error::Torch) when libtorch refuses.
pub(crate) fn fused_adam(
    parameters: &[AdamTensors<'_>],
    num_steps: &Tensor,
    step: &AdamStep,
) -> Result<()> {
    let column = |of: fn(&AdamTensors<'_>) -> *const C_tensor| {
        parameters.iter().map(of).collect::<Vec<*const C_tensor>>()
    };
    let values = column(|tensors| tensors.value.as_ptr());
    let gradients = column(|tensors| tensors.gradient.as_ptr());
    let means = column(|tensors| tensors.mean.as_ptr());
    let squares = column(|tensors| tensors.square.as_ptr());
    checked(|error| {
        // SAFETY: every pointer comes from a tensor borrowed for this call, the lists are equally long,
        // and `step` has the layout that the shim expects.
        unsafe {
            bs_fused_adam(
                values.as_ptr(),
                gradients.as_ptr(),
                means.as_ptr(),
                squares.as_ptr(),
                parameters.len(),
                num_steps.as_ptr(),
                step,
                error,
            )
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn lists_of_any_shapes_are_measured_and_scaled_together() {
        let tensors = [
            Tensor::from_slice(&[3.0_f32, 4.0]),
            Tensor::from_slice(&[0.0_f32; 0]),
            Tensor::from_slice(&[2.0_f32, 2.0, 2.0, 2.0]).view([2, 2]),
        ];
        let list: Vec<&Tensor> = tensors.iter().collect();
        let found: Vec<f64> =
            norms(&list).unwrap().iter().map(|norm| norm.double_value(&[])).collect();
        assert_eq!(found, [5.0, 0.0, 4.0]);
        scale(&list, &Tensor::from(0.5_f32)).unwrap();
        assert_eq!(tensors[0], Tensor::from_slice(&[1.5_f32, 2.0]));
        assert_eq!(tensors[2], Tensor::from_slice(&[1.0_f32; 4]).view([2, 2]));
        let refused: Result<()> = scale(&list, &Tensor::from_slice(&[1.0_f32, 2.0]));
        assert!(matches!(refused.unwrap_err(), Error::Torch { .. }));
    }
}
