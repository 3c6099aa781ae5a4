//! How fast the link between host and device is.

use tch::{Device, Kind, Tensor};

use super::CopyEngine;
use crate::error::{Error, Result};

/// Rate of copies of `num_bytes` from the memory that a [`CopyEngine`] wants, in 10^9 bytes per second:
/// the best of several, which is what the link can do.
///
/// # Errors
/// As [`CopyEngine::copy`]; [`Error::OutOfMemory`] when the device has no room.
pub fn host_to_device_gb_per_s(device: Device, num_bytes: usize) -> Result<f64> {
    let engine = <dyn CopyEngine>::for_device(device)?;
    let source = engine.host_buffer(num_bytes)?;
    let target = Tensor::f_empty([num_bytes as i64], (Kind::Uint8, device))?;
    let mut best_ms = f64::INFINITY;
    for _ in 0..4 {
        // SAFETY: both buffers hold `num_bytes` and live until the end event has happened.
        let (start, end) =
            unsafe { engine.copy(source.bytes(), target.data_ptr() as usize, None)? };
        engine.synchronize(&end)?;
        if let Some(ms) = engine.elapsed_ms(&start, &end)? {
            best_ms = best_ms.min(ms);
        }
    }
    match best_ms.is_finite() && best_ms > 0.0 {
        true => Ok(num_bytes as f64 / best_ms / 1e6),
        false => Err(Error::usage("the copies could not be timed")),
    }
}
