//! A source as slow as a given disk.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::BlockSource;
use crate::block::{BlockIndex, BlockSpec};
use crate::error::{Error, Result};

/// Reads from another source at no more than a given rate, over all threads together.
/// It lends nothing, so that every use is a read.
#[derive(Debug)]
pub struct ThrottledSource {
    inner: Arc<dyn BlockSource>,
    bytes_per_second: f64,
    // When the disk that is imitated will be idle again.
    idle_at: Mutex<Instant>,
}

impl ThrottledSource {
    /// Limits `inner` to `bytes_per_second`.
    ///
    /// # Errors
    /// [`Error::Usage`] when the rate is not above zero.
    pub fn new(inner: Arc<dyn BlockSource>, bytes_per_second: f64) -> Result<Self> {
        if !(bytes_per_second.is_finite() && bytes_per_second >= 1.0) {
            return Err(Error::usage(format!(
                "cannot read at {bytes_per_second} bytes per second"
            )));
        }
        Ok(Self { inner, bytes_per_second, idle_at: Mutex::new(Instant::now()) })
    }
}

impl BlockSource for ThrottledSource {
    fn describe(&self) -> String {
        format!("{} at {:.0} MB/s", self.inner.describe(), self.bytes_per_second / 1e6)
    }

    fn blocks(&self) -> &[BlockSpec] {
        self.inner.blocks()
    }

    fn read(&self, block: BlockIndex, range: Range<usize>, into: &mut [u8]) -> Result<usize> {
        let takes = Duration::from_secs_f64(range.len() as f64 / self.bytes_per_second);
        let until = {
            let mut idle_at = self.idle_at.lock().unwrap_or_else(PoisonError::into_inner);
            *idle_at = Instant::now().max(*idle_at) + takes;
            *idle_at
        };
        let read_bytes = self.inner.read(block, range, into)?;
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        Ok(read_bytes)
    }
}
