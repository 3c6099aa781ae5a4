//! `bench step`: full optimizer steps beside what link, drive and arithmetic allow in the same run.

use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, bail};
use blockstreamer_core::adapter::{Adapter, Lora, ModuleRule};
use blockstreamer_core::batch::Batch;
use blockstreamer_core::device::{
    CopyEngine, host_to_device_gb_per_s, memory_stats, reset_peak_memory, set_deterministic,
};
use blockstreamer_core::execute::{Executor, StepOptions};
use blockstreamer_core::optimizer::{Optimizer, by_name};
use blockstreamer_core::read::drive_gb_per_s;
use blockstreamer_core::site::Site;
use blockstreamer_core::source::BlockSource;
use serde::Serialize;
use tch::Tensor;

use super::blocks::drop_cached;
use super::{StepArgs, median, memory, random};
use crate::engine::{Job, Launched, OpenModel, StreamConfig, Tier, device};
use crate::plugins::Registry;
use crate::run::{LoraConfig, RunConfig, Shares, StepMetrics, Stepper};
use crate::size::Size;
use crate::trace::{self, TRACED_STEPS};

/// Steps after the timed ones: the last timed step then has a follower like the others.
const STEPS_AFTER: u64 = 1;
/// Most that is read to measure the drive: some seconds of a fast one.
const MOST_DRIVE_BYTES: u64 = 16 << 30;

/// What the hardware needs at least for one step; the slowest is the floor, because all work at once.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Floors {
    /// Bytes copied per step over the bare link's rate.
    pub link_s: f64,
    /// Bytes read per step over the bare drive's rate.
    pub drive_s: f64,
    /// Time that the device spent in visits: the median of these very steps.
    pub compute_s: f64,
}

/// The steps of one token count.
#[derive(Debug, Serialize)]
pub struct TokensReport {
    /// Tokens of a step.
    pub tokens: usize,
    /// Median over the timed steps, from launch to launch as `train` counts.
    pub median_s: f64,
    /// All timed steps, from an idle device to an idle device, over their number.
    pub mean_s: f64,
    /// From launch to launch, each timed step.
    pub seconds: Vec<f64>,
    /// Bytes read from storage per step.
    pub read_bytes: u64,
    /// Bytes copied to the device per step.
    pub h2d_bytes: u64,
    /// The least that it could take.
    pub floors: Floors,
    /// The largest of them.
    pub floor_s: f64,
    /// Which one that is: `link`, `drive`, `compute`.
    pub floor: &'static str,
    /// `median_s / floor_s`.
    pub ratio: f64,
    /// Who was busy over the timed steps.
    pub shares: Shares,
    /// The busiest.
    pub binding: &'static str,
    /// Bytes of blocks that stay on the device.
    pub kept_bytes: usize,
    /// Most device memory that libtorch had handed out at one time, on CUDA.
    pub peak_device_bytes: Option<usize>,
    /// Most memory of the process so far.
    pub peak_host_bytes: Option<u64>,
    /// Loss of the last timed step.
    pub loss: f64,
    /// File of the trace.
    pub trace: Option<PathBuf>,
}

/// What `bench step` found.
#[derive(Debug, Serialize)]
pub struct StepReport {
    /// Folder of the model.
    pub model: PathBuf,
    /// `cpu`, `cuda:0`.
    pub device: String,
    /// Where blocks come from.
    pub tier: Tier,
    /// Blocks on the device beyond the one in use.
    pub prefetch_ahead: usize,
    /// Streamed blocks.
    pub num_blocks: usize,
    /// Bytes of all their images.
    pub streamed_bytes: u64,
    /// Rate of bare copies of a block's size, the best of before and after, 10^9 bytes per second.
    pub link_gb_per_s: f64,
    /// Rate of the bare drive on the same files, the best after each token count; `None` when no step
    /// reads.
    pub drive_gb_per_s: Option<f64>,
    /// One entry per token count.
    pub counts: Vec<TokensReport>,
}

/// Rates of the bare hardware, and what was measured with them.
#[derive(Debug, Clone, Copy, Default)]
struct Bare {
    link_gb_per_s: f64,
    drive_gb_per_s: f64,
}

/// Steps of one token count before they are held against the hardware.
struct Timed {
    tokens: usize,
    mean_s: f64,
    steps: Vec<StepMetrics>,
    kept_bytes: usize,
    peak_device_bytes: Option<usize>,
    peak_host_bytes: Option<u64>,
    trace: Option<PathBuf>,
}

/// Times optimizer steps of the model in the folder `model` on random tokens.
///
/// # Errors
/// Whatever is wrong with model, settings or device.
pub fn bench_step(registry: &Registry, model: &Path, args: &StepArgs) -> Result<StepReport> {
    let device = device(&args.device)?;
    args.trace.as_deref().map_or(Ok(()), trace::check_path)?;
    if args.target_modules.iter().all(|name| name.trim().is_empty()) {
        bail!("--target-modules names no linear: nothing would be trained");
    }
    set_deterministic(true)?;
    let config = config(model, args);
    let lora = config.lora.options(config.seed)?;
    let mut bare = Bare::default();
    let mut timed = Vec::new();
    let (mut num_blocks, mut streamed_bytes) = (0, 0);
    for tokens in &args.tokens {
        let open = OpenModel::open(registry, model, args.experts.options())?;
        let dimensions = open.model.dimensions();
        let positions = dimensions.max_position_embeddings;
        if *tokens < 2 || *tokens > positions {
            bail!(
                "--tokens {tokens}: this model takes 2 to {positions}, and the last has no target"
            );
        }
        // The rows are text: blocks for pictures are not visited.
        let num_vision = open.model.weights()?.num_vision_blocks();
        let visited = || open.layout.blocks.iter().skip(num_vision);
        let streamed = || visited().filter(|block| block.placement.is_streamed());
        (num_blocks, streamed_bytes) =
            (streamed().count(), streamed().map(|block| block.image_bytes as u64).sum());
        // While nothing of the model is on the device, whose memory the copies need.
        let largest_bytes = streamed().map(|block| block.image_bytes).max().unwrap_or(0).max(1);
        let mut link = || -> Result<()> {
            let rate = host_to_device_gb_per_s(device, largest_bytes)?;
            bare.link_gb_per_s = bare.link_gb_per_s.max(rate);
            Ok(())
        };
        link()?;
        let job = Job { trains: true, tokens: *tokens, num_micro_batches: 1, patches: 0 };
        let launch = config.launch(registry, &open, device, job);
        let adapter = |sites: &[Site]| -> Result<Option<Box<dyn Adapter>>> {
            Ok(Some(Box::new(Lora::new(sites, &lora, device)?)))
        };
        let Launched { executor, source, .. } = launch.start(&adapter)?;
        let vocab_size = dimensions.vocab_size;
        let run = Steps { executor: &executor, args, config: &config, tokens: *tokens, vocab_size };
        let steps = run.time(&Cached::of(&*source, args.cold)?)?;
        drop(executor);
        link()?;
        if steps.steps.iter().any(|step| step.read_bytes > 0) {
            let drive = drive_gb_per_s(&source.files(), MOST_DRIVE_BYTES)?;
            bare.drive_gb_per_s = bare.drive_gb_per_s.max(drive.gb_per_s);
        }
        timed.push(steps);
    }
    Ok(StepReport {
        model: model.to_owned(),
        device: super::device_name(device),
        tier: args.tier,
        prefetch_ahead: args.prefetch_ahead,
        num_blocks,
        streamed_bytes,
        link_gb_per_s: bare.link_gb_per_s,
        drive_gb_per_s: Some(bare.drive_gb_per_s).filter(|rate| *rate > 0.0),
        counts: timed.into_iter().map(|timed| timed.report(bare)).collect(),
    })
}

/// The settings that `train` would have.
fn config(model: &Path, args: &StepArgs) -> RunConfig {
    RunConfig {
        model: model.to_owned(),
        dtype: args.dtype,
        lora: LoraConfig {
            rank: args.rank,
            alpha: 2.0 * args.rank as f64,
            target_modules: ModuleRule::names(&args.target_modules),
            top_fraction: Some(args.top_fraction),
            ..LoraConfig::default()
        },
        stream: StreamConfig {
            expert_groups: args.experts.expert_groups,
            tier: args.tier,
            vram: args.vram,
            ram: args.ram,
            prefetch_ahead: args.prefetch_ahead,
            ..StreamConfig::default()
        },
        ..RunConfig::default()
    }
}

/// The files whose cached pages are dropped before every step.
struct Cached(Vec<(PathBuf, File)>);

impl Cached {
    fn of(source: &dyn BlockSource, cold: bool) -> Result<Self> {
        let files = if cold { source.files() } else { Vec::new() };
        let open = |path: &Path| Ok((path.to_owned(), File::open(path)?));
        Ok(Self(files.into_iter().map(open).collect::<Result<_>>()?))
    }

    fn drop_all(&self) -> Result<()> {
        self.0.iter().try_for_each(|(path, file)| drop_cached(path, file))
    }
}

struct Steps<'a> {
    executor: &'a Executor,
    args: &'a StepArgs,
    config: &'a RunConfig,
    tokens: usize,
    vocab_size: usize,
}

impl Steps<'_> {
    fn time(&self, cached: &Cached) -> Result<Timed> {
        let device = self.executor.stream().device();
        let engine = <dyn CopyEngine>::for_device(device)?;
        let synchronize = || engine.synchronize(&engine.record()?);
        let settings = &self.config.optimizer;
        let mut optimizer = by_name(&settings.name, settings.options())?;
        let mut stepper = Stepper::new(self.executor, settings.max_grad_norm)?;
        let warm = self.args.warmup as u64;
        let timed_end = warm + self.args.steps as u64;
        let traced_steps = if self.args.trace.is_some() { TRACED_STEPS } else { STEPS_AFTER };
        let end = timed_end + traced_steps;
        let mut run = |stepper: &mut Stepper<'_>, steps: Range<u64>| -> Result<Vec<StepMetrics>> {
            let (mut done, mut launched) = (Vec::new(), None);
            for step in steps {
                cached.drop_all()?;
                let batch = [self.batch(step)?];
                let options =
                    StepOptions { step, another_follows: step + 1 < end, ..StepOptions::default() };
                let optimizer: &mut dyn Optimizer = &mut *optimizer;
                let next = stepper.launch(&batch, optimizer, options, self.config.learning_rate)?;
                if let Some(before) = launched.replace(next) {
                    done.push(stepper.finish(before)?);
                }
            }
            if let Some(last) = launched {
                done.push(stepper.finish(last)?);
            }
            Ok(done)
        };
        run(&mut stepper, 0..warm)?;
        // At both ends of what is timed the device has nothing to compute, and the next step's first
        // blocks are on their way.
        synchronize()?;
        if device.is_cuda() {
            reset_peak_memory(device)?;
        }
        stepper.restart()?;
        let start = Instant::now();
        let steps = run(&mut stepper, warm..timed_end)?;
        synchronize()?;
        let mean_s = start.elapsed().as_secs_f64() / steps.len() as f64;
        let peak_device_bytes =
            if device.is_cuda() { Some(memory_stats(device)?.peak_bytes) } else { None };
        let trace = self.args.trace.as_deref().map(|path| self.trace_path(path));
        let stream = self.executor.stream();
        if trace.is_some() {
            stream.start_trace()?;
        }
        run(&mut stepper, timed_end..end)?;
        if let Some(path) = &trace {
            trace::write(path, &stream.take_trace()?, stream.blocks())?;
        }
        Ok(Timed {
            tokens: self.tokens,
            mean_s,
            steps,
            kept_bytes: stream.kept_bytes(),
            peak_device_bytes,
            peak_host_bytes: memory::peak_bytes(),
            trace,
        })
    }

    /// One row of random tokens, another one for every step.
    fn batch(&self, step: u64) -> Result<Batch> {
        let token = |position| random::value(step, position) % self.vocab_size as u64;
        let ids: Vec<i64> =
            (0..self.tokens as u64).map(|position| token(position) as i64).collect();
        let ids = Tensor::f_from_slice(&ids)?.f_unsqueeze(0)?;
        Ok(Batch { labels: Some(ids.shallow_clone()), ..Batch::new(ids) })
    }

    fn trace_path(&self, path: &Path) -> PathBuf {
        if self.args.tokens.len() == 1 {
            return path.to_owned();
        }
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let extension = path
            .extension()
            .map_or_else(String::new, |extension| format!(".{}", extension.to_string_lossy()));
        path.with_file_name(format!("{stem}-{}{extension}", self.tokens))
    }
}

impl Timed {
    fn report(self, bare: Bare) -> TokensReport {
        let num_steps = self.steps.len() as u64;
        let per_step = |value: fn(&StepMetrics) -> u64| {
            self.steps.iter().map(value).sum::<u64>() / num_steps.max(1)
        };
        let (read_bytes, h2d_bytes) =
            (per_step(|step| step.read_bytes), per_step(|step| step.h2d_bytes));
        let seconds_for = |num_bytes: u64, gb_per_s: f64| match num_bytes {
            0 => 0.0,
            _ => num_bytes as f64 / gb_per_s / 1e9,
        };
        let compute_ms = median(self.steps.iter().map(|step| step.times.compute_ms));
        let floors = Floors {
            link_s: seconds_for(h2d_bytes, bare.link_gb_per_s),
            drive_s: seconds_for(read_bytes, bare.drive_gb_per_s),
            compute_s: compute_ms / 1e3,
        };
        let (floor, floor_s) = floors.largest();
        let median_s = median(self.steps.iter().map(|step| step.seconds));
        let shares = Shares::of(self.steps.iter().map(|step| (&step.times, step.seconds)));
        TokensReport {
            tokens: self.tokens,
            median_s,
            mean_s: self.mean_s,
            seconds: self.steps.iter().map(|step| step.seconds).collect(),
            read_bytes,
            h2d_bytes,
            floors,
            floor_s,
            floor,
            ratio: median_s / floor_s,
            shares,
            binding: shares.binding(),
            kept_bytes: self.kept_bytes,
            peak_device_bytes: self.peak_device_bytes,
            peak_host_bytes: self.peak_host_bytes,
            loss: self.steps.last().map_or(f64::NAN, |step| step.loss),
            trace: self.trace,
        }
    }
}

impl Floors {
    fn largest(&self) -> (&'static str, f64) {
        [("drive", self.drive_s), ("compute", self.compute_s)]
            .into_iter()
            .fold(("link", self.link_s), |most, next| if next.1 > most.1 { next } else { most })
    }
}

impl fmt::Display for StepReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let streamed = Size { num_bytes: self.streamed_bytes };
        writeln!(
            formatter,
            "{}: {} blocks, {streamed}, tier {}, {} ahead, on {}",
            self.model.display(),
            self.num_blocks,
            serde_json::to_value(self.tier).unwrap_or_default().as_str().unwrap_or("?"),
            self.prefetch_ahead,
            self.device
        )?;
        write!(formatter, "bare link {:.1} GB/s", self.link_gb_per_s)?;
        if let Some(rate) = self.drive_gb_per_s {
            write!(formatter, ", bare drive {rate:.1} GB/s")?;
        }
        write!(
            formatter,
            "\n{:>7} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7} {:>9} {:>9}",
            "tokens",
            "s/step",
            "sync'd s",
            "read GB",
            "copied GB",
            "floor s",
            "ratio",
            "device",
            "host"
        )?;
        for count in &self.counts {
            let bytes = |bytes: Option<u64>| {
                bytes.map_or_else(|| "-".to_owned(), |num_bytes| Size { num_bytes }.to_string())
            };
            write!(
                formatter,
                "\n{:>7} {:>9.4} {:>9.4} {:>9.3} {:>9.3} {:>9.4} {:>6.2}x {:>9} {:>9}\n        floor: {}; {} kept; {}",
                count.tokens,
                count.median_s,
                count.mean_s,
                count.read_bytes as f64 / 1e9,
                count.h2d_bytes as f64 / 1e9,
                count.floor_s,
                count.ratio,
                bytes(count.peak_device_bytes.map(|bytes| bytes as u64)),
                bytes(count.peak_host_bytes),
                count.floor,
                Size { num_bytes: count.kept_bytes as u64 },
                count.shares
            )?;
        }
        Ok(())
    }
}
