//! `merge`: what the merged folder computes, what peft makes of the same adapter, and what is refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use blockstreamer_core::checkpoint::{Checkpoint, read_safetensors, write_safetensors};
use blockstreamer_core::state::NamedTensors;
use serde_json::Value;
use tch::{Kind, Tensor};

use super::bad_disk::limited;
use super::{Folder, blockstreamer, copy_folder, in_process, model, names, rows, words};

fn goldens(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens").join(name)
}

/// Every tensor of a model's folder.
fn tensors_of(folder: impl AsRef<Path>) -> BTreeMap<String, Tensor> {
    let checkpoint = Checkpoint::open(folder.as_ref()).unwrap();
    let mut all = BTreeMap::new();
    for file in &checkpoint.files {
        for (name, tensor) in read_safetensors(&file.path).unwrap().iter() {
            all.insert(name.to_owned(), tensor.shallow_clone());
        }
    }
    all
}

/// The golden checkpoint with its adapter merged in, as a folder below `folder`.
fn merged_golden(folder: &Folder, name: &str, extra: &[&str]) -> BTreeMap<String, Tensor> {
    let (model, out) = (goldens(name), folder.path(name));
    let adapter = model.join("adapter");
    let words =
        ["merge", model.to_str().unwrap(), "--adapter", adapter.to_str().unwrap(), "--out", &out];
    blockstreamer(&[&words[..], &["--device", "cpu"], extra].concat()).ok();
    tensors_of(out)
}

#[test]
fn merged_goldens_hold_what_peft_merges() {
    let folder = Folder::new();
    for (name, num_tensors, extra) in [
        ("qwen3_vl", 7, &[][..]),
        ("qwen3_vl_moe_router", 4, &[]),
        ("gpt_oss_router", 4, &["--experts", "bf16"]),
    ] {
        let golden = read_safetensors(&goldens(&format!("peft_merged/{name}.safetensors")));
        let (golden, found) = (golden.unwrap(), merged_golden(&folder, name, extra));
        assert_eq!(golden.iter().count(), num_tensors);
        for (tensor, wanted) in golden.iter() {
            let found = &found[tensor];
            assert_eq!((found.size(), found.kind()), (wanted.size(), wanted.kind()), "{tensor}");
            // Equal bits, unless a processor adds in another order and a sum falls on the other side of a
            // rounding: one step then, and seldom.
            let (found, wanted) = (found.to_kind(Kind::Double), wanted.to_kind(Kind::Double));
            let apart = found.ne_tensor(&wanted).to_kind(Kind::Double).mean(Kind::Double);
            assert!(apart.double_value(&[]) < 1e-3, "{tensor}: {}", apart.double_value(&[]));
            let error = (found - &wanted).abs() - wanted.abs() / 128.0;
            assert!(error.max().double_value(&[]) <= 0.0, "{tensor}");
        }
    }
}

#[test]
fn experts_that_lie_the_other_way_round_in_the_files_change_by_the_same() {
    let folder = Folder::new();
    let published = merged_golden(&folder, "qwen3_vl_moe", &[]);
    let resaved = merged_golden(&folder, "qwen3_vl_moe_resaved", &[]);
    assert!(published.keys().eq(resaved.keys()));
    let mut num_experts = 0;
    for (name, tensor) in &published {
        let is_stack =
            name.ends_with("experts.gate_up_proj") || name.ends_with("experts.down_proj");
        num_experts += usize::from(is_stack);
        let other = &resaved[name];
        let other = if is_stack { other.transpose(1, 2) } else { other.shallow_clone() };
        assert_eq!(*tensor, other, "{name}");
    }
    assert_eq!(num_experts, 6);
}

/// A copy of a model in fp32: what is merged into it is hardly rounded.
fn in_fp32(model: &str, out: &str) {
    copy_folder(Path::new(model), Path::new(out));
    let mut tensors = NamedTensors::new();
    for (name, tensor) in tensors_of(model) {
        tensors = tensors.with(name, tensor.to_kind(Kind::Float));
    }
    let path = Path::new(out).join("model.safetensors");
    write_safetensors(&path, &tensors, &[("format", "pt")]).unwrap();
}

fn loss(words: &[&str]) -> f64 {
    let data = rows();
    let words = [&["eval"], words, &["--data", &data, "--device", "cpu", "--json"]].concat();
    blockstreamer(&words).ok().json()["loss"].as_f64().unwrap()
}

/// Trains on every linear and on `parameters`, and holds the merged models against the adapted one.
fn check_losses(folder: &Folder, model: &str, parameters: &str) {
    let (data, run) = (rows(), folder.path("run"));
    let setting = format!("lora.target_parameters={parameters}");
    let extra = ["--set", "steps=6", "--set", "batch_size=4", "--set", &setting];
    blockstreamer(&words(model, &data, &run, &extra)).ok();
    let adapter = format!("{run}/adapter");
    let (fine, rough) = (folder.path("fp32"), folder.path("merged"));
    in_fp32(model, &fine);
    let merge = |model: &str, out: &str| {
        let words = ["merge", model, "--adapter", &adapter, "--out", out, "--device", "cpu"];
        blockstreamer(&[&words[..], &["--json"]].concat()).ok().json()
    };
    let report = merge(model, &rough);
    let base = Checkpoint::open(Path::new(model)).unwrap();
    assert_eq!(report["tensors"], base.tensors.len());
    let num_changed = report["changed"].as_u64().unwrap();
    assert!(num_changed > 20, "{num_changed}");
    assert_eq!((&report["experts"], &report["packing"]), (&Value::Null, &Value::Null));
    let fine_out = folder.path("merged fp32");
    assert_eq!(merge(&fine, &fine_out)["changed"], num_changed);

    let (before, adapted) = (loss(&[model]), loss(&[model, "--adapter", &adapter]));
    let effect = before - adapted;
    assert!(effect > 0.2, "training did nothing: {before} -> {adapted}");
    let (fine, rough) = (loss(&[&fine_out]), loss(&[&rough]));
    assert!((fine - adapted).abs() < 2e-5, "{fine} in fp32, {adapted} adapted");
    assert!((rough - adapted).abs() < 0.02 * effect, "{rough} in bf16, {adapted} adapted");
    // The folder is a model like any other: what lies beside the weights came along.
    let mut expected = names(model);
    expected.retain(|name| name != "synthetic.json");
    expected.push("merged.json".into());
    expected.sort();
    assert_eq!(names(folder.path("merged")), expected);
}

#[test]
fn a_dense_model_computes_merged_what_it_computes_adapted() {
    check_losses(&Folder::new(), model(), "[]");
}

#[test]
fn a_model_with_experts_computes_merged_what_it_computes_adapted() {
    let folder = Folder::new();
    let model = folder.path("moe");
    blockstreamer(&["synth", "qwen3-vl:tiny-moe", "--out", &model]).ok();
    let parameters = "[\"experts.gate_up_proj\",\"experts.down_proj\",\"mlp.gate.weight\"]";
    check_losses(&folder, &model, parameters);
}

#[test]
fn packed_experts_compute_merged_in_bf16_what_they_compute_adapted_and_in_mxfp4_the_part_that_is_kept()
 {
    let folder = Folder::new();
    let (model, run, data) = (folder.path("model"), folder.path("run"), rows());
    blockstreamer(&["synth", "gpt-oss:tiny", "--layers", "2", "--out", &model]).ok();
    let parameters = "lora.target_parameters=[\"experts.gate_up_proj\",\"experts.down_proj\"]";
    let extra = ["steps=4", "batch_size=4", "sequence_length=512", parameters];
    let extra: Vec<_> = extra.into_iter().flat_map(|setting| ["--set", setting]).collect();
    blockstreamer(&words(&model, &data, &run, &extra)).ok();
    let adapter = format!("{run}/adapter");
    let merge = |experts: &str| {
        let out = folder.path(experts);
        let words = ["merge", &model, "--adapter", &adapter, "--out", &out, "--device", "cpu"];
        let report = blockstreamer(&[&words[..], &["--experts", experts, "--json"]].concat());
        let report = report.ok().json();
        assert_eq!(report["experts"], experts);
        (report["packing"].clone(), loss(&[&out]))
    };
    let (before, adapted) = (loss(&[&model]), loss(&[&model, "--adapter", &adapter]));
    let effect = before - adapted;
    assert!(effect > 0.1, "training did nothing: {before} -> {adapted}");
    let (packing, whole) = merge("bf16");
    assert_eq!(packing, Value::Null);
    assert!((whole - adapted).abs() < 0.02 * effect, "{whole} in bf16, {adapted} adapted");
    let (packing, part) = merge("mxfp4");
    assert_eq!(packing["tensors"].as_array().unwrap().len(), 4);
    let number = |key: &str| packing[key].as_f64().unwrap();
    let (error, kept) = (number("relative_error"), number("change_kept"));
    assert!(error > 0.01 && error < 1.0 && kept > 0.5 && kept < 1.0, "{packing}");
    assert!((part - adapted).abs() < 0.2 * effect, "{part} in mxfp4, {adapted} adapted");
    assert!(fs::read_to_string(format!("{model}/config.json")).unwrap().contains("mxfp4"));
    let config = |experts| fs::read_to_string(folder.path(&format!("{experts}/config.json")));
    assert!(
        !config("bf16").unwrap().contains("mxfp4") && config("mxfp4").unwrap().contains("mxfp4")
    );

    // What is far below a step of the codes is lost, which is said; nothing else moves.
    let slight = folder.path("slight");
    let extra = [&extra[..], &["--set", "steps=1", "--set", "learning_rate=1e-6"]].concat();
    blockstreamer(&words(&model, &data, &slight, &extra)).ok();
    let (adapter, out) = (format!("{slight}/adapter"), folder.path("lost"));
    let words = ["merge", &model, "--adapter", &adapter, "--out", &out, "--experts", "mxfp4"];
    let merged = blockstreamer(&words).ok();
    assert!(merged.stderr.contains("has lost") && merged.stderr.contains("--experts bf16"));
    assert_eq!(loss(&[&out]), before);
}

/// Merges without starting the program.
fn merge_into(model: &str, adapter: &str, out: &str, extra: &[&str]) -> super::Finished {
    let words = ["merge", model, "--adapter", adapter, "--out", out, "--device", "cpu"];
    in_process(&[&words[..], extra].concat())
}

/// A golden checkpoint with its adapter, which may be damaged.
fn copy_of_golden(folder: &Folder) -> (String, String) {
    let model = folder.path("golden");
    copy_folder(&goldens("qwen3_vl"), Path::new(&model));
    let adapter = format!("{model}/adapter");
    (model, adapter)
}

#[test]
fn adapters_and_models_that_do_not_fit_are_named_and_leave_nothing() {
    let folder = Folder::new();
    let (golden, adapter) = copy_of_golden(&folder);
    let out = folder.path("out");
    let refuse = |model: &str, adapter: &str, extra: &[&str], expected: &[&str]| {
        merge_into(model, adapter, &out, extra).failed(expected);
        assert!(!names(folder.path("")).iter().any(|name| name.contains("out")));
    };
    // Of another model: names that match nothing, and shapes that do not fit.
    let moe = goldens("qwen3_vl_moe/adapter");
    let moe = moe.to_str().unwrap();
    refuse(&golden, moe, &[], &["cannot use the adapter", moe, "fit no linear", "experts"]);
    let config = format!("{adapter}/adapter_config.json");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("\"r\": 4", "\"r\": 5")).unwrap();
    assert_ne!(fs::read_to_string(&config).unwrap(), text);
    refuse(&golden, &adapter, &[], &["lora_A.weight", "has shape [4, 64]", "needs [5, 64]"]);
    fs::write(&config, text).unwrap();

    let none = folder.path("none");
    refuse(&golden, &none, &[], &[&none, "No such file"]);
    refuse(&none, &adapter, &[], &[&none, "is not a folder"]);
    refuse(&golden, &adapter, &["--experts", "bf16"], &["--experts bf16", "has none"]);
    let weights = fs::read(format!("{adapter}/adapter_model.safetensors")).unwrap();
    fs::write(format!("{adapter}/adapter_model.safetensors"), &weights[..900]).unwrap();
    refuse(&golden, &adapter, &[], &["adapter_model.safetensors", "damaged or incomplete"]);
}

#[test]
fn a_place_that_holds_something_is_not_written_to() {
    let folder = Folder::new();
    let (golden, adapter) = copy_of_golden(&folder);
    let letters = folder.path("letters");
    fs::create_dir(&letters).unwrap();
    folder.write("letters/letter.txt", "dear");
    merge_into(&golden, &adapter, &letters, &[]).failed(&[&letters, "not empty"]);
    assert_eq!(names(&letters), ["letter.txt"]);
    let before = names(&golden);
    merge_into(&golden, &adapter, &golden, &[]).failed(&[&golden, "is read from"]);
    assert_eq!(names(&golden), before);
    let out = folder.write("file", "a file") + "/merged";
    merge_into(&golden, &adapter, &out, &[]).failed(&[&folder.path("file"), "Not a directory"]);
    // A tokenizer that only a merged folder has is gone when it is merged again.
    let out = folder.path("out");
    merge_into(&golden, &adapter, &out, &[]).ok();
    folder.write("out/stray.txt", "");
    merge_into(&golden, &adapter, &out, &["--max-file", "500kB"]).ok();
    assert!(!names(&out).contains(&"stray.txt".to_owned()), "{:?}", names(&out));
    assert!(names(&out).contains(&"model-00003-of-00003.safetensors".to_owned()));
}

#[test]
fn a_full_disk_leaves_no_merged_model() {
    let folder = Folder::new();
    let (golden, adapter) = copy_of_golden(&folder);
    let out = folder.path("out");
    let words = ["merge", &golden, "--adapter", &adapter, "--out", &out, "--device", "cpu"];
    limited(&words, 100).failed(&["out/model.safetensors", "File too large"]);
    assert_eq!(names(folder.path("")), ["golden"]);
}
