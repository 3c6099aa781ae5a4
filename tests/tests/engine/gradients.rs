//! Gradients of trainables, against plain autograd through one graph of the whole model.

use std::sync::Arc;

use blockstreamer_core::adapter::Adapter;
use blockstreamer_core::batch::Batch;
use blockstreamer_core::execute::{Gradients, StepOptions};
use blockstreamer_tests::{AllResident, Part, ToyModel};
use tch::{Kind, Tensor};

use crate::rig::{
    Disk, SeedLog, assert_close, assert_same_bits, autograd_values, batch, device, executor,
    options, probe, ram, values,
};

type Named = Vec<(String, Tensor)>;

/// One training step at a depth: loss, gradients, and the dropout seeds `[block][micro-batch]`.
fn step(
    model: &ToyModel,
    trained: &[usize],
    probability: f64,
    batches: &[Batch],
    kind: Kind,
    prefetch_ahead: usize,
) -> (f64, Named, impl Fn(usize, usize) -> u64) {
    let adapter = SeedLog::new(probe(trained, probability));
    let seeds = Arc::clone(&adapter.seeds);
    let executor =
        executor(model, Disk::new(model), Some(Box::new(adapter)), options(kind, prefetch_ahead));
    let mut gradients = Gradients::new();
    let loss = executor.train_step(batches, StepOptions::default(), &mut gradients).unwrap();
    let values = values(&gradients, executor.adapter().unwrap());
    let seeds = seeds.lock().unwrap().clone();
    // One seed per micro-batch, although every trained block ran twice: the recompute saw the same.
    assert!(seeds.values().all(|of_block| of_block.len() == batches.len()), "{seeds:?}");
    let seed = move |block: usize, micro_batch: usize| {
        seeds.get(&block).map_or(0, |of_block| of_block[micro_batch])
    };
    (executor.loss_value(&loss).unwrap(), values, seed)
}

fn check(model: &ToyModel, trained: &[usize], probability: f64, kind: Kind, error: f64) {
    let batches = [batch(6, 2, 1), batch(4, 0, 8)];
    let (loss, gradients, seeds) = step(model, trained, probability, &batches, kind, 0);
    let wanted = probe(trained, probability);
    let resident = AllResident::new(model, Some(&wanted), kind, device());
    let wanted_loss = resident.loss(&batches, Some(&seeds)).unwrap();
    wanted_loss.backward();
    let wanted_loss = wanted_loss.double_value(&[]);
    assert!((loss - wanted_loss).abs() <= error * wanted_loss, "{loss} {wanted_loss}");
    let autograd = autograd_values(&wanted);
    assert!(!autograd.iter().any(|(name, _)| name == "unused"));
    assert_close(&gradients, &autograd, error);
    for prefetch_ahead in 1..=5 {
        let (again, same, _) = step(model, trained, probability, &batches, kind, prefetch_ahead);
        assert_eq!(again, loss);
        assert_same_bits(&same, &gradients);
    }
}

// The tolerances are for the order of additions alone: one graph adds the uses of a trainable and the
// rows of the loss in another order than blocks and chunks do.

#[test]
fn gradients_are_those_of_one_graph_and_the_same_bits_at_every_depth() {
    check(&ToyModel::mixed(), &[0, 3, 5, 6, 7, 8, 9], 0.0, Kind::Float, 1e-4);
    check(&ToyModel::equal(5), &[1, 3], 0.0, Kind::Float, 1e-4);
    check(&ToyModel::split(2), &[1, 2, 4], 0.0, Kind::Float, 1e-4);
}

#[test]
fn gradients_with_dropout_are_those_of_one_graph_with_the_masks_of_the_forward() {
    check(&ToyModel::mixed(), &[0, 3, 6, 7, 9], 0.3, Kind::Float, 1e-4);
    check(&ToyModel::split(2), &[1, 4, 5], 0.5, Kind::Float, 1e-4);
}

#[test]
fn gradients_in_half_precisions_are_those_of_one_graph() {
    // Additions in another order, each rounded to 8 or 11 bits.
    check(&ToyModel::mixed(), &[0, 3, 6, 7, 9], 0.0, Kind::BFloat16, 6e-2);
    check(&ToyModel::mixed(), &[0, 3, 6, 7, 9], 0.0, Kind::Half, 1e-2);
}

#[test]
fn an_adapter_at_the_head_gets_its_gradient_too() {
    // The head's block is the one after the streamed ones.
    check(&ToyModel::equal(3), &[1, 3], 0.0, Kind::Float, 1e-4);
    check(&ToyModel::equal(3), &[3], 0.0, Kind::Float, 1e-4);
}

#[test]
fn a_state_that_is_a_view_of_a_weight_disturbs_no_gradient() {
    let parts = vec![Part::Mlp(5), Part::Alias, Part::Mlp(9), Part::Alias, Part::Mlp(3)];
    check(&ToyModel { parts }, &[0, 1, 3, 4], 0.0, Kind::Float, 1e-4);
}

#[test]
fn dropout_changes_with_the_step_and_with_the_micro_batch() {
    let model = ToyModel::equal(3);
    let seeds = |step| {
        let adapter = SeedLog::new(probe(&[0, 1, 2], 0.5));
        let log = Arc::clone(&adapter.seeds);
        let executor =
            executor(&model, ram(&model), Some(Box::new(adapter)), options(Kind::Float, 1));
        let batches = [batch(4, 0, 1), batch(4, 0, 1)];
        let options = StepOptions { step, ..StepOptions::default() };
        executor.train_step(&batches, options, &mut Gradients::new()).unwrap();
        let log = log.lock().unwrap();
        log.values().flatten().copied().collect::<Vec<_>>()
    };
    let mut all: Vec<u64> = (0..3).flat_map(seeds).collect();
    let num_visits = all.len();
    all.sort_unstable();
    all.dedup();
    assert_eq!((all.len(), num_visits), (num_visits, 3 * 2 * 4), "three blocks and the head");
    assert_eq!(seeds(7), seeds(7));
}

#[test]
fn rows_of_different_chunks_of_the_head_get_different_dropout_masks() {
    let model = ToyModel::equal(3);
    let adapter = SeedLog::new(probe(&[3], 0.5));
    let log = Arc::clone(&adapter.seeds);
    let mut options = options(Kind::Float, 1);
    options.loss_chunk_bytes = 2 * 11 * 4;
    let executor = executor(&model, ram(&model), Some(Box::new(adapter)), options);
    let batches = [batch(4, 0, 1)];
    executor.train_step(&batches, StepOptions::default(), &mut Gradients::new()).unwrap();
    assert_eq!(log.lock().unwrap()[&3].len(), 3, "6 targets, 2 rows at a time");
}

#[test]
fn gradients_add_up_over_steps_until_they_are_cleared() {
    let model = ToyModel::mixed();
    let adapter = Box::new(probe(&[0, 6, 9], 0.0));
    let executor = executor(&model, ram(&model), Some(adapter), options(Kind::Float, 2));
    let run = |seed, gradients: &mut Gradients| {
        executor.train_step(&[batch(5, 1, seed)], StepOptions::default(), gradients).unwrap();
        let trained = values(gradients, executor.adapter().unwrap());
        trained.into_iter().map(|(name, value)| (name, value.copy())).collect::<Named>()
    };
    let first = run(1, &mut Gradients::new());
    let second = run(2, &mut Gradients::new());
    let mut both = Gradients::new();
    run(1, &mut both);
    let sum: Named = first.iter().zip(&second).map(|(a, b)| (a.0.clone(), &a.1 + &b.1)).collect();
    assert_close(&run(2, &mut both), &sum, 1e-5);
    both.clear();
    assert_same_bits(&run(1, &mut both), &first);
}

#[test]
fn autograd_itself_leaves_nothing_in_the_trainables() {
    let model = ToyModel::equal(3);
    let executor =
        executor(&model, ram(&model), Some(Box::new(probe(&[0, 2], 0.0))), options(Kind::Float, 1));
    executor.train_step(&[batch(5, 1, 1)], StepOptions::default(), &mut Gradients::new()).unwrap();
    assert!(autograd_values(executor.adapter().unwrap() as &dyn Adapter).is_empty());
}
