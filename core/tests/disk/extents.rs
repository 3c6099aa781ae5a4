//! What sources say of where blocks lie is true: whoever reads the files himself gets the images.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::source::shards::{ShardSource, write_shards};
use blockstreamer_core::source::{
    BlockSource, Extent, FaultySource, SafetensorsSource, ThrottledSource,
};
use blockstreamer_core::weights::{Role, WeightTable, row};

use crate::{Fixture, Numbers, file_bytes, folder, made, read};

/// Reads every extent of every block by hand and compares. Extents are in image order, do not meet, and
/// hold every tensor byte.
#[track_caller]
pub(crate) fn assert_extents_are_the_images(source: &dyn BlockSource) {
    let files: Vec<_> = source.files().iter().map(|path| File::open(path).unwrap()).collect();
    for (block, spec) in source.blocks().iter().enumerate() {
        let mut image = vec![0; spec.image_bytes];
        let mut covered = vec![false; spec.image_bytes];
        let mut end = 0;
        for extent in source.extents(BlockIndex(block)).unwrap() {
            let Extent { file, file_offset_bytes, image_offset_bytes, num_bytes } = extent;
            assert!(num_bytes > 0 && image_offset_bytes >= end, "{extent:?} after {end}");
            end = image_offset_bytes + num_bytes;
            files[file]
                .read_exact_at(&mut image[image_offset_bytes..end], file_offset_bytes)
                .unwrap();
            covered[image_offset_bytes..end].fill(true);
        }
        for tensor in &spec.tensors {
            let range = tensor.offset_bytes..tensor.offset_bytes + tensor.num_bytes;
            assert!(covered[range].iter().all(|covered| *covered), "{} has a hole", tensor.name);
        }
        assert_eq!(image, read(source, block, 0..spec.image_bytes), "block {}", spec.name);
    }
    assert!(source.extents(BlockIndex(source.blocks().len())).is_none());
}

#[test]
fn reading_the_files_by_their_extents_gives_the_images_of_random_checkpoints() {
    for seed in 0..40 {
        let fixture = Fixture::random(seed);
        let files = SafetensorsSource::open(fixture.layout()).unwrap();
        assert_extents_are_the_images(&files);
        if seed >= 8 {
            continue;
        }
        // Written to the disk, which takes its time.
        let target = tempfile::tempdir().unwrap();
        write_shards(&files, "id", &[target.path().to_owned()], &mut |_| {}).unwrap();
        assert_extents_are_the_images(&ShardSource::open(target.path(), None).unwrap());
    }
}

#[test]
fn tensors_that_follow_each_other_in_file_and_image_are_one_extent() {
    let numbers = &mut Numbers(1);
    let sizes = [512, 256, 1000, 40];
    let tensors: Vec<_> = sizes
        .iter()
        .enumerate()
        .map(|(number, size)| made(&format!("t{number}"), Dtype::U8, &[*size], numbers))
        .collect();
    let directory = folder(&[("model.safetensors", file_bytes(&tensors, 3))]);
    let rows: Vec<_> = ["t0", "t1", "t2", "t3"]
        .iter()
        .zip(&sizes)
        .map(|(name, size)| row(name, name, Role::Buffer(Dtype::U8), &[*size]))
        .collect();
    let table = WeightTable::new(Dtype::BF16).layers("layers.{n}", 1, &rows);
    let checkpoint = blockstreamer_core::checkpoint::Checkpoint::open(directory.path()).unwrap();
    let layout =
        blockstreamer_core::checkpoint::Layout::new(&checkpoint, &table, None, |_| Ok(false))
            .unwrap();
    let source = SafetensorsSource::open(layout).unwrap();
    let extents = source.extents(BlockIndex(0)).unwrap();
    // The image has a gap after 1,000 bytes, the file has none.
    let lengths: Vec<_> =
        extents.iter().map(|extent| (extent.image_offset_bytes, extent.num_bytes)).collect();
    assert_eq!(lengths, [(0, 1768), (1792, 40)]);
    assert_extents_are_the_images(&source);
}

#[test]
fn sources_that_must_be_asked_themselves_name_no_files() {
    let fixture = Fixture::random(5);
    let files: Arc<dyn BlockSource> = Arc::new(SafetensorsSource::open(fixture.layout()).unwrap());
    let faulty = FaultySource::new(Arc::clone(&files), Vec::new());
    let throttled = ThrottledSource::new(files, 1e9).unwrap();
    for source in [&faulty as &dyn BlockSource, &throttled] {
        assert!(source.extents(BlockIndex(0)).is_none(), "{}", source.describe());
        assert!(source.files().is_empty() && source.check_unit_bytes() == 1);
    }
}
