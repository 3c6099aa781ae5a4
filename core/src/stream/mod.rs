//! The streaming engine: blocks in the order of an itinerary, through a bounded window of device memory.
//!
//! ```text
//! source --read--> staging chunks --copy stream--> slot --lease--> compute stream
//!          (transfer thread)                        ^                  |
//!                                                   +----- event ------+
//! ```
//! There are `prefetch_ahead + 1` slots and never more blocks on the device than slots.
//! The host decides what goes where from the itinerary alone ([`schedule`]); events order the reuse of a
//! slot, so neither side waits for the other unless it has to.

mod lease;
mod readback;
mod resident;
mod schedule;
mod stats;
mod transfer;
mod worker;

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use tch::{Device, Kind, Tensor};

pub use lease::Lease;
pub use readback::Readback;
pub use resident::load_block;
pub use stats::{Change, ResidencyObserver, StreamStats, Transition};

use crate::block::{BlockIndex, BlockSpec, Placement};
use crate::device::{CopyEngine, Event};
use crate::error::{Error, Result};
use crate::source::BlockSource;
use crate::state::NamedTensors;
use schedule::{Fetch, Schedule};
use stats::Residency;
use transfer::{Copy, Destination, Transfer};
use worker::{Content, Job, Worker};

/// Visits after which open events are timed although nobody asks for the totals: they would pile up.
const VISITS_PER_SETTLING: usize = 64;

/// How an engine is set up.
#[derive(Debug, Clone)]
pub struct StreamOptions {
    /// Blocks that may be on the device beyond the one in use. 0 works: nothing overlaps then.
    pub prefetch_ahead: usize,
    /// Largest block image that a slot may hold. `None`: whatever the largest block needs.
    pub slot_budget_bytes: Option<usize>,
    /// Size of one staging chunk: reads and copies are this large.
    pub chunk_bytes: usize,
    /// Staging chunks; together they are all the pinned memory that a streamed run needs.
    pub num_chunks: usize,
}

impl Default for StreamOptions {
    /// Two blocks ahead; eight chunks of 16 MiB: large enough that submitting a copy costs nothing,
    /// small enough that a block is being copied while it is still being read.
    fn default() -> Self {
        Self { prefetch_ahead: 2, slot_budget_bytes: None, chunk_bytes: 16 << 20, num_chunks: 8 }
    }
}

/// One slot's memory and the last event of whoever used it.
#[derive(Debug)]
struct Slot {
    memory: Tensor,
    free: Option<Arc<Event>>,
    /// Whether the compute stream has been told to wait for the block's copy.
    ordered: bool,
}

struct Inner {
    schedule: Schedule,
    slots: Vec<Slot>,
    residency: Residency,
    stats: StreamStats,
    /// Pairs of events around each wait of the compute stream, until they can be timed.
    waits: Vec<Copy>,
    /// Copies to slots, until they can be timed.
    copies: Vec<Arc<Copy>>,
    resident_bytes: u64,
    visits_since_settling: usize,
    worker: Option<Worker>,
    /// Why fetching ahead failed when a visit ended; the next lease says so.
    failure: Option<Error>,
}

/// Streams the blocks of one source to one device.
///
/// Driven by one thread: [`BlockStream::schedule`] names the visits to come, [`BlockStream::lease`] hands
/// out the next one. After any error the visits to come are forgotten and the engine works again.
pub struct BlockStream {
    source: Arc<dyn BlockSource>,
    engine: Arc<dyn CopyEngine>,
    slot_bytes: usize,
    inner: RefCell<Inner>,
}

impl fmt::Debug for BlockStream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("BlockStream")
            .field("source", &self.source.describe())
            .field("device", &self.engine.device())
            .field("slot_bytes", &self.slot_bytes)
            .finish_non_exhaustive()
    }
}

impl BlockStream {
    /// An engine on the device of `engine`. Slots are allocated when they are first needed.
    ///
    /// # Errors
    /// [`Error::OversizedBlock`] when a streamed block does not fit the slot budget,
    /// [`Error::Usage`] for options that make no sense.
    pub fn new(
        source: Arc<dyn BlockSource>,
        engine: Arc<dyn CopyEngine>,
        options: &StreamOptions,
    ) -> Result<Self> {
        if options.chunk_bytes == 0 || options.num_chunks == 0 {
            return Err(Error::usage("staging needs at least one chunk of at least one byte"));
        }
        let streamed =
            || source.blocks().iter().filter(|block| block.placement == Placement::Streamed);
        let slot_bytes = streamed().map(|block| block.image_bytes).max().unwrap_or(0);
        if let Some(budget_bytes) = options.slot_budget_bytes
            && let Some(block) = streamed().find(|block| block.image_bytes > budget_bytes)
        {
            return Err(Error::OversizedBlock {
                block: block.name.clone(),
                num_bytes: block.image_bytes,
                budget_bytes,
            });
        }
        let num_slots = options.prefetch_ahead.saturating_add(1).min(streamed().count().max(1));
        let transfer = Transfer::new(
            Arc::clone(&source),
            Arc::clone(&engine),
            options.chunk_bytes.min(slot_bytes.max(1)),
            options.num_chunks,
        );
        let inner = Inner {
            schedule: Schedule::new(num_slots),
            slots: Vec::with_capacity(num_slots),
            residency: Residency::default(),
            stats: StreamStats::default(),
            waits: Vec::new(),
            copies: Vec::new(),
            resident_bytes: 0,
            visits_since_settling: 0,
            worker: Some(Worker::spawn(transfer, num_slots)?),
            failure: None,
        };
        Ok(Self { source, engine, slot_bytes, inner: RefCell::new(inner) })
    }

    /// The device that blocks go to.
    pub fn device(&self) -> Device {
        self.engine.device()
    }

    /// The blocks of the source.
    pub fn blocks(&self) -> &[BlockSpec] {
        self.source.blocks()
    }

    /// Calls `observer` with every transition from now on.
    ///
    /// # Errors
    /// [`Error::Usage`] when called from inside an observer.
    pub fn observe(&self, observer: ResidencyObserver) -> Result<()> {
        self.borrow()?.residency.observer = Some(observer);
        Ok(())
    }

    /// Appends visits to the itinerary and starts fetching what has room.
    ///
    /// # Errors
    /// [`Error::Usage`] for a block that is not streamed or an engine that is closed, and
    /// [`Error::OutOfMemory`] when a slot cannot be allocated.
    pub fn schedule(&self, visits: impl IntoIterator<Item = BlockIndex>) -> Result<()> {
        let visits: Vec<BlockIndex> = visits.into_iter().collect();
        let streamed = |block: &&BlockIndex| {
            self.blocks().get(block.0).is_some_and(|spec| spec.placement == Placement::Streamed)
        };
        if let Some(block) = visits.iter().find(|block| !streamed(block)) {
            return Err(Error::usage(format!("block {block} is not a streamed block of {self:?}")));
        }
        let mut inner = self.open()?;
        inner.schedule.extend(visits);
        self.fetch(&mut inner)
    }

    /// Visits scheduled and not yet leased.
    ///
    /// # Errors
    /// [`Error::Usage`] when called from inside an observer.
    pub fn num_upcoming(&self) -> Result<usize> {
        Ok(self.borrow()?.schedule.upcoming().len())
    }

    /// The next visit's block, once its copy has been started; the compute stream waits for the rest.
    ///
    /// # Errors
    /// [`Error::Usage`] while another lease is alive, when nothing is scheduled or after
    /// [`BlockStream::close`]; [`Error::Block`] when the block could not be read. The visits to come are
    /// forgotten then, and the engine can be scheduled anew.
    pub fn lease(&self) -> Result<Lease<'_>> {
        let mut inner = self.open()?;
        if inner.schedule.is_leased() {
            return Err(Error::usage(
                "the engine was entered again while a block is in use; end that visit first",
            ));
        }
        if let Some(error) = inner.failure.take() {
            return Err(error);
        }
        let Some((block, slot)) = inner.schedule.lease() else {
            return Err(Error::usage("no visit is scheduled; call schedule first"));
        };
        inner.visits_since_settling += 1;
        if inner.visits_since_settling >= VISITS_PER_SETTLING {
            self.settle(&mut inner)?;
        }
        match self.make_usable(&mut inner, block, slot) {
            Ok(tensors) => Ok(Lease { stream: self, block, slot, tensors }),
            Err(error) => {
                inner.schedule.release();
                self.leave(&mut inner, slot, Change::Failed);
                self.abandon_inner(&mut inner);
                Err(error)
            }
        }
    }

    /// Forgets the visits to come and waits for the reads under way. Called after an error in a visit.
    ///
    /// # Errors
    /// [`Error::Usage`] when called from inside an observer.
    pub fn abandon(&self) -> Result<()> {
        let mut inner = self.borrow()?;
        self.abandon_inner(&mut inner);
        Ok(())
    }

    /// Ends the transfer thread and frees the slots, which an observer sees. Later calls answer with
    /// an error; the totals stay.
    ///
    /// # Errors
    /// [`Error::Usage`] while a lease is alive.
    pub fn close(&self) -> Result<()> {
        let mut inner = self.borrow()?;
        if inner.schedule.is_leased() {
            return Err(Error::usage("the engine cannot be closed while a block is in use"));
        }
        self.abandon_inner(&mut inner);
        self.drain(&mut inner);
        let settled = self.settle(&mut inner);
        for slot in 0..inner.slots.len() {
            self.leave(&mut inner, slot, Change::Evicted);
        }
        inner.worker = None;
        inner.slots.clear();
        inner.schedule = Schedule::new(0);
        settled
    }

    /// Totals since the last reset. Does not wait for the device: what has not happened is not in it.
    ///
    /// # Errors
    /// [`Error::Cuda`] when an event cannot be asked.
    pub fn stats(&self) -> Result<StreamStats> {
        let mut inner = self.borrow()?;
        self.settle(&mut inner)?;
        Ok(inner.stats)
    }

    /// Starts the totals anew. What is on the device stays there and counts as the first peak.
    ///
    /// # Errors
    /// As [`BlockStream::stats`].
    pub fn reset_stats(&self) -> Result<()> {
        let mut inner = self.borrow()?;
        self.settle(&mut inner)?;
        let resident_blocks = inner.stats.resident_blocks;
        inner.stats = StreamStats {
            resident_blocks,
            peak_resident_blocks: resident_blocks,
            peak_bytes: inner.resident_bytes,
            staging_bytes: inner.stats.staging_bytes,
            ..StreamStats::default()
        };
        Ok(())
    }

    /// The last transitions, oldest first: at most 4,096.
    ///
    /// # Errors
    /// [`Error::Usage`] when called from inside an observer.
    pub fn history(&self) -> Result<Vec<Transition>> {
        Ok(self.borrow()?.residency.history.iter().copied().collect())
    }

    fn borrow(&self) -> Result<std::cell::RefMut<'_, Inner>> {
        self.inner
            .try_borrow_mut()
            .map_err(|_| Error::usage("the engine was called from inside an observer"))
    }

    fn open(&self) -> Result<std::cell::RefMut<'_, Inner>> {
        let inner = self.borrow()?;
        if inner.worker.is_none() { Err(Error::usage("the engine is closed")) } else { Ok(inner) }
    }

    /// Starts every fetch that has a slot.
    fn fetch(&self, inner: &mut Inner) -> Result<()> {
        while let Some(Fetch { block, slot, evicted }) = inner.schedule.next_fetch() {
            if let Some(evicted) = evicted {
                inner.resident_bytes -= self.blocks()[evicted.0].image_bytes as u64;
                note(inner, evicted, slot, Change::Evicted);
            }
            inner.resident_bytes += self.blocks()[block.0].image_bytes as u64;
            note(inner, block, slot, Change::Fetching);
            if let Err(error) = self.submit(inner, block, slot) {
                self.leave(inner, slot, Change::Failed);
                self.abandon_inner(inner);
                return Err(error);
            }
        }
        Ok(())
    }

    fn submit(&self, inner: &mut Inner, block: BlockIndex, slot: usize) -> Result<()> {
        while inner.slots.len() <= slot {
            let memory =
                Tensor::f_empty([self.slot_bytes.max(1) as i64], (Kind::Uint8, self.device()))
                    .map_err(|error| match Error::from(error) {
                        Error::OutOfMemory { message, .. } => Error::OutOfMemory {
                            action: format!(
                                "reserving slot {slot} of {} bytes; lower prefetch_ahead",
                                self.slot_bytes
                            ),
                            message,
                        },
                        other => other,
                    })?;
            inner.slots.push(Slot { memory, free: None, ordered: false });
        }
        let target = &mut inner.slots[slot];
        target.ordered = false;
        // Memory of libtorch's allocator may still be in use by work queued before it was handed to us.
        let after = match target.free.take() {
            Some(free) => Some(free),
            None => Some(Arc::new(self.engine.record()?)),
        };
        let destination =
            Destination { address: target.memory.data_ptr() as usize, num_bytes: self.slot_bytes };
        match &inner.worker {
            Some(worker) => worker.submit(Job { block, slot, destination, after }),
            None => Err(Error::usage("the engine is closed")),
        }
    }

    /// Waits until the copy into `slot` has been started and makes the compute stream wait for its end.
    fn make_usable(
        &self,
        inner: &mut Inner,
        block: BlockIndex,
        slot: usize,
    ) -> Result<NamedTensors> {
        let copy = self.started(inner, slot)?;
        if !inner.slots[slot].ordered {
            let before = self.engine.record()?;
            self.engine.wait(&copy.1)?;
            inner.waits.push((before, self.engine.record()?));
            inner.slots[slot].ordered = true;
        }
        note(inner, block, slot, Change::Leased);
        resident::views(&inner.slots[slot].memory, &self.blocks()[block.0])
    }

    fn started(&self, inner: &mut Inner, slot: usize) -> Result<Arc<Copy>> {
        let Some(worker) = &inner.worker else { return Err(Error::usage("the engine is closed")) };
        let start = Instant::now();
        let shared = Arc::clone(&worker.shared);
        let mut progress = shared
            .wait_until(|progress| !matches!(progress.contents[slot], Some(Content::Pending)));
        inner.stats.host_wait_ms += start.elapsed().as_secs_f64() * 1e3;
        match &mut progress.contents[slot] {
            Some(Content::Started(copy)) => Ok(Arc::clone(copy)),
            content => match content.take() {
                Some(Content::Failed(error)) => Err(error),
                _ => Err(Error::usage("the slot was never filled")),
            },
        }
    }

    fn release(&self, block: BlockIndex, slot: usize) {
        let Ok(mut inner) = self.inner.try_borrow_mut() else {
            tracing::error!("a lease was dropped from inside an observer");
            return;
        };
        inner.schedule.release();
        match self.engine.record() {
            Ok(event) => inner.slots[slot].free = Some(Arc::new(event)),
            Err(error) => tracing::error!(%error, "the end of a visit could not be marked"),
        }
        note(&mut inner, block, slot, Change::Released);
        if inner.worker.is_some()
            && let Err(error) = self.fetch(&mut inner)
        {
            inner.failure = Some(error);
        }
    }

    fn abandon_inner(&self, inner: &mut Inner) {
        inner.schedule.clear();
        inner.failure = None;
        let Some(worker) = &inner.worker else { return };
        let shared = Arc::clone(&worker.shared);
        let mut progress = shared.wait_until(|progress| progress.num_open_jobs == 0);
        for slot in 0..inner.slots.len() {
            if matches!(progress.contents[slot], Some(Content::Failed(_))) {
                progress.contents[slot] = None;
                self.leave(inner, slot, Change::Failed);
            }
        }
    }

    /// Empties a slot.
    fn leave(&self, inner: &mut Inner, slot: usize, change: Change) {
        if let Some(block) = inner.schedule.forget(slot) {
            inner.resident_bytes -= self.blocks()[block.0].image_bytes as u64;
            note(inner, block, slot, change);
        }
    }

    /// Waits until no copy touches a slot any more.
    fn drain(&self, inner: &mut Inner) {
        let Some(worker) = &inner.worker else { return };
        let progress = worker.shared.lock();
        for content in progress.contents.iter().flatten() {
            if let Content::Started(copy) = content
                && let Err(error) = self.engine.synchronize(&copy.1)
            {
                tracing::error!(%error, "a copy did not end");
            }
        }
    }

    /// Takes over what the transfer thread counted and times what has happened meanwhile.
    fn settle(&self, inner: &mut Inner) -> Result<()> {
        inner.visits_since_settling = 0;
        if let Some(worker) = &inner.worker {
            let mut progress = worker.shared.lock();
            let moved = std::mem::take(&mut progress.totals);
            inner.stats.read_bytes += moved.read_bytes as u64;
            inner.stats.read_ms += moved.read_ms;
            inner.stats.staging_wait_ms += moved.staging_wait_ms;
            inner.stats.h2d_bytes += moved.copied_bytes as u64;
            inner.stats.staging_bytes = progress.staging_bytes as u64;
            inner.copies.extend(moved.copies);
        }
        let mut open = Vec::new();
        for copy in std::mem::take(&mut inner.copies) {
            match self.engine.elapsed_ms(&copy.0, &copy.1)? {
                Some(ms) => inner.stats.h2d_ms += ms,
                None => open.push(copy),
            }
        }
        inner.copies = open;
        let mut open = Vec::new();
        for wait in std::mem::take(&mut inner.waits) {
            match self.engine.elapsed_ms(&wait.0, &wait.1)? {
                Some(ms) => inner.stats.compute_wait_ms += ms,
                None => open.push(wait),
            }
        }
        inner.waits = open;
        Ok(())
    }

    fn slot_owns(&self, slot: usize, tensor: &Tensor) -> bool {
        let Ok(inner) = self.inner.try_borrow() else { return false };
        let Some(slot) = inner.slots.get(slot) else { return false };
        let start = slot.memory.data_ptr() as usize;
        (start..start + self.slot_bytes).contains(&(tensor.data_ptr() as usize))
    }
}

impl Drop for BlockStream {
    fn drop(&mut self) {
        // An observer that panics in a destructor would end the process.
        self.inner.get_mut().residency.observer = None;
        // Slots go back to libtorch's allocator: no copy may still write to them.
        if let Err(error) = self.close() {
            tracing::error!(%error, "the engine was dropped in use");
        }
    }
}

fn note(inner: &mut Inner, block: BlockIndex, slot: usize, change: Change) {
    let stats = &mut inner.stats;
    match change {
        Change::Fetching => stats.resident_blocks += 1,
        Change::Evicted | Change::Failed => stats.resident_blocks -= 1,
        Change::Leased | Change::Released => {}
    }
    let resident_blocks = stats.resident_blocks;
    stats.peak_resident_blocks = stats.peak_resident_blocks.max(resident_blocks);
    stats.peak_bytes = stats.peak_bytes.max(inner.resident_bytes);
    inner.residency.note(Transition { block, slot, change, resident_blocks });
}
