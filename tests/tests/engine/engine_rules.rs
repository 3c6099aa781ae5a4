//! The streaming engine by itself: what it refuses, and what it says.

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::sync::{Arc, Mutex};

use blockstreamer_core::Error;
use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::device::CopyEngine;
use blockstreamer_core::source::BlockSource;
use blockstreamer_core::stream::{BlockStream, StreamOptions};
use blockstreamer_tests::ToyModel;

use crate::rig::{Disk, device, ram, stream_options};

fn engine() -> Arc<dyn CopyEngine> {
    <dyn CopyEngine>::for_device(device()).unwrap().into()
}

fn stream(prefetch_ahead: usize) -> BlockStream {
    let source = Disk::new(&ToyModel::equal(4));
    BlockStream::new(source, engine(), &stream_options(prefetch_ahead)).unwrap()
}

fn visits(blocks: impl IntoIterator<Item = usize>) -> Vec<BlockIndex> {
    blocks.into_iter().map(BlockIndex).collect()
}

#[test]
fn a_block_larger_than_the_slot_budget_is_refused_before_anything_is_read() {
    let model = ToyModel::mixed();
    let disk = Disk::new(&model);
    let largest = disk.blocks()[9].image_bytes;
    let options = |budget| StreamOptions { slot_budget_bytes: Some(budget), ..stream_options(1) };
    let error = BlockStream::new(disk.clone(), engine(), &options(largest - 1)).unwrap_err();
    let Error::OversizedBlock { block, num_bytes, budget_bytes } = &error else {
        panic!("{error:?}");
    };
    assert_eq!((&**block, *num_bytes, *budget_bytes), ("part.9", largest, largest - 1));
    let text = error.to_string();
    for part in ["part.9", &largest.to_string(), &(largest - 1).to_string()] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(disk.num_reads(), 0);
    // Residents are no business of the slots.
    BlockStream::new(disk, engine(), &options(largest)).unwrap();
}

#[test]
fn options_without_staging_are_refused() {
    for (chunk_bytes, num_chunks) in [(0, 2), (10, 0)] {
        let options = StreamOptions { chunk_bytes, num_chunks, ..StreamOptions::default() };
        let source = Disk::new(&ToyModel::equal(2));
        assert!(BlockStream::new(source, engine(), &options).is_err());
    }
}

#[test]
fn a_second_lease_is_refused_while_one_is_alive() {
    let stream = stream(1);
    stream.schedule(visits([0, 1])).unwrap();
    let lease = stream.lease().unwrap();
    let error = stream.lease().unwrap_err().to_string();
    assert!(error.contains("while a block is in use"), "{error}");
    assert!(stream.close().unwrap_err().to_string().contains("in use"));
    drop(lease);
    assert_eq!(stream.lease().unwrap().block(), BlockIndex(1), "the refusal cost no visit");
}

#[test]
fn a_block_visited_twice_in_a_row_is_not_fetched_twice() {
    let stream = stream(0);
    stream.schedule(visits([2, 2, 2])).unwrap();
    for _ in 0..3 {
        assert_eq!(stream.lease().unwrap().block(), BlockIndex(2));
    }
    assert_eq!(stream.stats().unwrap().h2d_bytes, stream.blocks()[2].image_bytes as u64);
}

#[test]
fn a_lease_without_a_scheduled_visit_is_refused() {
    let stream = stream(1);
    assert!(stream.lease().unwrap_err().to_string().contains("schedule"));
    stream.schedule(visits([0])).unwrap();
    drop(stream.lease().unwrap());
    assert!(stream.lease().unwrap_err().to_string().contains("schedule"));
}

#[test]
fn resident_and_unknown_blocks_cannot_be_scheduled_and_nothing_of_the_list_is() {
    let stream = stream(1);
    // Block 4 is the resident one.
    for block in [4, 5, usize::MAX] {
        let error = stream.schedule(visits([0, block])).unwrap_err().to_string();
        assert!(error.contains(&format!("block {block} ")), "{error}");
        assert_eq!(stream.num_upcoming().unwrap(), 0);
    }
    assert_eq!(stream.stats().unwrap().h2d_bytes, 0);
}

#[test]
fn a_closed_engine_says_so_and_keeps_its_totals() {
    let stream = stream(1);
    stream.schedule(visits([0, 1, 2])).unwrap();
    drop(stream.lease().unwrap());
    stream.close().unwrap();
    stream.close().unwrap();
    for error in [stream.schedule(visits([0])).unwrap_err(), stream.lease().unwrap_err()] {
        assert!(error.to_string().contains("closed"), "{error}");
    }
    stream.abandon().unwrap();
    let stats = stream.stats().unwrap();
    assert!(stats.read_bytes >= 2 * stream.blocks()[0].image_bytes as u64, "{stats:?}");
    assert_eq!((stats.resident_blocks, stats.peak_resident_blocks), (0, 2));
}

#[test]
fn an_abandoned_itinerary_leaves_what_has_arrived_to_be_used() {
    let stream = stream(1);
    stream.schedule(visits([0, 1, 2, 3])).unwrap();
    drop(stream.lease().unwrap());
    stream.abandon().unwrap();
    assert_eq!(stream.num_upcoming().unwrap(), 0);
    let before = stream.stats().unwrap().h2d_bytes;
    stream.schedule(visits([1])).unwrap();
    assert_eq!(stream.lease().unwrap().block(), BlockIndex(1));
    assert_eq!(stream.stats().unwrap().h2d_bytes, before, "block 1 was there already");
}

#[test]
fn a_lease_knows_its_own_memory() {
    let stream = stream(1);
    stream.schedule(visits([0, 1])).unwrap();
    let lease = stream.lease().unwrap();
    let weight = lease.tensors().get("down.weight").unwrap();
    assert!(lease.owns(weight) && lease.owns(&weight.narrow(0, 3, 1)));
    assert!(!lease.owns(&weight.copy()));
}

thread_local! {
    static STREAM: RefCell<Weak<BlockStream>> = const { RefCell::new(Weak::new()) };
}

#[test]
fn an_observer_that_calls_the_engine_gets_an_error_and_the_engine_goes_on() {
    let stream = Rc::new(stream(1));
    STREAM.set(Rc::downgrade(&stream));
    let errors: Arc<Mutex<Vec<String>>> = Arc::default();
    let for_observer = Arc::clone(&errors);
    let observer = move |_: &_| {
        let Some(stream) = STREAM.with_borrow(Weak::upgrade) else { return };
        let outcomes = [
            stream.lease().map(drop),
            stream.schedule(visits([0])),
            stream.stats().map(drop),
            stream.abandon(),
            stream.close(),
        ];
        let texts = outcomes.into_iter().map(|outcome| outcome.unwrap_err().to_string());
        for_observer.lock().unwrap().extend(texts);
    };
    stream.observe(Box::new(observer)).unwrap();
    stream.schedule(visits(0..4)).unwrap();
    for block in 0..4 {
        assert_eq!(stream.lease().unwrap().block(), BlockIndex(block));
    }
    let errors = errors.lock().unwrap();
    // Four blocks are fetched, leased and released, and two are evicted.
    assert_eq!(errors.len(), 5 * (3 * 4 + 2));
    assert!(errors.iter().all(|text| text.contains("observer")), "{errors:?}");
}

#[test]
fn ram_lends_and_is_not_read() {
    let stream = BlockStream::new(ram(&ToyModel::equal(3)), engine(), &stream_options(1)).unwrap();
    stream.schedule(visits(0..3)).unwrap();
    for _ in 0..3 {
        drop(stream.lease().unwrap());
    }
    let stats = stream.stats().unwrap();
    assert_eq!((stats.read_bytes, stats.staging_bytes), (0, 0), "no staging memory was needed");
    assert_eq!(stats.h2d_bytes, 3 * stream.blocks()[0].image_bytes as u64);
}
