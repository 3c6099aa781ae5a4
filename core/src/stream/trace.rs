//! What happened when: reads, copies and computation on one clock.

use std::sync::Arc;
use std::time::Instant;

use super::BlockStream;
use crate::block::BlockIndex;
use crate::device::{CopyEngine, Event};
use crate::error::{Error, Result};

/// Who was busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// The reader, with one staging chunk.
    Read,
    /// The copy stream, with one staging chunk or a whole image.
    Copy,
    /// The compute stream, with one visit.
    Compute,
}

/// One stretch of work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// Who did it.
    pub lane: Lane,
    /// For which block.
    pub block: BlockIndex,
    /// Milliseconds from [`BlockStream::start_trace`] to its start.
    pub start_ms: f64,
    /// And to its end.
    pub end_ms: f64,
    /// Bytes read or copied.
    pub num_bytes: usize,
}

/// A stretch of work whose end may not have happened yet.
#[derive(Debug)]
pub(super) struct Timed {
    pub(super) lane: Lane,
    pub(super) block: BlockIndex,
    pub(super) num_bytes: usize,
    pub(super) start: Arc<Event>,
    pub(super) end: Arc<Event>,
}

impl Timed {
    pub(super) fn copy(block: BlockIndex, num_bytes: usize, (start, end): (Event, Event)) -> Self {
        let (start, end) = (Arc::new(start), Arc::new(end));
        Self { lane: Lane::Copy, block, num_bytes, start, end }
    }

    /// Its length; `None` while it has not ended.
    pub(super) fn elapsed_ms(&self, engine: &dyn CopyEngine) -> Result<Option<f64>> {
        elapsed_ms(engine, &self.start, &self.end)
    }
}

fn elapsed_ms(engine: &dyn CopyEngine, start: &Event, end: &Event) -> Result<Option<f64>> {
    match (start, end) {
        (Event::Host(start), Event::Host(end)) => {
            Ok(Some(end.saturating_duration_since(*start).as_secs_f64() * 1e3))
        }
        _ => engine.elapsed_ms(start, end),
    }
}

/// The common zero of host and device, and what has been seen since.
#[derive(Debug)]
pub(super) struct Trace {
    host: Event,
    device: Event,
    spans: Vec<Span>,
}

impl Trace {
    pub(super) fn add(&mut self, timed: &Timed, engine: &dyn CopyEngine) -> Result<()> {
        if let (Event::Host(zero), Event::Host(start)) = (&self.host, &*timed.start)
            && start < zero
        {
            return Ok(());
        }
        let at = |event: &Event| {
            let zero = match event {
                Event::Host(_) => &self.host,
                Event::Cuda(_) => &self.device,
            };
            elapsed_ms(engine, zero, event)
        };
        // What began before the trace is left out.
        if let (Some(start_ms), Some(end_ms)) = (at(&timed.start)?, at(&timed.end)?)
            && start_ms >= 0.0
        {
            let Timed { lane, block, num_bytes, .. } = *timed;
            self.spans.push(Span { lane, block, start_ms, end_ms, num_bytes });
        }
        Ok(())
    }
}

impl BlockStream {
    /// Remembers reads, copies and visits from now on, until [`BlockStream::take_trace`]. Waits for the
    /// device once, to put its clock and the host's together.
    ///
    /// # Errors
    /// [`Error::Cuda`] when the device cannot be asked.
    pub fn start_trace(&self) -> Result<()> {
        let mut inner = self.borrow()?;
        self.settle(&mut inner)?;
        let device = self.engine.record()?;
        self.engine.synchronize(&device)?;
        let host = Event::Host(Instant::now());
        inner.trace = Some(Trace { host, device, spans: Vec::new() });
        Ok(())
    }

    /// Ends the trace and returns it in the order of starts. Waits for what is under way.
    ///
    /// # Errors
    /// [`Error::Usage`] when none was started; [`Error::Cuda`].
    pub fn take_trace(&self) -> Result<Vec<Span>> {
        let mut inner = self.borrow()?;
        let now = Arc::new(self.engine.record()?);
        self.engine.synchronize(&now)?;
        self.drain(&mut inner);
        self.settle(&mut inner)?;
        let trace = inner.trace.take().ok_or_else(|| Error::usage("no trace was started"))?;
        let mut spans = trace.spans;
        spans.sort_by(|a, b| a.start_ms.total_cmp(&b.start_ms));
        Ok(spans)
    }
}
