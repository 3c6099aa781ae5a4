//! `config.json` of gpt-oss, typed.
//!
//! Two spellings are in use: checkpoints as published (`rope_theta` beside `rope_scaling`, and a few keys of
//! the reference implementation), and checkpoints saved again by transformers 5 (`rope_parameters` holds
//! both).

mod rope;

use blockstreamer_core::Result;
use blockstreamer_core::config::ConfigSection;
use serde::Deserialize;

pub(crate) use rope::Rope;

pub(crate) const FAMILY: &str = "gpt-oss";
pub(crate) const MODEL_TYPE: &str = "gpt_oss";
/// Values of a packed matrix that share an exponent.
const GROUP: usize = 32;

/// A gpt-oss.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Config {
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    /// Width of one expert.
    pub(crate) intermediate_size: usize,
    pub(crate) num_attention_heads: usize,
    pub(crate) num_key_value_heads: usize,
    pub(crate) head_dim: usize,
    /// Whether the projections of the attention have biases.
    pub(crate) attention_bias: bool,
    /// Positions that each layer's queries see; `None`: all before them. As many as there are layers.
    pub(crate) windows: Vec<Option<usize>>,
    pub(crate) num_experts: usize,
    /// Experts that each token goes to.
    pub(crate) num_experts_per_tok: usize,
    pub(crate) swiglu_alpha: f64,
    pub(crate) swiglu_limit: f64,
    /// Whether the experts are packed in MXFP4, as published.
    pub(crate) packed: bool,
    pub(crate) max_position_embeddings: usize,
    pub(crate) rms_norm_eps: f64,
    pub(crate) initializer_range: f64,
    pub(crate) rope: Rope,
    pub(crate) special_ids: SpecialIds,
}

/// Ids of special tokens that the file names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SpecialIds {
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
    pub(crate) pad: Option<u32>,
}

/// `eos_token_id` may name several tokens; the first one ends a turn.
#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

impl Config {
    pub(crate) fn parse(config_json: &str) -> Result<Self> {
        let root = ConfigSection::parse(FAMILY, config_json)?;
        refuse_variants(&root)?;
        let positive = |key: &str| match root.required(key)? {
            0_usize => Err(root.error(key, "is 0")),
            value => Ok(value),
        };
        let num_attention_heads = positive("num_attention_heads")?;
        let num_key_value_heads =
            root.optional("num_key_value_heads")?.unwrap_or(num_attention_heads);
        if num_key_value_heads == 0 || num_attention_heads % num_key_value_heads != 0 {
            let message = format!(
                "is {num_key_value_heads}, which does not divide num_attention_heads {num_attention_heads}"
            );
            return Err(root.error("num_key_value_heads", message));
        }
        let hidden_size = positive("hidden_size")?;
        let head_dim = root.optional("head_dim")?.unwrap_or(hidden_size / num_attention_heads);
        if head_dim == 0 || head_dim % 2 != 0 {
            return Err(root.error("head_dim", format!("is {head_dim}; it must be even")));
        }
        let intermediate_size = positive("intermediate_size")?;
        let packed = is_packed(&root)?;
        for (key, size) in [("hidden_size", hidden_size), ("intermediate_size", intermediate_size)]
        {
            if packed && size % GROUP != 0 {
                let message = format!("is {size}; packed experts need a multiple of {GROUP}");
                return Err(root.error(key, message));
            }
        }
        let num_experts = either(&root, ["num_local_experts", "num_experts"])?;
        let num_experts_per_tok = either(&root, ["num_experts_per_tok", "experts_per_token"])?;
        if num_experts_per_tok > num_experts {
            let message = format!("is {num_experts_per_tok}, but there are {num_experts} experts");
            return Err(root.error("num_experts_per_tok", message));
        }
        let swiglu = |key: &str, usual: f64| -> Result<f64> {
            let value = root.optional(key)?.unwrap_or(usual);
            let usable = value > 0.0 && f64::is_finite(value);
            if usable { Ok(value) } else { Err(root.error(key, format!("is {value}"))) }
        };
        let eos = root.optional("eos_token_id")?.and_then(|id| match id {
            OneOrMany::One(id) => Some(id),
            OneOrMany::Many(ids) => ids.first().copied(),
        });
        Ok(Self {
            vocab_size: positive("vocab_size")?,
            hidden_size,
            intermediate_size,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            attention_bias: root.optional("attention_bias")?.unwrap_or(true),
            windows: windows(&root, positive("num_hidden_layers")?)?,
            num_experts,
            num_experts_per_tok,
            swiglu_alpha: swiglu("swiglu_alpha", 1.702)?,
            swiglu_limit: swiglu("swiglu_limit", 7.0)?,
            packed,
            max_position_embeddings: positive("max_position_embeddings")?,
            rms_norm_eps: root.required("rms_norm_eps")?,
            initializer_range: root.optional("initializer_range")?.unwrap_or(0.02),
            rope: rope::rope(&root, head_dim)?,
            special_ids: SpecialIds {
                bos: root.optional("bos_token_id")?,
                eos,
                pad: root.optional("pad_token_id")?,
            },
        })
    }
}

/// Settings that would change the arithmetic of `model.rs` without changing a single shape.
fn refuse_variants(root: &ConfigSection) -> Result<()> {
    let model_type: String = root.required("model_type")?;
    if model_type != MODEL_TYPE {
        return Err(root.error("model_type", format!("'{model_type}' is not {MODEL_TYPE}")));
    }
    let hidden_act: Option<String> = root.optional("hidden_act")?;
    if let Some(other) = hidden_act.filter(|name| name != "silu") {
        return Err(root.error("hidden_act", format!("'{other}' is not supported (only silu)")));
    }
    for (key, reason) in [
        ("tie_word_embeddings", "no gpt-oss has it"),
        ("output_router_logits", "it would add a loss of the router's"),
    ] {
        if root.optional(key)?.unwrap_or(false) {
            return Err(root.error(key, format!("true is not supported: {reason}")));
        }
    }
    Ok(())
}

/// The count at one of two keys, of which the first is the newer one.
fn either(root: &ConfigSection, [key, old]: [&str; 2]) -> Result<usize> {
    let (used, value) = match (root.optional(key)?, root.optional(old)?) {
        (None, Some(value)) => (old, value),
        (Some(value), _) => (key, value),
        (None, None) => return Err(root.error(key, "is missing")),
    };
    if value == 0 { Err(root.error(used, "is 0")) } else { Ok(value) }
}

/// Whether `quantization_config` says MXFP4; without one, experts are plain.
fn is_packed(root: &ConfigSection) -> Result<bool> {
    let Some(section) = root.section("quantization_config")? else { return Ok(false) };
    let method: String = section.required("quant_method")?;
    if method != "mxfp4" {
        let message = format!(
            "'{method}' is not supported; use the published checkpoint, which is mxfp4, or one in bf16"
        );
        return Err(section.error("quant_method", message));
    }
    Ok(true)
}

/// The window of every layer. Without `layer_types` every other layer has one, the first included, as in
/// transformers.
fn windows(root: &ConfigSection, num_hidden_layers: usize) -> Result<Vec<Option<usize>>> {
    const KEY: &str = "layer_types";
    let usual = || (0..num_hidden_layers).map(|layer| layer % 2 == 0).collect();
    let sliding: Vec<bool> = match root.optional::<Vec<String>>(KEY)? {
        None => usual(),
        Some(types) if types.len() != num_hidden_layers => {
            let message = format!(
                "has {} entries, but num_hidden_layers is {num_hidden_layers}",
                types.len()
            );
            return Err(root.error(KEY, message));
        }
        Some(types) => {
            let is_sliding = |name: String| match name.as_str() {
                "sliding_attention" => Ok(true),
                "full_attention" => Ok(false),
                other => {
                    let message =
                        format!("has '{other}'; layers are sliding_attention or full_attention");
                    Err(root.error(KEY, message))
                }
            };
            types.into_iter().map(is_sliding).collect::<Result<_>>()?
        }
    };
    if !sliding.contains(&true) {
        return Ok(vec![None; num_hidden_layers]);
    }
    let window = match root.required("sliding_window")? {
        0_usize => return Err(root.error("sliding_window", "is 0")),
        window => window,
    };
    Ok(sliding.into_iter().map(|sliding| sliding.then_some(window)).collect())
}

#[cfg(test)]
mod tests;
