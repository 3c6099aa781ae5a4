//! `conformance`: passes on the goldens, and fails when a number is wrong.

use std::path::Path;

use blockstreamer_core::checkpoint::{read_safetensors, write_safetensors};
use blockstreamer_core::state::NamedTensors;
use blockstreamer_tests::built;
use serde_json::Value;
use tch::Tensor;

use super::{Finished, Folder, blockstreamer, copy_folder, golden};

fn conformance(family: &str, golden: &str, extra: &[&str]) -> Finished {
    blockstreamer(&[&["conformance", family, "--golden", golden, "--json"], extra].concat())
}

/// The names of the checks that failed.
fn failures(report: &Value) -> Vec<&str> {
    let checks = report["checks"].as_array().unwrap().iter();
    checks
        .filter(|check| check["passed"] == false)
        .map(|check| check["name"].as_str().unwrap())
        .collect()
}

/// Rewrites one tensor of a safetensors file.
fn edit(path: &str, name: &str, change: impl Fn(&Tensor) -> Tensor) {
    let tensors = read_safetensors(Path::new(path)).unwrap();
    assert!(tensors.find(name).is_some(), "{name}");
    let changed: NamedTensors = tensors
        .iter()
        .map(|(key, tensor)| {
            (key.to_owned(), if key == name { change(tensor) } else { tensor.shallow_clone() })
        })
        .collect();
    write_safetensors(Path::new(path), &changed, &[("format", "pt")]).unwrap();
}

fn golden_copy(folder: &Folder) -> String {
    copy_of("qwen3_vl_text", folder)
}

fn copy_of(variant: &str, folder: &Folder) -> String {
    copy_folder(&golden().with_file_name(variant), Path::new(&folder.path("golden")));
    folder.path("golden")
}

/// The goldens with pictures, and what each of them has that the others have not.
const WITH_PICTURES: [(&str, &str); 6] = [
    ("qwen3_vl", "layers.3.mlp.down_proj.lora_B"),
    ("qwen3_vl_tied", "layers.3.mlp.down_proj.lora_B"),
    ("qwen3_vl_tower", "visual.deepstack_merger_list.1.linear_fc1.lora_A"),
    ("qwen3_vl_moe", "layers.2.mlp.experts.base_layer.lora_A"),
    ("qwen3_vl_moe_resaved", "layers.2.mlp.experts.lora_B"),
    ("qwen3_vl_moe_router", "layers.3.mlp.gate.lora_B"),
];

#[test]
fn the_goldens_pass_in_fp32_and_every_check_has_its_keys() {
    let report = conformance("qwen3-vl", golden().to_str().unwrap(), &[]).ok().json();
    assert_eq!(report["passed"], true);
    let checks = report["checks"].as_array().unwrap();
    for check in checks {
        let keys: Vec<_> = check.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["name", "passed", "max_error", "tolerance", "detail"]);
        assert_eq!(check["passed"], true, "{check}");
    }
    for name in ["layer_out.0", "layer_out.3", "logits", "loss", "lora.logits", "lora.loss"] {
        let check = checks.iter().find(|check| check["name"] == name).unwrap();
        let error = |key: &str| check[key].as_f64().unwrap();
        assert!(error("max_error") <= error("tolerance") && error("tolerance") < 1e-2, "{check}");
    }
    for (start, wanted) in [("grad.", 56), ("streaming ", 18), ("placement: ", 9)] {
        let starts = |check: &&Value| check["name"].as_str().unwrap().starts_with(start);
        assert_eq!(checks.iter().filter(starts).count(), wanted, "{start}");
    }
}

#[test]
fn goldens_with_pictures_experts_and_every_kind_of_adapter_pass_in_fp32_and_bf16() {
    for (variant, gradient) in WITH_PICTURES {
        let path = golden().with_file_name(variant);
        for dtype in ["fp32", "bf16"] {
            let extra = ["--dtype", dtype];
            let report = conformance("qwen3-vl", path.to_str().unwrap(), &extra).ok().json();
            assert_eq!(report["passed"], true, "{variant} {dtype}");
            let checks = report["checks"].as_array().unwrap();
            let names: Vec<_> = checks.iter().map(|it| it["name"].as_str().unwrap()).collect();
            for name in ["vis.embeds", "vis.deepstack.0", "vis.deepstack.1", "pos3", "layer_out.3"]
            {
                assert!(names.contains(&name), "{variant} {dtype}: {name}");
            }
            let is_there = |name: &&str| name.starts_with("grad.") && name.contains(gradient);
            assert!(names.iter().any(is_there), "{variant}: {gradient}");
        }
    }
}

#[test]
fn goldens_of_gpt_oss_packed_and_plain_pass_in_fp32_and_bf16() {
    for (variant, gradient) in [
        ("gpt_oss", "layers.3.mlp.experts.base_layer.lora_A"),
        ("gpt_oss_plain", "layers.1.mlp.experts.lora_B"),
    ] {
        let path = golden().with_file_name(variant);
        for dtype in ["fp32", "bf16"] {
            let extra = ["--dtype", dtype];
            let report = conformance("gpt-oss", path.to_str().unwrap(), &extra).ok().json();
            assert_eq!(report["passed"], true, "{variant} {dtype}");
            let checks = report["checks"].as_array().unwrap();
            let names: Vec<_> = checks.iter().map(|it| it["name"].as_str().unwrap()).collect();
            let is_there = |name: &&str| name.starts_with("grad.") && name.contains(gradient);
            assert!(names.iter().any(is_there), "{variant}: {gradient}");
        }
    }
}

#[test]
fn altered_pictures_fail_by_what_was_altered() {
    let folder = Folder::new();
    let golden = copy_of("qwen3_vl", &folder);
    let file = format!("{golden}/golden_fp32.safetensors");
    edit(&file, "vis.embeds", |tensor| tensor + 1e-3);
    edit(&file, "vis.deepstack.1", |tensor| tensor + 1e-3);
    edit(&file, "pos3", |tensor| tensor + 1);
    let finished = conformance("qwen3-vl", &golden, &[]);
    assert_eq!(finished.code, 1, "{}", finished.stderr);
    assert_eq!(failures(&finished.json()), ["vis.embeds", "vis.deepstack.1", "pos3"]);
    edit(&file, "in.pixel_values", |tensor| tensor * 1.01);
    let finished = conformance("qwen3-vl", &golden, &[]);
    let report = finished.json();
    let failed = failures(&report);
    for name in ["vis.deepstack.0", "layer_out.0", "logits"] {
        assert!(failed.contains(&name), "{failed:?}");
    }
    edit(&file, "in.image_grid_thw", |grids| grids.flip([1]));
    conformance("qwen3-vl", &golden, &[]).failed(&["picture", "patches"]);
}

#[test]
fn the_plugin_file_itself_passes_in_bf16() {
    let plugin = built::profile_folder().join("libblockstreamer_qwen3_vl.so");
    let extra = ["--dtype", "bf16"];
    let report =
        conformance(plugin.to_str().unwrap(), golden().to_str().unwrap(), &extra).ok().json();
    assert_eq!(report["passed"], true);
    assert!(report["checks"].as_array().unwrap().len() > 70);
}

#[test]
fn an_altered_golden_fails_and_only_the_checks_of_it() {
    let folder = Folder::new();
    let golden = golden_copy(&folder);
    edit(&format!("{golden}/golden_fp32.safetensors"), "layer_out.1", |tensor| tensor + 1e-3);
    let finished = conformance("qwen3-vl", &golden, &[]);
    assert_eq!(finished.code, 1, "{}", finished.stderr);
    let report = finished.json();
    assert_eq!(report["passed"], false);
    assert_eq!(failures(&report), ["layer_out.1"]);
}

#[test]
fn an_altered_weight_fails_from_its_layer_on() {
    let folder = Folder::new();
    let golden = golden_copy(&folder);
    let name = "model.language_model.layers.2.mlp.down_proj.weight";
    let index = std::fs::read_to_string(format!("{golden}/model.safetensors.index.json")).unwrap();
    let index: Value = serde_json::from_str(&index).unwrap();
    let file = index["weight_map"][name].as_str().unwrap();
    edit(&format!("{golden}/{file}"), name, |tensor| tensor * 1.05);
    let finished = conformance("qwen3-vl", &golden, &[]);
    assert_eq!(finished.code, 1, "{}", finished.stderr);
    let report = finished.json();
    let failed = failures(&report);
    for name in ["layer_out.2", "layer_out.3", "logits", "loss"] {
        assert!(failed.contains(&name), "{failed:?}");
    }
    for name in ["layer_out.0", "layer_out.1"] {
        assert!(!failed.contains(&name), "{failed:?}");
    }
    assert!(!failed.iter().any(|name| name.starts_with("streaming")), "{failed:?}");
}

#[test]
fn a_family_passes_without_goldens() {
    let report = blockstreamer(&["conformance", "qwen3-vl", "--json"]).ok().json();
    assert_eq!(report["passed"], true);
    let checks = report["checks"].as_array().unwrap();
    for name in [
        "tiny: blocks for pictures are visited with pictures and only then",
        "tiny, pictures: streaming shards prefetch 3 changes no bit",
        "experts in 2 blocks a layer give the same bits",
    ] {
        assert!(checks.iter().any(|check| check["name"] == name), "{name}");
    }
}

#[test]
fn a_synthesized_checkpoint_holds_what_makes_a_processor() {
    let folder = Folder::new();
    let model = folder.path("model");
    blockstreamer(&["synth", "qwen3-vl:tiny-moe", "--layers", "2", "--out", &model]).ok();
    for (file, class) in [
        ("preprocessor_config.json", "image_processor_type"),
        ("video_preprocessor_config.json", "video_processor_type"),
    ] {
        let text = std::fs::read_to_string(format!("{model}/{file}")).unwrap();
        let content: Value = serde_json::from_str(&text).unwrap();
        assert!(content[class].is_string(), "{file}");
        assert_eq!((&content["patch_size"], &content["merge_size"]), (&4.into(), &2.into()));
    }
}

#[test]
fn a_family_or_plugin_that_is_not_there_is_named() {
    let folder = Folder::new();
    blockstreamer(&["conformance", "no-such-family"])
        .failed(&["'no-such-family'", "families found: gpt-oss"]);
    let missing = folder.path("libnone.so");
    blockstreamer(&["conformance", &missing]).failed(&[&missing, "No such file"]);
    let text = folder.write("libtext.so", "not a library");
    blockstreamer(&["conformance", &text]).failed(&[&text, "cannot be loaded"]);
    let folder = folder.path("");
    conformance("qwen3-vl", &folder, &[]).failed(&[&folder, "config.json"]);
}
