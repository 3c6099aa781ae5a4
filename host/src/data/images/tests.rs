use std::collections::BTreeSet;
use std::fs;
use std::io::Cursor;

use blockstreamer_core::vision::VisionFormat;
use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::decode::decode;
use super::resize::{Area, image_size, video_size};
use std::path::Path;

use super::*;
use crate::data::error::Result;
use crate::data::{test_pictures, test_vision_format};

/// The format of the goldens: patches of 4 pixels, small bounds.
fn tiny() -> VisionFormat {
    test_vision_format()
}

fn published() -> VisionFormat {
    VisionFormat { patch_size: 16, ..tiny() }
}

fn file(name: &str) -> Source {
    Source::File(test_pictures().join(name))
}

fn processor_in(folder: &Path) -> Result<Processor> {
    Processor::new(tiny(), folder, PixelLimits::default())
}

fn processor() -> Processor {
    processor_in(Path::new("/nonexistent")).unwrap()
}

/// The values of a picture, or of the film of these frames, with its grid.
fn prepare(processor: &Processor, names: &[&str], is_film: bool) -> (Vec<f32>, [usize; 3]) {
    let sources: Vec<_> = names.iter().map(|name| file(name)).collect();
    let size = probe(&sources[0]).unwrap();
    let media =
        if is_film { processor.film(names.len(), size, None) } else { processor.image(size) }
            .unwrap();
    let patches = processor.patches(&sources, size, &media).unwrap();
    assert_eq!(patches.kind(), tch::Kind::Float);
    assert_eq!(patches.size(), [media.grid.iter().product::<usize>() as i64, 3 * 2 * 4 * 4]);
    (Vec::try_from(patches.flatten(0, -1)).unwrap(), media.grid)
}

/// Values back to the levels that they were made of; the two frames of each patch stay apart.
fn levels(values: &[f32]) -> Vec<u8> {
    let level = |value: &f32| {
        let level = value * 127.5 + 127.5;
        assert!((level - level.round()).abs() < 1e-4, "{value} is no level");
        level.round() as u8
    };
    values.iter().map(level).collect()
}

/// Of the two frames of a picture's patches, which must be equal, the first.
fn single_frame(levels: &[u8]) -> Vec<u8> {
    let frames = levels.chunks_exact(2 * 16);
    frames
        .flat_map(|pair| {
            assert_eq!(pair[..16], pair[16..]);
            pair[..16].to_vec()
        })
        .collect()
}

#[test]
fn every_picture_and_film_of_the_goldens_becomes_what_the_published_processors_make_of_it() {
    let bytes = fs::read(test_pictures().join("golden.safetensors")).unwrap();
    let goldens = SafeTensors::deserialize(&bytes).unwrap();
    let (processor, mut kinds) = (processor(), BTreeSet::new());
    let names: Vec<&str> =
        goldens.names().into_iter().filter_map(|name| name.strip_suffix(".grid")).collect();
    for name in &names {
        let (made, grid) = match name.rsplit_once('_').filter(|_| !name.contains('.')) {
            Some((stem, count)) => {
                let frames: Vec<_> = (0..count[..1].parse().unwrap())
                    .map(|frame| format!("{stem}_{frame}.png"))
                    .collect();
                let frames: Vec<_> = frames.iter().map(String::as_str).collect();
                let (values, grid) = prepare(&processor, &frames, true);
                (levels(&values), grid)
            }
            None => {
                let (values, grid) = prepare(&processor, &[name], false);
                (single_frame(&levels(&values)), grid)
            }
        };
        let wanted_grid = goldens.tensor(&format!("{name}.grid")).unwrap();
        let wanted_grid = wanted_grid.data().chunks_exact(8).map(|long| long[0]);
        assert!(wanted_grid.eq(grid.map(|length| length as u8)), "{name}: {grid:?}");
        // The decoders happen to be exact for JPEG and WebP, too; one level would do there.
        assert_eq!(made, goldens.tensor(name).unwrap().data(), "{name}");
        kinds.insert(name.rsplit_once('.').map_or("film", |(_, kind)| kind));
    }
    assert_eq!(kinds.into_iter().collect::<Vec<_>>(), ["film", "jpg", "png", "webp"]);
    assert!(names.len() > 40, "{}", names.len());
}

#[test]
fn mean_and_deviation_of_the_preprocessor_config_give_the_published_values_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let settings = json!({
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    });
    fs::write(folder.path().join("preprocessor_config.json"), settings.to_string()).unwrap();
    let (made, _) = prepare(&processor_in(folder.path()).unwrap(), &["grown.png"], false);
    let bytes = fs::read(test_pictures().join("golden.safetensors")).unwrap();
    let goldens = SafeTensors::deserialize(&bytes).unwrap();
    let wanted = goldens.tensor("grown.png.clip").unwrap();
    let wanted =
        wanted.data().chunks_exact(4).map(|float| f32::from_le_bytes(float.try_into().unwrap()));
    assert!(made.iter().copied().map(f32::to_bits).eq(wanted.map(f32::to_bits)));
}

#[test]
fn sizes_are_those_of_smart_resize() {
    let text = fs::read_to_string(test_pictures().join("sizes.json")).unwrap();
    let sizes: Value = serde_json::from_str(&text).unwrap();
    let rows =
        |key: &str| -> Vec<Vec<usize>> { serde_json::from_value(sizes[key].clone()).unwrap() };
    let format = published();
    let area = Area { min_pixels: 65_536, max_pixels: 16_777_216 };
    for row in rows("images") {
        let made = image_size([row[0], row[1]], area, &format).unwrap();
        assert_eq!(made[..], row[2..], "{row:?}");
    }
    let area = Area { min_pixels: 4096, max_pixels: 25_165_824 };
    for row in rows("films") {
        let made = video_size(row[0], [row[1], row[2]], area, &format).unwrap();
        assert_eq!(made[..], row[3..], "{row:?}");
    }
    assert!(rows("images").len() > 100 && rows("films").len() > 100);
}

#[test]
fn a_film_of_one_frame_fills_one_patch_and_times_follow_the_frames() {
    let processor = processor();
    let film = |count, fps| processor.film(count, [24, 40], fps).unwrap();
    assert_eq!(film(1, None).grid[0], 1);
    assert_eq!(film(1, None).frame_seconds.unwrap(), [0.0, 0.0]);
    assert_eq!(film(3, None).frame_seconds.unwrap(), [0.0, 0.5, 1.0, 1.0]);
    assert_eq!(film(2, Some(0.25)).frame_seconds.unwrap(), [0.0, 4.0]);
    let (values, _) = prepare(&processor, &["frame_0.png"], true);
    single_frame(&levels(&values));
}

#[test]
fn sixteen_bit_grey_is_its_upper_byte() {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, 4, 1);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.set_depth(png::BitDepth::Sixteen);
    let values: Vec<u8> =
        [0_u16, 255, 256, 65_535].iter().flat_map(|value| value.to_be_bytes()).collect();
    encoder.write_header().unwrap().write_image_data(&values).unwrap();
    let picture = decode(&Source::Bytes(bytes.into())).unwrap();
    assert_eq!(picture.pixels, [0, 0, 0, 0, 0, 0, 1, 1, 1, 255, 255, 255]);
}

#[test]
fn a_name_is_a_path_a_file_address_or_data_and_never_fetched() {
    let folder = Path::new("/rows");
    let path = |name: &str| match Source::resolve(name, folder).unwrap() {
        Source::File(path) => path,
        other => panic!("{other:?}"),
    };
    assert_eq!(path("a/b.png"), Path::new("/rows/a/b.png"));
    assert_eq!(path("/a/b.png"), Path::new("/a/b.png"));
    assert_eq!(path("file:///a/b.png"), Path::new("/a/b.png"));
    assert_eq!(path("http_b.png"), Path::new("/rows/http_b.png"));
    let bytes = fs::read(test_pictures().join("dot.png")).unwrap();
    let data = format!("data:image/png;base64,{}", base64::encode(&bytes));
    let source = Source::resolve(&data, folder).unwrap();
    assert_eq!(source, Source::Bytes(bytes.into()));
    assert_eq!(decode(&source).unwrap(), decode(&file("dot.png")).unwrap());
    let refused = |name: &str| Source::resolve(name, folder).unwrap_err();
    assert!(refused("https://example.org/a.png").contains("nothing is fetched over https"));
    assert!(refused("data:image/png,abc").contains("base64"));
    assert!(refused("data:image/png;base64,a*b").contains("not valid base64"));
    assert!(refused("").contains("empty"));
}

/// Asserts that these bytes are refused by their header or end, with `needle`.
fn refused(bytes: &[u8], needle: &str) {
    let error = probe(&Source::Bytes(bytes.into())).unwrap_err();
    assert!(error.contains(needle), "no '{needle}' in: {error}");
}

#[test]
fn files_that_are_no_pictures_are_refused_with_what_they_are() {
    refused(b"", "is empty");
    refused(b"GIF89a and so on", "PNG, JPEG or WebP");
    refused(&fs::read(test_pictures().join("sizes.json")).unwrap(), "PNG, JPEG or WebP");
    for (path, needle) in [
        ("/nonexistent/a.png".into(), "No such file"),
        (test_pictures(), "is a folder"),
        ("/dev/null".into(), "not a regular file"),
    ] {
        let error = probe(&Source::File(path)).unwrap_err();
        assert!(error.contains(needle), "{error}");
    }
}

#[test]
fn files_that_end_early_are_found_without_decoding_and_wherever_they_end() {
    for name in
        ["shrunk.png", "420.jpg", "444_progressive.jpg", "grey.jpg", "lossy.webp", "lossless.webp"]
    {
        let whole = fs::read(test_pictures().join(name)).unwrap();
        assert!(probe(&Source::Bytes(whole.clone().into())).is_ok());
        for length in (1..whole.len()).step_by(whole.len() / 40 + 1).chain([whole.len() - 14]) {
            let source = Source::Bytes(whole[..length].into());
            let error = probe(&source).expect_err(&format!("{name} cut at {length}"));
            if length > 12 {
                assert!(error.contains("damaged"), "{name} cut at {length}: {error}");
            }
        }
    }
}

#[test]
fn bytes_after_the_end_of_a_picture_do_no_harm() {
    for name in ["shrunk.png", "420.jpg", "lossy.webp"] {
        let mut longer = fs::read(test_pictures().join(name)).unwrap();
        longer.extend([7; 200]);
        let source = Source::Bytes(longer.into());
        assert_eq!(probe(&source).unwrap(), probe(&file(name)).unwrap());
        assert_eq!(decode(&source).unwrap(), decode(&file(name)).unwrap(), "{name}");
    }
}

#[test]
fn damage_inside_a_png_is_found_when_it_is_decoded() {
    let mut bytes = fs::read(test_pictures().join("shrunk.png")).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0xff;
    let source = Source::Bytes(bytes.into());
    assert!(probe(&source).is_ok());
    assert!(decode(&source).unwrap_err().contains("is a damaged PNG file"));
}

#[test]
fn no_damage_makes_a_decoder_panic_or_give_a_picture_of_another_size() {
    for name in [
        "palette_alpha.png",
        "interlaced.png",
        "422.jpg",
        "420_progressive.jpg",
        "inks.jpg",
        "exif_6.jpg",
        "lossy.webp",
        "alpha.webp",
        "turned.webp",
    ] {
        let whole = fs::read(test_pictures().join(name)).unwrap();
        for at in 0..whole.len().min(700) {
            let mut damaged = whole.clone();
            damaged[at] ^= 1 << (at % 8);
            let source = Source::Bytes(damaged.into());
            // A damaged header may claim a large picture; decoding those is only slow.
            let Ok([height, width]) = probe(&source) else { continue };
            if height * width < 1 << 16
                && let Ok(picture) = decode(&source)
            {
                assert_eq!([picture.height, picture.width], [height, width], "{name}, byte {at}");
            }
        }
    }
}

/// A PNG that claims a size and holds next to nothing.
fn claiming(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(Cursor::new(&mut bytes), width, height);
    encoder.set_color(png::ColorType::Grayscale);
    let mut writer = encoder.write_header().unwrap();
    writer.write_chunk(png::chunk::IDAT, &[0x78, 0x9c, 3, 0, 0, 0, 0, 1]).unwrap();
    drop(writer);
    bytes
}

#[test]
fn a_file_that_claims_more_pixels_than_a_picture_has_is_not_decoded() {
    refused(&claiming(100_000, 100_000), "claims 100000 x 100000 pixels");
    refused(&claiming(13_378, 13_378), "claims");
    assert!(probe(&Source::Bytes(claiming(13_377, 13_377).into())).is_ok());
}

#[test]
fn a_picture_without_pixels_is_refused() {
    let mut bytes = fs::read(test_pictures().join("grey.jpg")).unwrap();
    let frame = bytes.windows(2).position(|marker| marker == [0xff, 0xc0]).unwrap();
    bytes[frame + 5..frame + 7].fill(0);
    refused(&bytes, "is a damaged JPEG file");
}

#[test]
fn a_picture_that_is_too_narrow_is_refused_with_its_size() {
    let processor = processor();
    assert!(processor.image([2, 400]).is_ok());
    let error = processor.image([2, 402]).unwrap_err();
    assert!(error.contains("402 x 2 pixels") && error.contains("at most 200 times"), "{error}");
    assert!(processor.film(2, [1, 4000], None).is_err());
}

#[test]
fn a_picture_that_changes_between_reading_rows_and_reading_pixels_is_told() {
    let processor = processor();
    let media = processor.image([20, 30]).unwrap();
    let error = processor.patches(&[file("kept.png")], [20, 30], &media).unwrap_err();
    assert!(error.contains("kept.png is 32 x 24 pixels but was 30 x 20"), "{error}");
}

/// The processor of a folder that holds this one file.
fn with_file(name: &str, content: &str) -> Result<Processor> {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(name), content).unwrap();
    processor_in(folder.path())
}

fn num_patches(processor: &Processor) -> usize {
    processor.image([1000, 1000]).unwrap().grid.iter().product()
}

#[test]
fn bounds_come_from_either_file_and_under_any_of_their_names() {
    let plain = num_patches(&processor());
    for (name, content) in [
        ("preprocessor_config.json", json!({"size": {"shortest_edge": 64, "longest_edge": 4096}})),
        ("preprocessor_config.json", json!({"size": {"min_pixels": 64.0, "max_pixels": 4096.0}})),
        ("preprocessor_config.json", json!({"min_pixels": 64, "max_pixels": 4096, "size": null})),
        ("processor_config.json", json!({"image_processor": {"size": {"longest_edge": 4096}}})),
    ] {
        let processor = with_file(name, &content.to_string()).unwrap();
        assert_eq!(num_patches(&processor), 4 * plain, "{content}");
    }
    let video = json!({"size": {"shortest_edge": 64, "longest_edge": 4096}, "fps": 4}).to_string();
    let processor = with_file("video_preprocessor_config.json", &video).unwrap();
    assert_eq!(num_patches(&processor), plain);
    let film = processor.film(2, [1000, 1000], None).unwrap();
    assert_eq!((film.grid, film.frame_seconds.unwrap()), ([1, 10, 10], vec![0.0, 0.25]));
}

#[test]
fn settings_that_do_not_fit_are_named_with_file_and_key() {
    for (content, needles) in [
        ("{", &["not valid JSON"][..]),
        ("[]", &["an object", "a list"]),
        (r#"{"patch_size": 16}"#, &["patch_size is 16", "makes it 4"]),
        (r#"{"merge_size": 1}"#, &["merge_size is 1"]),
        (r#"{"temporal_patch_size": "two"}"#, &["temporal_patch_size"]),
        (r#"{"do_resize": false}"#, &["do_resize"]),
        (r#"{"resample": 2}"#, &["resample is 2", "bicubic"]),
        (r#"{"rescale_factor": 0}"#, &["rescale_factor"]),
        (r#"{"image_mean": [0.5]}"#, &["image_mean", "three"]),
        (r#"{"image_std": [0.5, 0, 1]}"#, &["image_std", "above 0"]),
        (r#"{"size": {"longest_edge": -1}}"#, &["size.longest_edge", "-1"]),
        (
            r#"{"size": {"shortest_edge": 900, "longest_edge": 600}}"#,
            &["at least 900 and at most 600"],
        ),
    ] {
        let error = with_file("preprocessor_config.json", content).unwrap_err().to_string();
        assert!(error.contains("preprocessor_config.json"), "{error}");
        for needle in needles {
            assert!(error.contains(needle), "no '{needle}' in: {error}");
        }
    }
    for content in [r#"{"fps": 0}"#, r#"{"cap_pixels_per_frame": true}"#] {
        let error = with_file("video_preprocessor_config.json", content).unwrap_err().to_string();
        assert!(error.contains("video_preprocessor_config.json: "), "{error}");
    }
}

#[test]
fn a_user_s_bounds_win_over_the_files_and_impossible_ones_are_refused() {
    let with = |min_pixels, max_pixels| {
        Processor::new(tiny(), Path::new("/nonexistent"), PixelLimits { min_pixels, max_pixels })
    };
    assert_eq!(num_patches(&with(None, Some(64)).unwrap()), 4);
    assert_eq!(num_patches(&with(Some(64), Some(256)).unwrap()), 16);
    let small = with(Some(64), None).unwrap().image([8, 8]).unwrap();
    assert_eq!(small.grid, [1, 2, 2]);
    // A frame of a film is bounded like a picture, however many there are.
    let film = with(None, Some(64)).unwrap().film(6, [1000, 1000], None).unwrap();
    assert_eq!(film.grid, [3, 2, 2]);
    for (limits, needle) in [
        (with(None, Some(63)), "data.max_pixels is 63"),
        (with(Some(0), None), "data.min_pixels"),
        (with(Some(300), Some(200)), "data.min_pixels is 300"),
        (with(Some(3000), None), "max_pixels, which is 1024"),
    ] {
        let error = limits.unwrap_err().to_string();
        assert!(error.contains(needle), "no '{needle}' in: {error}");
    }
}
