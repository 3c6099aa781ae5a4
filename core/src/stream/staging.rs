//! The ring of staging chunks: filled by a reader, emptied by copies, reused in turn.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::chunks::{Chunk, Fill};
use super::trace::{Lane, Timed};
use crate::block::BlockIndex;
use crate::device::{CopyEngine, Event, HostBuffer};
use crate::error::{Error, Result};
use crate::read::{Completion, Reader};

/// What a staging chunk is in use for.
#[derive(Debug)]
enum Use {
    Free,
    Filling(Filling),
    /// Nobody wants it any more; free when its reads have ended.
    Orphaned {
        num_open: usize,
        num_bytes: usize,
    },
    Emptying(Arc<Timed>),
}

#[derive(Debug)]
struct Filling {
    block: BlockIndex,
    num_bytes: usize,
    num_open: usize,
    read_bytes: usize,
    error: Option<Error>,
    since: Instant,
}

/// What the ring did since it was last asked.
#[derive(Debug, Default)]
pub(super) struct Filled {
    pub(super) busy_ms: f64,
    pub(super) reads: Vec<Arc<Timed>>,
}

/// Chunks of pinned memory and the reader that fills them.
#[derive(Debug)]
pub(super) struct Ring {
    reader: Box<dyn Reader>,
    engine: Arc<dyn CopyEngine>,
    /// All chunks, one after another: one piece of memory gets large pages also for small chunks, and a
    /// drive takes a read of few large pages better than one of many small ones.
    memory: HostBuffer,
    chunk_bytes: usize,
    uses: Vec<Use>,
    /// Chunks being copied, oldest first.
    emptying: VecDeque<usize>,
    /// Free chunks. The one that was freed last is used first: its memory is still in the caches, which
    /// made a virtual drive a sixth faster.
    free: Vec<usize>,
    /// Bytes under way.
    reading_bytes: usize,
    busy_since: Option<Instant>,
    filled: Filled,
}

impl Ring {
    /// `num_chunks` chunks of `chunk_bytes`, exactly.
    pub(super) fn new(
        mut reader: Box<dyn Reader>,
        engine: Arc<dyn CopyEngine>,
        num_chunks: usize,
        chunk_bytes: usize,
    ) -> Result<Self> {
        let num_bytes = chunk_bytes
            .checked_mul(num_chunks)
            .ok_or_else(|| Error::usage("the staging chunks are too large to be added up"))?;
        let mut memory = engine.host_buffer(num_bytes)?;
        let range = (memory.bytes_mut().as_mut_ptr(), num_bytes);
        // SAFETY: the memory does not move when the ring does, and goes only when the reader was stopped.
        unsafe { reader.register(&[range]) };
        Ok(Self {
            reader,
            engine,
            free: (0..num_chunks).rev().collect(),
            memory,
            chunk_bytes,
            uses: (0..num_chunks).map(|_| Use::Free).collect(),
            emptying: VecDeque::new(),
            reading_bytes: 0,
            busy_since: None,
            filled: Filled::default(),
        })
    }

    pub(super) fn num_bytes(&self) -> usize {
        self.memory.bytes().len()
    }

    pub(super) fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    pub(super) fn take_filled(&mut self) -> Filled {
        std::mem::take(&mut self.filled)
    }

    /// Starts the reads of `chunk` into a free chunk of the ring; `None` when there is none, or when
    /// enough is under way.
    pub(super) fn fill(&mut self, block: BlockIndex, chunk: &Chunk) -> Option<usize> {
        // Beyond a full queue, one chunk from which it is filled up while this thread does other things.
        // Not more: the less memory is in turn, the more of it is in the caches.
        if self.reading_bytes >= self.reader.enough_bytes().saturating_add(self.chunk_bytes) {
            return None;
        }
        let index = self.free.pop()?;
        let num_bytes = chunk.pieces.iter().map(|piece| piece.num_bytes).sum();
        let since = Instant::now();
        let mut filling =
            Filling { block, num_bytes, num_open: 0, read_bytes: 0, error: None, since };
        let memory = &mut self.memory.bytes_mut()[index * self.chunk_bytes..][..self.chunk_bytes];
        for Fill { request, staging_offset } in &chunk.fills {
            let into = memory[*staging_offset..][..request.num_bytes()].as_mut_ptr();
            // SAFETY: the slice is as long as the request. The buffer lives until the reader is gone,
            // and it is touched again only when all its reads have ended.
            match unsafe { self.reader.submit(index as u64, request.clone(), into) } {
                Ok(()) => filling.num_open += 1,
                Err(error) => {
                    filling.error = Some(error);
                    break;
                }
            }
        }
        if filling.num_open > 0 {
            self.busy_since.get_or_insert(since);
            self.reading_bytes += num_bytes;
        }
        self.uses[index] = Use::Filling(filling);
        Some(index)
    }

    /// How the reads into chunk `index` ended: bytes that came from storage. `None` while they go on.
    pub(super) fn outcome(&mut self, index: usize) -> Option<Result<usize>> {
        match &mut self.uses[index] {
            Use::Filling(filling) if filling.num_open == 0 => {
                Some(filling.error.take().map_or(Ok(filling.read_bytes), Err))
            }
            Use::Filling(_) => None,
            _ => Some(Err(Error::usage("a staging chunk was asked for that nobody filled"))),
        }
    }

    /// The memory of chunk `index`, whose reads have ended.
    pub(super) fn bytes(&self, index: usize) -> &[u8] {
        &self.memory.bytes()[index * self.chunk_bytes..][..self.chunk_bytes]
    }

    /// Chunk `index` is free once `copy` has ended.
    pub(super) fn empty(&mut self, index: usize, copy: Arc<Timed>) {
        self.uses[index] = Use::Emptying(copy);
        self.emptying.push_back(index);
    }

    /// Chunk `index` is not wanted any more.
    pub(super) fn abandon(&mut self, index: usize) {
        match self.uses[index] {
            Use::Filling(Filling { num_open: num_open @ 1.., num_bytes, .. }) => {
                self.uses[index] = Use::Orphaned { num_open, num_bytes };
            }
            _ => self.set_free(index),
        }
    }

    fn set_free(&mut self, index: usize) {
        self.uses[index] = Use::Free;
        self.free.push(index);
    }

    /// Takes in what has ended, without waiting.
    pub(super) fn poll(&mut self) -> Result<()> {
        while let Some(completion) = self.reader.poll()? {
            self.complete(completion);
        }
        while let Some(index) = self.emptying.front().copied() {
            if let Use::Emptying(copy) = &self.uses[index]
                && !self.engine.has_happened(&copy.end)?
            {
                break;
            }
            self.emptying.pop_front();
            self.set_free(index);
        }
        Ok(())
    }

    pub(super) fn reader(&self) -> &dyn Reader {
        &*self.reader
    }

    /// Whether no read and no copy is under way.
    pub(super) fn is_still(&self) -> bool {
        self.reader.num_in_flight() == 0 && self.emptying.is_empty()
    }

    pub(super) fn is_emptying(&self) -> bool {
        !self.emptying.is_empty()
    }

    /// Waits for the next read to end.
    pub(super) fn wait_for_read(&mut self) -> Result<()> {
        if let Some(completion) = self.reader.wait()? {
            self.complete(completion);
        }
        Ok(())
    }

    /// Waits for the oldest copy to end.
    pub(super) fn wait_for_copy(&mut self) -> Result<()> {
        if let Some(index) = self.emptying.pop_front() {
            if let Use::Emptying(copy) = &self.uses[index] {
                let copy = Arc::clone(copy);
                self.engine.synchronize(&copy.end)?;
            }
            self.set_free(index);
        }
        Ok(())
    }

    fn complete(&mut self, completion: Completion) {
        let now = Instant::now();
        if self.reader.num_in_flight() == 0
            && let Some(since) = self.busy_since.take()
        {
            self.filled.busy_ms += (now - since).as_secs_f64() * 1e3;
        }
        let used = &mut self.uses[completion.tag as usize];
        match used {
            Use::Filling(filling) => {
                filling.num_open -= 1;
                match completion.outcome {
                    Ok(num_bytes) => filling.read_bytes += num_bytes,
                    Err(error) => drop(filling.error.get_or_insert(error)),
                }
                if filling.num_open == 0 {
                    self.reading_bytes -= filling.num_bytes;
                    self.filled.reads.push(Arc::new(Timed {
                        lane: Lane::Read,
                        block: filling.block,
                        num_bytes: filling.read_bytes,
                        start: Arc::new(Event::Host(filling.since)),
                        end: Arc::new(Event::Host(now)),
                    }));
                }
            }
            Use::Orphaned { num_open: 1, num_bytes } => {
                self.reading_bytes -= *num_bytes;
                self.set_free(completion.tag as usize);
            }
            Use::Orphaned { num_open, .. } => *num_open -= 1,
            Use::Free | Use::Emptying(_) => {}
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The memory must not go while a copy still reads it.
        while self.is_emptying() {
            if let Err(error) = self.wait_for_copy() {
                tracing::warn!(%error, "a copy from staging memory did not end");
            }
        }
        if let Err(error) = self.reader.stop() {
            let num_bytes = self.num_bytes();
            tracing::error!("{num_bytes} bytes of staging memory are lost: {error}");
            std::mem::forget(std::mem::take(&mut self.memory));
        }
    }
}
