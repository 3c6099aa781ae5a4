//! The folder of a run: `config.toml`, `metrics.jsonl`, `checkpoints/`, `adapter/`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use blockstreamer_core::checkpoint::atomic::{remove_all_partials, write_file};

use super::RunConfig;

/// Where a run keeps what it makes.
#[derive(Debug, Clone)]
pub struct RunFolder {
    root: PathBuf,
}

impl RunFolder {
    /// A folder for a new run, or that of an earlier run to be resumed. Nothing is created yet.
    ///
    /// # Errors
    /// When it holds an earlier run and `resume` is not asked for.
    pub fn open(root: &Path, resume: bool) -> Result<Self> {
        let folder = Self { root: root.to_owned() };
        if !resume && (folder.metrics().exists() || folder.checkpoints().exists()) {
            bail!(
                "{} already holds a run: pass --resume to go on with it, or choose another --out",
                root.display()
            );
        }
        Ok(folder)
    }

    /// The settings of an earlier run in this folder, as they took effect.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn earlier(&self) -> Result<RunConfig> {
        let path = self.settings();
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("{} is damaged", path.display()))
    }

    /// Refuses settings other than those that an earlier run in this folder began with, where a change
    /// would make it another run: the adapter's shape, the rows and their order, the optimizer.
    ///
    /// # Errors
    /// When one differs from that in `config.toml`, naming it, or that file cannot be read.
    pub fn check_resumable(&self, config: &RunConfig) -> Result<()> {
        let path = self.settings();
        let earlier = self.earlier()?;
        let same = [
            ("model", earlier.model == config.model),
            ("data", earlier.data == config.data),
            ("seed", earlier.seed == config.seed),
            ("batch_size", earlier.batch_size == config.batch_size),
            ("micro_batches", earlier.micro_batches == config.micro_batches),
            ("sequence_length", earlier.sequence_length == config.sequence_length),
            ("expert_layout", earlier.expert_layout == config.expert_layout),
            ("[lora]", earlier.lora == config.lora),
            ("optimizer.name", earlier.optimizer.name == config.optimizer.name),
        ];
        let changed: Vec<_> = same.iter().filter(|(_, same)| !same).map(|(key, _)| *key).collect();
        if !changed.is_empty() {
            bail!(
                "{} differs from {}, and a started run keeps it: pass that file to go on, or choose \
                 another --out",
                changed.join(", "),
                path.display()
            );
        }
        Ok(())
    }

    /// Creates the folder and writes the settings as they took effect.
    ///
    /// # Errors
    /// When either cannot be written.
    pub fn create(&self, config: &RunConfig) -> Result<()> {
        let checkpoints = self.checkpoints();
        std::fs::create_dir_all(&checkpoints)
            .with_context(|| format!("cannot create {}", checkpoints.display()))?;
        for folder in [&self.root, &checkpoints] {
            remove_all_partials(folder)?;
        }
        let text = toml::to_string(config).context("the settings cannot be written as TOML")?;
        Ok(write_file(&self.settings(), text.as_bytes())?)
    }

    /// The settings as they took effect.
    fn settings(&self) -> PathBuf {
        self.root.join("config.toml")
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
