//! Calls into the C++ shim: what libtorch offers and tch does not.

use std::ffi::{CStr, c_char, c_int};

use tch::{Device, Tensor};
use torch_sys::C_tensor;

use crate::error::{Error, Result};

#[repr(C)]
struct ErrorBuffer {
    text: *mut c_char,
    num_bytes: usize,
}

unsafe extern "C" {
    fn bs_grad(
        outputs: *const *const C_tensor,
        grad_outputs: *const *const C_tensor,
        num_outputs: usize,
        inputs: *const *const C_tensor,
        num_inputs: usize,
        results: *mut *mut C_tensor,
        error: *const ErrorBuffer,
    ) -> c_int;
    fn bs_dropout_mask(
        like: *const C_tensor,
        keep: f64,
        seed: u64,
        result: *mut *mut C_tensor,
        error: *const ErrorBuffer,
    ) -> c_int;
    fn bs_upload(
        host: *const C_tensor,
        device_type: c_int,
        index: c_int,
        result: *mut *mut C_tensor,
        error: *const ErrorBuffer,
    ) -> c_int;
    fn bs_memory_stats(
        device_type: c_int,
        index: c_int,
        current_bytes: *mut i64,
        peak_bytes: *mut i64,
        error: *const ErrorBuffer,
    ) -> c_int;
    fn bs_reset_peak_memory(device_type: c_int, index: c_int, error: *const ErrorBuffer) -> c_int;
    fn bs_set_deterministic(on: c_int, error: *const ErrorBuffer) -> c_int;
}

/// Runs a shim call with a buffer for its message.
fn checked(call: impl FnOnce(*const ErrorBuffer) -> c_int) -> Result<()> {
    let mut text = [0 as c_char; 2048];
    let buffer = ErrorBuffer { text: text.as_mut_ptr(), num_bytes: text.len() };
    if call(&buffer) == 0 {
        return Ok(());
    }
    // SAFETY: the shim ends every message with a zero byte inside the buffer, which outlives this borrow.
    let message = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned();
    match message.contains("out of memory") {
        true => Err(Error::OutOfMemory { action: "computing".into(), message }),
        false => Err(Error::Torch { message }),
    }
}

/// The vector-Jacobian product: gradients of `inputs` when the gradients of `outputs` are
/// `grad_outputs`. `None` where an input takes no part. The graph is freed.
///
/// # Errors
/// [`Error::Torch`] when no output depends on a graph or shapes differ, [`Error::OutOfMemory`].
pub fn grad(
    outputs: &[&Tensor],
    grad_outputs: &[&Tensor],
    inputs: &[&Tensor],
) -> Result<Vec<Option<Tensor>>> {
    if outputs.len() != grad_outputs.len() {
        return Err(Error::usage(format!(
            "{} outputs but {} gradients",
            outputs.len(),
            grad_outputs.len()
        )));
    }
    if outputs.is_empty() {
        return Ok(inputs.iter().map(|_| None).collect());
    }
    let pointers =
        |tensors: &[&Tensor]| tensors.iter().map(|tensor| tensor.as_ptr()).collect::<Vec<_>>();
    let (outputs, grad_outputs, inputs) =
        (pointers(outputs), pointers(grad_outputs), pointers(inputs));
    let mut results = vec![std::ptr::null_mut(); inputs.len()];
    checked(|error| {
        // SAFETY: every pointer comes from a live `Tensor` borrowed for this call, the counts are the
        // vectors' own lengths, and the shim writes at most `inputs.len()` results.
        unsafe {
            bs_grad(
                outputs.as_ptr(),
                grad_outputs.as_ptr(),
                outputs.len(),
                inputs.as_ptr(),
                inputs.len(),
                results.as_mut_ptr(),
                error,
            )
        }
    })?;
    let take = |pointer: *mut C_tensor| match pointer.is_null() {
        true => None,
        // SAFETY: a non-null result is a new handle that the shim gave away.
        false => Some(unsafe { Tensor::from_ptr(pointer) }),
    };
    Ok(results.into_iter().map(take).collect())
}

/// Dropout whose mask depends on `seed` alone: each element of `x` is kept with probability
/// `1 - probability` and scaled by its inverse. Neither reads nor moves libtorch's global generators,
/// so a recompute needs no saved generator state.
///
/// # Errors
/// [`Error::Usage`] unless `0 <= probability < 1`, [`Error::Torch`] when libtorch refuses.
pub fn dropout(x: &Tensor, probability: f64, seed: u64) -> Result<Tensor> {
    if !(0.0..1.0).contains(&probability) {
        return Err(Error::usage(format!("dropout probability {probability} is not in [0, 1)")));
    }
    if probability == 0.0 {
        return Ok(x.shallow_clone());
    }
    let mut mask = std::ptr::null_mut();
    checked(|error| {
        // SAFETY: `x` is live for the call and `mask` receives one new handle.
        unsafe { bs_dropout_mask(x.as_ptr(), 1.0 - probability, seed, &raw mut mask, error) }
    })?;
    // SAFETY: the shim succeeded, so `mask` is a new handle that it gave away.
    let mask = unsafe { Tensor::from_ptr(mask) };
    Ok(x.f_mul(&mask)?)
}

/// A copy of a host tensor on `device`, queued on the compute stream; the host does not wait for what was
/// queued before, as it would with a copy from pageable memory.
///
/// # Errors
/// [`Error::Torch`] when libtorch refuses, [`Error::OutOfMemory`].
pub fn upload(host: &Tensor, device: Device) -> Result<Tensor> {
    if !device.is_cuda() || host.device() == device {
        return Ok(host.f_to_device(device)?);
    }
    let (kind, index) = device_numbers(device)?;
    let mut result = std::ptr::null_mut();
    checked(|error| {
        // SAFETY: `host` is live for the call and `result` receives one new handle.
        unsafe { bs_upload(host.as_ptr(), kind, index, &raw mut result, error) }
    })?;
    // SAFETY: the shim succeeded, so `result` is a new handle that it gave away.
    Ok(unsafe { Tensor::from_ptr(result) })
}

/// Bytes in use and at most in use since [`reset_peak_memory`], of libtorch's allocator on `device`.
///
/// # Errors
/// [`Error::NotSupported`] on the CPU, which keeps no statistics.
pub fn memory_stats(device: Device) -> Result<(usize, usize)> {
    let (mut current, mut peak) = (0_i64, 0_i64);
    let (kind, index) = device_numbers(device)?;
    checked(|error| {
        // SAFETY: both counters outlive the call.
        unsafe { bs_memory_stats(kind, index, &raw mut current, &raw mut peak, error) }
    })?;
    Ok((current.max(0) as usize, peak.max(0) as usize))
}

/// Starts a new peak for [`memory_stats`].
///
/// # Errors
/// As [`memory_stats`].
pub fn reset_peak_memory(device: Device) -> Result<()> {
    let (kind, index) = device_numbers(device)?;
    // SAFETY: the call takes plain numbers.
    checked(|error| unsafe { bs_reset_peak_memory(kind, index, error) })
}

/// Asks libtorch for kernels with one fixed order of additions where it has them (process-wide).
///
/// # Errors
/// None that is known.
pub fn set_deterministic(on: bool) -> Result<()> {
    // SAFETY: the call takes plain numbers.
    checked(|error| unsafe { bs_set_deterministic(c_int::from(on), error) })
}

fn device_numbers(device: Device) -> Result<(c_int, c_int)> {
    // c10::DeviceType::CUDA is 1.
    match device {
        Device::Cuda(index) => Ok((1, index as c_int)),
        _ => Err(Error::NotSupported {
            operation: "memory statistics",
            implementer: format!("{device:?}"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    #[test]
    fn grad_equals_the_formula_and_reports_unused_inputs() {
        let x = Tensor::from_slice(&[1.0_f32, 2.0, 3.0]).set_requires_grad(true);
        let unused = Tensor::from_slice(&[1.0_f32]).set_requires_grad(true);
        let y = &x * &x;
        let seed = Tensor::from_slice(&[1.0_f32, 10.0, 100.0]);
        let gradients = grad(&[&y], &[&seed], &[&x, &unused]).unwrap();
        assert_eq!(gradients[0].as_ref().unwrap(), &Tensor::from_slice(&[2.0_f32, 40.0, 600.0]));
        assert!(gradients[1].is_none());
    }

    #[test]
    fn an_output_that_is_an_input_hands_its_gradient_through() {
        let x = Tensor::from_slice(&[1.0_f32, 2.0]).set_requires_grad(true);
        let y = &x * 3.0;
        let one = Tensor::from_slice(&[1.0_f32, 1.0]);
        let gradients = grad(&[&x, &y], &[&one, &one], &[&x]).unwrap();
        assert_eq!(gradients[0].as_ref().unwrap(), &Tensor::from_slice(&[4.0_f32, 4.0]));
    }

    #[test]
    fn a_libtorch_error_comes_back_as_an_error() {
        let x = Tensor::from_slice(&[1.0_f32]);
        let error = grad(&[&x], &[&x], &[&x]).unwrap_err().to_string();
        assert!(error.contains("require"), "{error}");
    }

    #[test]
    fn dropout_depends_on_the_seed_alone_and_keeps_the_mean() {
        let x = Tensor::ones([64, 1024], (Kind::Float, Device::Cpu));
        let first = dropout(&x, 0.25, 7).unwrap();
        assert_eq!(first, dropout(&x, 0.25, 7).unwrap());
        assert_ne!(first, dropout(&x, 0.25, 8).unwrap());
        let mean = first.mean(Kind::Float).double_value(&[]);
        assert!((mean - 1.0).abs() < 0.02, "{mean}");
        assert_eq!(dropout(&x, 0.0, 1).unwrap(), x);
        assert!(dropout(&x, 1.0, 1).is_err());
    }
}
