//! Images of blocks in host memory, filled the way that blocks go to a device.

use std::sync::Arc;
use std::time::Instant;

use super::StreamOptions;
use super::transfer::{Place, Transfer, TransferOptions};
use crate::block::BlockIndex;
use crate::device::{Event, HostBuffer, HostCopyEngine};
use crate::error::Result;
use crate::read::ReadMethod;
use crate::source::BlockSource;

/// Staging memory of a loader: what a full queue of reads takes, and as much again.
const STAGING_BYTES: usize = 16 << 20;
/// Fewer chunks than this leave the reader without work while one is copied.
const LEAST_CHUNKS: usize = 4;
/// More than this are of no use where blocks, and so chunks, are small.
const MOST_CHUNKS: usize = 16;

/// Reads whole images past the page cache, which would grow by as much as is read and takes its memory from
/// where that of the images comes from.
#[derive(Debug)]
pub(crate) struct HostLoader {
    transfer: Transfer,
}

impl HostLoader {
    /// For blocks of `source` of at most `largest_bytes`.
    pub(crate) fn new(
        source: &Arc<dyn BlockSource>,
        read: ReadMethod,
        largest_bytes: usize,
    ) -> Self {
        let defaults =
            StreamOptions { read, ..StreamOptions::default() }.transfer(&**source, largest_bytes);
        let num_chunks = (STAGING_BYTES / defaults.chunk_bytes).clamp(LEAST_CHUNKS, MOST_CHUNKS);
        let options = TransferOptions { num_chunks, is_told: false, ..defaults };
        Self { transfer: Transfer::new(Arc::clone(source), Arc::new(HostCopyEngine), options) }
    }

    /// Fills `image`, which must be as long as that of `block`. Returns how many bytes came from storage.
    ///
    /// # Errors
    /// [`Error::Block`](crate::Error::Block) when the block cannot be read.
    pub(crate) fn fill(&mut self, block: BlockIndex, image: &mut HostBuffer) -> Result<usize> {
        let image = image.bytes_mut();
        let place = Place {
            slot: 0,
            address: image.as_mut_ptr() as usize,
            num_bytes: image.len(),
            after: Arc::new(Event::Host(Instant::now())),
        };
        let requested = self.transfer.request(block, place);
        requested.map_err(|error| error.in_block(self.transfer.block_name(block)))?;
        self.transfer.take_moved();
        loop {
            // A copy within host memory is made when it is started.
            if let Some((_, served)) = self.transfer.advance() {
                return served.map(|_| self.transfer.take_moved().read_bytes);
            }
            if let Err(error) = self.transfer.wait()
                && let Some((_, Err(error))) = self.transfer.give_up(error)
            {
                return Err(error);
            }
        }
    }
}
