//! The progress bar of a run; lines where there is no terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::StepMetrics;

/// Shows step, loss, tokens/s, GB/s and the time left on stderr.
#[derive(Debug)]
pub(super) struct Progress {
    bar: ProgressBar,
    total_steps: u64,
}

impl Progress {
    pub(super) fn new(completed_steps: u64, total_steps: u64) -> Self {
        let bar = ProgressBar::new(total_steps).with_position(completed_steps);
        let style = ProgressStyle::with_template("{bar:30} step {pos}/{len}  {msg}  ETA {eta}");
        if let Ok(style) = style {
            bar.set_style(style);
        }
        bar.reset_eta();
        bar.enable_steady_tick(Duration::from_millis(250));
        Self { bar, total_steps }
    }

    pub(super) fn step(&self, metrics: &StepMetrics) {
        let seconds = metrics.seconds.max(1e-9);
        let message = format!(
            "loss {:.4}  {:.0} tokens/s  {:.3} GB/s",
            metrics.loss,
            metrics.tokens as f64 / seconds,
            metrics.h2d_bytes as f64 / seconds / 1e9
        );
        self.bar.set_position(metrics.step);
        self.bar.set_message(message.clone());
        // Twenty lines a run are enough for a log file.
        let every = (self.total_steps / 20).max(1);
        if self.bar.is_hidden() && (metrics.step.is_multiple_of(every) || metrics.step == 1) {
            tracing::info!("step {}/{}  {message}", metrics.step, self.total_steps);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
