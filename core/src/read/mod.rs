//! Reading files past the page cache, many requests at a time.

mod files;
mod pool;
mod probe;
mod rate;
mod uring;

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::block::BlockIndex;
use crate::error::{Error, Result};
use crate::source::BlockSource;

use files::ReadFile;
use pool::PoolReader;
use uring::UringReader;

pub use probe::ReadOffer;
pub use rate::{DriveRate, DriveSetting, drive_gb_per_s, drive_pass_gb_per_s};

/// What is to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Bytes of one of the source's files. Offset, length and memory keep to
    /// [`Reader::alignment_bytes`]; the file may end before `num_bytes`, but not before `needed_bytes`.
    File {
        /// Position in [`BlockSource::files`](crate::source::BlockSource::files).
        file: usize,
        /// Where to start.
        offset_bytes: u64,
        /// How much memory there is for it.
        num_bytes: usize,
        /// How many bytes must arrive.
        needed_bytes: usize,
    },
    /// Bytes of a block's image, by [`BlockSource::read`](crate::source::BlockSource::read).
    Block {
        /// The block.
        block: BlockIndex,
        /// The part of its image.
        range: Range<usize>,
    },
}

impl Request {
    /// How much memory it fills.
    pub fn num_bytes(&self) -> usize {
        match self {
            Self::File { num_bytes, .. } => *num_bytes,
            Self::Block { range, .. } => range.len(),
        }
    }
}

/// A request that has ended.
#[derive(Debug)]
pub struct Completion {
    /// As given to [`Reader::submit`].
    pub tag: u64,
    /// Bytes that came from storage, or why it failed, naming the file.
    pub outcome: Result<usize>,
}

/// Carries out many reads at a time, in any order. Driven by one thread.
pub trait Reader: Send + fmt::Debug {
    /// How it reads, for people: `io_uring, direct`.
    fn describe(&self) -> String;

    /// What offset, length and memory address of a read of `file` must be multiples of.
    fn alignment_bytes(&self, file: usize) -> usize;

    /// Tells the reader of memory (address and bytes each) that most reads go into, which may make them
    /// cheaper. What was told before is forgotten. The default makes no use of it.
    ///
    /// # Safety
    /// The memory must be valid and stay mapped until [`Reader::stop`] has succeeded, or the reader was told of
    /// other memory while nothing was in flight.
    unsafe fn register(&mut self, _buffers: &[(*mut u8, usize)]) {}

    /// Bytes under way that keep the drive busy: no more need be submitted. The default says that more is
    /// always better.
    fn enough_bytes(&self) -> usize {
        usize::MAX
    }

    /// Starts a read into the memory at `into`.
    ///
    /// # Safety
    /// `into` must be valid for the request's length, and nobody else may touch it, until the request's
    /// completion was returned or [`Reader::stop`] has succeeded; for ever when that fails.
    ///
    /// # Errors
    /// When the request cannot even be started; it has no completion then.
    unsafe fn submit(&mut self, tag: u64, request: Request, into: *mut u8) -> Result<()>;

    /// Requests that were started and whose completion has not been returned.
    fn num_in_flight(&self) -> usize;

    /// The next completion; waits for one. `None` when nothing is in flight.
    ///
    /// # Errors
    /// When the reader itself has broken down.
    fn wait(&mut self) -> Result<Option<Completion>>;

    /// The next completion that is there already.
    ///
    /// # Errors
    /// As [`Reader::wait`].
    fn poll(&mut self) -> Result<Option<Completion>>;

    /// Begins nothing more and waits until no memory is written to. Dropping the reader tries the same, but
    /// cannot say how it ended: who owns the memory calls this before.
    ///
    /// # Errors
    /// When the system does not tell what has ended: it may write to the memory of requests at any time,
    /// so that this must never be used or freed again.
    fn stop(&mut self) -> Result<()>;
}

/// How files are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReadMethod {
    /// The best that the system and the file system take.
    #[default]
    Auto,
    /// io_uring past the page cache.
    Uring,
    /// Threads that read past the page cache.
    Threads,
    /// Threads that read through the page cache.
    Buffered,
}

/// A reader for `source` that has at most `queue_depth` reads of up to 1 MiB (io_uring) or a whole request
/// (threads, at most 16) under way at a time. More may be submitted; they wait.
///
/// A source that names no files is read by threads that call [`BlockSource::read`]. Where the file
/// system does not take reads past the page cache, they go through it.
///
/// # Errors
/// [`Error::Io`] when a file cannot be opened or no thread can be started; [`Error::Usage`] when
/// `method` asks for io_uring and the system refuses it, with the reason.
pub fn open(
    source: &Arc<dyn BlockSource>,
    method: ReadMethod,
    queue_depth: usize,
) -> Result<Box<dyn Reader>> {
    open_files(&source.files(), Some(Arc::clone(source)), method, queue_depth)
}

/// A reader for the files `paths`, and for the blocks of `source` if there is one.
fn open_files(
    paths: &[&Path],
    source: Option<Arc<dyn BlockSource>>,
    method: ReadMethod,
    queue_depth: usize,
) -> Result<Box<dyn Reader>> {
    let open = |path: &&Path| {
        if method == ReadMethod::Buffered {
            return ReadFile::open_buffered(path);
        }
        let (file, refusal) = ReadFile::open_direct(path)?;
        if let Some(reason) = refusal {
            tracing::debug!("{}: through the page cache: {reason}", path.display());
        }
        Ok(file)
    };
    let files: Arc<[ReadFile]> = paths.iter().map(open).collect::<Result<_>>()?;
    let by_uring = match method {
        _ if files.is_empty() => false,
        ReadMethod::Uring => true,
        // Through the page cache io_uring copies on one thread; several are faster.
        ReadMethod::Auto => files.iter().all(ReadFile::is_direct),
        ReadMethod::Threads | ReadMethod::Buffered => false,
    };
    if by_uring {
        match UringReader::new(Arc::clone(&files), queue_depth) {
            Ok(reader) => return Ok(Box::new(reader)),
            Err(reason) if method == ReadMethod::Uring => {
                return Err(Error::usage(format!(
                    "cannot read with io_uring, which was asked for: {reason}; ask for 'threads' or 'auto'"
                )));
            }
            Err(reason) => tracing::debug!("no io_uring: {reason}; reading with threads"),
        }
    }
    Ok(Box::new(PoolReader::new(files, source, queue_depth)?))
}
