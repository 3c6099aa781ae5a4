//! Expert by expert.

use tch::Tensor;

use super::slots::Slots;
use super::{ExpertCall, ExpertStack, ExpertWeight, packed};
use crate::error::{Error, Result};

pub(super) fn run(call: &ExpertCall<'_>) -> Result<Tensor> {
    let slots = Slots::sort(&call.routing.experts, &call.shape.experts)?;
    // How many rows each product has must be known on the host. One read for all experts.
    let ends = slots.ends_on_host()?;
    let weights = call.routing.weights.f_reshape([-1])?;
    let (gate_up, down) = (Matrices::new(&call.gate_up)?, Matrices::new(&call.down)?);
    let mut sum = call.start()?;
    let mut is_shared = true;
    let mut start = 0;
    for (expert, end) in ends.into_iter().enumerate() {
        let num_rows = end - start;
        if num_rows == 0 {
            continue;
        }
        let tokens = slots.tokens.f_narrow(0, start, num_rows)?;
        let chosen = slots.order.f_narrow(0, start, num_rows)?;
        start = end;
        let fused = gate_up.linear(expert, &call.x.f_index_select(0, &tokens)?)?;
        let output = down.linear(expert, &call.activate(&fused)?)?;
        let weights = weights.f_index_select(0, &chosen)?.f_unsqueeze(1)?;
        let output = output.f_mul(&weights)?;
        // The first sum is the caller's; those after it are nobody else's.
        if std::mem::take(&mut is_shared) {
            sum = sum.f_index_add(0, &tokens, &output)?;
        } else {
            let _ = sum.f_index_add_(0, &tokens, &output)?;
        }
    }
    Ok(sum)
}

/// An [`ExpertStack`] one by one.
struct Matrices<'a> {
    weight: &'a ExpertWeight<'a>,
    bias: Option<&'a Tensor>,
    /// The factors of each expert: gradients of an unbound stack are put together once.
    factors: Option<(Vec<Tensor>, Vec<Tensor>, f64)>,
}

impl<'a> Matrices<'a> {
    fn new(stack: &'a ExpertStack<'a>) -> Result<Self> {
        let factors = match &stack.factors {
            Some(factors) => {
                Some((factors.a.f_unbind(0)?, factors.b.f_unbind(0)?, factors.scaling))
            }
            None => None,
        };
        Ok(Self { weight: &stack.weight, bias: stack.bias.as_ref(), factors })
    }

    fn linear(&self, expert: usize, x: &Tensor) -> Result<Tensor> {
        let position = expert as i64;
        let mut output = match self.weight {
            // One matrix at a time: a copy of all in another dtype could be larger than the slot.
            ExpertWeight::Dense(weight) => {
                let weight = weight.f_select(0, position)?.f_to_kind(x.f_kind()?)?;
                x.f_linear(&weight, None::<&Tensor>)?
            }
            ExpertWeight::Packed(stack) => packed::linear(stack.select(position)?, x)?,
        };
        if let Some((a, b, scaling)) = &self.factors {
            let (Some(a), Some(b)) = (a.get(expert), b.get(expert)) else {
                return Err(Error::usage("an adapter has factors for too few experts"));
            };
            let inner = x.f_linear(a, None::<&Tensor>)?.f_mul_scalar(*scaling)?;
            output = output.f_addmm(&inner, &b.f_tr()?)?;
        }
        match self.bias {
            Some(bias) => Ok(output.f_add(&bias.f_select(0, position)?)?),
            None => Ok(output),
        }
    }
}
