//! Rows with pictures: what a user does with them, and what may be wrong with them.

use std::fs;
use std::path::Path;

use serde_json::json;

use super::{
    Finished, Folder, blockstreamer, copy_folder, in_process, losses, metrics, model, words,
};

fn assets() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../host/assets"))
}

/// A copy of the bundled rows beside a copy of their pictures.
fn rows_in(folder: &Folder) -> String {
    copy_folder(&assets().join("pictures"), Path::new(&folder.path("pictures")));
    let rows = fs::read_to_string(assets().join("demo_images.jsonl")).unwrap();
    folder.write("rows.jsonl", &rows)
}

/// A row about one picture.
fn about(name: &str) -> String {
    let content =
        json!([{"type": "image", "image": name}, {"type": "text", "text": "What is it?"}]);
    json!({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "A test."}]})
        .to_string()
}

/// One step on these rows, which must not leave a run behind.
#[track_caller]
fn refused(folder: &Folder, rows: &str, extra: &[&str], expected: &[&str]) -> Finished {
    let (data, run) = (folder.write("rows.jsonl", rows), folder.path("refused"));
    let extra = [&["--set", "steps=1"], extra].concat();
    let finished = in_process(&words(model(), &data, &run, &extra)).failed(expected);
    assert!(!fs::exists(&run).unwrap(), "a run that never started left a folder");
    finished
}

#[test]
fn a_model_learns_from_rows_with_pictures_and_its_loss_depends_on_what_they_show() {
    let folder = Folder::new();
    let (data, run) = (rows_in(&folder), folder.path("run"));
    let settings = ["--set", "steps=40", "--set", "batch_size=8"];
    blockstreamer(&words(model(), &data, &run, &settings)).ok();
    let lines = metrics(&run);
    let loss = |index: usize| lines[index]["loss"].as_f64().unwrap();
    assert!(loss(39) < 0.5 * loss(0), "{} -> {}", loss(0), loss(39));

    let adapter = format!("{run}/adapter");
    let eval = || {
        let words =
            ["eval", model(), "--data", &data, "--device", "cpu", "--adapter", &adapter, "--json"];
        blockstreamer(&words).ok().json()["loss"].as_f64().unwrap()
    };
    let before = eval();
    assert_eq!(eval(), before);
    for shape in ["circle", "square", "triangle"] {
        let name = |colour: &str| folder.path(&format!("pictures/{colour}_{shape}.png"));
        for colour in ["green", "blue", "yellow"] {
            fs::copy(name("red"), name(colour)).unwrap();
        }
    }
    let after = eval();
    assert!(after > 1.05 * before, "everything is red, and the loss goes from {before} to {after}");
}

#[test]
fn the_same_run_with_pictures_gives_the_same_losses() {
    let folder = Folder::new();
    let data = rows_in(&folder);
    let settings = ["--set", "steps=3", "--set", "micro_batches=2"];
    for run in ["first", "second"] {
        blockstreamer(&words(model(), &data, &folder.path(run), &settings)).ok();
    }
    assert_eq!(losses(&folder.path("first")), losses(&folder.path("second")));
}

#[test]
fn wrong_pictures_are_named_by_row_place_and_file() {
    let folder = Folder::new();
    let good = fs::read(assets().join("pictures/photo.jpg")).unwrap();
    fs::write(folder.path("good.jpg"), &good).unwrap();
    fs::write(folder.path("short.jpg"), &good[..good.len() / 2]).unwrap();
    folder.write("text.png", "not a picture");
    for (name, expected) in [
        ("gone.png", "No such file"),
        ("short.jpg", "the file ends before its picture does"),
        ("text.png", "PNG, JPEG or WebP"),
        (".", "is a folder"),
        ("https://example.org/a.png", "nothing is fetched"),
    ] {
        let rows = format!("{}\n{}\n", about("good.jpg"), about(name));
        let expected = ["rows.jsonl, line 2: messages[0].content[0]: ", name, expected];
        refused(&folder, &rows, &[], &expected);
    }
    let typed = about("good.jpg").replace("What is it?", "see <|image_pad|>");
    refused(&folder, &typed, &[], &["line 1", "'<|image_pad|>'"]);
}

#[test]
fn a_row_that_its_pictures_make_too_long_says_so_and_smaller_pictures_fit() {
    let folder = Folder::new();
    let pictures = assets().join("pictures");
    let parts: Vec<_> = ["red_circle.png", "red_square.png", "blue_circle.png"]
        .iter()
        .map(|name| json!({"type": "image", "image": pictures.join(name)}))
        .collect();
    let row = json!({"messages": [
        {"role": "user", "content": parts}, {"role": "assistant", "content": "Three."}]});
    let expected = ["line 1", "for its pictures", "lower max_pixels in [data]"];
    refused(&folder, &row.to_string(), &["--set", "sequence_length=40"], &expected);
    let data = folder.write("rows.jsonl", &row.to_string());
    let small = ["--set", "sequence_length=40", "--set", "steps=1", "--set", "data.max_pixels=64"];
    blockstreamer(&words(model(), &data, &folder.path("run"), &small)).ok();
    refused(&folder, &row.to_string(), &["--set", "data.max_pixels=8"], &["data.max_pixels is 8"]);
}

#[test]
fn a_picture_found_damaged_in_the_middle_of_a_run_is_named_and_checkpoints_stay() {
    let folder = Folder::new();
    // Large enough that its header is read without what comes after.
    let mut bytes = fs::read(assets().join("../tests/data/pictures/shrunk.png")).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0xff;
    fs::write(folder.path("damaged.png"), bytes).unwrap();
    fs::copy(assets().join("pictures/red_circle.png"), folder.path("good.png")).unwrap();
    let rows = format!("{}\n{}\n{}\n", about("good.png"), about("good.png"), about("damaged.png"));
    let (data, run) = (folder.write("rows.jsonl", &rows), folder.path("run"));
    let settings = [
        "--set",
        "steps=3",
        "--set",
        "batch_size=1",
        "--set",
        "data.shuffle=false",
        "--set",
        "checkpoint_every=1",
    ];
    blockstreamer(&words(model(), &data, &run, &settings)).failed(&[
        "line 3",
        "messages[0].content[0]",
        "damaged.png is a damaged PNG file",
    ]);
    assert!(fs::exists(format!("{run}/checkpoints/step-00000001")).unwrap());
}
