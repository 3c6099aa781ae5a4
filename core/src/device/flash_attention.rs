//! libtorch's flash attention, with windows and sinks.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

use tch::{Device, Tensor};
use torch_sys::C_tensor;

use super::cuda::{BF16_CAPABILITY, context};
use super::torch_shim::{ErrorBuffer, made};
use crate::error::Result;

unsafe extern "C" {
    fn bs_flash_attention(
        query: *const C_tensor,
        key: *const C_tensor,
        value: *const C_tensor,
        sinks: *const C_tensor,
        causal: c_int,
        window: i64,
        scale: f64,
        result: *mut *mut C_tensor,
        error: *const ErrorBuffer,
    ) -> c_int;
}

/// Whether [`flash_attention`] runs on `device`.
pub(crate) fn has_flash_attention(device: Device) -> bool {
    static KNOWN: Mutex<BTreeMap<usize, bool>> = Mutex::new(BTreeMap::new());
    let Device::Cuda(index) = device else { return false };
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    *known.entry(index).or_insert_with(|| {
        let capability = context(index).ok().and_then(|context| context.compute_capability().ok());
        capability.is_some_and(|capability| capability >= BF16_CAPABILITY)
    })
}

/// `softmax(scale * query key^T) value`, `[batch, heads, sequence, head_dim]` in 16 bits, `head_dim` a multiple of
/// 8 up to 192, on a device that [has it](has_flash_attention). The heads of `key` and `value` divide those of
/// `query`. A query sees `window` keys up to its own, if there is one, and its head's sink, a score without a
/// value, where there are `sinks` `[heads]`. Gradients go to all of them.
///
/// Deterministic where libtorch is told to be.
///
/// # Errors
/// [`Error::Torch`](crate::Error::Torch) when libtorch refuses, [`Error::OutOfMemory`](crate::Error::OutOfMemory).
pub(crate) fn flash_attention(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    sinks: Option<&Tensor>,
    causal: bool,
    window: Option<i64>,
    scale: f64,
) -> Result<Tensor> {
    // SAFETY: all tensors are live for the call, `sinks` may be null, and it makes one new tensor.
    unsafe {
        made(|result, error| {
            bs_flash_attention(
                query.as_ptr(),
                key.as_ptr(),
                value.as_ptr(),
                sinks.map_or(std::ptr::null(), Tensor::as_ptr),
                c_int::from(causal),
                window.unwrap_or_default(),
                scale,
                result,
                error,
            )
        })
    }
}
