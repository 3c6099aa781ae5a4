//! Layers with experts: routing, and experts dealt over several blocks.

use blockstreamer_core::batch::Batch;
use blockstreamer_core::family::{ModelFamily, ModelOptions};
use blockstreamer_core::numerics::AttentionKernel;
use blockstreamer_core::state::{HIDDEN, NamedTensors};
use blockstreamer_core::tch::{Kind, Tensor};
use blockstreamer_qwen3_vl::Qwen3Vl;

use crate::harness::{Resident, batch, config, read};

const VARIANT: &str = "qwen3_vl_moe";

fn golden_batch() -> Batch {
    batch(&read(VARIANT, "golden_fp32.safetensors"))
}

#[test]
fn experts_in_one_block_and_in_several_give_the_same_bits() {
    let batch = golden_batch();
    for kind in [Kind::Float, Kind::BFloat16] {
        let run = |groups| {
            let resident = Resident::with_config(VARIANT, &config(VARIANT), groups);
            resident.run(&batch, AttentionKernel::Eager, kind, None)
        };
        let whole = run(1);
        for groups in [2, 4, 8] {
            let split = run(groups);
            // Layer 1 is dense.
            assert_eq!(split.states.len(), whole.states.len() + 3 * (groups - 1));
            assert!(split.logits.equal(&whole.logits), "{groups} groups, {kind:?}");
        }
    }
}

/// The router by definition, from what it hands to the experts.
#[test]
fn every_token_goes_to_its_most_probable_experts_with_weights_that_add_up_to_one() {
    let resident = Resident::load(VARIANT);
    let out = resident.run(&golden_batch(), AttentionKernel::Eager, Kind::Float, None);
    let routers = out
        .states
        .iter()
        .filter(|(plan, _)| ["layers.0", "layers.2", "layers.3"].contains(&&*plan.name));
    let mut compared = 0;
    for (plan, state) in routers {
        let name = format!("model.language_model.{}.mlp.gate.weight", plan.name);
        let files =
            (1..=3).map(|part| read(VARIANT, &format!("model-0000{part}-of-00003.safetensors")));
        let gate =
            files.flat_map(|file| file.find(&name).map(Tensor::shallow_clone)).next().unwrap();
        let logits = state.get("routed.input").unwrap().matmul(&gate.to_kind(Kind::Float).tr());
        let experts =
            Vec::<i64>::try_from(state.get("routed.experts").unwrap().flatten(0, -1)).unwrap();
        let weights =
            Vec::<f32>::try_from(state.get("routed.weights").unwrap().flatten(0, -1)).unwrap();
        let logits = Vec::<Vec<f64>>::try_from(logits.flatten(0, 1).to_kind(Kind::Double)).unwrap();
        for (token, logits) in logits.iter().enumerate() {
            let mut order: Vec<usize> = (0..8).collect();
            order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
            let chosen = [experts[token * 2] as usize, experts[token * 2 + 1] as usize];
            assert_eq!(chosen, order[..2], "{} token {token}", plan.name);
            // Of two experts only the difference of the logits matters.
            let first = 1.0 / (1.0 + (logits[order[1]] - logits[order[0]]).exp());
            assert!((f64::from(weights[token * 2]) - first).abs() < 1e-5);
            assert!((weights[token * 2] + weights[token * 2 + 1] - 1.0).abs() < 1e-6);
            compared += 1;
        }
    }
    assert_eq!(compared, 3 * 47);
}

#[test]
fn what_is_handed_on_inside_a_layer_is_gone_after_it() {
    let resident = Resident::with_config(VARIANT, &config(VARIANT), 4);
    let out = resident.run(&golden_batch(), AttentionKernel::Eager, Kind::Float, None);
    let names = |state: &NamedTensors| -> Vec<String> {
        let mut names: Vec<_> = state.iter().map(|(name, _)| name.to_owned()).collect();
        names.sort();
        names
    };
    let after =
        |block: &str| names(&out.states.iter().find(|(plan, _)| plan.name == block).unwrap().1);
    let inside =
        ["deepstack.0", "deepstack.1", HIDDEN, "routed.experts", "routed.input", "routed.weights"];
    assert_eq!(after("layers.0"), inside);
    assert!(after("layers.0.experts.0").contains(&"routed.sum".to_owned()));
    assert_eq!(after("layers.0.experts.3"), ["deepstack.0", "deepstack.1", HIDDEN]);
    assert_eq!(after("layers.1"), ["deepstack.1", HIDDEN]);
    assert_eq!(after("layers.3.experts.3"), [HIDDEN]);
}

#[test]
fn groups_that_do_not_divide_the_experts_are_refused_with_those_that_do() {
    let open = |num_expert_groups| {
        let options = ModelOptions { num_expert_groups, ..ModelOptions::default() };
        Qwen3Vl.open(&config(VARIANT), &options)
    };
    for groups in [0, 3, 5, 16] {
        let error = open(groups).unwrap_err().to_string();
        let wanted = format!("8 experts of a layer cannot be dealt over {groups} blocks");
        assert!(error.contains(&wanted) && error.contains("1, 2, 4, 8"), "{error}");
    }
    assert_eq!(open(8).unwrap().dimensions().num_experts, 8);
    // A dense model has none to deal.
    let options = ModelOptions { num_expert_groups: 3, ..ModelOptions::default() };
    let dense = Qwen3Vl.open(&config("qwen3_vl"), &options).unwrap();
    assert_eq!(dense.dimensions().num_experts, 0);
    assert_eq!(dense.weights().unwrap().num_streamed(), 6 + 4);
}
