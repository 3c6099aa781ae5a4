//! The published sizes, and `tiny`.

use blockstreamer_core::Result;
use blockstreamer_core::config::ConfigSection;
use serde_json::{Value, json};

use crate::config::FAMILY;

/// The sizes by name, smallest first.
pub(crate) const NAMES: [&str; 3] = ["tiny", "20b", "120b"];

/// The complete `config.json` of one of [`NAMES`], spelled as on the hub.
pub(crate) fn config_json(name: &str) -> Option<String> {
    let config = match name {
        "tiny" => tiny(),
        "20b" => published(24, 32),
        "120b" => published(36, 128),
        _ => return None,
    };
    Some(format!("{config:#}"))
}

fn published(num_hidden_layers: usize, num_local_experts: usize) -> Value {
    json!({
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": true,
        "attention_dropout": 0.0,
        "bos_token_id": 199_998,
        "dtype": "bfloat16",
        "eos_token_id": 200_002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": alternating(num_hidden_layers),
        "max_position_embeddings": 131_072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": num_hidden_layers,
        "num_key_value_heads": 8,
        "num_local_experts": num_local_experts,
        "output_router_logits": false,
        "pad_token_id": 199_999,
        "quantization_config": quantization(),
        "rms_norm_eps": 1e-5,
        "rope_scaling": yarn(4096),
        "rope_theta": 150_000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": false,
        "use_cache": true,
        "vocab_size": 201_088
    })
}

/// Small enough for a test, and no two sizes alike that could be taken for one another.
fn tiny() -> Value {
    let mut config = published(4, 8);
    let smaller = json!({
        "bos_token_id": 500,
        "eos_token_id": 502,
        "experts_per_token": 2,
        "head_dim": 32,
        "hidden_size": 64,
        "initial_context_length": 64,
        "initializer_range": 0.1,
        "intermediate_size": 96,
        "max_position_embeddings": 2048,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "pad_token_id": 501,
        "rope_scaling": yarn(64),
        "sliding_window": 8,
        "vocab_size": 512
    });
    if let (Some(config), Value::Object(smaller)) = (config.as_object_mut(), smaller) {
        config.extend(smaller);
    }
    config
}

fn alternating(num_hidden_layers: usize) -> Vec<&'static str> {
    let types = ["sliding_attention", "full_attention"];
    types.into_iter().cycle().take(num_hidden_layers).collect()
}

fn yarn(original_max_position_embeddings: usize) -> Value {
    json!({
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": original_max_position_embeddings,
        "rope_type": "yarn",
        "truncate": false
    })
}

fn quantization() -> Value {
    json!({
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head"
        ],
        "quant_method": "mxfp4"
    })
}

/// The same configuration with so many layers, of which `layer_types` goes on as it began.
pub(crate) fn with_layers(config_json: &str, num_hidden_layers: usize) -> Result<String> {
    let root = ConfigSection::parse(FAMILY, config_json)?;
    root.required::<usize>("num_hidden_layers")?;
    let types: Option<Vec<String>> = root.optional("layer_types")?;
    let mut config: Value =
        serde_json::from_str(config_json).map_err(|error| root.error("", error.to_string()))?;
    config["num_hidden_layers"] = num_hidden_layers.into();
    if let Some(types) = types {
        config["layer_types"] = types.iter().cycle().take(num_hidden_layers).cloned().collect();
    }
    Ok(format!("{config:#}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn another_number_of_layers_keeps_their_kinds_in_turn() {
        let published = config_json("120b").unwrap();
        for layers in [1, 3, 40] {
            let config = Config::parse(&with_layers(&published, layers).unwrap()).unwrap();
            let wanted: Vec<_> = (0..layers).map(|layer| (layer % 2 == 0).then_some(128)).collect();
            assert_eq!(config.windows, wanted);
        }
        let mut unnamed: Value = serde_json::from_str(&published).unwrap();
        unnamed.as_object_mut().unwrap().remove("layer_types");
        let shorter = with_layers(&unnamed.to_string(), 3).unwrap();
        assert_eq!(Config::parse(&shorter).unwrap().windows, [Some(128), None, Some(128)]);
        let error = with_layers("{}", 2).unwrap_err().to_string();
        assert!(error.contains("num_hidden_layers is missing"), "{error}");
    }
}
