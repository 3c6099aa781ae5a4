//! What the files beside a model say about its pictures.

use std::path::Path;

use blockstreamer_core::vision::VisionFormat;
use serde_json::Value;

use super::patches::Levels;
use super::resize::{Area, cell_side};
use crate::data::error::{DataError, Result};
use crate::data::json;

/// Bounds that a user sets, in place of the model's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PixelLimits {
    /// Fewest pixels of a picture after resizing.
    pub min_pixels: Option<usize>,
    /// Most pixels of a picture, or of each frame of a film, after resizing.
    pub max_pixels: Option<usize>,
}

/// How pictures, or films, of one model are prepared.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Recipe {
    pub(super) area: Area,
    pub(super) levels: Levels,
}

/// Bicubic, by Pillow's number.
const BICUBIC: u64 = 3;

/// The recipe for pictures: the family's, changed by `preprocessor_config.json`, or by the `image_processor` of
/// `processor_config.json` where newer versions of transformers write it.
pub(super) fn image_recipe(format: &VisionFormat, folder: &Path) -> Result<Recipe> {
    let area = Area { min_pixels: format.min_pixels, max_pixels: format.max_pixels };
    let found = find(folder, "preprocessor_config.json", "image_processor")?;
    found.map_or_else(|| Ok(plain(format, area)), |file| file.recipe(format, area))
}

/// The recipe for films, and how many frames are taken for a second where a row does not say it: likewise, from
/// `video_preprocessor_config.json` or `video_processor`.
pub(super) fn video_recipe(format: &VisionFormat, folder: &Path) -> Result<(Recipe, f64)> {
    const TRAINED_FPS: f64 = 2.0;
    let area = Area { min_pixels: format.video_min_pixels, max_pixels: format.video_max_pixels };
    let Some(file) = find(folder, "video_preprocessor_config.json", "video_processor")? else {
        return Ok((plain(format, area), TRAINED_FPS));
    };
    if file.get("cap_pixels_per_frame").is_some_and(|cap| *cap == Value::Bool(true)) {
        return Err(file.wrong("cap_pixels_per_frame", "is not supported; set [data] max_pixels"));
    }
    let fps = match file.get("fps") {
        None => TRAINED_FPS,
        Some(value) => (value.as_f64().filter(|fps| *fps > 0.0))
            .ok_or_else(|| file.wrong("fps", &format!("is {value}; it must be above 0")))?,
    };
    Ok((file.recipe(format, area)?, fps))
}

/// `area` within the bounds that a user sets. A highest bound below the model's lowest one lowers both.
///
/// # Errors
/// [`DataError::Setting`] for bounds that no picture can meet.
pub(super) fn limited(area: Area, limits: PixelLimits, format: &VisionFormat) -> Result<Area> {
    let cell = cell_side(format).pow(2);
    let wrong = |message: String| Err(DataError::Setting { message });
    if let Some(max_pixels) = limits.max_pixels.filter(|max_pixels| *max_pixels < cell) {
        return wrong(format!(
            "data.max_pixels is {max_pixels}, but a picture of this model has at least {cell} pixels"
        ));
    }
    if limits.min_pixels == Some(0) {
        return wrong("data.min_pixels must be at least 1".to_owned());
    }
    let max_pixels = limits.max_pixels.unwrap_or(area.max_pixels);
    if let Some(min_pixels) = limits.min_pixels.filter(|min_pixels| *min_pixels > max_pixels) {
        return wrong(format!(
            "data.min_pixels is {min_pixels}, more than max_pixels, which is {max_pixels}"
        ));
    }
    let min_pixels = limits.min_pixels.unwrap_or(area.min_pixels).min(max_pixels);
    Ok(Area { min_pixels, max_pixels })
}

fn plain(format: &VisionFormat, area: Area) -> Recipe {
    Recipe { area, levels: Levels::new(format.image_mean, format.image_std, 1.0 / 255.0) }
}

/// Settings of a processor, and the file that they stand in.
struct Settings {
    path: std::path::PathBuf,
    values: Value,
}

fn find(folder: &Path, name: &str, key: &str) -> Result<Option<Settings>> {
    let path = folder.join(name);
    if let Some(values) = json::read_optional(&path)? {
        return Ok(Some(Settings { path, values }));
    }
    let path = folder.join("processor_config.json");
    let values = json::read_optional(&path)?.and_then(|mut all| Some(all.get_mut(key)?.take()));
    Ok(values.map(|values| Settings { path, values }))
}

impl Settings {
    /// A key that is there and not null.
    fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, message: &str) -> DataError {
        DataError::file(&self.path, format!("{key} {message}"))
    }

    fn recipe(&self, format: &VisionFormat, default: Area) -> Result<Recipe> {
        if !self.values.is_object() {
            let message = format!("it must hold an object, not {}", json::kind(&self.values));
            return Err(DataError::file(&self.path, message));
        }
        for (key, expected) in [
            ("patch_size", format.patch_size),
            ("temporal_patch_size", format.temporal_patch_size),
            ("merge_size", format.spatial_merge_size),
        ] {
            if let Some(value) =
                self.get(key).filter(|value| value.as_f64() != Some(expected as f64))
            {
                return Err(self.wrong(
                    key,
                    &format!("is {value}, but the model's config.json makes it {expected}; the two files belong to different checkpoints"),
                ));
            }
        }
        for key in ["do_resize", "do_rescale", "do_normalize", "do_convert_rgb"] {
            if self.get(key) == Some(&Value::Bool(false)) {
                return Err(
                    self.wrong(key, "is false: a processor without this step is not supported")
                );
            }
        }
        if let Some(value) = self.get("resample").filter(|value| value.as_u64() != Some(BICUBIC)) {
            return Err(self
                .wrong("resample", &format!("is {value}: only {BICUBIC} (bicubic) is supported")));
        }
        let rescale = match self.get("rescale_factor") {
            None => 1.0 / 255.0,
            Some(value) => (value.as_f64().filter(|factor| *factor > 0.0)).ok_or_else(|| {
                self.wrong("rescale_factor", &format!("is {value}; it must be above 0"))
            })?,
        };
        let mean = self.channels("image_mean")?.unwrap_or(format.image_mean);
        let std = self.channels("image_std")?.unwrap_or(format.image_std);
        if std.iter().any(|value| *value <= 0.0) {
            return Err(self.wrong("image_std", &format!("is {std:?}; values must be above 0")));
        }
        let area = Area {
            min_pixels: self.pixels("min_pixels", "shortest_edge")?.unwrap_or(default.min_pixels),
            max_pixels: self.pixels("max_pixels", "longest_edge")?.unwrap_or(default.max_pixels),
        };
        if area.min_pixels > area.max_pixels {
            return Err(self.wrong(
                "size",
                &format!(
                    "asks for at least {} and at most {} pixels",
                    area.min_pixels, area.max_pixels
                ),
            ));
        }
        Ok(Recipe { area, levels: Levels::new(mean, std, rescale) })
    }

    /// An area, under its older name at the top or in `size`, or under its newer one, which speaks of edges.
    fn pixels(&self, older: &str, newer: &str) -> Result<Option<usize>> {
        let size = self.get("size");
        let in_size =
            |key: &str| size.and_then(|size| size.get(key)).filter(|value| !value.is_null());
        let Some(value) = self.get(older).or_else(|| in_size(older)).or_else(|| in_size(newer))
        else {
            return Ok(None);
        };
        let whole = value.as_f64().filter(|number| *number >= 1.0 && number.fract() == 0.0);
        let whole = whole.map(|number| number as usize);
        whole.map(Some).ok_or_else(|| {
            self.wrong(
                &format!("size.{newer}"),
                &format!("is {value}; it must be a number of pixels"),
            )
        })
    }

    fn channels(&self, key: &str) -> Result<Option<[f64; 3]>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let numbers =
            value.as_array().map(|list| list.iter().filter_map(Value::as_f64).collect::<Vec<_>>());
        let three = numbers.and_then(|numbers| <[f64; 3]>::try_from(numbers).ok());
        three
            .map(Some)
            .ok_or_else(|| self.wrong(key, &format!("is {value}; it must hold three numbers")))
    }
}
