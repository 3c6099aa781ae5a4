//! A byte moves no more often than the itinerary needs: the engine's counts are the formula's.

use std::sync::Arc;

use blockstreamer_core::execute::{Executor, Gradients, StepOptions};
use blockstreamer_core::source::{BlockSource, FaultySource};
use blockstreamer_tests::ToyModel;

use crate::rig::{Disk, batch, executor, infer, probe, ram, whole_blocks};

const NUM_BLOCKS: usize = 6;

fn trainer(source: Arc<dyn BlockSource>, lowest: usize, prefetch_ahead: usize) -> Executor {
    let trained: Vec<usize> = (lowest..NUM_BLOCKS).collect();
    let adapter = Box::new(probe(&trained, 0.0));
    let options = whole_blocks(prefetch_ahead);
    executor(&ToyModel::equal(NUM_BLOCKS), source, Some(adapter), options)
}

fn train(executor: &Executor, num_steps: u64) {
    for step in 0..num_steps {
        let options =
            StepOptions { step, another_follows: step + 1 < num_steps, ..StepOptions::default() };
        executor.train_step(&[batch(4, 0, 1)], options, &mut Gradients::new()).unwrap();
    }
}

/// Fetches of one step by itself: every visit but those of blocks still in a slot at the turn-around.
fn fetches(lowest: usize, prefetch_ahead: usize) -> usize {
    let num_slots = (prefetch_ahead + 1).min(NUM_BLOCKS);
    NUM_BLOCKS + (NUM_BLOCKS - lowest) - num_slots.min(NUM_BLOCKS - lowest)
}

/// Fetches of a later step that was announced: its first blocks may still be in a slot, too. Backward
/// ends with the blocks from `lowest` on in the slots; those below have to come in first.
fn later_fetches(lowest: usize, prefetch_ahead: usize) -> usize {
    let num_slots = prefetch_ahead + 1;
    match num_slots >= NUM_BLOCKS {
        true => 0,
        false => fetches(lowest, prefetch_ahead) - num_slots.saturating_sub(lowest),
    }
}

fn image_bytes() -> u64 {
    ram(&ToyModel::equal(NUM_BLOCKS)).blocks()[0].image_bytes as u64
}

#[test]
fn one_step_reads_and_copies_exactly_what_the_formula_says() {
    for lowest in 0..NUM_BLOCKS {
        for prefetch_ahead in 0..=5 {
            let wanted = fetches(lowest, prefetch_ahead) as u64 * image_bytes();
            let disk = Disk::new(&ToyModel::equal(NUM_BLOCKS));
            let executor = trainer(disk.clone(), lowest, prefetch_ahead);
            let num_reads = disk.num_reads();
            train(&executor, 1);
            let stats = executor.stats().unwrap();
            assert_eq!((stats.read_bytes, stats.h2d_bytes), (wanted, wanted));
            assert_eq!(disk.num_reads() - num_reads, fetches(lowest, prefetch_ahead));

            let executor = trainer(ram(&ToyModel::equal(NUM_BLOCKS)), lowest, prefetch_ahead);
            train(&executor, 1);
            let stats = executor.stats().unwrap();
            assert_eq!((stats.read_bytes, stats.h2d_bytes), (0, wanted), "nothing from storage");
        }
    }
}

#[test]
fn announced_steps_also_reuse_what_is_in_a_slot_when_a_step_ends() {
    for lowest in 0..NUM_BLOCKS {
        for prefetch_ahead in 0..=5 {
            let source = FaultySource::new(ram(&ToyModel::equal(NUM_BLOCKS)), vec![]);
            let executor = trainer(Arc::new(source), lowest, prefetch_ahead);
            train(&executor, 4);
            let num_fetches =
                fetches(lowest, prefetch_ahead) + 3 * later_fetches(lowest, prefetch_ahead);
            assert_eq!(
                executor.stats().unwrap().h2d_bytes,
                num_fetches as u64 * image_bytes(),
                "lowest {lowest}, {prefetch_ahead} ahead"
            );
            assert_eq!(executor.stream().num_upcoming().unwrap(), 0);
        }
    }
}

#[test]
fn an_announced_step_gives_the_bits_of_one_that_was_not() {
    let run = |another_follows: bool| {
        let executor = trainer(Disk::new(&ToyModel::equal(NUM_BLOCKS)), 2, 2);
        (0..4)
            .map(|step| {
                let options = StepOptions {
                    step,
                    another_follows: another_follows && step < 3,
                    ..StepOptions::default()
                };
                let batches = [batch(4, 0, step as i64)];
                let loss = executor.train_step(&batches, options, &mut Gradients::new()).unwrap();
                executor.loss_value(&loss).unwrap()
            })
            .collect::<Vec<f64>>()
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn inference_reads_every_block_once() {
    let disk = Disk::new(&ToyModel::equal(NUM_BLOCKS));
    let executor = trainer(disk, NUM_BLOCKS - 1, 1);
    infer(&executor).unwrap();
    assert_eq!(executor.stats().unwrap().read_bytes, NUM_BLOCKS as u64 * image_bytes());
}

#[test]
fn backward_visits_no_block_when_only_the_head_is_trained() {
    let disk = Disk::new(&ToyModel::equal(NUM_BLOCKS));
    let adapter = Box::new(probe(&[NUM_BLOCKS], 0.0));
    let model = ToyModel::equal(NUM_BLOCKS);
    let executor = executor(&model, disk, Some(adapter), whole_blocks(1));
    assert_eq!(executor.training_visits(false).len(), NUM_BLOCKS);
    train(&executor, 1);
    assert_eq!(executor.stats().unwrap().read_bytes, NUM_BLOCKS as u64 * image_bytes());
}

#[test]
fn loading_the_residents_is_counted_apart() {
    let model = ToyModel::equal(NUM_BLOCKS);
    let disk = Disk::new(&model);
    let resident_bytes: usize =
        disk.blocks()[NUM_BLOCKS..].iter().map(|spec| spec.image_bytes).sum();
    let executor = trainer(disk, 0, 1);
    assert_eq!(executor.resident_bytes(), resident_bytes);
    assert_eq!(executor.resident_read_bytes(), resident_bytes);
    assert_eq!(executor.stats().unwrap().read_bytes, 0);
}

#[test]
fn a_loss_that_is_fetched_counts_as_bytes_to_the_host() {
    let executor = trainer(ram(&ToyModel::equal(NUM_BLOCKS)), 0, 1);
    let loss = executor
        .train_step(&[batch(4, 0, 1)], StepOptions::default(), &mut Gradients::new())
        .unwrap();
    assert!(executor.loss_value(&loss).unwrap().is_finite());
    assert_eq!(executor.stats().unwrap().d2h_bytes, 4);
    assert_eq!((loss.num_targets, loss.num_tokens), (6, 8));
}
