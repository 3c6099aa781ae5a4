//! Checkpoints: a folder per saved step, whole or not at all.
//!
//! ```text
//! checkpoints/step-00000100/  state.json  optimizer.safetensors  adapter/
//! ```
//! Row order, dropout and learning rate follow from the step number, so nothing else needs saving.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use blockstreamer_core::adapter::Adapter;
use blockstreamer_core::checkpoint::atomic::{AtomicDirectory, write_file};
use blockstreamer_core::checkpoint::{read_safetensors, write_safetensors};
use blockstreamer_core::optimizer::{Optimizer, OptimizerState};
use serde::{Deserialize, Serialize};
use tch::Device;

const STATE_FILE: &str = "state.json";
const OPTIMIZER_FILE: &str = "optimizer.safetensors";

#[derive(Debug, Serialize, Deserialize)]
struct SavedState {
    version: u32,
    completed_steps: u64,
    optimizer: String,
    counters: BTreeMap<String, u64>,
}

const VERSION: u32 = 1;

/// A saved step.
#[derive(Debug)]
pub(super) struct Checkpoint {
    folder: PathBuf,
    state: SavedState,
}

impl Checkpoint {
    /// The newest whole checkpoint in `folder`, if there is one.
    pub(super) fn latest(folder: &Path) -> Result<Option<Self>> {
        let Some(newest) = numbered(folder)?.pop() else { return Ok(None) };
        let path = newest.join(STATE_FILE);
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let state: SavedState = serde_json::from_str(&text).with_context(|| {
            format!("{} is damaged; remove that folder to go back one checkpoint", path.display())
        })?;
        if state.version != VERSION {
            bail!("{} has version {}, this program reads {VERSION}", path.display(), state.version);
        }
        Ok(Some(Self { folder: newest, state }))
    }

    /// Steps done when it was saved.
    pub(super) fn completed_steps(&self) -> u64 {
        self.state.completed_steps
    }

    /// The adapter's folder.
    pub(super) fn adapter(&self) -> PathBuf {
        self.folder.join("adapter")
    }

    /// Gives the optimizer what it had. Its moments go to `device`.
    pub(super) fn restore(
        &self,
        name: &str,
        optimizer: &mut dyn Optimizer,
        device: Device,
    ) -> Result<()> {
        if self.state.optimizer != name {
            bail!(
                "{} was saved by optimizer '{}', this run uses '{name}'",
                self.folder.display(),
                self.state.optimizer
            );
        }
        let tensors = read_safetensors(&self.folder.join(OPTIMIZER_FILE))?;
        let tensors = tensors
            .iter()
            .map(|(name, tensor)| Ok((name.to_owned(), tensor.f_to_device(device)?)))
            .collect::<Result<_>>()?;
        optimizer.restore(OptimizerState { counters: self.state.counters.clone(), tensors })?;
        Ok(())
    }
}

/// Saves a step, then removes all but the newest `keep` checkpoints.
pub(super) fn save(
    folder: &Path,
    completed_steps: u64,
    adapter: &dyn Adapter,
    base_model: &str,
    (name, optimizer): (&str, &dyn Optimizer),
    keep: usize,
) -> Result<()> {
    let target = folder.join(format!("step-{completed_steps:08}"));
    let directory = AtomicDirectory::create(&target, STATE_FILE)?;
    adapter.export(&directory.path().join("adapter"), base_model)?;
    let OptimizerState { counters, tensors } = optimizer.state();
    write_safetensors(&directory.path().join(OPTIMIZER_FILE), &tensors, &[])?;
    let state =
        SavedState { version: VERSION, completed_steps, optimizer: name.to_owned(), counters };
    write_file(&directory.path().join(STATE_FILE), &serde_json::to_vec_pretty(&state)?)?;
    directory.commit()?;
    let mut all = numbered(folder)?;
    all.truncate(all.len().saturating_sub(keep));
    for old in all {
        std::fs::remove_dir_all(&old)
            .with_context(|| format!("cannot remove {}", old.display()))?;
    }
    Ok(())
}

/// The checkpoint folders, oldest first.
fn numbered(folder: &Path) -> Result<Vec<PathBuf>> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let entries =
        std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut found = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.strip_prefix("step-").is_some_and(|number| number.parse::<u64>().is_ok()) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
