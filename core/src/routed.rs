//! Layers with experts in several blocks: what flows from the router's block to those of its experts.
//!
//! The block with the router ends with [`send`]; every group of experts, a
//! [tokenwise](crate::weights::BlockPlan::is_tokenwise) block, is one [`receive`].

use std::ops::Range;

use tch::Tensor;

use crate::error::{Error, Result};
use crate::scope::{ExpertShape, Routing, Scope};
use crate::state::{HIDDEN, State};

// What the router hands to the experts, all `[batch, sequence, ..]`, beside the residual in `HIDDEN`.
const INPUT: &str = "routed.input";
const EXPERTS: &str = "routed.experts";
const WEIGHTS: &str = "routed.weights";
/// What the groups of experts so far put out.
const SUM: &str = "routed.sum";

/// Some of a layer's experts, in one block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertGroup {
    /// Place among the groups of the layer.
    pub number: usize,
    /// Which of the layer's experts.
    pub experts: Range<usize>,
    /// Whether the layer ends with it, which [`receive`] wants to know.
    pub is_last: bool,
}

/// The experts of a layer in `num_groups` groups of equal size, in order.
///
/// # Errors
/// [`Error::Usage`] with the usable numbers when this one does not divide `num_experts`.
pub fn deal(num_experts: usize, num_groups: usize) -> Result<Vec<ExpertGroup>> {
    let divides = |groups: &usize| num_experts.is_multiple_of(*groups);
    if num_groups == 0 || !divides(&num_groups) {
        let usable = (1..=num_experts).filter(divides).map(|groups| groups.to_string());
        return Err(Error::usage(format!(
            "the {num_experts} experts of a layer cannot be dealt over {num_groups} blocks; usable numbers are {}",
            usable.collect::<Vec<_>>().join(", ")
        )));
    }
    let length = num_experts / num_groups;
    let group = |number| ExpertGroup {
        number,
        experts: number * length..(number + 1) * length,
        is_last: number + 1 == num_groups,
    };
    Ok((0..num_groups).map(group).collect())
}

/// Adds to `state`, whose [`HIDDEN`] is the residual, what the experts are to work on:
/// `input` `[batch, sequence, hidden_size]`, and each token's `experts` (Int64) and their `weights`,
/// `[batch, sequence, top_k]`.
pub fn send(state: State, input: Tensor, experts: Tensor, weights: Tensor) -> State {
    state.with(INPUT, input).with(EXPERTS, experts).with(WEIGHTS, weights)
}

/// Adds up what the experts of this block put out, by [`Scope::experts`] at `site`. After the last group of
/// the layer the sum is added to the residual, and nothing else is left.
///
/// # Errors
/// Whatever the scope returns, and [`Error::Tensor`](crate::Error::Tensor) when nothing was sent.
pub fn receive(
    scope: &dyn Scope,
    site: &str,
    shape: &ExpertShape,
    is_last: bool,
    mut state: State,
) -> Result<State> {
    let input = state.get(INPUT)?;
    let size = input.size();
    let tokens = |tensor: &Tensor| tensor.f_flatten(0, 1);
    let routing =
        Routing { experts: tokens(state.get(EXPERTS)?)?, weights: tokens(state.get(WEIGHTS)?)? };
    let before = state.find(SUM).map(tokens).transpose()?;
    let sum = scope.experts(site, &tokens(input)?, &routing, shape, before.as_ref())?;
    let sum = sum.f_view(size.as_slice())?;
    if !is_last {
        return Ok(state.with(SUM, sum));
    }
    for name in [INPUT, EXPERTS, WEIGHTS] {
        drop(state.take(name)?);
    }
    if state.find(SUM).is_some() {
        drop(state.take(SUM)?);
    }
    let hidden = state.take(HIDDEN)?.f_add(&sum)?;
    Ok(state.with(HIDDEN, hidden))
}
