//! The training loop.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use blockstreamer_core::adapter::{Adapter, Lora};
use blockstreamer_core::device::{memory_stats, set_deterministic};
use blockstreamer_core::execute::{Executor, Gradients, StepLoss, StepOptions};
use blockstreamer_core::optimizer::{Optimizer, Parameter, Schedule, by_name, clip_gradient_norm};
use blockstreamer_core::stream::{Readback, StreamStats};

use super::checkpoint::{self, Checkpoint};
use super::metrics::{MetricsFile, StepMetrics};
use super::progress::Progress;
use super::rows::load_rows;
use super::{RunConfig, RunFolder};
use crate::data::{BatchOptions, Batches, DatasetOptions};
use crate::engine::{OpenModel, Precision, device, executor_options};
use crate::plugins::Registry;

/// What a run came to.
#[derive(Debug, Clone)]
pub struct RunSummary {
    /// Loss of the first step of this run.
    pub first_loss: f64,
    /// Loss of the last step.
    pub last_loss: f64,
    /// Steps done in all.
    pub steps: u64,
    /// Totals of the streaming engine.
    pub stats: StreamStats,
    /// Most device memory that libtorch had handed out at one time, on CUDA.
    pub peak_device_bytes: Option<usize>,
    /// The finished adapter.
    pub adapter: PathBuf,
}

/// A step that was launched and whose loss has not been read yet.
struct Launched {
    step: u64,
    loss: StepLoss,
    grad_norm: Readback,
    learning_rate: f64,
    seconds: f64,
    read_bytes: u64,
    h2d_bytes: u64,
}

/// Runs training by `config`, from the newest checkpoint when `resume` is asked for.
///
/// # Errors
/// Whatever is wrong with settings, model, rows, files or device. What was saved before stays whole.
pub fn train(registry: &Registry, config: &RunConfig, resume: bool) -> Result<RunSummary> {
    let device = device(&config.device)?;
    if config.dtype == Precision::Fp16 {
        bail!("training in fp16 needs loss scaling, which is not there: use dtype = \"bf16\"");
    }
    // Kernels that add in one fixed order: a resumed run then repeats the bits of an uninterrupted one.
    set_deterministic(true)?;
    let folder = RunFolder::open(&config.out, resume)?;
    let open = OpenModel::open(registry, &config.model)?;
    let rows =
        DatasetOptions { sequence_length: config.sequence_length, overflow: config.data.overflow };
    let order = BatchOptions {
        batch_size: config.batch_size,
        micro_batches: config.micro_batches,
        seed: config.seed,
        shuffle: config.data.shuffle,
    };
    let mut batches = load_rows(&open, &config.data.path, rows, order)?;
    let total_steps = config.steps.unwrap_or_else(|| batches.num_steps(config.epochs));

    let saved = if resume { Checkpoint::latest(&folder.checkpoints())? } else { None };
    if saved.is_some() {
        folder.check_resumable(config)?;
    } else if resume {
        tracing::warn!(
            "{} has no checkpoint yet: the run starts at its first step",
            config.out.display()
        );
    }
    let sites = open.model.sites()?;
    let adapter: Box<dyn Adapter> = match &saved {
        Some(saved) => Box::new(Lora::import(&saved.adapter(), &sites, device)?),
        None => Box::new(Lora::new(&sites, &config.lora.options(config.seed)?, device)?),
    };
    let mut optimizer = by_name(&config.optimizer.name, config.optimizer.options())?;
    if let Some(saved) = &saved {
        saved.restore(&config.optimizer.name, &mut *optimizer, device)?;
    }
    let completed_steps = saved.as_ref().map_or(0, Checkpoint::completed_steps);
    let base_model = open.directory.canonicalize().unwrap_or_else(|_| open.directory.clone());
    if completed_steps >= total_steps {
        // It may have been killed between its last checkpoint and this.
        if !folder.adapter().exists() {
            adapter.export(&folder.adapter(), &base_model.to_string_lossy())?;
        }
        bail!(
            "the run in {} has done all its {total_steps} steps, its adapter is in {}: raise steps to go on",
            config.out.display(),
            folder.adapter().display()
        );
    }

    let source = open.source(&config.stream, device)?;
    let options = executor_options(device, config.dtype, &config.stream, config.seed)?;
    let executor = Executor::new(open.model, source, Some(adapter), options)?;
    // Only now is something written: a run that cannot start leaves nothing to be in its way.
    folder.create(config)?;
    let mut run = Run {
        config,
        folder: &folder,
        base_model: base_model.to_string_lossy().into_owned(),
        executor: &executor,
        metrics: MetricsFile::open(&folder.metrics(), completed_steps)?,
        progress: Progress::new(completed_steps, total_steps),
        launched: Instant::now(),
        counted: StreamStats::default(),
        first_loss: None,
        last_loss: f64::NAN,
    };
    run.steps(&mut batches, &mut *optimizer, completed_steps..total_steps)?;
    let (first_loss, last_loss) = (run.first_loss.unwrap_or(f64::NAN), run.last_loss);
    drop(run);
    adapter_of(&executor)?.export(&folder.adapter(), &base_model.to_string_lossy())?;
    let stats = executor.stats()?;
    let peak_device_bytes = if device.is_cuda() { Some(memory_stats(device)?.1) } else { None };
    Ok(RunSummary {
        first_loss,
        last_loss,
        steps: total_steps,
        stats,
        peak_device_bytes,
        adapter: folder.adapter(),
    })
}

fn adapter_of(executor: &Executor) -> Result<&dyn Adapter> {
    executor.adapter().context("the run lost its adapter")
}

struct Run<'a> {
    config: &'a RunConfig,
    folder: &'a RunFolder,
    base_model: String,
    executor: &'a Executor,
    metrics: MetricsFile,
    progress: Progress,
    /// When the step before was launched.
    launched: Instant,
    /// Totals that are in the metrics of some step.
    counted: StreamStats,
    first_loss: Option<f64>,
    last_loss: f64,
}

impl Run<'_> {
    /// The loss of a step is read only after the next one was launched: the device never waits for us.
    fn steps(
        &mut self,
        batches: &mut Batches,
        optimizer: &mut dyn Optimizer,
        steps: std::ops::Range<u64>,
    ) -> Result<()> {
        let schedule = Schedule {
            learning_rate: self.config.learning_rate,
            decay: self.config.optimizer.schedule,
            warmup_steps: self.config.optimizer.warmup_steps,
            total_steps: steps.end,
        };
        let mut launched: Option<Launched> = None;
        for step in steps.clone() {
            let next =
                self.launch(batches, optimizer, step, schedule.at(step), step + 1 < steps.end)?;
            if let Some(before) = launched.replace(next) {
                self.finish(before)?;
            }
            let done = step + 1;
            let every = self.config.checkpoint_every;
            let save = done == steps.end || (every > 0 && done.is_multiple_of(every));
            // The CPU has done a step when it is launched.
            if (save || !self.executor.stream().device().is_cuda())
                && let Some(last) = launched.take()
            {
                self.finish(last)?;
            }
            if save {
                checkpoint::save(
                    &self.folder.checkpoints(),
                    done,
                    adapter_of(self.executor)?,
                    &self.base_model,
                    (&self.config.optimizer.name, optimizer),
                    self.config.keep_checkpoints,
                )?;
            }
        }
        Ok(())
    }

    fn launch(
        &mut self,
        batches: &mut Batches,
        optimizer: &mut dyn Optimizer,
        step: u64,
        learning_rate: f64,
        another_follows: bool,
    ) -> Result<Launched> {
        let rows = batches.step(step)?;
        let mut sink = Gradients::new();
        let loss = self.executor.train_step(
            &rows.batches,
            StepOptions { step, another_follows },
            &mut sink,
        )?;
        let trainables = adapter_of(self.executor)?.trainables();
        let (named, gradients): (Vec<_>, Vec<_>) = sink
            .of(trainables)
            .map(|(trainable, gradient)| (trainable, gradient.shallow_clone()))
            .unzip();
        // 0 means no clipping; the norm is measured all the same.
        let max_norm = match self.config.optimizer.max_grad_norm {
            0.0 => f64::INFINITY,
            max_norm => max_norm,
        };
        let norm = clip_gradient_norm(&gradients, max_norm)?;
        let grad_norm = self.executor.stream().read_back(&norm)?;
        let parameters: Vec<Parameter<'_>> = named
            .iter()
            .zip(&gradients)
            .map(|(trainable, gradient)| Parameter {
                name: &trainable.name,
                value: &trainable.tensor,
                gradient,
            })
            .collect();
        optimizer.step(&parameters, learning_rate)?;
        let after = self.executor.stats()?;
        let before = std::mem::replace(&mut self.counted, after);
        // The device's queue is short: launching a step returns when the device has nearly done it.
        let seconds = self.launched.elapsed().as_secs_f64();
        self.launched = Instant::now();
        Ok(Launched {
            step,
            loss,
            grad_norm,
            learning_rate,
            seconds,
            read_bytes: after.read_bytes - before.read_bytes,
            h2d_bytes: after.h2d_bytes - before.h2d_bytes,
        })
    }

    fn finish(&mut self, launched: Launched) -> Result<()> {
        let loss = self.executor.loss_value(&launched.loss)?;
        let step = launched.step + 1;
        let grad_norm = self.executor.stream().value(&launched.grad_norm)?;
        if !loss.is_finite() || !grad_norm.is_finite() {
            bail!(
                "the loss of step {step} is {loss} and its gradient norm {grad_norm}: lower \
                 learning_rate, or search the weights with --set stream.check_finite=true; earlier \
                 checkpoints are in {}",
                self.folder.checkpoints().display()
            );
        }
        let metrics = StepMetrics {
            step,
            loss,
            learning_rate: launched.learning_rate,
            grad_norm,
            tokens: launched.loss.num_tokens,
            seconds: launched.seconds,
            read_bytes: launched.read_bytes,
            h2d_bytes: launched.h2d_bytes,
        };
        self.first_loss.get_or_insert(loss);
        self.last_loss = loss;
        self.metrics.append(&metrics)?;
        self.progress.step(&metrics);
        Ok(())
    }
}
