//! Blocks that stay on the device, and views of a block image.

use std::sync::Arc;

use tch::{Kind, Tensor};

use super::StreamOptions;
use super::transfer::{Place, Transfer, TransferOptions};
use super::worker::Worker;
use crate::block::{BlockIndex, BlockSpec};
use crate::device::CopyEngine;
use crate::error::{Error, Result};
use crate::source::BlockSource;
use crate::state::NamedTensors;

/// The tensors of a block as views of its image on the device, in their stored dtypes. Experts are
/// `[num_experts, out_features, in_features]`, however they are stored.
pub(crate) fn views(image: &Tensor, spec: &BlockSpec) -> Result<NamedTensors> {
    let view = |tensor: &crate::block::TensorSpec| -> Result<(String, Tensor)> {
        let shape: Vec<i64> = tensor.shape.iter().map(|extent| *extent as i64).collect();
        let bytes = image.f_narrow(0, tensor.offset_bytes as i64, tensor.num_bytes as i64)?;
        let mut seen = bytes.f_view_dtype(tensor.dtype.kind())?.f_view(&shape[..])?;
        if tensor.is_transposed {
            seen = seen.f_transpose(1, 2)?;
        }
        Ok((tensor.name.clone(), seen))
    };
    spec.tensors.iter().map(view).collect()
}

/// A block on the device that stays there.
#[derive(Debug)]
pub struct LoadedBlock {
    /// Its image, which it owns.
    pub image: Tensor,
    /// Views of the image, in their stored dtypes.
    pub tensors: NamedTensors,
}

/// Blocks that stay, and what bringing them cost.
#[derive(Debug, Default)]
pub struct LoadedBlocks {
    /// In the order asked for.
    pub blocks: Vec<LoadedBlock>,
    /// Bytes read from storage.
    pub read_bytes: u64,
    /// Bytes copied to the device.
    pub copied_bytes: u64,
}

/// Brings blocks to the device to stay there, one after another through the staging memory that
/// `options` describe, which is released at the end.
///
/// # Errors
/// [`Error::Block`] when one cannot be read, [`Error::OutOfMemory`] when the device has no room,
/// [`Error::Usage`] for staging of no chunks or bytes.
pub fn load_blocks(
    source: &Arc<dyn BlockSource>,
    engine: &Arc<dyn CopyEngine>,
    blocks: &[BlockIndex],
    options: &StreamOptions,
) -> Result<LoadedBlocks> {
    options.check()?;
    let spec = |block: &BlockIndex| {
        let known = source.blocks().get(block.0);
        known.ok_or_else(|| Error::usage(format!("{} has no block {block}", source.describe())))
    };
    let largest = blocks.iter().map(|block| Ok(spec(block)?.image_bytes));
    let largest = largest.collect::<Result<Vec<_>>>()?.into_iter().max();
    let Some(largest_bytes) = largest else { return Ok(LoadedBlocks::default()) };
    let options = TransferOptions { is_told: false, ..options.transfer(&**source, largest_bytes) };
    let transfer = Transfer::new(Arc::clone(source), Arc::clone(engine), options);
    let mut images = Vec::new();
    let worker = Worker::spawn(transfer, blocks.len())?;
    for (slot, block) in blocks.iter().enumerate() {
        let spec = spec(block)?;
        let image =
            Tensor::f_empty([spec.image_bytes.max(1) as i64], (Kind::Uint8, engine.device()))
                .map_err(|error| Error::from(error).in_block(&spec.name))?;
        let place = Place {
            slot,
            address: image.data_ptr() as usize,
            num_bytes: spec.image_bytes,
            after: Arc::new(engine.record()?),
        };
        images.push(image);
        worker.fetch(*block, place)?;
    }
    let mut loaded = LoadedBlocks::default();
    // Shared, not moved: when one fails, the worker still fills others until it is dropped.
    for (slot, image) in images.iter().map(Tensor::shallow_clone).enumerate() {
        engine.synchronize(&worker.shared.started(slot)?.end)?;
        let tensors = views(&image, spec(&blocks[slot])?)?;
        loaded.blocks.push(LoadedBlock { image, tensors });
    }
    let moved = std::mem::take(&mut worker.shared.lock().moved);
    loaded.read_bytes = moved.read_bytes as u64;
    loaded.copied_bytes = moved.copied_bytes as u64;
    Ok(loaded)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::block::Placement;
    use crate::dtype::Dtype;

    #[test]
    fn experts_stored_in_by_out_are_seen_out_by_in_without_a_copy() {
        let tensors = [
            ("small".to_owned(), Dtype::F32, vec![3]),
            ("experts".to_owned(), Dtype::F32, vec![2, 3, 5]),
        ];
        let mut spec = BlockSpec::pack("block", Placement::Streamed, tensors).unwrap();
        let image = Tensor::zeros([spec.image_bytes as i64], (Kind::Uint8, Device::Cpu));
        let stored = views(&image, &spec).unwrap();
        let experts = stored.get("experts").unwrap();
        experts
            .shallow_clone()
            .copy_(&Tensor::arange(30, (Kind::Float, Device::Cpu)).view([2, 3, 5]));
        spec.tensors[1].is_transposed = true;
        let seen = views(&image, &spec).unwrap();
        let seen = seen.get("experts").unwrap();
        assert_eq!(seen.size(), [2, 5, 3]);
        assert_eq!(seen.data_ptr(), experts.data_ptr());
        assert_eq!(*seen, experts.transpose(1, 2));
    }
}
