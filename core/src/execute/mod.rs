//! The executor: a whole step through source, stream, model, adapter and gradients.
//!
//! Forward runs without a graph and keeps each block's input state. Backward goes back block by block:
//! lease, recompute with a graph, vector-Jacobian product, drop. It stops at the lowest trainable block.

mod backward;
mod flow;
mod forward;
mod gradients;
mod loss;
mod options;
mod record;
mod residents;
mod scope;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

pub use backward::InputGradients;
pub use forward::{Pass, PassInput};
pub use gradients::{GradientSink, Gradients};
pub use options::{ExecutorOptions, Residency};
pub use residents::Residents;
pub use scope::BlockScope;

use crate::adapter::Adapter;
use crate::batch::Batch;
use crate::block::{BlockIndex, Placement};
use crate::device::CopyEngine;
use crate::error::{Error, Result};
use crate::family::Model;
use crate::source::BlockSource;
use crate::state::NamedTensors;
use crate::stream::{BlockStream, Readback, StreamOptions, StreamStats};
use forward::has_vision;
use loss::Targets;

/// One model on one device: executes passes over it, forward and backward.
///
/// Several executors can live in one process. One is driven by one thread.
#[derive(Debug)]
pub struct Executor {
    model: Box<dyn Model>,
    stream: BlockStream,
    residents: Residents,
    adapter: Option<Box<dyn Adapter>>,
    options: ExecutorOptions,
    num_streamed: usize,
    /// Streamed blocks for pictures alone, which are the first ones.
    num_vision: usize,
    /// Per block, whether all micro-batches pass through it as one.
    tokenwise: Vec<bool>,
    /// The head, when it is visited between forward and backward.
    streamed_head: Option<BlockIndex>,
    /// Training steps whose visits are in the stream's itinerary: whether each has pictures.
    scheduled_steps: RefCell<VecDeque<bool>>,
}

/// Which optimizer step a pass belongs to.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepOptions {
    /// Number of the step, for dropout.
    pub step: u64,
    /// Whether a training step follows directly: its first blocks are then fetched during this one.
    pub another_follows: bool,
    /// Whether that step has pictures.
    pub next_has_vision: bool,
}

/// Loss of a step, on its way to the host.
#[derive(Debug)]
pub struct StepLoss {
    mean: Readback,
    /// Targets it is the mean of.
    pub num_targets: usize,
    /// Tokens that went through the model, padding left out.
    pub num_tokens: usize,
}

impl Executor {
    /// Sets up the engine and brings the resident blocks to the device.
    ///
    /// # Errors
    /// Whatever the source, the device or the engine refuses, naming the block.
    pub fn new(
        model: Box<dyn Model>,
        source: Arc<dyn BlockSource>,
        adapter: Option<Box<dyn Adapter>>,
        options: ExecutorOptions,
    ) -> Result<Self> {
        let engine: Arc<dyn CopyEngine> = Arc::from(<dyn CopyEngine>::for_device(options.device)?);
        Self::with_engine(model, source, adapter, engine, options)
    }

    /// As [`Executor::new`] with a copy engine of the caller's.
    ///
    /// # Errors
    /// As [`Executor::new`], and [`Error::WrongDevice`] when the engine copies to another device.
    pub fn with_engine(
        model: Box<dyn Model>,
        source: Arc<dyn BlockSource>,
        adapter: Option<Box<dyn Adapter>>,
        engine: Arc<dyn CopyEngine>,
        options: ExecutorOptions,
    ) -> Result<Self> {
        if !options.compute_kind_is_float() {
            return Err(Error::usage(format!(
                "{:?} cannot be the compute dtype",
                options.compute_kind
            )));
        }
        on_device("the copy engine", engine.device(), options.device)?;
        for trainable in adapter.iter().flat_map(|adapter| adapter.trainables()) {
            on_device(&trainable.name, trainable.tensor.device(), options.device)?;
        }
        if let Some(block) = options.residency.graphs.difference(&options.residency.kept).next() {
            return Err(Error::usage(format!(
                "the graph of block {block} cannot be held: the block is not kept on the device, and its \
                 weights would be gone by backward"
            )));
        }
        let with_placement = |placement| {
            let specs = source.blocks().iter().enumerate();
            let found = specs.filter(move |(_, spec)| spec.placement == placement);
            found.map(|(index, _)| BlockIndex(index))
        };
        let num_streamed = with_placement(Placement::Streamed).count();
        let heads: Vec<BlockIndex> = with_placement(Placement::Head).collect();
        if heads.len() > 1 {
            return Err(Error::usage(format!(
                "a model has at most one head block, but {} has {}",
                source.describe(),
                heads.len()
            )));
        }
        let streamed_head = heads.first().copied().filter(|_| options.residency.stream_head);
        let residents = Residents::load(&source, &engine, &options.residency, &options.stream)?;
        let stream_options = StreamOptions {
            kept: options.residency.kept.clone(),
            unused: options.residency.unused.clone(),
            also_streamed: streamed_head.into_iter().collect(),
            ..options.stream.clone()
        };
        let table = model.weights()?;
        let (num_vision, plans) = (table.num_vision_blocks(), table.blocks);
        if plans.iter().skip(num_vision).any(|plan| plan.only_with_vision) {
            return Err(Error::usage(
                "blocks for pictures alone must come before all others in the model's table",
            ));
        }
        let stream = BlockStream::new(source, engine, &stream_options)?;
        Ok(Self {
            model,
            stream,
            residents,
            adapter,
            options,
            num_streamed,
            num_vision,
            tokenwise: plans.iter().map(|plan| plan.is_tokenwise).collect(),
            streamed_head,
            scheduled_steps: RefCell::default(),
        })
    }

    /// Loss and gradients of one optimizer step, whose micro-batches all pass through a block during one
    /// visit. The loss is the mean over the targets of the whole step.
    ///
    /// The host does not wait for the device: read the loss with [`Executor::loss_value`] when it is
    /// needed.
    ///
    /// # Errors
    /// Whatever a read, a kernel or the plugin reports. The engine is usable afterwards; gradients
    /// already in the sink belong to a step that failed and must be cleared.
    pub fn train_step(
        &self,
        batches: &[Batch],
        options: StepOptions,
        sink: &mut dyn GradientSink,
    ) -> Result<StepLoss> {
        self.recover(self.try_train_step(batches, options, sink))
    }

    fn try_train_step(
        &self,
        batches: &[Batch],
        options: StepOptions,
        sink: &mut dyn GradientSink,
    ) -> Result<StepLoss> {
        if self.trainables().is_empty() {
            return Err(Error::usage("nothing is trainable: the model has no adapter"));
        }
        let (targets, num_targets) = self.targets(batches)?;
        self.schedule_training(has_vision(batches), options)?;
        let inputs = batches.iter().map(|batch| self.embed(batch)).collect::<Result<Vec<_>>>()?;
        let pass = self.run_forward(inputs, true, options.step, None)?;
        let mut losses = Vec::new();
        let mut grads = Vec::new();
        let head = self.visit_head(&pass)?;
        for (micro_batch, targets) in targets.iter().enumerate() {
            let (loss, grad) =
                head.loss_and_grad(micro_batch, targets, num_targets, options.step, sink)?;
            losses.push(loss);
            grads.push(grad);
        }
        drop(head);
        self.run_backward(pass, grads, options.step, sink)?;
        self.scheduled_steps.borrow_mut().pop_front();
        let num_tokens = batches.iter().map(num_tokens).sum::<Result<usize>>()?;
        let mean = self.stream.read_back(&sum(losses)?)?;
        Ok(StepLoss { mean, num_targets, num_tokens })
    }

    /// Mean loss over the targets of some batches, without gradients or dropout.
    ///
    /// # Errors
    /// As [`Executor::train_step`]; also [`Error::Usage`] when a training step was announced to follow.
    pub fn evaluate(&self, batches: &[Batch]) -> Result<StepLoss> {
        self.recover(self.try_evaluate(batches))
    }

    /// The targets of each batch, and how many there are in all.
    fn targets(&self, batches: &[Batch]) -> Result<(Vec<Targets>, usize)> {
        let targets: Vec<Targets> = batches
            .iter()
            .map(|batch| Targets::of(batch, self.options.device))
            .collect::<Result<_>>()?;
        match targets.iter().map(Targets::len).sum() {
            0 => Err(Error::usage("no position takes part in the loss: every label is -100")),
            num_targets => Ok((targets, num_targets)),
        }
    }

    fn try_evaluate(&self, batches: &[Batch]) -> Result<StepLoss> {
        let (targets, num_targets) = self.targets(batches)?;
        let pass = self.forward(batches, None)?;
        let head = self.visit_head(&pass)?;
        let loss = |(micro_batch, targets)| head.loss(micro_batch, targets, num_targets);
        let losses = targets.iter().enumerate().map(loss).collect::<Result<Vec<_>>>()?;
        drop(head);
        let num_tokens = batches.iter().map(num_tokens).sum::<Result<usize>>()?;
        let mean = self.stream.read_back(&sum(losses)?)?;
        Ok(StepLoss { mean, num_targets, num_tokens })
    }

    /// All logits of one batch, `[batch, sequence, vocab_size]` in the compute dtype, without dropout.
    /// `on_block` sees the state after every block.
    ///
    /// # Errors
    /// As [`Executor::evaluate`].
    pub fn logits(
        &self,
        batch: &Batch,
        on_block: &mut dyn FnMut(BlockIndex, &NamedTensors) -> Result<()>,
    ) -> Result<Tensor> {
        let mut run = || {
            let mut on_block = |block, _: usize, state: &NamedTensors| on_block(block, state);
            let pass = self.forward(std::slice::from_ref(batch), Some(&mut on_block))?;
            self.visit_head(&pass)?.logits(0)
        };
        self.recover(run())
    }

    /// Mean negative log-likelihood per target of a step, once it has arrived. Does not wait for steps
    /// launched after it.
    ///
    /// # Errors
    /// As [`BlockStream::value`].
    pub fn loss_value(&self, loss: &StepLoss) -> Result<f64> {
        self.stream.value(&loss.mean)
    }

    /// The model.
    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// The streaming engine, for its statistics and observers.
    pub fn stream(&self) -> &BlockStream {
        &self.stream
    }

    /// The adapter, if there is one.
    pub fn adapter(&self) -> Option<&dyn Adapter> {
        self.adapter.as_deref()
    }

    /// Device memory of everything that neither streams nor is a kept block.
    pub fn resident_bytes(&self) -> usize {
        self.residents.num_bytes
    }

    /// Host memory of the tables that are gathered from there, the source's own included where it lends it.
    pub fn gathered_host_bytes(&self) -> usize {
        self.residents.gathered_bytes
    }

    /// Bytes read from storage to load both.
    pub fn resident_read_bytes(&self) -> usize {
        self.residents.read_bytes
    }

    /// Totals of the streaming engine.
    ///
    /// # Errors
    /// As [`BlockStream::stats`].
    pub fn stats(&self) -> Result<StreamStats> {
        self.stream.stats()
    }

    /// The lowest block that backward visits when neither inputs nor contexts ask for gradients;
    /// `None` when nothing in a streamed block is trainable.
    pub fn lowest_trainable_block(&self) -> Option<BlockIndex> {
        self.lowest_trainable_from(0)
    }

    /// The same for a pass that begins at block `first`.
    fn lowest_trainable_from(&self, first: usize) -> Option<BlockIndex> {
        let used = self.trainables().iter().flat_map(|trainable| trainable.blocks.iter().copied());
        used.filter(|block| (first..self.num_streamed).contains(&block.0)).min()
    }

    /// Visits of one pass without gradients: every block forward, those for pictures only when there are
    /// any, then the head if it streams.
    pub fn inference_visits(&self, has_vision: bool) -> Vec<BlockIndex> {
        let blocks = self.first_block(has_vision)..self.num_streamed;
        blocks.map(BlockIndex).chain(self.streamed_head).collect()
    }

    /// Visits of one training step: those of a pass, then back down to the lowest trainable block.
    pub fn training_visits(&self, has_vision: bool) -> Vec<BlockIndex> {
        let mut visits = self.inference_visits(has_vision);
        visits
            .extend(self.backward_visits(self.lowest_trainable_from(self.first_block(has_vision))));
        visits
    }

    /// The first block of a pass.
    fn first_block(&self, has_vision: bool) -> usize {
        if has_vision { 0 } else { self.num_vision }
    }

    /// The first block of a pass over `inputs`.
    fn first_block_of(&self, inputs: &[PassInput]) -> usize {
        self.first_block(inputs.iter().any(|input| input.has_vision))
    }

    fn is_tokenwise(&self, block: BlockIndex) -> bool {
        self.tokenwise.get(block.0).copied().unwrap_or(false)
    }

    fn backward_visits(&self, lowest: Option<BlockIndex>) -> Vec<BlockIndex> {
        let lowest = lowest.map_or(self.num_streamed, |block| block.0);
        (lowest..self.num_streamed).rev().map(BlockIndex).collect()
    }

    fn schedule_training(&self, has_vision: bool, options: StepOptions) -> Result<()> {
        let mut scheduled = self.scheduled_steps.borrow_mut();
        match scheduled.front() {
            None => self.idle()?,
            Some(announced) if *announced == has_vision => {}
            Some(_) => {
                return Err(Error::usage(
                    "this step was announced otherwise: next_has_vision must say whether it has pictures",
                ));
            }
        }
        let next = options.another_follows.then_some(options.next_has_vision);
        for (number, has_vision) in [Some(has_vision), next].into_iter().flatten().enumerate() {
            if number == scheduled.len() {
                self.stream.schedule(self.training_visits(has_vision))?;
                scheduled.push_back(has_vision);
            }
        }
        Ok(())
    }

    fn trainables(&self) -> &[crate::adapter::Trainable] {
        self.adapter.as_ref().map_or(&[], |adapter| adapter.trainables())
    }

    /// After an error nothing of the itinerary is left, so that the next call starts clean.
    fn recover<T>(&self, outcome: Result<T>) -> Result<T> {
        if outcome.is_err() {
            self.scheduled_steps.borrow_mut().clear();
            self.stream.abandon()?;
        }
        outcome
    }

    fn scope<'a>(
        &'a self,
        block: Option<BlockIndex>,
        tensors: &'a NamedTensors,
        dropout_seed: Option<u64>,
    ) -> BlockScope<'a> {
        BlockScope {
            block,
            block_name: block
                .map_or("resident blocks", |block| &self.stream.blocks()[block.0].name),
            tensors,
            residents: &self.residents,
            adapter: self.adapter.as_deref(),
            dropout_seed,
            compute_kind: self.options.compute_kind,
            device: self.options.device,
            attention: self.options.attention,
            experts: self.options.experts,
        }
    }
}

impl ExecutorOptions {
    fn compute_kind_is_float(&self) -> bool {
        matches!(self.compute_kind, Kind::Float | Kind::BFloat16 | Kind::Half | Kind::Double)
    }
}

fn on_device(what: &str, found: Device, expected: Device) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let (expected, found) = (format!("{expected:?}"), format!("{found:?}"));
    Err(Error::WrongDevice { what: what.to_owned(), expected, found })
}

fn sum(losses: Vec<Tensor>) -> Result<Tensor> {
    let mut losses = losses.into_iter();
    let first = losses.next().ok_or_else(|| Error::usage("a step needs at least one batch"))?;
    losses.try_fold(first, |total, loss| Ok(total.f_add(&loss)?))
}

/// Tokens of a batch, padding left out. The mask is on the host.
fn num_tokens(batch: &Batch) -> Result<usize> {
    match &batch.attention_mask {
        None => Ok(batch.input_ids.numel()),
        Some(mask) => Ok(mask.f_sum(Kind::Int64)?.f_int64_value(&[])? as usize),
    }
}
