//! The way of blocks from their source to the device: reads into staging chunks, copies out of them.
//!
//! Fetches are worked off in order. While one is being copied, the reads of those after it are under way,
//! as far as there are free chunks, also of those that have no place on the device yet.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::chunks::{self, Chunk};
use super::staging::Ring;
use super::trace::Timed;
use crate::block::{BlockIndex, BlockSpec};
use crate::device::{CopyEngine, CopyPiece, Event};
use crate::error::{Error, Result};
use crate::read::{self, ReadMethod};
use crate::source::BlockSource;

/// Where a block goes. The memory must stay allocated until the last copy to it has ended.
#[derive(Debug)]
pub(super) struct Place {
    /// The caller's name for it.
    pub(super) slot: usize,
    pub(super) address: usize,
    pub(super) num_bytes: usize,
    /// The memory's last user on the compute stream.
    pub(super) after: Arc<Event>,
}

/// What was moved since the last report.
#[derive(Debug, Default)]
pub(super) struct Moved {
    pub(super) read_bytes: usize,
    pub(super) read_busy_ms: f64,
    pub(super) staging_wait_ms: f64,
    pub(super) copied_bytes: usize,
    /// Reads that ended and copies that were started.
    pub(super) timed: Vec<Arc<Timed>>,
}

/// How blocks are moved.
#[derive(Debug, Clone, Copy)]
pub(super) struct TransferOptions {
    pub(super) chunk_bytes: usize,
    pub(super) num_chunks: usize,
    pub(super) read: ReadMethod,
    pub(super) queue_depth: usize,
    /// Whether people are told how blocks are read.
    pub(super) is_told: bool,
}

/// A place that was served: its slot, and the copy whose end is when the block is there.
pub(super) type Served = (usize, Result<Arc<Timed>>);

/// One block on its way.
#[derive(Debug)]
struct Fetch {
    block: BlockIndex,
    place: Option<Place>,
    chunks: Arc<[Chunk]>,
    /// Chunks of the ring that are being filled for it or wait to be copied, oldest first.
    staged: VecDeque<usize>,
    /// Chunks of the block that are staged or copied.
    num_staged: usize,
    num_copied: usize,
    last_copy: Option<Arc<Timed>>,
}

/// A source, a ring of staging chunks and a copy engine. Driven by one thread.
#[derive(Debug)]
pub(super) struct Transfer {
    source: Arc<dyn BlockSource>,
    engine: Arc<dyn CopyEngine>,
    options: TransferOptions,
    ring: Option<Ring>,
    fetches: VecDeque<Fetch>,
    /// Blocks whose chunks were worked out before.
    cut: BTreeMap<BlockIndex, Arc<[Chunk]>>,
    moved: Moved,
    /// The copy that was started last: the others end before it.
    last_copy: Option<Arc<Timed>>,
}

impl Drop for Transfer {
    fn drop(&mut self) {
        // Places may go when the transfer is gone: no copy may still write to them.
        if let Some(copy) = &self.last_copy
            && let Err(error) = self.engine.synchronize(&copy.end)
        {
            tracing::warn!(%error, "a copy to the device did not end");
        }
    }
}

impl Transfer {
    pub(super) fn new(
        source: Arc<dyn BlockSource>,
        engine: Arc<dyn CopyEngine>,
        options: TransferOptions,
    ) -> Self {
        let (fetches, cut) = (VecDeque::new(), BTreeMap::new());
        Self {
            source,
            engine,
            options,
            ring: None,
            fetches,
            cut,
            moved: Moved::default(),
            last_copy: None,
        }
    }

    /// Pinned staging memory in use.
    pub(super) fn staging_bytes(&self) -> usize {
        self.ring.as_ref().map_or(0, Ring::num_bytes)
    }

    /// What was moved since the last call.
    pub(super) fn take_moved(&mut self) -> Moved {
        let mut moved = std::mem::take(&mut self.moved);
        if let Some(ring) = &mut self.ring {
            let filled = ring.take_filled();
            moved.read_busy_ms = filled.busy_ms;
            moved.timed.extend(filled.reads);
        }
        moved
    }

    /// Announces a block: it is read ahead when the ones before it are under way.
    pub(super) fn expect(&mut self, block: BlockIndex) -> Result<()> {
        let chunks = self.chunks(block)?;
        self.fetches.push_back(Fetch {
            block,
            place: None,
            chunks,
            staged: VecDeque::new(),
            num_staged: 0,
            num_copied: 0,
            last_copy: None,
        });
        Ok(())
    }

    /// A place for `block`: for the first announced block without one, if there is any.
    pub(super) fn request(&mut self, block: BlockIndex, place: Place) -> Result<()> {
        let spec = &self.source.blocks()[block.0];
        if spec.image_bytes > place.num_bytes {
            return Err(Error::OversizedBlock {
                block: spec.name.clone(),
                num_bytes: spec.image_bytes,
                budget_bytes: place.num_bytes,
            });
        }
        let announced = |fetch: &Fetch| fetch.place.is_none();
        if self.fetches.iter().find(|fetch| announced(fetch)).is_none_or(|it| it.block != block) {
            // It could not be announced; those after it have to come after it.
            self.forget();
            self.expect(block)?;
        }
        if let Some(fetch) = self.fetches.iter_mut().find(|fetch| announced(fetch)) {
            fetch.place = Some(place);
        }
        Ok(())
    }

    /// Forgets the announced blocks that have no place.
    pub(super) fn forget(&mut self) {
        let ring = &mut self.ring;
        self.fetches.retain(|fetch| {
            if fetch.place.is_none() {
                for index in &fetch.staged {
                    ring.iter_mut().for_each(|ring| ring.abandon(*index));
                }
            }
            fetch.place.is_some()
        });
    }

    /// Whether anything is expected or asked for.
    pub(super) fn is_idle(&self) -> bool {
        self.fetches.is_empty()
    }

    /// Whether nothing will happen by itself: no read and no copy is under way.
    pub(super) fn is_still(&self) -> bool {
        self.ring.as_ref().is_none_or(Ring::is_still)
    }

    /// Whether the oldest fetch has a place: waiting brings it on.
    pub(super) fn can_wait(&self) -> bool {
        self.fetches.front().is_some_and(|fetch| fetch.place.is_some())
    }

    /// Does what can be done without waiting, up to the next place that is served.
    pub(super) fn advance(&mut self) -> Option<Served> {
        let outcome = loop {
            if let Err(error) = self.start_reads() {
                return self.give_up(error);
            }
            // The drive must not rest while a long copy is made: reads are started after each.
            match self.copy_oldest() {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(error) if self.ring.is_none() => return self.give_up(error),
                Err(error) => break Err(error),
            }
        };
        let front = self.fetches.front()?;
        let slot = front.place.as_ref()?.slot;
        let served = match outcome {
            Ok(()) if front.num_copied < front.chunks.len() => return None,
            Ok(()) => self.finish_oldest(),
            Err(error) => Err(error),
        };
        let fetch = self.fetches.pop_front()?;
        for index in fetch.staged {
            self.ring.iter_mut().for_each(|ring| ring.abandon(index));
        }
        Some((slot, served.map_err(|error| error.in_block(self.block_name(fetch.block)))))
    }

    /// Gives the oldest fetch up because of an error of the reader or the source itself, and starts
    /// anew with the others.
    pub(super) fn give_up(&mut self, error: Error) -> Option<Served> {
        self.ring = None;
        self.cut.clear();
        for fetch in &mut self.fetches {
            // What is copied stays copied; what was read is read again.
            fetch.staged.clear();
            fetch.num_staged = fetch.num_copied;
        }
        if !self.can_wait() {
            return None;
        }
        let fetch = self.fetches.pop_front()?;
        let error = error.in_block(self.block_name(fetch.block));
        Some((fetch.place?.slot, Err(error)))
    }

    /// For messages.
    pub(super) fn block_name(&self, block: BlockIndex) -> &str {
        &self.source.blocks()[block.0].name
    }

    /// Waits for what keeps the oldest fetch, which has a place, from going on.
    pub(super) fn wait(&mut self) -> Result<()> {
        let Some(ring) = &mut self.ring else { return Ok(()) };
        let start = Instant::now();
        match self.fetches.front().is_some_and(|fetch| !fetch.staged.is_empty()) {
            true => ring.wait_for_read(),
            // All chunks are being copied or read for nobody.
            false if ring.is_emptying() => {
                let outcome = ring.wait_for_copy();
                self.moved.staging_wait_ms += start.elapsed().as_secs_f64() * 1e3;
                outcome
            }
            false => ring.wait_for_read(),
        }
    }

    fn chunks(&mut self, block: BlockIndex) -> Result<Arc<[Chunk]>> {
        if self.source.lend(block).is_some() {
            return Ok(Arc::from([]));
        }
        if let Some(chunks) = self.cut.get(&block) {
            return Ok(Arc::clone(chunks));
        }
        let source = Arc::clone(&self.source);
        let ring = self.ring()?;
        let (reader, chunk_bytes) = (ring.reader(), ring.chunk_bytes());
        let alignment_bytes = |file| reader.alignment_bytes(file);
        let chunks: Arc<[Chunk]> =
            chunks::cut(&*source, block, chunk_bytes, &alignment_bytes).into();
        self.cut.insert(block, Arc::clone(&chunks));
        Ok(chunks)
    }

    /// The ring, made when it is first needed.
    fn ring(&mut self) -> Result<&mut Ring> {
        let ring = match self.ring.take() {
            Some(ring) => ring,
            None => {
                let TransferOptions { chunk_bytes, num_chunks, read, queue_depth, is_told } =
                    self.options;
                let reader = read::open(&self.source, read, queue_depth)?;
                let alignments =
                    (0..self.source.files().len()).map(|file| reader.alignment_bytes(file));
                let chunk_bytes = chunk_bytes.next_multiple_of(alignments.max().unwrap_or(1));
                let engine = Arc::clone(&self.engine);
                let ring = Ring::new(reader, engine, num_chunks, chunk_bytes)?;
                if is_told {
                    let (source, reader) = (self.source.describe(), ring.reader().describe());
                    tracing::info!("reading {source} with {reader}");
                }
                ring
            }
        };
        Ok(self.ring.insert(ring))
    }

    fn start_reads(&mut self) -> Result<()> {
        if self.fetches.iter().all(|fetch| fetch.num_staged == fetch.chunks.len()) {
            return self.ring.as_mut().map_or(Ok(()), Ring::poll);
        }
        self.ring()?.poll()?;
        let Some(ring) = &mut self.ring else { return Ok(()) };
        for fetch in &mut self.fetches {
            while let Some(chunk) = fetch.chunks.get(fetch.num_staged) {
                let Some(index) = ring.fill(fetch.block, chunk) else { return Ok(()) };
                fetch.staged.push_back(index);
                fetch.num_staged += 1;
            }
        }
        Ok(())
    }

    /// Starts the copies of the oldest fetch's next chunk, if it has been read.
    fn copy_oldest(&mut self) -> Result<bool> {
        let (Some(ring), Some(fetch)) = (&mut self.ring, self.fetches.front_mut()) else {
            return Ok(false);
        };
        let Some(place) = &fetch.place else { return Ok(false) };
        let Some(index) = fetch.staged.front().copied() else { return Ok(false) };
        let Some(outcome) = ring.outcome(index) else { return Ok(false) };
        let chunk = &fetch.chunks[fetch.num_copied];
        self.moved.read_bytes += chunk.payload_bytes(outcome?);
        let bytes = ring.bytes(index);
        let pieces = &chunk.pieces;
        for piece in pieces {
            self.source.check(fetch.block, piece.image(), &bytes[piece.staged()])?;
        }
        let copies: Vec<CopyPiece<'_>> = pieces
            .iter()
            .map(|piece| CopyPiece {
                source: &bytes[piece.staged()],
                destination: place.address + piece.image_offset,
            })
            .collect();
        let after = (fetch.num_copied == 0).then_some(&*place.after);
        // SAFETY: the place holds the image (checked by `request`) and outlives the copy; the chunk
        // is not touched again before the copy's end, for which the ring waits.
        let (copied, end) = unsafe { copy(&*self.engine, fetch.block, &copies, after) };
        fetch.staged.pop_front();
        match &end {
            Some(end) => ring.empty(index, Arc::clone(end)),
            // Nothing can tell when the chunk is free. Pinned memory goes only when the device rests.
            None => self.ring = None,
        }
        self.last_copy = end.or(self.last_copy.take());
        let copy = copied?;
        self.moved.copied_bytes += copy.num_bytes;
        self.moved.timed.push(Arc::clone(&copy));
        fetch.last_copy = Some(copy);
        fetch.num_copied += 1;
        Ok(true)
    }

    /// The last copy of the oldest fetch, all of whose chunks are copied; the only one where the source
    /// lends the image.
    fn finish_oldest(&mut self) -> Result<Arc<Timed>> {
        let unknown = || Error::usage("no block is on its way");
        let fetch = self.fetches.front_mut().ok_or_else(unknown)?;
        if let Some(copy) = fetch.last_copy.take() {
            return Ok(copy);
        }
        let place = fetch.place.as_ref().ok_or_else(unknown)?;
        let spec: &BlockSpec = &self.source.blocks()[fetch.block.0];
        let image = match self.source.lend(fetch.block) {
            Some(image) if !self.engine.is_host_memory() && !image.is_pinned() => {
                let what = format!("the image that {} lends", self.source.describe());
                return Err(Error::Unpinned { what });
            }
            Some(image) => &image.bytes()[..spec.image_bytes],
            // A block without parameters still needs one (empty) copy to wait for.
            None => &[],
        };
        let piece = CopyPiece { source: image, destination: place.address };
        // SAFETY: the place holds the image and outlives the copy; the source lends the image for as
        // long as it lives, and `self` keeps the source alive.
        let (copied, end) =
            unsafe { copy(&*self.engine, fetch.block, &[piece], Some(&place.after)) };
        self.last_copy = end.or(self.last_copy.take());
        let copy = copied?;
        self.moved.copied_bytes += copy.num_bytes;
        self.moved.timed.push(Arc::clone(&copy));
        Ok(copy)
    }
}

/// Starts copies for `block`. Returns them, and that whose end is theirs: when some could not be started,
/// others may be on their way, and only what comes after them tells when they have ended.
///
/// # Safety
/// As [`CopyEngine::copy`], until the second copy's end.
unsafe fn copy(
    engine: &dyn CopyEngine,
    block: BlockIndex,
    pieces: &[CopyPiece<'_>],
    after: Option<&Event>,
) -> (Result<Arc<Timed>>, Option<Arc<Timed>>) {
    let timed = |num_bytes, events| Arc::new(Timed::copy(block, num_bytes, events));
    // SAFETY: the caller's promises.
    match unsafe { engine.copy(pieces, after) } {
        Ok(events) => {
            let num_bytes = pieces.iter().map(|piece| piece.source.len()).sum();
            let copy = timed(num_bytes, events);
            (Ok(Arc::clone(&copy)), Some(copy))
        }
        Err(error) => {
            // SAFETY: nothing is copied.
            let mark = unsafe { engine.copy(&[], None) };
            (Err(error), mark.ok().map(|events| timed(0, events)))
        }
    }
}

#[cfg(test)]
mod tests;
