//! The streaming engine: blocks in the order of an itinerary, through a bounded window of device memory.
//!
//! ```text
//! source --reader--> staging chunks --copy stream--> slot --lease--> compute stream
//!           (transfer thread)                         ^                  |
//!                                                     +----- event ------+
//! ```
//! The pieces: [`schedule`] says which block goes where, [`chunks`] how its image is cut, [`staging`] holds
//! the chunks and their reader, [`transfer`] moves blocks through them on the thread of [`worker`], and
//! [`window`] orders all that against computation.
//!
//! There are `prefetch_ahead + 1` slots and never more blocks on the device than slots.
//! The host decides what goes where from the itinerary alone ([`schedule`]); events order the reuse of a
//! slot, so neither side waits for the other unless it has to.

mod chunks;
mod driving;
mod host_images;
mod lease;
mod readback;
mod resident;
mod schedule;
mod staging;
mod stats;
mod trace;
mod transfer;
mod window;
mod worker;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

pub(crate) use host_images::HostLoader;
pub use lease::Lease;
pub use readback::Readback;
pub(crate) use resident::views;
pub use resident::{LoadedBlock, LoadedBlocks, load_blocks};
pub use stats::{Change, ResidencyObserver, StreamStats, Transition};
pub use trace::{Lane, Span};

use crate::block::{BlockIndex, BlockSpec, Placement, TensorSpec};
use crate::device::{CopyEngine, Event};
use crate::error::{Error, Result};
use crate::read::ReadMethod;
use crate::source::BlockSource;
use crate::state::NamedTensors;
use driving::Driving;
use schedule::Schedule;
use stats::Residency;
use trace::{Timed, Trace};
use transfer::{Transfer, TransferOptions};
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
    /// How files are read.
    pub read: ReadMethod,
    /// Reads under way at a time, as [`read::open`](crate::read::open) counts them.
    pub queue_depth: usize,
    /// Streamed blocks that are brought to the device at the start and stay there. They take no slot and
    /// are counted apart.
    pub kept: BTreeSet<BlockIndex>,
    /// Streamed blocks that no visit is of: no slot is made for them.
    pub unused: BTreeSet<BlockIndex>,
    /// Blocks of placement [`Placement::Head`] that pass through the window like streamed ones.
    pub also_streamed: BTreeSet<BlockIndex>,
}

impl StreamOptions {
    /// Refuses staging that could hold nothing.
    fn check(&self) -> Result<()> {
        match self.chunk_bytes == 0 || self.num_chunks == 0 {
            true => Err(Error::usage("staging needs at least one chunk of at least one byte")),
            false => Ok(()),
        }
    }

    /// Size of a staging chunk for blocks of `source` of at most `largest_bytes`: no more than they can use,
    /// but whole checksums. What a reader must have aligned may be added.
    pub fn chunk_bytes_for(&self, source: &dyn BlockSource, largest_bytes: usize) -> usize {
        self.chunk_bytes.max(source.check_unit_bytes()).min(largest_bytes.max(1))
    }

    fn transfer(&self, source: &dyn BlockSource, largest_bytes: usize) -> TransferOptions {
        TransferOptions {
            chunk_bytes: self.chunk_bytes_for(source, largest_bytes),
            num_chunks: self.num_chunks,
            read: self.read,
            queue_depth: self.queue_depth,
            is_told: true,
        }
    }
}

impl Default for StreamOptions {
    /// Two blocks ahead; 128 chunks of 1 MiB: large enough that submitting a copy costs little, and so small
    /// that the memory under a short queue of reads stays in the caches.
    fn default() -> Self {
        Self {
            prefetch_ahead: 2,
            slot_budget_bytes: None,
            chunk_bytes: 1 << 20,
            num_chunks: 128,
            read: ReadMethod::Auto,
            queue_depth: 8,
            kept: BTreeSet::new(),
            also_streamed: BTreeSet::new(),
            unused: BTreeSet::new(),
        }
    }
}

/// One slot's memory and the last event of whoever used it.
#[derive(Debug)]
struct Slot {
    memory: Tensor,
    free: Option<Arc<Event>>,
    /// Whether the compute stream has been told to wait for the block's copy.
    ordered: bool,
    /// The views last handed out, and the layout they are for: most blocks have the same.
    views: Option<(Vec<TensorSpec>, NamedTensors)>,
}

impl Slot {
    fn new(slot: usize, slot_bytes: usize, device: Device) -> Result<Self> {
        let memory = Tensor::f_empty([slot_bytes.max(1) as i64], (Kind::Uint8, device));
        let memory = memory.map_err(|error| match Error::from(error) {
            Error::OutOfMemory { message, .. } => {
                let action =
                    format!("reserving slot {slot} of {slot_bytes} bytes; lower prefetch_ahead");
                Error::OutOfMemory { action, message }
            }
            other => other,
        })?;
        Ok(Self { memory, free: None, ordered: false, views: None })
    }

    /// The tensors of the block in it.
    fn views(&mut self, spec: &BlockSpec) -> Result<NamedTensors> {
        if let Some((layout, views)) = &self.views
            && *layout == spec.tensors
            // A visit that made one ask for gradients must not make the next one's do so.
            && !views.iter().any(|(_, tensor)| tensor.requires_grad())
        {
            return Ok(views.clone());
        }
        let views = resident::views(&self.memory, spec)?;
        self.views = Some((spec.tensors.clone(), views.clone()));
        Ok(views)
    }
}

struct Inner {
    schedule: Schedule,
    slots: Vec<Slot>,
    kept: BTreeMap<BlockIndex, LoadedBlock>,
    residency: Residency,
    stats: StreamStats,
    /// Pairs of events around each wait of the compute stream, until they can be timed.
    waits: Vec<(Arc<Event>, Arc<Event>)>,
    /// Reads, copies and visits, until they can be timed.
    timed: Vec<Arc<Timed>>,
    trace: Option<Trace>,
    /// Blocks that the reader was told of beyond those it has a place for.
    announced: VecDeque<BlockIndex>,
    resident_bytes: u64,
    driving: Driving,
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
    /// Blocks of placement [`Placement::Head`] that pass through the window.
    also_streamed: BTreeSet<BlockIndex>,
    unused: BTreeSet<BlockIndex>,
    kept_bytes: usize,
    kept_read_bytes: u64,
    /// Whether any block has to be read when it is wanted.
    reads: bool,
    /// How far reading ahead can reach.
    staging_bytes: usize,
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
    /// An engine on the device of `engine`, with its slots and the blocks that it keeps.
    ///
    /// # Errors
    /// [`Error::OversizedBlock`] when a streamed block does not fit the slot budget,
    /// [`Error::Usage`] for options that make no sense; whatever keeps the kept blocks from being loaded.
    pub fn new(
        source: Arc<dyn BlockSource>,
        engine: Arc<dyn CopyEngine>,
        options: &StreamOptions,
    ) -> Result<Self> {
        options.check()?;
        let specs = || source.blocks().iter().enumerate().map(|(i, spec)| (BlockIndex(i), spec));
        for block in options.kept.iter().chain(&options.also_streamed) {
            let wanted = match options.kept.contains(block) {
                true => Placement::Streamed,
                false => Placement::Head,
            };
            if source.blocks().get(block.0).is_none_or(|spec| spec.placement != wanted) {
                return Err(Error::usage(format!(
                    "block {block} is not one of placement {wanted:?}"
                )));
            }
        }
        let streamed = || {
            let passes = |block: &BlockIndex, spec: &BlockSpec| {
                (spec.placement.is_streamed()
                    && !options.kept.contains(block)
                    && !options.unused.contains(block))
                    || options.also_streamed.contains(block)
            };
            specs().filter(move |(block, spec)| passes(block, spec)).map(|(_, spec)| spec)
        };
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
        let kept: Vec<BlockIndex> = options.kept.iter().copied().collect();
        let loaded = load_blocks(&source, &engine, &kept, options)?;
        let transfer_options = options.transfer(&*source, slot_bytes);
        let transfer = Transfer::new(Arc::clone(&source), Arc::clone(&engine), transfer_options);
        let slots = (0..num_slots.min(streamed().count()))
            .map(|slot| Slot::new(slot, slot_bytes, engine.device()))
            .collect::<Result<_>>()?;
        let moving = |block: &BlockIndex, spec: &BlockSpec| {
            spec.placement.is_streamed()
                && !options.kept.contains(block)
                && !options.unused.contains(block)
        };
        let reads = specs()
            .filter(|(block, spec)| moving(block, spec) || options.also_streamed.contains(block))
            .any(|(block, _)| source.lend(block).is_none());
        let inner = Inner {
            schedule: Schedule::new(num_slots, options.kept.clone()),
            slots,
            kept: kept.into_iter().zip(loaded.blocks).collect(),
            residency: Residency::default(),
            stats: StreamStats::default(),
            waits: Vec::new(),
            timed: Vec::new(),
            trace: None,
            announced: VecDeque::new(),
            resident_bytes: 0,
            driving: Driving::new(),
            visits_since_settling: 0,
            worker: Some(Worker::spawn(transfer, num_slots)?),
            failure: None,
        };
        Ok(Self {
            slot_bytes,
            also_streamed: options.also_streamed.clone(),
            unused: options.unused.clone(),
            kept_bytes: inner.kept.keys().map(|block| source.blocks()[block.0].image_bytes).sum(),
            kept_read_bytes: loaded.read_bytes,
            reads,
            staging_bytes: transfer_options.chunk_bytes.saturating_mul(transfer_options.num_chunks),
            source,
            engine,
            inner: RefCell::new(inner),
        })
    }

    /// Whether `block` stays on the device.
    pub fn is_kept(&self, block: BlockIndex) -> bool {
        self.inner.try_borrow().is_ok_and(|inner| inner.kept.contains_key(&block))
    }

    /// Device memory of the kept blocks.
    pub fn kept_bytes(&self) -> usize {
        self.kept_bytes
    }

    /// Bytes that were read from storage to load them.
    pub fn kept_read_bytes(&self) -> u64 {
        self.kept_read_bytes
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
            let spec = self.blocks().get(block.0);
            let is_streamed = spec.is_some_and(|spec| spec.placement.is_streamed());
            self.also_streamed.contains(block) || (is_streamed && !self.unused.contains(block))
        };
        if let Some(block) = visits.iter().find(|block| !streamed(block)) {
            return Err(Error::usage(format!(
                "block {block} is not a streamed block of {self:?}, or was said to be of no use"
            )));
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
        inner.visits_since_settling += 1;
        if inner.visits_since_settling >= VISITS_PER_SETTLING {
            self.settle(&mut inner)?;
        }
        let Some((block, slot)) = inner.schedule.lease() else {
            return Err(Error::usage("no visit is scheduled; call schedule first"));
        };
        match self.make_usable(&mut inner, block, slot) {
            Ok((tensors, start)) => {
                inner.driving.begin_visit();
                Ok(Lease { stream: self, block, slot, tensors, start })
            }
            Err(error) => {
                inner.schedule.release();
                if let Some(slot) = slot {
                    self.leave(&mut inner, slot, Change::Failed);
                }
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
        inner.kept.clear();
        inner.schedule = Schedule::new(0, BTreeSet::new());
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
        let inner = self.inner.get_mut();
        inner.residency.observer = None;
        // A lease that was leaked must not keep the transfer thread alive longer than the slots.
        inner.schedule.release();
        // Slots go back to libtorch's allocator: no copy may still write to them.
        if let Err(error) = self.close() {
            tracing::error!(%error, "the engine was dropped in use");
        }
    }
}
