//! The layers with experts: which experts a token goes to, and what they compute.

use std::ops::Range;

use blockstreamer_core::Result;
use blockstreamer_core::routed::{choose, send};
use blockstreamer_core::scope::{ExpertActivation, ExpertShape, GateUp, Scope};
use blockstreamer_core::state::State;
use blockstreamer_core::tch::{Kind, Tensor};

/// Chooses the experts of every token of `normed`, `[batch, sequence, hidden_size]`: the most probable ones,
/// of all in fp32, with their probabilities made to add up to one.
pub(crate) fn route(
    scope: &dyn Scope,
    num_experts_per_tok: usize,
    normed: Tensor,
    state: State,
) -> Result<State> {
    let logits = scope.linear("mlp.gate", &normed)?;
    let probabilities = logits.f_softmax(-1, Kind::Float)?;
    let (chosen, experts) = choose(&probabilities, num_experts_per_tok)?;
    let sum = chosen.f_sum_dim_intlist([-1_i64].as_slice(), true, Kind::Float)?;
    let weights = chosen.f_div(&sum)?.f_to_kind(logits.kind())?;
    Ok(send(state, normed, experts, weights))
}

/// The experts of one group.
pub(crate) fn shape(experts: &Range<usize>) -> ExpertShape {
    ExpertShape {
        experts: experts.clone(),
        gate_up: GateUp::Concatenated,
        activation: ExpertActivation::Silu,
    }
}
