use serde_json::{Value, json};

use super::*;
use crate::sizes;

fn tiny() -> Value {
    serde_json::from_str(&sizes::config_json("tiny").unwrap()).unwrap()
}

fn parse(value: &Value) -> Result<Config> {
    Config::parse(&value.to_string())
}

/// Asserts that `tiny`, without the keys of the reference implementation and so changed, is refused.
fn refused(change: impl Fn(&mut Value), wanted: &str) {
    let mut config = tiny();
    for key in ["experts_per_token", "initial_context_length"] {
        config.as_object_mut().unwrap().remove(key).unwrap();
    }
    change(&mut config);
    let error = parse(&config).unwrap_err().to_string();
    assert!(error.contains(wanted), "{error}");
}

#[test]
fn both_spellings_of_rope_give_the_same_config() {
    let old = tiny();
    let mut new = old.clone();
    let root = new.as_object_mut().unwrap();
    let theta = root.remove("rope_theta").unwrap();
    let mut rope = root.remove("rope_scaling").unwrap();
    rope["rope_theta"] = theta;
    root.insert("rope_parameters".into(), rope);
    assert_eq!(parse(&old).unwrap(), parse(&new).unwrap());
    // The new spelling is the one that counts where a file has both.
    new["rope_scaling"] = old["rope_scaling"].clone();
    new["rope_scaling"]["factor"] = json!(2.0);
    assert_eq!(parse(&old).unwrap(), parse(&new).unwrap());
    let mut other = old.clone();
    other["rope_scaling"]["factor"] = json!(2.0);
    assert_ne!(parse(&old).unwrap().rope, parse(&other).unwrap().rope);
}

#[test]
fn keys_of_the_reference_implementation_stand_in_for_those_of_transformers() {
    let mut config = tiny();
    let wanted = parse(&config).unwrap();
    let root = config.as_object_mut().unwrap();
    let per_token = root.remove("num_experts_per_tok").unwrap();
    root.insert("experts_per_token".into(), per_token);
    let count = root.remove("num_local_experts").unwrap();
    root.insert("num_experts".into(), count);
    let rope = root["rope_scaling"].as_object_mut().unwrap();
    let original = rope.remove("original_max_position_embeddings").unwrap();
    root.insert("initial_context_length".into(), original);
    assert_eq!(parse(&config).unwrap(), wanted);
    config["num_experts_per_tok"] = json!(1);
    assert_eq!(parse(&config).unwrap().num_experts_per_tok, 1);
}

#[test]
fn layers_slide_where_layer_types_says_so_and_by_turns_without_it() {
    let mut config = tiny();
    assert_eq!(parse(&config).unwrap().windows, [Some(8), None, Some(8), None]);
    config["layer_types"] = json!(null);
    assert_eq!(parse(&config).unwrap().windows, [Some(8), None, Some(8), None]);
    let (full, sliding) = ("full_attention", "sliding_attention");
    config["layer_types"] = json!([full, sliding, sliding, full]);
    assert_eq!(parse(&config).unwrap().windows, [None, Some(8), Some(8), None]);
    config["layer_types"] = json!([full, full, full, full]);
    config["sliding_window"] = json!(null);
    assert_eq!(parse(&config).unwrap().windows, [None; 4]);
}

#[test]
fn experts_are_packed_exactly_with_a_quantization_config() {
    let mut config = tiny();
    assert!(parse(&config).unwrap().packed);
    config["quantization_config"] = json!(null);
    assert!(!parse(&config).unwrap().packed);
    config["hidden_size"] = json!(40);
    assert_eq!(parse(&config).unwrap().hidden_size, 40);
    for (key, method) in [("bitsandbytes", "'bitsandbytes'"), ("fp8", "'fp8'")] {
        let quantization = json!({"quant_method": key});
        let change = |config: &mut Value| config["quantization_config"] = quantization.clone();
        refused(change, &format!("quantization_config.quant_method {method} is not supported"));
    }
    let change = |config: &mut Value| config["quantization_config"] = json!({});
    refused(change, "quantization_config.quant_method is missing");
}

#[test]
fn several_ends_of_text_are_allowed_and_the_first_counts() {
    let mut config = tiny();
    config["eos_token_id"] = json!([5, 6]);
    assert_eq!(parse(&config).unwrap().special_ids.eos, Some(5));
}

#[test]
fn a_missing_key_is_named() {
    for key in [
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_local_experts",
        "num_experts_per_tok",
        "sliding_window",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
    ] {
        let remove = |config: &mut Value| drop(config.as_object_mut().unwrap().remove(key));
        refused(remove, &format!("{key} is missing"));
    }
    for key in ["rope_type", "factor", "original_max_position_embeddings"] {
        let remove =
            |config: &mut Value| drop(config["rope_scaling"].as_object_mut().unwrap().remove(key));
        refused(remove, &format!("rope_scaling.{key} is missing"));
    }
}

#[test]
fn what_cannot_be_and_what_the_arithmetic_does_not_cover_is_refused_by_name() {
    for (key, value, wanted) in [
        ("model_type", json!("llama"), "model_type 'llama' is not gpt_oss"),
        ("hidden_act", json!("gelu"), "hidden_act 'gelu'"),
        ("tie_word_embeddings", json!(true), "tie_word_embeddings true"),
        ("output_router_logits", json!(true), "output_router_logits true"),
        ("hidden_size", json!(0), "hidden_size is 0"),
        ("hidden_size", json!("64"), "hidden_size is \"64\""),
        ("hidden_size", json!(72), "hidden_size is 72; packed experts need"),
        ("intermediate_size", json!(80), "intermediate_size is 80; packed experts need"),
        ("head_dim", json!(15), "head_dim is 15"),
        ("num_key_value_heads", json!(3), "num_key_value_heads is 3"),
        ("num_local_experts", json!(0), "num_local_experts is 0"),
        ("num_experts_per_tok", json!(9), "num_experts_per_tok is 9, but there are 8"),
        ("swiglu_limit", json!(0.0), "swiglu_limit is 0"),
        ("swiglu_alpha", json!(-1.0), "swiglu_alpha is -1"),
        ("sliding_window", json!(0), "sliding_window is 0"),
        ("layer_types", json!(["full_attention"]), "layer_types has 1 entries"),
        ("layer_types", json!(vec!["chunked"; 4]), "layer_types has 'chunked'"),
        ("rope_theta", json!(0.0), "rope_scaling is unusable: YaRN: rope_theta is 0"),
    ] {
        refused(|config| config[key] = value.clone(), wanted);
    }
    for (key, value, wanted) in [
        ("rope_type", json!("llama3"), "rope_scaling.rope_type 'llama3' is not supported"),
        ("type", json!("linear"), "rope_scaling.type 'linear' is not supported"),
        ("factor", json!(0), "rope_scaling is unusable: YaRN: factor is 0"),
        ("beta_fast", json!(-1), "rope_scaling is unusable: YaRN: beta_fast is -1"),
        ("attention_factor", json!(1.0), "rope_scaling.attention_factor 1 is not supported"),
        ("mscale", json!(1.0), "rope_scaling.mscale 1 is not supported"),
        ("partial_rotary_factor", json!(0.5), "rope_scaling.partial_rotary_factor 0.5"),
        (
            "original_max_position_embeddings",
            json!(0),
            "YaRN: original_max_position_embeddings is 0",
        ),
    ] {
        refused(|config| config["rope_scaling"][key] = value.clone(), wanted);
    }
}
