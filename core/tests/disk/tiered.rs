//! Chosen blocks in host memory, the others in files.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use blockstreamer_core::Error;
use blockstreamer_core::block::{BlockIndex, BlockSpec, Placement};
use blockstreamer_core::checkpoint::{CheckpointFile, Layout, TensorSource, read_header};
use blockstreamer_core::device::HostBuffer;
use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::read::{ReadMethod, ReadOffer};
use blockstreamer_core::source::{BlockSource, FaultySource, SafetensorsSource, TieredSource};

use rustix::fs::{Advice, fadvise};

use crate::{Fixture, Numbers, assert_says, file_bytes, made};

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
            let tiered =
                TieredSource::load(Arc::clone(&files), &chosen, ReadMethod::Auto, HostBuffer::new)
                    .unwrap();
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
        let tiered =
            TieredSource::load(Arc::clone(&files), &chosen, ReadMethod::Auto, reserve).unwrap();
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
        TieredSource::load(Arc::new(failing), &chosen, ReadMethod::Auto, HostBuffer::new),
        &["block 'block.1'", "injected"],
    );
    assert_says(
        TieredSource::load(files(&fixture), &[BlockIndex(99)], ReadMethod::Auto, HostBuffer::new),
        &["block 99", "safetensors files in"],
    );
}

/// How much of a file is in the page cache.
fn num_cached_bytes(path: &Path) -> usize {
    let file = File::open(path).unwrap();
    // SAFETY: nobody shortens the file meanwhile, and its pages are not touched.
    let map = unsafe { memmap2::Mmap::map(&file).unwrap() };
    let mut pages = vec![0_u8; map.len().div_ceil(4096)];
    // SAFETY: the range is a mapping, and there is a byte for each of its pages.
    let found = unsafe { libc::mincore(map.as_ptr() as *mut _, map.len(), pages.as_mut_ptr()) };
    assert_eq!(found, 0, "{}", std::io::Error::last_os_error());
    pages.into_iter().filter(|page| page & 1 == 1).count() * 4096
}

#[test]
fn loading_reads_past_the_page_cache() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let numbers = &mut Numbers(8);
    let tensors = ["a", "b"].map(|name| made(name, Dtype::U8, &[3_000_001], numbers)).to_vec();
    let path = folder.path().join("model.safetensors");
    let file = File::create(&path).unwrap();
    (&file).write_all(&file_bytes(&tensors, 3)).unwrap();
    file.sync_all().unwrap();
    let header = read_header(&path).unwrap();
    let layout = Layout {
        blocks: vec![
            BlockSpec::pack(
                "layers.0",
                Placement::Streamed,
                tensors.iter().map(|made| (made.name.clone(), made.dtype, made.shape.clone())),
            )
            .unwrap(),
        ],
        sources: vec![
            (header.tensors.iter())
                .map(|tensor| TensorSource {
                    checkpoint: tensor.name.clone(),
                    file: 0,
                    offset_bytes: tensor.offset_bytes,
                })
                .collect(),
        ],
        files: vec![CheckpointFile { path: path.clone(), num_bytes: header.file_bytes }],
    };
    let files: Arc<dyn BlockSource> = Arc::new(SafetensorsSource::open(layout).unwrap());
    // What is in the cache when the header was read.
    fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    let offer = ReadOffer::of(&path).unwrap();
    if offer.direct.is_err() || num_cached_bytes(&path) > 0 {
        println!("skipped: this file system keeps its files in memory: {offer:?}");
        return;
    }
    for read in [ReadMethod::Auto, ReadMethod::Threads, ReadMethod::Buffered] {
        let tiered =
            TieredSource::load(Arc::clone(&files), &[BlockIndex(0)], read, HostBuffer::new);
        let tiered = tiered.unwrap();
        let image = tiered.lend(BlockIndex(0)).unwrap().bytes();
        for (tensor, spec) in tensors.iter().zip(&files.blocks()[0].tensors) {
            assert!(image[spec.offset_bytes..].starts_with(&tensor.bytes), "{}", tensor.name);
        }
        assert_eq!(num_cached_bytes(&path) > 0, read == ReadMethod::Buffered, "{read:?}");
    }
}
