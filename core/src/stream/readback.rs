//! Values that go back to the host without the host waiting for later work.

use std::time::Instant;

use tch::{Device, Tensor};

use super::BlockStream;
use crate::device::Event;
use crate::error::Result;

/// A value on its way from the device to the host.
#[derive(Debug)]
pub struct Readback {
    host: Tensor,
    arrived: Event,
}

impl BlockStream {
    /// Queues a copy of a one-element tensor to the host.
    ///
    /// Asking libtorch for the value instead would wait for everything queued so far, the next step
    /// included; this waits only for what came before the copy.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch) when libtorch refuses, [`Error::Cuda`](crate::Error::Cuda).
    pub fn read_back(&self, value: &Tensor) -> Result<Readback> {
        let host = value.f_to_device_(Device::Cpu, value.kind(), true, true)?;
        let arrived = self.engine.record()?;
        self.borrow()?.stats.d2h_bytes += (value.numel() * value.kind().elt_size_in_bytes()) as u64;
        Ok(Readback { host, arrived })
    }

    /// The value, once it has arrived.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda), also for errors of earlier work on the device.
    pub fn value(&self, readback: &Readback) -> Result<f64> {
        let start = Instant::now();
        self.engine.synchronize(&readback.arrived)?;
        let mut inner = self.borrow()?;
        inner.stats.device_wait_ms += inner.driving.was_elsewhere(start);
        drop(inner);
        Ok(readback.host.f_double_value(&[])?)
    }
}
