//! Shards striped over several folders: every block comes from all of them at once.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockstreamer_core::block::{BlockIndex, Placement};
use blockstreamer_core::device::HostBuffer;
use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::source::shards::{
    CHUNK_BYTES, Damage, ShardSource, ShardSummary, verify_shards, write_shards,
};
use blockstreamer_core::source::{BlockSource, FaultySource, RamSource};

use crate::extents::assert_extents_are_the_images;
use crate::{Numbers, assert_says, damage, made, names_in, read};

/// Blocks of random bytes, as large as `sizes` say.
fn source(sizes: &[usize], numbers: &mut Numbers) -> Arc<RamSource> {
    let names: Vec<_> = (0..sizes.len()).map(|number| format!("layers.{number}")).collect();
    let blocks = names.iter().zip(sizes).map(|(name, size)| {
        let bytes = made("a", Dtype::U8, &[*size], numbers).bytes;
        let tensor = blockstreamer_core::tch::Tensor::from_slice(&bytes);
        (name.as_str(), Placement::Streamed, vec![("a", tensor)])
    });
    Arc::new(RamSource::from_tensors(blocks, HostBuffer::new).unwrap())
}

fn folders(root: &Path, num_folders: usize) -> Vec<PathBuf> {
    (0..num_folders).map(|number| root.join(format!("disk-{number}"))).collect()
}

fn write(source: &dyn BlockSource, folders: &[PathBuf]) -> (usize, usize) {
    let ShardSummary { num_written, num_kept, .. } =
        write_shards(source, "id", folders, &mut |_| {}).unwrap();
    (num_written, num_kept)
}

fn verify(source: &dyn BlockSource, folders: &[PathBuf]) -> Vec<Damage> {
    verify_shards(source, "id", folders, &mut |_| {}).unwrap()
}

#[test]
fn blocks_of_odd_sizes_come_back_from_any_number_of_folders() {
    let numbers = &mut Numbers(11);
    for num_folders in 1..=4 {
        let root = tempfile::tempdir().unwrap();
        let folders = folders(root.path(), num_folders);
        let sizes = [
            5 * CHUNK_BYTES + 12_345,
            0,
            1,
            num_folders * CHUNK_BYTES,
            numbers.below(3 * CHUNK_BYTES),
            CHUNK_BYTES - 255,
        ];
        let source = source(&sizes, numbers);
        assert_eq!(write(&*source, &folders), (sizes.len(), 0));
        let shards = ShardSource::open(&folders[0], Some("id")).unwrap();
        for verify in [true, false] {
            let shards = ShardSource::open(&folders[0], None).unwrap().with_verify(verify);
            for (block, spec) in source.blocks().iter().enumerate() {
                let image = read(&*source, block, 0..spec.image_bytes);
                assert_eq!(read(&shards, block, 0..spec.image_bytes), image);
                for _ in 0..4 {
                    let start = numbers.below(image.len() + 1);
                    let end = start + numbers.below(image.len() - start + 1);
                    assert_eq!(read(&shards, block, start..end), image[start..end]);
                }
            }
        }
        assert_extents_are_the_images(&shards);
        // The large block keeps every disk busy, and no disk much longer than another.
        let mut per_folder = vec![0; num_folders];
        for extent in shards.extents(BlockIndex(0)).unwrap() {
            let path = shards.files()[extent.file].to_owned();
            let folder = folders.iter().position(|folder| path.starts_with(folder)).unwrap();
            per_folder[folder] += extent.num_bytes;
        }
        let (least, most) = (per_folder.iter().min().unwrap(), per_folder.iter().max().unwrap());
        assert!(most - least <= CHUNK_BYTES && *least > 0, "{per_folder:?}");
        for path in shards.files() {
            assert!(path.metadata().unwrap().len().is_multiple_of(4096), "{}", path.display());
        }
        assert!(verify(&*source, &folders).is_empty());
        // All of it is whole already.
        assert_eq!(write(&*source, &folders), (0, sizes.len()));
    }
}

#[test]
fn an_interrupted_run_over_two_folders_is_taken_up_and_damage_in_either_is_repaired() {
    let root = tempfile::tempdir().unwrap();
    let folders = folders(root.path(), 2);
    let source = source(&[2 * CHUNK_BYTES + 7, 3 * CHUNK_BYTES], &mut Numbers(2));
    let failing = FaultySource::new(source.clone(), vec![(BlockIndex(1), 2)]);
    let stopped = write_shards(&failing, "id", &folders, &mut |_| {});
    assert_says(stopped, &["layers.1", "injected"]);
    assert_eq!(names_in(&folders[0]), ["block-00000.bin", "manifest.journal"]);
    assert_eq!(names_in(&folders[1]), ["block-00000.bin", "stripes.json"]);
    assert_says(ShardSource::open(&folders[0], None), &["interrupted"]);
    assert_eq!(write(&failing, &folders), (1, 1));

    for folder in &folders {
        damage(&folder.join("block-00000.bin"), 100);
        let damaged = verify(&*source, &folders);
        let reasons: Vec<_> =
            damaged.iter().map(|damage| (&*damage.block, damage.reason.to_string())).collect();
        let path = folder.join("block-00000.bin").display().to_string();
        assert!(matches!(&reasons[..], [("layers.0", reason)] if reason.contains(&path)));
        assert_eq!(write(&*source, &folders), (1, 1));
    }
    assert!(verify(&*source, &folders).is_empty());
}

#[test]
fn a_missing_folder_or_file_is_named() {
    let root = tempfile::tempdir().unwrap();
    let folders = folders(root.path(), 3);
    let source = source(&[4 * CHUNK_BYTES, 9], &mut Numbers(2));
    write(&*source, &folders);
    let lost = root.path().join("lost");
    fs::rename(&folders[2], &lost).unwrap();
    let missing = ["disk-2", "is missing", "disk-0", "mounted"];
    assert_says(ShardSource::open(&folders[0], None), &missing);
    assert_says(verify_shards(&*source, "id", &folders, &mut |_| {}), &missing);
    fs::rename(&lost, &folders[2]).unwrap();
    fs::remove_file(folders[2].join("block-00000.bin")).unwrap();
    assert_says(ShardSource::open(&folders[0], None), &["disk-2/block-00000.bin", "No such file"]);
    let damaged = verify(&*source, &folders);
    assert_eq!(damaged.iter().map(|damage| &*damage.block).collect::<Vec<_>>(), ["layers.0"]);
    assert_eq!(write(&*source, &folders), (1, 1));
    ShardSource::open(&folders[0], None).unwrap();
}

#[test]
fn shards_written_over_other_folders_are_not_taken_for_these() {
    let root = tempfile::tempdir().unwrap();
    let folders = folders(root.path(), 2);
    let source = source(&[2 * CHUNK_BYTES, CHUNK_BYTES], &mut Numbers(8));
    write(&*source, &folders);
    for other in [&folders[..1], &folders] {
        let failing = FaultySource::new(source.clone(), vec![(BlockIndex(1), 0)]);
        write_shards(&failing, "id", other, &mut |_| {}).unwrap_err();
        // What would be described wrongly is described no more.
        assert_says(ShardSource::open(&other[0], None), &["no manifest.json"]);
        write(&*source, other);
        let shards = ShardSource::open(&other[0], None).unwrap();
        for (block, spec) in source.blocks().iter().enumerate() {
            let range = 0..spec.image_bytes;
            assert_eq!(read(&shards, block, range.clone()), read(&*source, block, range));
        }
    }
    let twice = [folders[0].clone(), folders[1].clone(), folders[0].join("../disk-0")];
    let refused = write_shards(&*source, "id", &twice, &mut |_| {});
    assert_says(refused, &["disk-0", "given twice"]);
}

#[test]
fn shards_that_share_a_folder_are_not_written_over_each_other() {
    let root = tempfile::tempdir().unwrap();
    let [a, b, c] = ["a", "b", "c"].map(|name| root.path().join(name));
    let numbers = &mut Numbers(9);
    let sizes = [2 * CHUNK_BYTES, CHUNK_BYTES];
    let (first, second) = (source(&sizes, numbers), source(&sizes, numbers));
    let ours = [a.clone(), c.clone()];
    // From the first block on, and when it is done.
    let failing = FaultySource::new(first.clone(), vec![(BlockIndex(1), 0)]);
    write_shards(&failing, "id", &ours, &mut |_| {}).unwrap_err();
    for attempt in 0..2 {
        for (identity, others, shared, owner) in [
            ("other", vec![b.clone(), c.clone()], &c, "stripes of the shards in"),
            ("id", vec![b.clone(), c.clone()], &c, "stripes of the shards in"),
            ("other", vec![c.clone()], &c, "stripes of the shards in"),
            ("other", vec![b.clone(), a.clone()], &a, "shards of its own"),
            ("id", vec![c.clone(), a.clone()], &c, "stripes of the shards in"),
        ] {
            let refused = write_shards(&*second, identity, &others, &mut |_| {});
            let shared = format!("{}: holds {owner}", shared.display());
            assert_says(refused, &[&shared, "another folder", "empty this one"]);
        }
        if attempt == 0 {
            assert_eq!(write(&*first, &ours), (1, 1));
        }
        assert!(verify(&*first, &ours).is_empty());
    }
    let home = a.display().to_string();
    assert_says(ShardSource::open(&c, None), &["stripes of the shards in", &home, "name that"]);

    // Who empties the folder may have it, and the first shards are not read with the stripes of the second.
    fs::remove_dir_all(&c).unwrap();
    write_shards(&*second, "other", &[b.clone(), c.clone()], &mut |_| {}).unwrap();
    for expected in [None, Some("id")] {
        let words = ["c: holds stripes of other shards", &b.display().to_string(), "again"];
        assert_says(ShardSource::open(&a, expected), &words);
    }
    assert_says(write_shards(&*first, "id", &ours, &mut |_| {}), &["c: holds stripes", "b"]);
    fs::write(c.join("stripes.json"), "{\"home\":").unwrap();
    assert_says(ShardSource::open(&b, None), &["stripes.json", "is damaged", "verify"]);
    assert_says(write_shards(&*first, "id", &ours, &mut |_| {}), &["stripes.json", "is damaged"]);
}

#[test]
fn shards_whose_first_folder_was_moved_can_be_repaired_and_are_still_not_written_over() {
    let root = tempfile::tempdir().unwrap();
    let numbers = &mut Numbers(5);
    let source = source(&[2 * CHUNK_BYTES + 3, 700], numbers);
    let [first, second] = <[PathBuf; 2]>::try_from(folders(root.path(), 2)).unwrap();
    write(&*source, &[first.clone(), second.clone()]);
    let moved = root.path().join("moved");
    fs::rename(&first, &moved).unwrap();
    let elsewhere = root.path().join("elsewhere");
    // Another home does not own these stripes, though they would be the same.
    let refused =
        write_shards(&*source, "id", &[elsewhere, second.clone()], &mut |_| {}).unwrap_err();
    assert!(refused.to_string().contains("disk-1: holds stripes of the shards in"), "{refused}");
    damage(&second.join("block-00000.bin"), 9);
    let both = [moved, second];
    write(&*source, &both);
    assert!(verify(&*source, &both).is_empty());
}

#[test]
fn the_same_folders_in_another_order_or_number_are_other_shards() {
    let root = tempfile::tempdir().unwrap();
    let folders = folders(root.path(), 3);
    let source = source(&[3 * CHUNK_BYTES], &mut Numbers(4));
    write(&*source, &folders);
    let swapped = [&folders[0], &folders[2], &folders[1]].map(Clone::clone);
    let moved = root.path().join("moved");
    fs::create_dir(&moved).unwrap();
    fs::copy(folders[0].join("manifest.json"), moved.join("manifest.json")).unwrap();
    write(&*source, &swapped);
    // A manifest from before, whose first folder was elsewhere when the others were written anew.
    assert_says(ShardSource::open(&moved, None), &["disk-1: holds stripes of other shards"]);
    for given in [&folders[..2], &folders, &folders[..0]] {
        let refused = verify_shards(&*source, "id", given, &mut |_| {});
        let words: &[&str] =
            if given.is_empty() { &["one folder"] } else { &["striped over", "disk-2,", "name"] };
        assert_says(refused, words);
    }
    assert!(verify(&*source, &swapped).is_empty());
    assert!(verify(&*source, &swapped[..1]).is_empty());
}

#[test]
fn a_check_finds_one_flipped_bit_and_names_the_file_of_its_stripe() {
    let root = tempfile::tempdir().unwrap();
    let folders = folders(root.path(), 2);
    let source = source(&[3 * CHUNK_BYTES + 500], &mut Numbers(6));
    write(&*source, &folders);
    let shards = ShardSource::open(&folders[0], None).unwrap();
    let image_bytes = shards.blocks()[0].image_bytes;
    let mut image = read(&*source, 0, 0..image_bytes);
    let check = |range: std::ops::Range<usize>, image: &[u8]| {
        shards.check(BlockIndex(0), range.clone(), &image[range])
    };
    assert_eq!(shards.check_unit_bytes(), CHUNK_BYTES);
    check(0..image_bytes, &image).unwrap();
    check(CHUNK_BYTES..CHUNK_BYTES, &image).unwrap();
    for (position, folder) in
        [(0, 0), (CHUNK_BYTES, 1), (3 * CHUNK_BYTES - 1, 0), (image_bytes - 1, 1)]
    {
        image[position] ^= 0x40;
        let file = format!("disk-{folder}/block-00000.bin");
        assert_says(check(0..image_bytes, &image), &[&file, "layers.0", "checksum"]);
        let chunk = position / CHUNK_BYTES;
        let range = chunk * CHUNK_BYTES..((chunk + 1) * CHUNK_BYTES).min(image_bytes);
        assert_says(check(range.clone(), &image), &[&file]);
        // Its neighbours are sound.
        if range.start > 0 {
            check(0..range.start, &image).unwrap();
        }
        if range.end < image_bytes {
            check(range.end..image_bytes, &image).unwrap();
        }
        image[position] ^= 0x40;
    }
    assert_says(check(1..CHUNK_BYTES, &image), &["layers.0", "multiples of"]);
    assert_says(check(0..CHUNK_BYTES + 1, &image), &["layers.0", "multiples of"]);
    assert_says(shards.check(BlockIndex(0), 0..CHUNK_BYTES, &image[..9]), &["layers.0"]);
    assert_says(shards.check(BlockIndex(4), 0..0, &[]), &["block 4"]);

    image[5] ^= 1;
    let plain = ShardSource::open(&folders[0], None).unwrap().with_verify(false);
    assert_eq!(plain.check_unit_bytes(), 1);
    plain.check(BlockIndex(0), 0..image_bytes, &image).unwrap();
}
