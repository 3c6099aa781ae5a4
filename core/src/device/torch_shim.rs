//! Calls into the C++ shim: what libtorch offers and tch does not.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

use tch::{Device, Tensor};
use torch_sys::C_tensor;

use super::HostBuffer;
use crate::error::{Error, Result};

#[repr(C)]
pub(super) struct ErrorBuffer {
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
    fn bs_tensor_over(
        data: *mut c_void,
        num_bytes: i64,
        device_type: c_int,
        index: c_int,
        owner: *mut c_void,
        release: unsafe extern "C" fn(*mut c_void),
        result: *mut *mut C_tensor,
        error: *const ErrorBuffer,
    ) -> c_int;
    fn bs_is_sole_owner(
        tensor: *const C_tensor,
        result: *mut c_int,
        error: *const ErrorBuffer,
    ) -> c_int;
    fn bs_memory_stats(
        device_type: c_int,
        index: c_int,
        current_bytes: *mut i64,
        peak_bytes: *mut i64,
        reserved_bytes: *mut i64,
        error: *const ErrorBuffer,
    ) -> c_int;
    fn bs_reset_peak_memory(device_type: c_int, index: c_int, error: *const ErrorBuffer) -> c_int;
    fn bs_set_deterministic(on: c_int, error: *const ErrorBuffer) -> c_int;
}

/// Runs a shim call with a buffer for its message.
pub(super) fn checked(call: impl FnOnce(*const ErrorBuffer) -> c_int) -> Result<()> {
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

/// What a shim call makes: it is given a place for one handle, and a buffer for its message.
///
/// # Safety
/// Where `call` returns 0 it must have put a new handle into the place, and given it away.
pub(super) unsafe fn made(
    call: impl FnOnce(*mut *mut C_tensor, *const ErrorBuffer) -> c_int,
) -> Result<Tensor> {
    let mut result = std::ptr::null_mut();
    checked(|error| call(&raw mut result, error))?;
    // SAFETY: the call succeeded, so this is the handle that the caller promises.
    Ok(unsafe { Tensor::from_ptr(result) })
}

pub(super) fn pointers(tensors: &[&Tensor]) -> Vec<*const C_tensor> {
    tensors.iter().map(|tensor| tensor.as_ptr()).collect()
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
    let keep = 1.0 - probability;
    // SAFETY: `x` is live for the call, which makes one new tensor.
    let mask = unsafe { made(|mask, error| bs_dropout_mask(x.as_ptr(), keep, seed, mask, error)) }?;
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
    // SAFETY: `host` is live for the call, which makes one new tensor.
    unsafe { made(|result, error| bs_upload(host.as_ptr(), kind, index, result, error)) }
}

/// The bytes of a host buffer as a tensor (uint8) that kernels of `device` read over the link, a row at a
/// time if that is all they ask for. On the CPU it is the memory itself. `None` when `buffer` finds none.
///
/// The buffer is one that `owner` keeps as long as it lives; the tensor keeps `owner` alive. Nobody may
/// write to the tensor.
///
/// # Errors
/// [`Error::Cuda`] when the device cannot see the memory, [`Error::Torch`] when libtorch refuses.
pub(crate) fn tensor_over<O: Send + Sync + ?Sized + 'static>(
    owner: &Arc<O>,
    buffer: impl FnOnce(&O) -> Option<&HostBuffer>,
    device: Device,
) -> Result<Option<Tensor>> {
    unsafe extern "C" fn release<O: ?Sized>(owner: *mut c_void) {
        // SAFETY: the pointer is the one that `tensor_over` gave away, and comes back once.
        drop(unsafe { Box::from_raw(owner.cast::<Arc<O>>()) });
    }
    let Some(buffer) = buffer(owner) else { return Ok(None) };
    let (address, num_bytes) = (buffer.device_address()?, buffer.bytes().len() as i64);
    // c10::DeviceType::CPU is 0, and has no index.
    let (kind, index) = if device == Device::Cpu { (0, -1) } else { device_numbers(device)? };
    let owner = Box::into_raw(Box::new(Arc::clone(owner)));
    // SAFETY: the buffer borrows from what `owner` points to, so it stays while a clone of the `Arc` does; the
    // shim hands that clone to `release` once, after the last use of the memory or when it fails. The call
    // makes one new tensor.
    let tensor = unsafe {
        made(|result, error| {
            bs_tensor_over(
                address as *mut c_void,
                num_bytes,
                kind,
                index,
                owner.cast(),
                release::<O>,
                result,
                error,
            )
        })
    };
    tensor.map(Some)
}

/// The same values in memory that nothing else refers to, so that they may be changed in place: `tensor`
/// itself where that holds already, else a copy.
///
/// # Errors
/// [`Error::Torch`] when libtorch refuses, [`Error::OutOfMemory`].
pub(crate) fn into_own(tensor: Tensor) -> Result<Tensor> {
    let mut is_sole_owner = 0;
    checked(|error| {
        // SAFETY: `tensor` is live for the call, and the answer outlives it.
        unsafe { bs_is_sole_owner(tensor.as_ptr(), &raw mut is_sole_owner, error) }
    })?;
    if is_sole_owner != 0 { Ok(tensor) } else { Ok(tensor.f_detach_copy()?) }
}

/// What libtorch's allocator on a device has handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryStats {
    /// Bytes in use.
    pub current_bytes: usize,
    /// Most of them at one time since [`reset_peak_memory`].
    pub peak_bytes: usize,
    /// Bytes that the allocator has taken from the device, in use or kept for the next request.
    pub reserved_bytes: usize,
}

/// What libtorch's allocator on `device` has handed out.
///
/// # Errors
/// [`Error::NotSupported`] on the CPU, which keeps no statistics.
pub fn memory_stats(device: Device) -> Result<MemoryStats> {
    let (mut current, mut peak, mut reserved) = (0_i64, 0_i64, 0_i64);
    let (kind, index) = device_numbers(device)?;
    checked(|error| {
        let (current, peak, reserved) = (&raw mut current, &raw mut peak, &raw mut reserved);
        // SAFETY: the counters outlive the call.
        unsafe { bs_memory_stats(kind, index, current, peak, reserved, error) }
    })?;
    let [current_bytes, peak_bytes, reserved_bytes] =
        [current, peak, reserved].map(|number| number.max(0) as usize);
    Ok(MemoryStats { current_bytes, peak_bytes, reserved_bytes })
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
            operation: "a call for CUDA devices",
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
    fn a_tensor_that_shares_its_memory_is_copied_and_one_that_does_not_is_kept() {
        let address = |tensor: &Tensor| tensor.data_ptr() as usize;
        let numbers = || Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]) + 1.0;
        let (alone, shared, viewed) = (numbers(), numbers(), numbers());
        let before = address(&alone);
        assert_eq!(address(&into_own(alone).unwrap()), before);
        let (again, view) = (shared.shallow_clone(), viewed.narrow(0, 0, 1));
        let wide = Tensor::ones([1, 3], (Kind::Float, Device::Cpu)).expand([2, 3], false);
        let turned = numbers().tr();
        for tensor in [again, view, viewed.shallow_clone(), wide, turned] {
            let (values, before) = (tensor.copy(), address(&tensor));
            let own = into_own(tensor).unwrap();
            assert_ne!(address(&own), before);
            assert!(own.is_contiguous() && own == values);
        }
        drop((shared, viewed));
    }

    #[test]
    fn a_tensor_over_host_memory_reads_it_in_place_and_keeps_its_owner() {
        let mut buffer = HostBuffer::new(4096).unwrap();
        buffer.bytes_mut()[8..12].copy_from_slice(&7.5_f32.to_le_bytes());
        let owner = Arc::new(buffer);
        let tensor = tensor_over(&owner, |owner| Some(owner), Device::Cpu).unwrap().unwrap();
        assert_eq!(tensor.data_ptr() as usize, owner.bytes().as_ptr() as usize);
        assert_eq!((tensor.kind(), tensor.size()), (Kind::Uint8, vec![4096]));
        assert_eq!(Arc::strong_count(&owner), 2);
        let (weak, view) = (Arc::downgrade(&owner), tensor.narrow(0, 8, 4).view_dtype(Kind::Float));
        drop((owner, tensor));
        assert_eq!(view.double_value(&[0]), 7.5, "a view is enough to keep it");
        drop(view);
        assert!(weak.upgrade().is_none());
        let none = tensor_over(&Arc::new(()), |_| None, Device::Cpu).unwrap();
        assert!(none.is_none());
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
