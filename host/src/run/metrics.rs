//! `metrics.jsonl`: one JSON object per optimizer step.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use blockstreamer_core::checkpoint::atomic::write_file;
use serde::{Deserialize, Serialize};

use super::shares::StepTimes;

/// What one optimizer step did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Its number, from 1.
    pub step: u64,
    /// Mean loss over its targets, before the update.
    pub loss: f64,
    /// Learning rate of its update.
    pub learning_rate: f64,
    /// Norm of all gradients before clipping.
    pub grad_norm: f64,
    /// Tokens that went through the model.
    pub tokens: usize,
    /// Wall-clock time from the step before.
    pub seconds: f64,
    /// Bytes read from storage, for it and ahead of the next.
    pub read_bytes: u64,
    /// Bytes copied to the device.
    pub h2d_bytes: u64,
    /// Who was busy meanwhile.
    #[serde(flatten)]
    pub times: StepTimes,
}

/// Appends to `metrics.jsonl`.
#[derive(Debug)]
pub(super) struct MetricsFile {
    path: PathBuf,
    file: File,
}

impl MetricsFile {
    /// Opens the file for the steps after `completed_steps`; lines of later steps, which an interrupted
    /// run wrote after its last checkpoint, are dropped.
    pub(super) fn open(path: &Path, completed_steps: u64) -> Result<Self> {
        if path.exists() {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            let kept: String = text
                .lines()
                .filter(|line| {
                    serde_json::from_str::<StepMetrics>(line)
                        .is_ok_and(|metrics| metrics.step <= completed_steps)
                })
                .flat_map(|line| [line, "\n"])
                .collect();
            write_file(path, kept.as_bytes())?;
        }
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        Ok(Self { path: path.to_owned(), file })
    }

    pub(super) fn append(&mut self, metrics: &StepMetrics) -> Result<()> {
        let mut line = serde_json::to_string(metrics)?;
        line.push('\n');
        self.file
            .write_all(line.as_bytes())
            .with_context(|| format!("cannot write {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resuming_drops_the_lines_after_the_checkpoint_and_a_torn_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let line = |step| StepMetrics {
            step,
            loss: 1.0 / 3.0,
            learning_rate: 0.1,
            grad_norm: 2.0,
            tokens: 5,
            seconds: 0.5,
            read_bytes: 7,
            h2d_bytes: 8,
            times: StepTimes { copy_ms: 1.5, ..StepTimes::default() },
        };
        let mut file = MetricsFile::open(&path, 0).unwrap();
        for step in 1..=4 {
            file.append(&line(step)).unwrap();
        }
        std::fs::OpenOptions::new()
            .append(true)
            .open(&path)
            .unwrap()
            .write_all(b"{\"step\": 5, \"lo")
            .unwrap();
        MetricsFile::open(&path, 2).unwrap().append(&line(3)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let steps: Vec<StepMetrics> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(steps, [line(1), line(2), line(3)]);
    }

    #[test]
    fn lines_from_before_times_were_kept_are_still_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let old = r#"{"step": 1, "loss": 2.5, "learning_rate": 0.1, "grad_norm": 1.0, "tokens": 5, "seconds": 0.5, "read_bytes": 7, "h2d_bytes": 8}"#;
        std::fs::write(&path, format!("{old}\n")).unwrap();
        MetricsFile::open(&path, 1).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap().trim(), old);
    }
}
