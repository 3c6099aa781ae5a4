//! The tokens of each expert, found on the device.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::error::Result;

/// The slots of a call: one for each expert of each token, `token * top_k + choice`.
#[derive(Debug)]
pub(super) struct Slots {
    /// All slots by expert, in ascending order, `[slots]`, Int64. Those of experts outside the range come
    /// last.
    pub(super) order: Tensor,
    /// The token of each, likewise.
    pub(super) tokens: Tensor,
    /// The expert of each, counted from the first of the range, likewise, Int. Experts outside are the last of
    /// the range.
    pub(super) experts: Tensor,
    /// Which of them belong to experts outside the range, `[slots, 1]`, Bool.
    pub(super) outside: Tensor,
    /// For each expert of the range the place in `order` where its slots end, Int.
    pub(super) ends: Tensor,
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
        Ok(Self { order, tokens, experts, outside, ends })
    }

    /// `ends` on the host, which waits for them.
    pub(super) fn ends_on_host(&self) -> Result<Vec<i64>> {
        let ends = self.ends.f_to_kind(Kind::Int64)?.f_to_device(Device::Cpu)?;
        Ok(Vec::try_from(&ends)?)
    }
}
