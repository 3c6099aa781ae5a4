//! How a block's image is cut into staging chunks: what is read into each, and what is copied out of it.
//!
//! Readers that go past the page cache read whole aligned spans of a file, so a chunk may hold bytes that
//! belong to nobody around those that do. Nothing is moved inside host memory: the copies to the device
//! start where the bytes arrived.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::block::BlockIndex;
use crate::read::Request;
use crate::source::{BlockSource, Extent};

/// One read into a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fill {
    pub(super) request: Request,
    /// Where in the chunk it goes.
    pub(super) staging_offset: usize,
}

/// One run of bytes from a chunk to the block's image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) staging_offset: usize,
    pub(super) image_offset: usize,
    pub(super) num_bytes: usize,
}

impl Piece {
    pub(super) fn staged(&self) -> Range<usize> {
        self.staging_offset..self.staging_offset + self.num_bytes
    }

    pub(super) fn image(&self) -> Range<usize> {
        self.image_offset..self.image_offset + self.num_bytes
    }
}

/// What one chunk is for.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) fills: Vec<Fill>,
    pub(super) pieces: Vec<Piece>,
}

impl Chunk {
    /// Bytes of the block that came from storage, when the reads brought `read_bytes`: those of a file
    /// also bring what lies around them.
    pub(super) fn payload_bytes(&self, read_bytes: usize) -> usize {
        match self.fills.first() {
            Some(Fill { request: Request::File { .. }, .. }) => {
                self.pieces.iter().map(|piece| piece.num_bytes).sum()
            }
            _ => read_bytes,
        }
    }
}

/// Cuts the image of `block` into chunks of at most `chunk_bytes`. `alignment_bytes` is what the reader
/// demands of reads of a file; `chunk_bytes` must be a multiple of it, and no less than the smaller of the
/// image and what the source's checksums cover.
pub(super) fn cut(
    source: &dyn BlockSource,
    block: BlockIndex,
    chunk_bytes: usize,
    alignment_bytes: &dyn Fn(usize) -> usize,
) -> Vec<Chunk> {
    match source.extents(block) {
        Some(extents) => {
            Cutter::new(chunk_bytes, source.check_unit_bytes(), alignment_bytes).cut(extents)
        }
        None => opaque(block, source.blocks()[block.0].image_bytes, chunk_bytes),
    }
}

/// Chunks for a source that only knows how to read itself.
fn opaque(block: BlockIndex, image_bytes: usize, chunk_bytes: usize) -> Vec<Chunk> {
    let chunk = |start: usize| {
        let num_bytes = chunk_bytes.min(image_bytes - start);
        let request = Request::Block { block, range: start..start + num_bytes };
        Chunk {
            fills: vec![Fill { request, staging_offset: 0 }],
            pieces: vec![Piece { staging_offset: 0, image_offset: start, num_bytes }],
        }
    };
    (0..image_bytes).step_by(chunk_bytes).map(chunk).collect()
}

/// Neighbouring extents of one file that are read as one.
struct Run {
    extents: Vec<Extent>,
    /// Where the next read of it starts.
    next: u64,
    end: u64,
}

struct Cutter<'a> {
    chunk_bytes: usize,
    unit_bytes: usize,
    alignment_bytes: &'a dyn Fn(usize) -> usize,
    chunks: Vec<Chunk>,
    /// Bytes of the last chunk that are spoken for.
    used_bytes: usize,
}

impl<'a> Cutter<'a> {
    fn new(
        chunk_bytes: usize,
        unit_bytes: usize,
        alignment_bytes: &'a dyn Fn(usize) -> usize,
    ) -> Self {
        Self {
            chunk_bytes,
            unit_bytes,
            alignment_bytes,
            chunks: Vec::new(),
            used_bytes: usize::MAX,
        }
    }

    /// Takes from every file in proportion to what it holds, so that drives work side by side.
    fn cut(mut self, extents: Vec<Extent>) -> Vec<Chunk> {
        let mut files: BTreeMap<usize, Vec<Extent>> = BTreeMap::new();
        for extent in extents.into_iter().filter(|extent| extent.num_bytes > 0) {
            files.entry(extent.file).or_default().push(extent);
        }
        let mut queues: Vec<(f64, u64, std::collections::VecDeque<Run>)> = files
            .into_iter()
            .map(|(file, extents)| {
                let runs = self.runs(file, extents);
                let total: u64 = runs.iter().map(|run| run.end - run.next).sum();
                (total as f64, 0, runs.into())
            })
            .collect();
        while let Some((_, done, runs)) = queues
            .iter_mut()
            .filter(|(_, _, runs)| !runs.is_empty())
            .min_by(|a, b| (a.1 as f64 / a.0).total_cmp(&(b.1 as f64 / b.0)))
        {
            let Some(run) = runs.front_mut() else { break };
            *done += self.take(run);
            if run.next >= run.end {
                runs.pop_front();
            }
        }
        self.chunks
    }

    fn runs(&self, file: usize, mut extents: Vec<Extent>) -> Vec<Run> {
        extents.sort_by_key(|extent| extent.file_offset_bytes);
        let alignment = (self.alignment_bytes)(file) as u64;
        let mut runs: Vec<Run> = Vec::new();
        for extent in extents {
            let start = extent.file_offset_bytes;
            let end = start + extent.num_bytes as u64;
            match runs.last_mut() {
                // A gap within one aligned span would be read anyway. Checked ranges stay apart.
                Some(run) if self.unit_bytes == 1 && start <= run.end + alignment => {
                    run.end = run.end.max(end);
                    run.extents.push(extent);
                }
                _ => runs.push(Run {
                    extents: vec![extent],
                    next: start / alignment * alignment,
                    end,
                }),
            }
        }
        runs
    }

    /// Reads the next part of `run` into the chunk at hand or a new one; returns its length.
    fn take(&mut self, run: &mut Run) -> u64 {
        let file = run.extents[0].file;
        let alignment = (self.alignment_bytes)(file);
        let mut start = self.used_bytes.checked_next_multiple_of(alignment).unwrap_or(usize::MAX);
        let wanted = (run.end - run.next) as usize;
        let room = |start: usize| {
            let room = self.chunk_bytes.saturating_sub(start) / alignment * alignment;
            // A cut must not go through what is checked as one.
            if room < wanted { room / self.unit_bytes * self.unit_bytes } else { room }
        };
        // What is left of a chunk is filled only when that spares no large read its own chunk.
        if room(start) < wanted.min(self.chunk_bytes / 4).max(1) {
            self.chunks.push(Chunk::default());
            start = 0;
        }
        let num_bytes = wanted.min(room(start));
        let from = run.next;
        let to = from + num_bytes as u64;
        if let Some(chunk) = self.chunks.last_mut() {
            chunk.fills.push(Fill {
                request: Request::File {
                    file,
                    offset_bytes: from,
                    num_bytes: num_bytes.next_multiple_of(alignment),
                    needed_bytes: num_bytes,
                },
                staging_offset: start,
            });
            for extent in &run.extents {
                let begin = extent.file_offset_bytes.max(from);
                let end = (extent.file_offset_bytes + extent.num_bytes as u64).min(to);
                if begin >= end {
                    continue;
                }
                push(
                    &mut chunk.pieces,
                    Piece {
                        staging_offset: start + (begin - from) as usize,
                        image_offset: extent.image_offset_bytes
                            + (begin - extent.file_offset_bytes) as usize,
                        num_bytes: (end - begin) as usize,
                    },
                );
            }
        }
        self.used_bytes = start + num_bytes.next_multiple_of(alignment);
        run.next = to;
        num_bytes as u64
    }
}

/// Appends a piece, as part of the one before where the two are neighbours on both sides.
fn push(pieces: &mut Vec<Piece>, piece: Piece) {
    match pieces.last_mut() {
        Some(last)
            if last.staged().end == piece.staging_offset
                && last.image().end == piece.image_offset =>
        {
            last.num_bytes += piece.num_bytes;
        }
        _ => pieces.push(piece),
    }
}

#[cfg(test)]
mod tests;
