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
mod window;
mod worker;

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use tch::{Device, Tensor};

pub use lease::Lease;
pub use readback::Readback;
pub use resident::load_block;
pub use stats::{Change, ResidencyObserver, StreamStats, Transition};

use crate::block::{BlockIndex, BlockSpec, Placement};
use crate::device::{CopyEngine, Event};
use crate::error::{Error, Result};
use crate::source::BlockSource;
use schedule::Schedule;
use stats::Residency;
use transfer::{Copy, Transfer};
use worker::Worker;

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
