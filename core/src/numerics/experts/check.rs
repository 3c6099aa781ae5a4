//! What fits together in a call.

use tch::Kind;

use super::{ExpertCall, ExpertStack, ExpertWeight, LowRankFactors};
use crate::error::{Error, Result};

impl ExpertCall<'_> {
    pub(super) fn check(&self) -> Result<()> {
        let refuse = |what: &str, message: String| Err(Error::tensor(what, message));
        let Self { x, routing, shape, gate_up, down, sum } = self;
        let kind = x.f_kind()?;
        let [tokens, hidden] = x.size()[..] else {
            return refuse("x", format!("must be [tokens, hidden_size], not {:?}", x.size()));
        };
        let chosen = routing.experts.size();
        let (index_kind, weight_kind) = (routing.experts.f_kind()?, routing.weights.f_kind()?);
        if chosen.len() != 2
            || chosen[0] != tokens
            || chosen != routing.weights.size()
            || (index_kind, weight_kind) != (Kind::Int64, kind)
        {
            let message = format!(
                "experts {index_kind:?} {chosen:?} and weights {weight_kind:?} {:?} must both be \
                 [{tokens}, top_k], Int64 and {kind:?}",
                routing.weights.size()
            );
            return refuse("routing", message);
        }
        let num_experts = shape.experts.len() as i64;
        let rows = gate_up.check("gate_up_proj", num_experts, None, hidden, kind)?;
        if rows % 2 != 0 {
            let message =
                format!("has {rows} rows for each expert, which gate and up cannot share");
            return refuse("gate_up_proj", message);
        }
        down.check("down_proj", num_experts, Some(hidden), rows / 2, kind)?;
        match sum {
            Some(sum) if sum.size() != x.size() || sum.f_kind()? != kind => {
                let (found, size) = (sum.f_kind()?, sum.size());
                refuse("sum", format!("is {found:?} {size:?}, but x is {kind:?} {:?}", x.size()))
            }
            _ => Ok(()),
        }
    }
}

impl ExpertStack<'_> {
    /// Checks against `[num_experts, out_features, in_features]` and returns the rows of each matrix.
    fn check(
        &self,
        name: &str,
        num_experts: i64,
        out_features: Option<i64>,
        in_features: i64,
        kind: Kind,
    ) -> Result<i64> {
        let found = self.weight.size();
        let rows = out_features.or_else(|| found.get(1).copied()).unwrap_or_default();
        let (kind_found, is_right) = match &self.weight {
            ExpertWeight::Dense(weight) => (weight.f_kind()?, weight.is_floating_point()),
            ExpertWeight::Packed(packed) => (packed.blocks().f_kind()?, true),
        };
        if found != [num_experts, rows, in_features] || !is_right {
            let wanted = out_features.map_or("2 * intermediate_size".to_owned(), |n| n.to_string());
            let message = format!(
                "is {kind_found:?} {found:?}, but must be real numbers [{num_experts}, {wanted}, {in_features}]"
            );
            return Err(Error::tensor(name, message));
        }
        if let Some(bias) = &self.bias
            && (bias.size() != [num_experts, rows] || bias.f_kind()? != kind)
        {
            let (found, size) = (bias.f_kind()?, bias.size());
            let message =
                format!("is {found:?} {size:?}, but must be {kind:?} [{num_experts}, {rows}]");
            return Err(Error::tensor(format!("{name}_bias"), message));
        }
        if let Some(LowRankFactors { a, b, .. }) = &self.factors {
            let rank = a.size().get(1).copied().unwrap_or_default();
            let fits = a.size() == [num_experts, rank, in_features]
                && b.size() == [num_experts, rows, rank]
                && [a.f_kind()?, b.f_kind()?] == [kind, kind];
            if !fits {
                let message = format!(
                    "the adapter's factors {:?} and {:?} do not fit {found:?} in {kind:?}",
                    a.size(),
                    b.size()
                );
                return Err(Error::tensor(name, message));
            }
        }
        Ok(rows)
    }
}
