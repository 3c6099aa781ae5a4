//! A hundred steps under bad conditions: the bound holds at every transition and no bit changes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::device::{CopyEngine, CopyPiece, Event, HostBuffer};
use blockstreamer_core::execute::{Executor, ExecutorOptions, Gradients, StepOptions};
use blockstreamer_core::source::{BlockSource, FaultySource, ThrottledSource};
use blockstreamer_core::{Error, Result};
use blockstreamer_tests::ToyModel;
use tch::{Device, Kind, Tensor};

use crate::rig::{assert_same_bits, batch, device, options, probe, ram, values, watch};

const NUM_STEPS: u64 = 100;

/// A link over which every copy takes its time.
#[derive(Debug)]
struct StarvedLink(Box<dyn CopyEngine>);

impl CopyEngine for StarvedLink {
    fn device(&self) -> Device {
        self.0.device()
    }

    fn is_host_memory(&self) -> bool {
        self.0.is_host_memory()
    }

    unsafe fn copy(
        &self,
        pieces: &[CopyPiece<'_>],
        after: Option<&Event>,
    ) -> Result<(Event, Event)> {
        std::thread::sleep(Duration::from_micros(200));
        // SAFETY: the caller's promises are handed on unchanged.
        unsafe { self.0.copy(pieces, after) }
    }

    fn record(&self) -> Result<Event> {
        self.0.record()
    }

    fn wait(&self, event: &Event) -> Result<()> {
        self.0.wait(event)
    }

    fn synchronize(&self, event: &Event) -> Result<()> {
        self.0.synchronize(event)
    }

    fn has_happened(&self, event: &Event) -> Result<bool> {
        self.0.has_happened(event)
    }

    fn elapsed_ms(&self, start: &Event, end: &Event) -> Result<Option<f64>> {
        self.0.elapsed_ms(start, end)
    }

    fn host_buffer(&self, num_bytes: usize) -> Result<HostBuffer> {
        self.0.host_buffer(num_bytes)
    }
}

fn trainer(source: Arc<dyn BlockSource>, starved: bool, options: ExecutorOptions) -> Executor {
    let mut engine = <dyn CopyEngine>::for_device(device()).unwrap();
    if starved {
        engine = Box::new(StarvedLink(engine));
    }
    let model = ToyModel::mixed();
    let adapter = Some(Box::new(probe(&[2, 5, 9], 0.1)) as _);
    Executor::with_engine(Box::new(model), source, adapter, Arc::from(engine), options).unwrap()
}

fn step(
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

/// A hundred announced steps give the bits of a calm engine, with never more blocks than allowed.
fn survives(executor: &Executor, depth: usize) {
    let calm = trainer(ram(&ToyModel::mixed()), false, options(Kind::Float, 3));
    let seen = watch(executor);
    for number in 0..NUM_STEPS {
        let found = step(executor, number, number + 1 < NUM_STEPS).unwrap();
        let wanted = step(&calm, number, false).unwrap();
        assert_eq!(found.0, wanted.0, "step {number}");
        assert_same_bits(&found.1, &wanted.1);
    }
    let seen = seen.lock().unwrap();
    assert!(seen.len() as u64 > 20 * NUM_STEPS, "{}", seen.len());
    assert!(seen.iter().all(|transition| transition.resident_blocks <= depth + 1));
    assert_eq!(executor.stats().unwrap().peak_resident_blocks, depth + 1);
    assert_eq!(executor.stream().num_upcoming().unwrap(), 0);
}

#[test]
fn a_hundred_steps_over_a_starved_link() {
    for depth in [0, 2] {
        let executor = trainer(ram(&ToyModel::mixed()), true, options(Kind::Float, depth));
        survives(&executor, depth);
    }
}

#[test]
fn a_hundred_steps_with_a_slow_reader() {
    let source = ThrottledSource::new(ram(&ToyModel::mixed()), 5e6).unwrap();
    let executor = trainer(Arc::new(source), false, options(Kind::Float, 1));
    survives(&executor, 1);
    assert!(executor.stats().unwrap().read_busy_ms > 0.0);
}

#[test]
fn a_hundred_steps_with_a_slow_reader_a_starved_link_and_kept_blocks() {
    let source = ThrottledSource::new(ram(&ToyModel::mixed()), 20e6).unwrap();
    let mut options = options(Kind::Float, 2);
    options.stream.kept = [3, 8].map(BlockIndex).into();
    let executor = trainer(Arc::new(source), true, options);
    survives(&executor, 2);
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
    let source = FaultySource::new(ram(&ToyModel::mixed()), faults);
    let mut options = options(Kind::Float, 2);
    options.stream.chunk_bytes = 1 << 20;
    let executor = trainer(Arc::new(source), false, options);
    let calm = trainer(ram(&ToyModel::mixed()), false, crate::rig::options(Kind::Float, 3));
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
