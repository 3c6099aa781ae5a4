//! The progress bar of a run; lines where there is no terminal.

use std::collections::VecDeque;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::{Shares, StepMetrics, StepTimes};

/// Steps that the shares of wall time are shown over.
const NUM_RECENT: usize = 8;

/// Shows step, loss, tokens/s, the rate of copying, who is busy and the time left on stderr.
#[derive(Debug)]
pub(super) struct Progress {
    bar: ProgressBar,
    total_steps: u64,
    recent: VecDeque<(StepTimes, f64)>,
}

impl Progress {
    pub(super) fn new(completed_steps: u64, total_steps: u64) -> Self {
        let bar = ProgressBar::new(total_steps).with_position(completed_steps);
        let style = ProgressStyle::with_template("{bar:20} step {pos}/{len}  {msg}  ETA {eta}");
        if let Ok(style) = style {
            bar.set_style(style);
        }
        bar.reset_eta();
        bar.enable_steady_tick(Duration::from_millis(250));
        Self { bar, total_steps, recent: VecDeque::new() }
    }

    pub(super) fn step(&mut self, metrics: &StepMetrics) {
        self.recent.push_back((metrics.times, metrics.seconds));
        if self.recent.len() > NUM_RECENT {
            self.recent.pop_front();
        }
        let message = self.message(metrics);
        self.bar.set_position(metrics.step);
        self.bar.set_message(message.clone());
        // Twenty lines a run are enough for a log file.
        let every = (self.total_steps / 20).max(1);
        if self.bar.is_hidden() && (metrics.step.is_multiple_of(every) || metrics.step == 1) {
            tracing::info!("step {}/{}  {message}", metrics.step, self.total_steps);
        }
    }

    fn message(&self, metrics: &StepMetrics) -> String {
        let seconds = metrics.seconds.max(1e-9);
        format!(
            "loss {:.4}  {:.0} tokens/s  {}  {}",
            metrics.loss,
            metrics.tokens as f64 / seconds,
            rate(metrics.h2d_bytes as f64 / seconds),
            Shares::of(self.recent.iter().map(|(times, seconds)| (times, *seconds)))
        )
    }
}

/// A rate in the largest unit that leaves a digit before the point.
fn rate(bytes_per_second: f64) -> String {
    let units = [("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)];
    match units.into_iter().find(|(_, factor)| bytes_per_second >= *factor) {
        Some((unit, factor)) => format!("{:.1} {unit}", bytes_per_second / factor),
        None => format!("{bytes_per_second:.0} B/s"),
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_rates_have_a_unit_in_which_they_are_not_zero() {
        let texts = [55.43e9, 12.3e6, 4_567.0, 3.0, 0.0].map(rate);
        assert_eq!(texts, ["55.4 GB/s", "12.3 MB/s", "4.6 kB/s", "3 B/s", "0 B/s"]);
    }

    #[test]
    fn the_line_shows_who_was_busy_over_the_last_steps_only() {
        let mut progress = Progress::new(0, 100);
        let metrics = |step, read_ms| StepMetrics {
            step,
            loss: 2.0,
            learning_rate: 0.1,
            grad_norm: 1.0,
            tokens: 128,
            seconds: 0.5,
            read_bytes: 1_000_000,
            h2d_bytes: 2_000_000,
            times: StepTimes { read_ms, copy_ms: 250.0, host_ms: 10.0, ..StepTimes::default() },
        };
        progress.step(&metrics(1, 0.0));
        let line = progress.message(&metrics(1, 0.0));
        assert!(
            line.starts_with("loss 2.0000  256 tokens/s  4.0 MB/s  read 0%  copy 50%"),
            "{line}"
        );
        (2..=1 + NUM_RECENT as u64).for_each(|step| progress.step(&metrics(step, 490.0)));
        let line = progress.message(&metrics(9, 490.0));
        assert!(line.ends_with("read 98%  copy 50%  compute 0%  host 2%  (read binds)"), "{line}");
    }
}
