//! Blocks in host memory.

use std::ops::Range;

use tch::Tensor;

use super::{BlockSource, check_request};
use crate::block::{BlockIndex, BlockSpec, Placement};
use crate::checkpoint::{check_streamed_first, tensor_bytes};
use crate::device::HostBuffer;
use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// Most bytes read from another source at once: bounds what a source with checksums must hold.
const LOAD_BYTES: usize = 64 << 20;

/// Holds the image of every block in host memory and lends it.
#[derive(Debug)]
pub struct RamSource {
    blocks: Vec<BlockSpec>,
    images: Vec<HostBuffer>,
}

impl RamSource {
    /// Loads all blocks of `source`. `reserve` makes the memory of each: [`HostBuffer::new`], or a
    /// constructor of pinned memory for a CUDA device.
    ///
    /// # Errors
    /// Whatever `source` and `reserve` return, with the block's name.
    pub fn load(
        source: &dyn BlockSource,
        reserve: impl Fn(usize) -> Result<HostBuffer>,
    ) -> Result<Self> {
        let blocks = source.blocks().to_vec();
        let load = |(index, spec): (usize, &BlockSpec)| {
            let mut image = reserve(spec.image_bytes)?;
            for (part, into) in image.bytes_mut().chunks_mut(LOAD_BYTES).enumerate() {
                let start = part * LOAD_BYTES;
                source.read(BlockIndex(index), start..start + into.len(), into)?;
            }
            Ok(image)
        };
        let load_named = |entry: (usize, &BlockSpec)| {
            load(entry).map_err(|error: Error| error.in_block(&entry.1.name))
        };
        let images = blocks.iter().enumerate().map(load_named).collect::<Result<_>>()?;
        Ok(Self { blocks, images })
    }

    /// Blocks from tensors: name, placement and the named tensors of each, streamed ones first.
    ///
    /// # Errors
    /// [`Error::Usage`] for another order; [`Error::Tensor`] for a name that occurs twice in a block or
    /// a kind that no checkpoint holds; whatever `reserve` returns.
    pub fn from_tensors<'a>(
        blocks: impl IntoIterator<Item = (&'a str, Placement, Vec<(&'a str, Tensor)>)>,
        reserve: impl Fn(usize) -> Result<HostBuffer>,
    ) -> Result<Self> {
        let (mut specs, mut images) = (Vec::new(), Vec::new());
        for (name, placement, tensors) in blocks {
            let describe = |(name, tensor): &(&str, Tensor)| {
                let dtype = Dtype::from_kind(tensor.f_kind()?)
                    .map_err(|error| Error::tensor(*name, error.to_string()))?;
                let shape = tensor.size().iter().map(|extent| *extent as usize).collect();
                Ok(((*name).to_owned(), dtype, shape))
            };
            let described = tensors.iter().map(describe).collect::<Result<Vec<_>>>()?;
            let spec = BlockSpec::pack(name, placement, described)
                .map_err(|error| error.in_block(name))?;
            let mut image = reserve(spec.image_bytes)?;
            for (tensor, (_, values)) in spec.tensors.iter().zip(&tensors) {
                let range = tensor.offset_bytes..tensor.offset_bytes + tensor.num_bytes;
                image.bytes_mut()[range].copy_from_slice(&tensor_bytes(values)?);
            }
            specs.push(spec);
            images.push(image);
        }
        check_streamed_first(specs.iter().map(|spec| (&*spec.name, spec.placement)))?;
        Ok(Self { blocks: specs, images })
    }
}

impl BlockSource for RamSource {
    fn describe(&self) -> String {
        let num_bytes: usize = self.blocks.iter().map(|spec| spec.image_bytes).sum();
        format!("{} blocks of {num_bytes} bytes in host memory", self.blocks.len())
    }

    fn blocks(&self) -> &[BlockSpec] {
        &self.blocks
    }

    /// Returns 0: nothing comes from storage.
    fn read(&self, block: BlockIndex, range: Range<usize>, into: &mut [u8]) -> Result<usize> {
        check_request(&self.blocks, block, &range, into)?;
        into.copy_from_slice(&self.images[block.0].bytes()[range]);
        Ok(0)
    }

    fn lend(&self, block: BlockIndex) -> Option<&HostBuffer> {
        self.images.get(block.0)
    }
}
