//! Rows with pictures, from JSON to tokens and targets.

use std::fs;

use serde_json::{Value, json};

use super::*;
use crate::data::dataset::{Dataset, DatasetOptions, Overflow};
use crate::data::error::Result;
use crate::data::images::PixelLimits;
use crate::data::{test_model, test_pictures, test_vision_format};

const LIMIT: DatasetOptions = DatasetOptions { sequence_length: 400, overflow: Overflow::Error };
const VISION_TOKENS: [&str; 4] =
    ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"];

/// As Qwen3-VL writes pictures and films.
fn media_text(media: &Media) -> Result<String, Error> {
    let [_, height, width] = media.grid;
    let cells = height * width / 4;
    let Some(seconds) = &media.frame_seconds else { return Ok("<|image_pad|>".repeat(cells)) };
    let pads = "<|video_pad|>".repeat(cells);
    let patch = |pair: &[f64]| {
        format!("<{:.1} seconds><|vision_start|>{pads}<|vision_end|>", (pair[0] + pair[1]) / 2.0)
    };
    Ok(seconds.chunks(2).map(patch).collect())
}

fn read_with(text: &str, options: DatasetOptions) -> Result<Dataset> {
    let (tokenizer, template) = test_model();
    let mut format = test_vision_format();
    let ids = VISION_TOKENS.iter().map(|token| i64::from(tokenizer.token_id(token).unwrap()));
    format.vision_token_ids = ids.collect();
    let processor = Processor::new(format, Path::new("/nonexistent"), PixelLimits::default());
    let vision = Vision { processor: Arc::new(processor?), media_text: &media_text };
    let name = test_pictures().join("rows.jsonl");
    Dataset::read(text.as_bytes(), &name, &tokenizer, Some(&template), Some(vision), options)
}

fn read(row: &Value) -> Result<Sample> {
    Ok(read_with(&row.to_string(), LIMIT)?.samples.remove(0))
}

fn chat(parts: Value, answer: Value) -> Value {
    json!({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]})
}

fn text_of(sample: &Sample) -> String {
    test_model().0.decode(&sample.ids, false).unwrap()
}

fn targets_of(sample: &Sample) -> String {
    let targets = sample.ids.iter().zip(&sample.targets).filter(|(_, target)| **target);
    let ids: Vec<u32> = targets.map(|(id, _)| *id).collect();
    test_model().0.decode(&ids, false).unwrap()
}

/// Asserts that a row is refused with all of `needles`, in its line.
#[track_caller]
fn refused(row: &Value, needles: &[&str]) {
    let error = read_with(&format!("\n{row}"), LIMIT).unwrap_err().to_string();
    assert!(error.contains("rows.jsonl, line 2: "), "{error}");
    for needle in needles {
        assert!(error.contains(needle), "no '{needle}' in: {error}");
    }
}

#[test]
fn a_picture_becomes_as_many_tokens_as_it_has_cells_and_the_loss_stays_on_the_answer() {
    let parts =
        json!([{"type": "image", "image": "kept.png"}, {"type": "text", "text": "What is it?"}]);
    let sample = read(&chat(parts, json!("A test."))).unwrap();
    let pads = "<|image_pad|>".repeat(3 * 4);
    let expected = format!(
        "<|im_start|>user\n<|vision_start|>{pads}<|vision_end|>What is it?<|im_end|>\n\
         <|im_start|>assistant\nA test.<|im_end|>\n"
    );
    assert_eq!(text_of(&sample), expected);
    assert_eq!(targets_of(&sample), "A test.<|im_end|>\n");
    let [picture] = &sample.pictures[..] else { panic!("{sample:?}") };
    assert_eq!((picture.media.grid, picture.size, picture.is_film()), ([1, 6, 8], [24, 32], false));
}

#[test]
fn pictures_and_films_of_every_turn_come_in_the_order_of_the_text() {
    let row = json!({"messages": [
        {"role": "system", "content": [{"type": "image", "image": "kept.png"}]},
        {"role": "user", "content": [
            {"type": "video", "video": ["frame_0.png", "frame_1.png", "frame_2.png"], "fps": 4},
            {"type": "text", "text": "and"}, {"type": "image", "image": "grown.png"}]},
        {"role": "assistant", "content": "Look."},
        {"role": "tool", "content": [{"type": "image", "image": "exif_6.jpg"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Here: "}, {"type": "image", "image": "kept.png"}]},
    ]});
    let sample = read(&row).unwrap();
    let sizes: Vec<_> = sample.pictures.iter().map(|picture| picture.size).collect();
    assert_eq!(sizes, [[24, 32], [24, 40], [20, 30], [33, 20], [24, 32]]);
    let films: Vec<_> = sample.pictures.iter().map(Picture::is_film).collect();
    assert_eq!(films, [false, true, false, false, false]);
    let text = text_of(&sample);
    let at = |needle: &str| text.find(needle).unwrap();
    assert!(at("<0.1 seconds><|vision_start|><|video_pad|>") < at("<0.5 seconds><|vision_start|>"));
    assert!(at("<0.5 seconds>") < at("and") && at("and") < at("Look."));
    assert!(!text.contains("<|vision_start|><0.1"), "the frame around the placeholder goes too");
    let count = |token: &str| text.matches(token).count();
    let cells = |film: bool| -> usize {
        let chosen = sample.pictures.iter().filter(|picture| picture.is_film() == film);
        chosen.map(|picture| picture.num_patches() / 4).sum()
    };
    assert_eq!((count("<|image_pad|>"), count("<|video_pad|>")), (cells(false), cells(true)));
    assert_eq!(targets_of(&sample), "Look.<|im_end|>\nHere: <|im_end|>\n");
}

#[test]
fn pictures_are_named_in_every_usual_way() {
    let bytes = fs::read(test_pictures().join("kept.png")).unwrap();
    let encoded = base64::encode(bytes);
    let data = format!("data:image/png;base64,{encoded}");
    let absolute = test_pictures().join("kept.png");
    for part in [
        json!({"type": "image", "image": "./kept.png"}),
        json!({"type": "image", "image": absolute}),
        json!({"type": "image", "path": "kept.png", "text": null, "image": null}),
        json!({"type": "image", "url": format!("file://{}", absolute.display())}),
        json!({"type": "image", "base64": encoded}),
        json!({"type": "image_url", "image_url": {"url": data, "detail": "low"}}),
        json!({"type": "image_url", "image_url": "kept.png"}),
    ] {
        let sample = read(&chat(json!([part]), json!("x"))).unwrap();
        assert_eq!(sample.pictures[0].media.grid, [1, 6, 8], "{part}");
    }
}

#[test]
fn rows_with_and_without_pictures_go_together() {
    let rows = [
        json!({"text": "no picture"}),
        chat(json!("none"), json!("x")),
        chat(json!([{"type": "image", "image": "dot.png"}]), json!("x")),
    ];
    let dataset = read_with(&rows.map(|row| row.to_string()).join("\n"), LIMIT).unwrap();
    let counts: Vec<_> = dataset.samples.iter().map(|sample| sample.pictures.len()).collect();
    assert_eq!(counts, [0, 0, 1]);
}

#[test]
fn pictures_that_cannot_be_used_are_refused_with_row_place_and_file() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let whole = fs::read(test_pictures().join("420.jpg")).unwrap();
    let short = write("short.jpg", &whole[..whole.len() / 2]);
    let text = write("text.png", b"not a picture");
    let mut strip = Vec::new();
    let mut encoder = png::Encoder::new(&mut strip, 300, 1);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.write_header().unwrap().write_image_data(&[0; 300]).unwrap();
    let strip = write("strip.png", &strip);
    for (name, needle) in [
        ("gone.png", "No such file"),
        ("", "is empty"),
        (".", "is a folder"),
        ("http://example.org/a.png", "nothing is fetched"),
        (&short, "is a damaged JPEG file: the file ends"),
        (&text, "is not a picture in PNG, JPEG or WebP format"),
        (&strip, "300 x 1 pixels"),
    ] {
        let parts = json!([{"type": "text", "text": "?"}, {"type": "image", "image": name}]);
        refused(&chat(parts, json!("x")), &["messages[0].content[1]: ", name, needle]);
    }
}

#[test]
fn parts_that_name_no_picture_are_refused_with_what_is_wanted() {
    for (part, needle) in [
        (json!({"type": "image"}), "must name its picture"),
        (json!({"type": "image", "image": 5}), "'image' must be the path"),
        (
            json!({"type": "image", "image": "kept.png", "max_pixels": 9}),
            "'max_pixels' is not supported",
        ),
        (json!({"type": "video", "video": "film.mp4"}), "'film.mp4' cannot be taken apart"),
        (json!({"type": "video", "video": []}), "as a list of pictures"),
        (json!({"type": "video", "video": ["frame_0.png", 5]}), "video[1]: a frame must be"),
        (json!({"type": "video", "video": ["frame_0.png"], "fps": 0}), "'fps' must be"),
        (json!({"type": "video", "video": ["frame_0.png"], "nframes": 4}), "'nframes'"),
        (json!({"type": "video", "video": ["frame_0.png", "kept.png"]}), "must have one size"),
    ] {
        refused(&chat(json!([part]), json!("x")), &["messages[0]", "content[0]: ", needle]);
    }
}

#[test]
fn a_placeholder_typed_into_a_text_is_refused() {
    let typed = "see <|image_pad|>";
    refused(&json!({"text": typed}), &["'<|image_pad|>'", "stands for a picture"]);
    refused(&chat(json!(typed), json!("x")), &["messages[0]: ", "'<|image_pad|>'"]);
    refused(&chat(json!("x"), json!("<|vision_start|>")), &["messages[1]: ", "'<|vision_start|>'"]);
}

#[test]
fn a_model_without_pictures_refuses_them_and_takes_the_tokens_for_text() {
    let (tokenizer, template) = test_model();
    let read = |row: &Value| {
        let text = row.to_string();
        Dataset::read(
            text.as_bytes(),
            Path::new("rows.jsonl"),
            &tokenizer,
            Some(&template),
            None,
            LIMIT,
        )
    };
    assert!(read(&json!({"text": "<|image_pad|>"})).is_ok());
    let row = chat(json!([{"type": "image", "image": "kept.png"}]), json!("x"));
    let error = read(&row).unwrap_err().to_string();
    assert!(
        error.contains("line 1: messages[0].content[0]: this model takes no pictures"),
        "{error}"
    );
}

#[test]
fn a_row_made_long_by_its_pictures_says_so_and_is_never_cut_inside_them() {
    let image = json!({"type": "image", "image": "shrunk.png"});
    let long_answer = "word ".repeat(60);
    let row = chat(json!([image]), json!(long_answer)).to_string();
    let whole = read_with(&row, LIMIT).unwrap().samples.remove(0);
    let cells = whole.num_patches() / 4;
    let at = |sequence_length, overflow| {
        read_with(
            &format!("{row}\n{{\"text\": \"short\"}}"),
            DatasetOptions { sequence_length, overflow },
        )
    };

    let error = at(30, Overflow::Error).unwrap_err().to_string();
    let tokens = format!("has {} tokens, {cells} of them for its pictures,", whole.ids.len());
    for needle in [&tokens, "line 1", "lower max_pixels in [data]"] {
        assert!(error.contains(needle), "no '{needle}' in: {error}");
    }
    // Long enough for the picture and a part of the answer.
    let cut = at(cells + 20, Overflow::Truncate).unwrap();
    assert_eq!((cut.samples.len(), cut.num_truncated, cut.num_skipped), (2, 1, 0));
    assert_eq!(cut.samples[0].pictures, whole.pictures);
    // Not long enough for the picture.
    let dropped = at(cells, Overflow::Truncate).unwrap();
    assert_eq!((dropped.samples.len(), dropped.num_truncated, dropped.num_skipped), (1, 0, 1));

    // A picture after the first answer: cut off, it would leave its question behind.
    let row = json!({"messages": [
        {"role": "user", "content": "first"}, {"role": "assistant", "content": "one two three"},
        {"role": "user", "content": [image]}, {"role": "assistant", "content": "x"}]});
    let options = DatasetOptions { sequence_length: 30, overflow: Overflow::Truncate };
    let both = read_with(&format!("{row}\n{{\"text\": \"short\"}}"), options).unwrap();
    assert_eq!((both.samples.len(), both.num_skipped), (1, 1));
}

#[test]
fn the_bundled_demo_with_pictures_loads_and_has_all_that_rows_may_hold() {
    let (tokenizer, template) = test_model();
    let processor =
        Processor::new(test_vision_format(), Path::new("/nonexistent"), PixelLimits::default());
    let vision = Vision { processor: Arc::new(processor.unwrap()), media_text: &media_text };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo_images.jsonl");
    let options = DatasetOptions { sequence_length: 256, overflow: Overflow::Error };
    let dataset = Dataset::load(&path, &tokenizer, Some(&template), Some(vision), options).unwrap();
    let num_pictures: Vec<_> = dataset.samples.iter().map(|sample| sample.pictures.len()).collect();
    assert!(num_pictures.len() > 30 && [0, 1, 2].iter().all(|count| num_pictures.contains(count)));
    assert!(dataset.samples.iter().flat_map(|sample| &sample.pictures).any(Picture::is_film));
}
