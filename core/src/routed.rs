//! Layers with experts in several blocks: what flows from the router's block to those of its experts.
//!
//! The block with the router may [`choose`] and ends with [`send`]; every group of experts, a
//! [tokenwise](crate::weights::BlockPlan::is_tokenwise) block, is one [`receive`].

use std::ops::Range;

use tch::{Kind, Tensor};

use crate::device::with_gradient;
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

/// The `top_k` largest of each token's `scores` `[.., num_experts]`, largest first, and whose they are (Int64):
/// both `[.., top_k]`. Scores get the gradients of what was chosen.
///
/// As libtorch's topk, whose gradient is scattered, which in deterministic mode costs the host forty kernels.
///
/// # Errors
/// [`Error::Torch`](crate::Error::Torch) when there are fewer scores than `top_k`.
pub fn choose(scores: &Tensor, top_k: usize) -> Result<(Tensor, Tensor)> {
    let num_experts = scores.size().last().copied().unwrap_or_default();
    let (chosen, experts) = tch::no_grad(|| scores.f_topk(top_k as i64, -1, true, true))?;
    let places = experts.shallow_clone();
    let chosen = with_gradient(scores, &chosen, move |gradient| {
        let all = Tensor::f_arange(num_experts, (Kind::Int64, places.device()))?;
        let is_chosen = places.f_unsqueeze(-1)?.f_eq_tensor(&all)?;
        // One of the choices at most is this expert: the sum is it, or zero.
        let none = Tensor::f_zeros([1_i64], (gradient.f_kind()?, places.device()))?;
        let by_choice = gradient.f_unsqueeze(-1)?.f_where_self(&is_chosen, &none)?;
        Ok(by_choice.f_sum_dim_intlist([-2_i64].as_slice(), false, gradient.f_kind()?)?)
    })?;
    Ok((chosen, experts))
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

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::device::grad;

    #[test]
    fn choosing_is_topk_with_its_gradient() {
        for kind in [Kind::Float, Kind::BFloat16] {
            for (size, top_k) in [(&[5, 6][..], 2), (&[2, 3, 6], 1), (&[2, 3, 6], 6), (&[1, 7], 4)]
            {
                let count = size.iter().product::<i64>();
                let waves = (Tensor::arange(count, (Kind::Float, Device::Cpu)) * 0.7).sin();
                let scores = waves.view(size).to_kind(kind).set_requires_grad(true);
                let (wanted, wanted_experts) = scores.topk(top_k, -1, true, true);
                let (found, experts) = choose(&scores, top_k as usize).unwrap();
                assert!(found.equal(&wanted) && experts.equal(&wanted_experts), "{size:?}");
                let upstream = found.detach().cos();
                // What overflowed stays where it is.
                let _ = upstream.view(-1).get(0).fill_(f64::INFINITY);
                let [wanted, found] = [wanted, found].map(|chosen| {
                    let gradient = grad(&[&chosen], &[&upstream], &[&scores]).unwrap();
                    gradient.into_iter().next().flatten().unwrap()
                });
                assert_eq!((found.kind(), found.equal(&wanted)), (kind, true), "{size:?} {top_k}");
            }
        }
        let frozen = Tensor::ones([2, 3], (Kind::Float, Device::Cpu));
        assert!(!choose(&frozen, 2).unwrap().0.requires_grad());
        assert!(choose(&frozen, 4).is_err());
    }
}
