//! The vision tower.

use blockstreamer_core::Result;
use blockstreamer_core::context::Context;
use blockstreamer_core::numerics::apply_rotary;
use blockstreamer_core::scope::{AttentionOptions, Scope};
use blockstreamer_core::state::{HIDDEN, NamedTensors, State};
use blockstreamer_core::tch::{Kind, Tensor};
use blockstreamer_core::vision::deepstack;

use crate::config::VisionConfig;
use crate::prepare::{ROWS, SEGMENTS, TAP_WEIGHTS, TAPS};

/// Name in the state of the tower's hidden states, `[num_patches, hidden_size]`; before the first block of
/// the patches themselves.
pub(crate) const VISION: &str = "vision";
// Tables of the two-dimensional rotation, `[1, num_patches, 1, head_dim]`, fp32.
pub(crate) const COS: &str = "vision_cos";
pub(crate) const SIN: &str = "vision_sin";

const NORM_EPSILON: f64 = 1e-6;

/// Patches to hidden states, each with its place in the picture.
pub(crate) fn embed(scope: &dyn Scope, context: &Context, mut state: State) -> Result<State> {
    let patches = state.take(VISION)?;
    // A convolution whose windows do not overlap is a product with each patch.
    let weight = scope.tensor("patch_embed.proj.weight")?.f_flatten(1, -1)?;
    let hidden = patches.f_linear(&weight, Some(scope.tensor("patch_embed.proj.bias")?))?;
    let places = positions(scope, &context.tensors)?.f_to_kind(hidden.kind())?;
    Ok(state.with(VISION, hidden.f_add(&places)?))
}

/// The position table at the place of every patch, between its entries: fp32, `[num_patches, hidden_size]`.
fn positions(scope: &dyn Scope, tensors: &NamedTensors) -> Result<Tensor> {
    let (taps, weights) = (tensors.get(TAPS)?, tensors.get(TAP_WEIGHTS)?);
    let tap = |tap: i64| -> Result<Tensor> {
        let entries = scope.embedding("pos_embed", &taps.f_select(1, tap)?)?;
        Ok(entries.f_mul(&weights.f_narrow(1, tap, 1)?)?)
    };
    // One after another: all at once would take four times the memory.
    let mut sum = tap(0)?;
    for number in 1..taps.size2()?.1 {
        sum = sum.f_add(&tap(number)?)?;
    }
    Ok(sum)
}

/// One transformer block; `merger` is the number of the deep stack's merger that reads its output.
pub(crate) fn block(
    config: &VisionConfig,
    scope: &dyn Scope,
    context: &Context,
    merger: Option<usize>,
    mut state: State,
) -> Result<State> {
    let x = state.take(VISION)?;
    let normed = layer_norm(scope, "norm1", &x)?;
    let x = x.f_add(&attention(config, scope, context, &normed)?)?;
    let x = x.f_add(&mlp(scope, &layer_norm(scope, "norm2", &x)?)?)?;
    if let Some(number) = merger {
        // Here the norm sees whole cells, unlike in the last merger.
        let cells = x.f_view([-1, config.cell_size() as i64])?;
        let normed = layer_norm(scope, "deepstack_merger.norm", &cells)?;
        state.insert(deepstack(number), project(scope, "deepstack_merger", &normed)?);
    }
    Ok(state.with(VISION, x))
}

/// The tower's output as rows of the decoder, in the places of the pictures.
pub(crate) fn merge(
    config: &VisionConfig,
    scope: &dyn Scope,
    context: &Context,
    mut state: State,
) -> Result<State> {
    let normed = layer_norm(scope, "merger.norm", &state.take(VISION)?)?;
    let cells = normed.f_view([-1, config.cell_size() as i64])?;
    let embeddings = project(scope, "merger", &cells)?;
    let hidden = state.take(HIDDEN)?;
    let rows = context.tensors.get(ROWS)?;
    // Not in place: gradients flow to the tower, and the state before it may be needed again.
    let merged = hidden.f_flatten(0, 1)?.f_index_copy(0, rows, &embeddings)?;
    Ok(state.with(HIDDEN, merged.f_view_as(&hidden)?))
}

/// `hidden` with what the tower handed to the layer before added in the places of the pictures.
pub(crate) fn add_deepstack(
    context: &Context,
    state: &mut State,
    layer_before: Option<usize>,
    hidden: Tensor,
) -> Result<Tensor> {
    let Some(name) = layer_before.map(deepstack) else { return Ok(hidden) };
    if state.find(&name).is_none() {
        return Ok(hidden);
    }
    let features = state.take(&name)?;
    let rows = context.tensors.get(ROWS)?;
    Ok(hidden.f_flatten(0, 1)?.f_index_add(0, rows, &features)?.f_view_as(&hidden)?)
}

fn layer_norm(scope: &dyn Scope, name: &str, x: &Tensor) -> Result<Tensor> {
    let weight = scope.tensor(&format!("{name}.weight"))?;
    let bias = scope.tensor(&format!("{name}.bias"))?;
    Ok(x.f_layer_norm(weight.size(), Some(&weight), Some(&bias), NORM_EPSILON, false)?)
}

fn mlp(scope: &dyn Scope, x: &Tensor) -> Result<Tensor> {
    let inner = scope.linear("mlp.linear_fc1", x)?.f_gelu("tanh")?;
    scope.linear("mlp.linear_fc2", &inner)
}

/// What every merger does with cells of patches: `[num_cells, cell_size]` to `[num_cells, out_hidden_size]`.
fn project(scope: &dyn Scope, name: &str, cells: &Tensor) -> Result<Tensor> {
    let inner = scope.linear(&format!("{name}.linear_fc1"), cells)?.f_gelu("none")?;
    scope.linear(&format!("{name}.linear_fc2"), &inner)
}

/// Every patch sees all patches of its frame. `x` is `[num_patches, hidden_size]`, and so is the result.
fn attention(
    config: &VisionConfig,
    scope: &dyn Scope,
    context: &Context,
    x: &Tensor,
) -> Result<Tensor> {
    let (num_patches, _) = x.size2()?;
    let (num_heads, head_dim) = (config.num_heads as i64, config.head_dim() as i64);
    let qkv = scope.linear("attn.qkv", x)?.f_view([1, num_patches, 3, num_heads, head_dim])?;
    let (cos, sin) = (context.tensors.get(COS)?, context.tensors.get(SIN)?);
    let turned = |which: i64| -> Result<Tensor> {
        let wide = qkv.f_select(2, which)?.f_to_kind(Kind::Float)?;
        Ok(apply_rotary(&wide, cos, sin)?.f_to_kind(x.kind())?)
    };
    let (query, key, value) = (turned(0)?, turned(1)?, qkv.f_select(2, 2)?);

    let options = AttentionOptions::new((head_dim as f64).powf(-0.5));
    let within_frames = Context::default();
    let mut mixed = Vec::new();
    let mut start = 0;
    for (length, count) in runs(&Vec::<i64>::try_from(context.on_host.get(SEGMENTS)?)?) {
        // [count, heads, length, head_dim]
        let frames = |tensor: &Tensor| -> Result<Tensor> {
            let rows = tensor.f_narrow(1, start, count * length)?;
            Ok(rows.f_reshape([count, length, num_heads, head_dim])?.f_transpose(1, 2)?)
        };
        let (q, k, v) = (frames(&query)?, frames(&key)?, frames(&value)?);
        let out = scope.attention("attn", &q, &k, &v, &within_frames, &options)?;
        mixed.push(out.f_transpose(1, 2)?.f_reshape([count * length, num_heads * head_dim])?);
        start += count * length;
    }
    scope.linear("attn.proj", &Tensor::f_cat(&mixed, 0)?)
}

/// Neighbours of equal length, which are computed at once: length and how many.
fn runs(lengths: &[i64]) -> Vec<(i64, i64)> {
    let equal = lengths.chunk_by(|a, b| a == b);
    equal.filter_map(|run| Some((*run.first()?, run.len() as i64))).collect()
}
