//! Places that cannot be written, and disks that fill up: nothing half-written is taken for whole.

use std::fs;
use std::process::Command;

use super::{Finished, Folder, blockstreamer, command, finish, losses, model, names, rows, words};

/// The command with files limited to `num_blocks` of 512 or 1024 bytes, as the shell counts them.
/// Ignoring the signal makes the write itself fail, as on a full disk.
pub(super) fn limited(words: &[&str], num_blocks: usize) -> Finished {
    let inner = command(words);
    let script = format!("ulimit -f {num_blocks}; trap '' XFSZ; exec \"$0\" \"$@\"");
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(script).arg(inner.get_program()).args(inner.get_args());
    shell.env("OMP_NUM_THREADS", "1");
    finish(shell)
}

#[test]
fn a_place_that_cannot_be_written_is_named() {
    let folder = Folder::new();
    let out = folder.write("file", "a file, not a folder") + "/run";
    let data = rows();
    blockstreamer(&words(model(), &data, &out, &["--set", "steps=1"])).failed(&[&out]);
    blockstreamer(&["synth", "qwen3-vl:tiny", "--out", &out]).failed(&[&out]);
    blockstreamer(&["shard", model(), "--out", &out]).failed(&[&out]);
    assert_eq!(fs::read_to_string(folder.path("file")).unwrap(), "a file, not a folder");
}

#[test]
fn a_folder_that_holds_something_else_is_not_replaced() {
    let folder = Folder::new();
    let letters = folder.path("letters");
    fs::create_dir(&letters).unwrap();
    folder.write("letters/letter.txt", "dear");
    blockstreamer(&["synth", "qwen3-vl:tiny", "--out", &letters]).failed(&[&letters, "not empty"]);
    assert_eq!(names(&letters), ["letter.txt"]);
}

#[test]
fn a_full_disk_leaves_no_model() {
    let folder = Folder::new();
    let out = folder.path("model");
    limited(&["synth", "qwen3-vl:tiny", "--out", &out], 100).failed(&["model", "File too large"]);
    assert_eq!(names(folder.path("")), [""; 0]);
}

#[test]
fn a_full_disk_leaves_no_shards_and_what_was_written_is_kept() {
    let folder = Folder::new();
    let shards = folder.path("shards");
    // A layer fits, the embedding does not.
    let words = ["shard", model(), "--out", &shards];
    limited(&words, 110).failed(&[&shards, "File too large"]);
    assert!(
        !names(&shards).iter().any(|name| name.contains("manifest.json")),
        "{:?}",
        names(&shards)
    );
    assert!(!names(&shards).iter().any(|name| name.contains("partial")), "{:?}", names(&shards));
    blockstreamer(&[&words[..], &["--verify"]].concat()).failed(&[&shards, "write them (again)"]);
    blockstreamer(&words).ok();
    blockstreamer(&[&words[..], &["--verify"]].concat()).ok();
}

#[test]
fn a_disk_that_fills_up_while_saving_leaves_the_checkpoint_before() {
    let folder = Folder::new();
    let run = folder.path("run");
    let every = ["--set", "checkpoint_every=1", "--set", "lora.rank=2"];
    folder.train("run", &[&every[..], &["--set", "steps=1"]].concat()).ok();
    let data = rows();
    let more = [&every[..], &["--resume", "--set", "steps=3"]].concat();
    let train = words(model(), &data, &run, &more);
    limited(&train, 8).failed(&["step-00000002.", "File too large"]);
    assert_eq!(names(format!("{run}/checkpoints")), ["step-00000001"]);
    // With room again it goes on, as if nothing had happened.
    blockstreamer(&train).ok();
    folder.train("straight", &[&every[..], &["--set", "steps=3"]].concat()).ok();
    assert_eq!(losses(&run), losses(&folder.path("straight")));
}
