//! Blocks that only pictures pass through, and blocks that all micro-batches pass through as one.

use blockstreamer_core::adapter::Adapter;
use blockstreamer_core::batch::Batch;
use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::execute::{Executor, ExecutorOptions, Gradients, Residency, StepOptions};
use blockstreamer_core::stream::{Change, Transition};
use blockstreamer_core::vision::Patches;
use blockstreamer_tests::{AllResident, Part, ToyModel, wave};
use tch::Kind;

use crate::rig::{
    assert_close, assert_same_bits, autograd_values, batch, device, executor, options, probe, ram,
    values, watch,
};

const NUM_VISION: usize = 3;

fn with_pictures(seed: i64, num_patches: usize) -> Batch {
    let pixels = wave(&[num_patches as i64, 8], seed as f64);
    let images = Some(Patches { pixels, grids: vec![[1, 1, num_patches]] });
    Batch { images, ..batch(4, 1, seed) }
}

fn engine(model: &ToyModel, prefetch_ahead: usize, adapted: &[usize]) -> Executor {
    let adapter = Box::new(probe(adapted, 0.0));
    executor(model, ram(model), Some(adapter), options(Kind::Float, prefetch_ahead))
}

/// Loss and gradients of one step.
fn step(executor: &Executor, batches: &[Batch]) -> (f64, Vec<(String, tch::Tensor)>) {
    let mut gradients = Gradients::new();
    let loss = executor.train_step(batches, StepOptions::default(), &mut gradients).unwrap();
    let adapter = executor.adapter().unwrap();
    (executor.loss_value(&loss).unwrap(), values(&gradients, adapter))
}

#[test]
fn steps_with_some_some_other_and_no_pictures_have_the_gradients_of_one_graph() {
    let model = ToyModel::seeing();
    let adapted: Vec<usize> = vec![0, 1, 4, 5, 8, 10];
    for batches in [
        vec![with_pictures(1, 6), with_pictures(2, 3)],
        vec![batch(4, 1, 3), with_pictures(4, 5), batch(6, 0, 5)],
        vec![with_pictures(1, 8)],
        vec![batch(4, 1, 3), batch(5, 2, 4)],
    ] {
        let wanted_adapter = probe(&adapted, 0.0);
        let resident = AllResident::new(&model, Some(&wanted_adapter), Kind::Float, device());
        let loss = resident.loss(&batches, None).unwrap();
        loss.backward();
        let mut bits: Option<Vec<_>> = None;
        for prefetch_ahead in [0, 1, 3, 5] {
            let (found, gradients) = step(&engine(&model, prefetch_ahead, &adapted), &batches);
            assert!((found - loss.double_value(&[])).abs() < 1e-5, "{found} {loss}");
            assert_close(&gradients, &autograd_values(&wanted_adapter), 1e-4);
            if let Some(bits) = &bits {
                assert_same_bits(&gradients, bits);
            }
            bits = Some(gradients);
        }
    }
}

#[test]
fn a_step_without_pictures_neither_fetches_nor_visits_the_blocks_for_them() {
    let model = ToyModel::seeing();
    let executor = engine(&model, 2, &[0, 4]);
    let seen = watch(&executor);
    let text = vec![batch(4, 1, 1)];
    step(&executor, &text);
    executor.evaluate(&text).unwrap();
    let leased = |seen: &[Transition]| -> Vec<usize> {
        let leased = seen.iter().filter(|transition| transition.change == Change::Leased);
        leased.map(|transition| transition.block.0).collect()
    };
    let forward: Vec<usize> = (NUM_VISION..model.parts.len()).collect();
    let backward = (4..model.parts.len()).rev();
    let expected: Vec<usize> =
        forward.iter().copied().chain(backward).chain(forward.iter().copied()).collect();
    let of_text = std::mem::take(&mut *seen.lock().unwrap());
    assert_eq!(leased(&of_text), expected);
    assert!(of_text.iter().all(|transition| transition.block.0 >= NUM_VISION));
    step(&executor, &[with_pictures(1, 4)]);
    let visits = leased(&seen.lock().unwrap());
    assert_eq!(visits[..model.parts.len()], (0..model.parts.len()).collect::<Vec<_>>());
    assert_eq!(visits.last(), Some(&0), "its adapter is in the first one");
}

#[test]
fn the_pictures_of_the_next_step_are_announced_and_a_wrong_announcement_is_an_error() {
    let model = ToyModel::seeing();
    let executor = engine(&model, 2, &[0, 4]);
    let mut gradients = Gradients::new();
    let kinds = [false, true, true, false];
    for (number, has_vision) in kinds.into_iter().enumerate() {
        let rows = if has_vision { with_pictures(1, 4) } else { batch(4, 1, 1) };
        let next = kinds.get(number + 1).copied();
        let options = StepOptions {
            step: number as u64,
            another_follows: next.is_some(),
            next_has_vision: next.unwrap_or(false),
        };
        executor.train_step(&[rows], options, &mut gradients).unwrap();
    }
    assert_eq!(executor.stream().num_upcoming().unwrap(), 0);
    let announced = StepOptions { another_follows: true, ..StepOptions::default() };
    executor.train_step(&[batch(4, 1, 1)], announced, &mut gradients).unwrap();
    let pictures = [with_pictures(1, 4)];
    let error = executor.train_step(&pictures, StepOptions::default(), &mut gradients).unwrap_err();
    assert!(error.to_string().contains("next_has_vision"), "{error}");
    executor.train_step(&pictures, StepOptions::default(), &mut gradients).unwrap();
}

#[test]
fn tokens_of_all_micro_batches_pass_through_a_block_of_tokens_in_one_call() {
    let model = ToyModel::seeing();
    let executor = engine(&model, 2, &[4]);
    let batches = [with_pictures(1, 3), batch(5, 0, 2), batch(2, 0, 3)];
    let (_, together) = step(&executor, &batches);
    // The probe's scale at block 4 has one gradient per linear call and block, summed: the same number as
    // from three passes, but added up inside one product.
    let total: usize = batches.iter().map(|rows| rows.labels.as_ref().map_or(0, targets)).sum();
    let mut apart = Gradients::new();
    let mut sums: Option<Vec<(String, tch::Tensor)>> = None;
    for rows in &batches {
        apart.clear();
        let loss = executor
            .train_step(std::slice::from_ref(rows), StepOptions::default(), &mut apart)
            .unwrap();
        let weight = loss.num_targets as f64 / total as f64;
        let of_row: Vec<_> = values(&apart, executor.adapter().unwrap())
            .into_iter()
            .map(|(name, gradient)| (name, gradient * weight))
            .collect();
        sums = Some(match sums {
            None => of_row,
            Some(sums) => {
                let pairs = sums.into_iter().zip(of_row);
                pairs.map(|((name, sum), (_, it))| (name, sum + it)).collect()
            }
        });
    }
    assert_close(&together, &sums.unwrap(), 1e-4);
}

/// Labels after the first of each row.
fn targets(labels: &tch::Tensor) -> usize {
    let shifted = labels.narrow(1, 1, labels.size()[1] - 1);
    shifted.ne(-100).sum(Kind::Int64).int64_value(&[]) as usize
}

#[test]
fn blocks_for_pictures_must_come_first() {
    let mut model = ToyModel::seeing();
    model.parts.insert(0, Part::Mlp(5));
    let options = options(Kind::Float, 1);
    let source = ram(&model);
    let error = Executor::new(Box::new(model), source, None, options).unwrap_err();
    assert!(error.to_string().contains("before all others"), "{error}");
}

#[test]
fn the_lowest_trainable_block_of_a_step_is_one_that_it_visits() {
    let model = ToyModel::seeing();
    let executor = engine(&model, 1, &[1]);
    assert_eq!(executor.lowest_trainable_block(), Some(BlockIndex(1)));
    assert_eq!(executor.training_visits(false), executor.inference_visits(false));
    let with = executor.training_visits(true).len();
    assert_eq!(with, executor.inference_visits(true).len() + model.parts.len() - 1);
    let trained: &dyn Adapter = executor.adapter().unwrap();
    assert_eq!(trained.trainables().len(), 3);
}

#[test]
fn a_run_that_never_has_pictures_makes_no_slot_for_their_blocks_and_refuses_to_visit_them() {
    // Everything else stays, so that a slot could only be for them.
    let model = ToyModel::seeing();
    let others = NUM_VISION..model.parts.len();
    let residency = Residency {
        kept: others.map(BlockIndex).collect(),
        unused: (0..NUM_VISION).map(BlockIndex).collect(),
        ..Residency::default()
    };
    let options = ExecutorOptions { residency, ..options(Kind::Float, 2) };
    let executor = executor(&model, ram(&model), Some(Box::new(probe(&[4], 0.0))), options);
    step(&executor, &[batch(4, 1, 1)]);
    assert_eq!(executor.stats().unwrap().peak_bytes, 0);
    let mut gradients = Gradients::new();
    let pictures = [with_pictures(1, 4)];
    let refused = executor.train_step(&pictures, StepOptions::default(), &mut gradients);
    assert!(refused.unwrap_err().to_string().contains("block 0"));
    step(&executor, &[batch(4, 1, 1)]);
}
