//! Blocks in host memory.

use std::ops::Range;

use tch::Tensor;

use super::{BlockSource, check_request};
use crate::block::{BlockIndex, BlockSpec, Placement};
use crate::checkpoint::{check_streamed_first, tensor_bytes};
use crate::device::HostBuffer;
use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// Blocks that were made in host memory; it lends them.
#[derive(Debug)]
pub struct RamSource {
    blocks: Vec<BlockSpec>,
    images: Vec<HostBuffer>,
}

impl RamSource {
    /// Blocks from tensors: name, placement and the named tensors of each, streamed ones first.
    /// `reserve` makes the memory of each, as for [`TieredSource::load`](super::TieredSource::load).
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
