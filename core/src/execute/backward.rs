//! Backward: recompute one block with a graph, unless forward held it, take its vector-Jacobian product,
//! drop it.

use tch::Tensor;

use super::flow::{Extent, join_gradients, split};
use super::forward::{Pass, Saved};
use super::gradients::GradientSink;
use super::record::Visit;
use super::{Executor, PassInput};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::state::NamedTensors;

/// Gradients of what one micro-batch brought into the first block.
#[derive(Debug, Default)]
pub struct InputGradients {
    /// Of the first state's tensors that require gradients, where anything used them.
    pub state: NamedTensors,
    /// Of the context's tensors that require gradients, summed over all blocks.
    pub context: NamedTensors,
}

impl Executor {
    /// Gradients of a pass made by [`Executor::forward_for_backward`], given those of its outputs, per
    /// micro-batch and by name. Trainables go to the sink.
    ///
    /// # Errors
    /// As [`Executor::train_step`].
    pub fn backward(
        &self,
        pass: Pass,
        grad_outputs: Vec<NamedTensors>,
        step: u64,
        sink: &mut dyn GradientSink,
    ) -> Result<Vec<InputGradients>> {
        let run = || match grad_outputs.len() == pass.outputs.len() {
            true => self.run_backward(pass, grad_outputs, step, sink),
            false => {
                Err(Error::usage("backward needs the gradients of every micro-batch's outputs"))
            }
        };
        self.recover(run())
    }

    pub(super) fn run_backward(
        &self,
        pass: Pass,
        mut grads: Vec<NamedTensors>,
        step: u64,
        sink: &mut dyn GradientSink,
    ) -> Result<Vec<InputGradients>> {
        let Pass { inputs, mut saved, lowest, .. } = pass;
        let extents =
            inputs.iter().map(|input| Extent::of(&input.state)).collect::<Result<Vec<_>>>()?;
        let first = self.first_block_of(&inputs);
        let no_context = Context::default();
        let mut collected: Vec<NamedTensors> = inputs.iter().map(|_| NamedTensors::new()).collect();
        for block in self.backward_visits(lowest) {
            let saved_here =
                saved.pop().ok_or_else(|| Error::usage("the pass kept no states for backward"))?;
            let lease = self.lease(block)?;
            let aside = match self.is_tokenwise(block) {
                true => {
                    let (joined, aside) = join_gradients(&grads, &extents)?;
                    grads = vec![joined];
                    Some(aside)
                }
                false => None,
            };
            for (micro_batch, saved) in saved_here.into_iter().enumerate() {
                let input = &inputs[micro_batch];
                let recorded = match saved {
                    Saved::Skipped => continue,
                    Saved::Graph(recorded) => recorded,
                    Saved::Inputs(state) => {
                        let visit = Visit { block, lowest, first, micro_batch, step };
                        let context = if aside.is_some() { &no_context } else { &input.context };
                        self.record(&visit, lease.tensors(), context, &input.state, state)?
                    }
                };
                let collected = &mut collected[micro_batch];
                grads[micro_batch] =
                    recorded.differentiate(&grads[micro_batch], collected, sink)?;
            }
            if let (Some(aside), [joined]) = (aside, &grads[..]) {
                grads = split(joined, &aside, &extents)?;
            }
        }
        let finish = |((grads, context), input): ((NamedTensors, NamedTensors), &PassInput)| {
            InputGradients {
                state: grads
                    .iter()
                    .filter(|(name, _)| input.state.find(name).is_some_and(Tensor::requires_grad))
                    .map(|(name, tensor)| (name.to_owned(), tensor.shallow_clone()))
                    .collect(),
                context,
            }
        };
        Ok(grads.into_iter().zip(collected).zip(&inputs).map(finish).collect())
    }
}
