mod packed;
mod refused;

use std::path::{Path, PathBuf};

use tch::{Kind, Tensor};
use tempfile::TempDir;

use super::*;
use crate::adapter::{Lora, LoraOptions, LoraShape, ModuleRule};
use crate::block::Placement;
use crate::checkpoint::{read_safetensors, write_safetensors};
use crate::dtype::Dtype;
use crate::state::NamedTensors;
use crate::weights::{BlockPlan, ExpertLayout, Role, row};

const EXPERTS: usize = 4;
const HIDDEN: usize = 32;
const INTER: usize = 64;

/// Values that depend on nothing but position and seed, within [-1, 1), each of another fraction.
fn values(seed: i64, size: &[i64]) -> Tensor {
    let numel: i64 = size.iter().product();
    let number = |i: i64| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0;
    Tensor::from_slice(&(0..numel).map(number).collect::<Vec<_>>()).reshape(size)
}

fn size(shape: &[usize]) -> Vec<i64> {
    shape.iter().map(|extent| *extent as i64).collect()
}

/// A model on disk, what its family would say of it, and an adapter for it.
struct Fixture {
    folder: TempDir,
    table: WeightTable,
    sites: Vec<Site>,
    checkpoint: Checkpoint,
    layout: Layout,
    lora: Lora,
}

impl Fixture {
    /// A checkpoint of `tensors`, in one file, and a LoRA with values of its own on `modules` and
    /// `parameters`.
    fn new(
        table: WeightTable,
        tensors: &NamedTensors,
        [modules, parameters]: [&[&str]; 2],
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model");
        std::fs::create_dir(&model).unwrap();
        let config = r#"{"model_type": "made-up", "quantization_config": {"bits": 4}}"#;
        std::fs::write(model.join("config.json"), config).unwrap();
        std::fs::write(model.join("tokenizer.json"), "tokens").unwrap();
        write_safetensors(&model.join("model.safetensors"), tensors, &[("format", "pt")]).unwrap();
        let checkpoint = Checkpoint::open(&model).unwrap();
        let layout = Layout::new(&checkpoint, &table, None, |_| Ok(false)).unwrap();
        let sites = table.sites();
        let options = LoraOptions {
            shape: LoraShape { rank: 3, alpha: 5.0, ..LoraShape::default() },
            target_modules: ModuleRule::names(modules.iter().copied()),
            target_parameters: parameters.iter().map(|name| (*name).to_owned()).collect(),
            ..LoraOptions::default()
        };
        let lora = Lora::new(&sites, &options, Device::Cpu).unwrap();
        let fixture = Self { folder, table, sites, checkpoint, layout, lora };
        fixture.scale_adapter(0.3);
        fixture
    }

    /// Gives every matrix of the adapter values of its own, up to `scale`.
    fn scale_adapter(&self, scale: f64) {
        let _guard = tch::no_grad_guard();
        for (seed, trainable) in self.lora.trainables().iter().enumerate() {
            let values = values(seed as i64 + 50, &trainable.tensor.size()) * scale;
            trainable.tensor.shallow_clone().copy_(&values);
        }
    }

    fn inputs(&self) -> MergeInputs<'_> {
        let Self { checkpoint, table, layout, sites, lora: adapter, .. } = self;
        MergeInputs { checkpoint, table, layout, sites, adapter }
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    fn merge(&self, change: impl Fn(&mut MergeOptions)) -> Result<Merged> {
        let mut options = MergeOptions::new(self.out());
        change(&mut options);
        merge(self.inputs(), &options, &mut |_| {})
    }

    fn refused(&self, change: impl Fn(&mut MergeOptions)) -> String {
        self.merge(change).unwrap_err().to_string()
    }

    /// Every tensor of the merged checkpoint.
    fn merged(&self) -> NamedTensors {
        tensors_of(&self.out())
    }

    /// `scaling * B A` for the site whose matrices have this key, as `[experts, out, in]`.
    fn change(&self, key: &str, num_experts: i64) -> Tensor {
        let matrix = |name: &str| {
            let name = format!("base_model.model.{key}.{name}.weight");
            let found = self.lora.trainables().iter().find(|trainable| trainable.name == name);
            found.unwrap_or_else(|| panic!("no {name}")).tensor.detach()
        };
        let (a, b) = (matrix("lora_A"), matrix("lora_B"));
        let rank = a.size()[0] / num_experts;
        let of_expert = |expert: i64| {
            let rows = a.narrow(0, expert * rank, rank);
            let columns: Vec<i64> = (0..rank).map(|j| j * num_experts + expert).collect();
            b.index_select(1, &Tensor::from_slice(&columns)).matmul(&rows) * (5.0 / 3.0)
        };
        Tensor::stack(&(0..num_experts).map(of_expert).collect::<Vec<_>>(), 0)
    }
}

fn tensors_of(folder: &Path) -> NamedTensors {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let mut all = NamedTensors::new();
    for file in &checkpoint.files {
        for (name, tensor) in read_safetensors(&file.path).unwrap().iter() {
            all = all.with(name, tensor.shallow_clone());
        }
    }
    all
}

fn names(tensors: &NamedTensors) -> Vec<&str> {
    let mut names: Vec<_> = tensors.iter().map(|(name, _)| name).collect();
    names.sort_unstable();
    names
}

/// A linear in two blocks, a router, a norm, and experts that are dealt over two blocks; the down projection
/// in `down`, like the up projection.
fn table(published: ExpertLayout, down: &[usize; 3]) -> WeightTable {
    let up = match published {
        ExpertLayout::InOut => [EXPERTS, HIDDEN, 2 * INTER],
        ExpertLayout::OutIn => [EXPERTS, 2 * INTER, HIDDEN],
    };
    let mut table = WeightTable::new(Dtype::BF16);
    let shared = || row("q.weight", "q.weight", Role::Linear, &[INTER, HIDDEN]);
    let first = [
        shared(),
        row("norm.weight", "norm.weight", Role::NormScale, &[HIDDEN]),
        row("mlp.gate.weight", "mlp.gate.weight", Role::Router, &[EXPERTS, HIDDEN]),
    ];
    table.add(BlockPlan::new("first", Placement::Streamed, Some(0)), 0, &first);
    for group in 0..2 {
        let rows = [
            row("mlp.experts.up", "mlp.experts.up", Role::Experts(published), &up),
            row("mlp.experts.down", "mlp.experts.down", Role::Experts(published), down),
        ];
        let rows = rows.map(|row| row.part(2 * group..2 * group + 2));
        table.add(BlockPlan::new("experts {n}", Placement::Streamed, Some(0)), group, &rows);
    }
    table.add(BlockPlan::new("last", Placement::Streamed, Some(1)), 0, &[shared()]);
    table
}

const DENSE: [&[&str]; 2] = [&["q"], &["mlp.gate.weight", "mlp.experts.up", "mlp.experts.down"]];

fn dense(layout: ExpertLayout, kind: Kind) -> Fixture {
    let (e, h, m) = (EXPERTS, HIDDEN, INTER);
    let (up, down) = match layout {
        ExpertLayout::InOut => ([e, h, 2 * m], [e, m, h]),
        ExpertLayout::OutIn => ([e, 2 * m, h], [e, h, m]),
    };
    let tensor = |seed, shape: &[usize]| values(seed, &size(shape)).to_kind(kind);
    let tensors = NamedTensors::new()
        .with("q.weight", tensor(1, &[m, h]))
        .with("norm.weight", tensor(2, &[h]))
        .with("mlp.gate.weight", tensor(3, &[e, h]))
        .with("mlp.experts.up", tensor(4, &up))
        .with("mlp.experts.down", tensor(5, &down));
    Fixture::new(table(layout, &down), &tensors, DENSE)
}

#[test]
fn every_kind_of_site_changes_once_by_its_product_in_both_layouts_and_every_dtype() {
    for layout in [ExpertLayout::InOut, ExpertLayout::OutIn] {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            let fixture = dense(layout, kind);
            let merged = fixture.merge(|_| {}).unwrap();
            assert_eq!((merged.num_changed, merged.num_tensors, merged.num_files), (4, 5, 1));
            assert_eq!(merged.packed_experts, None);
            let (before, after) = (tensors_of(&fixture.checkpoint.directory), fixture.merged());
            assert_eq!(names(&after), names(&before));
            for (name, key, num_experts) in [
                ("q.weight", "q", 1),
                ("mlp.gate.weight", "mlp.gate", 1),
                ("mlp.experts.up", "mlp.experts.base_layer", 4),
                ("mlp.experts.down", "mlp.experts", 4),
            ] {
                let (before, after) = (before.get(name).unwrap(), after.get(name).unwrap());
                let change = fixture.change(key, num_experts);
                let change = match (num_experts, layout) {
                    (1, _) => change.squeeze_dim(0),
                    (_, ExpertLayout::InOut) => change.transpose(1, 2),
                    (_, ExpertLayout::OutIn) => change,
                };
                let wanted = before.to_kind(Kind::Float) + change;
                let error = (after.to_kind(Kind::Float) - &wanted).abs().max().double_value(&[]);
                // Half a step of the dtype at the largest value, and the order of a sum of three.
                let step = match kind {
                    Kind::BFloat16 => 2.0_f64.powi(-9),
                    Kind::Half => 2.0_f64.powi(-12),
                    _ => 2.0_f64.powi(-23),
                };
                let bound = step * 2.0 * wanted.abs().max().double_value(&[]);
                assert!(error <= bound, "{name} {kind:?} {layout:?}: {error} > {bound}");
                assert_eq!(after.kind(), kind, "{name}");
            }
            assert_eq!(after.get("norm.weight").unwrap(), before.get("norm.weight").unwrap());
        }
    }
}

#[test]
fn pieces_and_files_of_any_size_hold_the_same_bits() {
    let fixture = dense(ExpertLayout::InOut, Kind::BFloat16);
    fixture.merge(|_| {}).unwrap();
    let whole = fixture.merged();
    for (piece_bytes, max_file_bytes, num_files) in [(1, 10_000, 3), (40_000, 1, 5)] {
        let merged = fixture.merge(|options| {
            options.piece_bytes = piece_bytes;
            options.max_file_bytes = max_file_bytes;
        });
        assert_eq!(merged.unwrap().num_files, num_files);
        for (name, tensor) in fixture.merged().iter() {
            assert_eq!(tensor, whole.get(name).unwrap(), "{name}");
        }
    }
    let index = std::fs::read_to_string(fixture.out().join("model.safetensors.index.json"));
    assert!(index.unwrap().contains("model-00005-of-00005.safetensors"));
    let config = |folder: &Path| std::fs::read(folder.join("config.json")).unwrap();
    assert_eq!(config(&fixture.out()), config(&fixture.checkpoint.directory));
    let tokenizer = std::fs::read_to_string(fixture.out().join("tokenizer.json"));
    assert_eq!(tokenizer.unwrap(), "tokens");
}

#[test]
fn progress_ends_with_every_byte_written() {
    let fixture = dense(ExpertLayout::InOut, Kind::Half);
    let mut seen = Vec::new();
    let mut options = MergeOptions::new(fixture.out());
    options.piece_bytes = 1000;
    let merged = merge(fixture.inputs(), &options, &mut |progress| {
        seen.push((progress.tensor.to_owned(), progress.done_bytes, progress.total_bytes));
    })
    .unwrap();
    assert!(seen.is_sorted_by_key(|entry| entry.1));
    let (first, last) = (seen.first().unwrap(), seen.last().unwrap());
    assert_eq!((first.1, last.1, last.2), (0, merged.num_bytes, merged.num_bytes));
    assert!(seen.iter().any(|entry| entry.0 == "mlp.experts.up"));
}
