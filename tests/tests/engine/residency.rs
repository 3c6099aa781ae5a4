//! At most `prefetch_ahead + 1` blocks are on the device, and an observer sees every change.

use std::collections::BTreeMap;
use std::sync::Arc;

use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::execute::{Gradients, StepOptions};
use blockstreamer_core::source::{BlockSource, ThrottledSource};
use blockstreamer_core::stream::{Change, Transition};
use blockstreamer_tests::ToyModel;
use tch::{Kind, Tensor};

use crate::rig::{Disk, batch, executor, infer, options, probe, ram, watch, whole_blocks};

/// Replays transitions; returns the most blocks and the most bytes at one time, and what is left.
fn replay(
    transitions: &[Transition],
    source: &dyn BlockSource,
) -> (usize, u64, BTreeMap<usize, BlockIndex>) {
    let mut slots: BTreeMap<usize, BlockIndex> = BTreeMap::new();
    let (mut most_blocks, mut most_bytes) = (0, 0);
    let mut leased = None;
    for transition in transitions {
        let Transition { block, slot, change, resident_blocks } = *transition;
        match change {
            Change::Fetching => assert_eq!(slots.insert(slot, block), None, "the slot was taken"),
            Change::Evicted | Change::Failed => {
                assert_ne!(leased, Some(slot), "a block in use was given up");
                assert_eq!(slots.remove(&slot), Some(block));
            }
            Change::Leased => {
                assert_eq!(leased.replace(slot), None);
                assert_eq!(slots.get(&slot), Some(&block));
            }
            Change::Released => assert_eq!(leased.take(), Some(slot)),
        }
        assert_eq!(slots.len(), resident_blocks, "{transition:?}");
        let bytes = |block: &BlockIndex| source.blocks()[block.0].image_bytes as u64;
        most_blocks = most_blocks.max(slots.len());
        most_bytes = most_bytes.max(slots.values().map(bytes).sum());
    }
    (most_blocks, most_bytes, slots)
}

#[test]
fn an_observer_sees_every_change_and_never_more_blocks_than_allowed() {
    let model = ToyModel::mixed();
    let source = ram(&model);
    for prefetch_ahead in 0..=5 {
        let adapter = Box::new(probe(&[3, 9], 0.0));
        let executor =
            executor(&model, source.clone(), Some(adapter), options(Kind::Float, prefetch_ahead));
        let seen = watch(&executor);
        for step in 0..3 {
            let options = StepOptions { step, another_follows: step < 2, ..StepOptions::default() };
            executor.train_step(&[batch(4, 0, 1)], options, &mut Gradients::new()).unwrap();
        }
        let seen = seen.lock().unwrap();
        let (most_blocks, most_bytes, left) = replay(&seen, &*source);
        let stats = executor.stats().unwrap();
        assert_eq!(most_blocks, prefetch_ahead + 1);
        assert_eq!(stats.peak_resident_blocks, most_blocks);
        assert_eq!(stats.peak_bytes, most_bytes);
        assert_eq!(stats.resident_blocks, left.len());
        assert_eq!(executor.stream().history().unwrap(), *seen);
        let leases = seen.iter().filter(|transition| transition.change == Change::Leased);
        let leased: Vec<_> = leases.map(|transition| transition.block).collect();
        assert_eq!(leased, executor.training_visits(false).repeat(3));
    }
}

#[test]
fn more_slots_than_blocks_are_never_made() {
    let model = ToyModel::equal(2);
    let executor = executor(&model, ram(&model), None, options(Kind::Float, usize::MAX));
    for _ in 0..3 {
        infer(&executor).unwrap();
    }
    let stats = executor.stats().unwrap();
    let image_bytes = executor.stream().blocks()[0].image_bytes as u64;
    assert_eq!((stats.peak_resident_blocks, stats.h2d_bytes), (2, 2 * image_bytes));
}

#[test]
fn the_history_keeps_the_last_4096_changes() {
    let model = ToyModel::equal(5);
    let executor = executor(&model, ram(&model), None, options(Kind::Float, 0));
    let seen = watch(&executor);
    while seen.lock().unwrap().len() < 5000 {
        infer(&executor).unwrap();
    }
    let seen = seen.lock().unwrap();
    let history = executor.stream().history().unwrap();
    assert_eq!(history, seen[seen.len() - 4096..]);
}

#[test]
fn totals_start_anew_when_they_are_reset_and_what_is_on_the_device_stays() {
    let model = ToyModel::equal(5);
    let executor = executor(&model, Disk::new(&model), None, whole_blocks(1));
    infer(&executor).unwrap();
    let before = executor.stats().unwrap();
    let value = executor.stream().read_back(&Tensor::from(1.5_f32)).unwrap();
    assert_eq!(executor.stream().value(&value).unwrap(), 1.5);
    assert_eq!(executor.stats().unwrap().d2h_bytes, 4);
    executor.stream().reset_stats().unwrap();
    let stats = executor.stats().unwrap();
    assert!(
        before.read_bytes > 0 && before.h2d_bytes == before.read_bytes && before.read_busy_ms > 0.0
    );
    assert_eq!((stats.read_bytes, stats.h2d_bytes, stats.d2h_bytes), (0, 0, 0));
    assert_eq!((stats.read_busy_ms, stats.h2d_ms), (0.0, 0.0));
    assert_eq!((stats.host_wait_ms, stats.compute_wait_ms, stats.staging_wait_ms), (0.0, 0.0, 0.0));
    assert_eq!((stats.resident_blocks, stats.peak_resident_blocks), (2, 2));
    assert_eq!(stats.peak_bytes, before.peak_bytes);
    assert_eq!(stats.staging_bytes, before.staging_bytes);
    assert_eq!((stats.read_gb_per_s(), stats.h2d_gb_per_s()), (0.0, 0.0));
}

#[test]
fn a_slow_source_shows_as_waiting_of_the_host_and_prefetching_hides_none_of_the_reading() {
    let model = ToyModel::equal(5);
    let num_bytes =
        ram(&model).blocks().iter().take(5).map(|block| block.image_bytes).sum::<usize>();
    let rate = 100e3;
    let takes_ms = num_bytes as f64 / rate * 1e3;
    let slow = Arc::new(ThrottledSource::new(Disk::new(&model), rate).unwrap());
    let executor = executor(&model, slow, None, whole_blocks(1));
    infer(&executor).unwrap();
    let stats = executor.stats().unwrap();
    assert!(stats.host_wait_ms > 0.5 * takes_ms, "{stats:?}, {takes_ms}");
    assert!(stats.read_busy_ms > 0.9 * takes_ms, "{stats:?}, {takes_ms}");
    assert!(stats.compute_wait_ms >= 0.0 && stats.staging_wait_ms >= 0.0 && stats.h2d_ms >= 0.0);
    assert!(stats.read_gb_per_s() <= rate / 1e9 * 1.1);

    // The compute stream's own waiting is another number: the host's does not appear in it.
    assert!(stats.compute_wait_ms < stats.host_wait_ms, "{stats:?}");
    assert!(stats.host_ms < 0.3 * stats.host_wait_ms, "{stats:?}");
}
