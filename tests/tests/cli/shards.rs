//! `shard`: resumable, verified, refused when stale.

use std::fs;
use std::os::unix::fs::MetadataExt;

use super::{Folder, blockstreamer, losses, model, names};

/// The files of a folder of shards that hold blocks.
fn block_files(shards: &str) -> Vec<String> {
    names(shards).into_iter().filter(|name| !name.ends_with(".json")).collect()
}

#[test]
fn shards_resume_and_verify_block_by_block() {
    let folder = Folder::new();
    let shards = folder.path("shards");
    let shard =
        |extra: &[&str]| blockstreamer(&[&["shard", model(), "--out", &shards], extra].concat());
    let first = shard(&[]).ok();
    let files = block_files(&shards);
    assert!(files.len() >= 5, "{files:?}");
    assert!(first.stdout.contains(&format!("{0} blocks", files.len())), "{}", first.stdout);
    assert!(shard(&["--verify"]).ok().stdout.contains("whole"));
    let path = |file: &str| format!("{shards}/{file}");
    let bytes = |file: &str| fs::read(path(file)).unwrap();
    let originals: Vec<_> = files.iter().map(|file| bytes(file)).collect();
    let inode = |file: &str| fs::metadata(path(file)).unwrap().ino();
    let untouched = inode(&files[0]);

    // One is gone, one has a flipped bit.
    fs::remove_file(path(&files[1])).unwrap();
    let mut damaged = originals[2].clone();
    damaged[100] ^= 4;
    fs::write(path(&files[2]), damaged).unwrap();
    let report = shard(&["--verify"]);
    assert_eq!(report.code, 1);
    let text = report.stdout + &report.stderr;
    for file in &files[1..3] {
        assert!(text.contains(file.as_str()), "{file} is not named in {text}");
    }
    assert!(!text.contains(files[0].as_str()), "{text}");
    assert!(text.contains("block "), "{text}");
    assert!(text.contains("run shard again"), "{text}");

    let again = shard(&[]).ok();
    assert!(again.stdout.contains("2 written"), "{}", again.stdout);
    assert_eq!(files.iter().map(|file| bytes(file)).collect::<Vec<_>>(), originals);
    assert_eq!(inode(&files[0]), untouched, "a whole block was written again");
    shard(&["--verify"]).ok();
    assert_eq!(block_files(&shards), files, "something half-written is left");
}

#[test]
fn a_damaged_shard_is_refused_by_training_naming_the_block() {
    let folder = Folder::new();
    let shards = folder.path("shards");
    blockstreamer(&["shard", model(), "--out", &shards]).ok();
    // One that text passes through: behind the six of the vision tower.
    let file = block_files(&shards).remove(7);
    let mut bytes = fs::read(format!("{shards}/{file}")).unwrap();
    bytes[64] ^= 1;
    fs::write(format!("{shards}/{file}"), bytes).unwrap();
    let setting = format!("stream.shards={shards}");
    // Read during the run, or at its start.
    let train = ["--set", "steps=1", "--set", &setting, "--set"];
    let disk = [&train[..], &["stream.tier=disk"]].concat();
    folder.train("run", &disk).failed(&["block '", &file, "shard"]);
    assert_eq!(names(folder.path("run/checkpoints")), [""; 0]);
    let kept = [&train[..], &["stream.tier=device"]].concat();
    folder.train("kept", &kept).failed(&["block '", &file, "shard"]);
    assert!(!fs::exists(folder.path("kept")).unwrap(), "a run that never started left a folder");
}

#[test]
fn shards_of_another_checkpoint_are_refused_with_the_reason() {
    let folder = Folder::new();
    let (model, shards) = (folder.model(), folder.path("shards"));
    blockstreamer(&["shard", &model, "--out", &shards]).ok();
    let setting = format!("stream.shards={shards}");
    blockstreamer(&["synth", "qwen3-vl:tiny", "--out", &model, "--seed", "9"]).ok();
    let data = super::rows();
    let run = folder.path("run");
    let train = super::words(&model, &data, &run, &["--set", "steps=1", "--set", &setting]);
    blockstreamer(&train).failed(&[&shards, "another checkpoint", "shard"]);
    assert!(!fs::exists(&run).unwrap(), "a run that never started left a folder");
    blockstreamer(&["shard", &model, "--out", &shards, "--verify"]).failed(&[&shards]);
    // Writing them anew makes them fit again.
    blockstreamer(&["shard", &model, "--out", &shards]).ok();
    blockstreamer(&train).ok();
}

#[test]
fn blocks_are_striped_over_several_folders() {
    let folder = Folder::new();
    let (a, b) = (folder.path("a"), folder.path("b"));
    let both = format!("{a},{b}");
    blockstreamer(&["shard", model(), "--out", &both]).ok();
    let (in_a, in_b) = (block_files(&a).len(), block_files(&b).len());
    assert!(in_a.abs_diff(in_b) <= 1 && in_b > 0, "{in_a} and {in_b}");
    let setting = format!("stream.shards={a}");
    folder.train("striped", &["--set", "steps=1", "--set", &setting]).ok();
    folder.train("plain", &["--set", "steps=1"]).ok();
    assert_eq!(losses(&folder.path("striped")), losses(&folder.path("plain")));
    let verify = |out: &str| blockstreamer(&["shard", model(), "--out", out, "--verify"]);
    assert!(verify(&both).ok().stdout.contains("hold the bytes of this model"));
    verify(&a).ok();
    // Folders that are not checked are not called whole.
    let other = folder.path("other");
    verify(&format!("{a},{other}")).failed(&[&a, "striped over", &b]);
    verify(&b).failed(&[&b, "stripes of the shards in", &a]);
    // Another model gets no folder that these use.
    let tiny = folder.path("tiny");
    blockstreamer(&["synth", "qwen3-vl:tiny", "--out", &tiny, "--seed", "7"]).ok();
    for out in [format!("{other},{b}"), b.clone(), format!("{other},{a}")] {
        let holds = "which would be overwritten";
        blockstreamer(&["shard", &tiny, "--out", &out]).failed(&[holds, "another folder"]);
    }
    verify(&both).ok();
}

#[test]
fn a_model_that_changed_where_the_identity_does_not_look_is_found_by_verify() {
    let folder = Folder::new();
    let (model, shards) = (folder.model(), folder.path("shards"));
    let shard =
        |extra: &[&str]| blockstreamer(&[&["shard", &model, "--out", &shards], extra].concat());
    shard(&[]).ok();
    let path = format!("{model}/model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    // The identity looks at 32 places of 4,096 bytes from the first byte to the last; this is amid two of them.
    let step = (bytes.len() - 4096) / 31;
    assert!(step > 8192, "the model is too small for this test");
    bytes[20 * step + (step + 4096) / 2] ^= 1;
    fs::write(&path, bytes).unwrap();
    let report = shard(&["--verify"]);
    assert_eq!(report.code, 1, "{}{}", report.stdout, report.stderr);
    assert!(report.stdout.contains("match their checksum but not"), "{}", report.stdout);
    assert!(shard(&[]).ok().stdout.contains(" 1 written"), "one block has the changed byte");
    shard(&["--verify"]).ok();
}
