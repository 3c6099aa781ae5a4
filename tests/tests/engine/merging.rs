//! Merging on a GPU gives what merging on the CPU gives.

use std::path::Path;

use blockstreamer_core::adapter::{Adapter, Lora, LoraOptions, ModuleRule};
use blockstreamer_core::block::Placement;
use blockstreamer_core::checkpoint::{Checkpoint, Layout, read_safetensors, write_safetensors};
use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::merge::{
    MergeInputs, MergeOptions, Merged, PackedExperts, PackingLoss, merge,
};
use blockstreamer_core::numerics::Mxfp4;
use blockstreamer_core::state::NamedTensors;
use blockstreamer_core::weights::{BlockPlan, ExpertLayout, Role, WeightTable, row};
use tch::{Device, Kind, Tensor};

use crate::rig::device;

const EXPERTS: usize = 3;
const INNER: usize = 64;
const OUTER: usize = 96;

/// Values that depend on nothing but position and seed, within [-1, 1).
fn values(seed: i64, size: &[usize]) -> Tensor {
    let numel: usize = size.iter().product();
    let number = |i: i64| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0;
    let size: Vec<_> = size.iter().map(|extent| *extent as i64).collect();
    Tensor::from_slice(&(0..numel as i64).map(number).collect::<Vec<_>>()).reshape(size)
}

fn table() -> WeightTable {
    let (e, i, o) = (EXPERTS, INNER, OUTER);
    let mut table = WeightTable::new(Dtype::BF16);
    let rows = [
        row("q.weight", "q.weight", Role::Linear, &[o, i]),
        row("mlp.up", "mlp.up", Role::Experts(ExpertLayout::InOut), &[e, i, o]),
        row("mlp.down_blocks", "mlp.down_blocks", Role::Mxfp4Blocks, &[e, o, i / 32, 16]),
        row("mlp.down_scales", "mlp.down_scales", Role::Mxfp4Scales, &[e, o, i / 32]),
    ];
    table.add(BlockPlan::new("layer", Placement::Streamed, Some(0)), 0, &rows);
    table
}

/// Merges the model in `model` on `device`, in pieces of one expert.
fn merged(
    model: &Path,
    out: &Path,
    device: Device,
    experts: PackedExperts,
) -> (Merged, NamedTensors) {
    let (table, checkpoint) = (table(), Checkpoint::open(model).unwrap());
    let layout = Layout::new(&checkpoint, &table, None, |_| Ok(false)).unwrap();
    let sites = table.sites();
    let options = LoraOptions {
        target_modules: ModuleRule::names(["q"]),
        target_parameters: vec!["mlp.up".into(), "mlp.down".into()],
        ..LoraOptions::default()
    };
    let lora = Lora::new(&sites, &options, device).unwrap();
    let _guard = tch::no_grad_guard();
    for (seed, trainable) in lora.trainables().iter().enumerate() {
        let size: Vec<_> = trainable.tensor.size().iter().map(|extent| *extent as usize).collect();
        trainable.tensor.shallow_clone().copy_(&(values(seed as i64, &size) * 0.2));
    }
    let inputs = MergeInputs {
        checkpoint: &checkpoint,
        table: &table,
        layout: &layout,
        sites: &sites,
        adapter: &lora,
    };
    let options = MergeOptions {
        packed_experts: Some(experts),
        device,
        piece_bytes: 1,
        ..MergeOptions::new(out)
    };
    let report = merge(inputs, &options, &mut |_| {}).unwrap();
    (report, read_safetensors(&out.join("model.safetensors")).unwrap())
}

#[test]
fn merging_on_a_gpu_gives_the_weights_that_the_cpu_gives() {
    if !device().is_cuda() {
        println!("skipped: BLOCKSTREAMER_TEST_DEVICE is not cuda");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    std::fs::create_dir(&model).unwrap();
    std::fs::write(model.join("config.json"), "{}").unwrap();
    let down = Mxfp4::pack(&values(3, &[EXPERTS, OUTER, INNER])).unwrap();
    let tensors = NamedTensors::new()
        .with("q.weight", values(1, &[OUTER, INNER]).to_kind(Kind::BFloat16))
        .with("mlp.up", values(2, &[EXPERTS, INNER, OUTER]).to_kind(Kind::BFloat16))
        .with("mlp.down_blocks", down.blocks().shallow_clone())
        .with("mlp.down_scales", down.scales().shallow_clone());
    write_safetensors(&model.join("model.safetensors"), &tensors, &[]).unwrap();
    for experts in [PackedExperts::Bf16, PackedExperts::Mxfp4] {
        let run = |device, name: &str| merged(&model, &folder.path().join(name), device, experts);
        let (wanted_report, wanted) = run(Device::Cpu, "cpu");
        let (report, found) = run(device(), "cuda");
        assert_eq!((report.num_changed, report.num_bytes), (3, wanted_report.num_bytes));
        assert_eq!(found.iter().count(), wanted.iter().count());
        for (name, wanted) in wanted.iter() {
            let found = found.get(name).unwrap();
            assert_eq!((found.kind(), found.size()), (wanted.kind(), wanted.size()), "{name}");
            // The scales of packed experts need not.
            let is_scales = name.ends_with("_scales");
            assert!(is_scales || Some(found) != tensors.find(name), "{name} has not changed");
            // A sum of another order may fall on the other side of a rounding, seldom.
            let apart = found.ne_tensor(wanted).to_kind(Kind::Double).mean(Kind::Double);
            assert!(apart.double_value(&[]) < 5e-3, "{name}: {}", apart.double_value(&[]));
            if wanted.kind() == Kind::BFloat16 {
                let (found, wanted) = (found.to_kind(Kind::Double), wanted.to_kind(Kind::Double));
                let error = (found - &wanted).abs() - wanted.abs() / 128.0;
                assert!(error.max().double_value(&[]) <= 1e-6, "{name}");
            }
        }
        let totals = [&report, &wanted_report].map(|report| PackingLoss::total(&report.losses));
        assert_eq!(totals[0].is_some(), experts == PackedExperts::Mxfp4);
        if let [Some(found), Some(wanted)] = totals {
            assert!((found.relative_error() / wanted.relative_error() - 1.0).abs() < 1e-2);
            assert!((found.change_kept() - wanted.change_kept()).abs() < 1e-2);
        }
    }
}
