//! From a model folder and settings to something that can be executed.

mod config;
mod grouping;
mod launch;
mod planning;
mod rates;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use blockstreamer_core::checkpoint::{Checkpoint, Layout};
use blockstreamer_core::device::load_cuda;
use blockstreamer_core::family::{Model, ModelOptions};
use blockstreamer_core::source::shards::ShardSource;
use blockstreamer_core::source::{BlockSource, SafetensorsSource};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind};

use crate::plugins::Registry;

pub use config::{StreamConfig, Tier};
pub use grouping::{Cut, Fitted};
pub use launch::{Launch, Launched, MakeAdapter};
pub use planning::{Job, Memory, Planner, Trained};

/// Compute dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// bf16 on CUDA, fp32 on the CPU.
    #[default]
    Auto,
    /// 32 bits.
    Fp32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    Fp16,
}

impl Precision {
    /// libtorch's name for it.
    pub fn kind(self, device: Device) -> Kind {
        match self {
            Self::Auto if device.is_cuda() => Kind::BFloat16,
            Self::Auto | Self::Fp32 => Kind::Float,
            Self::Bf16 => Kind::BFloat16,
            Self::Fp16 => Kind::Half,
        }
    }
}

/// The device called `auto`, `cpu`, `cuda` or `cuda:N`.
///
/// # Errors
/// When the name is another, or there is no such CUDA device.
pub fn device(name: &str) -> Result<Device> {
    let index = match name {
        "cpu" => return Ok(Device::Cpu),
        "auto" => match load_cuda() {
            Ok(()) => return Ok(Device::Cuda(0)),
            Err(reason) => {
                // A machine with a driver is meant to use it.
                match Path::new("/proc/driver/nvidia/version").exists() {
                    true => tracing::warn!("running on the CPU: {reason}"),
                    false => tracing::debug!("running on the CPU: {reason}"),
                }
                return Ok(Device::Cpu);
            }
        },
        "cuda" => 0,
        _ => match name.strip_prefix("cuda:").and_then(|index| index.parse().ok()) {
            Some(index) => index,
            None => bail!("device '{name}' is not known; there are auto, cpu, cuda and cuda:N"),
        },
    };
    load_cuda()?;
    let num_devices = tch::Cuda::device_count() as usize;
    if index >= num_devices {
        bail!("there is no cuda:{index}: this machine has {num_devices} CUDA device(s)");
    }
    Ok(Device::Cuda(index))
}

/// A model folder, recognised by a family and laid out as blocks. No weight has been read.
#[derive(Debug)]
pub struct OpenModel {
    /// The folder.
    pub directory: PathBuf,
    /// Its files.
    pub checkpoint: Checkpoint,
    /// The family's model of it.
    pub model: Box<dyn Model>,
    /// What was decided about it.
    pub options: ModelOptions,
    /// Its tensors as blocks.
    pub layout: Layout,
}

impl OpenModel {
    /// Opens the folder `directory` with whichever family takes its `model_type`.
    ///
    /// # Errors
    /// When the folder is no complete model, or no family found takes it.
    pub fn open(registry: &Registry, directory: &Path, options: ModelOptions) -> Result<Self> {
        let checkpoint = Checkpoint::open(directory)?;
        let model = registry
            .open_model(&checkpoint.config_json, &options)
            .with_context(|| format!("cannot open the model in {}", directory.display()))?;
        let layout = Layout::of(&checkpoint, &*model, &options)?;
        Ok(Self { directory: directory.to_owned(), checkpoint, model, options, layout })
    }

    /// The model once more, for another executor.
    ///
    /// # Errors
    /// As [`OpenModel::open`].
    pub fn reopen(&self, registry: &Registry) -> Result<Box<dyn Model>> {
        registry
            .open_model(&self.checkpoint.config_json, &self.options)
            .with_context(|| format!("cannot open the model in {}", self.directory.display()))
    }

    /// The source of its blocks: its own files, or shards of them.
    ///
    /// # Errors
    /// When files cannot be opened, or shards belong to another checkpoint.
    pub fn source(&self, config: &StreamConfig) -> Result<Arc<dyn BlockSource>> {
        let source: Arc<dyn BlockSource> = match &config.shards {
            None => Arc::new(SafetensorsSource::open(self.layout.clone())?),
            Some(shards) => {
                let identity = self.layout.identity(&self.checkpoint)?;
                Arc::new(ShardSource::open(shards, Some(&identity))?.with_verify(config.verify))
            }
        };
        Ok(source)
    }
}
