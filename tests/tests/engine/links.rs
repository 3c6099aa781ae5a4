//! Copy engines that do something of their own before each call.

use std::fmt;
use std::sync::Mutex;
use std::time::Duration;

use blockstreamer_core::Result;
use blockstreamer_core::device::{CopyEngine, CopyPiece, Event, HostBuffer};
use tch::{Device, Kind, Tensor};

use crate::rig::device;

/// What is about to be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Copy,
    Wait,
    Other,
}

type Before = dyn Fn(&dyn CopyEngine, Call) -> Result<()> + Send + Sync;

/// Another engine, before whose calls something else happens.
pub(crate) struct Hooked {
    inner: Box<dyn CopyEngine>,
    before: Box<Before>,
}

impl Hooked {
    /// Around the engine of the device under test.
    pub(crate) fn new(
        before: impl Fn(&dyn CopyEngine, Call) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        let inner = <dyn CopyEngine>::for_device(device()).unwrap();
        Self { inner, before: Box::new(before) }
    }

    fn call(&self, call: Call) -> Result<()> {
        (self.before)(&*self.inner, call)
    }
}

impl fmt::Debug for Hooked {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Hooked").field(&self.inner).finish()
    }
}

impl CopyEngine for Hooked {
    fn device(&self) -> Device {
        self.inner.device()
    }

    fn is_host_memory(&self) -> bool {
        self.inner.is_host_memory()
    }

    unsafe fn copy(
        &self,
        pieces: &[CopyPiece<'_>],
        after: Option<&Event>,
    ) -> Result<(Event, Event)> {
        self.call(Call::Copy)?;
        // SAFETY: the caller's promises are handed on unchanged.
        unsafe { self.inner.copy(pieces, after) }
    }

    fn record(&self) -> Result<Event> {
        self.call(Call::Other)?;
        self.inner.record()
    }

    fn wait(&self, event: &Event) -> Result<()> {
        self.call(Call::Wait)?;
        self.inner.wait(event)
    }

    fn synchronize(&self, event: &Event) -> Result<()> {
        self.call(Call::Other)?;
        self.inner.synchronize(event)
    }

    fn has_happened(&self, event: &Event) -> Result<bool> {
        self.call(Call::Other)?;
        self.inner.has_happened(event)
    }

    fn elapsed_ms(&self, start: &Event, end: &Event) -> Result<Option<f64>> {
        self.call(Call::Other)?;
        self.inner.elapsed_ms(start, end)
    }

    fn host_buffer(&self, num_bytes: usize) -> Result<HostBuffer> {
        self.inner.host_buffer(num_bytes)
    }
}

/// A link over which every copy takes its time: on a GPU, the time that 8 MiB take.
pub(crate) fn starved() -> Hooked {
    const BALLAST_BYTES: usize = 8 << 20;
    let ballast = device().is_cuda().then(|| {
        let scratch = Tensor::zeros([BALLAST_BYTES as i64], (Kind::Uint8, device()));
        (HostBuffer::for_device(BALLAST_BYTES, device()).unwrap(), Mutex::new(scratch))
    });
    Hooked::new(move |engine, call| {
        match &ballast {
            _ if call != Call::Copy => {}
            Some((source, scratch)) => {
                let destination = scratch.lock().unwrap().data_ptr() as usize;
                let piece = CopyPiece { source: source.bytes(), destination };
                // SAFETY: both live as long as the engine, whose streams are idle when it goes.
                unsafe { engine.copy(&[piece], None)? };
            }
            None => std::thread::sleep(Duration::from_micros(200)),
        }
        Ok(())
    })
}

/// A GPU that has much to do before it comes to a visit whose block was fetched.
pub(crate) fn busy() -> Hooked {
    let work = Tensor::ones([2048, 2048], (Kind::Float, device()));
    let work = Mutex::new(work);
    Hooked::new(move |_, call| {
        if call == Call::Wait {
            let work = work.lock().unwrap();
            let _ = work.f_matmul(&work)?;
        }
        Ok(())
    })
}
