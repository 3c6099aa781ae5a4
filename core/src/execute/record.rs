//! One block of one micro-batch with its graph: run from leaves, and taken back to their gradients.

use tch::Tensor;

use super::Executor;
use super::gradients::GradientSink;
use crate::block::BlockIndex;
use crate::context::Context;
use crate::device::grad;
use crate::error::Result;
use crate::state::{NamedTensors, State};

/// Which use of which block it is.
pub(super) struct Visit {
    pub(super) block: BlockIndex,
    /// The lowest block that backward visits.
    pub(super) lowest: Option<BlockIndex>,
    /// The first block of the pass.
    pub(super) first: usize,
    pub(super) micro_batch: usize,
    pub(super) step: u64,
}

impl Visit {
    /// Whether backward comes to this block.
    pub(super) fn comes_again(&self) -> bool {
        self.lowest.is_some_and(|lowest| self.block >= lowest)
    }

    fn is_lowest(&self) -> bool {
        self.lowest == Some(self.block)
    }
}

/// What the gradient of a leaf is for.
#[derive(Debug)]
enum Purpose {
    State(String),
    Context(String),
    Trainable(usize),
}

/// What a block put out, with the graph that leads there.
#[derive(Debug)]
pub(super) struct Recorded {
    leaves: Vec<(Purpose, Tensor)>,
    outputs: State,
}

impl Executor {
    /// Runs a block with a graph over leaves of its own. `first_state` tells which tensors of the first
    /// block's input require gradients.
    pub(super) fn record(
        &self,
        visit: &Visit,
        tensors: &NamedTensors,
        context: &Context,
        first_state: &State,
        state: State,
    ) -> Result<Recorded> {
        let mut leaves = Vec::new();
        let mut leaf_state = State::new();
        for (name, tensor) in state.iter() {
            let wanted = match visit.is_lowest() {
                true => {
                    visit.block.0 == visit.first
                        && first_state.find(name).is_some_and(Tensor::requires_grad)
                }
                false => tensor.is_floating_point(),
            };
            let leaf = tensor.f_detach()?;
            if wanted {
                leaves.push((Purpose::State(name.to_owned()), leaf.f_set_requires_grad(true)?));
            }
            leaf_state.insert(name, leaf);
        }
        drop(state);
        let leaf_context = leaf_context(context, &mut leaves)?;
        for (index, trainable) in self.trainables().iter().enumerate() {
            if trainable.blocks.contains(&visit.block) {
                leaves.push((Purpose::Trainable(index), trainable.tensor.shallow_clone()));
            }
        }
        let seed = self.visit_seed(visit.step, visit.block, visit.micro_batch);
        let scope = self.scope(Some(visit.block), tensors, Some(seed));
        let outputs = tch::with_grad(|| {
            self.model.forward_block(visit.block, &scope, &leaf_context, leaf_state)
        })?;
        Ok(Recorded { leaves, outputs })
    }
}

impl Recorded {
    /// What the block put out, for blocks that are to know nothing of its graph.
    pub(super) fn outputs(&self) -> Result<State> {
        let detached = |(name, tensor): (&str, &Tensor)| Ok((name.to_owned(), tensor.f_detach()?));
        self.outputs.iter().map(detached).collect()
    }

    /// From the gradients of the outputs to those of the inputs; the graph is gone afterwards.
    pub(super) fn differentiate(
        self,
        grad_outputs: &NamedTensors,
        context_grads: &mut NamedTensors,
        sink: &mut dyn GradientSink,
    ) -> Result<NamedTensors> {
        let Self { leaves, outputs } = self;
        let mut pairs = Vec::new();
        for (name, gradient) in grad_outputs.iter() {
            let output = outputs.get(name)?;
            if output.requires_grad() {
                pairs.push((output, gradient));
            }
        }
        let (with_graph, grad_outputs): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let targets: Vec<&Tensor> = leaves.iter().map(|(_, leaf)| leaf).collect();
        let gradients = grad(&with_graph, &grad_outputs, &targets)?;
        drop(outputs);
        let mut grad_inputs = NamedTensors::new();
        for ((purpose, _), gradient) in leaves.into_iter().zip(gradients) {
            let Some(gradient) = gradient else { continue };
            match purpose {
                Purpose::State(name) => grad_inputs.insert(name, gradient),
                Purpose::Context(name) => {
                    let sum = match context_grads.find(&name) {
                        Some(sum) => sum.f_add(&gradient)?,
                        None => gradient,
                    };
                    context_grads.insert(name, sum);
                }
                Purpose::Trainable(index) => sink.accept(index, gradient)?,
            }
        }
        Ok(grad_inputs)
    }
}

/// A context whose tensors that require gradients are leaves of this block's graph.
fn leaf_context(context: &Context, leaves: &mut Vec<(Purpose, Tensor)>) -> Result<Context> {
    let mut result = context.clone();
    for (name, tensor) in context.tensors.iter().filter(|(_, tensor)| tensor.requires_grad()) {
        let leaf = tensor.f_detach()?.f_set_requires_grad(true)?;
        leaves.push((Purpose::Context(name.to_owned()), leaf.shallow_clone()));
        result.tensors.insert(name, leaf);
    }
    Ok(result)
}
