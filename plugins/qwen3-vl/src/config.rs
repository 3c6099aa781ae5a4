//! `config.json` of Qwen3-VL, typed.
//!
//! Two spellings are in use: checkpoints as published (transformers 4.57: `rope_theta` beside
//! `rope_scaling`), and checkpoints saved again by transformers 5 (`rope_parameters` holds both).

mod moe;
mod vision;

use blockstreamer_core::Result;
use blockstreamer_core::config::ConfigSection;
use blockstreamer_core::numerics::interleaved_mrope_axes;

pub(crate) use moe::MoeConfig;
pub(crate) use vision::VisionConfig;

pub(crate) const FAMILY: &str = "qwen3-vl";
/// `model_type` of dense models.
pub(crate) const DENSE: &str = "qwen3_vl";
/// `model_type` of models with experts.
pub(crate) const MOE: &str = "qwen3_vl_moe";

/// A Qwen3-VL.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Config {
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) num_hidden_layers: usize,
    pub(crate) num_attention_heads: usize,
    pub(crate) num_key_value_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) max_position_embeddings: usize,
    pub(crate) rms_norm_eps: f64,
    pub(crate) initializer_range: f64,
    pub(crate) rope_theta: f64,
    /// How many frequencies turn with time, height and width; together half of `head_dim`.
    pub(crate) mrope_section: [usize; 3],
    /// Whether the head is the embedding matrix. Only the top level of the file says so.
    pub(crate) tie_word_embeddings: bool,
    pub(crate) special_ids: SpecialIds,
    /// `None`: a dense model.
    pub(crate) moe: Option<MoeConfig>,
    pub(crate) vision: VisionConfig,
}

/// Ids of special tokens that the file names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SpecialIds {
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
    pub(crate) image: u32,
    pub(crate) video: u32,
    pub(crate) vision_start: u32,
    pub(crate) vision_end: u32,
}

impl Config {
    pub(crate) fn parse(config_json: &str) -> Result<Self> {
        let root = ConfigSection::parse(FAMILY, config_json)?;
        let model_type: String = root.required("model_type")?;
        if ![DENSE, MOE].contains(&model_type.as_str()) {
            let message = format!("'{model_type}' is neither {DENSE} nor {MOE}");
            return Err(root.error("model_type", message));
        }
        if root.section("quantization_config")?.is_some() {
            let message = "is not supported; use the checkpoint that is published in bf16";
            return Err(root.error("quantization_config", message));
        }
        let text =
            root.section("text_config")?.ok_or_else(|| root.error("text_config", "is missing"))?;
        refuse_variants(&text, &model_type)?;
        let vision = root
            .section("vision_config")?
            .ok_or_else(|| root.error("vision_config", "is missing"))?;
        let moe = match model_type == MOE {
            true => Some(MoeConfig::parse(&text)?),
            false => None,
        };

        let positive = |key: &str| match text.required(key)? {
            0_usize => Err(text.error(key, "is 0")),
            value => Ok(value),
        };
        let num_attention_heads = positive("num_attention_heads")?;
        let num_key_value_heads =
            text.optional("num_key_value_heads")?.unwrap_or(num_attention_heads);
        if num_key_value_heads == 0 || num_attention_heads % num_key_value_heads != 0 {
            let message = format!(
                "is {num_key_value_heads}, which does not divide num_attention_heads {num_attention_heads}"
            );
            return Err(text.error("num_key_value_heads", message));
        }
        let hidden_size = positive("hidden_size")?;
        // transformers' defaults, which differ between the two models.
        let usual = if moe.is_some() { hidden_size / num_attention_heads } else { 128 };
        let head_dim = text.optional("head_dim")?.unwrap_or(usual);
        if head_dim == 0 || head_dim % 2 != 0 {
            return Err(text.error("head_dim", format!("is {head_dim}; it must be even")));
        }
        let (rope_theta, mrope_section) = rope(&text, head_dim)?;
        Ok(Self {
            vocab_size: positive("vocab_size")?,
            hidden_size,
            intermediate_size: positive("intermediate_size")?,
            num_hidden_layers: positive("num_hidden_layers")?,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            max_position_embeddings: positive("max_position_embeddings")?,
            rms_norm_eps: text.required("rms_norm_eps")?,
            initializer_range: text.optional("initializer_range")?.unwrap_or(0.02),
            rope_theta,
            mrope_section,
            tie_word_embeddings: root.optional("tie_word_embeddings")?.unwrap_or(false),
            special_ids: SpecialIds {
                bos: text.optional("bos_token_id")?,
                eos: text.optional("eos_token_id")?,
                image: root.required("image_token_id")?,
                video: root.required("video_token_id")?,
                vision_start: root.required("vision_start_token_id")?,
                vision_end: root.required("vision_end_token_id")?,
            },
            moe,
            vision: VisionConfig::parse(&vision, hidden_size)?,
        })
    }
}

/// Settings that would change the arithmetic of `model.rs` without changing a single shape.
fn refuse_variants(text: &ConfigSection, model_type: &str) -> Result<()> {
    let nested: Option<String> = text.optional("model_type")?;
    let known = [model_type.to_owned(), format!("{model_type}_text")];
    if let Some(other) = nested.filter(|name| !known.contains(name)) {
        let message = format!("'{other}' does not belong to a {model_type}");
        return Err(text.error("model_type", message));
    }
    if text.optional("attention_bias")?.unwrap_or(false) {
        return Err(text.error("attention_bias", "true is not supported; no Qwen3-VL has it"));
    }
    let hidden_act: Option<String> = text.optional("hidden_act")?;
    if let Some(other) = hidden_act.filter(|name| name != "silu") {
        return Err(text.error("hidden_act", format!("'{other}' is not supported (only silu)")));
    }
    if model_type == DENSE {
        moe::refuse_experts(text)?;
    }
    Ok(())
}

/// `rope_theta` and `mrope_section` in either spelling.
fn rope(text: &ConfigSection, head_dim: usize) -> Result<(f64, [usize; 3])> {
    let (key, section) = match text.section("rope_parameters")? {
        Some(section) => ("rope_parameters", Some(section)),
        None => ("rope_scaling", text.section("rope_scaling")?),
    };
    let Some(section) = section else { return Err(text.error(key, "is missing")) };
    for spelling in ["rope_type", "type"] {
        let rope_type: Option<String> = section.optional(spelling)?;
        if let Some(other) = rope_type.filter(|name| name != "default") {
            let message = format!("'{other}' is not supported (only default)");
            return Err(section.error(spelling, message));
        }
    }
    if !section.optional("mrope_interleaved")?.unwrap_or(true) {
        return Err(section.error("mrope_interleaved", "false is not supported"));
    }
    let theta = match section.optional("rope_theta")? {
        Some(theta) => theta,
        None => text.required("rope_theta")?,
    };
    let mrope_section = section.required("mrope_section")?;
    interleaved_mrope_axes(mrope_section, head_dim / 2)
        .map_err(|error| section.error("mrope_section", format!("is unusable: {error}")))?;
    Ok((theta, mrope_section))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::sizes;

    fn tiny() -> Value {
        serde_json::from_str(&sizes::config_json("tiny").unwrap()).unwrap()
    }

    fn parse(value: &Value) -> Result<Config> {
        Config::parse(&value.to_string())
    }

    #[test]
    fn both_spellings_of_rope_give_the_same_config() {
        let old = tiny();
        let mut new = old.clone();
        let text = new["text_config"].as_object_mut().unwrap();
        let theta = text.remove("rope_theta").unwrap();
        let mut rope = text.remove("rope_scaling").unwrap();
        rope["rope_theta"] = theta;
        text.insert("rope_parameters".into(), rope);
        assert_eq!(parse(&old).unwrap(), parse(&new).unwrap());
        assert_eq!(parse(&new).unwrap().rope_theta, 5e6);
    }

    #[test]
    fn tied_embeddings_are_decided_at_the_top_level() {
        let mut config = tiny();
        config["text_config"]["tie_word_embeddings"] = json!(true);
        config["tie_word_embeddings"] = json!(false);
        assert!(!parse(&config).unwrap().tie_word_embeddings);
        config["tie_word_embeddings"] = json!(true);
        assert!(parse(&config).unwrap().tie_word_embeddings);
    }

    #[test]
    fn a_missing_key_is_named() {
        for key in
            ["hidden_size", "num_hidden_layers", "rms_norm_eps", "rope_theta", "rope_scaling"]
        {
            let mut config = tiny();
            config["text_config"].as_object_mut().unwrap().remove(key);
            let error = parse(&config).unwrap_err().to_string();
            // Without the old spelling the new one is not asked for: the message names what was read.
            assert!(error.contains(&format!("text_config.{key} is missing")), "{error}");
        }
    }

    #[test]
    fn the_ids_of_vision_tokens_must_be_named() {
        for key in
            ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"]
        {
            let mut config = tiny();
            config.as_object_mut().unwrap().remove(key);
            let error = parse(&config).unwrap_err().to_string();
            assert!(error.contains(&format!("{key} is missing")), "{error}");
        }
    }

    #[test]
    fn what_the_arithmetic_does_not_cover_is_refused_by_name() {
        for (key, value, wanted) in [
            ("attention_bias", json!(true), "text_config.attention_bias true"),
            ("hidden_act", json!("gelu"), "text_config.hidden_act 'gelu'"),
            ("num_experts", json!(128), "text_config.num_experts says mixture"),
            (
                "model_type",
                json!("qwen3_vl_moe_text"),
                "text_config.model_type 'qwen3_vl_moe_text'",
            ),
            ("num_key_value_heads", json!(3), "num_key_value_heads is 3"),
            ("hidden_size", json!("64"), "text_config.hidden_size is \"64\""),
            ("hidden_size", json!(0), "text_config.hidden_size is 0"),
            ("head_dim", json!(33), "text_config.head_dim is 33"),
            ("head_dim", json!(64), "rope_scaling.mrope_section is unusable"),
        ] {
            let mut config = tiny();
            config["text_config"][key] = value;
            let error = parse(&config).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        for (key, value) in [("rope_type", json!("yarn")), ("mrope_interleaved", json!(false))] {
            let mut config = tiny();
            config["text_config"]["rope_scaling"][key] = value;
            let error = parse(&config).unwrap_err().to_string();
            assert!(error.contains(&format!("text_config.rope_scaling.{key}")), "{error}");
        }
        for (key, value) in [("model_type", json!("qwen2_vl")), ("quantization_config", json!({}))]
        {
            let mut config = tiny();
            config[key] = value;
            let error = parse(&config).unwrap_err().to_string();
            assert!(error.contains(key), "{error}");
        }
    }
}
