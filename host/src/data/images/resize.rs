//! The size that a picture gets, and bringing it there.

use blockstreamer_core::Error;
use blockstreamer_core::vision::VisionFormat;
use tch::Tensor;

use super::decode::Rgb;

/// The area that a picture or a film is brought to, in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Area {
    pub(super) min_pixels: usize,
    pub(super) max_pixels: usize,
}

/// Height and width after resizing: multiples of a merged cell's side, an area within bounds, and about the same
/// shape. The same as `smart_resize` of transformers, for pictures.
///
/// # Errors
/// A message when the picture is too narrow.
pub(super) fn image_size(
    [height, width]: [usize; 2],
    area: Area,
    format: &VisionFormat,
) -> Result<[usize; 2], String> {
    check_shape([height, width], format)?;
    Ok(fit([height, width], [1, 1], area, format))
}

/// The same for a film of `num_frames` frames, whose area is that of all frames. Frames smaller than a cell are
/// first enlarged. A film of fewer frames than a patch has counts as filled up to one patch.
///
/// # Errors
/// As [`image_size`].
pub(super) fn video_size(
    num_frames: usize,
    [mut height, mut width]: [usize; 2],
    area: Area,
    format: &VisionFormat,
) -> Result<[usize; 2], String> {
    let side = cell_side(format);
    if height < side || width < side {
        let scale = (side as f64 / height as f64).max(side as f64 / width as f64);
        height = (height as f64 * scale) as usize;
        width = (width as f64 * scale) as usize;
    }
    check_shape([height, width], format)?;
    let patch_frames = format.temporal_patch_size;
    let num_frames = num_frames.max(patch_frames);
    let rounded = (num_frames as f64 / patch_frames as f64).round_ties_even() as usize;
    Ok(fit([height, width], [num_frames, rounded * patch_frames], area, format))
}

/// Side of a merged cell in pixels.
pub(super) fn cell_side(format: &VisionFormat) -> usize {
    format.patch_size * format.spatial_merge_size
}

fn check_shape([height, width]: [usize; 2], format: &VisionFormat) -> Result<(), String> {
    let ratio = height.max(width) as f64 / height.min(width) as f64;
    if ratio > format.max_aspect_ratio {
        return Err(format!(
            "is {width} x {height} pixels: one side is {ratio:.0} times the other, and this model takes at most \
             {} times; cut it or fill it up",
            format.max_aspect_ratio
        ));
    }
    Ok(())
}

/// `num_frames` holds the true number, which areas are scaled by, and the rounded one, which they are compared by.
fn fit(
    [height, width]: [usize; 2],
    [num_frames, rounded_frames]: [usize; 2],
    area: Area,
    format: &VisionFormat,
) -> [usize; 2] {
    let side = cell_side(format);
    let (height, width, cell) = (height as f64, width as f64, side as f64);
    let true_area = num_frames as f64 * height * width;
    let nearest = |length: f64| (length / cell).round_ties_even() as usize * side;
    let size = [nearest(height), nearest(width)];
    let num_pixels = rounded_frames * size[0] * size[1];
    if num_pixels > area.max_pixels {
        let shrink = (true_area / area.max_pixels as f64).sqrt();
        let below = |length: f64| ((length / shrink / cell).floor() as usize * side).max(side);
        [below(height), below(width)]
    } else if num_pixels < area.min_pixels {
        let grow = (area.min_pixels as f64 / true_area).sqrt();
        let above = |length: f64| (length * grow / cell).ceil() as usize * side;
        [above(height), above(width)]
    } else {
        size
    }
}

/// Resizes by bicubic interpolation with antialiasing, in 8 bits as torchvision does; three bytes a pixel, row by row.
pub(super) fn resize(picture: Rgb, [height, width]: [usize; 2]) -> Result<Vec<u8>, Error> {
    if [picture.height, picture.width] == [height, width] {
        return Ok(picture.pixels);
    }
    let stored = [1, picture.height as i64, picture.width as i64, 3];
    let channels_first =
        Tensor::f_from_slice(&picture.pixels)?.f_view(stored)?.f_permute([0, 3, 1, 2])?;
    drop(picture);
    let size = [height as i64, width as i64];
    let resized = channels_first.f_internal_upsample_bicubic2d_aa(size, false, None, None)?;
    let rows = resized.f_permute([0, 2, 3, 1])?.f_contiguous()?;
    let mut pixels = vec![0_u8; height * width * 3];
    let num_pixels = pixels.len();
    rows.f_copy_data_u8(&mut pixels, num_pixels)?;
    Ok(pixels)
}
