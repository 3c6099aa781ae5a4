//! How fast the link between host and device is.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use tch::{Device, Kind, Tensor};

use super::{CopyEngine, CopyPiece, Event};
use crate::error::{Error, Result};

/// Copies of one round, so that what starting and waiting cost does not count.
const COPIES_PER_ROUND: usize = 4;
/// Rounds, of which the best is what the link can do: others may share it.
const NUM_ROUNDS: usize = 4;

/// Copies host memory to the device back to back, with nothing in between: what any engine is measured
/// against.
pub struct BareLink {
    engine: Arc<dyn CopyEngine>,
    target: Tensor,
}

impl fmt::Debug for BareLink {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("BareLink").field("engine", &self.engine).finish_non_exhaustive()
    }
}

impl BareLink {
    /// Device memory for copies of up to `num_bytes`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the device has no room.
    pub fn new(engine: Arc<dyn CopyEngine>, num_bytes: usize) -> Result<Self> {
        let target = Tensor::f_empty([num_bytes.max(1) as i64], (Kind::Uint8, engine.device()))?;
        Ok(Self { engine, target })
    }

    /// Seconds from the first copy's submission until the last of them has ended, as a clock on the host
    /// sees it. The memory must be what the engine reads in place ([`CopyEngine::host_buffer`]), or the
    /// driver stages it.
    ///
    /// # Errors
    /// [`Error::Usage`] when there is nothing to copy or something is larger than was announced;
    /// [`Error::Cuda`] when the driver refuses.
    pub fn seconds<'a>(&self, sources: impl IntoIterator<Item = &'a [u8]>) -> Result<f64> {
        let start = Instant::now();
        let mut last = None;
        let outcome = sources.into_iter().try_for_each(|source| {
            last = Some(self.start(source)?);
            Ok(())
        });
        // Also after an error: the copies before it still read their sources.
        match last {
            Some(end) => self.engine.synchronize(&end)?,
            None if outcome.is_ok() => return Err(Error::usage("there is nothing to copy")),
            None => {}
        }
        outcome.map(|()| start.elapsed().as_secs_f64())
    }

    fn start(&self, source: &[u8]) -> Result<Event> {
        if source.len() > self.target.numel() {
            return Err(Error::usage(format!(
                "{} bytes do not fit the {} of the target",
                source.len(),
                self.target.numel()
            )));
        }
        let piece = CopyPiece { source, destination: self.target.data_ptr() as usize };
        // SAFETY: the target holds the source and lives as long as `self`; `seconds`, which borrows the
        // source, returns after the last end event, and copies of one engine end in order.
        let (_, end) = unsafe { self.engine.copy(&[piece], None)? };
        Ok(end)
    }
}

/// Rate of back-to-back copies of `num_bytes` each from the memory that a [`CopyEngine`] wants, in 10^9
/// bytes per second: the best of several rounds, which is what the link can do.
///
/// # Errors
/// As [`CopyEngine::copy`]; [`Error::OutOfMemory`] when the device has no room, [`Error::Usage`] for no
/// bytes.
pub fn host_to_device_gb_per_s(device: Device, num_bytes: usize) -> Result<f64> {
    let engine: Arc<dyn CopyEngine> = Arc::from(<dyn CopyEngine>::for_device(device)?);
    let mut source = engine.host_buffer(num_bytes)?;
    // Pages that were never written are all the same page, which a cache holds.
    source.bytes_mut().fill(0x5a);
    let link = BareLink::new(engine, num_bytes)?;
    let mut best_seconds = f64::INFINITY;
    for _ in 0..NUM_ROUNDS {
        let sources = std::iter::repeat_n(source.bytes(), COPIES_PER_ROUND);
        best_seconds = best_seconds.min(link.seconds(sources)?);
    }
    match num_bytes > 0 && best_seconds > 0.0 {
        true => Ok((num_bytes * COPIES_PER_ROUND) as f64 / best_seconds / 1e9),
        false => Err(Error::usage("copies of no bytes have no rate")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(num_bytes: usize) -> BareLink {
        let engine = <dyn CopyEngine>::for_device(Device::Cpu).unwrap();
        BareLink::new(Arc::from(engine), num_bytes).unwrap()
    }

    #[test]
    fn the_bytes_arrive_and_the_last_copy_wins() {
        let link = link(4);
        assert!(link.seconds([&[1, 2, 3, 4][..], &[9, 8][..]]).unwrap() > 0.0);
        let arrived: Vec<u8> = Vec::try_from(&link.target).unwrap();
        assert_eq!(arrived, [9, 8, 3, 4]);
    }

    #[test]
    fn too_many_bytes_and_no_copies_at_all_are_refused() {
        let error = link(4).seconds([&[0; 5][..]]).unwrap_err().to_string();
        assert!(error.contains("5 bytes do not fit"), "{error}");
        assert!(link(4).seconds([]).unwrap_err().to_string().contains("nothing to copy"));
        assert!(host_to_device_gb_per_s(Device::Cpu, 0).is_err());
    }

    #[test]
    fn a_rate_comes_out_above_zero() {
        assert!(host_to_device_gb_per_s(Device::Cpu, 1 << 20).unwrap() > 0.0);
    }
}
