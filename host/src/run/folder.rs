//! The folder of a run: `config.toml`, `metrics.jsonl`, `checkpoints/`, `adapter/`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use blockstreamer_core::checkpoint::atomic::write_file;

use super::RunConfig;

/// Where a run keeps what it makes.
#[derive(Debug, Clone)]
pub struct RunFolder {
    root: PathBuf,
}

impl RunFolder {
    /// A folder for a new run, or that of an earlier run to be resumed.
    ///
    /// # Errors
    /// When it holds an earlier run and `resume` is not asked for, or cannot be written.
    pub fn open(root: &Path, resume: bool) -> Result<Self> {
        let folder = Self { root: root.to_owned() };
        if !resume && (folder.metrics().exists() || folder.checkpoints().exists()) {
            bail!(
                "{} already holds a run: pass --resume to go on with it, or choose another --out",
                root.display()
            );
        }
        for path in [root, &folder.checkpoints()] {
            std::fs::create_dir_all(path)
                .with_context(|| format!("cannot create {}", path.display()))?;
        }
        Ok(folder)
    }

    /// Writes the settings as they took effect.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save_config(&self, config: &RunConfig) -> Result<()> {
        let text = toml::to_string(config).context("the settings cannot be written as TOML")?;
        Ok(write_file(&self.root.join("config.toml"), text.as_bytes())?)
    }

    /// One JSON object per optimizer step.
    pub fn metrics(&self) -> PathBuf {
        self.root.join("metrics.jsonl")
    }

    /// A folder per checkpoint.
    pub fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }

    /// The adapter, as PEFT reads it.
    pub fn adapter(&self) -> PathBuf {
        self.root.join("adapter")
    }
}
