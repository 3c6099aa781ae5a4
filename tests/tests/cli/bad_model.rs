//! Model folders that are incomplete or wrong: the message names file, tensor and remedy, and no run
//! folder is left.

use std::fs;
use std::path::Path;

use blockstreamer_core::checkpoint::{read_safetensors, write_safetensors};
use blockstreamer_core::state::NamedTensors;
use tch::{Kind, Tensor};

use super::{Folder, blockstreamer, in_process, rows, words};

/// A copy of the tiny model, `damage`d, must be refused with `expected`.
#[track_caller]
fn refused(damage: impl Fn(&str), extra: &[&str], expected: &[&str]) {
    let folder = Folder::new();
    let (model, run, data) = (folder.model(), folder.path("run"), rows());
    damage(&model);
    let words = words(&model, &data, &run, &[&["--set", "steps=1"], extra].concat());
    in_process(&words).failed(expected).failed(&[&model]);
    assert!(!fs::exists(&run).unwrap(), "a run that never started left a folder");
}

#[test]
fn a_run_that_failed_for_its_model_starts_once_that_is_whole() {
    let folder = Folder::new();
    let (model, run, data) = (folder.model(), folder.path("run"), rows());
    let words = words(&model, &data, &run, &["--set", "steps=1"]);
    fs::remove_file(format!("{model}/config.json")).unwrap();
    blockstreamer(&words).failed(&["holds no config.json"]);
    folder.model();
    blockstreamer(&words).ok();
}

fn edit_config(model: &str, change: impl Fn(&mut serde_json::Value)) {
    let path = Path::new(model).join("config.json");
    let mut config = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(&path, config.to_string()).unwrap();
}

fn edit_weights(model: &str, change: impl Fn(&str, &Tensor) -> Option<Tensor>) {
    let path = Path::new(model).join("model.safetensors");
    let tensors = read_safetensors(&path).unwrap();
    let changed: NamedTensors = tensors
        .iter()
        .filter_map(|(name, tensor)| Some((name.to_owned(), change(name, tensor)?)))
        .collect();
    write_safetensors(&path, &changed, &[("format", "pt")]).unwrap();
}

/// Any tensor in the middle of the model.
const VICTIM: &str = "model.language_model.layers.1.mlp.up_proj.weight";

#[test]
fn a_missing_folder_is_named() {
    refused(|model| fs::remove_dir_all(model).unwrap(), &[], &["is not a folder", "config.json"]);
}

#[test]
fn a_missing_configuration_is_named() {
    let remove = |model: &str| fs::remove_file(format!("{model}/config.json")).unwrap();
    refused(remove, &[], &["holds no config.json", "download"]);
}

#[test]
fn a_configuration_that_lacks_a_key_names_it() {
    let remove = |config: &mut serde_json::Value| {
        config["text_config"].as_object_mut().unwrap().remove("num_attention_heads").unwrap();
    };
    let expected = ["config.json", "text_config.num_attention_heads is missing"];
    refused(|model| edit_config(model, remove), &[], &expected);
}

#[test]
fn an_unknown_model_type_lists_the_families_found() {
    let rename = |config: &mut serde_json::Value| config["model_type"] = "yeti".into();
    refused(
        |model| edit_config(model, rename),
        &[],
        &["'yeti'", "families found: ", "qwen3-vl (qwen3_vl, qwen3_vl_moe)", "gpt-oss (gpt_oss)"],
    );
}

#[test]
fn a_truncated_file_names_file_tensor_and_remedy() {
    let truncate = |model: &str| {
        let file = fs::OpenOptions::new().write(true).open(format!("{model}/model.safetensors"));
        file.unwrap().set_len(300_000).unwrap();
    };
    refused(
        truncate,
        &[],
        &["model.safetensors", "tensor 'lm_head.weight'", "cut short", "fetch it again"],
    );
}

#[test]
fn a_header_that_lies_about_its_length_is_refused_without_allocating_it() {
    for (length, expected) in [
        (u64::MAX >> 1, "claims a header of 9223372036854775807 bytes"),
        (16, "its header is not JSON"),
        (99_000_000, "the download is incomplete"),
    ] {
        let lie = |model: &str| {
            let path = format!("{model}/model.safetensors");
            let mut bytes = fs::read(&path).unwrap();
            bytes[..8].copy_from_slice(&length.to_le_bytes());
            fs::write(&path, bytes).unwrap();
        };
        refused(lie, &[], &["model.safetensors", expected]);
    }
}

#[test]
fn a_missing_tensor_is_named() {
    let drop = |name: &str, tensor: &Tensor| (name != VICTIM).then(|| tensor.shallow_clone());
    refused(|model| edit_weights(model, drop), &[], &[VICTIM, "missing", "incomplete"]);
}

#[test]
fn a_tensor_of_the_wrong_shape_is_named_with_both_shapes() {
    let cut = |name: &str, tensor: &Tensor| {
        Some(if name == VICTIM {
            tensor.narrow(0, 0, 7).contiguous()
        } else {
            tensor.shallow_clone()
        })
    };
    refused(|model| edit_weights(model, cut), &[], &[VICTIM, "[7, 64]", "[160, 64]"]);
}

#[test]
fn a_tensor_that_nothing_uses_is_named() {
    let add = |model: &str| {
        let path = Path::new(model).join("model.safetensors");
        let mut tensors: NamedTensors = read_safetensors(&path).unwrap();
        tensors.insert(
            "model.language_model.layers.9.extra",
            Tensor::zeros([2], (Kind::Float, tch::Device::Cpu)),
        );
        write_safetensors(&path, &tensors, &[]).unwrap();
    };
    refused(add, &[], &["model.language_model.layers.9.extra"]);
}

#[test]
fn a_weight_that_is_not_a_number_is_named_when_asked() {
    let poison = |name: &str, tensor: &Tensor| {
        let copy = tensor.copy();
        if name == VICTIM {
            let _ = copy.get(3).get(5).fill_(f64::NAN);
        }
        Some(copy)
    };
    let check = ["--set", "stream.check_finite=true"];
    refused(
        |model| edit_weights(model, poison),
        &check,
        &[VICTIM, "NaN", "model.safetensors", "fetch"],
    );
}

#[test]
fn a_weight_that_is_not_a_number_stops_the_run_and_points_to_the_check() {
    let folder = Folder::new();
    let (model, run, data) = (folder.model(), folder.path("run"), rows());
    edit_weights(&model, |_, tensor| Some(tensor * f64::NAN));
    let finished = blockstreamer(&words(&model, &data, &run, &["--set", "steps=2"]));
    finished.failed(&["loss of step 1", "stream.check_finite=true"]);
    assert!(!fs::exists(format!("{run}/adapter")).unwrap());
}
