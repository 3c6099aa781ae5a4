//! What `bench step` found: for people, and with `--json` for programs.

use std::fmt;
use std::path::PathBuf;

use blockstreamer_core::plan::{Prediction, Traffic};
use serde::Serialize;

use super::median;
use crate::engine::Tier;
use crate::run::{Shares, StepMetrics, StepTimes};
use crate::size::Size;

/// What hardware and host need at least for one step; the slowest is the floor, because all work at once.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Floors {
    /// Bytes copied per step over the bare link's rate.
    pub link_s: f64,
    /// Bytes read per step over the bare drive's rate.
    pub drive_s: f64,
    /// Time that the device spent in visits, less what it only waited there for launches: the median of these
    /// very steps. Where it did nothing but wait for them, what the plan predicts for the arithmetic.
    pub compute_s: f64,
    /// What the plan predicts that the host takes to queue the work. That is an estimate: never more than the
    /// median step took. 0 on the CPU.
    pub host_s: f64,
}

/// The steps of one token count.
#[derive(Debug, Serialize)]
pub struct TokensReport {
    /// Tokens of a step.
    pub tokens: usize,
    /// Median over the timed steps, from launch to launch as `train` counts.
    pub median_s: f64,
    /// All timed steps, from an idle device to an idle device, over their number.
    pub mean_s: f64,
    /// From launch to launch, each timed step.
    pub seconds: Vec<f64>,
    /// Bytes read from storage per step.
    ///
    /// Nothing drains between steps: what is counted between two moments depends on what was under way at
    /// both, a block more or less. All steps of a token count together, from an empty engine to an idle one,
    /// move a number of bytes that depends on nothing. When that is to the byte what the plan says of them
    /// (`is_as_planned`), this is what it says of every step but the first; else `counted_read_bytes`.
    pub read_bytes: u64,
    /// Bytes copied to the device per step, as `read_bytes`.
    pub h2d_bytes: u64,
    /// Bytes read while the timed steps were launched, over their number.
    pub counted_read_bytes: u64,
    /// Bytes copied meanwhile, over the number of steps.
    pub counted_h2d_bytes: u64,
    /// Whether all steps, timed or not, moved exactly the bytes that the plan says.
    pub is_as_planned: bool,
    /// What the plan said before the first step, by rates that were measured in a moment.
    pub prediction: Prediction,
    /// `median_s` over the prediction's seconds; `None` when it has none.
    pub predicted_ratio: Option<f64>,
    /// The least that it could take.
    pub floors: Floors,
    /// The largest of them.
    pub floor_s: f64,
    /// Which one that is: `link`, `drive`, `compute`, `host`.
    pub floor: &'static str,
    /// `median_s / floor_s`: near 1 only fewer bytes, fewer kernels or faster hardware would help.
    pub ratio: f64,
    /// Who was busy over the timed steps.
    pub shares: Shares,
    /// The busiest.
    pub binding: &'static str,
    /// Bytes of blocks that stay on the device.
    pub kept_bytes: usize,
    /// Most device memory that libtorch had handed out at one time, on CUDA.
    pub peak_device_bytes: Option<usize>,
    /// Most memory of the process so far.
    pub peak_host_bytes: Option<u64>,
    /// Loss of the last timed step.
    pub loss: f64,
    /// File of the trace.
    pub trace: Option<PathBuf>,
}

/// What `bench step` found.
#[derive(Debug, Serialize)]
pub struct StepReport {
    /// Folder of the model.
    pub model: PathBuf,
    /// `cpu`, `cuda:0`.
    pub device: String,
    /// Where blocks come from.
    pub tier: Tier,
    /// Blocks on the device beyond the one in use.
    pub prefetch_ahead: usize,
    /// Streamed blocks.
    pub num_blocks: usize,
    /// Bytes of all their images.
    pub streamed_bytes: u64,
    /// Rate of bare copies of a block's size, the best of before and after, 10^9 bytes per second.
    pub link_gb_per_s: f64,
    /// Rate of the bare drive on the same files, the best after each token count; `None` when no step
    /// reads.
    pub drive_gb_per_s: Option<f64>,
    /// One entry per token count.
    pub counts: Vec<TokensReport>,
}

/// Rates of the bare hardware, and what was measured with them.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Bare {
    pub(super) link_gb_per_s: f64,
    pub(super) drive_gb_per_s: f64,
}

/// Steps of one token count before they are held against the hardware.
pub(super) struct Timed {
    pub(super) tokens: usize,
    pub(super) mean_s: f64,
    pub(super) steps: Vec<StepMetrics>,
    /// What the plan says that a step moves.
    pub(super) planned: Traffic,
    /// Whether all steps together moved what the plan says.
    pub(super) is_as_planned: bool,
    pub(super) prediction: Prediction,
    pub(super) kept_bytes: usize,
    pub(super) peak_device_bytes: Option<usize>,
    pub(super) peak_host_bytes: Option<u64>,
    pub(super) trace: Option<PathBuf>,
}

impl Timed {
    pub(super) fn report(self, bare: Bare) -> TokensReport {
        let num_steps = self.steps.len() as u64;
        let per_step = |value: fn(&StepMetrics) -> u64| {
            self.steps.iter().map(value).sum::<u64>() / num_steps.max(1)
        };
        let (counted_read_bytes, counted_h2d_bytes) =
            (per_step(|step| step.read_bytes), per_step(|step| step.h2d_bytes));
        let (read_bytes, h2d_bytes) = match self.is_as_planned {
            true => (self.planned.disk_bytes, self.planned.link_bytes),
            false => (counted_read_bytes, counted_h2d_bytes),
        };
        let seconds_for = |num_bytes: u64, gb_per_s: f64| match num_bytes {
            0 => 0.0,
            _ => num_bytes as f64 / gb_per_s / 1e9,
        };
        let predicted_s = self.prediction.compute_seconds;
        let compute_s = |step: &StepMetrics| compute_s(&step.times, predicted_s);
        let median_s = median(self.steps.iter().map(|step| step.seconds));
        let floors = Floors {
            link_s: seconds_for(h2d_bytes, bare.link_gb_per_s),
            drive_s: seconds_for(read_bytes, bare.drive_gb_per_s),
            compute_s: median(self.steps.iter().map(compute_s)),
            host_s: self.prediction.launch_seconds.unwrap_or(0.0).min(median_s),
        };
        let (floor, floor_s) = floors.largest();
        let shares = Shares::of(self.steps.iter().map(|step| (&step.times, step.seconds)));
        TokensReport {
            tokens: self.tokens,
            median_s,
            mean_s: self.mean_s,
            seconds: self.steps.iter().map(|step| step.seconds).collect(),
            read_bytes,
            h2d_bytes,
            counted_read_bytes,
            counted_h2d_bytes,
            is_as_planned: self.is_as_planned,
            prediction: self.prediction,
            predicted_ratio: self.prediction.bound.map(|_| median_s / self.prediction.seconds),
            floors,
            floor_s,
            floor,
            ratio: median_s / floor_s,
            shares,
            binding: shares.binding(),
            kept_bytes: self.kept_bytes,
            peak_device_bytes: self.peak_device_bytes,
            peak_host_bytes: self.peak_host_bytes,
            loss: self.steps.last().map_or(f64::NAN, |step| step.loss),
            trace: self.trace,
        }
    }
}

/// What computing takes at least. Visits of which the device has only followed the launches say nothing of
/// that; it is not above what they took.
fn compute_s(times: &StepTimes, predicted_s: Option<f64>) -> f64 {
    let visits_ms = times.compute_ms.max(0.0);
    let (least_s, visits_s) = ((visits_ms - times.launch_ms).max(0.0) / 1e3, visits_ms / 1e3);
    predicted_s.map_or(least_s, |predicted_s| predicted_s.clamp(least_s, visits_s))
}

impl Floors {
    fn largest(&self) -> (&'static str, f64) {
        [("drive", self.drive_s), ("compute", self.compute_s), ("host", self.host_s)]
            .into_iter()
            .fold(("link", self.link_s), |most, next| if next.1 > most.1 { next } else { most })
    }
}

impl fmt::Display for StepReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let streamed = Size { num_bytes: self.streamed_bytes };
        writeln!(
            formatter,
            "{}: {} blocks, {streamed}, tier {}, {} ahead, on {}",
            self.model.display(),
            self.num_blocks,
            serde_json::to_value(self.tier).unwrap_or_default().as_str().unwrap_or("?"),
            self.prefetch_ahead,
            self.device
        )?;
        write!(formatter, "bare link {:.1} GB/s", self.link_gb_per_s)?;
        if let Some(rate) = self.drive_gb_per_s {
            write!(formatter, ", bare drive {rate:.1} GB/s")?;
        }
        write!(
            formatter,
            "\n{:>7} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7} {:>9} {:>9}",
            "tokens",
            "s/step",
            "predicted",
            "sync'd s",
            "read GB",
            "copied GB",
            "floor s",
            "ratio",
            "device",
            "host"
        )?;
        for count in &self.counts {
            let bytes = |bytes: Option<u64>| {
                bytes.map_or_else(|| "-".to_owned(), |num_bytes| Size { num_bytes }.to_string())
            };
            let predicted = match count.prediction.bound {
                Some(_) => format!("{:.4}", count.prediction.seconds),
                None => "-".to_owned(),
            };
            write!(
                formatter,
                "\n{:>7} {:>9.4} {:>9} {:>9.4} {:>9.3} {:>9.3} {:>9.4} {:>6.2}x {:>9} {:>9}\n        floor: {}; {} kept; {}",
                count.tokens,
                count.median_s,
                predicted,
                count.mean_s,
                count.read_bytes as f64 / 1e9,
                count.h2d_bytes as f64 / 1e9,
                count.floor_s,
                count.ratio,
                bytes(count.peak_device_bytes.map(|bytes| bytes as u64)),
                bytes(count.peak_host_bytes),
                count.floor,
                Size { num_bytes: count.kept_bytes as u64 },
                count.shares
            )?;
            if let Some(bound) = count.prediction.bound {
                write!(formatter, "; predicted: as long as {bound} takes")?;
            }
            if !count.is_as_planned {
                write!(
                    formatter,
                    "\n        the bytes are counted: not those of the plan were moved"
                )?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use blockstreamer_core::plan::Bound;

    use super::*;

    /// A step on CUDA that reads nothing; bytes counted, milliseconds in visits and for launches.
    fn step(h2d_bytes: u64, compute_ms: f64, launch_ms: f64) -> StepMetrics {
        StepMetrics {
            step: 3,
            loss: 2.0,
            learning_rate: 0.1,
            grad_norm: 1.0,
            tokens: 128,
            seconds: 0.5,
            read_bytes: 0,
            h2d_bytes,
            times: StepTimes { compute_ms, host_ms: launch_ms, launch_ms, ..StepTimes::default() },
        }
    }

    fn report(steps: Vec<StepMetrics>, is_as_planned: bool) -> TokensReport {
        report_of(steps, is_as_planned, None)
    }

    fn report_of(
        steps: Vec<StepMetrics>,
        is_as_planned: bool,
        launch_seconds: Option<f64>,
    ) -> TokensReport {
        let timed = Timed {
            tokens: 128,
            mean_s: 0.5,
            steps,
            planned: Traffic { disk_bytes: 0, link_bytes: 8_000_000_000 },
            is_as_planned,
            prediction: Prediction {
                compute_seconds: Some(0.1),
                launch_seconds,
                seconds: 0.25,
                bound: Some(Bound::Link),
                ..Prediction::default()
            },
            kept_bytes: 0,
            peak_device_bytes: None,
            peak_host_bytes: None,
            trace: None,
        };
        timed.report(Bare { link_gb_per_s: 20.0, drive_gb_per_s: 0.0 })
    }

    #[test]
    fn bytes_are_the_plans_when_all_steps_moved_them_and_the_counted_ones_when_they_did_not() {
        // What was under way at both ends, a gigabyte more or less, is in what was counted.
        let steps = || vec![step(9_000_000_000, 50.0, 0.0), step(9_000_000_000, 50.0, 0.0)];
        let planned = report(steps(), true);
        assert_eq!((planned.h2d_bytes, planned.counted_h2d_bytes), (8_000_000_000, 9_000_000_000));
        assert_eq!((planned.floor, planned.floor_s, planned.ratio), ("link", 0.4, 1.25));
        assert_eq!(planned.predicted_ratio, Some(2.0));
        let counted = report(steps(), false);
        assert_eq!((counted.h2d_bytes, counted.counted_h2d_bytes), (9_000_000_000, 9_000_000_000));
        assert_eq!((counted.floor_s, counted.is_as_planned), (0.45, false));
    }

    #[test]
    fn a_device_that_only_follows_launches_is_no_floor_of_arithmetic() {
        let compute_s = |compute_ms, launch_ms| {
            report(vec![step(0, compute_ms, launch_ms)], true).floors.compute_s
        };
        assert_eq!(compute_s(480.0, 0.0), 0.48);
        assert_eq!(compute_s(480.0, 80.0), 0.4);
        // No less than the arithmetic is predicted to take, and no more than the visits took.
        assert_eq!(compute_s(480.0, 470.0), 0.1);
        assert_eq!(compute_s(480.0, 490.0), 0.1);
        assert_eq!(compute_s(60.0, 50.0), 0.06);
        let bound_by_launches = report(vec![step(0, 490.0, 480.0)], false);
        assert_eq!((bound_by_launches.floor, bound_by_launches.binding), ("compute", "host"));
        assert_eq!(bound_by_launches.ratio, 5.0);
        // What the host does between visits is not in them.
        let between = StepTimes { compute_ms: 480.0, host_ms: 80.0, ..StepTimes::default() };
        assert_eq!(super::compute_s(&between, Some(0.1)), 0.48);
    }

    #[test]
    fn the_host_is_the_floor_where_it_is_predicted_to_queue_longest_but_never_above_the_step() {
        let of = |launch_seconds| report_of(vec![step(0, 490.0, 480.0)], false, launch_seconds);
        let host = of(Some(0.4));
        assert_eq!((host.floor, host.floor_s, host.ratio), ("host", 0.4, 1.25));
        let device = of(Some(0.05));
        assert_eq!((device.floor, device.floor_s), ("compute", 0.1));
        // An estimate may be too high.
        let most = of(Some(0.7));
        assert_eq!((most.floor, most.floors.host_s, most.ratio), ("host", 0.5, 1.0));
        assert_eq!(of(None).floors.host_s, 0.0);
    }
}
