//! Micro-batches with pictures.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use blockstreamer_core::Error;
use blockstreamer_core::vision::{Media, Patches};
use serde_json::{Value, json};

use super::*;
use crate::data::{
    DatasetOptions, Overflow, PixelLimits, Processor, Vision, test_model, test_pictures,
    test_vision_format,
};

fn media_text(media: &Media) -> Result<String, Error> {
    let token = if media.frame_seconds.is_some() { "<|video_pad|>" } else { "<|image_pad|>" };
    Ok(token.repeat(media.grid.iter().product::<usize>() / 4))
}

/// A dataset whose file lies in `folder`.
fn dataset(folder: &Path, rows: &[Value]) -> Dataset {
    let (tokenizer, template) = test_model();
    let processor = Processor::new(test_vision_format(), folder, PixelLimits::default()).unwrap();
    let vision = Vision { processor: Arc::new(processor), media_text: &media_text };
    let options = DatasetOptions { sequence_length: 400, overflow: Overflow::Error };
    let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
    let name = folder.join("rows.jsonl");
    Dataset::read(text.as_bytes(), &name, &tokenizer, Some(&template), Some(vision), options)
        .unwrap()
}

fn row(parts: Value) -> Value {
    json!({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}]})
}

fn image(name: &str) -> Value {
    json!({"type": "image", "image": name})
}

fn film(count: usize) -> Value {
    let frames: Vec<_> = (0..count).map(|frame| format!("frame_{frame}.png")).collect();
    json!({"type": "video", "video": frames})
}

fn five_rows() -> Vec<Value> {
    vec![
        row(json!([image("kept.png"), image("grown.png")])),
        json!({"text": "no picture"}),
        row(json!([film(3), image("alpha.png")])),
        row(json!([image("420.jpg")])),
        row(json!([film(2)])),
    ]
}

fn options(batch_size: usize, micro_batches: usize) -> BatchOptions {
    BatchOptions { batch_size, micro_batches, seed: 3, shuffle: true }
}

fn batches(options: BatchOptions) -> Batches {
    Batches::new(dataset(&test_pictures(), &five_rows()), 0, options).unwrap()
}

/// Grids and pixels, comparable.
type Content = (Vec<[usize; 3]>, Vec<f32>);

fn content(patches: &Option<Patches>) -> Option<Content> {
    let patches = patches.as_ref()?;
    let pixels = Vec::try_from(patches.pixels.flatten(0, -1)).unwrap();
    Some((patches.grids.clone(), pixels))
}

/// Ids, pictures and films.
type MicroBatch = (Vec<Vec<i64>>, [Option<Content>; 2]);

fn contents(step: &Step) -> Vec<MicroBatch> {
    let content = |batch: &Batch| {
        let ids = Vec::try_from(&batch.input_ids).unwrap();
        (ids, [content(&batch.images), content(&batch.videos)])
    };
    step.batches.iter().map(content).collect()
}

#[test]
fn pixels_of_a_micro_batch_follow_its_rows_and_films_are_apart() {
    let batches = batches(options(3, 1));
    let steps: Vec<Step> = batches.in_order().map(Result::unwrap).collect();
    let [first, second] = &steps[..] else { panic!("{steps:?}") };
    let images = first.batches[0].images.as_ref().unwrap();
    assert_eq!(images.grids, [[1, 6, 8], [1, 4, 8], [1, 6, 8]]);
    assert_eq!(images.pixels.size(), [48 + 32 + 48, 96]);
    let videos = first.batches[0].videos.as_ref().unwrap();
    assert_eq!(videos.grids[0][0], 2);
    assert_eq!(second.batches[0].images.as_ref().unwrap().grids.len(), 1);
    assert_eq!(second.batches[0].videos.as_ref().unwrap().grids.len(), 1);

    // What a picture's patches are does not depend on what is beside it.
    let alone =
        Batches::new(dataset(&test_pictures(), &five_rows()[3..4]), 0, options(1, 1)).unwrap();
    let alone = alone.in_order().next().unwrap().unwrap();
    assert_eq!(content(&alone.batches[0].images), content(&second.batches[0].images));
}

#[test]
fn steps_are_the_same_in_any_order_and_whether_made_ahead_or_not() {
    let mut ahead = batches(options(2, 2));
    let in_turn: Vec<_> = (0..6).map(|step| contents(&ahead.step(step).unwrap())).collect();
    for step in [4, 0, 5, 5, 2] {
        assert_eq!(contents(&ahead.step(step).unwrap()), in_turn[step as usize]);
        let fresh = batches(options(2, 2)).step(step).unwrap();
        assert_eq!(contents(&fresh), in_turn[step as usize]);
    }
    assert_ne!(in_turn[0], in_turn[1]);
}

#[test]
fn a_row_without_pictures_makes_a_micro_batch_without_them() {
    let steps: Vec<Step> = batches(options(1, 1)).in_order().map(Result::unwrap).collect();
    let with: Vec<bool> = steps.iter().map(|step| step.batches[0].has_vision()).collect();
    assert_eq!(with, [true, false, true, true, true]);
    let text =
        Batches::new(dataset(&test_pictures(), &five_rows()[1..2]), 0, options(1, 1)).unwrap();
    assert!(batches(options(1, 1)).has_vision() && !text.has_vision());
    assert_eq!(text.max_patches(), 0);
}

#[test]
fn whether_a_step_has_pictures_is_known_before_it_is_made() {
    let mut batches = batches(options(1, 1));
    let known: Vec<bool> = (0..10).map(|step| batches.step_has_vision(step)).collect();
    let made: Vec<bool> =
        (0..10).map(|step| batches.step(step).unwrap().batches[0].has_vision()).collect();
    assert_eq!(known, made);
    assert_eq!(made.iter().filter(|has| !**has).count(), 2);
}

#[test]
fn the_most_patches_of_a_micro_batch_are_those_of_the_largest_rows() {
    let of_rows: Vec<usize> =
        batches(options(1, 1)).rows.samples.iter().map(Sample::num_patches).collect();
    assert_eq!(&of_rows[..2], [48 + 32, 0]);
    let mut sorted = of_rows.clone();
    sorted.sort_unstable();
    assert_eq!(batches(options(1, 3)).max_patches(), sorted[4]);
    assert_eq!(batches(options(2, 1)).max_patches(), sorted[4] + sorted[3]);
    // Two rows of the dataset twice, the others once.
    let twice = batches(options(7, 1));
    assert_eq!(twice.max_patches(), of_rows.iter().sum::<usize>() + sorted[4] + sorted[3]);
    for step in batches(options(2, 2)).in_order() {
        let num_patches = |patches: &Option<Patches>| {
            patches.as_ref().map_or(0, |patches| patches.pixels.size()[0])
        };
        let batch = &step.unwrap().batches[0];
        assert!(
            num_patches(&batch.images) + num_patches(&batch.videos)
                <= batches(options(2, 2)).max_patches() as i64
        );
    }
}

/// Three rows with a picture each, the second of which is damaged where only decoding finds it.
fn with_damage(folder: &Path) -> Batches {
    for name in ["a.png", "b.png", "c.png"] {
        fs::copy(test_pictures().join("shrunk.png"), folder.join(name)).unwrap();
    }
    let mut bytes = fs::read(folder.join("b.png")).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0xff;
    fs::write(folder.join("b.png"), bytes).unwrap();
    let rows = ["a.png", "b.png", "c.png"].map(|name| row(json!([image(name)])));
    let unshuffled = BatchOptions { shuffle: false, ..options(1, 1) };
    Batches::new(dataset(folder, &rows), 0, unshuffled).unwrap()
}

#[test]
fn a_picture_found_damaged_is_told_with_its_row_when_its_step_is_asked_for_and_not_before() {
    let folder = tempfile::tempdir().unwrap();
    let mut batches = with_damage(folder.path());
    assert!(batches.step(0).is_ok());
    let error = batches.step(1).unwrap_err().to_string();
    for needle in ["rows.jsonl, line 2: messages[0].content[0]: ", "b.png is a damaged PNG file"] {
        assert!(error.contains(needle), "no '{needle}' in: {error}");
    }
    // Other steps are still to be had, and the same error again.
    assert!(batches.step(2).is_ok());
    assert!(batches.step(1).is_err());
    let in_order: Vec<bool> = batches.in_order().map(|step| step.is_ok()).collect();
    assert_eq!(in_order, [true, false, true]);
}

#[test]
fn a_picture_that_vanishes_during_the_run_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let mut batches = with_damage(folder.path());
    fs::remove_file(folder.path().join("c.png")).unwrap();
    let error = batches.step(2).unwrap_err().to_string();
    assert!(error.contains("line 3") && error.contains("c.png cannot be opened"), "{error}");
}
