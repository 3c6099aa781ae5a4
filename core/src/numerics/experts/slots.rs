//! The tokens of each expert, found on the device.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::device::with_gradient;
use crate::error::Result;

/// The slots of a call: one for each expert of each token, `token * top_k + choice`.
#[derive(Debug)]
pub(super) struct Slots {
    /// All slots by expert, in ascending order, `[slots]`, Int64. Those of experts outside the range come
    /// last.
    pub(super) order: Tensor,
    /// The token of each slot of `order`, likewise.
    pub(super) tokens: Tensor,
    /// The expert of each, counted from the first of the range, likewise, Int. Experts outside are the last of
    /// the range.
    pub(super) experts: Tensor,
    /// Which of them belong to experts outside the range, `[slots, 1]`, Bool.
    pub(super) outside: Tensor,
    /// For each expert of the range the place in `order` where its slots end, Int.
    pub(super) ends: Tensor,
    top_k: i64,
}

impl Slots {
    /// Sorts `experts` `[tokens, top_k]`. The host does not wait.
    pub(super) fn sort(experts: &Tensor, range: &Range<usize>) -> Result<Self> {
        let num_experts = range.len() as i64;
        let top_k = experts.size2()?.1;
        let local = experts.f_reshape([-1])?.f_sub_scalar(range.start as i64)?;
        let elsewhere = local.f_lt(0)?.f_logical_or(&local.f_ge(num_experts)?)?;
        let local = local.f_masked_fill(&elsewhere, num_experts)?.f_to_kind(Kind::Int)?;
        // Stable, so that the tokens of an expert keep their order and equal calls give equal bits.
        let (sorted, order) = local.f_sort_stable(true, 0, false)?;
        // An expert's slots end where those of the next number begin.
        let next = Tensor::f_arange_start(1, num_experts + 1, (Kind::Int, experts.device()))?;
        let ends = next.f_searchsorted(&sorted, true, false, "left", None::<&Tensor>)?;
        let tokens = order.f_divide_scalar_mode(top_k, "floor")?;
        let outside = sorted.f_ge(num_experts)?.f_unsqueeze(1)?;
        let experts = sorted.f_clamp_max(num_experts - 1)?;
        Ok(Self { order, tokens, experts, outside, ends, top_k })
    }

    /// Where each slot is in `order`, `[slots]`, Int64.
    pub(super) fn places(&self) -> Result<Tensor> {
        // To scatter numbers would be sorting too, in deterministic mode, and more.
        Ok(self.order.f_argsort(0, false)?)
    }

    /// The row of `x` `[tokens, size]` that each slot is about, in the order of `order`; zeros for experts
    /// outside.
    ///
    /// What libtorch makes the gradient with adds rows into others, one after another in deterministic mode.
    /// A token's slots are known here: they are brought together, and added up once.
    pub(super) fn rows_of(&self, x: &Tensor, places: &Tensor) -> Result<Tensor> {
        let rows =
            tch::no_grad(|| x.f_index_select(0, &self.tokens)?.f_masked_fill(&self.outside, 0.0))?;
        let [places, outside] = [places, &self.outside].map(Tensor::shallow_clone);
        let top_k = self.top_k;
        with_gradient(x, &rows, move |gradient| {
            let size = gradient.size2()?.1;
            let by_slot = gradient.f_masked_fill(&outside, 0.0)?.f_index_select(0, &places)?;
            let by_token = by_slot.f_view([-1, top_k, size])?;
            Ok(by_token.f_sum_dim_intlist([1_i64].as_slice(), false, gradient.f_kind()?)?)
        })
    }

    /// Rows in the order of `order` by token and choice, `[tokens * top_k, size]`; zeros for experts outside.
    pub(super) fn by_token(&self, rows: &Tensor, places: &Tensor) -> Result<Tensor> {
        let by_slot =
            tch::no_grad(|| rows.f_masked_fill(&self.outside, 0.0)?.f_index_select(0, places))?;
        let [order, outside] = [&self.order, &self.outside].map(Tensor::shallow_clone);
        with_gradient(rows, &by_slot, move |gradient| {
            Ok(gradient.f_index_select(0, &order)?.f_masked_fill(&outside, 0.0)?)
        })
    }

    /// `ends` on the host, which waits for them.
    pub(super) fn ends_on_host(&self) -> Result<Vec<i64>> {
        let ends = self.ends.f_to_kind(Kind::Int64)?.f_to_device(Device::Cpu)?;
        Ok(Vec::try_from(&ends)?)
    }
}
