//! Chosen blocks in host memory, the others in files.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use blockstreamer_core::Error;
use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::device::HostBuffer;
use blockstreamer_core::source::{BlockSource, FaultySource, SafetensorsSource, TieredSource};

use crate::{Fixture, Numbers, assert_says};

fn files(fixture: &Fixture) -> Arc<dyn BlockSource> {
    Arc::new(SafetensorsSource::open(fixture.layout()).unwrap())
}

#[test]
fn chosen_blocks_are_lent_and_every_byte_of_all_is_right() {
    for seed in 0..40 {
        let fixture = Fixture::random(seed);
        let numbers = &mut Numbers(!seed);
        let files = files(&fixture);
        let num_blocks = files.blocks().len();
        for num_chosen in 0..=num_blocks {
            // Not in order: the caller's order is one of importance.
            let chosen: Vec<_> = (0..num_chosen).rev().map(BlockIndex).collect();
            let tiered = TieredSource::load(Arc::clone(&files), &chosen, HostBuffer::new).unwrap();
            fixture.check(&tiered, numbers);
            assert!(tiered.refusal().is_none());
            assert_eq!(tiered.num_held(), num_chosen);
            let held_bytes: usize =
                files.blocks()[..num_chosen].iter().map(|block| block.image_bytes).sum();
            assert_eq!(tiered.held_bytes(), held_bytes);
            for block in (0..num_blocks).map(BlockIndex) {
                let lent = tiered.lend(block).map(HostBuffer::bytes);
                let expected = (block.0 < num_chosen).then(|| fixture.image(block.0));
                assert_eq!(lent, expected.as_deref());
                assert_eq!(tiered.extents(block), files.extents(block));
            }
            assert_eq!(tiered.files(), files.files());
        }
    }
}

#[test]
fn memory_that_runs_out_half_way_leaves_the_rest_in_the_files() {
    let fixture = Fixture::random(5);
    let files = files(&fixture);
    let chosen: Vec<_> = (0..files.blocks().len()).map(BlockIndex).collect();
    assert!(chosen.len() > 2, "{}", chosen.len());
    for granted in 0..chosen.len() {
        let asked = AtomicUsize::new(0);
        let reserve = |num_bytes| match asked.fetch_add(1, Ordering::SeqCst) < granted {
            true => HostBuffer::new(num_bytes),
            false => Err(Error::OutOfMemory { action: "testing".into(), message: "no".into() }),
        };
        let tiered = TieredSource::load(Arc::clone(&files), &chosen, reserve).unwrap();
        assert_eq!(tiered.num_held(), granted);
        assert!(tiered.refusal().unwrap().to_string().contains("testing"));
        fixture.check(&tiered, &mut Numbers(1));
        let lent: BTreeSet<_> =
            chosen.iter().filter(|block| tiered.lend(**block).is_some()).collect();
        assert_eq!(lent.len(), granted);
    }
}

#[test]
fn a_block_that_cannot_be_read_is_an_error_that_names_it() {
    let fixture = Fixture::random(5);
    let failing = FaultySource::new(files(&fixture), vec![(BlockIndex(1), 0)]);
    let chosen = [BlockIndex(0), BlockIndex(1)];
    assert_says(
        TieredSource::load(Arc::new(failing), &chosen, HostBuffer::new),
        &["block 'block.1'", "injected"],
    );
    assert_says(
        TieredSource::load(files(&fixture), &[BlockIndex(99)], HostBuffer::new),
        &["block 99", "safetensors files in"],
    );
}
