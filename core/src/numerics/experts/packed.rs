//! Products with frozen matrices packed in MXFP4. Backward expands again what forward expanded.

use std::sync::Arc;

use tch::{Kind, Tensor};

use super::grouped::grouped_product;
use super::slots::Slots;
use super::{ExpertCall, ExpertKernel, ExpertWeight};
use crate::device::{Mxfp4Kernels, with_gradient};
use crate::error::Result;
use crate::numerics::Mxfp4;

/// Most bytes of matrices that are expanded at one time, unless a single one is larger.
pub(crate) const EXPANSION_BYTES: usize = 256 << 20;
/// Up to how many slots per expert, on average, kernels of our own are faster than to expand and multiply.
///
/// To expand moves 17 bytes of codes and scale in, the 64 that become of them out, and these in again: 8.5 times
/// what the kernels move for every 32 slots in forward and every 16 in backward, from the second time on out of
/// the cache. They also expand anew each time. 64 slots make 2 times in forward and 4 in backward, which leaves
/// a factor of two for the slower products.
const MOST_FUSED_SLOTS: i64 = 64;

/// `x` times the transpose of one matrix: the same bits as with the matrix dense.
pub(super) fn linear(matrix: Mxfp4, x: &Tensor) -> Result<Tensor> {
    let kind = x.f_kind()?;
    let output = tch::no_grad(|| -> Result<Tensor> {
        Ok(x.f_linear(&matrix.unpack(kind)?, None::<&Tensor>)?)
    })?;
    with_gradient(x, &output, move |gradient| Ok(gradient.f_mm(&matrix.unpack(kind)?)?))
}

/// How a call computes its products with packed matrices.
#[derive(Debug)]
pub(super) enum Products {
    /// Kernels that read packed matrices.
    Fused(Arc<Mxfp4Kernels>),
    /// Some matrices at a time are expanded. Holds where the slots of each expert end.
    Chunks(Arc<[i64]>),
    /// No matrix is packed.
    Dense,
}

impl Products {
    pub(super) fn choose(
        kernel: ExpertKernel,
        call: &ExpertCall<'_>,
        slots: &Slots,
    ) -> Result<Self> {
        let stacks = [&call.gate_up.weight, &call.down.weight];
        let packed = stacks.iter().filter_map(|weight| match weight {
            ExpertWeight::Packed(packed) => Some(packed),
            ExpertWeight::Dense(_) => None,
        });
        let packed: Vec<&Mxfp4> = packed.collect();
        if packed.is_empty() {
            return Ok(Self::Dense);
        }
        let kernels = match (kernel, call.x.f_kind()?) {
            (ExpertKernel::Fused | ExpertKernel::Auto, Kind::BFloat16) => {
                Mxfp4Kernels::of(call.x.device())
            }
            _ => None,
        };
        let kernels = kernels.filter(|kernels| packed.iter().all(|packed| kernels.take(packed)));
        let most = match kernel {
            ExpertKernel::Auto => MOST_FUSED_SLOTS * call.shape.experts.len() as i64,
            _ => i64::MAX,
        };
        match kernels {
            Some(kernels) if slots.order.size1()? <= most => Ok(Self::Fused(kernels)),
            kernels => {
                let ends = slots.ends_on_host()?;
                // Of the slots some may be for experts of other blocks.
                match kernels.filter(|_| ends.last().is_some_and(|end| *end <= most)) {
                    Some(kernels) => Ok(Self::Fused(kernels)),
                    None => Ok(Self::Chunks(ends.into())),
                }
            }
        }
    }

    /// Row `i` of `x` times the transposed matrix of the expert whose slots end first behind `i`; rows behind
    /// the last end are undefined, in the output and in the gradient.
    pub(super) fn linear(&self, packed: &Mxfp4, x: &Tensor, ends: &Tensor) -> Result<Tensor> {
        let packed = packed.shallow_clone();
        match self {
            Self::Fused(kernels) => {
                let output = tch::no_grad(|| kernels.forward(&packed, x, ends))?;
                let (kernels, ends) = (Arc::clone(kernels), ends.shallow_clone());
                with_gradient(x, &output, move |gradient| {
                    kernels.backward(&packed, gradient, &ends)
                })
            }
            Self::Chunks(host_ends) => {
                let forward = Side::Forward;
                let output =
                    tch::no_grad(|| chunks(&packed, x, ends, host_ends, forward, EXPANSION_BYTES))?;
                let (ends, host_ends) = (ends.shallow_clone(), Arc::clone(host_ends));
                with_gradient(x, &output, move |gradient| {
                    chunks(&packed, gradient, &ends, &host_ends, Side::Backward, EXPANSION_BYTES)
                })
            }
            Self::Dense => Err(crate::Error::usage("packed matrices among dense ones")),
        }
    }
}

/// Which way through a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    /// From in_features to out_features.
    Forward,
    /// Back.
    Backward,
}

/// The product of each row with its expert's matrix, with as many matrices expanded at a time as
/// `budget_bytes` hold.
fn chunks(
    packed: &Mxfp4,
    rows: &Tensor,
    ends: &Tensor,
    host_ends: &[i64],
    side: Side,
    budget_bytes: usize,
) -> Result<Tensor> {
    let (rows, kind) = (rows.f_contiguous()?, rows.f_kind()?);
    let (num_experts, out_features, in_features) = match packed.size()[..] {
        [experts, outer, inner] => (experts, outer, inner),
        _ => return Err(crate::Error::usage("packed matrices of experts have three dimensions")),
    };
    let width = if side == Side::Forward { out_features } else { in_features };
    let output = Tensor::f_empty([rows.size2()?.0, width], (kind, rows.device()))?;
    let matrix_bytes = (out_features * in_features) as usize * kind.elt_size_in_bytes();
    let per_chunk = (budget_bytes / matrix_bytes.max(1)).max(1) as i64;
    let end_of = |expert: i64| match expert {
        0 => 0,
        _ => host_ends.get(expert as usize - 1).copied().unwrap_or_default(),
    };
    let mut first = 0;
    while first < num_experts {
        let count = per_chunk.min(num_experts - first);
        let (start, end) = (end_of(first), end_of(first + count));
        if end > start {
            let dense = expand(&packed.narrow(first, count)?, kind)?;
            let dense = if side == Side::Forward { dense.f_transpose(1, 2)? } else { dense };
            let ends = ends.f_narrow(0, first, count)?.f_sub_scalar(start)?;
            let part = grouped_product(&rows.f_narrow(0, start, end - start)?, &dense, &ends)?;
            output.f_narrow(0, start, end - start)?.f_copy_(&part)?;
        }
        first += count;
    }
    Ok(output)
}

/// All of these matrices.
fn expand(packed: &Mxfp4, kind: Kind) -> Result<Tensor> {
    if kind == Kind::BFloat16
        && let Some(kernels) = Mxfp4Kernels::of(packed.blocks().device())
        && kernels.take(packed)
    {
        return kernels.expand(packed);
    }
    // One at a time: unpacking takes several times what comes out.
    let dense = Tensor::f_empty(packed.size(), (kind, packed.blocks().device()))?;
    for expert in 0..packed.size()[0] {
        dense.f_select(0, expert)?.f_copy_(&packed.select(expert)?.unpack(kind)?)?;
    }
    Ok(dense)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn expanding_more_or_less_at_a_time_changes_no_bit() {
        let (experts, outer, inner) = (5, 24, 64);
        let wave = |size: &[i64], step: f64| {
            let count = size.iter().product::<i64>();
            (Tensor::arange(count, (Kind::Float, Device::Cpu)) * step).sin().view(size)
        };
        let packed = Mxfp4::pack(&wave(&[experts, outer, inner], 0.37)).unwrap();
        // Nobody goes to experts 0 and 3; three rows to none of these.
        let host_ends = [0_i64, 4, 5, 5, 12];
        let ends = Tensor::from_slice(&host_ends).to_kind(Kind::Int);
        let dense = packed.unpack(Kind::BFloat16).unwrap();
        for side in [Side::Forward, Side::Backward] {
            let width = if side == Side::Forward { inner } else { outer };
            let rows = wave(&[15, width], 0.7).to_kind(Kind::BFloat16);
            let run = |budget| {
                let output = chunks(&packed, &rows, &ends, &host_ends, side, budget).unwrap();
                output.narrow(0, 0, 12)
            };
            let whole = run(usize::MAX);
            for (expert, rows_here) in [(1, 0..4), (2, 4..5), (4, 5..12)] {
                let (start, count) = (rows_here.start, rows_here.end - rows_here.start);
                let matrix = dense.get(expert).to_kind(Kind::Float);
                let matrix = if side == Side::Forward { matrix.tr() } else { matrix };
                let wanted = rows.narrow(0, start, count).to_kind(Kind::Float).matmul(&matrix);
                let found = whole.narrow(0, start, count).to_kind(Kind::Float);
                assert!(found.allclose(&wanted, 1e-2, 1e-2, false), "{side:?} expert {expert}");
            }
            for budget in [0, 2 * 24 * 64 * 2, 3 * 24 * 64 * 2 + 1] {
                assert_eq!(run(budget), whole, "{side:?} {budget}");
            }
        }
    }
}
