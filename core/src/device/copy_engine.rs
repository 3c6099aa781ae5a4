//! Copies to the device, and the events that order them against computation.

use std::fmt;
use std::time::Instant;

use tch::Device;

use super::HostBuffer;
use super::cuda::{CudaCopyEngine, CudaTimestamp, load_cuda};
use crate::error::{Error, Result};

/// A point in the work of a device. On the CPU, where work is done when the call returns, a time.
#[derive(Debug)]
pub enum Event {
    /// On the CPU.
    Host(Instant),
    /// On a CUDA stream.
    Cuda(CudaTimestamp),
}

/// One run of bytes from host memory to the device.
#[derive(Debug, Clone, Copy)]
pub struct CopyPiece<'a> {
    /// The bytes.
    pub source: &'a [u8],
    /// Their address on the device.
    pub destination: usize,
}

/// Copies host memory to one device on a stream of their own, and orders them against the compute
/// stream with events. No method but [`CopyEngine::synchronize`] waits for the device.
///
/// The compute stream is the device's default stream, on which libtorch runs unless told otherwise.
pub trait CopyEngine: Send + Sync + fmt::Debug {
    /// The device that copies go to.
    fn device(&self) -> Device;

    /// Whether device memory is host memory, so that a reader may fill it without a copy.
    fn is_host_memory(&self) -> bool;

    /// Starts copying `pieces`, in order, once `after` has happened on the compute stream. Returns the
    /// start of the first and the end of the last.
    ///
    /// # Safety
    /// Every destination must be valid for its piece's bytes on the device, and the sources must stay
    /// alive and unchanged until the end event has happened.
    ///
    /// # Errors
    /// [`Error::Cuda`] when the driver refuses; some pieces may be on their way then.
    unsafe fn copy(
        &self,
        pieces: &[CopyPiece<'_>],
        after: Option<&Event>,
    ) -> Result<(Event, Event)>;

    /// Marks the present end of the compute stream.
    ///
    /// # Errors
    /// [`Error::Cuda`] when the driver refuses.
    fn record(&self) -> Result<Event>;

    /// Makes later work on the compute stream wait for `event`.
    ///
    /// # Errors
    /// [`Error::Cuda`] when the driver refuses.
    fn wait(&self, event: &Event) -> Result<()>;

    /// Makes the calling thread wait for `event`.
    ///
    /// # Errors
    /// [`Error::Cuda`], also for errors of earlier work on the device.
    fn synchronize(&self, event: &Event) -> Result<()>;

    /// Whether `event` has happened. Does not wait.
    ///
    /// # Errors
    /// As [`CopyEngine::synchronize`].
    fn has_happened(&self, event: &Event) -> Result<bool>;

    /// Milliseconds between two events, or `None` while the later has not happened.
    ///
    /// # Errors
    /// As [`CopyEngine::synchronize`].
    fn elapsed_ms(&self, start: &Event, end: &Event) -> Result<Option<f64>>;

    /// Host memory that this engine can read in place.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Cuda`] when it cannot be reserved or page-locked.
    fn host_buffer(&self, num_bytes: usize) -> Result<HostBuffer> {
        HostBuffer::for_device(num_bytes, self.device())
    }
}

impl dyn CopyEngine {
    /// The engine for `device`.
    ///
    /// # Errors
    /// [`Error::NoCuda`] without a usable CUDA device, [`Error::NotSupported`] for other devices.
    pub fn for_device(device: Device) -> Result<Box<dyn CopyEngine>> {
        match device {
            Device::Cpu => {
                // libtorch sets its autograd threads up at the first backward, for the devices it sees
                // then: CUDA must be there before, if a later engine is to use it.
                if let Err(reason) = load_cuda() {
                    tracing::debug!(%reason, "no CUDA");
                }
                Ok(Box::new(HostCopyEngine))
            }
            Device::Cuda(index) => Ok(Box::new(CudaCopyEngine::new(index)?)),
            other => Err(Error::NotSupported {
                operation: "streaming",
                implementer: format!("{other:?}"),
            }),
        }
    }
}

/// Copies within host memory, for runs without a GPU and for images that stay there. A copy is made when it
/// is started.
#[derive(Debug)]
pub(crate) struct HostCopyEngine;

impl CopyEngine for HostCopyEngine {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn is_host_memory(&self) -> bool {
        true
    }

    unsafe fn copy(
        &self,
        pieces: &[CopyPiece<'_>],
        _after: Option<&Event>,
    ) -> Result<(Event, Event)> {
        let start = Instant::now();
        for CopyPiece { source, destination } in pieces {
            let destination = *destination as *mut u8;
            // SAFETY: the caller vouches for the destination; both ranges are distinct allocations.
            unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), destination, source.len()) };
        }
        Ok((Event::Host(start), Event::Host(Instant::now())))
    }

    fn record(&self) -> Result<Event> {
        Ok(Event::Host(Instant::now()))
    }

    fn wait(&self, _event: &Event) -> Result<()> {
        Ok(())
    }

    fn synchronize(&self, _event: &Event) -> Result<()> {
        Ok(())
    }

    fn has_happened(&self, _event: &Event) -> Result<bool> {
        Ok(true)
    }

    fn elapsed_ms(&self, start: &Event, end: &Event) -> Result<Option<f64>> {
        match (start, end) {
            (Event::Host(start), Event::Host(end)) => {
                Ok(Some(end.saturating_duration_since(*start).as_secs_f64() * 1e3))
            }
            _ => Err(Error::usage("an event of another device was given to the CPU engine")),
        }
    }
}
