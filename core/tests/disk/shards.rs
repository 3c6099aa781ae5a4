//! Shards: what is kept, what is refused, what is found damaged.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockstreamer_core::Result;
use blockstreamer_core::block::{BlockIndex, Placement};
use blockstreamer_core::device::HostBuffer;
use blockstreamer_core::source::shards::{
    CHUNK_BYTES, Manifest, ShardSource, ShardSummary, verify_shards, write_shards,
};
use blockstreamer_core::source::{BlockSource, FaultySource, RamSource};
use blockstreamer_core::tch::{Device, Kind, Tensor};

use crate::{assert_says, damage, names_in, read};

/// Three blocks: two and a bit chunks, a small one, and one without tensors.
fn source() -> Arc<RamSource> {
    source_with(0)
}

/// The same, but the second block begins with `first`.
fn source_with(first: i64) -> Arc<RamSource> {
    let values = |len: i64| {
        Tensor::arange(len, (Kind::Int, Device::Cpu)).remainder(251).to_kind(Kind::Uint8)
    };
    let small = values(5000);
    let _ = small.narrow(0, 0, 1).fill_(first);
    let large = 2 * CHUNK_BYTES as i64 + 1000;
    let blocks = [
        ("layers.0", Placement::Streamed, vec![("a", values(large)), ("b", values(3))]),
        ("layers.1", Placement::Streamed, vec![("a", small)]),
        ("empty", Placement::Resident, vec![]),
    ];
    Arc::new(RamSource::from_tensors(blocks, HostBuffer::new).unwrap())
}

fn write(source: &dyn BlockSource, identity: &str, directories: &[&Path]) -> Result<ShardSummary> {
    let directories: Vec<PathBuf> = directories.iter().map(|path| path.to_path_buf()).collect();
    write_shards(source, identity, &directories, &mut |_| {})
}

/// Names of the blocks that a check against `source` finds wrong.
fn damaged_blocks(source: &dyn BlockSource, identity: &str, directory: &Path) -> Vec<String> {
    let damaged = verify_shards(source, identity, &[directory.to_owned()], &mut |_| {}).unwrap();
    damaged.into_iter().map(|damage| damage.block).collect()
}

fn counts(summary: ShardSummary) -> (usize, usize) {
    (summary.num_written, summary.num_kept)
}

fn read_all(source: &dyn BlockSource, block: usize) -> Result<Vec<u8>> {
    let mut image = vec![0; source.blocks()[block].image_bytes];
    source.read(BlockIndex(block), 0..image.len(), &mut image)?;
    Ok(image)
}

#[test]
fn files_are_aligned_and_stripes_dealt_over_the_folders() {
    let [first, second] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let source = source();
    let mut seen = Vec::new();
    let directories = [first.path().to_owned(), second.path().join("deeper")];
    let summary = write_shards(&*source, "id", &directories, &mut |at| {
        seen.push((at.done_bytes, at.total_bytes))
    })
    .unwrap();
    assert_eq!(counts(summary), (3, 0));
    assert_eq!(seen.last(), Some(&(summary.total_bytes, summary.total_bytes)));
    assert!(seen.is_sorted());
    assert_eq!(names_in(first.path()), ["block-00000.bin", "block-00002.bin", "manifest.json"]);
    assert_eq!(names_in(&directories[1]), ["block-00000.bin", "block-00001.bin", "stripes.json"]);
    let size = |folder: &Path, file| folder.join(file).metadata().unwrap().len() as usize;
    // Stripes 0 and 2 in the first folder, 1 in the second; block 1 begins in the second.
    assert_eq!(size(first.path(), "block-00000.bin"), CHUNK_BYTES + 4096);
    assert_eq!(size(&directories[1], "block-00000.bin"), CHUNK_BYTES);
    assert_eq!(size(&directories[1], "block-00001.bin"), 8192);
    assert_eq!(size(first.path(), "block-00002.bin"), 0);
    let shards = ShardSource::open(first.path(), None).unwrap();
    for block in 0..3 {
        assert_eq!(read_all(&shards, block).unwrap(), read_all(&*source, block).unwrap());
    }
    assert!(damaged_blocks(&*source, "id", first.path()).is_empty());
}

#[test]
fn a_range_inside_a_chunk_is_verified_and_counted_whole() {
    let directory = tempfile::tempdir().unwrap();
    let source = source();
    write(&*source, "id", &[directory.path()]).unwrap();
    let shards = ShardSource::open(directory.path(), None).unwrap();
    let range = CHUNK_BYTES - 3..CHUNK_BYTES + 5;
    let mut part = vec![0; range.len()];
    assert_eq!(shards.read(BlockIndex(0), range.clone(), &mut part).unwrap(), 2 * CHUNK_BYTES);
    assert_eq!(part, read(&*source, 0, range.clone()));
    let plain = shards.with_verify(false);
    assert_eq!(plain.read(BlockIndex(0), range, &mut part).unwrap(), part.len());
    let image_bytes = plain.blocks()[0].image_bytes;
    let checked = plain.with_verify(true);
    let mut tail = vec![0; image_bytes - 2 * CHUNK_BYTES];
    let range = 2 * CHUNK_BYTES..image_bytes;
    assert_eq!(checked.read(BlockIndex(0), range, &mut tail).unwrap(), tail.len());
}

#[test]
fn one_flipped_bit_is_found_on_read_and_by_verification_and_repaired_alone() {
    let directory = tempfile::tempdir().unwrap();
    let source = source();
    write(&*source, "id", &[directory.path()]).unwrap();
    let file = directory.path().join("block-00000.bin");
    damage(&file, CHUNK_BYTES + 17);
    let shards = ShardSource::open(directory.path(), Some("id")).unwrap();
    assert_says(read_all(&shards, 0), &["block-00000.bin", "layers.0", "checksum", "again"]);
    // The other chunks and blocks are sound.
    assert_eq!(read(&shards, 0, 0..CHUNK_BYTES), read(&*source, 0, 0..CHUNK_BYTES));
    read_all(&shards, 1).unwrap();
    read_all(&shards.with_verify(false), 0).unwrap();
    assert_eq!(damaged_blocks(&*source, "id", directory.path()), ["layers.0"]);

    assert_eq!(counts(write(&*source, "id", &[directory.path()]).unwrap()), (1, 2));
    assert!(damaged_blocks(&*source, "id", directory.path()).is_empty());
}

#[test]
fn a_missing_or_short_file_is_refused_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let source = source();
    write(&*source, "id", &[directory.path()]).unwrap();
    let file = directory.path().join("block-00001.bin");
    std::fs::File::options().write(true).open(&file).unwrap().set_len(4096).unwrap();
    assert_says(
        ShardSource::open(directory.path(), None),
        &["block-00001.bin", "4096 bytes instead of the 8192"],
    );
    std::fs::remove_file(&file).unwrap();
    assert_says(ShardSource::open(directory.path(), None), &["block-00001.bin", "No such file"]);
    assert_eq!(damaged_blocks(&*source, "id", directory.path()), ["layers.1"]);
}

#[test]
fn stale_foreign_and_damaged_manifests_are_refused_with_the_reason() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    assert_says(ShardSource::open(path, None), &["no manifest.json", "interrupted"]);
    write(&*source(), "id", &[path]).unwrap();
    assert_says(
        ShardSource::open(path, Some("new")),
        &["another checkpoint", "identity id", "now new"],
    );

    let manifest = path.join("manifest.json");
    let text = std::fs::read_to_string(&manifest).unwrap();
    for (from, to, part) in [
        (
            "\"version\":2",
            "\"version\":1",
            "version 1, but this program reads version 2; write the",
        ),
        ("\"version\":2,", "", "version none"),
        ("blockstreamer-shards", "something", "not a manifest of shards"),
        ("\"offset_bytes\":0", "\"offset_bytes\":8", "layers.0"),
        ("\"image_bytes\":5120", "\"image_bytes\":1024", "layers.1"),
        ("\"shape\":[5000]", "\"shape\":[18446744073709551615]", "too large"),
        ("block-00001.bin", "../block-00001.bin", "cannot be"),
        ("\"directories\":[\".\"]", "\"directories\":[]", "no folder"),
        ("\"chunk_crc32\":[", "\"chunk_crc32\":[5,", "checksums"),
        ("}", "", "damaged"),
    ] {
        assert!(text.contains(from), "{from} is not in {text}");
        std::fs::write(&manifest, text.replacen(from, to, 1)).unwrap();
        assert_says(ShardSource::open(path, None), &["manifest.json", part]);
    }
    std::fs::write(&manifest, &text[..text.len() / 2]).unwrap();
    assert_says(ShardSource::open(path, None), &["damaged"]);
    // A damaged one of ours is replaced, another program's is not.
    write(&*source(), "id", &[path]).unwrap();
    std::fs::write(&manifest, "{\"blocks\": []}").unwrap();
    assert_says(write(&*source(), "id", &[path]), &["manifest.json", "another folder"]);
    assert_eq!(std::fs::read_to_string(&manifest).unwrap(), "{\"blocks\": []}");
}

#[test]
fn an_interrupted_run_leaves_no_manifest_and_is_taken_up_where_it_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let source = source();
    let failing = FaultySource::new(source.clone(), vec![(BlockIndex(1), 0)]);
    assert_says(write(&failing, "id", &[directory.path()]), &["layers.1", "injected"]);
    assert_eq!(names_in(directory.path()), ["block-00000.bin", "manifest.journal"]);
    assert_says(ShardSource::open(directory.path(), None), &["interrupted"]);
    // A torn last line, as a power cut leaves it, and the partial file of a killed process.
    let journal = directory.path().join("manifest.journal");
    let mut text = std::fs::read_to_string(&journal).unwrap();
    text += "\n{\"identity\":\"id\",\"pa";
    std::fs::write(&journal, text).unwrap();
    std::fs::write(directory.path().join(".block-00001.bin.Xy12ab.partial"), "half").unwrap();

    assert_eq!(counts(write(&failing, "id", &[directory.path()]).unwrap()), (2, 1));
    assert_eq!(
        names_in(directory.path()),
        ["block-00000.bin", "block-00001.bin", "block-00002.bin", "manifest.json"]
    );
    assert_eq!(counts(write(&*source, "id", &[directory.path()]).unwrap()), (0, 3));
    let manifest = Manifest::read(directory.path()).unwrap();
    assert_eq!(manifest.identity, "id");
}

#[test]
fn a_finished_block_that_was_damaged_since_is_not_kept() {
    let directory = tempfile::tempdir().unwrap();
    let failing = FaultySource::new(source(), vec![(BlockIndex(1), 0)]);
    write(&failing, "id", &[directory.path()]).unwrap_err();
    damage(&directory.path().join("block-00000.bin"), 5);
    assert_eq!(counts(write(&failing, "id", &[directory.path()]).unwrap()), (3, 0));
    assert!(damaged_blocks(&failing, "id", directory.path()).is_empty());
}

#[test]
fn shards_of_another_checkpoint_are_replaced_and_never_described_by_the_old_manifest() {
    let directory = tempfile::tempdir().unwrap();
    write(&*source(), "old", &[directory.path()]).unwrap();
    let failing = FaultySource::new(source(), vec![(BlockIndex(1), 0)]);
    write(&failing, "new", &[directory.path()]).unwrap_err();
    assert_says(ShardSource::open(directory.path(), Some("old")), &["no manifest.json"]);
    assert_eq!(counts(write(&failing, "new", &[directory.path()]).unwrap()), (2, 1));
    ShardSource::open(directory.path(), Some("new")).unwrap();
    assert_says(write(&failing, "new", &[]), &["at least one folder"]);
}

#[test]
fn one_byte_that_changed_in_the_model_is_found_by_verification_and_written_by_the_next_run() {
    let directory = tempfile::tempdir().unwrap();
    let directories = [directory.path().to_owned()];
    write(&*source(), "id", &[directory.path()]).unwrap();
    // The identity samples, so it may stay the same.
    let changed = source_with(1);
    let damaged = verify_shards(&*changed, "id", &directories, &mut |_| {}).unwrap();
    assert_eq!(damaged.len(), 1);
    let reason = damaged[0].reason.to_string();
    for part in ["block-00001.bin", "bytes 0 to 5120 of block 'layers.1'", &changed.describe()] {
        assert!(reason.contains(part), "'{part}' is not in: {reason}");
    }
    assert_eq!(counts(write(&*changed, "id", &[directory.path()]).unwrap()), (1, 2));
    assert!(damaged_blocks(&*changed, "id", directory.path()).is_empty());
    assert_eq!(damaged_blocks(&*source(), "id", directory.path()), ["layers.1"]);
}

#[test]
fn a_verification_that_cannot_be_carried_out_is_an_error_and_no_damage() {
    let directory = tempfile::tempdir().unwrap();
    let directories = [directory.path().to_owned()];
    let source = source();
    let verify = |source: &dyn BlockSource, identity: &str, directories: &[PathBuf]| {
        verify_shards(source, identity, directories, &mut |_| {})
    };
    assert_says(verify(&*source, "id", &directories), &["no manifest.json"]);
    write(&*source, "id", &[directory.path()]).unwrap();
    assert_says(verify(&*source, "new", &directories), &["another checkpoint"]);
    assert_says(verify(&*source, "id", &[]), &["at least one folder"]);
    let failing = FaultySource::new(source, vec![(BlockIndex(0), 1)]);
    assert_says(verify(&failing, "id", &directories), &["layers.0", "injected"]);
    let values = Tensor::ones([5000], (Kind::Uint8, Device::Cpu));
    let blocks = [("layers.0", Placement::Streamed, vec![("a", values)])];
    let other = RamSource::from_tensors(blocks, HostBuffer::new).unwrap();
    assert_says(verify(&other, "id", &directories), &["other blocks than the model"]);
}
