//! Backward: recompute one block with a graph, take its vector-Jacobian product, drop it.

use tch::Tensor;

use super::forward::Pass;
use super::gradients::GradientSink;
use super::{Executor, PassInput};
use crate::block::BlockIndex;
use crate::context::Context;
use crate::device::grad;
use crate::error::{Error, Result};
use crate::state::{NamedTensors, State};
use crate::stream::Lease;

/// Gradients of what one micro-batch brought into the first block.
#[derive(Debug, Default)]
pub struct InputGradients {
    /// Of the first state's tensors that require gradients, where anything used them.
    pub state: NamedTensors,
    /// Of the context's tensors that require gradients, summed over all blocks.
    pub context: NamedTensors,
}

/// One leaf of a recomputed block: what its gradient is for.
enum Leaf {
    State(String),
    Context(String),
    Trainable(usize),
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
        let mut collected: Vec<NamedTensors> = inputs.iter().map(|_| NamedTensors::new()).collect();
        for block in self.backward_visits(lowest) {
            let states =
                saved.pop().ok_or_else(|| Error::usage("the pass kept no states for backward"))?;
            let lease = self.lease(block)?;
            for (micro_batch, state) in states.into_iter().enumerate() {
                let visit = Visit { block, lowest, micro_batch, step };
                grads[micro_batch] = self.differentiate(
                    &visit,
                    &lease,
                    &inputs[micro_batch],
                    state,
                    &grads[micro_batch],
                    &mut collected[micro_batch],
                    sink,
                )?;
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

    /// One block of one micro-batch: from the gradients of its outputs to those of its inputs.
    #[allow(clippy::too_many_arguments)]
    fn differentiate(
        &self,
        visit: &Visit,
        lease: &Lease<'_>,
        input: &PassInput,
        state: State,
        grad_outputs: &NamedTensors,
        context_grads: &mut NamedTensors,
        sink: &mut dyn GradientSink,
    ) -> Result<NamedTensors> {
        let mut leaves = Vec::new();
        let mut targets: Vec<Tensor> = Vec::new();
        let mut leaf_state = State::new();
        for (name, tensor) in state.iter() {
            let wanted = match visit.is_lowest() {
                true => {
                    visit.block.0 == 0 && input.state.find(name).is_some_and(Tensor::requires_grad)
                }
                false => tensor.is_floating_point(),
            };
            let leaf = tensor.f_detach()?;
            if wanted {
                targets.push(leaf.f_set_requires_grad(true)?);
                leaves.push(Leaf::State(name.to_owned()));
            }
            leaf_state.insert(name, leaf);
        }
        drop(state);
        let leaf_context = leaf_context(&input.context, &mut leaves, &mut targets)?;
        for (index, trainable) in self.trainables().iter().enumerate() {
            if trainable.blocks.contains(&visit.block) {
                targets.push(trainable.tensor.shallow_clone());
                leaves.push(Leaf::Trainable(index));
            }
        }
        let seed = Some(self.visit_seed(visit.step, visit.block, visit.micro_batch));
        let scope = self.scope(Some(visit.block), lease.tensors(), seed);
        let outputs = tch::with_grad(|| {
            self.model.forward_block(visit.block, &scope, &leaf_context, leaf_state)
        })?;
        let mut pairs = Vec::new();
        for (name, gradient) in grad_outputs.iter() {
            let output = outputs.get(name)?;
            if output.requires_grad() {
                pairs.push((output, gradient));
            }
        }
        let (outputs, grad_outputs): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let gradients = grad(&outputs, &grad_outputs, &targets.iter().collect::<Vec<_>>())?;
        let mut grad_inputs = NamedTensors::new();
        for (leaf, gradient) in leaves.into_iter().zip(gradients) {
            let Some(gradient) = gradient else { continue };
            match leaf {
                Leaf::State(name) => grad_inputs.insert(name, gradient),
                Leaf::Context(name) => {
                    let sum = match context_grads.find(&name) {
                        Some(sum) => sum.f_add(&gradient)?,
                        None => gradient,
                    };
                    context_grads.insert(name, sum);
                }
                Leaf::Trainable(index) => sink.accept(index, gradient)?,
            }
        }
        Ok(grad_inputs)
    }
}

/// Which visit of the backward pass it is.
struct Visit {
    block: BlockIndex,
    lowest: Option<BlockIndex>,
    micro_batch: usize,
    step: u64,
}

impl Visit {
    fn is_lowest(&self) -> bool {
        self.lowest == Some(self.block)
    }
}

/// A context whose tensors that require gradients are leaves of this block's graph.
fn leaf_context(
    context: &Context,
    leaves: &mut Vec<Leaf>,
    targets: &mut Vec<Tensor>,
) -> Result<Context> {
    let mut result = context.clone();
    for (name, tensor) in context.tensors.iter().filter(|(_, tensor)| tensor.requires_grad()) {
        let leaf = tensor.f_detach()?.f_set_requires_grad(true)?;
        targets.push(leaf.shallow_clone());
        leaves.push(Leaf::Context(name.to_owned()));
        result.tensors.insert(name, leaf);
    }
    Ok(result)
}
