//! Page-aligned host memory that a copy engine may read in place.

use std::fmt;

use memmap2::MmapMut;

use crate::error::{Error, Result};

/// Page-aligned, zero-initialised host memory of an exact size; page-locked when a CUDA device needs it.
///
/// Anonymous pages are used rather than an allocator's pinned pool: pools round up to powers of two.
pub struct HostBuffer {
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
        let map = match num_bytes {
            0 => None,
            _ => Some(
                MmapMut::map_anon(num_bytes)
                    .map_err(Error::io("reserve host memory for", "a buffer"))?,
            ),
        };
        Ok(Self { map, pinned: false })
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }

    /// Its bytes, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.map.as_deref_mut().unwrap_or(&mut [])
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
            .finish()
    }
}
