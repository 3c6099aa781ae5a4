//! Which checkpoint tensor goes to which block under which name.

use blockstreamer_core::block::Placement;
use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::routed::ExpertGroup;
use blockstreamer_core::weights::ExpertLayout::InOut;
use blockstreamer_core::weights::Role::{
    Bias, Embedding, Experts, Linear, Mxfp4Blocks, Mxfp4Scales, NormScale, Router,
};
use blockstreamer_core::weights::{BlockPlan, Row, WeightTable, row};

use crate::config::Config;

/// What a streamed block computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Part {
    /// Attention and router of a layer.
    Attention { layer: usize },
    /// Some of its experts.
    Experts { layer: usize, group: ExpertGroup },
}

/// The streamed blocks in order, with the experts of every layer in these groups.
pub(crate) fn parts(config: &Config, groups: &[ExpertGroup]) -> Vec<Part> {
    let mut parts = Vec::new();
    for layer in 0..config.windows.len() {
        parts.push(Part::Attention { layer });
        parts.extend(groups.iter().map(|group| Part::Experts { layer, group: group.clone() }));
    }
    parts
}

/// The streamed blocks of [`parts`], and blocks of their own for what comes before and after them.
pub(crate) fn table(config: &Config, parts: &[Part]) -> WeightTable {
    let mut table = WeightTable::new(Dtype::BF16);
    for part in parts {
        let streamed = |name: &str, layer| BlockPlan::new(name, Placement::Streamed, Some(layer));
        match part {
            Part::Attention { layer } => {
                let rows = [attention(config), router(config)].concat();
                table.add(streamed("layers.{n}", *layer), *layer, &rows);
            }
            Part::Experts { layer, group } => {
                let plan = streamed(&format!("layers.{{n}}.experts.{}", group.number), *layer);
                let rows = if config.packed { packed(config) } else { plain(config) };
                let part = |row: Row<'static>| row.part(group.experts.clone());
                let rows: Vec<_> = rows.into_iter().map(part).collect();
                table.add(plan.tokenwise(), *layer, &rows);
            }
        }
    }
    ends(config, table)
}

#[rustfmt::skip]
fn attention(config: &Config) -> Vec<Row<'static>> {
    let &Config { hidden_size: hidden, num_attention_heads: heads, head_dim, .. } = config;
    let (query, key) = (heads * head_dim, config.num_key_value_heads * head_dim);
    let mut rows = vec![
        row("model.layers.{n}.input_layernorm.weight",            "input_layernorm.weight",            NormScale,   &[hidden]),
        row("model.layers.{n}.self_attn.q_proj.weight",           "self_attn.q_proj.weight",           Linear,      &[query, hidden]),
        row("model.layers.{n}.self_attn.k_proj.weight",           "self_attn.k_proj.weight",           Linear,      &[key, hidden]),
        row("model.layers.{n}.self_attn.v_proj.weight",           "self_attn.v_proj.weight",           Linear,      &[key, hidden]),
        row("model.layers.{n}.self_attn.o_proj.weight",           "self_attn.o_proj.weight",           Linear,      &[hidden, query]),
        row("model.layers.{n}.self_attn.sinks",                   "self_attn.sinks",                   Bias,        &[heads]),
        row("model.layers.{n}.post_attention_layernorm.weight",   "post_attention_layernorm.weight",   NormScale,   &[hidden]),
    ];
    if config.attention_bias {
        rows.extend([
        row("model.layers.{n}.self_attn.q_proj.bias",             "self_attn.q_proj.bias",             Bias,        &[query]),
        row("model.layers.{n}.self_attn.k_proj.bias",             "self_attn.k_proj.bias",             Bias,        &[key]),
        row("model.layers.{n}.self_attn.v_proj.bias",             "self_attn.v_proj.bias",             Bias,        &[key]),
        row("model.layers.{n}.self_attn.o_proj.bias",             "self_attn.o_proj.bias",             Bias,        &[hidden]),
        ]);
    }
    rows
}

#[rustfmt::skip]
fn router(config: &Config) -> Vec<Row<'static>> {
    let &Config { num_experts, hidden_size: hidden, .. } = config;
    vec![
        row("model.layers.{n}.mlp.router.weight",                 "mlp.router.weight",                 Router,      &[num_experts, hidden]),
        row("model.layers.{n}.mlp.router.bias",                   "mlp.router.bias",                   Bias,        &[num_experts]),
    ]
}

// Rows of the gate and of the up projection take turns in gate_up_proj, in its bias too.
#[rustfmt::skip]
fn packed(config: &Config) -> Vec<Row<'static>> {
    let &Config { num_experts: all, hidden_size: hidden, intermediate_size: inter, .. } = config;
    let [gate_up_bias, down_bias] = expert_biases(config);
    vec![
        row("model.layers.{n}.mlp.experts.gate_up_proj_blocks",   "mlp.experts.gate_up_proj_blocks",   Mxfp4Blocks, &[all, 2 * inter, hidden / 32, 16]),
        row("model.layers.{n}.mlp.experts.gate_up_proj_scales",   "mlp.experts.gate_up_proj_scales",   Mxfp4Scales, &[all, 2 * inter, hidden / 32]),
        gate_up_bias,
        row("model.layers.{n}.mlp.experts.down_proj_blocks",      "mlp.experts.down_proj_blocks",      Mxfp4Blocks, &[all, hidden, inter / 32, 16]),
        row("model.layers.{n}.mlp.experts.down_proj_scales",      "mlp.experts.down_proj_scales",      Mxfp4Scales, &[all, hidden, inter / 32]),
        down_bias,
    ]
}

// Where hidden and intermediate size are equal, down_proj is square; gate_up_proj never is.
#[rustfmt::skip]
fn plain(config: &Config) -> Vec<Row<'static>> {
    let &Config { num_experts: all, hidden_size: hidden, intermediate_size: inter, .. } = config;
    let [gate_up_bias, down_bias] = expert_biases(config);
    vec![
        row("model.layers.{n}.mlp.experts.gate_up_proj",          "mlp.experts.gate_up_proj",          Experts(InOut), &[all, hidden, 2 * inter]),
        gate_up_bias,
        row("model.layers.{n}.mlp.experts.down_proj",             "mlp.experts.down_proj",             Experts(InOut), &[all, inter, hidden]),
        down_bias,
    ]
}

#[rustfmt::skip]
fn expert_biases(config: &Config) -> [Row<'static>; 2] {
    let &Config { num_experts: all, hidden_size: hidden, intermediate_size: inter, .. } = config;
    [
        row("model.layers.{n}.mlp.experts.gate_up_proj_bias",     "mlp.experts.gate_up_proj_bias",     Bias,        &[all, 2 * inter]),
        row("model.layers.{n}.mlp.experts.down_proj_bias",        "mlp.experts.down_proj_bias",        Bias,        &[all, hidden]),
    ]
}

#[rustfmt::skip]
fn ends(config: &Config, table: WeightTable) -> WeightTable {
    let &Config { vocab_size: vocab, hidden_size: hidden, .. } = config;
    let embedding = [
        row("model.embed_tokens.weight",                          "embed_tokens.weight",               Embedding,   &[vocab, hidden]),
    ];
    let norm = [
        row("model.norm.weight",                                  "norm.weight",                       NormScale,   &[hidden]),
    ];
    let head = [
        row("lm_head.weight",                                     "lm_head.weight",                    Linear,      &[vocab, hidden]),
    ];
    table.gathered("embedding", &embedding).resident("final norm", &norm).head("head", &head)
}

#[cfg(test)]
mod tests;
