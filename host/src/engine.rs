//! From a model folder and settings to something that can be executed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use blockstreamer_core::checkpoint::{Checkpoint, Layout};
use blockstreamer_core::device::{HostBuffer, load_cuda};
use blockstreamer_core::execute::ExecutorOptions;
use blockstreamer_core::family::Model;
use blockstreamer_core::source::shards::ShardSource;
use blockstreamer_core::source::{BlockSource, RamSource, SafetensorsSource};
use blockstreamer_core::stream::StreamOptions;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind};

use crate::plugins::Registry;
use crate::size::Size;

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

/// Where block bytes are taken from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// From the files, block by block, every time.
    #[default]
    Disk,
    /// From host memory, pinned for CUDA, loaded once.
    Ram,
}

/// `[stream]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StreamConfig {
    /// `disk` or `ram`.
    pub tier: Tier,
    /// Folder that `shard` wrote for this model; not given: the safetensors files themselves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shards: Option<PathBuf>,
    /// Blocks on the device beyond the one in use.
    pub prefetch_ahead: usize,
    /// Largest block that a slot may hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot_budget: Option<Size>,
    /// Size of one read and one copy.
    pub chunk: Size,
    /// Chunks between disk and device.
    pub num_chunks: usize,
    /// Whether checksums of shards are verified on every read.
    pub verify: bool,
    /// Whether all weights are searched for NaN and infinite values before the run.
    pub check_finite: bool,
}

impl Default for StreamConfig {
    fn default() -> Self {
        let options = StreamOptions::default();
        Self {
            tier: Tier::Disk,
            shards: None,
            prefetch_ahead: options.prefetch_ahead,
            slot_budget: None,
            chunk: Size { num_bytes: options.chunk_bytes as u64 },
            num_chunks: options.num_chunks,
            verify: true,
            check_finite: false,
        }
    }
}

impl StreamConfig {
    fn options(&self) -> Result<StreamOptions> {
        let bytes = |size: Size| usize::try_from(size.num_bytes).context("a size is too large");
        Ok(StreamOptions {
            prefetch_ahead: self.prefetch_ahead,
            slot_budget_bytes: self.slot_budget.map(bytes).transpose()?,
            chunk_bytes: bytes(self.chunk)?,
            num_chunks: self.num_chunks,
        })
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
    /// Its tensors as blocks.
    pub layout: Layout,
}

impl OpenModel {
    /// Opens the folder `directory` with whichever family takes its `model_type`.
    ///
    /// # Errors
    /// When the folder is no complete model, or no family found takes it.
    pub fn open(registry: &Registry, directory: &Path) -> Result<Self> {
        let checkpoint = Checkpoint::open(directory)?;
        let model = registry
            .open_model(&checkpoint.config_json)
            .with_context(|| format!("cannot open the model in {}", directory.display()))?;
        let layout = Layout::of(&checkpoint, &*model)?;
        Ok(Self { directory: directory.to_owned(), checkpoint, model, layout })
    }

    /// The source of its blocks.
    ///
    /// # Errors
    /// When files cannot be opened, shards belong to another checkpoint, or memory is short.
    pub fn source(&self, config: &StreamConfig, device: Device) -> Result<Arc<dyn BlockSource>> {
        let source: Arc<dyn BlockSource> = match &config.shards {
            None => Arc::new(SafetensorsSource::open(self.layout.clone())?),
            Some(shards) => {
                let identity = self.layout.identity(&self.checkpoint)?;
                Arc::new(ShardSource::open(shards, Some(&identity))?.with_verify(config.verify))
            }
        };
        if config.check_finite {
            self.layout.check_finite(&*source)?;
        }
        match config.tier {
            Tier::Disk => Ok(source),
            Tier::Ram => {
                let reserve = |num_bytes| HostBuffer::for_device(num_bytes, device);
                Ok(Arc::new(RamSource::load(&*source, reserve)?))
            }
        }
    }
}

/// How to execute on `device`, by these settings.
///
/// # Errors
/// When a size does not fit this machine.
pub fn executor_options(
    device: Device,
    dtype: Precision,
    config: &StreamConfig,
    seed: u64,
) -> Result<ExecutorOptions> {
    Ok(ExecutorOptions {
        stream: config.options()?,
        seed,
        ..ExecutorOptions::new(device, dtype.kind(device))
    })
}
