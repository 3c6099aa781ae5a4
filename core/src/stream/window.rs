//! The window of slots: what is fetched into them, waited for, handed back and counted.

use std::sync::Arc;
use std::time::Instant;

use tch::{Kind, Tensor};

use super::schedule::Fetch;
use super::stats::{Change, Transition};
use super::transfer::{Copy, Destination};
use super::worker::{Content, Job};
use super::{BlockStream, Inner, Slot, resident};
use crate::block::BlockIndex;
use crate::error::{Error, Result};
use crate::state::NamedTensors;

impl BlockStream {
    /// Starts every fetch that has a slot.
    pub(super) fn fetch(&self, inner: &mut Inner) -> Result<()> {
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

    pub(super) fn submit(&self, inner: &mut Inner, block: BlockIndex, slot: usize) -> Result<()> {
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
    pub(super) fn make_usable(
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

    pub(super) fn started(&self, inner: &mut Inner, slot: usize) -> Result<Arc<Copy>> {
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

    pub(super) fn release(&self, block: BlockIndex, slot: usize) {
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

    pub(super) fn abandon_inner(&self, inner: &mut Inner) {
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
    pub(super) fn leave(&self, inner: &mut Inner, slot: usize, change: Change) {
        if let Some(block) = inner.schedule.forget(slot) {
            inner.resident_bytes -= self.blocks()[block.0].image_bytes as u64;
            note(inner, block, slot, change);
        }
    }

    /// Waits until no copy touches a slot any more.
    pub(super) fn drain(&self, inner: &mut Inner) {
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
    pub(super) fn settle(&self, inner: &mut Inner) -> Result<()> {
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

    pub(super) fn slot_owns(&self, slot: usize, tensor: &Tensor) -> bool {
        let Ok(inner) = self.inner.try_borrow() else { return false };
        let Some(slot) = inner.slots.get(slot) else { return false };
        let start = slot.memory.data_ptr() as usize;
        (start..start + self.slot_bytes).contains(&(tensor.data_ptr() as usize))
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
