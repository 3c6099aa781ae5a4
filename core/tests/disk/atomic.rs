//! Whole or not at all.

use std::path::Path;
use std::process::Command;

use blockstreamer_core::checkpoint::atomic::{AtomicDirectory, AtomicFile, write_file};
use blockstreamer_core::checkpoint::{SynthesizeOptions, synthesize, write_safetensors};
use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::source::shards::write_shards;
use blockstreamer_core::source::{RamSource, shards::ShardSource};
use blockstreamer_core::state::NamedTensors;
use blockstreamer_core::tch::{Device, Kind, Tensor};
use blockstreamer_core::weights::{Role, WeightTable, row};

use crate::{assert_says, names_in};

#[test]
fn a_file_appears_at_commit_and_replaces_the_old_one() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("file");
    write_file(&target, b"old").unwrap();
    let mut file = AtomicFile::create(&target).unwrap();
    file.write(b"new").unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), b"old");
    file.commit().unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), b"new");
    // Dropped before the commit: nothing happened.
    let mut file = AtomicFile::create(&target).unwrap();
    file.write(b"half").unwrap();
    drop(file);
    assert_eq!(std::fs::read(&target).unwrap(), b"new");
    assert_eq!(names_in(directory.path()), ["file"]);
    assert_says(
        write_file(&directory.path().join("absent/file"), b""),
        &["cannot create", "absent/file"],
    );
}

#[test]
fn others_may_read_what_was_written() {
    use std::os::unix::fs::PermissionsExt;

    let directory = tempfile::tempdir().unwrap();
    let plain = directory.path().join("plain");
    std::fs::write(&plain, "").unwrap();
    let target = directory.path().join("file");
    write_file(&target, b"").unwrap();
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode();
    assert_eq!(mode(&target), mode(&plain));
    let plain = directory.path().join("plain folder");
    std::fs::create_dir(&plain).unwrap();
    let target = directory.path().join("folder");
    AtomicDirectory::create(&target, "marker").unwrap().commit().unwrap();
    assert_eq!(mode(&target), mode(&plain));
}

#[test]
fn a_folder_is_replaced_as_a_whole_and_only_if_it_is_ours() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("deep/folder");
    let write = |content: &str| {
        let folder = AtomicDirectory::create(&target, "marker")?;
        std::fs::write(folder.path().join("marker"), content).unwrap();
        std::fs::write(folder.path().join(content), content).unwrap();
        folder.commit()
    };
    write("one").unwrap();
    write("two").unwrap();
    assert_eq!(names_in(&target), ["marker", "two"]);
    // Given up: the old one stays.
    let folder = AtomicDirectory::create(&target, "marker").unwrap();
    std::fs::write(folder.path().join("marker"), "half").unwrap();
    drop(folder);
    assert_eq!(names_in(&target), ["marker", "two"]);
    assert_eq!(names_in(target.parent().unwrap()), ["folder"]);

    std::fs::remove_file(target.join("marker")).unwrap();
    assert_says(write("three"), &["folder", "no marker", "not replaced"]);
    assert_eq!(names_in(&target), ["two"]);
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert_says(AtomicDirectory::create(&file, "marker"), &["file", "Not a directory"]);
}

/// Runs in a process of its own whose files cannot grow over 64 KiB: see the next test.
#[test]
#[ignore = "a part of the next test"]
fn child_with_a_file_size_limit() {
    let Some(directory) = std::env::var_os("TEST_LIMITED_DIRECTORY") else { return };
    let directory = Path::new(&directory);
    let large = || Tensor::zeros([100_000], (Kind::Float, Device::Cpu));
    let result = write_safetensors(
        &directory.join("state.safetensors"),
        &NamedTensors::new().with("large", large()),
        &[],
    );
    assert_says(result, &["cannot write", "state.safetensors", "too large"]);

    let blocks =
        [("layers.0", blockstreamer_core::block::Placement::Streamed, vec![("large", large())])];
    let source =
        RamSource::from_tensors(blocks, blockstreamer_core::device::HostBuffer::new).unwrap();
    let shards = directory.join("shards");
    let result = write_shards(&source, "id", std::slice::from_ref(&shards), &mut |_| {});
    assert_says(result, &["layers.0", "cannot write", "block-00000.bin"]);
    assert_says(ShardSource::open(&shards, None), &["no manifest.json"]);
    assert_eq!(names_in(&shards), ["manifest.journal"]);

    let table = WeightTable::new(Dtype::BF16)
        .resident("head", &[row("head.weight", "head.weight", Role::Linear, &[1000, 1000])]);
    let options = SynthesizeOptions {
        directory: directory.join("model"),
        config_json: "{}".to_owned(),
        seed: 0,
        initializer_range: 0.02,
        max_file_bytes: 1 << 30,
        extra_files: Vec::new(),
    };
    assert_says(
        synthesize(&table, &options),
        &["cannot write", "model/model.safetensors", "too large"],
    );
}

#[test]
fn a_write_that_the_system_stops_leaves_nothing_half_written() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("state.safetensors"), "old").unwrap();
    // The limit is in units of 512 bytes; the signal that comes with it is ignored, as it is for a full disk.
    let output = Command::new("sh")
        .args(["-c", r#"ulimit -f 128; trap "" XFSZ; exec "$0" "$@""#])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "atomic::child_with_a_file_size_limit", "--include-ignored"])
        .env("TEST_LIMITED_DIRECTORY", directory.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    assert_eq!(std::fs::read(directory.path().join("state.safetensors")).unwrap(), b"old");
    assert_eq!(names_in(directory.path()), ["shards", "state.safetensors"]);
}
