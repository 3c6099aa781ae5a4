//! `bench stream`: what the streaming engine moves when nothing is computed, beside the bare link or drive.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::device::{BareLink, CopyEngine};
use blockstreamer_core::plan::host_budget_bytes;
use blockstreamer_core::read::{self, DriveSetting, drive_gb_per_s, drive_pass_gb_per_s};
use blockstreamer_core::source::BlockSource;
use blockstreamer_core::stream::{BlockStream, StreamOptions};
use serde::Serialize;

use super::blocks::{Files, Images};
use super::{StreamArgs, StreamTier, median, memory};
use crate::engine::device;
use crate::size::Size;

/// One pass over all blocks.
#[derive(Debug, Clone, Serialize)]
pub struct Pass {
    /// From the first visit's scheduling until the last copy has ended, with an empty pipeline before.
    pub seconds: f64,
    /// Bytes copied to the device.
    pub h2d_bytes: u64,
    /// Bytes read from files.
    pub read_bytes: u64,
    /// Bytes that the system fetched from storage meanwhile, as it says; fewer than `read_bytes` when a
    /// page cache helped. `None` where it does not say.
    pub storage_bytes: Option<u64>,
}

/// What `bench stream` found.
#[derive(Debug, Serialize)]
pub struct StreamReport {
    /// `ram` or `disk`.
    pub tier: &'static str,
    /// `cpu`, `cuda:0`.
    pub device: String,
    /// Blocks of a pass.
    pub num_blocks: usize,
    /// Bytes of one block's image.
    pub block_bytes: usize,
    /// Different images in memory; fewer than blocks when memory is short. `None` for files.
    pub num_images: Option<usize>,
    /// Folder of the files.
    pub dir: Option<PathBuf>,
    /// How files are read. `None` for memory.
    pub read: Option<String>,
    /// Reads of 1 MiB under way at a time, on tier disk.
    pub queue_depth: Option<usize>,
    /// Blocks on the device beyond the one in use.
    pub prefetch_ahead: usize,
    /// The passes, in order.
    pub passes: Vec<Pass>,
    /// Median rate of the passes, 10^9 bytes per second.
    pub gb_per_s: f64,
    /// What `bare_gb_per_s` is the rate of: `link` or `drive`.
    pub bare: &'static str,
    /// Rates of the bare link or drive, in order: one before, between and after the passes, each over as
    /// many bytes as a pass.
    pub bare_rates_gb_per_s: Vec<f64>,
    /// Their median.
    pub bare_gb_per_s: f64,
    /// `gb_per_s / bare_gb_per_s`.
    pub ratio: f64,
}

/// Streams random blocks and measures the bare link or drive in the same run.
///
/// # Errors
/// When device, memory, folder or files cannot be had, or the settings leave nothing to stream.
pub fn bench_stream(args: &StreamArgs) -> Result<StreamReport> {
    // With fewer, a pass would find some of its blocks where the pass before left them.
    let num_slots = args.prefetch_ahead + 1;
    if args.blocks < num_slots * 2 {
        bail!(
            "{} blocks are too few for the {num_slots} slots of --prefetch-ahead {}, of whose blocks \
             some would not move: ask for --blocks {} or more",
            args.blocks,
            args.prefetch_ahead,
            num_slots * 2
        );
    }
    let device = device(&args.device)?;
    let engine: Arc<dyn CopyEngine> = Arc::from(<dyn CopyEngine>::for_device(device)?);
    let block_bytes = usize::try_from(args.block_size.num_bytes).context("a block is too large")?;
    let (num_blocks, prefetch_ahead) = (args.blocks, args.prefetch_ahead);
    let options = stream_options(args, block_bytes)?;
    let report = |measured: Measured| StreamReport {
        tier: if args.tier == StreamTier::Ram { "ram" } else { "disk" },
        device: super::device_name(device),
        num_blocks,
        block_bytes,
        num_images: None,
        dir: None,
        read: None,
        queue_depth: None,
        prefetch_ahead,
        gb_per_s: median(measured.passes.iter().map(Pass::gb_per_s)),
        passes: measured.passes,
        bare: if args.tier == StreamTier::Ram { "link" } else { "drive" },
        bare_rates_gb_per_s: measured.bare_rates,
        bare_gb_per_s: measured.bare,
        ratio: 0.0,
    };
    let mut report = match args.tier {
        StreamTier::Ram => {
            let images = Arc::new(Images::new(num_blocks, block_bytes, device)?);
            let num_images = images.num_images();
            let queue_depth = StreamOptions::default().queue_depth;
            let bench = Bench::new(args, &options, images.clone(), queue_depth, engine)?;
            StreamReport { num_images: Some(num_images), ..report(bench.with_memory(&images)?) }
        }
        StreamTier::Disk => {
            let default = || std::env::temp_dir().join("blockstreamer-bench");
            let dir = args.dir.clone().unwrap_or_else(default);
            let files = Arc::new(Files::prepare(&dir, num_blocks, block_bytes)?);
            // As a run does it: the engine reads as the drive is read best with little memory.
            let drive = drive_gb_per_s(&files.files(), u64::MAX)?;
            let queue_depth = args.queue_depth.unwrap_or_else(|| drive.lean.queue_depth());
            let bench = Bench::new(args, &options, files.clone(), queue_depth, engine)?;
            let measured = bench.with_files(&files, drive.setting)?;
            let source: Arc<dyn BlockSource> = files;
            let read = Some(read::open(&source, args.read, queue_depth)?.describe());
            StreamReport {
                dir: Some(dir),
                read,
                queue_depth: Some(queue_depth),
                ..report(measured)
            }
        }
    };
    report.ratio = report.gb_per_s / report.bare_gb_per_s;
    Ok(report)
}

/// The engine's options but for the queue depth. Staging that does not fit is refused before any file is
/// written for it; images in memory need none.
fn stream_options(args: &StreamArgs, block_bytes: usize) -> Result<StreamOptions> {
    let mut options = StreamOptions {
        prefetch_ahead: args.prefetch_ahead,
        read: args.read,
        ..StreamOptions::default()
    };
    if let Some(chunk) = args.chunk {
        options.chunk_bytes = usize::try_from(chunk.num_bytes).context("a chunk is too large")?;
    }
    let Some(num_chunks) = args.num_chunks.filter(|_| args.tier == StreamTier::Disk) else {
        return Ok(options);
    };
    options.num_chunks = num_chunks;
    let chunk_bytes = options.chunk_bytes.min(block_bytes);
    let staging_bytes = chunk_bytes.saturating_mul(num_chunks) as u64;
    let free_bytes = host_budget_bytes()?;
    if staging_bytes > free_bytes {
        bail!(
            "--num-chunks {num_chunks} of {} do not fit the {} of memory that are free: ask for fewer or smaller \
             ones (--chunk)",
            Size { num_bytes: chunk_bytes as u64 },
            Size { num_bytes: free_bytes }
        );
    }
    Ok(options)
}

struct Measured {
    passes: Vec<Pass>,
    bare_rates: Vec<f64>,
    bare: f64,
}

struct Bench {
    engine: Arc<dyn CopyEngine>,
    stream: BlockStream,
    num_passes: usize,
}

impl Bench {
    fn new(
        args: &StreamArgs,
        options: &StreamOptions,
        source: Arc<dyn BlockSource>,
        queue_depth: usize,
        engine: Arc<dyn CopyEngine>,
    ) -> Result<Self> {
        let options = StreamOptions { queue_depth, ..options.clone() };
        let stream = BlockStream::new(source, engine.clone(), &options)?;
        Ok(Self { engine, stream, num_passes: args.passes })
    }

    /// Bare copies and passes take turns, so that a drift of the link meets both.
    fn with_memory(&self, images: &Images) -> Result<Measured> {
        let (blocks, num_blocks) = (images.blocks(), images.blocks().len());
        let link = BareLink::new(self.engine.clone(), blocks[0].image_bytes)?;
        let bare = || -> Result<f64> {
            let sources = (0..num_blocks)
                .filter_map(|block| images.lend(BlockIndex(block)))
                .map(|image| image.bytes());
            let num_bytes: usize = blocks.iter().map(|block| block.image_bytes).sum();
            Ok(num_bytes as f64 / link.seconds(sources)? / 1e9)
        };
        self.pass()?;
        bare()?;
        let mut bare_rates = vec![bare()?];
        let mut passes = Vec::new();
        for _ in 0..self.num_passes {
            passes.push(self.pass()?);
            bare_rates.push(bare()?);
        }
        let bare = median(bare_rates.iter().copied());
        Ok(Measured { passes, bare_rates, bare })
    }

    /// Whole passes by the engine, and bare ones as `setting` says, in turn: short trials catch a noisy
    /// drive at its best.
    fn with_files(&self, files: &Files, setting: DriveSetting) -> Result<Measured> {
        let cold_pass = || {
            files.drop_cached()?;
            self.pass()
        };
        let files = files.files();
        let bare = || drive_pass_gb_per_s(&files, setting);
        cold_pass()?;
        let mut bare_rates = vec![bare()?];
        let mut passes = Vec::new();
        for _ in 0..self.num_passes {
            passes.push(cold_pass()?);
            bare_rates.push(bare()?);
        }
        let bare = median(bare_rates.iter().copied());
        Ok(Measured { passes, bare_rates, bare })
    }

    fn pass(&self) -> Result<Pass> {
        let num_blocks = self.stream.blocks().len();
        let before = (self.stream.stats()?, memory::storage_read_bytes());
        let start = Instant::now();
        self.stream.schedule((0..num_blocks).map(BlockIndex))?;
        for _ in 0..num_blocks {
            drop(self.stream.lease()?);
        }
        // Every lease made the compute stream wait for its copy.
        self.engine.synchronize(&self.engine.record()?)?;
        let seconds = start.elapsed().as_secs_f64();
        let after = (self.stream.stats()?, memory::storage_read_bytes());
        Ok(Pass {
            seconds,
            h2d_bytes: after.0.h2d_bytes - before.0.h2d_bytes,
            read_bytes: after.0.read_bytes - before.0.read_bytes,
            storage_bytes: after.1.zip(before.1).map(|(after, before)| after - before),
        })
    }
}

impl Pass {
    fn gb_per_s(&self) -> f64 {
        self.h2d_bytes as f64 / self.seconds / 1e9
    }

    /// Share of the bytes read that did not come from storage.
    fn cached(&self) -> Option<f64> {
        let storage_bytes = self.storage_bytes.filter(|_| self.read_bytes > 0)?;
        Some((1.0 - storage_bytes as f64 / self.read_bytes as f64).max(0.0))
    }
}

impl fmt::Display for StreamReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let block = Size { num_bytes: self.block_bytes as u64 };
        write!(
            formatter,
            "{} blocks of {block} from {} to {}",
            self.num_blocks, self.tier, self.device
        )?;
        if let Some(num_images) = self.num_images {
            write!(formatter, ", {num_images} distinct images")?;
        }
        if let Some(read) = &self.read {
            write!(formatter, ", {read}")?;
        }
        let of_passes = |value: fn(&Pass) -> f64| median(self.passes.iter().map(value));
        let (pass_bytes, seconds) =
            (of_passes(|pass| pass.h2d_bytes as f64), of_passes(|pass| pass.seconds));
        write!(
            formatter,
            ", {} ahead\n{:<11} {:>9} {:>9}\n",
            self.prefetch_ahead, "", "GB/s", "s/pass"
        )?;
        writeln!(formatter, "{:<11} {:>9.3} {seconds:>9.3}", "ours", self.gb_per_s)?;
        let bare_seconds = pass_bytes / self.bare_gb_per_s / 1e9;
        let bare = format!("bare {}", self.bare);
        writeln!(formatter, "{bare:<11} {:>9.3} {bare_seconds:>9.3}", self.bare_gb_per_s)?;
        write!(formatter, "{:<11} {:>8.1}%", "ratio", self.ratio * 100.0)?;
        let cached: Option<Vec<f64>> = self.passes.iter().map(Pass::cached).collect();
        let cached = cached.map(|shares| shares.into_iter().fold(0.0, f64::max));
        match cached {
            _ if self.tier == "ram" => Ok(()),
            None => write!(formatter, "\nthe system does not say what came from storage"),
            Some(share) if share > 0.01 => write!(
                formatter,
                "\nup to {:.0}% of a pass came from the page cache, not from storage",
                share * 100.0
            ),
            Some(_) => write!(formatter, "\nall bytes came from storage, none from the page cache"),
        }
    }
}
