//! Everything about a batch with pictures that depends on values, on the host.

use blockstreamer_core::batch::Batch;
use blockstreamer_core::tch::{Kind, Tensor};
use blockstreamer_core::vision::{POSITIONS, Patches, VISION_ROWS};
use blockstreamer_core::{Error, Result};

use crate::config::{Config, VisionConfig};
use crate::grids::PatchTables;
use crate::positions::{Media, Rows};

/// Places of the pictures among the flattened positions, pictures first, then films.
pub(crate) const ROWS: &str = VISION_ROWS;
/// Row and column of every patch, `[2, 1, num_patches]`.
pub(crate) const COORDINATES: &str = "vision_coordinates";
/// Entries of the position table around every patch, `[num_patches, 4]`.
pub(crate) const TAPS: &str = "vision_taps";
/// The weight of each, fp32.
pub(crate) const TAP_WEIGHTS: &str = "vision_tap_weights";
/// On the host: patches of every frame.
pub(crate) const SEGMENTS: &str = "vision_segments";

/// Fills what is prepared. A batch without pictures is left alone: whatever ids it has are text, as in
/// transformers.
pub(crate) fn prepare(config: &Config, batch: &mut Batch) -> Result<()> {
    if !batch.has_vision() {
        return Ok(());
    }
    let vision = &config.vision;
    let mut tables = PatchTables::default();
    let mut media = [
        Media::new("picture", config.special_ids.image),
        Media::new("film", config.special_ids.video),
    ];
    for (media, patches) in media.iter_mut().zip([&batch.images, &batch.videos]) {
        let Some(patches) = patches else { continue };
        check(vision, media.name, patches)?;
        for (number, grid) in patches.grids.iter().enumerate() {
            let [frames, height, width] = *grid;
            if media.name == "picture" && frames != 1 {
                let message =
                    format!("picture {number} of the batch has {frames} frames; give it as a film");
                return Err(Error::usage(message));
            }
            tables.add(*grid, vision.spatial_merge_size, vision.table_side);
            let cells = [height / vision.spatial_merge_size, width / vision.spatial_merge_size];
            // Time stamps separate the frames of a film: to the decoder each is a picture.
            media.frames.extend(std::iter::repeat_n((number, cells), frames));
        }
    }
    let ids = Vec::<i64>::try_from(&batch.input_ids.f_reshape([-1])?)?;
    let mask = batch.attention_mask.as_ref();
    let mask = mask.map(|mask| Ok::<_, Error>(Vec::<bool>::try_from(&mask.f_reshape([-1])?)?));
    let segments = batch.segments.as_ref();
    let segments = segments.map(|it| Ok::<_, Error>(Vec::<i64>::try_from(&it.f_reshape([-1])?)?));
    let (num_rows, sequence) = batch.input_ids.size2()?;
    let mut rows = Rows::new(ids, mask.transpose()?, segments.transpose()?, sequence as usize)?;
    rows.place(&mut media)?;

    let size = [3, num_rows, sequence];
    let positions = Tensor::f_from_slice(&rows.positions.concat())?.f_view(size)?;
    let places: Vec<i64> = media.iter().flat_map(|media| media.places.iter().copied()).collect();
    batch.prepared.insert(POSITIONS, positions);
    batch.prepared.insert(ROWS, Tensor::f_from_slice(&places)?);
    batch.prepared.insert(COORDINATES, tables.coordinates()?);
    batch.prepared.insert(TAPS, tables.taps()?);
    batch.prepared.insert(TAP_WEIGHTS, tables.tap_weights()?);
    batch.prepared_on_host.insert(SEGMENTS, tables.segments()?);
    Ok(())
}

/// Refuses patches that are not what the grids say.
fn check(vision: &VisionConfig, name: &str, patches: &Patches) -> Result<()> {
    let merge = vision.spatial_merge_size;
    for (number, grid) in patches.grids.iter().enumerate() {
        let whole = |extent: usize| extent > 0 && extent.is_multiple_of(merge);
        if grid[0] == 0 || !whole(grid[1]) || !whole(grid[2]) {
            return Err(Error::usage(format!(
                "{name} {number} of the batch has {grid:?} patches (time, height, width); height and width \
                 must be multiples of {merge}"
            )));
        }
    }
    let num_patches: usize = patches.grids.iter().map(|grid| grid.iter().product::<usize>()).sum();
    let wanted = [num_patches as i64, vision.patch_values() as i64];
    if patches.pixels.size() != wanted || patches.pixels.kind() != Kind::Float {
        return Err(Error::usage(format!(
            "the patches of all {name}s of the batch must be {wanted:?} in fp32 (as many as the grids say, by \
             values of one patch), but are {:?} in {:?}",
            patches.pixels.size(),
            patches.pixels.kind()
        )));
    }
    Ok(())
}
