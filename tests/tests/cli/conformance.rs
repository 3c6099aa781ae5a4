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
    copy_folder(&golden(), Path::new(&folder.path("golden")));
    folder.path("golden")
}

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
}

#[test]
fn a_family_or_plugin_that_is_not_there_is_named() {
    let folder = Folder::new();
    blockstreamer(&["conformance", "no-such-family"])
        .failed(&["'no-such-family'", "families found: qwen3-vl"]);
    let missing = folder.path("libnone.so");
    blockstreamer(&["conformance", &missing]).failed(&[&missing, "No such file"]);
    let text = folder.write("libtext.so", "not a library");
    blockstreamer(&["conformance", &text]).failed(&[&text, "cannot be loaded"]);
    let folder = folder.path("");
    conformance("qwen3-vl", &folder, &[]).failed(&[&folder, "config.json"]);
}
