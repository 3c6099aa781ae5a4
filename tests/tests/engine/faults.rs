//! After any error the engine works again, with the right bits and every slot.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::execute::{Executor, Gradients, StepOptions};
use blockstreamer_core::source::FaultySource;
use blockstreamer_core::{Error, Result};
use blockstreamer_tests::ToyModel;
use tch::Tensor;

use crate::rig::{
    Disk, assert_same_bits, batch, executor, infer, probe, ram, values, watch, whole_blocks,
};
use crate::stumbling::Stumbling;

type Named = Vec<(String, Tensor)>;

fn trainer(source: Arc<dyn blockstreamer_core::source::BlockSource>, depth: usize) -> Executor {
    let adapter = Box::new(probe(&[2, 5, 7, 9], 0.2));
    executor(&ToyModel::mixed(), source, Some(adapter), whole_blocks(depth))
}

fn step(executor: &Executor, another_follows: bool) -> Result<(f64, Named)> {
    let options = StepOptions { step: 1, another_follows, ..StepOptions::default() };
    let mut gradients = Gradients::new();
    let loss = executor.train_step(&[batch(5, 1, 1)], options, &mut gradients)?;
    Ok((executor.loss_value(&loss)?, values(&gradients, executor.adapter().unwrap())))
}

fn assert_right(outcome: (f64, Named), wanted: &(f64, Named)) {
    assert_eq!(outcome.0, wanted.0);
    assert_same_bits(&outcome.1, &wanted.1);
}

#[test]
fn a_fault_in_any_read_of_a_step_surfaces_once_and_the_next_step_is_right() {
    let disk = Disk::new(&ToyModel::mixed());
    let executor = trainer(disk.clone(), 2);
    let seen = watch(&executor);
    let wanted = step(&executor, false).unwrap();
    let mut blocks = BTreeSet::new();
    let mut num_errors = 0;
    for iteration in 0..100 {
        // Reads vary: what a fault leaves in the slots changes what the next step reads.
        disk.fail_after(iteration % 17);
        match step(&executor, iteration % 3 == 0) {
            Err(Error::Block { block, source }) => {
                assert!(source.to_string().contains("would not read"), "{source}");
                blocks.insert(block);
                num_errors += 1;
            }
            Err(other) => panic!("{other}"),
            Ok(outcome) => assert_right(outcome, &wanted),
        }
        disk.fail_after(usize::MAX / 2);
        // A fault in the read of an announced step surfaces in that step.
        if let Err(error) = step(&executor, false) {
            assert!(iteration % 3 == 0 && error.to_string().contains("would not read"), "{error}");
            num_errors += 1;
        }
        assert_right(step(&executor, false).unwrap(), &wanted);
    }
    assert!(num_errors > 50, "{num_errors}");
    assert!(blocks.len() >= 8 && blocks.contains("part.9"), "{blocks:?}");
    assert!(seen.lock().unwrap().iter().all(|transition| transition.resident_blocks <= 3));
    assert_eq!(executor.stats().unwrap().peak_resident_blocks, 3, "all slots are still in use");
}

#[test]
fn a_fault_in_backward_names_its_block_and_passes() {
    // Block 1 is read in forward (read 0); the second read is backward's.
    let source = FaultySource::new(ram(&ToyModel::mixed()), vec![(BlockIndex(5), 1)]);
    let executor = trainer(Arc::new(source), 1);
    let error = step(&executor, false).unwrap_err();
    assert!(matches!(&error, Error::Block { block, .. } if block == "part.5"), "{error}");
    let wanted = step(&trainer(ram(&ToyModel::mixed()), 1), false).unwrap();
    assert_right(step(&executor, false).unwrap(), &wanted);
}

#[test]
fn a_fault_in_a_prefetch_surfaces_at_the_visit_that_needs_the_block() {
    for prefetch_ahead in 0..=5 {
        let source = FaultySource::new(ram(&ToyModel::mixed()), vec![(BlockIndex(3), 0)]);
        let executor = trainer(Arc::new(source), prefetch_ahead);
        let mut visited = Vec::new();
        let error = executor
            .logits(&batch(4, 0, 1), &mut |block, _| {
                visited.push(block.0);
                Ok(())
            })
            .unwrap_err();
        assert!(error.to_string().starts_with("block 'part.3'"), "{error}");
        assert_eq!(visited, [0, 1, 2], "what was there before was used");
        infer(&executor).unwrap();
    }
}

#[test]
fn a_fault_in_a_prefetch_for_the_next_step_surfaces_in_that_step() {
    let source = FaultySource::new(ram(&ToyModel::mixed()), vec![(BlockIndex(0), 1)]);
    let executor = trainer(Arc::new(source), 1);
    let wanted = step(&executor, true).unwrap();
    let error = step(&executor, true).unwrap_err();
    assert!(error.to_string().starts_with("block 'part.0'"), "{error}");
    assert_right(step(&executor, true).unwrap(), &wanted);
    assert_right(step(&executor, false).unwrap(), &wanted);
}

#[test]
fn a_fault_in_a_prefetch_that_nobody_needs_any_more_is_forgotten() {
    let source = FaultySource::new(ram(&ToyModel::mixed()), vec![(BlockIndex(0), 1)]);
    let executor = trainer(Arc::new(source), 1);
    step(&executor, true).unwrap();
    executor.stream().abandon().unwrap();
    infer(&executor).unwrap();
}

#[test]
fn a_source_that_panics_is_an_error_like_any_other() {
    let disk = Disk::new(&ToyModel::mixed());
    let executor = trainer(disk.clone(), 2);
    let wanted = step(&executor, false).unwrap();
    disk.panic_after(3);
    let error = step(&executor, false).unwrap_err();
    assert!(matches!(error, Error::Block { .. }), "{error:?}");
    assert!(error.to_string().contains("the source panicked"), "{error}");
    assert!(error.to_string().contains("the disk fell over"), "{error}");
    assert_right(step(&executor, false).unwrap(), &wanted);
}

#[test]
fn an_error_of_the_model_in_any_call_leaves_the_engine_usable() {
    let model = Stumbling::default();
    let (num_calls, fails_at) = (Arc::clone(&model.num_calls), Arc::clone(&model.fails_at));
    let adapter = Box::new(probe(&[2, 5, 7, 9], 0.2));
    let disk = Disk::new(&ToyModel::mixed());
    let executor = Executor::new(Box::new(model), disk, Some(adapter), whole_blocks(2)).unwrap();
    let wanted = step(&executor, false).unwrap();
    let calls_of_a_step = num_calls.swap(0, Ordering::SeqCst);
    // The last block is not run again: it is still there at the turn-around.
    assert_eq!(calls_of_a_step, 10 + 7 + 3, "blocks, blocks again, embed, norm and logits");
    for call in 0..calls_of_a_step {
        num_calls.store(0, Ordering::SeqCst);
        fails_at.store(call, Ordering::SeqCst);
        let error = step(&executor, call % 2 == 0).unwrap_err();
        assert!(error.to_string().contains("the model stumbled"), "{error}");
        fails_at.store(usize::MAX, Ordering::SeqCst);
        assert_right(step(&executor, false).unwrap(), &wanted);
    }
    assert_eq!(executor.stats().unwrap().peak_resident_blocks, 3);
}

#[test]
fn an_error_of_the_sink_or_of_a_callback_leaves_the_engine_usable() {
    #[derive(Debug)]
    struct Full;
    impl blockstreamer_core::execute::GradientSink for Full {
        fn accept(&mut self, _index: usize, _gradient: Tensor) -> Result<()> {
            Err(Error::usage("the sink is full"))
        }
    }
    let executor = trainer(Disk::new(&ToyModel::mixed()), 2);
    let wanted = step(&executor, false).unwrap();
    let batches = [batch(5, 1, 1)];
    let error = executor.train_step(&batches, StepOptions::default(), &mut Full).unwrap_err();
    assert_eq!(error.to_string(), "the sink is full");
    let stop = &mut |_: BlockIndex, _: &_| Err(Error::usage("enough"));
    assert_eq!(executor.logits(&batches[0], stop).unwrap_err().to_string(), "enough");
    assert_right(step(&executor, false).unwrap(), &wanted);
}
