//! When the thread that drives the engine keeps the device waiting.

use std::sync::Arc;
use std::time::Instant;

use super::{BlockStream, Inner};
use crate::device::Event;
use crate::error::Result;

/// The driving thread's time since the device was last looked at.
#[derive(Debug)]
pub(super) struct Driving {
    since: Instant,
    /// Of it, waiting, and on the CPU computing.
    elsewhere_ms: f64,
    /// When the visit at hand began, for this thread.
    leased: Instant,
    /// The end of the last visit; `None` before the first.
    last_end: Option<Arc<Event>>,
}

impl Driving {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { since: now, elsewhere_ms: 0.0, leased: now, last_end: None }
    }

    /// A visit begins.
    pub(super) fn begin_visit(&mut self) {
        self.leased = Instant::now();
    }

    /// The thread did not work from `start` until now. Returns how long, in milliseconds.
    pub(super) fn was_elsewhere(&mut self, start: Instant) -> f64 {
        let ms = milliseconds(start, Instant::now());
        self.elsewhere_ms += ms;
        ms
    }

    /// Milliseconds of work since the last call.
    fn take_ms(&mut self) -> f64 {
        let now = Instant::now();
        let ms = milliseconds(std::mem::replace(&mut self.since, now), now);
        (ms - std::mem::take(&mut self.elsewhere_ms)).max(0.0)
    }
}

fn milliseconds(start: Instant, end: Instant) -> f64 {
    end.saturating_duration_since(start).as_secs_f64() * 1e3
}

impl BlockStream {
    /// A visit from `start` to `end` has been queued. Had the device begun it by then, it did nothing but
    /// follow the thread, whose time counts; else the thread is ahead, and what it does costs nothing.
    pub(super) fn count_visit(
        &self,
        inner: &mut Inner,
        start: &Event,
        end: Arc<Event>,
    ) -> Result<()> {
        if let Event::Host(start) = start {
            inner.driving.was_elsewhere(*start);
        }
        let worked_ms = inner.driving.take_ms();
        inner.driving.last_end = Some(end);
        if self.engine.has_happened(start)? {
            inner.stats.host_ms += worked_ms;
            if !self.engine.is_host_memory() {
                let visit_ms = milliseconds(inner.driving.leased, Instant::now());
                inner.stats.launch_ms += worked_ms.min(visit_ms);
            }
        }
        Ok(())
    }

    /// As [`BlockStream::count_visit`], for the time since the last visit: it counts when the device has
    /// nothing left to do.
    pub(super) fn count_between_visits(&self, inner: &mut Inner) -> Result<()> {
        let worked_ms = inner.driving.take_ms();
        let rests = match &inner.driving.last_end {
            Some(end) => self.engine.has_happened(end)?,
            None => true,
        };
        if rests {
            inner.stats.host_ms += worked_ms;
        }
        Ok(())
    }
}
