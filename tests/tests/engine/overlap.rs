//! Reads and copies of blocks to come go on while earlier blocks are computed with.

use std::sync::Arc;

use blockstreamer_core::batch::Batch;
use blockstreamer_core::execute::{Executor, Gradients, StepOptions};
use blockstreamer_core::source::{BlockSource, RamSource, ThrottledSource};
use blockstreamer_core::stream::{Lane, Span};
use blockstreamer_tests::{Part, ToyModel};
use tch::{Device, Kind, Tensor};

use crate::rig::{device, executor, options, probe, ram};

const NUM_BLOCKS: usize = 8;

/// Wide enough for a visit to take longer than the host's clock ticks.
fn model() -> ToyModel {
    ToyModel { parts: vec![Part::Mlp(4_000); NUM_BLOCKS] }
}

/// The spans of three steps, the first of which is not in the trace.
fn trace(executor: &Executor) -> Vec<Span> {
    let ids = Tensor::arange(256, (Kind::Int64, Device::Cpu)).remainder(11).view([1, 256]);
    let batch = Batch { labels: Some(ids.copy()), ..Batch::new(ids) };
    let step = |step| {
        let options = StepOptions { step, another_follows: step < 2, ..StepOptions::default() };
        let batches = std::slice::from_ref(&batch);
        executor.train_step(batches, options, &mut Gradients::new()).unwrap()
    };
    step(0);
    executor.stream().start_trace().unwrap();
    step(1);
    let last = step(2);
    executor.loss_value(&last).unwrap();
    executor.stream().take_trace().unwrap()
}

fn trained(source: Arc<dyn BlockSource>) -> Executor {
    let mut options = options(Kind::Float, 2);
    options.stream.chunk_bytes = 64 << 10;
    options.stream.num_chunks = 4;
    let adapter = Box::new(probe(&(0..NUM_BLOCKS).collect::<Vec<_>>(), 0.0));
    executor(&model(), source, Some(adapter), options)
}

/// How many spans of `lane` lie in time over a visit of another block.
fn num_overlapping(spans: &[Span], lane: Lane) -> usize {
    let visits: Vec<_> = spans.iter().filter(|span| span.lane == Lane::Compute).collect();
    let overlaps = |span: &&Span| {
        let during = |visit: &&&Span| span.start_ms < visit.end_ms && visit.start_ms < span.end_ms;
        visits.iter().filter(during).any(|visit| visit.block != span.block)
    };
    spans.iter().filter(|span| span.lane == lane).filter(overlaps).count()
}

fn slow(model: &ToyModel, seconds_per_block: f64) -> Arc<dyn BlockSource> {
    let source: Arc<RamSource> = ram(model);
    let rate = source.blocks()[0].image_bytes as f64 / seconds_per_block;
    Arc::new(ThrottledSource::new(source, rate).unwrap())
}

#[test]
fn later_blocks_are_on_their_way_while_earlier_ones_are_computed_with() {
    // About as slow as the computation: neither side can be always done before the other.
    let spans = trace(&trained(slow(&model(), 0.005)));
    let num_reads = spans.iter().filter(|span| span.lane == Lane::Read).count();
    let overlapping = num_overlapping(&spans, Lane::Read);
    assert!(num_reads > NUM_BLOCKS, "{num_reads}");
    assert!(overlapping * 4 > num_reads, "{overlapping} of {num_reads} reads overlap a visit");
    // Copies as well, where they have an engine of their own. (Behind a slow source most of them find
    // nothing to overlap with.)
    if device().is_cuda() {
        let spans = trace(&trained(ram(&model())));
        let num_copies = spans.iter().filter(|span| span.lane == Lane::Copy).count();
        let overlapping = num_overlapping(&spans, Lane::Copy);
        assert!(num_copies > NUM_BLOCKS, "{num_copies}");
        assert!(
            overlapping * 4 > num_copies,
            "{overlapping} of {num_copies} copies overlap a visit"
        );
    }
}

#[test]
fn every_visit_of_a_trace_comes_after_the_copy_of_its_block() {
    let spans = trace(&trained(slow(&model(), 0.001)));
    let visits = || spans.iter().filter(|span| span.lane == Lane::Compute);
    // Two steps, each all blocks forward and all of them back.
    assert_eq!(visits().count(), 2 * 2 * NUM_BLOCKS);
    let copies: Vec<_> = spans.iter().filter(|span| span.lane == Lane::Copy).collect();
    let mut num_checked = 0;
    for copy in &copies {
        let mut later = visits().filter(|visit| visit.block == copy.block);
        // What is still copied when a visit of the same block has begun is for a visit after it.
        if let Some(visit) = later.find(|visit| visit.end_ms > copy.start_ms) {
            assert!(visit.start_ms >= copy.end_ms - 0.01, "{copy:?} {visit:?}");
            num_checked += 1;
        }
    }
    assert!(num_checked > NUM_BLOCKS, "{num_checked} of {}", copies.len());
    assert!(spans.iter().all(|span| span.start_ms >= 0.0 && span.end_ms >= span.start_ms));
}

/// Shares of wall time over a few steps on `source`: the driving thread's, and those of copies.
fn shares(model: &ToyModel, source: Arc<dyn BlockSource>, tokens: i64) -> (f64, f64) {
    let blocks: Vec<_> = (0..model.parts.len()).collect();
    let executor =
        executor(model, source, Some(Box::new(probe(&blocks, 0.0))), options(Kind::Float, 2));
    let ids = Tensor::arange(tokens, (Kind::Int64, Device::Cpu)).remainder(11).view([1, tokens]);
    let batch = Batch { labels: Some(ids.copy()), ..Batch::new(ids) };
    let step = |step| {
        let options = StepOptions { step, another_follows: true, ..StepOptions::default() };
        executor.train_step(std::slice::from_ref(&batch), options, &mut Gradients::new()).unwrap()
    };
    executor.loss_value(&step(0)).unwrap();
    let (before, start) = (executor.stats().unwrap(), std::time::Instant::now());
    let mut last = step(1);
    for number in 2..6 {
        let next = step(number);
        executor.loss_value(&std::mem::replace(&mut last, next)).unwrap();
    }
    executor.loss_value(&last).unwrap();
    let (after, seconds) = (executor.stats().unwrap(), start.elapsed().as_secs_f64());
    let share = |ms: f64| ms / seconds / 1e3;
    (share(after.host_ms - before.host_ms), share(after.h2d_ms - before.h2d_ms))
}

#[test]
fn the_host_is_busy_while_the_device_waits_for_launches_and_not_while_launches_wait_for_copies() {
    // Blocks of few values: the device has done a launch before the next one comes.
    let small = ToyModel { parts: vec![Part::Mlp(8); 12] };
    let (host, _) = shares(&small, ram(&small), 4);
    // On the CPU what is computed is not the host's: what is left is little work between large visits.
    let (inner, tokens) = if device().is_cuda() { (2_000_000, 4) } else { (20_000, 64) };
    let large = ToyModel { parts: vec![Part::Mlp(inner); 8] };
    let (host_of_large, copies) = shares(&large, ram(&large), tokens);
    println!("host {host:.3}; beside copies {copies:.3}, host {host_of_large:.3}");
    assert!(host_of_large < 0.3, "{host_of_large}");
    if device().is_cuda() {
        assert!(host > 0.6, "{host}");
        assert!(copies > 0.6, "{copies}");
    }
}
