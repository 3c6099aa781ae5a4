//! Blocks that stay on the device, and views of a block image.

use std::sync::Arc;

use tch::{Kind, Tensor};

use super::transfer::{Destination, Transfer};
use crate::block::{BlockIndex, BlockSpec};
use crate::device::CopyEngine;
use crate::error::{Error, Result};
use crate::source::BlockSource;
use crate::state::NamedTensors;

/// The tensors of a block as views of its image on the device, in their stored dtypes.
pub(super) fn views(image: &Tensor, spec: &BlockSpec) -> Result<NamedTensors> {
    let view = |tensor: &crate::block::TensorSpec| -> Result<(String, Tensor)> {
        let shape: Vec<i64> = tensor.shape.iter().map(|extent| *extent as i64).collect();
        let bytes = image.f_narrow(0, tensor.offset_bytes as i64, tensor.num_bytes as i64)?;
        Ok((tensor.name.clone(), bytes.f_view_dtype(tensor.dtype.kind())?.f_view(&shape[..])?))
    };
    spec.tensors.iter().map(view).collect()
}

/// Brings one block to the device to stay there. The result owns its memory.
/// Returns the tensors, the bytes read from storage and the bytes copied.
///
/// # Errors
/// [`Error::Block`] when it cannot be read, [`Error::OutOfMemory`] when the device has no room.
pub fn load_block(
    source: &Arc<dyn BlockSource>,
    engine: &Arc<dyn CopyEngine>,
    block: BlockIndex,
) -> Result<(NamedTensors, usize, usize)> {
    let spec = source
        .blocks()
        .get(block.0)
        .ok_or_else(|| Error::usage(format!("{} has no block {block}", source.describe())))?;
    let image = Tensor::f_empty([spec.image_bytes.max(1) as i64], (Kind::Uint8, engine.device()))
        .map_err(|error| Error::from(error).in_block(&spec.name))?;
    let destination =
        Destination { address: image.data_ptr() as usize, num_bytes: spec.image_bytes };
    let chunk_bytes = spec.image_bytes.clamp(1, 16 << 20);
    let mut transfer = Transfer::new(Arc::clone(source), Arc::clone(engine), chunk_bytes, 2);
    let after = engine.record()?;
    let moved = transfer.start(block, destination, Some(&after))?;
    if let Some(copy) = moved.copies.last() {
        engine.synchronize(&copy.1)?;
    }
    Ok((views(&image, spec)?, moved.read_bytes, moved.copied_bytes))
}
