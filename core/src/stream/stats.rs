//! What the engine counts, and who may watch it.

use std::collections::VecDeque;

use crate::block::BlockIndex;

/// Transitions that are remembered.
pub(super) const HISTORY_LENGTH: usize = 4096;

/// Totals since the last reset. Times are kept apart because they overlap: adding them means nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StreamStats {
    /// Bytes of streamed blocks copied from host to device.
    pub h2d_bytes: u64,
    /// Time that the copy stream was busy with them.
    pub h2d_ms: f64,
    /// Bytes copied from device to host.
    pub d2h_bytes: u64,
    /// Time that the compute stream stood still for a copy that had been started.
    pub compute_wait_ms: f64,
    /// Time that the calling thread waited until a block's copy was started (the read was the limit), or,
    /// on the CPU, until the block was there.
    pub host_wait_ms: f64,
    /// Time that the calling thread waited for values to come back from the device.
    pub device_wait_ms: f64,
    /// Time that the calling thread worked while the device had nothing to do but what it was just given:
    /// it had begun a visit before all of it was queued. What is launched ahead of the device costs nothing
    /// and is not counted, nor is the time for which the driver holds launches back. On the CPU, all that is
    /// neither a visit nor waiting.
    pub host_ms: f64,
    /// Of `host_ms`, the time within visits: it is in `compute_ms` too, though the device only followed the
    /// launches. 0 on the CPU.
    pub launch_ms: f64,
    /// Time that the compute stream spent in visits, from their first kernel to their last; what it stood
    /// still in between included.
    pub compute_ms: f64,
    /// Time that the reader waited for the device to empty its staging memory (the link was the limit).
    pub staging_wait_ms: f64,
    /// Bytes of streamed blocks that came from storage and went to the device. What was read ahead and
    /// forgotten after an error, or around tensors to keep an alignment, is not in it.
    pub read_bytes: u64,
    /// Time with at least one read under way.
    pub read_busy_ms: f64,
    /// Streamed blocks on the device now, those on their way included.
    pub resident_blocks: usize,
    /// Most of them at one time.
    pub peak_resident_blocks: usize,
    /// Most bytes of streamed block images on the device at one time.
    pub peak_bytes: u64,
    /// Pinned staging memory between reader and device.
    pub staging_bytes: u64,
}

impl StreamStats {
    /// Rate of reading from storage while reading, in 10^9 bytes per second; 0 when nothing was read.
    pub fn read_gb_per_s(&self) -> f64 {
        rate(self.read_bytes, self.read_busy_ms)
    }

    /// Rate of copying to the device while copying, in 10^9 bytes per second.
    pub fn h2d_gb_per_s(&self) -> f64 {
        rate(self.h2d_bytes, self.h2d_ms)
    }
}

fn rate(bytes: u64, ms: f64) -> f64 {
    if ms > 0.0 { bytes as f64 / ms / 1e6 } else { 0.0 }
}

/// What happened to a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The block it held was given up.
    Evicted,
    /// A block was ordered into it.
    Fetching,
    /// A visit began to use it.
    Leased,
    /// The visit's last kernel was queued.
    Released,
    /// The block could not be brought in; the slot is empty.
    Failed,
}

/// One change of what is on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transition {
    /// The block concerned.
    pub block: BlockIndex,
    /// Its slot.
    pub slot: usize,
    /// What happened.
    pub change: Change,
    /// Streamed blocks on the device after it, those on their way included.
    pub resident_blocks: usize,
}

/// Called with every transition, on the thread that drives the engine.
pub type ResidencyObserver = Box<dyn FnMut(&Transition) + Send>;

/// The last transitions and the observer.
#[derive(Default)]
pub(super) struct Residency {
    pub(super) observer: Option<ResidencyObserver>,
    pub(super) history: VecDeque<Transition>,
}

impl Residency {
    pub(super) fn note(&mut self, transition: Transition) {
        if self.history.len() == HISTORY_LENGTH {
            self.history.pop_front();
        }
        self.history.push_back(transition);
        if let Some(observer) = &mut self.observer {
            observer(&transition);
        }
    }
}
