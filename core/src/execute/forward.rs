//! Forward: every block once, without a graph.

use tch::Tensor;

use super::options::dropout_seed;
use super::{Executor, on_device};
use crate::batch::Batch;
use crate::block::BlockIndex;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::numerics::padding_is_on_the_right;
use crate::state::{HIDDEN, NamedTensors, State};

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
    /// Input states of the blocks from `lowest` on, `[block - lowest][micro-batch]`.
    pub(super) saved: Vec<Vec<State>>,
    /// The lowest block that backward will visit.
    pub(super) lowest: Option<BlockIndex>,
    pub(super) outputs: Vec<State>,
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
        self.stream.schedule((0..self.num_streamed).map(BlockIndex))?;
        let inputs = batches.iter().map(|batch| self.embed(batch)).collect::<Result<Vec<_>>>()?;
        self.run_forward(inputs, false, 0, on_block)
    }

    fn idle(&self) -> Result<()> {
        match self.stream.num_upcoming()? {
            0 => Ok(()),
            _ => Err(Error::usage(
                "a training step was announced to follow; run it, or announce none",
            )),
        }
    }

    pub(super) fn embed(&self, batch: &Batch) -> Result<PassInput> {
        let _no_graph = tch::no_grad_guard();
        let right_padded = batch
            .attention_mask
            .as_ref()
            .map(padding_is_on_the_right)
            .transpose()?
            .unwrap_or(false);
        let to_device = |tensor: &Tensor| tensor.f_to_device(self.options.device);
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
            if lowest.is_some_and(|lowest| block >= lowest) {
                saved.push(states.clone());
            }
            let lease = self.lease(block)?;
            for (micro_batch, input) in inputs.iter().enumerate() {
                let seed = train.then(|| self.visit_seed(step, block, micro_batch));
                let scope = self.scope(Some(block), lease.tensors(), seed);
                let state = std::mem::take(&mut states[micro_batch]);
                let state = self.model.forward_block(block, &scope, &input.context, state)?;
                // A tensor in the slot would turn into another block's bytes: give it memory of its own.
                states[micro_batch] = state
                    .iter()
                    .map(|(name, tensor)| {
                        let own = if lease.owns(tensor) {
                            tensor.f_detach_copy()?
                        } else {
                            tensor.shallow_clone()
                        };
                        Ok((name.to_owned(), own))
                    })
                    .collect::<Result<State>>()?;
                on_block(block, micro_batch, &states[micro_batch])?;
            }
        }
        Ok(Pass { inputs, saved, lowest, outputs: states })
    }

    pub(super) fn visit_seed(&self, step: u64, block: BlockIndex, micro_batch: usize) -> u64 {
        dropout_seed(self.options.seed, step, block.0 as u64, micro_batch as u64)
    }
}
