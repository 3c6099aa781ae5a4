//! `bench step`: full optimizer steps beside what link, drive, arithmetic and host allow in the same run.

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
use blockstreamer_core::plan::{Plan, Traffic};
use blockstreamer_core::read::drive_gb_per_s;
use blockstreamer_core::site::Site;
use blockstreamer_core::source::BlockSource;
use tch::Tensor;

use super::blocks::drop_cached;
use super::step_report::{Bare, StepReport, Timed};
use super::{StepArgs, memory, random};
use crate::engine::{Job, Launched, OpenModel, StreamConfig, device};
use crate::plugins::Registry;
use crate::run::{LoraConfig, RunConfig, StepMetrics, Stepper};
use crate::trace::{self, TRACED_STEPS};

/// Steps after the timed ones: the last timed step then has a follower like the others.
const STEPS_AFTER: u64 = 1;
/// Most that is read to measure the drive: some seconds of a fast one.
const MOST_DRIVE_BYTES: u64 = 16 << 30;

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
        let Launched { executor, plan, source, .. } = launch.start(&adapter)?;
        let run = Steps {
            executor: &executor,
            plan: &plan,
            args,
            config: &config,
            tokens: *tokens,
            vocab_size: dimensions.vocab_size,
        };
        let steps = run.time(&Cached::of(&*source, args.cold)?)?;
        drop(executor);
        link()?;
        if plan.later.disk_bytes > 0 || steps.steps.iter().any(|step| step.read_bytes > 0) {
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
    plan: &'a Plan,
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
        let before = self.executor.stats()?;
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
        let mut trace = self.args.trace.as_deref().map(|path| self.trace_path(path));
        let stream = self.executor.stream();
        if trace.is_some() {
            stream.start_trace()?;
        }
        run(&mut stepper, timed_end..end)?;
        if let Some(path) = &trace
            && !trace::finish(path, stream)?
        {
            trace = None;
        }
        let after = self.executor.stats()?;
        let moved = Traffic {
            disk_bytes: after.read_bytes - before.read_bytes,
            link_bytes: after.h2d_bytes - before.h2d_bytes,
        };
        let planned = self.plan.first + self.plan.later * (end as usize - 1);
        if moved != planned {
            tracing::warn!("the plan says {planned:?} for {end} steps, which moved {moved:?}");
        }
        Ok(Timed {
            tokens: self.tokens,
            mean_s,
            steps,
            planned: self.plan.later,
            is_as_planned: moved == planned,
            prediction: self.plan.prediction,
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
