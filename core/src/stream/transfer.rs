//! Moves one block image from its source to the device, through pinned staging memory where needed.

use std::sync::Arc;
use std::time::Instant;

use crate::block::{BlockIndex, BlockSpec};
use crate::device::{CopyEngine, Event, HostBuffer};
use crate::error::{Error, Result};
use crate::source::BlockSource;

/// Where a block goes: device memory of at least the image's size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Destination {
    pub(super) address: usize,
    pub(super) num_bytes: usize,
}

/// Start and end of one copy, kept until both have happened and can be timed.
pub(super) type Copy = (Event, Event);

/// What moving one block cost.
#[derive(Debug, Default)]
pub(super) struct Moved {
    pub(super) read_bytes: usize,
    pub(super) read_ms: f64,
    pub(super) staging_wait_ms: f64,
    pub(super) copied_bytes: usize,
    /// The copies in order; the block is there when the last one has ended.
    pub(super) copies: Vec<Arc<Copy>>,
}

/// A source, a copy engine, and a ring of staging chunks between them.
///
/// A chunk is copied while the next one is read; the ring is the only pinned memory of a streamed run.
#[derive(Debug)]
pub(super) struct Transfer {
    source: Arc<dyn BlockSource>,
    engine: Arc<dyn CopyEngine>,
    ring: Vec<(HostBuffer, Option<Arc<Copy>>)>,
    next: usize,
    chunk_bytes: usize,
    num_chunks: usize,
}

impl Transfer {
    pub(super) fn new(
        source: Arc<dyn BlockSource>,
        engine: Arc<dyn CopyEngine>,
        chunk_bytes: usize,
        num_chunks: usize,
    ) -> Self {
        Self { source, engine, ring: Vec::new(), next: 0, chunk_bytes, num_chunks }
    }

    /// Pinned staging memory in use.
    pub(super) fn staging_bytes(&self) -> usize {
        self.ring.iter().map(|(buffer, _)| buffer.bytes().len()).sum()
    }

    /// For messages.
    pub(super) fn block_name(&self, block: BlockIndex) -> &str {
        &self.source.blocks()[block.0].name
    }

    /// Starts moving `block` to `destination` once `after` has happened on the compute stream.
    ///
    /// The destination must stay allocated until the last of the returned copies has ended.
    pub(super) fn start(
        &mut self,
        block: BlockIndex,
        destination: Destination,
        after: Option<&Event>,
    ) -> Result<Moved> {
        let source = Arc::clone(&self.source);
        let spec = &source.blocks()[block.0];
        if spec.image_bytes > destination.num_bytes {
            return Err(Error::OversizedBlock {
                block: spec.name.clone(),
                num_bytes: spec.image_bytes,
                budget_bytes: destination.num_bytes,
            });
        }
        let moved = match source.lend(block) {
            Some(image) => self.copy_in_place(spec, image, destination, after),
            None if self.engine.is_host_memory() => self.read_in_place(spec, block, destination),
            None => self.read_through_staging(spec, block, destination, after),
        };
        moved.map_err(|error| error.in_block(&spec.name))
    }

    fn copy_in_place(
        &self,
        spec: &BlockSpec,
        image: &HostBuffer,
        destination: Destination,
        after: Option<&Event>,
    ) -> Result<Moved> {
        if !self.engine.is_host_memory() && !image.is_pinned() {
            return Err(Error::Unpinned {
                what: format!("the image that {} lends", self.source.describe()),
            });
        }
        // SAFETY: the destination holds the image (checked by the caller) and outlives the copy; the
        // source lends the image for as long as it lives, and `self` keeps the source alive.
        let copy = unsafe {
            self.engine.copy(&image.bytes()[..spec.image_bytes], destination.address, after)?
        };
        Ok(Moved {
            copied_bytes: spec.image_bytes,
            copies: vec![Arc::new(copy)],
            ..Moved::default()
        })
    }

    fn read_in_place(
        &self,
        spec: &BlockSpec,
        block: BlockIndex,
        destination: Destination,
    ) -> Result<Moved> {
        let start = Instant::now();
        // SAFETY: on a host-memory engine the destination is ordinary memory of at least `image_bytes`
        // that nobody else touches: its slot is neither leased nor being filled.
        let image = unsafe {
            std::slice::from_raw_parts_mut(destination.address as *mut u8, spec.image_bytes)
        };
        let read_bytes = self.source.read(block, 0..spec.image_bytes, image)?;
        let copies = vec![Arc::new((Event::Host(start), Event::Host(Instant::now())))];
        let read_ms = start.elapsed().as_secs_f64() * 1e3;
        Ok(Moved {
            read_bytes,
            read_ms,
            copied_bytes: spec.image_bytes,
            copies,
            ..Moved::default()
        })
    }

    fn read_through_staging(
        &mut self,
        spec: &BlockSpec,
        block: BlockIndex,
        destination: Destination,
        after: Option<&Event>,
    ) -> Result<Moved> {
        self.reserve_ring()?;
        let mut moved = Moved::default();
        let mut offset = 0;
        // A block without parameters still needs one (empty) copy to wait for.
        while offset < spec.image_bytes || moved.copies.is_empty() {
            let end = (offset + self.chunk_bytes).min(spec.image_bytes);
            let (buffer, busy) = &mut self.ring[self.next];
            if let Some(copy) = busy.take() {
                let start = Instant::now();
                self.engine.synchronize(&copy.1)?;
                moved.staging_wait_ms += start.elapsed().as_secs_f64() * 1e3;
            }
            let chunk = &mut buffer.bytes_mut()[..end - offset];
            let start = Instant::now();
            moved.read_bytes += self.source.read(block, offset..end, chunk)?;
            moved.read_ms += start.elapsed().as_secs_f64() * 1e3;
            // SAFETY: the destination holds the image (checked by the caller) and outlives the copy; the
            // chunk is not touched again before its end event, for which `busy` makes us wait.
            let copy =
                Arc::new(unsafe { self.engine.copy(chunk, destination.address + offset, after)? });
            *busy = Some(Arc::clone(&copy));
            moved.copies.push(copy);
            moved.copied_bytes += end - offset;
            self.next = (self.next + 1) % self.ring.len();
            offset = end;
        }
        Ok(moved)
    }

    fn reserve_ring(&mut self) -> Result<()> {
        while self.ring.len() < self.num_chunks {
            self.ring.push((self.engine.host_buffer(self.chunk_bytes)?, None));
        }
        Ok(())
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        // The staging memory must not go while a copy still reads it.
        for (_, busy) in &self.ring {
            if let Some(copy) = busy
                && let Err(error) = self.engine.synchronize(&copy.1)
            {
                tracing::warn!(%error, "a copy from staging memory did not end");
            }
        }
    }
}
