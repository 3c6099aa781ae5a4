//! The window of slots: what is fetched into them, waited for, handed back and counted.

use std::sync::Arc;
use std::time::Instant;

use tch::Tensor;

use super::schedule::Fetch;
use super::stats::{Change, Transition};
use super::trace::{Lane, Timed};
use super::transfer::Place;
use super::worker::Content;
use super::{BlockStream, Inner, Lease};
use crate::block::BlockIndex;
use crate::device::Event;
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
        self.announce(inner)
    }

    pub(super) fn submit(&self, inner: &mut Inner, block: BlockIndex, slot: usize) -> Result<()> {
        let target = &mut inner.slots[slot];
        target.ordered = false;
        // Memory of libtorch's allocator may still be in use by work queued before it was handed to us.
        let after = match target.free.take() {
            Some(free) => free,
            None => Arc::new(self.engine.record()?),
        };
        let address = target.memory.data_ptr() as usize;
        let place = Place { slot, address, num_bytes: self.slot_bytes, after };
        let Some(worker) = &inner.worker else { return Err(Error::usage("the engine is closed")) };
        match inner.announced.front() {
            Some(announced) if *announced == block => drop(inner.announced.pop_front()),
            None => {}
            Some(_) => {
                inner.announced.clear();
                worker.forget()?;
            }
        }
        worker.fetch(block, place)
    }

    /// Tells the reader what it may read ahead, as far as the staging memory reaches.
    fn announce(&self, inner: &mut Inner) -> Result<()> {
        if !self.reads {
            return Ok(());
        }
        let num_bytes = |block: BlockIndex| match self.source.lend(block) {
            Some(_) => 0,
            None => self.blocks()[block.0].image_bytes,
        };
        let mut ahead_bytes: usize = inner.announced.iter().map(|block| num_bytes(*block)).sum();
        if ahead_bytes >= self.staging_bytes {
            return Ok(());
        }
        ahead_bytes = 0;
        let coming = inner.schedule.coming_fetches(|block| {
            ahead_bytes += num_bytes(block);
            ahead_bytes >= self.staging_bytes
        });
        let Some(worker) = &inner.worker else { return Ok(()) };
        if !inner.announced.iter().eq(coming.iter().take(inner.announced.len())) {
            inner.announced.clear();
            worker.forget()?;
        }
        for block in coming.into_iter().skip(inner.announced.len()) {
            worker.expect(block)?;
            inner.announced.push_back(block);
        }
        Ok(())
    }

    /// Waits until the copy of the block has been started and makes the compute stream wait for its end.
    pub(super) fn make_usable(
        &self,
        inner: &mut Inner,
        block: BlockIndex,
        slot: Option<usize>,
    ) -> Result<(NamedTensors, Arc<Event>)> {
        let Some(slot) = slot else {
            let kept = inner.kept.get(&block).map(|kept| kept.tensors.clone());
            let tensors = kept.ok_or_else(|| Error::usage("the engine is closed"))?;
            return Ok((tensors, Arc::new(self.engine.record()?)));
        };
        let Some(worker) = &inner.worker else { return Err(Error::usage("the engine is closed")) };
        let start = Instant::now();
        let shared = Arc::clone(&worker.shared);
        let copy = shared.started(slot);
        inner.stats.host_wait_ms += inner.driving.was_elsewhere(start);
        let copy = copy?;
        let mut now = Arc::new(self.engine.record()?);
        if !inner.slots[slot].ordered {
            self.engine.wait(&copy.end)?;
            let after = Arc::new(self.engine.record()?);
            inner.waits.push((std::mem::replace(&mut now, Arc::clone(&after)), after));
            inner.slots[slot].ordered = true;
        }
        note(inner, block, slot, Change::Leased);
        Ok((inner.slots[slot].views(&self.blocks()[block.0])?, now))
    }

    pub(super) fn release(&self, lease: &Lease<'_>) {
        let Ok(mut inner) = self.inner.try_borrow_mut() else {
            tracing::error!("a lease was dropped from inside an observer");
            return;
        };
        inner.schedule.release();
        match self.engine.record().map(Arc::new) {
            Ok(end) => {
                let (block, start) = (lease.block, Arc::clone(&lease.start));
                if let Some(slot) = lease.slot {
                    inner.slots[slot].free = Some(Arc::clone(&end));
                }
                if let Err(error) = self.count_visit(&mut inner, &start, Arc::clone(&end)) {
                    inner.failure = Some(error);
                }
                inner.timed.push(Arc::new(Timed {
                    lane: Lane::Compute,
                    block,
                    num_bytes: 0,
                    start,
                    end,
                }));
            }
            Err(error) => tracing::error!(%error, "the end of a visit could not be marked"),
        }
        if let Some(slot) = lease.slot {
            note(&mut inner, lease.block, slot, Change::Released);
        }
        if inner.worker.is_some()
            && let Err(error) = self.fetch(&mut inner)
        {
            inner.failure = Some(error);
        }
    }

    pub(super) fn abandon_inner(&self, inner: &mut Inner) {
        inner.schedule.clear();
        inner.failure = None;
        inner.announced.clear();
        let Some(worker) = &inner.worker else { return };
        if let Err(error) = worker.forget() {
            tracing::error!(%error, "what was read ahead could not be forgotten");
        }
        let shared = Arc::clone(&worker.shared);
        let mut progress = shared.wait_until(|progress| progress.num_open == 0);
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
                && let Err(error) = self.engine.synchronize(&copy.end)
            {
                tracing::error!(%error, "a copy did not end");
            }
        }
    }

    /// Takes over what the transfer thread counted and times what has happened meanwhile.
    pub(super) fn settle(&self, inner: &mut Inner) -> Result<()> {
        inner.visits_since_settling = 0;
        self.count_between_visits(inner)?;
        if let Some(worker) = &inner.worker {
            let mut progress = worker.shared.lock();
            let moved = std::mem::take(&mut progress.moved);
            inner.stats.read_bytes += moved.read_bytes as u64;
            inner.stats.read_busy_ms += moved.read_busy_ms;
            inner.stats.staging_wait_ms += moved.staging_wait_ms;
            inner.stats.h2d_bytes += moved.copied_bytes as u64;
            inner.stats.staging_bytes = progress.staging_bytes as u64;
            inner.timed.extend(moved.timed);
        }
        let mut open = Vec::new();
        for timed in std::mem::take(&mut inner.timed) {
            let Some(ms) = timed.elapsed_ms(&*self.engine)? else {
                open.push(timed);
                continue;
            };
            match timed.lane {
                Lane::Read => {}
                Lane::Copy => inner.stats.h2d_ms += ms,
                Lane::Compute => inner.stats.compute_ms += ms,
            }
            if let Some(trace) = &mut inner.trace {
                trace.add(&timed, &*self.engine)?;
            }
        }
        inner.timed = open;
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

    pub(super) fn owns(&self, lease: &Lease<'_>, tensor: &Tensor) -> bool {
        let Ok(inner) = self.inner.try_borrow() else { return false };
        let memory = match lease.slot {
            Some(slot) => inner.slots.get(slot).map(|slot| &slot.memory),
            None => inner.kept.get(&lease.block).map(|kept| &kept.image),
        };
        let Some(memory) = memory else { return false };
        let start = memory.data_ptr() as usize;
        (start..start + memory.numel()).contains(&(tensor.data_ptr() as usize))
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
