//! Random checkpoints.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use blockstreamer_core::checkpoint::{
    Checkpoint, Layout, SynthesizeOptions, read_safetensors, synthesize, tensor_bytes,
};
use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::numerics::Mxfp4;
use blockstreamer_core::source::SafetensorsSource;
use blockstreamer_core::tch::{Kind, Tensor};
use blockstreamer_core::weights::{Role, WeightTable, row};

use crate::{assert_says, names_in};

fn table() -> WeightTable {
    let layer = [
        row("layers.{n}.proj.weight", "proj.weight", Role::Linear, &[200, 300]),
        row("layers.{n}.proj.bias", "proj.bias", Role::Bias, &[200]),
        row("layers.{n}.norm.weight", "norm.weight", Role::NormScale, &[300]),
        row("layers.{n}.codes", "codes", Role::Buffer(Dtype::U8), &[33]),
        row("layers.{n}.mask", "mask", Role::Buffer(Dtype::BOOL), &[33]),
        row("layers.{n}.table", "table", Role::Buffer(Dtype::I64), &[33]),
    ];
    let embedding = row("embed.weight", "embed.weight", Role::Embedding, &[500, 300]);
    let tied = row("embed.weight", "head.weight", Role::Linear, &[500, 300]);
    WeightTable::new(Dtype::BF16)
        .layers("layers.{n}", 3, &layer)
        .resident("head", &[embedding, tied])
}

fn options(directory: &Path, seed: u64, max_file_bytes: u64) -> SynthesizeOptions {
    SynthesizeOptions {
        directory: directory.to_owned(),
        config_json: "{\"model_type\": \"test\"}".to_owned(),
        seed,
        initializer_range: 0.02,
        max_file_bytes,
        extra_files: vec![("tokenizer.json".to_owned(), b"{}".to_vec())],
    }
}

/// Every tensor's bytes by name, whichever file it is in.
fn contents(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let checkpoint = Checkpoint::open(directory).unwrap();
    let mut all = BTreeMap::new();
    for file in &checkpoint.files {
        for (name, tensor) in read_safetensors(&file.path).unwrap().iter() {
            all.insert(name.to_owned(), tensor_bytes(tensor).unwrap());
        }
    }
    all
}

#[test]
fn a_synthetic_checkpoint_fits_its_table_in_one_file_or_in_several() {
    let parent = tempfile::tempdir().unwrap();
    let [one, several] = ["one", "several"].map(|name| parent.path().join(name));
    let summary = synthesize(&table(), &options(&one, 7, u64::MAX)).unwrap();
    assert_eq!((summary.num_files, summary.num_tensors), (1, 19));
    assert_eq!(
        names_in(&one),
        ["config.json", "model.safetensors", "synthetic.json", "tokenizer.json"]
    );
    let summary = synthesize(&table(), &options(&several, 7, 250_000)).unwrap();
    assert_eq!(summary.num_files, 3);
    assert_eq!(
        names_in(&several)[1..5],
        [
            "model-00001-of-00003.safetensors",
            "model-00002-of-00003.safetensors",
            "model-00003-of-00003.safetensors",
            "model.safetensors.index.json"
        ]
    );
    // The same values, however they are dealt over files.
    assert_eq!(contents(&one), contents(&several));
    for directory in [one, several] {
        let checkpoint = Checkpoint::open(&directory).unwrap();
        assert_eq!(checkpoint.config_json, "{\"model_type\": \"test\"}");
        let layout = Layout::new(&checkpoint, &table(), None, |_| Ok(false)).unwrap();
        layout.check_finite(&SafetensorsSource::open(layout.clone()).unwrap()).unwrap();
    }
}

#[test]
fn values_have_the_distribution_of_their_role() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("model");
    synthesize(&table(), &options(&directory, 1, u64::MAX)).unwrap();
    let tensors = read_safetensors(&directory.join("model.safetensors")).unwrap();
    let moments = |name: &str| {
        let tensor = tensors.get(name).unwrap().to_kind(Kind::Double);
        (tensor.mean(Kind::Double).double_value(&[]), tensor.std(true).double_value(&[]))
    };
    for (name, mean, deviation) in [
        ("layers.0.proj.weight", 0.0, 0.02),
        ("embed.weight", 0.0, 0.02),
        ("layers.2.proj.bias", 0.0, 0.02),
        ("layers.1.norm.weight", 1.0, 0.02),
    ] {
        let found = moments(name);
        assert!(
            (found.0 - mean).abs() < 0.005 && (found.1 / deviation - 1.0).abs() < 0.15,
            "{name}: {found:?}"
        );
    }
    let codes = tensor_bytes(tensors.get("layers.0.codes").unwrap()).unwrap();
    assert!(codes.iter().collect::<BTreeSet<_>>().len() > 20);
    assert!(
        tensor_bytes(tensors.get("layers.0.mask").unwrap()).unwrap().iter().all(|byte| *byte < 2)
    );
    assert_ne!(
        tensor_bytes(tensors.get("layers.0.proj.weight").unwrap()).unwrap(),
        tensor_bytes(tensors.get("layers.1.proj.weight").unwrap()).unwrap()
    );
}

#[test]
fn packed_numbers_use_every_code_and_have_about_the_deviation_asked_for() {
    let parent = tempfile::tempdir().unwrap();
    let rows = [
        row("up_blocks", "up_blocks", Role::Mxfp4Blocks, &[4, 64, 6, 16]),
        row("up_scales", "up_scales", Role::Mxfp4Scales, &[4, 64, 6]),
    ];
    let table = WeightTable::new(Dtype::BF16).layers("l.{n}", 1, &rows);
    for (deviation, scales) in [(0.02, 117..=121_u8), (0.3, 121..=125), (1e-39, 0..=0)] {
        let directory = parent.path().join("model");
        let options =
            SynthesizeOptions { initializer_range: deviation, ..options(&directory, 3, 9) };
        synthesize(&table, &options).unwrap();
        let tensors: BTreeMap<_, _> = contents(&directory);
        let found: BTreeSet<_> = tensors["up_scales"].iter().copied().collect();
        assert_eq!(found, scales.clone().collect(), "{deviation}");
        let bytes: BTreeSet<_> = tensors["up_blocks"].iter().collect();
        assert!(bytes.len() > 250, "{}", bytes.len());
        let tensor = |name: &str, size: &[i64]| Tensor::from_slice(&tensors[name]).view(size);
        let packed =
            Mxfp4::new(tensor("up_blocks", &[4, 64, 6, 16]), tensor("up_scales", &[4, 64, 6]));
        let values = packed.unwrap().unpack(Kind::Double).unwrap();
        let ratio = values.std(true).double_value(&[]) / deviation;
        // Scales are powers of two; the smallest number that there is sets a limit.
        assert!(deviation < 1e-30 || (0.7..1.42).contains(&ratio), "{deviation}: {ratio}");
    }
}

#[test]
fn the_seed_alone_decides_the_values() {
    let parent = tempfile::tempdir().unwrap();
    let written = |name: &str, seed| {
        let directory = parent.path().join(name);
        synthesize(&table(), &options(&directory, seed, u64::MAX)).unwrap();
        std::fs::read(directory.join("model.safetensors")).unwrap()
    };
    let first = written("a", 1);
    assert_eq!(written("b", 1), first);
    assert_ne!(written("c", 2), first);
    // Pinned: what was written yesterday is written today.
    assert_eq!(crc32fast::hash(&first), 2_618_887_907);
}

#[test]
fn a_folder_of_something_else_is_left_alone_and_an_older_synthetic_one_replaced() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("model");
    std::fs::create_dir(&directory).unwrap();
    synthesize(&table(), &options(&directory, 1, 250_000)).unwrap();
    synthesize(&table(), &options(&directory, 1, u64::MAX)).unwrap();
    assert_eq!(Checkpoint::open(&directory).unwrap().files.len(), 1);
    assert_eq!(names_in(parent.path()), ["model"]);
    // What a killed run leaves: this one's goes, another one's stays.
    let left = [".model.Xy12zz.partial", ".model.v2.Xy12zz.partial", ".other.Xy12zz.partial"];
    for name in left {
        std::fs::create_dir(parent.path().join(name)).unwrap();
        std::fs::write(parent.path().join(name).join("model.safetensors"), "half").unwrap();
    }
    synthesize(&table(), &options(&directory, 1, u64::MAX)).unwrap();
    assert_eq!(names_in(parent.path()), [left[1], left[2], "model"]);
    std::fs::remove_file(directory.join("synthetic.json")).unwrap();
    assert_says(
        synthesize(&table(), &options(&directory, 1, u64::MAX)),
        &["not empty", "not replaced"],
    );
}

#[test]
fn a_table_that_contradicts_itself_is_refused_before_anything_is_written() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("model");
    let mut table = table();
    table.weights.last_mut().unwrap().shape = vec![1, 2];
    assert_says(
        synthesize(&table, &options(&directory, 1, u64::MAX)),
        &["embed.weight", "[500, 300]", "[1, 2]"],
    );
    assert!(names_in(parent.path()).is_empty());
}
