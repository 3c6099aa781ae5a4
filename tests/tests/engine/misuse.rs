//! The executor against callers' mistakes, and frozen tensors against gradients.

use std::sync::Arc;

use blockstreamer_core::Error;
use blockstreamer_core::batch::{Batch, IGNORE_LABEL};
use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::execute::{Executor, Gradients, StepOptions};
use blockstreamer_tests::{AllResident, ToyModel};
use tch::{Device, Kind, Tensor};

use crate::rig::{batch, device, executor, options, probe, ram, whole_blocks};
use crate::stumbling::Stumbling;

fn trainer() -> Executor {
    let model = ToyModel::equal(4);
    executor(&model, ram(&model), Some(Box::new(probe(&[1, 3], 0.0))), options(Kind::Float, 1))
}

fn train(executor: &Executor, batches: &[Batch]) -> blockstreamer_core::Result<f64> {
    let loss = executor.train_step(batches, StepOptions::default(), &mut Gradients::new())?;
    executor.loss_value(&loss)
}

fn assert_refused(executor: &Executor, batches: &[Batch], why: &str) {
    for error in [train(executor, batches).unwrap_err(), executor.evaluate(batches).unwrap_err()] {
        assert!(matches!(error, Error::Usage { .. }), "{error:?}");
        assert!(error.to_string().contains(why), "{error}");
    }
    assert!(train(executor, &[batch(4, 0, 1)]).unwrap().is_finite());
}

#[test]
fn steps_without_anything_to_learn_from_are_refused() {
    let executor = trainer();
    assert_refused(&executor, &[batch(5, 5, 1), batch(4, 4, 1)], "every label is -100");
    assert_refused(&executor, &[Batch { labels: None, ..batch(4, 0, 1) }], "without labels");
    assert_refused(&executor, &[], "every label");
    let short = Tensor::full([2, 3], IGNORE_LABEL, (Kind::Int64, Device::Cpu));
    assert_refused(&executor, &[Batch { labels: Some(short), ..batch(4, 0, 1) }], "[2, 3]");
    // Labels only at the first position: nothing comes before it.
    let batch = batch(4, 0, 1);
    let labels = batch.labels.as_ref().unwrap();
    let _ = labels.narrow(1, 1, 3).fill_(IGNORE_LABEL);
    assert_refused(&executor, &[batch], "every label");
}

#[test]
fn training_without_an_adapter_is_refused() {
    let model = ToyModel::equal(3);
    let executor = executor(&model, ram(&model), None, options(Kind::Float, 1));
    let error = train(&executor, &[batch(4, 0, 1)]).unwrap_err().to_string();
    assert!(error.contains("no adapter"), "{error}");
    assert!(executor.evaluate(&[batch(4, 0, 1)]).is_ok());
}

#[test]
fn other_passes_are_refused_while_a_step_is_announced() {
    let executor = trainer();
    let announce = || {
        let options = StepOptions { step: 0, another_follows: true, ..StepOptions::default() };
        executor.train_step(&[batch(4, 0, 1)], options, &mut Gradients::new()).unwrap()
    };
    announce();
    let error = executor.evaluate(&[batch(4, 0, 1)]).unwrap_err().to_string();
    assert!(error.contains("announced"), "{error}");
    executor.evaluate(&[batch(4, 0, 1)]).unwrap();
    announce();
    assert!(executor.logits(&batch(4, 0, 1), &mut |_, _| Ok(())).is_err());
    announce();
    train(&executor, &[batch(4, 0, 1)]).unwrap();
    executor.evaluate(&[batch(4, 0, 1)]).unwrap();
}

#[test]
fn a_pass_left_without_its_backward_or_visits_of_a_stranger_never_mix_up_blocks() {
    let executor = trainer();
    let wanted = train(&executor, &[batch(4, 0, 1)]).unwrap();
    let model = ToyModel::equal(4);
    let resident = AllResident::new(&model, None, Kind::Float, device());
    let input = || vec![resident.embed(&batch(4, 0, 1)).unwrap()];
    let pass = executor.forward_for_backward(input(), 0).unwrap();
    let error = train(&executor, &[batch(4, 0, 1)]).unwrap_err().to_string();
    assert!(error.contains("visits of an earlier pass"), "{error}");
    assert_eq!(train(&executor, &[batch(4, 0, 1)]).unwrap(), wanted);
    let gradients = vec![pass.outputs()[0].clone()];
    assert!(executor.backward(pass, gradients, 0, &mut Gradients::new()).is_err());

    executor.stream().schedule([BlockIndex(2)]).unwrap();
    assert!(train(&executor, &[batch(4, 0, 1)]).is_err());
    assert_eq!(train(&executor, &[batch(4, 0, 1)]).unwrap(), wanted);
}

#[test]
fn an_executor_over_a_closed_engine_says_so() {
    let executor = trainer();
    executor.stream().close().unwrap();
    for error in [
        train(&executor, &[batch(4, 0, 1)]).unwrap_err(),
        executor.evaluate(&[batch(4, 0, 1)]).unwrap_err(),
        executor.logits(&batch(4, 0, 1), &mut |_, _| Ok(())).unwrap_err(),
    ] {
        assert!(error.to_string().contains("closed"), "{error}");
    }
}

#[test]
fn a_compute_dtype_of_integers_is_refused() {
    let model = ToyModel::equal(3);
    let error = Executor::new(Box::new(model.clone()), ram(&model), None, options(Kind::Int64, 1))
        .unwrap_err();
    assert!(error.to_string().contains("Int64"), "{error}");
}

#[test]
fn no_gradient_reaches_a_frozen_tensor() {
    let model = Stumbling::default();
    let frozen = Arc::clone(&model.frozen);
    let adapter = Box::new(probe(&[0, 3, 6, 9, 10], 0.1));
    let source = ram(&model.inner);
    let executor = Executor::new(Box::new(model), source, Some(adapter), whole_blocks(2)).unwrap();
    train(&executor, &[batch(5, 1, 1), batch(4, 0, 2)]).unwrap();
    let frozen = frozen.lock().unwrap();
    assert!(frozen.len() > 50);
    for tensor in frozen.iter() {
        assert!(!tensor.requires_grad() && !tensor.grad().defined());
    }
}
