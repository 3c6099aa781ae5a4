//! A hundred steps under bad conditions: the bound holds at every transition and no bit changes.

use std::collections::BTreeSet;
use std::sync::Arc;

use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::device::CopyEngine;
use blockstreamer_core::execute::{Executor, ExecutorOptions, Gradients, StepOptions};
use blockstreamer_core::source::{BlockSource, FaultySource, ThrottledSource};
use blockstreamer_core::{Error, Result};
use blockstreamer_tests::ToyModel;
use tch::{Kind, Tensor};

use crate::links::starved;
use crate::rig::{assert_same_bits, batch, device, options, probe, ram, values, watch};

const NUM_STEPS: u64 = 100;

/// Trains `model` with blocks from `source` over `link`.
pub(crate) fn trainer(
    model: &ToyModel,
    source: Arc<dyn BlockSource>,
    link: Arc<dyn CopyEngine>,
    options: ExecutorOptions,
) -> Executor {
    let adapter = Some(Box::new(probe(&[2, 5, 9], 0.1)) as _);
    Executor::with_engine(Box::new(model.clone()), source, adapter, link, options).unwrap()
}

/// The link of the device under test.
pub(crate) fn plain() -> Arc<dyn CopyEngine> {
    <dyn CopyEngine>::for_device(device()).unwrap().into()
}

/// Blocks lent from memory, over a plain link.
pub(crate) fn calm(model: &ToyModel) -> Executor {
    trainer(model, ram(model), plain(), options(Kind::Float, 3))
}

pub(crate) fn step(
    executor: &Executor,
    step: u64,
    another_follows: bool,
) -> Result<(f64, Vec<(String, Tensor)>)> {
    let mut gradients = Gradients::new();
    let batches = [batch(4, 0, 1), batch(4, 1, 2)];
    let loss = executor.train_step(
        &batches,
        StepOptions { step, another_follows, ..StepOptions::default() },
        &mut gradients,
    )?;
    Ok((executor.loss_value(&loss)?, values(&gradients, executor.adapter().unwrap())))
}

/// Announced steps give the bits of a calm engine, with never more blocks than allowed.
pub(crate) fn survives(model: &ToyModel, executor: &Executor, depth: usize, num_steps: u64) {
    let calm = calm(model);
    let seen = watch(executor);
    for number in 0..num_steps {
        let found = step(executor, number, number + 1 < num_steps).unwrap();
        let wanted = step(&calm, number, false).unwrap();
        assert_eq!(found.0, wanted.0, "step {number}");
        assert_same_bits(&found.1, &wanted.1);
    }
    let seen = seen.lock().unwrap();
    assert!(seen.len() as u64 > 20 * num_steps, "{}", seen.len());
    assert!(seen.iter().all(|transition| transition.resident_blocks <= depth + 1));
    assert_eq!(executor.stats().unwrap().peak_resident_blocks, depth + 1);
    assert_eq!(executor.stream().num_upcoming().unwrap(), 0);
}

fn slow(bytes_per_second: f64) -> Arc<dyn BlockSource> {
    Arc::new(ThrottledSource::new(ram(&ToyModel::mixed()), bytes_per_second).unwrap())
}

#[test]
fn a_hundred_steps_over_a_starved_link() {
    let model = ToyModel::mixed();
    for depth in [0, 2] {
        let link = Arc::new(starved());
        let executor = trainer(&model, ram(&model), link, options(Kind::Float, depth));
        survives(&model, &executor, depth, NUM_STEPS);
    }
}

#[test]
fn a_hundred_steps_with_a_slow_reader() {
    let model = ToyModel::mixed();
    let executor = trainer(&model, slow(5e6), plain(), options(Kind::Float, 1));
    survives(&model, &executor, 1, NUM_STEPS);
    assert!(executor.stats().unwrap().read_busy_ms > 0.0);
}

#[test]
fn a_hundred_steps_with_a_slow_reader_a_starved_link_and_kept_blocks() {
    let model = ToyModel::mixed();
    let mut options = options(Kind::Float, 2);
    options.stream.kept = [3, 8].map(BlockIndex).into();
    let executor = trainer(&model, slow(20e6), Arc::new(starved()), options);
    survives(&model, &executor, 2, NUM_STEPS);
}

#[test]
fn a_hundred_steps_with_read_errors_each_of_which_surfaces_once() {
    // How many reads are made depends on how far the reader came before an error, so the faults that
    // are never reached differ from run to run.
    let faults: Vec<(BlockIndex, usize)> = (0..10)
        .flat_map(|block| {
            (0..9).map(move |number| (BlockIndex(block), 19 * number + 2 * block + 1))
        })
        .collect();
    let model = ToyModel::mixed();
    let source = Arc::new(FaultySource::new(ram(&model), faults));
    let mut options = options(Kind::Float, 2);
    options.stream.chunk_bytes = 1 << 20;
    let executor = trainer(&model, source, plain(), options);
    let calm = calm(&model);
    let seen = watch(&executor);
    let (mut num_errors, mut num_right, mut messages) = (0, 0, BTreeSet::new());
    for number in 0..NUM_STEPS {
        match step(&executor, number, number % 2 == 0) {
            Ok(found) => {
                let wanted = step(&calm, number, false).unwrap();
                assert_eq!(found.0, wanted.0, "step {number}");
                assert_same_bits(&found.1, &wanted.1);
                num_right += 1;
            }
            Err(Error::Block { block, source }) => {
                assert!(block.starts_with("part.") && source.to_string().contains("injected"));
                assert!(messages.insert(source.to_string()), "{source} surfaced twice");
                num_errors += 1;
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!(num_errors > 10 && num_right > 10, "{num_errors} errors, {num_right} right");
    assert!(seen.lock().unwrap().iter().all(|transition| transition.resident_blocks <= 3));
    assert_eq!(executor.stats().unwrap().peak_resident_blocks, 3, "no slot was lost");
}
