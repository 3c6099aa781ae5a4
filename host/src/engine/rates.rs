//! What this machine can do, measured in well under a second. Each rate is measured twice in a row or for as
//! long as the clocks rise: predictions of two runs on one machine are to be the same.

use std::time::{Duration, Instant};

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
/// Small kernels queued in a row: few enough for the driver's queue, which holds about a thousand, so that the
/// host never waits for the device.
const LAUNCHES_IN_A_ROW: u32 = 100;
/// Rows of them that are timed; the best counts.
const NUM_ROWS: usize = 5;
/// Measurements of which the best counts, the last ones.
const NUM_COUNTED: usize = 3;
/// Two measurements that differ by less are those of a clock that has settled.
const MOST_CHANGE: f64 = 0.03;

/// Rates of a GPU that nobody could measure, for plans made on a machine without one: a PCIe 4.0 x16
/// link and a card of the upper middle.
pub(super) const ASSUMED: Rates = Rates {
    disk_gb_per_s: Some(3.0),
    link_gb_per_s: Some(25.0),
    memory_gb_per_s: Some(1000.0),
    tflops: Some(100.0),
    launch_us: Some(5.0),
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
    let on_cuda = |what: &str, measured: &dyn Fn() -> Result<f64>| {
        is_cuda.then(|| known(what, measured())).flatten()
    };
    // First what makes the clocks rise.
    let tflops = known("arithmetic", tflops(device, kind));
    let rates = Rates {
        disk_gb_per_s: drive
            .and_then(|drive| known("the drive", drive.map(|drive| drive.gb_per_s))),
        // On the CPU a read fills the slot itself, and a kernel reads the same memory.
        link_gb_per_s: on_cuda("the link", &|| host_to_device_gb_per_s(device, LINK_BYTES)),
        memory_gb_per_s: on_cuda("device memory", &|| memory_gb_per_s(device)),
        tflops,
        // The CPU computes where it would queue.
        launch_us: on_cuda("launches", &|| launch_us(device, kind)),
    };
    tracing::debug!(?rates, seconds = start.elapsed().as_secs_f64(), "measured");
    (rates, lean)
}

/// Matrix products of a square that fills the device. Of random numbers: with equal ones it takes less power,
/// and its clock rises higher than with a model's.
fn tflops(device: Device, kind: Kind) -> Result<f64> {
    let _no_graph = tch::no_grad_guard();
    let (size, period): (i64, _) = match device.is_cuda() {
        true => (4096, RISING),
        false => (256, BRIEF),
    };
    let square = Tensor::f_randn([size, size], (Kind::Float, device))?.f_to_kind(kind)?;
    let seconds = steady_seconds(period, || Ok(square.f_matmul(&square)?))?;
    Ok(2.0 * (size as f64).powi(3) / seconds / 1e12)
}

/// A copy inside the device, which reads and writes every byte.
fn memory_gb_per_s(device: Device) -> Result<f64> {
    let _no_graph = tch::no_grad_guard();
    let from = Tensor::f_randint(256, [MEMORY_BYTES], (Kind::Uint8, device))?;
    let mut into = from.f_empty_like()?;
    let seconds = steady_seconds(BRIEF, || {
        into.f_copy_(&from)?;
        Ok(into.shallow_clone())
    })?;
    Ok(2.0 * MEMORY_BYTES as f64 / seconds / 1e9)
}

/// The host's time for one call of many that leave the device next to nothing to do.
fn launch_us(device: Device, kind: Kind) -> Result<f64> {
    let _no_graph = tch::no_grad_guard();
    let small = Tensor::f_ones([64], (kind, device))?;
    let row = || -> Result<f64> {
        let start = Instant::now();
        let mut last = small.f_add(&small)?;
        for _ in 1..LAUNCHES_IN_A_ROW {
            last = small.f_add(&small)?;
        }
        let seconds = start.elapsed().as_secs_f64();
        wait(&last)?;
        Ok(seconds)
    };
    row()?;
    let mut best_seconds = f64::INFINITY;
    for _ in 0..NUM_ROWS {
        best_seconds = best_seconds.min(row()?);
    }
    Ok(best_seconds / f64::from(LAUNCHES_IN_A_ROW) * 1e6)
}

/// How long something is measured.
#[derive(Debug, Clone, Copy)]
struct Period {
    /// What comes before is not believed: the clock may still be low, equally so all the time.
    least: Duration,
    /// When it ends though measurements differ.
    most: Duration,
    /// One measurement goes on until it takes as long.
    batch: Duration,
}

/// For a device whose clock is low while it rests.
const RISING: Period = Period {
    least: Duration::from_millis(60),
    most: Duration::from_millis(120),
    batch: Duration::from_millis(8),
};
/// For one whose clock has risen, or never rests.
const BRIEF: Period = Period {
    least: Duration::ZERO,
    most: Duration::from_millis(4),
    batch: Duration::from_millis(1),
};

/// Seconds of one call when the device goes on steadily: measured until two measurements in a row agree, but
/// no shorter and not much longer than `period` says. Calls that take longer than all of it are timed once.
fn steady_seconds(period: Period, mut call: impl FnMut() -> Result<Tensor>) -> Result<f64> {
    // The first one loads kernels.
    wait(&call()?)?;
    let start = Instant::now();
    let mut num_calls = 1_u32;
    let mut measured: Vec<f64> = Vec::new();
    loop {
        let begun = Instant::now();
        for _ in 1..num_calls {
            let _ = call()?;
        }
        wait(&call()?)?;
        let took = begun.elapsed();
        let seconds = took.as_secs_f64() / f64::from(num_calls);
        let agrees =
            measured.last().is_some_and(|before| (seconds / before - 1.0).abs() < MOST_CHANGE);
        measured.push(seconds);
        let elapsed = start.elapsed();
        if elapsed >= period.most || (agrees && elapsed >= period.least && took >= period.batch) {
            break;
        }
        // The wait for the last call is in it: a short measurement is more of it than of the calls.
        if took < period.batch {
            num_calls *= 2;
            measured.clear();
        }
    }
    Ok(measured.into_iter().rev().take(NUM_COUNTED).fold(f64::INFINITY, f64::min))
}

/// Waits for all that was queued before: fetching a value does.
fn wait(result: &Tensor) -> Result<f64> {
    Ok(result.f_flatten(0, -1)?.f_narrow(0, 0, 1)?.f_double_value(&[0])?)
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use super::*;

    /// The seconds of one call by [`steady_seconds`], and the number of calls. The first ones take longer.
    fn timed(period: Period, num_slow: u32, slow_ms: u64) -> (f64, u32) {
        let (mut num_calls, result) = (0, Tensor::zeros([1], (Kind::Float, Device::Cpu)));
        let seconds = steady_seconds(period, || {
            num_calls += 1;
            sleep(Duration::from_millis(if num_calls <= num_slow { slow_ms } else { 1 }));
            Ok(result.shallow_clone())
        });
        (seconds.unwrap(), num_calls)
    }

    #[test]
    fn calls_longer_than_the_time_for_all_are_timed_once() {
        let (seconds, num_calls) = timed(BRIEF, u32::MAX, 30);
        assert!(seconds >= 0.03, "{seconds}");
        assert_eq!(num_calls, 2);
    }

    #[test]
    fn a_device_that_is_slow_at_first_is_measured_when_it_no_longer_is() {
        // Equally slow for half of the least time: agreeing is not enough.
        let (seconds, _) = timed(RISING, 3, 10);
        assert!((0.001..0.005).contains(&seconds), "{seconds}");
    }

    #[test]
    fn the_cpu_has_a_rate_of_arithmetic_in_every_dtype_of_a_run() {
        for kind in [Kind::Float, Kind::BFloat16] {
            assert!(tflops(Device::Cpu, kind).unwrap() > 0.0, "{kind:?}");
        }
    }
}
