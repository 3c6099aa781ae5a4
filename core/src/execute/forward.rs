//! Forward: every block once, without a graph but where one is held for backward.

use tch::{Device, Tensor};

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

/// What one micro-batch brings into the first block.
#[derive(Debug)]
pub struct PassInput {
    /// What all its blocks share. Tensors that require gradients get them.
    pub context: Context,
    /// The first state. Tensors that require gradients get them.
    pub state: State,
}

/// A forward pass: where it ended, and what backward needs.
#[derive(Debug)]
pub struct Pass {
    pub(super) inputs: Vec<PassInput>,
    /// Of the blocks from `lowest` on, `[block - lowest][micro-batch]`.
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
            let forward = (0..self.num_streamed).map(BlockIndex);
            self.stream.schedule(forward.chain(self.backward_visits(lowest)))?;
            self.run_forward(inputs, true, step, &mut |_, _, _| Ok(()))
        };
        self.recover(run())
    }

    /// Embeds and runs batches without keeping anything for backward, without dropout.
    pub(super) fn forward(&self, batches: &[Batch], on_block: &mut OnBlock<'_>) -> Result<Pass> {
        self.idle()?;
        self.stream.schedule(self.inference_visits())?;
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
        let to_device = |tensor: &Tensor| upload(tensor, self.options.device);
        let move_optional = |tensor: &Option<Tensor>| tensor.as_ref().map(to_device).transpose();
        let batch = Batch {
            input_ids: to_device(&batch.input_ids)?,
            attention_mask: move_optional(&batch.attention_mask)?,
            labels: None,
            segments: move_optional(&batch.segments)?,
        };
        let empty = NamedTensors::new();
        let (mut context, state) = self.model.embed(&self.scope(None, &empty, None), &batch)?;
        if context.attention.causal && right_padded {
            // Only padding sees padding then, and kernels that know causality need no mask matrix.
            context.attention.key_mask = None;
        }
        Ok(PassInput { context, state })
    }

    fn lowest_for(&self, inputs: &[PassInput]) -> Option<BlockIndex> {
        let wanted = |input: &PassInput| {
            let tensors = input.state.iter().chain(input.context.tensors.iter());
            tensors.into_iter().any(|(_, tensor)| tensor.requires_grad())
        };
        match inputs.iter().any(wanted) {
            true => Some(BlockIndex(0)),
            false => self.lowest_trainable_block(),
        }
    }

    pub(super) fn run_forward(
        &self,
        inputs: Vec<PassInput>,
        train: bool,
        step: u64,
        on_block: &mut OnBlock<'_>,
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
        let mut states: Vec<State> = inputs.iter().map(|input| input.state.clone()).collect();
        let mut saved = Vec::new();
        for block in (0..self.num_streamed).map(BlockIndex) {
            let lease = self.lease(block)?;
            // At the turn-around a block is still there when it is visited again: no need to recompute
            // it, as long as that takes no more memory than recomputing.
            let turns = inputs.len() == 1 && lease.is_visited_next();
            let holds_graph = turns || self.options.residency.graphs.contains(&block);
            let mut saved_here = Vec::new();
            for (micro_batch, input) in inputs.iter().enumerate() {
                let visit = Visit { block, lowest, micro_batch, step };
                let state = std::mem::take(&mut states[micro_batch]);
                let state = if visit.comes_again() && holds_graph {
                    let recorded = self.record(&visit, lease.tensors(), input, state)?;
                    let outputs = recorded.outputs()?;
                    saved_here.push(Saved::Graph(recorded));
                    outputs
                } else {
                    if visit.comes_again() {
                        saved_here.push(Saved::Inputs(state.clone()));
                    }
                    let seed = train.then(|| self.visit_seed(step, block, micro_batch));
                    let scope = self.scope(Some(block), lease.tensors(), seed);
                    self.model.forward_block(block, &scope, &input.context, state)?
                };
                let own = |(name, tensor)| Ok((String::from(name), outlive(&lease, tensor)?));
                states[micro_batch] = state.iter().map(own).collect::<Result<State>>()?;
                on_block(block, micro_batch, &states[micro_batch])?;
            }
            if !saved_here.is_empty() {
                saved.push(saved_here);
            }
        }
        Ok(Pass { inputs, saved, lowest, outputs: states })
    }

    pub(super) fn visit_seed(&self, step: u64, block: BlockIndex, micro_batch: usize) -> u64 {
        dropout_seed(self.options.seed, step, block.0 as u64, micro_batch as u64)
    }
}

/// What may be kept of `tensor` after the lease: in the slot it would turn into another block's bytes.
pub(super) fn outlive(lease: &Lease<'_>, tensor: &Tensor) -> Result<Tensor> {
    match lease.owns(tensor) {
        true => Ok(tensor.f_detach_copy()?),
        false => Ok(tensor.shallow_clone()),
    }
}
