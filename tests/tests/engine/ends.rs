//! The table before the first block and the head after the last: where they lie, and what that moves.

use std::sync::Arc;

use blockstreamer_core::batch::Batch;
use blockstreamer_core::block::{BlockIndex, Placement};
use blockstreamer_core::context::Context;
use blockstreamer_core::device::HostBuffer;
use blockstreamer_core::execute::{Executor, Gradients, Residency, StepOptions};
use blockstreamer_core::family::{Model, ModelDimensions};
use blockstreamer_core::scope::Scope;
use blockstreamer_core::source::{BlockSource, RamSource};
use blockstreamer_core::state::State;
use blockstreamer_core::weights::WeightTable;
use blockstreamer_core::{Error, Result};
use blockstreamer_tests::{ToyModel, blocks_of, wave};
use tch::{Kind, Tensor};

use crate::rig::{Disk, batch, device, executor, infer, options, probe, ram, whole_blocks};

const NUM_BLOCKS: usize = 6;
const HEAD: usize = NUM_BLOCKS;
const EMBEDDING: usize = NUM_BLOCKS + 1;
const NORM: usize = NUM_BLOCKS + 2;

fn model() -> ToyModel {
    ToyModel::equal(NUM_BLOCKS)
}

fn image_bytes(block: usize) -> usize {
    ram(&model()).blocks()[block].image_bytes
}

fn trainer(
    source: Arc<dyn BlockSource>,
    lowest: usize,
    prefetch_ahead: usize,
    residency: Residency,
) -> Executor {
    let trained: Vec<usize> = (lowest..NUM_BLOCKS).collect();
    let mut options = whole_blocks(prefetch_ahead);
    options.residency = residency;
    executor(&model(), source, Some(Box::new(probe(&trained, 0.0))), options)
}

fn stream_head() -> Residency {
    Residency { stream_head: true, ..Residency::default() }
}

#[test]
fn a_streamed_head_is_one_more_visit_at_the_turn_around() {
    let executor = trainer(ram(&model()), 4, 1, stream_head());
    let visits: Vec<usize> =
        executor.training_visits(false).into_iter().map(|block| block.0).collect();
    assert_eq!(visits, [0, 1, 2, 3, 4, 5, HEAD, 5, 4]);
    assert_eq!(executor.inference_visits(false).len(), NUM_BLOCKS + 1);
    let resident = trainer(ram(&model()), 4, 1, Residency::default());
    assert_eq!(resident.training_visits(false).len(), visits.len() - 1);
    assert_eq!(resident.resident_bytes() - executor.resident_bytes(), image_bytes(HEAD));
}

#[test]
fn a_streamed_head_is_fetched_once_per_step_for_all_micro_batches() {
    for lowest in 0..NUM_BLOCKS {
        for prefetch_ahead in 0..=3 {
            let disk = Disk::new(&model());
            let executor = trainer(disk.clone(), lowest, prefetch_ahead, stream_head());
            let num_reads = disk.num_reads();
            let batches = [batch(4, 0, 1), batch(4, 4, 2), batch(4, 0, 3)];
            let options = StepOptions::default();
            executor.train_step(&batches, options, &mut Gradients::new()).unwrap();
            // The head takes one slot at the turn-around; what is in the others is used again.
            let num_backward = NUM_BLOCKS - lowest;
            let num_fetches = NUM_BLOCKS + num_backward - prefetch_ahead.min(num_backward);
            let wanted = num_fetches * image_bytes(0) + image_bytes(HEAD);
            let stats = executor.stats().unwrap();
            let case = format!("lowest {lowest}, {prefetch_ahead} ahead");
            assert_eq!(stats.read_bytes, wanted as u64, "{case}");
            assert_eq!(stats.h2d_bytes, wanted as u64, "{case}");
            assert_eq!(disk.num_reads() - num_reads, num_fetches + 1, "{case}");
        }
    }
}

#[test]
fn passes_without_gradients_fetch_a_streamed_head_once() {
    for evaluates in [false, true] {
        let executor = trainer(Disk::new(&model()), 4, 1, stream_head());
        match evaluates {
            true => drop(executor.evaluate(&[batch(4, 0, 1), batch(4, 0, 2)]).unwrap()),
            false => infer(&executor).unwrap(),
        }
        let wanted = NUM_BLOCKS * image_bytes(0) + image_bytes(HEAD);
        assert_eq!(executor.stats().unwrap().read_bytes, wanted as u64);
        assert_eq!(executor.stream().num_upcoming().unwrap(), 0);
    }
}

#[test]
fn a_table_in_host_memory_takes_none_of_the_device_and_is_read_once_or_lent() {
    let gather = || Residency { gather_from_host: true, ..Residency::default() };
    let on_device = [image_bytes(HEAD), image_bytes(NORM)].iter().sum::<usize>();
    let disk = Disk::new(&model());
    let read = trainer(disk.clone(), 0, 1, gather());
    assert_eq!(read.resident_read_bytes(), on_device + image_bytes(EMBEDDING));
    let num_reads = disk.num_reads();
    let lent = trainer(ram(&model()), 0, 1, gather());
    assert_eq!(lent.resident_read_bytes(), 0);
    for executor in [&read, &lent] {
        assert_eq!(executor.resident_bytes(), on_device);
        assert_eq!(executor.gathered_host_bytes(), image_bytes(EMBEDDING));
    }
    infer(&read).unwrap();
    assert_eq!(disk.num_reads() - num_reads, NUM_BLOCKS, "the table is not among them");
    let plain = trainer(ram(&model()), 0, 1, Residency::default());
    assert_eq!(plain.gathered_host_bytes(), 0);
    assert_eq!(plain.resident_bytes(), on_device + image_bytes(EMBEDDING));
}

#[test]
fn a_fault_while_the_table_is_read_names_its_block() {
    let disk = Disk::new(&model());
    disk.fail_after(0);
    let mut options = whole_blocks(1);
    options.residency.gather_from_host = true;
    let error = Executor::new(Box::new(model()), disk, None, options).unwrap_err();
    let Error::Block { block, source } = &error else { panic!("{error:?}") };
    assert_eq!(block, "embedding");
    assert!(source.to_string().contains("would not read"), "{source}");
}

/// The toy model but for calls that it answers in its own way.
#[derive(Debug)]
struct Odd {
    inner: ToyModel,
    /// Multiplies by the table of which only rows may be looked up.
    multiplies_by_table: bool,
}

impl Model for Odd {
    fn dimensions(&self) -> ModelDimensions {
        self.inner.dimensions()
    }

    fn weights(&self) -> Result<WeightTable> {
        self.inner.weights()
    }

    fn ignores(&self, name: &str) -> Result<bool> {
        self.inner.ignores(name)
    }

    fn embed(&self, scope: &dyn Scope, batch: &Batch) -> Result<(Context, State)> {
        self.inner.embed(scope, batch)
    }

    fn forward_block(
        &self,
        block: BlockIndex,
        scope: &dyn Scope,
        context: &Context,
        state: State,
    ) -> Result<State> {
        self.inner.forward_block(block, scope, context, state)
    }

    fn final_hidden(&self, scope: &dyn Scope, context: &Context, state: State) -> Result<Tensor> {
        self.inner.final_hidden(scope, context, state)
    }

    fn logits(&self, scope: &dyn Scope, hidden: &Tensor) -> Result<Tensor> {
        match self.multiplies_by_table {
            true => scope.linear("embed", hidden),
            false => scope.stored_tensor("head.weight"),
        }
    }
}

#[test]
fn a_table_that_is_multiplied_works_on_the_device_and_is_refused_in_host_memory() {
    let run = |gather_from_host| {
        let mut options = options(Kind::Float, 1);
        options.residency.gather_from_host = gather_from_host;
        let odd = Odd { inner: model(), multiplies_by_table: true };
        let executor = Executor::new(Box::new(odd), ram(&model()), None, options).unwrap();
        executor.logits(&batch(4, 0, 1), &mut |_, _| Ok(()))
    };
    assert_eq!(run(false).unwrap().size(), [2, 4, 11]);
    let error = run(true).unwrap_err().to_string();
    assert!(error.contains("'embed.weight'") && error.contains("Placement::Gathered"), "{error}");
}

#[test]
fn logits_that_are_a_view_of_the_heads_weight_survive_the_reuse_of_its_slot() {
    for prefetch_ahead in 0..=2 {
        let mut options = options(Kind::Float, prefetch_ahead);
        options.residency.stream_head = true;
        let odd = Odd { inner: model(), multiplies_by_table: false };
        let executor = Executor::new(Box::new(odd), ram(&model()), None, options).unwrap();
        let logits = executor.logits(&batch(4, 0, 1), &mut |_, _| Ok(())).unwrap();
        infer(&executor).unwrap();
        assert!(logits.equal(&wave(&[11, 8], 3.0).to_device(device())));
    }
}

#[test]
fn a_source_with_two_heads_is_refused() {
    let mut blocks = blocks_of(&model());
    blocks.push(("another head", Placement::Head, vec![("more.weight", wave(&[11, 8], 1.0))]));
    let reserve = |num_bytes| HostBuffer::for_device(num_bytes, device());
    let source = Arc::new(RamSource::from_tensors(blocks, reserve).unwrap());
    let error = Executor::new(Box::new(model()), source, None, options(Kind::Float, 1));
    assert!(error.unwrap_err().to_string().contains("at most one head"));
}
