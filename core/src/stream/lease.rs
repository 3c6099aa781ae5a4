//! The right to use a block until the visit's last kernel has finished.

use std::sync::Arc;

use tch::Tensor;

use super::BlockStream;
use crate::block::BlockIndex;
use crate::device::Event;
use crate::state::NamedTensors;

/// A block on the device, for one visit. Dropping it hands the slot back: what was queued on the
/// compute stream before that still finds the block there.
#[derive(Debug)]
pub struct Lease<'a> {
    pub(super) stream: &'a BlockStream,
    pub(super) block: BlockIndex,
    /// None: the block is kept.
    pub(super) slot: Option<usize>,
    pub(super) start: Arc<Event>,
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

    /// Whether the next visit is of the same block: it stays where it is until then.
    pub fn is_visited_next(&self) -> bool {
        let inner = self.stream.inner.try_borrow();
        inner.is_ok_and(|inner| inner.schedule.upcoming().front() == Some(&self.block))
    }

    /// Whether `tensor` lies in the block's memory: keeping it would read another block's bytes later,
    /// or, changed in place, change a kept block.
    pub fn owns(&self, tensor: &Tensor) -> bool {
        self.stream.owns(self, tensor)
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        self.tensors = NamedTensors::new();
        self.stream.release(self);
    }
}
