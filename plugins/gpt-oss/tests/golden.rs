//! The forward and its gradients against tensors that transformers and peft computed
//! (`tests/goldens/make_tiny.py`).
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockstreamer_conformance::{Options, Report, check_family, check_golden};
use blockstreamer_core::batch::Batch;
use blockstreamer_core::checkpoint::{Checkpoint, Layout, read_safetensors};
use blockstreamer_core::execute::{Executor, ExecutorOptions};
use blockstreamer_core::family::{ModelFamily, ModelOptions};
use blockstreamer_core::numerics::{AttentionKernel, ExpertKernel};
use blockstreamer_core::source::SafetensorsSource;
use blockstreamer_core::tch::{Device, Kind};
use blockstreamer_gpt_oss::GptOss;

/// The goldens, and a gradient that each of them has.
const GOLDENS: [(&str, &str); 4] = [
    ("gpt_oss", "layers.3.mlp.experts.base_layer.lora_B"),
    ("gpt_oss_long", "layers.1.self_attn.k_proj.lora_A"),
    ("gpt_oss_plain", "layers.1.mlp.experts.lora_A"),
    ("gpt_oss_router", "layers.0.mlp.router.lora_A"),
];

fn golden(variant: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens").join(variant)
}

fn failures(report: &Report) -> Vec<&str> {
    let failed = report.checks.iter().filter(|check| !check.passed);
    failed.map(|check| check.name.as_str()).collect()
}

fn passes(kind: Kind) {
    for (variant, gradient) in GOLDENS {
        let options = Options::new(Device::Cpu, kind);
        let report = check_golden(&GptOss, &golden(variant), &options).unwrap();
        let failed: Vec<_> = report.checks.iter().filter(|check| !check.passed).collect();
        assert!(failed.is_empty(), "{variant}: {failed:?}");
        let has = |part: &str| report.checks.iter().any(|check| check.name.contains(part));
        assert!(has("layer_out.1") && has("lora.logits") && has(gradient), "{variant}");
    }
}

#[test]
fn layers_logits_and_gradients_are_those_of_transformers_and_peft_in_fp32() {
    passes(Kind::Float);
}

#[test]
fn layers_logits_and_gradients_are_those_of_transformers_and_peft_in_bf16() {
    passes(Kind::BFloat16);
}

#[test]
fn a_random_tiny_model_passes_what_holds_for_every_family() {
    let report = check_family(&GptOss, &Options::new(Device::Cpu, Kind::Float)).unwrap();
    assert_eq!(failures(&report), [""; 0]);
    let groups = "experts in 2 blocks a layer give the same bits";
    assert!(report.checks.iter().any(|check| check.name == groups));
}

/// How far the logits of the long golden are from transformers' with another text in the configuration.
fn error_with(before: &str, after: &str) -> f64 {
    let directory = golden("gpt_oss_long");
    let checkpoint = Checkpoint::open(&directory).unwrap();
    assert!(checkpoint.config_json.contains(before), "{before}");
    let config_json = checkpoint.config_json.replace(before, after);
    let options = ModelOptions::default();
    let model = GptOss.open(&config_json, &options).unwrap();
    let layout = Layout::of(&checkpoint, &*model, &options).unwrap();
    let source = Arc::new(SafetensorsSource::open(layout).unwrap());
    let options = ExecutorOptions {
        attention: AttentionKernel::Eager,
        experts: ExpertKernel::Loop,
        ..ExecutorOptions::new(Device::Cpu, Kind::Float)
    };
    let executor = Executor::new(model, source, None, options).unwrap();
    let golden = read_safetensors(&directory.join("golden_fp32.safetensors")).unwrap();
    let mask = golden.get("in.attention_mask").unwrap().to_kind(Kind::Bool);
    let ids = golden.get("in.input_ids").unwrap().shallow_clone();
    let batch = Batch { attention_mask: Some(mask.shallow_clone()), ..Batch::new(ids) };
    let logits = executor.logits(&batch, &mut |_, _| Ok(())).unwrap();
    let difference = (logits - golden.get("logits").unwrap()).abs().index(&[Some(mask)]);
    difference.max().double_value(&[])
}

/// Each of these would go unnoticed in rows of a few tokens, or with weights that stay small.
#[test]
fn the_long_golden_notices_every_setting_of_the_arithmetic() {
    assert!(error_with("", "") < 1e-4);
    let (sliding, full) = ("\"sliding_attention\"", "\"full_attention\"");
    let (types, swapped) = (format!("{sliding},\n  {full}"), format!("{full},\n  {sliding}"));
    for (before, after) in [
        ("\"sliding_window\": 128", "\"sliding_window\": 127"),
        (&*types, &*swapped),
        ("\"factor\": 32.0", "\"factor\": 16.0"),
        ("\"truncate\": false", "\"truncate\": true"),
        ("\"original_max_position_embeddings\": 64", "\"original_max_position_embeddings\": 96"),
        ("\"swiglu_limit\": 2.5", "\"swiglu_limit\": 2.6"),
        ("\"swiglu_alpha\": 1.5", "\"swiglu_alpha\": 1.702"),
        ("\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 3"),
    ] {
        let error = error_with(before, after);
        assert!(error > 1e-2, "{after}: {error}");
    }
}

#[test]
fn groups_that_do_not_divide_the_experts_are_refused_with_those_that_do() {
    let config = std::fs::read_to_string(golden("gpt_oss").join("config.json")).unwrap();
    let open = |num_expert_groups| {
        let options = ModelOptions { num_expert_groups, ..ModelOptions::default() };
        GptOss.open(&config, &options)
    };
    for groups in [0, 3, 16] {
        let error = open(groups).unwrap_err().to_string();
        let wanted = format!("8 experts of a layer cannot be dealt over {groups} blocks");
        assert!(error.contains(&wanted) && error.contains("1, 2, 4, 8"), "{error}");
    }
    assert_eq!(open(8).unwrap().weights().unwrap().num_streamed(), 4 * (1 + 8));
}
