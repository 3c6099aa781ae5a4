//! The loss: the mean over the targets of the whole step, in chunks of any size.

use blockstreamer_core::batch::Batch;
use blockstreamer_core::execute::{Executor, Gradients, StepOptions};
use blockstreamer_tests::{AllResident, ToyModel};
use tch::Kind;

use crate::rig::{assert_close, batch, device, executor, options, probe, ram, values};

/// Two micro-batches of one step with different numbers of targets: 2 and 10.
fn batches() -> [Batch; 2] {
    [batch(6, 5, 1), batch(6, 1, 4)]
}

fn trainer(loss_chunk_bytes: usize) -> Executor {
    let model = ToyModel::equal(3);
    let mut options = options(Kind::Float, 1);
    options.loss_chunk_bytes = loss_chunk_bytes;
    executor(&model, ram(&model), Some(Box::new(probe(&[1, 2, 3], 0.0))), options)
}

#[test]
fn the_loss_is_the_mean_over_all_targets_of_the_step() {
    let model = ToyModel::equal(3);
    let adapter = probe(&[1, 2, 3], 0.0);
    let resident = AllResident::new(&model, Some(&adapter), Kind::Float, device());
    let wanted = resident.loss(&batches(), None).unwrap().double_value(&[]);
    let alone: Vec<f64> = batches()
        .into_iter()
        .map(|batch| resident.loss(&[batch], None).unwrap().double_value(&[]))
        .collect();
    assert!((wanted - (alone[0] + alone[1]) / 2.0).abs() > 1e-3, "the test would prove nothing");
    assert!((wanted - (2.0 * alone[0] + 10.0 * alone[1]) / 12.0).abs() < 1e-5);

    let executor = trainer(1 << 20);
    let options = StepOptions::default();
    let trained = executor.train_step(&batches(), options, &mut Gradients::new()).unwrap();
    let evaluated = executor.evaluate(&batches()).unwrap();
    for loss in [trained, evaluated] {
        assert_eq!((loss.num_targets, loss.num_tokens), (12, 24));
        let value = executor.loss_value(&loss).unwrap();
        assert!((value - wanted).abs() < 1e-5, "{value} {wanted}");
    }
}

#[test]
fn chunks_of_any_size_give_the_loss_and_the_gradients_of_one() {
    let run = |loss_chunk_bytes| {
        let executor = trainer(loss_chunk_bytes);
        let mut gradients = Gradients::new();
        let loss = executor.train_step(&batches(), StepOptions::default(), &mut gradients).unwrap();
        let evaluated = executor.evaluate(&batches()).unwrap();
        let values = values(&gradients, executor.adapter().unwrap());
        (executor.loss_value(&loss).unwrap(), executor.loss_value(&evaluated).unwrap(), values)
    };
    let (loss, evaluated, gradients) = run(1 << 20);
    // No bytes at all: one row at a time. 11 tokens of 4 bytes: 3 rows, then a shorter last chunk.
    for loss_chunk_bytes in [0, 1, 3 * 44, 4 * 44 + 1] {
        let chunked = run(loss_chunk_bytes);
        assert!((chunked.0 - loss).abs() < 1e-6 && (chunked.1 - evaluated).abs() < 1e-6);
        assert_close(&chunked.2, &gradients, 1e-5);
    }
}

#[test]
fn a_micro_batch_without_targets_adds_nothing_to_a_step_that_has_some() {
    let executor = trainer(1 << 20);
    let run = |batches: &[Batch]| {
        let mut gradients = Gradients::new();
        let loss = executor.train_step(batches, StepOptions::default(), &mut gradients).unwrap();
        (executor.loss_value(&loss).unwrap(), values(&gradients, executor.adapter().unwrap()))
    };
    let (alone, gradients) = run(&[batch(6, 1, 4)]);
    let (both, same) = run(&[batch(6, 1, 4), batch(6, 6, 9)]);
    assert!((alone - both).abs() < 1e-7);
    assert_close(&same, &gradients, 1e-6);
}

#[test]
fn evaluation_has_no_dropout() {
    let model = ToyModel::equal(3);
    let evaluate = |probability| {
        let adapter = Box::new(probe(&[0, 1, 2], probability));
        let executor = executor(&model, ram(&model), Some(adapter), options(Kind::Float, 1));
        let loss = executor.evaluate(&batches()).unwrap();
        executor.loss_value(&loss).unwrap()
    };
    assert_eq!(evaluate(0.0), evaluate(0.7));
}
