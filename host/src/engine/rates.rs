//! What this machine can do, measured in well under a second.

use std::time::Instant;

use blockstreamer_core::Result;
use blockstreamer_core::device::host_to_device_gb_per_s;
use blockstreamer_core::plan::Rates;
use blockstreamer_core::read::{DriveSetting, drive_gb_per_s};
use blockstreamer_core::source::BlockSource;
use tch::{Device, Kind, Tensor};

/// Large enough for the rate of a real block, small enough to be there at once.
const LINK_BYTES: usize = 64 << 20;
/// Enough for several requests in flight in each trial; a quarter of a second at 2 GB/s.
const DISK_BYTES: u64 = 512 << 20;
const MEMORY_BYTES: i64 = 256 << 20;
/// Calls that are timed together, after one that is not: the first one loads kernels.
const NUM_TIMED: u32 = 4;

/// Rates of a GPU that nobody could measure, for plans made on a machine without one: a PCIe 4.0 x16
/// link and a card of the upper middle.
pub(super) const ASSUMED: Rates = Rates {
    disk_gb_per_s: Some(3.0),
    link_gb_per_s: Some(25.0),
    memory_gb_per_s: Some(1000.0),
    tflops: Some(100.0),
};

/// Rates of `device`, the link to it and, when it is going to be read, the drive under `source`. What
/// cannot be measured is left out.
/// Also how the drive is read best with little memory.
pub(super) fn measure(
    device: Device,
    kind: Kind,
    source: &dyn BlockSource,
    reads: bool,
) -> (Rates, Option<DriveSetting>) {
    let start = Instant::now();
    let drive = reads.then(|| drive_gb_per_s(&source.files(), DISK_BYTES));
    let lean = drive.as_ref().and_then(|drive| Some(drive.as_ref().ok()?.lean));
    let known = |what: &str, rate: Result<f64>| match rate {
        Ok(rate) => Some(rate),
        Err(error) => {
            tracing::debug!(%error, "the rate of {what} is not known");
            None
        }
    };
    let is_cuda = device.is_cuda();
    let rates = Rates {
        disk_gb_per_s: drive
            .and_then(|drive| known("the drive", drive.map(|drive| drive.gb_per_s))),
        // On the CPU a read fills the slot itself, and a kernel reads the same memory.
        link_gb_per_s: is_cuda
            .then(|| known("the link", host_to_device_gb_per_s(device, LINK_BYTES)))
            .flatten(),
        memory_gb_per_s: is_cuda.then(|| known("device memory", memory_gb_per_s(device))).flatten(),
        tflops: known("arithmetic", tflops(device, kind)),
    };
    tracing::debug!(?rates, seconds = start.elapsed().as_secs_f64(), "measured");
    (rates, lean)
}

/// Matrix products of a square that fills the device.
fn tflops(device: Device, kind: Kind) -> Result<f64> {
    let _no_graph = tch::no_grad_guard();
    let size: i64 = if device.is_cuda() { 4096 } else { 256 };
    let square = Tensor::f_ones([size, size], (kind, device))?;
    let seconds = timed(|| Ok(square.f_matmul(&square)?))?;
    Ok(2.0 * (size as f64).powi(3) / seconds / 1e12)
}

/// A copy inside the device, which reads and writes every byte.
fn memory_gb_per_s(device: Device) -> Result<f64> {
    let from = Tensor::f_zeros([MEMORY_BYTES], (Kind::Uint8, device))?;
    let mut into = Tensor::f_empty([MEMORY_BYTES], (Kind::Uint8, device))?;
    let seconds = timed(|| {
        into.f_copy_(&from)?;
        Ok(into.shallow_clone())
    })?;
    Ok(2.0 * MEMORY_BYTES as f64 / seconds / 1e9)
}

/// Seconds of one call.
fn timed(mut call: impl FnMut() -> Result<Tensor>) -> Result<f64> {
    // Fetching one value waits for everything before it.
    let wait = |result: &Tensor| result.f_flatten(0, -1)?.f_narrow(0, 0, 1)?.f_double_value(&[0]);
    wait(&call()?)?;
    let start = Instant::now();
    for _ in 1..NUM_TIMED {
        let _ = call()?;
    }
    wait(&call()?)?;
    Ok((start.elapsed() / NUM_TIMED).as_secs_f64())
}
