//! The training loop.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use blockstreamer_core::adapter::{Adapter, Lora};
use blockstreamer_core::device::{memory_stats, set_deterministic};
use blockstreamer_core::execute::{Executor, StepOptions};
use blockstreamer_core::optimizer::{Optimizer, Schedule, by_name};
use blockstreamer_core::site::Site;
use blockstreamer_core::stream::StreamStats;

use super::checkpoint::{self, Checkpoint};
use super::metrics::MetricsFile;
use super::progress::Progress;
use super::rows::load_rows;
use super::step::{Launched, Stepper, adapter_of};
use super::{RunConfig, RunFolder};
use crate::data::{BatchOptions, Batches, today};
use crate::engine::{Job, OpenModel, Precision, device};
use crate::plugins::Registry;
use crate::trace::{self as timeline, TRACED_STEPS};

/// How a run begins, and what it leaves besides its folder.
#[derive(Debug, Clone, Copy, Default)]
pub struct TrainOptions<'a> {
    /// Whether it goes on from its newest checkpoint.
    pub resume: bool,
    /// File for a trace of the first three steps after the first one.
    pub trace: Option<&'a Path>,
}

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

/// Runs training by `config`.
///
/// # Errors
/// Whatever is wrong with settings, model, rows, files or device. What was saved before stays whole.
pub fn train(
    registry: &Registry,
    config: &RunConfig,
    options: TrainOptions<'_>,
) -> Result<RunSummary> {
    let TrainOptions { resume, trace } = options;
    trace.map_or(Ok(()), timeline::check_path)?;
    let device = device(&config.device)?;
    if config.dtype == Precision::Fp16 {
        bail!("training in fp16 needs loss scaling, which is not there: use dtype = \"bf16\"");
    }
    // Kernels that add in one fixed order: a resumed run then repeats the bits of an uninterrupted one.
    set_deterministic(true)?;
    let folder = RunFolder::open(&config.out, resume)?;
    let mut config = config.clone();
    let earlier = if resume { folder.earlier().ok() } else { None };
    if let Some(earlier) = &earlier {
        // In 16 bits a token's experts are rounded once per block: a run goes on as it was cut.
        config.stream.expert_groups = config.stream.expert_groups.or(earlier.stream.expert_groups);
        // Templates that print the date must not give it other tokens on another day.
        config.data.date = config.data.date.or(earlier.data.date);
    } else {
        config.data.date.get_or_insert_with(today);
    }
    let open = OpenModel::open(registry, &config.model, config.model_options())?;
    let order = BatchOptions {
        batch_size: config.batch_size,
        micro_batches: config.micro_batches,
        seed: config.seed,
        shuffle: config.data.shuffle,
    };
    let mut batches = load_rows(registry, &open, &config.data, config.sequence_length, order)?;
    let total_steps = config.steps.unwrap_or_else(|| batches.num_steps(config.epochs));

    let saved = if resume { Checkpoint::latest(&folder.checkpoints())? } else { None };
    if saved.is_some() {
        folder.check_resumable(&config)?;
    } else if resume {
        tracing::warn!(
            "{} has no checkpoint yet: the run starts at its first step",
            config.out.display()
        );
    }
    let lora = config.lora.options(config.seed)?;
    let adapter = |sites: &[Site]| -> Result<Box<dyn Adapter>> {
        Ok(match &saved {
            Some(saved) => Box::new(Lora::import(&saved.adapter(), sites, device)?),
            None => Box::new(Lora::new(sites, &lora, device)?),
        })
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
            adapter(&open.model.sites()?)?
                .export(&folder.adapter(), &base_model.to_string_lossy())?;
        }
        bail!(
            "the run in {} has done all its {total_steps} steps, its adapter is in {}: raise steps to go on",
            config.out.display(),
            folder.adapter().display()
        );
    }

    let job = Job {
        trains: true,
        tokens: config.batch_size * batches.longest_row(),
        num_micro_batches: config.micro_batches,
        patches: batches.max_patches(),
    };
    let launch = config.launch(registry, &open, device, job);
    let started = launch.start(&|sites| Ok(Some(adapter(sites)?)))?;
    let executor = started.executor;
    if open.model.dimensions().num_experts > 0 {
        config.stream.expert_groups = Some(started.num_expert_groups);
    }
    // Only now is something written: a run that cannot start leaves nothing to be in its way.
    folder.create(&config)?;
    let mut run = Run {
        config: &config,
        folder: &folder,
        base_model: base_model.to_string_lossy().into_owned(),
        executor: &executor,
        metrics: MetricsFile::open(&folder.metrics(), completed_steps)?,
        progress: Progress::new(completed_steps, total_steps),
        stepper: Stepper::new(&executor, config.optimizer.max_grad_norm)?,
        trace,
        first_loss: None,
        last_loss: f64::NAN,
    };
    run.steps(&mut batches, &mut *optimizer, completed_steps..total_steps)?;
    let (first_loss, last_loss) = (run.first_loss.unwrap_or(f64::NAN), run.last_loss);
    drop(run);
    adapter_of(&executor)?.export(&folder.adapter(), &base_model.to_string_lossy())?;
    let stats = executor.stats()?;
    let peak_device_bytes =
        if device.is_cuda() { Some(memory_stats(device)?.peak_bytes) } else { None };
    Ok(RunSummary {
        first_loss,
        last_loss,
        steps: total_steps,
        stats,
        peak_device_bytes,
        adapter: folder.adapter(),
    })
}

struct Run<'a> {
    config: &'a RunConfig,
    folder: &'a RunFolder,
    base_model: String,
    executor: &'a Executor,
    metrics: MetricsFile,
    progress: Progress,
    stepper: Stepper<'a>,
    trace: Option<&'a Path>,
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
        let first_traced = (steps.start + 1).min(steps.end - 1);
        let traced = first_traced..(first_traced + TRACED_STEPS).min(steps.end);
        let mut launched: Option<Launched> = None;
        for step in steps.clone() {
            let rows = match batches.step(step) {
                Ok(rows) => rows,
                // What was learnt so far must not be lost for a damaged picture.
                Err(error) if step > steps.start => {
                    if let Some(last) = launched.take() {
                        self.finish(last)?;
                    }
                    self.save(step, optimizer)?;
                    return Err(anyhow::Error::from(error).context(format!(
                        "the rows of step {} cannot be used; the {step} steps before it are saved: go on \
                         with --resume once the rows are mended",
                        step + 1
                    )));
                }
                Err(error) => return Err(error.into()),
            };
            if self.trace.is_some() && step == traced.start {
                self.executor.stream().start_trace()?;
            }
            let options = StepOptions {
                step,
                another_follows: step + 1 < steps.end,
                next_has_vision: step + 1 < steps.end && batches.step_has_vision(step + 1),
            };
            let next = self.stepper.launch(&rows.batches, optimizer, options, schedule.at(step))?;
            if let Some(before) = launched.replace(next) {
                self.finish(before)?;
            }
            let done = step + 1;
            let every = self.config.checkpoint_every;
            let save = done == steps.end || (every > 0 && done.is_multiple_of(every));
            let traced = self.trace.filter(|_| done == traced.end);
            // The CPU has done a step when it is launched. A trace ends with what has happened.
            if (save || traced.is_some() || !self.executor.stream().device().is_cuda())
                && let Some(last) = launched.take()
            {
                self.finish(last)?;
            }
            if save {
                self.save(done, optimizer)?;
            }
            if let Some(path) = traced {
                timeline::finish(path, self.executor.stream())?;
            }
        }
        Ok(())
    }

    /// Saves what `done` steps came to.
    fn save(&self, done: u64, optimizer: &dyn Optimizer) -> Result<()> {
        checkpoint::save(
            &self.folder.checkpoints(),
            done,
            adapter_of(self.executor)?,
            &self.base_model,
            (&self.config.optimizer.name, optimizer),
            self.config.keep_checkpoints,
        )
    }

    fn finish(&mut self, launched: Launched) -> Result<()> {
        let metrics = self.stepper.finish(launched)?;
        let (step, loss, grad_norm) = (metrics.step, metrics.loss, metrics.grad_norm);
        if !loss.is_finite() || !grad_norm.is_finite() {
            let search = match self.config.stream.check_finite {
                true => "",
                false => ", or search the weights with --set stream.check_finite=true",
            };
            bail!(
                "the loss of step {step} is {loss} and its gradient norm {grad_norm}: lower \
                 learning_rate{search}; earlier checkpoints are in {}",
                self.folder.checkpoints().display()
            );
        }
        self.first_loss.get_or_insert(loss);
        self.last_loss = loss;
        self.metrics.append(&metrics)?;
        self.progress.step(&metrics);
        Ok(())
    }
}
