//! All experts in one product.

use tch::{Kind, Tensor};

use super::packed::Products;
use super::slots::Slots;
use super::{ExpertCall, ExpertKernel, ExpertStack, ExpertWeight, LowRankFactors};
use crate::device::{GatedKernels, with_gradient};
use crate::error::Result;
use crate::scope::ExpertShape;

/// libtorch's grouped product wants every row, and every matrix, to start at a multiple of this.
const ALIGNMENT_BYTES: i64 = 16;
/// The same in elements of 16 bits.
const ALIGNMENT: i64 = ALIGNMENT_BYTES / 2;

/// Whether the call is one for [`run`].
pub(super) fn fits(call: &ExpertCall<'_>) -> bool {
    let kind = call.x.kind();
    let is_aligned = |weight: &ExpertWeight<'_>| {
        let weight = match weight {
            ExpertWeight::Dense(weight) => weight,
            // What is expanded is aligned, and its rows are multiples of 32.
            ExpertWeight::Packed(packed) => return packed.size()[1] % ALIGNMENT == 0,
        };
        // One of the two inner dimensions is dense: which, depends on how the experts are stored.
        let [outer, row, column] = weight.stride()[..] else { return false };
        let (dense, other) = (row.min(column), row.max(column));
        weight.kind() == kind
            && dense == 1
            && other % ALIGNMENT == 0
            && outer % ALIGNMENT == 0
            && weight.size()[1..].iter().all(|extent| extent % ALIGNMENT == 0)
            && (weight.data_ptr() as usize).is_multiple_of(ALIGNMENT_BYTES as usize)
    };
    matches!(kind, Kind::BFloat16 | Kind::Half)
        && is_aligned(&call.gate_up.weight)
        && is_aligned(&call.down.weight)
}

/// Rows of slots outside the range lie behind the last group: the products neither read nor write them,
/// and neither do those of the backward pass. What memory held there is replaced by zeros where it would
/// come out: in the output, and in the gradient of `x`.
pub(super) fn run(kernel: ExpertKernel, call: &ExpertCall<'_>) -> Result<Tensor> {
    let slots = Slots::sort(&call.routing.experts, &call.shape.experts)?;
    let products = Products::choose(kernel, call, &slots)?;
    let linear = |stack, x: &Tensor| linear(stack, x, &slots, &products);
    let places = slots.places()?;
    let rows = slots.rows_of(call.x, &places)?;
    let fused = linear(&call.gate_up, &rows)?;
    let output = linear(&call.down, &activate(call, &fused)?)?;

    let (num_tokens, hidden) = call.x.size2()?;
    let by_token = slots.by_token(&output, &places)?.f_view([num_tokens, call.top_k(), hidden])?;
    let weighted = by_token.f_mul(&call.routing.weights.f_unsqueeze(2)?)?;
    let total = weighted.f_sum_dim_intlist([1_i64].as_slice(), false, Kind::Float)?;
    let total = match call.sum {
        Some(sum) => total.f_add(sum)?,
        None => total,
    };
    Ok(total.f_to_kind(call.x.f_kind()?)?)
}

/// As [`ExpertCall::activate`], rounded once where there are kernels that do all of it.
fn activate(call: &ExpertCall<'_>, fused: &Tensor) -> Result<Tensor> {
    let &ExpertShape { gate_up, activation, .. } = call.shape;
    let Some(kernels) = GatedKernels::of(fused.device()).filter(|it| it.take(fused)) else {
        return call.activate(fused);
    };
    let output = tch::no_grad(|| kernels.forward(fused, gate_up, activation))?;
    let held = fused.f_detach()?;
    with_gradient(fused, &output, move |gradient| {
        kernels.backward(&held, gradient, gate_up, activation)
    })
}

/// Row `i` of `x` times the matrix of the expert whose rows end first behind `i`.
fn linear(
    stack: &ExpertStack<'_>,
    x: &Tensor,
    slots: &Slots,
    products: &Products,
) -> Result<Tensor> {
    let ends = &slots.ends;
    let mut output = match &stack.weight {
        ExpertWeight::Dense(weight) => grouped_product(x, &weight.f_transpose(1, 2)?, ends)?,
        ExpertWeight::Packed(packed) => products.linear(packed, x, ends)?,
    };
    if let Some(LowRankFactors { a, b, scaling }) = &stack.factors {
        let rank = a.size3()?.1;
        let missing = (ALIGNMENT - rank % ALIGNMENT) % ALIGNMENT;
        // Zeros on the inner dimension change nothing, and give both products rows that are aligned.
        let a = a.f_constant_pad_nd([0, 0, 0, missing])?.f_contiguous()?;
        let b = b.f_constant_pad_nd([0, missing])?.f_contiguous()?;
        let inner = grouped_product(x, &a.f_transpose(1, 2)?, ends)?.f_mul_scalar(*scaling)?;
        output = output.f_add(&grouped_product(&inner, &b.f_transpose(1, 2)?, ends)?)?;
    }
    match &stack.bias {
        Some(bias) => Ok(output.f_add(&bias.f_index_select(0, &slots.experts)?)?),
        None => Ok(output),
    }
}

/// Row `i` of `x` times the matrix `[in_features, out_features]` of the group that ends first behind `i`.
pub(super) fn grouped_product(x: &Tensor, stack: &Tensor, ends: &Tensor) -> Result<Tensor> {
    Ok(x.f_internal_grouped_mm(stack, Some(ends), None, None)?)
}
