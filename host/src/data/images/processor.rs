//! One model's way of preparing pictures and films.

use std::path::Path;

use blockstreamer_core::vision::{Media, VisionFormat};
use tch::Tensor;

use super::decode::decode;
use super::patches::{cut, values_per_patch};
use super::resize::{Area, image_size, resize, video_size};
use super::settings::{PixelLimits, Recipe, image_recipe, limited, video_recipe};
use super::source::Source;
use crate::data::error::Result;

/// One model's way of preparing pictures and films.
#[derive(Debug, Clone, PartialEq)]
pub struct Processor {
    format: VisionFormat,
    image: Recipe,
    video: Recipe,
    /// Most pixels of one frame of a film, where a user sets it.
    max_frame_pixels: Option<usize>,
    fps: f64,
}

impl Processor {
    /// The processor of a model: what its family says, changed by the files in its folder
    /// (`preprocessor_config.json`, `video_preprocessor_config.json`, `processor_config.json`), then by the user.
    ///
    /// # Errors
    /// Names the file and the key, or the setting, that cannot be used.
    pub fn new(format: VisionFormat, folder: &Path, limits: PixelLimits) -> Result<Self> {
        let mut image = image_recipe(&format, folder)?;
        image.area = limited(image.area, limits, &format)?;
        let (video, fps) = video_recipe(&format, folder)?;
        Ok(Self { format, image, video, max_frame_pixels: limits.max_pixels, fps })
    }

    /// The format that the family described.
    pub fn format(&self) -> &VisionFormat {
        &self.format
    }

    /// A picture of `size` (height, width) after resizing, in patches.
    ///
    /// # Errors
    /// A message when the model does not take this shape.
    pub(in crate::data) fn image(&self, size: [usize; 2]) -> Result<Media, String> {
        let [height, width] = image_size(size, self.image.area, &self.format)?;
        let side = self.format.patch_size;
        Ok(Media { grid: [1, height / side, width / side], frame_seconds: None })
    }

    /// A film of `num_frames` frames of `size`, likewise, with the time of each frame.
    ///
    /// # Errors
    /// As [`Processor::image`].
    pub(in crate::data) fn film(
        &self,
        num_frames: usize,
        size: [usize; 2],
        fps: Option<f64>,
    ) -> Result<Media, String> {
        let Area { min_pixels, max_pixels } = self.video.area;
        let of_frames = self.max_frame_pixels.map(|pixels| pixels.saturating_mul(num_frames));
        let area = Area {
            min_pixels,
            max_pixels: of_frames.map_or(max_pixels, |most| most.min(max_pixels)),
        };
        let [height, width] = video_size(num_frames, size, area, &self.format)?;
        let (side, patch_frames) = (self.format.patch_size, self.format.temporal_patch_size);
        let grid = [num_frames.div_ceil(patch_frames), height / side, width / side];
        let fps = fps.unwrap_or(self.fps);
        let shown = (0..grid[0] * patch_frames).map(|frame| frame.min(num_frames - 1));
        Ok(Media { grid, frame_seconds: Some(shown.map(|frame| frame as f64 / fps).collect()) })
    }

    /// The patches of a picture or film whose frames are `sources` (one for a picture), `[num_patches, values]`.
    ///
    /// # Errors
    /// A message that names the file which cannot be decoded, or is not what it was when the rows were read.
    pub(in crate::data) fn patches(
        &self,
        sources: &[Source],
        size: [usize; 2],
        media: &Media,
    ) -> Result<Tensor, String> {
        let side = self.format.patch_size;
        let [num_patches_in_time, grid_height, grid_width] = media.grid;
        let mut frames = Vec::with_capacity(sources.len());
        for source in sources {
            let picture = decode(source).map_err(|error| format!("{source} {error}"))?;
            let (height, width) = (picture.height, picture.width);
            if [height, width] != size {
                return Err(format!(
                    "{source} is {width} x {height} pixels but was {} x {} when the rows were read; \
                     leave pictures as they are during a run",
                    size[1], size[0]
                ));
            }
            let frame = resize(picture, [grid_height * side, grid_width * side]);
            frames.push(frame.map_err(|error| format!("{source}: {error}"))?);
        }
        let num_frames = num_patches_in_time * self.format.temporal_patch_size;
        let last = frames.len().saturating_sub(1);
        let shown: Vec<&[u8]> = (0..num_frames)
            .filter_map(|frame| frames.get(frame.min(last)).map(Vec::as_slice))
            .collect();
        let recipe = if media.frame_seconds.is_some() { &self.video } else { &self.image };
        let values = cut(&shown, media.grid, &recipe.levels, &self.format);
        let num_patches = media.grid.iter().product::<usize>() as i64;
        let shape = [num_patches, values_per_patch(&self.format) as i64];
        let tensor = Tensor::f_from_slice(&values).and_then(|values| values.f_view(shape));
        tensor.map_err(|error| error.to_string())
    }
}
