//! The low-rank part of an adapted linear, with a backward of its own: few kernels, and one node of a graph.

use std::ffi::c_int;

use tch::Tensor;
use torch_sys::C_tensor;

use super::torch_shim::{ErrorBuffer, made};
use crate::error::Result;

unsafe extern "C" {
    fn bs_add_low_rank(
        x: *const C_tensor,
        output: *const C_tensor,
        a: *const C_tensor,
        b: *const C_tensor,
        scaling: f64,
        result: *mut *mut C_tensor,
        error: *const ErrorBuffer,
    ) -> c_int;
}

/// `output + scaling * (x A^T) B^T` in the dtype of `output`, with gradients for all four; those of A and B
/// are fp32. Gradients have no graph of their own.
///
/// `x` `[.., in_features]` and `output` `[.., out_features]` are in one dtype, `a` `[rank, in_features]` and
/// `b` `[out_features, rank]` are fp32 masters. The products are computed in the dtype of `output`, the
/// scaling before the product with A is rounded. The result takes over the memory of `output` where nothing
/// else refers to it.
///
/// # Errors
/// [`Error::Torch`](crate::Error::Torch) for shapes and dtypes that do not fit,
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory). Going backward with a graph to be, or twice, is an error
/// of the backward pass.
pub(crate) fn add_low_rank(
    x: &Tensor,
    output: Tensor,
    a: &Tensor,
    b: &Tensor,
    scaling: f64,
) -> Result<Tensor> {
    let [x, output, a, b] = [x, &output, a, b].map(Tensor::as_ptr);
    // SAFETY: all four tensors are live for the call, and `output` is not used after it. It makes one new tensor.
    unsafe { made(|result, error| bs_add_low_rank(x, output, a, b, scaling, result, error)) }
}
