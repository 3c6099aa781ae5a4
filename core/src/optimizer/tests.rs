use std::path::{Path, PathBuf};

use serde_json::Value;
use tch::{Device, Tensor};

use super::*;

const RATE: f64 = 3e-3;

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens/optimizers")
}

fn golden_tensors() -> NamedTensors {
    Tensor::read_safetensors(goldens().join("optimizers.safetensors"))
        .unwrap()
        .into_iter()
        .collect()
}

/// Leaves as adapters have them.
fn leaf(tensor: &Tensor) -> Tensor {
    tensor.copy().set_requires_grad(true)
}

fn step(optimizer: &mut dyn Optimizer, value: &Tensor, gradient: &Tensor, rate: f64) {
    optimizer.step(&[Parameter { name: "w", value, gradient }], rate).unwrap();
}

/// Largest difference, relative to 1 or the value, whichever is larger.
fn difference(found: &Tensor, expected: &Tensor) -> f64 {
    ((found - expected).abs() / expected.abs().clamp_min(1.0)).max().double_value(&[])
}

fn all() -> Vec<(&'static str, &'static str, OptimizerOptions)> {
    let none = OptimizerOptions::default();
    let decay = |weight_decay| OptimizerOptions { weight_decay: Some(weight_decay), ..none };
    let heavy = OptimizerOptions { betas: Some((0.8, 0.95)), eps: Some(1e-6), ..decay(0.3) };
    let momentum = OptimizerOptions { momentum: Some(0.9), ..decay(0.1) };
    let nesterov = OptimizerOptions { nesterov: Some(true), ..momentum };
    vec![
        ("adamw", "adamw", none),
        ("adamw_heavy", "adamw", heavy),
        ("adam", "adam", none),
        ("adam_decay", "adam", decay(0.1)),
        ("sgd", "sgd", none),
        ("sgd_decay", "sgd", decay(0.1)),
        ("sgd_momentum", "sgd", momentum),
        ("sgd_nesterov", "sgd", nesterov),
    ]
}

#[test]
fn twenty_steps_follow_torch_optim() {
    let golden = golden_tensors();
    for (case, name, options) in all() {
        let mut optimizer = by_name(name, options).unwrap();
        let value = leaf(golden.get("start").unwrap());
        for index in 0..20 {
            let gradient = golden.get(&format!("gradient.{index}")).unwrap();
            let rate = RATE * (1 + index % 3) as f64;
            step(&mut *optimizer, &value, gradient, rate);
            let expected = golden.get(&format!("{case}.{index}")).unwrap();
            let error = difference(&value, expected);
            // 20 roundings of 6e-8 each; libtorch fuses multiply and add where tch cannot ask for it.
            assert!(error < 2e-6, "{case}, step {index}: {error}");
        }
        assert!(value.requires_grad() && value.is_leaf() && !value.grad().defined());
        let moved = difference(&value, golden.get("start").unwrap());
        assert!(moved > 1e-2, "{case} moved by {moved} only");
    }
}

#[test]
fn each_parameter_counts_its_own_steps() {
    let golden = golden_tensors();
    let start = golden.get("start").unwrap();
    let gradient = |index| golden.get(&format!("gradient.{index}")).unwrap();
    let mut together = by_name("adamw", OptimizerOptions::default()).unwrap();
    let (early, late) = (leaf(start), leaf(start));
    for index in 0..4 {
        let both = [("early", &early), ("late", &late)].map(|(name, value)| Parameter {
            name,
            value,
            gradient: gradient(index),
        });
        // `late` joins at the third step.
        together.step(&both[..if index < 2 { 1 } else { 2 }], RATE).unwrap();
    }
    let mut alone = by_name("adamw", OptimizerOptions::default()).unwrap();
    let value = leaf(start);
    for index in 2..4 {
        step(&mut *alone, &value, gradient(index), RATE);
    }
    assert_eq!(late, value);
    let state = together.state();
    assert_eq!((state.counters["early.step"], state.counters["late.step"]), (4, 2));
}

#[test]
fn a_restored_optimizer_continues_bit_for_bit_and_shares_nothing() {
    let golden = golden_tensors();
    for (case, name, options) in all() {
        let value = leaf(golden.get("start").unwrap());
        let mut first = by_name(name, options).unwrap();
        let gradient = |index| golden.get(&format!("gradient.{index}")).unwrap();
        (0..7).for_each(|index| step(&mut *first, &value, gradient(index), RATE));
        let saved_value = leaf(&value);
        let mut second = by_name(name, options).unwrap();
        second.restore(first.state()).unwrap();
        for index in 7..12 {
            step(&mut *first, &value, gradient(index), RATE);
        }
        for index in 7..12 {
            step(&mut *second, &saved_value, gradient(index), RATE);
        }
        assert_eq!(value, saved_value, "{case}");
        let (one, two) = (first.state(), second.state());
        assert_eq!(one.counters, two.counters, "{case}");
        assert_eq!(one.tensors.len(), two.tensors.len());
        for (a, b) in one.tensors.iter().zip(two.tensors.iter()) {
            assert_eq!(a, b, "{case}");
        }
    }
}

#[test]
fn a_state_of_another_optimizer_or_with_holes_is_refused_and_changes_nothing() {
    let golden = golden_tensors();
    let made = |name, momentum| {
        let options = OptimizerOptions { momentum, ..Default::default() };
        let mut optimizer = by_name(name, options).unwrap();
        let gradient = golden.get("gradient.0").unwrap();
        step(&mut *optimizer, &leaf(golden.get("start").unwrap()), gradient, RATE);
        optimizer
    };
    let mut adam = made("adam", None);
    let mut sgd = made("sgd", Some(0.9));
    let refused = |result: Result<()>, key: &str| {
        let message = result.unwrap_err().to_string();
        assert!(message.contains("does not belong to") && message.contains(key), "{message}");
    };
    refused(adam.restore(sgd.state()), "'w.momentum_buffer'");
    refused(sgd.restore(made("adam", None).state()), "'w.step'");
    refused(made("sgd", None).restore(sgd.state()), "'w.momentum_buffer'");
    let mut holed = adam.state();
    let _ = holed.tensors.take("w.exp_avg_sq").unwrap();
    refused(adam.restore(holed), "'w.exp_avg_sq'");
    let mut uncounted = adam.state();
    uncounted.counters.clear();
    refused(adam.restore(uncounted), "'w.exp_avg'");
    let mut half = adam.state();
    half.tensors.insert("w.exp_avg", half.tensors.get("w.exp_avg").unwrap().to_kind(Kind::Half));
    refused(adam.restore(half), "'w.exp_avg'");
    assert_eq!((adam.state().counters["w.step"], sgd.state().tensors.len()), (1, 1));
}

#[test]
fn tensors_that_do_not_fit_are_refused_before_anything_is_updated() {
    let ones = |size: &[i64], kind| Tensor::ones(size, (kind, Device::Cpu));
    let (good, value) = (leaf(&ones(&[2, 3], Kind::Float)), leaf(&ones(&[2, 3], Kind::Float)));
    for name in ["adamw", "sgd"] {
        let mut optimizer = by_name(name, OptimizerOptions::default()).unwrap();
        for (gradient, expected) in [
            (ones(&[3], Kind::Float), "its gradient [3]"),
            (ones(&[2, 3], Kind::Half), "the gradient is Half; it must be fp32"),
        ] {
            let fitting = ones(&[2, 3], Kind::Float);
            let parameters = [
                Parameter { name: "good", value: &good, gradient: &fitting },
                Parameter { name: "bad", value: &value, gradient: &gradient },
            ];
            let message = optimizer.step(&parameters, RATE).unwrap_err().to_string();
            assert!(message.contains("'bad'") && message.contains(expected), "{message}");
            assert_eq!(good, ones(&[2, 3], Kind::Float));
        }
    }
}

#[test]
fn names_and_settings_are_checked() {
    let none = OptimizerOptions::default();
    let refused = |name: &str, options: OptimizerOptions, expected: &str| {
        let message = by_name(name, options).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    };
    refused("lion", none, "'lion' is not known; there are: adamw, adam, sgd");
    let momentum = |momentum| OptimizerOptions { momentum: Some(momentum), ..none };
    refused("adamw", momentum(0.9), "'adamw' has no setting 'momentum'");
    refused("sgd", OptimizerOptions { eps: Some(1e-8), ..none }, "'sgd' has no setting 'eps'");
    refused("sgd", OptimizerOptions { nesterov: Some(true), ..none }, "nesterov needs a momentum");
    refused("sgd", momentum(-1.0), "momentum must be a number of at least 0, not -1");
    let betas = |beta1, beta2| OptimizerOptions { betas: Some((beta1, beta2)), ..none };
    refused("adam", betas(1.0, 0.9), "beta1 must be at least 0 and less than 1, not 1");
    refused("adam", betas(0.9, f64::NAN), "beta2 must be");
    refused("adam", OptimizerOptions { eps: Some(-1e-8), ..none }, "eps must be");
    let decay = OptimizerOptions { weight_decay: Some(f64::INFINITY), ..none };
    refused("adamw", decay, "weight_decay must be");
    let unknown = serde_json::from_str::<OptimizerOptions>(r#"{"beta": 1}"#).unwrap_err();
    assert!(unknown.to_string().contains("unknown field `beta`"), "{unknown}");
}

#[test]
fn a_learning_rate_of_zero_moves_nothing_but_counts() {
    let golden = golden_tensors();
    for name in ["adamw", "adam", "sgd"] {
        let mut optimizer = by_name(name, OptimizerOptions::default()).unwrap();
        let value = leaf(golden.get("start").unwrap());
        step(&mut *optimizer, &value, golden.get("gradient.0").unwrap(), 0.0);
        assert_eq!(&value, golden.get("start").unwrap());
        assert_eq!(optimizer.state().counters.len(), usize::from(name != "sgd"));
    }
}

#[test]
fn clipping_follows_torch() {
    let golden = golden_tensors();
    for (max_norm, label) in [(0.5, "0.5"), (1e6, "1e+06"), (f64::INFINITY, "1e+06")] {
        let gradients: Vec<_> =
            (0..3).map(|i| golden.get(&format!("gradient.{i}")).unwrap().copy()).collect();
        let norm = clip_gradient_norm(&gradients, max_norm).unwrap();
        let expected = golden.get(&format!("clip.{label}.norm")).unwrap();
        assert!(difference(&norm.reshape([1]), expected) < 1e-6);
        for (index, gradient) in gradients.iter().enumerate() {
            let expected = golden.get(&format!("clip.{label}.{index}")).unwrap();
            assert!(difference(gradient, expected) < 1e-6, "{label}: {index}");
        }
    }
    assert_eq!(clip_gradient_norm(&[], 1.0).unwrap().double_value(&[]), 0.0);
    for max_norm in [0.0, -1.0, f64::NAN] {
        let message = clip_gradient_norm(&[], max_norm).unwrap_err().to_string();
        assert!(message.contains("must be greater than 0"), "{message}");
    }
}

#[test]
fn schedules_follow_transformers() {
    let text = std::fs::read_to_string(goldens().join("schedules.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert_eq!(cases.len(), 15);
    for case in cases {
        let decay = case["decay"].as_str().unwrap().parse::<Decay>().unwrap();
        assert_eq!(decay.to_string(), case["decay"]);
        let schedule = Schedule {
            learning_rate: 2e-4,
            decay,
            warmup_steps: case["warmup_steps"].as_u64().unwrap(),
            total_steps: case["total_steps"].as_u64().unwrap(),
        };
        for (step, factor) in case["factors"].as_array().unwrap().iter().enumerate() {
            let (found, expected) = (schedule.at(step as u64), 2e-4 * factor.as_f64().unwrap());
            assert!((found - expected).abs() < 1e-18, "{schedule:?} at {step}: {found} {expected}");
        }
    }
    let message = "step".parse::<Decay>().unwrap_err().to_string();
    assert_eq!(message, "schedule 'step' is not known; there are: constant, linear, cosine");
}
