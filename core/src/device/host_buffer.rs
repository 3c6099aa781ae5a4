//! Page-aligned host memory that a copy engine may read in place.

use std::fmt;

use memmap2::MmapMut;
use tch::Device;

use super::cuda::PageLock;
use crate::error::{Error, Result};

/// Page-aligned, zero-initialised host memory of an exact size; page-locked when a CUDA device needs it.
///
/// Empty by default. Anonymous pages are used rather than an allocator's pinned pool: pools round up to powers of two.
#[derive(Default)]
pub struct HostBuffer {
    // Before the map: fields are dropped in order, and the lock must go first.
    lock: Option<PageLock>,
    // None for an empty buffer: the system maps no empty range.
    map: Option<MmapMut>,
    pinned: bool,
}

impl HostBuffer {
    /// Ordinary memory of `num_bytes`.
    ///
    /// # Errors
    /// [`Error::Io`] when the system has no memory left.
    pub fn new(num_bytes: usize) -> Result<Self> {
        Self::for_device(num_bytes, Device::Cpu)
    }

    /// Memory of `num_bytes` that the copy engine of `device` can read in place: page-locked for CUDA,
    /// ordinary for the CPU.
    ///
    /// # Errors
    /// [`Error::Io`] when the system has no memory left, [`Error::Cuda`] when it may not be page-locked.
    pub fn for_device(num_bytes: usize, device: Device) -> Result<Self> {
        if num_bytes == 0 {
            return Ok(Self { lock: None, map: None, pinned: device.is_cuda() });
        }
        let mut map = MmapMut::map_anon(num_bytes)
            .map_err(Error::io("reserve host memory for", "a buffer"))?;
        // Large pages register faster and cost the copy engine fewer look-ups; a refusal costs nothing.
        let _ = map.advise(memmap2::Advice::HugePage);
        if device.is_cuda() {
            // Before the driver locks them: it takes the pages that are there.
            let _ = map.advise(memmap2::Advice::PopulateWrite);
        }
        let lock = PageLock::new(&mut map, device)?;
        Ok(Self { lock, map: Some(map), pinned: device.is_cuda() })
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }

    /// Its bytes, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.map.as_deref_mut().unwrap_or(&mut [])
    }

    /// Where kernels of the device that it was made for see the first byte.
    pub(super) fn device_address(&self) -> Result<usize> {
        match &self.lock {
            Some(lock) => lock.device_address(),
            None => Ok(self.bytes().as_ptr() as usize),
        }
    }

    /// Whether a CUDA copy engine may read it in place.
    pub fn is_pinned(&self) -> bool {
        self.pinned
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("HostBuffer")
            .field("num_bytes", &self.bytes().len())
            .field("pinned", &self.pinned)
            .field("lock", &self.lock)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_have_their_exact_size_and_start_as_zeros() {
        for num_bytes in [0, 1, 4096, 5000] {
            let buffer = HostBuffer::new(num_bytes).unwrap();
            assert_eq!(buffer.bytes().len(), num_bytes);
            assert!(buffer.bytes().iter().all(|byte| *byte == 0));
            assert!(!buffer.is_pinned());
        }
    }
}
