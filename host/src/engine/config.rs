//! `[stream]`: where blocks are and how they move.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use blockstreamer_core::plan;
use blockstreamer_core::read::ReadMethod;
use blockstreamer_core::stream::StreamOptions;
use serde::{Deserialize, Serialize};

use crate::size::Size;

/// Where blocks are while they are not in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// The plan decides: on the device, in host memory, in files.
    #[default]
    Auto,
    /// All in files, read block by block, every time.
    Disk,
    /// All in host memory, pinned for CUDA, loaded once.
    Ram,
    /// All on the device, loaded once.
    Device,
}

impl Tier {
    /// The only tier of a plan, if there is one.
    pub(super) fn only(self) -> Option<plan::Tier> {
        match self {
            Self::Auto => None,
            Self::Disk => Some(plan::Tier::Disk),
            Self::Ram => Some(plan::Tier::Ram),
            Self::Device => Some(plan::Tier::Device),
        }
    }
}

/// `[stream]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StreamConfig {
    /// `auto`, `disk`, `ram` or `device`.
    pub tier: Tier,
    /// Device memory that the run may use. Not given: what is free.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vram: Option<Size>,
    /// Host memory that the run may use. Not given: what the system and its control groups leave.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ram: Option<Size>,
    /// Folder that `shard` wrote for this model; not given: the safetensors files themselves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shards: Option<PathBuf>,
    /// `auto`, `uring`, `threads` or `buffered`.
    pub read: ReadMethod,
    /// Reads of up to 1 MiB under way at a time. Not given: what the drive measured at the start needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_depth: Option<usize>,
    /// Blocks on the device beyond the one in use.
    pub prefetch_ahead: usize,
    /// Blocks that the experts of a layer are dealt over; a divisor of their number. Not given: as few as
    /// leave room for all slots, or more where that saves reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert_groups: Option<usize>,
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
            tier: Tier::Auto,
            vram: None,
            ram: None,
            shards: None,
            read: ReadMethod::Auto,
            queue_depth: None,
            prefetch_ahead: options.prefetch_ahead,
            expert_groups: None,
            slot_budget: None,
            chunk: Size { num_bytes: options.chunk_bytes as u64 },
            num_chunks: options.num_chunks,
            verify: true,
            check_finite: false,
        }
    }
}

impl StreamConfig {
    /// The engine's options, without a plan.
    ///
    /// # Errors
    /// When a size makes no sense or does not fit this machine.
    pub(super) fn options(&self) -> Result<StreamOptions> {
        if self.chunk.num_bytes == 0 || self.num_chunks == 0 {
            bail!("stream.chunk and stream.num_chunks must be above 0: blocks pass through them");
        }
        if self.queue_depth == Some(0) {
            bail!(
                "stream.queue_depth must be at least 1: it is how many reads are under way at a time"
            );
        }
        let bytes = |size: Size| usize::try_from(size.num_bytes).context("a size is too large");
        Ok(StreamOptions {
            prefetch_ahead: self.prefetch_ahead,
            slot_budget_bytes: self.slot_budget.map(bytes).transpose()?,
            chunk_bytes: bytes(self.chunk)?,
            num_chunks: self.num_chunks,
            read: self.read,
            queue_depth: self.queue_depth.unwrap_or(StreamOptions::default().queue_depth),
            ..StreamOptions::default()
        })
    }
}
