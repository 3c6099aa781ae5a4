use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::*;
use crate::error::Error;
use crate::site::{Site, SiteKind};

const CPU: Device = Device::Cpu;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens/qwen3_vl_text")
}

/// The linears of the golden checkpoint's decoder and its head, by the headers of its files.
fn golden_sites() -> Vec<Site> {
    let mut sites = Vec::new();
    for file in 1..=3 {
        let path = golden().join(format!("model-{file:05}-of-00003.safetensors"));
        let bytes = fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        for (name, info) in header.tensors() {
            let module = name.strip_suffix(".weight").unwrap_or(&name);
            let path = module.strip_prefix("model.language_model.layers.");
            let (layer, local) = match path.and_then(|path| path.split_once('.')) {
                Some((layer, local)) => (Some(layer.parse().unwrap()), local),
                None if module == "lm_head" => (None, module),
                None => continue,
            };
            let [out_features, in_features] = info.shape[..] else { continue };
            let block = BlockIndex(layer.unwrap_or(4));
            let (local, module) = (local.to_owned(), module.to_owned());
            let kind = SiteKind::Linear;
            let is_vision = false;
            sites.push(Site {
                block,
                layer,
                local,
                module,
                kind,
                is_vision,
                in_features,
                out_features,
            });
        }
    }
    sites.sort_by(|a, b| (a.block, &a.module).cmp(&(b.block, &b.module)));
    assert_eq!(sites.len(), 4 * 7 + 1);
    sites
}

/// Values that depend on nothing but the position, within [-1, 1).
fn values(size: &[i64]) -> Tensor {
    let numel: i64 = size.iter().product();
    let numbers: Vec<f32> =
        (0..numel).map(|i| ((i * 7919 + 13) % 1009) as f32 / 504.5 - 1.0).collect();
    Tensor::from_slice(&numbers).reshape(size)
}

fn options(names: &[&str], shape: LoraShape) -> LoraOptions {
    let target_modules = ModuleRule::names(names.iter().copied());
    LoraOptions { shape, target_modules, ..Default::default() }
}

/// Makes every tensor differ from its start.
fn disturb(lora: &Lora) {
    let _guard = tch::no_grad_guard();
    for trainable in lora.trainables() {
        trainable.tensor.shallow_clone().copy_(&values(&trainable.tensor.size()));
    }
}

fn call(block: usize, site: &str, dropout_seed: Option<u64>) -> AdapterCall<'_> {
    AdapterCall { block: BlockIndex(block), site, dropout_seed }
}

fn tensors_of(directory: &Path) -> BTreeMap<String, (Vec<usize>, String, Vec<u8>)> {
    let bytes = fs::read(directory.join("adapter_model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let entry = |(name, view): (&str, safetensors::tensor::TensorView<'_>)| {
        let content = (view.shape().to_vec(), view.dtype().to_string(), view.data().to_vec());
        (name.to_owned(), content)
    };
    tensors.iter().map(entry).collect()
}

fn names_in(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_new_adapter_changes_nothing_and_is_drawn_from_its_seed() {
    let sites = golden_sites();
    let lora = Lora::new(&sites, &LoraOptions::default(), CPU).unwrap();
    assert_eq!(lora.modules().len(), 28);
    let (x, output) = (values(&[2, 3, 64]), values(&[2, 3, 128]));
    let changed = lora.linear(call(1, "self_attn.q_proj", Some(3)), &x, output.copy()).unwrap();
    assert_eq!(changed, output);

    let again = Lora::new(&sites, &LoraOptions::default(), CPU).unwrap();
    let other = LoraOptions { seed: 1, ..Default::default() };
    let other = Lora::new(&sites, &other, CPU).unwrap();
    for ((one, two), three) in
        lora.trainables().iter().zip(again.trainables()).zip(other.trainables())
    {
        assert!(one.tensor.requires_grad() && one.tensor.is_leaf());
        assert_eq!(one.tensor.kind(), Kind::Float);
        assert_eq!(one.tensor, two.tensor);
        assert_eq!(one.tensor == three.tensor, one.name.contains("lora_B"));
    }
    let a = &lora.trainables()[0];
    assert_eq!(
        a.name,
        "base_model.model.model.language_model.layers.0.mlp.down_proj.lora_A.weight"
    );
    // U(-b, b) with b = 1 / sqrt(160): the largest of 1280 draws is near b, the spread is b / sqrt(3).
    let bound = 160_f64.powf(-0.5);
    let largest = a.tensor.abs().max().double_value(&[]);
    assert!(largest <= bound && largest > 0.98 * bound, "{largest} {bound}");
    let spread = a.tensor.std(false).double_value(&[]) * 3_f64.sqrt() / bound;
    assert!((spread - 1.0).abs() < 0.05, "{spread}");
    assert_ne!(lora.trainables()[2].tensor, lora.trainables()[4].tensor);
}

#[test]
fn the_output_is_the_formula_in_fp32_and_near_it_in_bf16() {
    for (use_rslora, scaling) in [(false, 12.0 / 4.0), (true, 12.0 / 2.0)] {
        let shape = LoraShape { rank: 4, alpha: 12.0, use_rslora, ..Default::default() };
        let lora = Lora::new(&golden_sites(), &options(&["up_proj"], shape), CPU).unwrap();
        disturb(&lora);
        let (x, output) = (values(&[2, 3, 64]), values(&[2, 3, 160]));
        let [a, b] =
            [4, 5].map(|position| lora.trainables()[position].tensor.to_kind(Kind::Double));
        let expected = output.to_kind(Kind::Double)
            + x.to_kind(Kind::Double).matmul(&a.tr()).matmul(&b.tr()) * scaling;
        for (kind, tolerance) in [(Kind::Float, 1e-6), (Kind::BFloat16, 2e-2), (Kind::Half, 2e-3)] {
            let found = lora
                .linear(call(2, "mlp.up_proj", None), &x.to_kind(kind), output.to_kind(kind))
                .unwrap();
            assert_eq!((found.kind(), found.size()), (kind, vec![2, 3, 160]));
            let error = (found - &expected).abs().max().double_value(&[]);
            let scale = expected.abs().max().double_value(&[]);
            assert!(error < tolerance * scale, "{kind:?}: {error} of {scale}");
        }
    }
}

#[test]
fn linears_without_an_adapter_get_their_own_tensor_back() {
    let lora =
        Lora::new(&golden_sites(), &options(&["q_proj"], LoraShape::default()), CPU).unwrap();
    disturb(&lora);
    for (block, site) in [(0, "self_attn.k_proj"), (4, "lm_head"), (9, "self_attn.q_proj")] {
        let output = values(&[1, 64]);
        let address = output.data_ptr();
        let same = lora.linear(call(block, site, Some(1)), &values(&[1, 64]), output).unwrap();
        assert_eq!(same.data_ptr(), address);
    }
}

#[test]
fn gradients_reach_the_adapter_and_the_input_and_no_frozen_weight() {
    let lora =
        Lora::new(&golden_sites(), &options(&["q_proj"], LoraShape::default()), CPU).unwrap();
    disturb(&lora);
    let weight = values(&[128, 64]);
    let x = values(&[5, 64]).set_requires_grad(true);
    let output = x.linear(&weight, None::<&Tensor>);
    let y = lora.linear(call(3, "self_attn.q_proj", Some(1)), &x, output).unwrap();
    y.square().sum(Kind::Float).backward();
    assert!(!weight.requires_grad() && !weight.grad().defined());
    assert!(x.grad().defined());
    for trainable in lora.trainables() {
        let used = trainable.blocks == [BlockIndex(3)];
        assert_eq!(trainable.tensor.grad().defined(), used, "{}", trainable.name);
        if used {
            assert!(trainable.tensor.grad().abs().sum(Kind::Float).double_value(&[]) > 0.0);
        }
    }
    let lowest = lora.trainables().iter().flat_map(|trainable| &trainable.blocks).min();
    assert_eq!(lowest, Some(&BlockIndex(0)));
}

#[test]
fn dropout_repeats_for_its_seed_differs_between_seeds_and_sites_and_is_unbiased() {
    let shape = LoraShape { dropout: 0.3, ..Default::default() };
    let names = ["gate_proj", "up_proj"];
    let lora = Lora::new(&golden_sites(), &options(&names, shape), CPU).unwrap();
    disturb(&lora);
    let x = values(&[4, 64]);
    let run = |site: &str, seed| {
        let output = Tensor::zeros([4, 160], (Kind::Float, CPU));
        lora.linear(call(0, site, seed), &x, output).unwrap()
    };
    assert_eq!(run("mlp.up_proj", Some(5)), run("mlp.up_proj", Some(5)));
    assert_ne!(run("mlp.up_proj", Some(5)), run("mlp.up_proj", Some(6)));
    // `disturb` gave both sites the same matrices: only the masks can differ.
    assert_eq!(run("mlp.up_proj", None), run("mlp.gate_proj", None));
    assert_ne!(run("mlp.up_proj", Some(5)), run("mlp.gate_proj", Some(5)));

    let whole = run("mlp.up_proj", None);
    let mut sum = Tensor::zeros_like(&whole);
    for seed in 0..2000 {
        sum += run("mlp.up_proj", Some(seed));
    }
    let error = (sum / 2000.0 - &whole).norm().double_value(&[]) / whole.norm().double_value(&[]);
    // One draw is off by about sqrt(0.3 / 0.7) = 0.65 times a factor of order one; 2000 by 45 times less.
    assert!(error < 0.08, "{error}");
}

#[test]
fn blocks_that_share_a_module_share_its_matrices() {
    let site = |block| Site {
        kind: SiteKind::Linear,
        is_vision: false,
        block: BlockIndex(block),
        layer: Some(block),
        local: "proj".into(),
        module: "shared.proj".into(),
        in_features: 4,
        out_features: 3,
    };
    let sites = [site(1), site(2)];
    let lora = Lora::new(&sites, &LoraOptions::default(), CPU).unwrap();
    assert_eq!(lora.trainables().len(), 2);
    assert_eq!(lora.trainables()[0].blocks, [BlockIndex(1), BlockIndex(2)]);
    disturb(&lora);
    let run = |block| lora.linear(call(block, "proj", None), &values(&[2, 4]), values(&[2, 3]));
    assert_eq!(run(1).unwrap(), run(2).unwrap());
    let message = Lora::new(&[site(1), site(1)], &LoraOptions::default(), CPU).unwrap_err();
    assert!(message.to_string().contains("block 1 has two sites 'proj'"), "{message}");
}

#[test]
fn an_adapter_that_peft_wrote_comes_out_again_bit_for_bit() {
    let lora = Lora::import(&golden().join("adapter"), &golden_sites(), CPU).unwrap();
    let shape = LoraShape { rank: 4, alpha: 8.0, ..Default::default() };
    assert_eq!((lora.shape(), lora.modules().len()), (&shape, 28));
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run/adapter");
    lora.export(&out, "some/base").unwrap();
    assert_eq!(tensors_of(&out), tensors_of(&golden().join("adapter")));
    assert_eq!(names_in(&out.join("..")), BTreeSet::from(["adapter".to_owned()]));

    let config = fs::read_to_string(out.join("adapter_config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["base_model_name_or_path"], "some/base");
    assert_eq!(config["lora_alpha"].as_u64(), Some(8));
    assert_eq!(config["target_modules"].as_array().unwrap().len(), 28);
    let again = Lora::import(&out, &golden_sites(), CPU).unwrap();
    assert_eq!((again.shape(), again.modules()), (lora.shape(), lora.modules()));
}

#[test]
fn partial_adapters_with_patterns_survive_export_and_import() {
    let shape = LoraShape {
        use_rslora: true,
        dropout: 0.1,
        rank_pattern: vec![("3.self_attn.q_proj".into(), 2), ("q_proj".into(), 6)],
        alpha_pattern: vec![("v_proj".into(), 2.5)],
        ..Default::default()
    };
    let layers = LayerRule::TopFraction(0.5);
    let options = LoraOptions { layers, ..options(&["q_proj", "v_proj"], shape) };
    let lora = Lora::new(&golden_sites(), &options, CPU).unwrap();
    disturb(&lora);
    let sizes: Vec<_> = lora.trainables().iter().map(|t| t.tensor.size()[0]).collect();
    assert_eq!(sizes, [6, 128, 8, 64, 2, 128, 8, 64]);

    let folder = tempfile::tempdir().unwrap();
    // Twice: an earlier adapter is replaced.
    for _ in 0..2 {
        lora.export(folder.path(), "base").unwrap();
    }
    let again = Lora::import(folder.path(), &golden_sites(), CPU).unwrap();
    assert_eq!((again.shape(), again.modules()), (lora.shape(), lora.modules()));
    for (one, two) in lora.trainables().iter().zip(again.trainables()) {
        assert_eq!((&one.name, &one.blocks, &one.tensor), (&two.name, &two.blocks, &two.tensor));
    }
    for site in ["self_attn.q_proj", "self_attn.v_proj"] {
        let out_features = if site.ends_with("q_proj") { 128 } else { 64 };
        let run = |lora: &Lora| {
            lora.linear(call(3, site, None), &values(&[2, 64]), values(&[2, out_features])).unwrap()
        };
        assert_eq!(run(&lora), run(&again));
    }
}

#[test]
fn an_export_that_fails_leaves_everything_as_it_was() {
    let lora = Lora::new(&golden_sites(), &LoraOptions::default(), CPU).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("thesis");
    fs::create_dir(&out).unwrap();
    fs::write(out.join("chapter.txt"), "precious").unwrap();
    let message = lora.export(&out, "base").unwrap_err().to_string();
    assert!(message.contains("thesis: holds another file, 'chapter.txt'"), "{message}");
    assert_eq!(names_in(&out), BTreeSet::from(["chapter.txt".to_owned()]));

    let below_a_file = out.join("chapter.txt/adapter");
    let error = lora.export(&below_a_file, "base").unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    assert!(lora.export(Path::new("/"), "base").is_err());
    assert_eq!(names_in(folder.path()), BTreeSet::from(["thesis".to_owned()]));
}

mod bad_files;
mod experts;
mod low_rank;
mod rules;
