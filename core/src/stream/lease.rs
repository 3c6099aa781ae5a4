//! The right to use a block until the visit's last kernel has finished.

use tch::Tensor;

use super::BlockStream;
use crate::block::BlockIndex;
use crate::state::NamedTensors;

/// A block on the device, for one visit. Dropping it hands the slot back: what was queued on the
/// compute stream before that still finds the block there.
#[derive(Debug)]
pub struct Lease<'a> {
    pub(super) stream: &'a BlockStream,
    pub(super) block: BlockIndex,
    pub(super) slot: usize,
    pub(super) tensors: NamedTensors,
}

impl Lease<'_> {
    /// The block.
    pub fn block(&self) -> BlockIndex {
        self.block
    }

    /// Its tensors, as views of the slot, in their stored dtypes. They must not outlive the lease.
    pub fn tensors(&self) -> &NamedTensors {
        &self.tensors
    }

    /// Whether `tensor` lies in this slot's memory: keeping it would read another block's bytes later.
    pub fn owns(&self, tensor: &Tensor) -> bool {
        self.stream.slot_owns(self.slot, tensor)
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        self.tensors = NamedTensors::new();
        self.stream.release(self.block, self.slot);
    }
}
