//! Forward: every block once, without a graph but where one is held for backward.

use tch::{Device, Tensor};

use super::flow::Flow;
use super::options::dropout_seed;
use super::record::{Recorded, Visit};
use super::{Executor, on_device};
use crate::batch::Batch;
use crate::block::BlockIndex;
use crate::context::Context;
use crate::device::upload;
use crate::error::{Error, Result};
use crate::numerics::padding_is_on_the_right;
use crate::state::{HIDDEN, NamedTensors, State};
use crate::stream::Lease;
use crate::vision::Patches;

/// What one micro-batch brings into the first block.
#[derive(Debug)]
pub struct PassInput {
    /// What all its blocks share. Tensors that require gradients get them.
    pub context: Context,
    /// The first state. Tensors that require gradients get them.
    pub state: State,
    /// Whether the micro-batch has pictures, and passes through the blocks for them.
    pub has_vision: bool,
}

/// A forward pass: where it ended, and what backward needs.
#[derive(Debug)]
pub struct Pass {
    pub(super) inputs: Vec<PassInput>,
    /// Of the blocks from `lowest` on, `[block - lowest][micro-batch]`; of a block of tokens alone one entry
    /// for all micro-batches.
    pub(super) saved: Vec<Vec<Saved>>,
    /// The lowest block that backward will visit.
    pub(super) lowest: Option<BlockIndex>,
    pub(super) outputs: Vec<State>,
}

/// What backward needs of one block and micro-batch.
#[derive(Debug)]
pub(super) enum Saved {
    /// The input state, to run the block again.
    Inputs(State),
    /// The graph itself.
    Graph(Recorded),
    /// The micro-batch did not pass through the block.
    Skipped,
}

impl Pass {
    /// The state after the last block, per micro-batch.
    pub fn outputs(&self) -> &[State] {
        &self.outputs
    }
}

/// Sees the state after each block of each micro-batch.
pub(super) type OnBlock<'a> = dyn FnMut(BlockIndex, usize, &State) -> Result<()> + 'a;

impl Executor {
    /// Runs inputs of the caller's making through all blocks, for a later [`Executor::backward`].
    ///
    /// Backward will visit every block when an input or context tensor requires gradients, else only
    /// down to the lowest trainable block. `step` chooses the dropout masks.
    ///
    /// # Errors
    /// As [`Executor::train_step`]; [`Error::WrongDevice`] for inputs elsewhere.
    pub fn forward_for_backward(&self, inputs: Vec<PassInput>, step: u64) -> Result<Pass> {
        let run = || {
            self.idle()?;
            let lowest = self.lowest_for(&inputs);
            let first = self.first_block_of(&inputs);
            let forward = (first..self.num_streamed).map(BlockIndex);
            self.stream.schedule(forward.chain(self.backward_visits(lowest)))?;
            self.run_forward(inputs, true, step, None)
        };
        self.recover(run())
    }

    /// Embeds and runs batches without keeping anything for backward, without dropout.
    pub(super) fn forward(
        &self,
        batches: &[Batch],
        on_block: Option<&mut OnBlock<'_>>,
    ) -> Result<Pass> {
        self.idle()?;
        self.stream.schedule(self.inference_visits(has_vision(batches)))?;
        let inputs = batches.iter().map(|batch| self.embed(batch)).collect::<Result<Vec<_>>>()?;
        self.run_forward(inputs, false, 0, on_block)
    }

    pub(super) fn idle(&self) -> Result<()> {
        match self.stream.num_upcoming()? {
            0 => Ok(()),
            _ => Err(Error::usage(
                "visits of an earlier pass are still to come: run the training step that was announced to \
                 follow, or the backward of the forward pass",
            )),
        }
    }

    /// The visit of `block`, which must be the next one.
    pub(super) fn lease(&self, block: BlockIndex) -> Result<Lease<'_>> {
        let lease = self.stream.lease()?;
        match lease.block() == block {
            true => Ok(lease),
            false => Err(Error::usage(format!(
                "the next visit is of block {}, not of block {block}: someone else scheduled visits",
                lease.block()
            ))),
        }
    }

    /// Refuses ids outside the vocabulary, which would end a CUDA process. Only the host's are looked at:
    /// reading others back would make it wait.
    fn check_ids(&self, ids: &Tensor) -> Result<()> {
        if ids.device() != Device::Cpu || ids.numel() == 0 {
            return Ok(());
        }
        let vocab_size = self.model.dimensions().vocab_size as i64;
        let (least, most) = (ids.f_min()?.f_int64_value(&[])?, ids.f_max()?.f_int64_value(&[])?);
        if least >= 0 && most < vocab_size {
            return Ok(());
        }
        let wrong = if least < 0 { least } else { most };
        Err(Error::usage(format!(
            "token id {wrong} is outside the model's vocabulary of {vocab_size}; the tokenizer belongs to another model"
        )))
    }

    pub(super) fn embed(&self, batch: &Batch) -> Result<PassInput> {
        let _no_graph = tch::no_grad_guard();
        self.check_ids(&batch.input_ids)?;
        let right_padded = batch
            .attention_mask
            .as_ref()
            .map(padding_is_on_the_right)
            .transpose()?
            .unwrap_or(false);
        let has_vision = batch.has_vision();
        let mut batch = batch.clone();
        self.model.prepare(&mut batch)?;
        let to_device = |tensor: &Tensor| upload(tensor, self.options.device);
        let move_optional = |tensor: &Option<Tensor>| tensor.as_ref().map(to_device).transpose();
        let move_patches = |patches: &Option<Patches>| -> Result<Option<Patches>> {
            let Some(patches) = patches else { return Ok(None) };
            let pixels = to_device(&patches.pixels)?;
            Ok(Some(Patches { pixels, grids: patches.grids.clone() }))
        };
        let prepared = batch.prepared.iter();
        let prepared = prepared.map(|(name, tensor)| Ok((name.to_owned(), to_device(tensor)?)));
        let batch = Batch {
            input_ids: to_device(&batch.input_ids)?,
            attention_mask: move_optional(&batch.attention_mask)?,
            labels: None,
            segments: move_optional(&batch.segments)?,
            images: move_patches(&batch.images)?,
            videos: move_patches(&batch.videos)?,
            prepared: prepared.collect::<Result<_>>()?,
            prepared_on_host: batch.prepared_on_host,
        };
        let empty = NamedTensors::new();
        let (mut context, state) = self.model.embed(&self.scope(None, &empty, None), &batch)?;
        if context.attention.causal && right_padded {
            // Only padding sees padding then, and kernels that know causality need no mask matrix.
            context.attention.key_mask = None;
        }
        Ok(PassInput { context, state, has_vision })
    }

    fn lowest_for(&self, inputs: &[PassInput]) -> Option<BlockIndex> {
        let wanted = |input: &PassInput| {
            let tensors = input.state.iter().chain(input.context.tensors.iter());
            tensors.into_iter().any(|(_, tensor)| tensor.requires_grad())
        };
        let first = self.first_block_of(inputs);
        match inputs.iter().any(wanted) {
            true => Some(BlockIndex(first)),
            false => self.lowest_trainable_from(first),
        }
    }

    pub(super) fn run_forward(
        &self,
        inputs: Vec<PassInput>,
        train: bool,
        step: u64,
        mut on_block: Option<&mut OnBlock<'_>>,
    ) -> Result<Pass> {
        let lowest = if train { self.lowest_for(&inputs) } else { None };
        let _no_graph = tch::no_grad_guard();
        for (micro_batch, input) in inputs.iter().enumerate() {
            for (name, tensor) in input.state.iter().chain(input.context.tensors.iter()) {
                let what = || format!("'{name}' of micro-batch {micro_batch}");
                on_device(&what(), tensor.device(), self.options.device)?;
            }
            input.state.get(HIDDEN)?;
        }
        let mut flow = Flow::new(inputs.iter().map(|input| input.state.clone()).collect())?;
        let no_context = Context::default();
        let first = self.first_block_of(&inputs);
        let mut saved = Vec::new();
        for block in (first..self.num_streamed).map(BlockIndex) {
            let lease = self.lease(block)?;
            let joined = self.is_tokenwise(block);
            flow = flow.arrange(joined)?;
            // At the turn-around a block is still there when it is visited again: no need to recompute
            // it, as long as that takes no more memory than recomputing.
            let turns = flow.len() == 1 && lease.is_visited_next();
            let holds_graph = turns || self.options.residency.graphs.contains(&block);
            let mut saved_here = Vec::new();
            for (micro_batch, input) in inputs.iter().enumerate().take(flow.len()) {
                let visit = Visit { block, lowest, first, micro_batch, step };
                if !joined && self.skips(block, input) {
                    if visit.comes_again() {
                        saved_here.push(Saved::Skipped);
                    }
                    continue;
                }
                let context = if joined { &no_context } else { &input.context };
                let state = flow.take(micro_batch);
                let state = if visit.comes_again() && holds_graph {
                    let recorded =
                        self.record(&visit, lease.tensors(), context, &input.state, state)?;
                    let outputs = recorded.outputs()?;
                    saved_here.push(Saved::Graph(recorded));
                    outputs
                } else {
                    if visit.comes_again() {
                        saved_here.push(Saved::Inputs(state.clone()));
                    }
                    let seed = train.then(|| self.visit_seed(step, block, micro_batch));
                    let scope = self.scope(Some(block), lease.tensors(), seed);
                    self.model.forward_block(block, &scope, context, state)?
                };
                let own = |(name, tensor)| Ok((String::from(name), outlive(&lease, tensor)?));
                flow.put(micro_batch, state.iter().map(own).collect::<Result<State>>()?);
            }
            if let Some(on_block) = &mut on_block {
                flow.each(|micro_batch, state| on_block(block, micro_batch, state))?;
            }
            if !saved_here.is_empty() {
                saved.push(saved_here);
            }
        }
        Ok(Pass { inputs, saved, lowest, outputs: flow.into_states()? })
    }

    /// Whether a micro-batch does not pass through a block.
    fn skips(&self, block: BlockIndex, input: &PassInput) -> bool {
        block.0 < self.num_vision && !input.has_vision
    }

    pub(super) fn visit_seed(&self, step: u64, block: BlockIndex, micro_batch: usize) -> u64 {
        dropout_seed(self.options.seed, step, block.0 as u64, micro_batch as u64)
    }
}

/// Whether any of the micro-batches has pictures.
pub(super) fn has_vision(batches: &[Batch]) -> bool {
    batches.iter().any(Batch::has_vision)
}

/// What may be kept of `tensor` after the lease: in the slot it would turn into another block's bytes.
pub(super) fn outlive(lease: &Lease<'_>, tensor: &Tensor) -> Result<Tensor> {
    match lease.owns(tensor) {
        true => Ok(tensor.f_detach_copy()?),
        false => Ok(tensor.shallow_clone()),
    }
}
