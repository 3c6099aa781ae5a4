//! Batches with pictures, made up from what a family says of its format.

use blockstreamer_core::Error;
use blockstreamer_core::batch::{Batch, IGNORE_LABEL};
use blockstreamer_core::family::ChatFormat;
use blockstreamer_core::vision::{Media, Patches, VisionFormat};
use tch::{Device, Kind, Tensor};

use crate::Result;

/// Two pictures of different sizes in row 0, one in row 1 behind other text; the rest of the rows is that
/// of `text`, `[2, sequence]`. `words` gives the text that stands for a picture.
pub(crate) fn batch(
    text: &Batch,
    format: &VisionFormat,
    chat: &ChatFormat,
    words: &dyn Fn(&Media) -> Result<String>,
) -> Result<Batch> {
    let side = format.spatial_merge_size;
    let grids = vec![[1, side, 2 * side], [1, 2 * side, side], [1, side, side]];
    let mut runs = Vec::new();
    for grid in &grids {
        let media = Media { grid: *grid, frame_seconds: None };
        // As a template prints it: the marks around the placeholder are special tokens, too.
        runs.push(ids_of(&words(&media)?, chat)?);
    }
    let (num_rows, sequence) = text.input_ids.size2()?;
    let mut ids = Vec::<Vec<i64>>::try_from(&text.input_ids)?;
    for (row, start, run) in [(0, 2, &runs[0]), (0, 9, &runs[1]), (1, 4, &runs[2])] {
        for (offset, id) in run.iter().enumerate() {
            let place = ids.get_mut(row).and_then(|row| row.get_mut(start + offset));
            *place.ok_or_else(|| Error::usage("the rows are too short for the pictures"))? = *id;
        }
    }
    let input_ids = Tensor::f_from_slice(&ids.concat())?.f_view([num_rows, sequence])?;
    let mut labels = match &text.labels {
        Some(labels) => labels.shallow_clone(),
        None => input_ids.shallow_clone(),
    };
    for id in &format.vision_token_ids {
        labels = labels.f_masked_fill(&input_ids.f_eq(*id)?, IGNORE_LABEL)?;
    }
    let images = Some(patches(format, grids)?);
    let attention_mask = text.attention_mask.as_ref().map(Tensor::shallow_clone);
    Ok(Batch { images, attention_mask, labels: Some(labels), ..Batch::new(input_ids) })
}

/// The same batch with other pixels in its first picture.
pub(crate) fn with_other_pixels(batch: &Batch) -> Result<Batch> {
    let Some(images) = &batch.images else { return Ok(batch.clone()) };
    let first: usize = images.grids.first().map_or(0, |grid| grid.iter().product());
    let (num_patches, _) = images.pixels.size2()?;
    let changed = images.pixels.f_narrow(0, 0, first as i64)?.f_neg()?;
    let rest = images.pixels.f_narrow(0, first as i64, num_patches - first as i64)?;
    let pixels = Tensor::f_cat(&[changed, rest], 0)?;
    Ok(Batch { images: Some(Patches { pixels, grids: images.grids.clone() }), ..batch.clone() })
}

fn patches(format: &VisionFormat, grids: Vec<[usize; 3]>) -> Result<Patches> {
    let num_patches: usize = grids.iter().map(|grid| grid.iter().product::<usize>()).sum();
    let num_values = 3 * format.temporal_patch_size * format.patch_size * format.patch_size;
    let count = (num_patches * num_values) as i64;
    let wave = Tensor::f_arange(count, (Kind::Float, Device::Cpu))?.f_mul_scalar(0.37)?.f_sin()?;
    Ok(Patches { pixels: wave.f_view([num_patches as i64, num_values as i64])?, grids })
}

/// The special tokens in `text`, in order; anything else is left out.
fn ids_of(text: &str, chat: &ChatFormat) -> Result<Vec<i64>> {
    let mut ids = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let found = chat.special_tokens.iter().find(|(token, _)| rest.starts_with(token.as_str()));
        let length = match found {
            Some((token, id)) => {
                ids.push(i64::from(*id));
                token.len()
            }
            None => rest.chars().next().map_or(1, char::len_utf8),
        };
        rest = &rest[length..];
    }
    match ids.is_empty() {
        false => Ok(ids),
        true => {
            Err(Error::usage("the text of a picture holds none of the family's special tokens"))
        }
    }
}
