//! How pictures and films are prepared for the model, and the text that stands for them.

use std::fmt::Write;

use blockstreamer_core::vision::{Media, VisionFormat};
use blockstreamer_core::{Error, Result};
use serde_json::{Value, json};

use crate::chat::{IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START};
use crate::config::{Config, SpecialIds};

/// The published processor's budgets, in merged cells: of a picture, and of all frames of a film.
const PICTURE_CELLS: [usize; 2] = [64, 16_384];
const FILM_CELLS: [usize; 2] = [4, 24_576];
/// Mean and deviation of each channel.
const HALF: [f64; 3] = [0.5; 3];
const MAX_ASPECT_RATIO: f64 = 200.0;
/// Context of the published models.
const PUBLISHED_CONTEXT: usize = 262_144;

pub(crate) fn vision_format(config: &Config) -> VisionFormat {
    let vision = &config.vision;
    let cell_side = vision.patch_size * vision.spatial_merge_size;
    let pixels = |cells| share_of_context(config, cells) * cell_side * cell_side;
    let SpecialIds { image, video, vision_start, vision_end, .. } = config.special_ids;
    VisionFormat {
        patch_size: vision.patch_size,
        temporal_patch_size: vision.temporal_patch_size,
        spatial_merge_size: vision.spatial_merge_size,
        min_pixels: pixels(PICTURE_CELLS[0]),
        max_pixels: pixels(PICTURE_CELLS[1]),
        video_min_pixels: pixels(FILM_CELLS[0]),
        video_max_pixels: pixels(FILM_CELLS[1]),
        max_aspect_ratio: MAX_ASPECT_RATIO,
        image_mean: HALF,
        image_std: HALF,
        image_placeholder: IMAGE_PAD.into(),
        video_placeholder: [VISION_START, VIDEO_PAD, VISION_END].concat(),
        vision_token_ids: [image, video, vision_start, vision_end].map(i64::from).to_vec(),
    }
}

/// A model whose context cannot hold the largest film is a small one for tests: its budgets shrink with
/// the context.
fn share_of_context(config: &Config, cells: usize) -> usize {
    match config.max_position_embeddings {
        context if context >= FILM_CELLS[1] => cells,
        context => (cells * context / PUBLISHED_CONTEXT).max(1),
    }
}

/// The placeholders of a picture; those of every frame pair of a film, each behind its time. (The processor
/// of transformers 4.57, with which the models were published; 5 leaves the template's outer pair of marks
/// around a film.)
pub(crate) fn text(config: &Config, media: &Media) -> Result<String> {
    let [times, height, width] = media.grid;
    let merge = config.vision.spatial_merge_size;
    let whole = |extent: usize| extent > 0 && extent.is_multiple_of(merge);
    if times == 0 || !whole(height) || !whole(width) {
        return Err(Error::usage(format!(
            "a picture or film of {:?} patches has no text: height and width must be multiples of {merge}",
            media.grid
        )));
    }
    let cells = height / merge * (width / merge);
    let Some(seconds) = &media.frame_seconds else {
        return match times {
            1 => Ok(IMAGE_PAD.repeat(cells)),
            _ => Err(Error::usage(format!("a picture has one frame, not {times}"))),
        };
    };
    let frames = config.vision.temporal_patch_size;
    if seconds.len() != times * frames {
        return Err(Error::usage(format!(
            "a film of {times} times has {} frames, but {} frame times were given",
            times * frames,
            seconds.len()
        )));
    }
    let mut text = String::new();
    for group in seconds.chunks(frames) {
        let time = (group[0] + group[group.len() - 1]) / 2.0;
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "<{time:.1} seconds>{VISION_START}{}{VISION_END}",
            VIDEO_PAD.repeat(cells)
        );
    }
    Ok(text)
}

/// The files from which transformers makes its processor.
pub(crate) fn processor_files(config: &Config) -> Vec<(String, Vec<u8>)> {
    let format = vision_format(config);
    let file = |name: &str, class: (&str, &str), [least, most]: [usize; 2]| {
        let mut content: Value = json!({
            "size": {"longest_edge": most, "shortest_edge": least},
            "patch_size": format.patch_size,
            "temporal_patch_size": format.temporal_patch_size,
            "merge_size": format.spatial_merge_size,
            "image_mean": format.image_mean,
            "image_std": format.image_std,
            "processor_class": "Qwen3VLProcessor",
        });
        content[class.0] = class.1.into();
        (name.to_owned(), format!("{content:#}").into_bytes())
    };
    vec![
        file(
            "preprocessor_config.json",
            ("image_processor_type", "Qwen2VLImageProcessorFast"),
            [format.min_pixels, format.max_pixels],
        ),
        file(
            "video_preprocessor_config.json",
            ("video_processor_type", "Qwen3VLVideoProcessor"),
            [format.video_min_pixels, format.video_max_pixels],
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sizes;

    fn config(size: &str) -> Config {
        Config::parse(&sizes::config_json(size).unwrap()).unwrap()
    }

    fn film(grid: [usize; 3], seconds: &[f64]) -> Media {
        Media { grid, frame_seconds: Some(seconds.to_vec()) }
    }

    #[test]
    fn published_sizes_have_the_published_budgets_and_tiny_ones_small_ones() {
        for size in sizes::names().filter(|size| !size.starts_with("tiny")) {
            let format = vision_format(&config(size));
            assert_eq!((format.min_pixels, format.max_pixels), (65_536, 16_777_216), "{size}");
            let video = (format.video_min_pixels, format.video_max_pixels);
            assert_eq!(video, (4096, 25_165_824), "{size}");
            assert_eq!((format.patch_size, format.spatial_merge_size), (16, 2));
            assert_eq!(format.vision_token_ids, [151_655, 151_656, 151_652, 151_653]);
        }
        // Cells of 8 x 8 pixels: at least one of them, at most a sixteenth of the context.
        let tiny = vision_format(&config("tiny"));
        assert_eq!((tiny.min_pixels, tiny.max_pixels), (64, 256 * 64));
        assert_eq!((tiny.video_min_pixels, tiny.video_max_pixels), (64, 384 * 64));
    }

    #[test]
    fn a_picture_is_one_placeholder_per_cell() {
        let picture = Media { grid: [1, 4, 6], frame_seconds: None };
        assert_eq!(text(&config("tiny"), &picture).unwrap(), "<|image_pad|>".repeat(6));
    }

    #[test]
    fn a_film_is_its_frame_pairs_each_behind_its_time() {
        let pads = "<|vision_start|><|video_pad|><|video_pad|><|vision_end|>";
        let found = text(&config("tiny"), &film([2, 2, 4], &[0.0, 0.5, 1.0, 1.5])).unwrap();
        // 0.25 and 1.25 lie halfway: both digits are even, as Python prints them.
        assert_eq!(found, format!("<0.2 seconds>{pads}<1.2 seconds>{pads}"));
        let found = text(&config("tiny"), &film([1, 2, 4], &[12.0, 12.0])).unwrap();
        assert_eq!(found, format!("<12.0 seconds>{pads}"));
    }

    #[test]
    fn media_that_cannot_be_are_refused_with_their_numbers() {
        for (media, wanted) in [
            (Media { grid: [1, 3, 4], frame_seconds: None }, "[1, 3, 4]"),
            (Media { grid: [1, 4, 0], frame_seconds: None }, "[1, 4, 0]"),
            (Media { grid: [2, 4, 4], frame_seconds: None }, "one frame, not 2"),
            (film([2, 4, 4], &[0.0, 1.0]), "4 frames, but 2"),
        ] {
            let error = text(&config("tiny"), &media).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn processor_files_hold_the_published_values() {
        let files = processor_files(&config("8b"));
        let parse = |index: usize| serde_json::from_slice::<Value>(&files[index].1).unwrap();
        assert_eq!(files[0].0, "preprocessor_config.json");
        assert_eq!(parse(0)["size"], json!({"longest_edge": 16_777_216, "shortest_edge": 65_536}));
        assert_eq!(parse(0)["image_mean"], json!([0.5, 0.5, 0.5]));
        assert_eq!(files[1].0, "video_preprocessor_config.json");
        assert_eq!(parse(1)["size"], json!({"longest_edge": 25_165_824, "shortest_edge": 4096}));
        assert_eq!(parse(1)["video_processor_type"], "Qwen3VLVideoProcessor");
    }
}
