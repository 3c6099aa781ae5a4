//! Graphs that are held from forward to backward: what they save, what they cost, what an error leaves.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockstreamer_core::block::{BlockIndex, Placement};
use blockstreamer_core::device::memory_stats;
use blockstreamer_core::execute::{Executor, Gradients, Residency, StepOptions};
use blockstreamer_core::source::{BlockSource, FaultySource};
use blockstreamer_core::{Error, Result};
use blockstreamer_tests::ToyModel;
use tch::{Kind, Tensor};

use crate::placements::blocks;
use crate::rig::{
    Disk, assert_same_bits, batch, device, options, probe, ram, values, whole_blocks,
};
use crate::stumbling::Stumbling;

type Named = Vec<(String, Tensor)>;

/// The lowest adapted block is 2; blocks 4, 5, 6 and 9 are kept with their graphs, and block 1 without use.
fn residency() -> Residency {
    let kept = blocks([1, 4, 5, 6, 9]);
    Residency { graphs: kept.clone(), kept, stream_head: true, ..Residency::default() }
}

fn trainer(model: Stumbling, disk: Arc<dyn BlockSource>) -> Executor {
    let mut options = whole_blocks(1);
    options.residency = residency();
    let adapter = Box::new(probe(&[2, 5, 7, 9], 0.2));
    Executor::new(Box::new(model), disk, Some(adapter), options).unwrap()
}

fn step(executor: &Executor) -> Result<(f64, Named)> {
    let mut gradients = Gradients::new();
    let batches = [batch(5, 1, 1), batch(4, 0, 2)];
    let loss = executor.train_step(&batches, StepOptions::default(), &mut gradients)?;
    Ok((executor.loss_value(&loss)?, values(&gradients, executor.adapter().unwrap())))
}

fn assert_right(outcome: (f64, Named), wanted: &(f64, Named)) {
    assert_eq!(outcome.0, wanted.0);
    assert_same_bits(&outcome.1, &wanted.1);
}

#[test]
fn a_block_whose_graph_is_held_does_not_run_again_in_backward() {
    let model = Stumbling::default();
    let num_calls = Arc::clone(&model.num_calls);
    let executor = trainer(model, Disk::new(&ToyModel::mixed()));
    step(&executor).unwrap();
    // Per micro-batch: ten blocks forward, eight backward less the four held, embed, norm and logits.
    assert_eq!(num_calls.load(Ordering::SeqCst), 2 * (10 + (8 - 4) + 3));
}

#[test]
fn an_error_of_the_model_in_any_call_drops_the_graphs_and_the_next_step_is_right() {
    let model = Stumbling::default();
    let (num_calls, fails_at) = (Arc::clone(&model.num_calls), Arc::clone(&model.fails_at));
    let executor = trainer(model, Disk::new(&ToyModel::mixed()));
    let wanted = step(&executor).unwrap();
    let calls_of_a_step = num_calls.load(Ordering::SeqCst);
    for call in 0..calls_of_a_step {
        num_calls.store(0, Ordering::SeqCst);
        fails_at.store(call, Ordering::SeqCst);
        let error = step(&executor).unwrap_err();
        assert!(error.to_string().contains("the model stumbled"), "{error}");
        fails_at.store(usize::MAX, Ordering::SeqCst);
        assert_right(step(&executor).unwrap(), &wanted);
    }
}

#[test]
fn a_fault_in_the_read_of_any_block_while_graphs_are_held_leaves_the_next_step_right() {
    let wanted = step(&trainer(Stumbling::default(), ram(&ToyModel::mixed()))).unwrap();
    let source = ram(&ToyModel::mixed());
    let head = source.blocks().iter().position(|spec| spec.placement == Placement::Head).unwrap();
    for block in [0, 3, 7, 8, head] {
        let faulty = FaultySource::new(source.clone(), vec![(BlockIndex(block), 0)]);
        let executor = trainer(Stumbling::default(), Arc::new(faulty));
        let mut failed = Vec::new();
        for _ in 0..4 {
            match step(&executor) {
                Err(Error::Block { block, .. }) => failed.push(block),
                Err(other) => panic!("{other}"),
                Ok(outcome) => assert_right(outcome, &wanted),
            }
        }
        assert_eq!(failed, [source.blocks()[block].name.clone()]);
    }
}

#[test]
fn a_sink_that_is_full_leaves_the_next_step_right() {
    #[derive(Debug)]
    struct Full;
    impl blockstreamer_core::execute::GradientSink for Full {
        fn accept(&mut self, _index: usize, _gradient: Tensor) -> Result<()> {
            Err(Error::usage("the sink is full"))
        }
    }
    let executor = trainer(Stumbling::default(), Disk::new(&ToyModel::mixed()));
    let wanted = step(&executor).unwrap();
    let error = executor.train_step(&[batch(5, 1, 1)], StepOptions::default(), &mut Full);
    assert_eq!(error.unwrap_err().to_string(), "the sink is full");
    assert_right(step(&executor).unwrap(), &wanted);
}

/// Only libtorch's allocator for CUDA says how much is in use, by the whole process: on CUDA tests run one
/// at a time.
#[test]
fn no_graph_outlives_its_step_or_an_error() {
    if !device().is_cuda() {
        println!("skipped: BLOCKSTREAMER_TEST_DEVICE is not cuda");
        return;
    }
    let model = Stumbling::default();
    let (num_calls, fails_at) = (Arc::clone(&model.num_calls), Arc::clone(&model.fails_at));
    let frozen = Arc::clone(&model.frozen);
    let executor = trainer(model, Disk::new(&ToyModel::mixed()));
    let in_use = || {
        frozen.lock().unwrap().clear();
        memory_stats(device()).unwrap().current_bytes
    };
    step(&executor).unwrap();
    let before = in_use();
    step(&executor).unwrap();
    assert_eq!(in_use(), before);
    for call in [13, 20, 28] {
        num_calls.store(0, Ordering::SeqCst);
        fails_at.store(call, Ordering::SeqCst);
        step(&executor).unwrap_err();
        assert_eq!(in_use(), before, "call {call}");
    }
}

#[test]
fn a_graph_of_a_block_that_is_not_kept_is_refused_naming_it() {
    let model = ToyModel::equal(4);
    let mut options = options(Kind::Float, 1);
    options.residency =
        Residency { kept: blocks([0, 1]), graphs: blocks([1, 3]), ..Residency::default() };
    let error = Executor::new(Box::new(model.clone()), ram(&model), None, options).unwrap_err();
    assert!(matches!(error, Error::Usage { .. }), "{error:?}");
    assert!(error.to_string().contains("block 3"), "{error}");
}
