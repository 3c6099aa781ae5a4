//! The published sizes, and `tiny`.

use serde_json::{Value, json};

/// What differs between the published models. The vision tower of the two small ones is smaller.
struct Published {
    name: &'static str,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    intermediate_size: usize,
    /// Width of one expert; `None`: a dense model.
    moe_intermediate_size: Option<usize>,
    tied: bool,
    small_tower: bool,
}

const fn published(
    name: &'static str,
    [hidden_size, num_hidden_layers]: [usize; 2],
    [num_attention_heads, num_key_value_heads]: [usize; 2],
    intermediate_size: usize,
    moe_intermediate_size: Option<usize>,
    tied: bool,
    small_tower: bool,
) -> Published {
    Published {
        name,
        hidden_size,
        num_hidden_layers,
        num_attention_heads,
        num_key_value_heads,
        intermediate_size,
        moe_intermediate_size,
        tied,
        small_tower,
    }
}

#[rustfmt::skip]
const PUBLISHED: [Published; 6] = [
    //         name         hidden, layers  heads, kv  inter  expert      tied   small tower
    published("2b",        [2048,   28],    [16,   8], 6144,  None,       true,  true),
    published("4b",        [2560,   36],    [32,   8], 9728,  None,       true,  true),
    published("8b",        [4096,   36],    [32,   8], 12288, None,       false, false),
    published("30b-a3b",   [2048,   48],    [32,   4], 6144,  Some(768),  false, false),
    published("32b",       [5120,   64],    [64,   8], 25600, None,       false, false),
    published("235b-a22b", [4096,   94],    [64,   4], 12288, Some(1536), false, false),
];

/// The sizes by name, smallest first.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    ["tiny", "tiny-moe"].into_iter().chain(PUBLISHED.iter().map(|size| size.name))
}

/// The complete `config.json` of one of [`names`], spelled as on the hub.
pub(crate) fn config_json(name: &str) -> Option<String> {
    let config = match name {
        "tiny" => tiny(),
        "tiny-moe" => tiny_moe(),
        _ => PUBLISHED.iter().find(|size| size.name == name)?.config(),
    };
    Some(format!("{config:#}"))
}

impl Published {
    fn config(&self) -> Value {
        let (depth, tower_size, tower_intermediate, deepstack) = match self.small_tower {
            true => (24, 1024, 4096, [5, 11, 17]),
            false => (27, 1152, 4304, [8, 16, 24]),
        };
        let mut config = json!({
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "image_token_id": 151_655,
            "model_type": "qwen3_vl",
            "text_config": {
                "attention_bias": false,
                "attention_dropout": 0.0,
                "bos_token_id": 151_643,
                "dtype": "bfloat16",
                "eos_token_id": 151_645,
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": self.hidden_size,
                "initializer_range": 0.02,
                "intermediate_size": self.intermediate_size,
                "max_position_embeddings": 262_144,
                "model_type": "qwen3_vl_text",
                "num_attention_heads": self.num_attention_heads,
                "num_hidden_layers": self.num_hidden_layers,
                "num_key_value_heads": self.num_key_value_heads,
                "rms_norm_eps": 1e-6,
                "rope_scaling": {
                    "mrope_interleaved": true,
                    "mrope_section": [24, 20, 20],
                    "rope_type": "default"
                },
                "rope_theta": 5_000_000,
                "use_cache": true,
                "vocab_size": 151_936
            },
            "tie_word_embeddings": self.tied,
            "video_token_id": 151_656,
            "vision_config": {
                "deepstack_visual_indexes": deepstack,
                "depth": depth,
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_size": tower_size,
                "in_channels": 3,
                "initializer_range": 0.02,
                "intermediate_size": tower_intermediate,
                "model_type": "qwen3_vl",
                "num_heads": 16,
                "num_position_embeddings": 2304,
                "out_hidden_size": self.hidden_size,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2
            },
            "vision_end_token_id": 151_653,
            "vision_start_token_id": 151_652
        });
        if let Some(moe_intermediate_size) = self.moe_intermediate_size {
            add_experts(&mut config, 128, 8, moe_intermediate_size);
        }
        config
    }
}

/// Turns the configuration of a dense model into one with experts in every layer.
fn add_experts(config: &mut Value, num_experts: usize, per_token: usize, intermediate_size: usize) {
    config["architectures"] = json!(["Qwen3VLMoeForConditionalGeneration"]);
    config["model_type"] = json!("qwen3_vl_moe");
    config["vision_config"]["model_type"] = json!("qwen3_vl_moe");
    let text = &mut config["text_config"];
    text["model_type"] = json!("qwen3_vl_moe_text");
    text["decoder_sparse_step"] = json!(1);
    text["mlp_only_layers"] = json!([]);
    text["moe_intermediate_size"] = json!(intermediate_size);
    text["norm_topk_prob"] = json!(true);
    text["num_experts"] = json!(num_experts);
    text["num_experts_per_tok"] = json!(per_token);
}

/// As [`tiny`], with experts in all layers but the second.
fn tiny_moe() -> Value {
    let mut config = tiny();
    add_experts(&mut config, 8, 2, 48);
    config["text_config"]["mlp_only_layers"] = json!([1]);
    config
}

/// Small enough for a test, and no two sizes alike that could be taken for one another.
fn tiny() -> Value {
    json!({
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 506,
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": false,
            "attention_dropout": 0.0,
            "bos_token_id": 500,
            "dtype": "bfloat16",
            "eos_token_id": 502,
            "head_dim": 32,
            "hidden_act": "silu",
            "hidden_size": 64,
            "initializer_range": 0.1,
            "intermediate_size": 160,
            "max_position_embeddings": 4096,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {
                "mrope_interleaved": true,
                "mrope_section": [6, 5, 5],
                "rope_type": "default"
            },
            "rope_theta": 5_000_000,
            "use_cache": true,
            "vocab_size": 512
        },
        "tie_word_embeddings": false,
        "video_token_id": 507,
        "vision_config": {
            "deepstack_visual_indexes": [0, 2],
            "depth": 4,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 64,
            "in_channels": 3,
            "initializer_range": 0.1,
            "intermediate_size": 96,
            "model_type": "qwen3_vl",
            "num_heads": 4,
            "num_position_embeddings": 25,
            "out_hidden_size": 64,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2
        },
        "vision_end_token_id": 504,
        "vision_start_token_id": 503
    })
}
