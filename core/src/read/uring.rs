//! Reads through one io_uring: many at a time, one thread, no copies.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use io_uring::squeue::Entry;
use io_uring::{IoUring, opcode, types};

use super::files::{self, ReadFile};
use super::{Completion, Reader, Request, probe};
use crate::error::{Error, Result};

/// Requests are cut into pieces of this size, so that even one keeps the drive's queue full. The system
/// takes it as one read: 256 pages are what one block request holds.
const PIECE_BYTES: usize = 1 << 20;
/// Most pieces in the system's hands at a time.
const MAX_QUEUE_DEPTH: usize = 1024;
/// The system registers no more than this as one buffer.
const MAX_BUFFER_BYTES: usize = 1 << 30;
/// A ring that is stopped and only fails to tell what has ended is asked so often,
const MOST_FAILED_WAITS: usize = 100;
/// and so much time passes in between.
const RETRY: Duration = Duration::from_millis(10);

/// Carries out requests for files through an io_uring.
pub(super) struct UringReader {
    ring: IoUring,
    files: Arc<[ReadFile]>,
    files_registered: bool,
    /// Address ranges of registered memory; the position is the system's name for it.
    buffers: Vec<std::ops::Range<usize>>,
    max_in_kernel: usize,
    flights: BTreeMap<u64, Flight>,
    /// Pieces of flights that wait for room, oldest first.
    waiting: VecDeque<Piece>,
    /// Pieces that the system writes into, by the number that comes back with the result.
    in_kernel: BTreeMap<u64, Piece>,
    ready: VecDeque<Completion>,
    next_number: u64,
}

/// A request that was started.
#[derive(Debug)]
struct Flight {
    tag: u64,
    file: usize,
    offset_bytes: u64,
    needed_bytes: usize,
    address: usize,
    num_pieces_open: usize,
    read_bytes: usize,
    /// Where the file was found to end, counted from the request's start.
    end_bytes: Option<usize>,
    error: Option<Error>,
}

/// The bytes `start..end` of a flight, still to be read.
#[derive(Debug, Clone, Copy)]
struct Piece {
    flight: u64,
    start: usize,
    end: usize,
    /// Whether it went past the page cache when it was handed to the system.
    direct: bool,
}

/// What one result means for its piece.
enum Step {
    Again(Piece),
    Whole,
    /// The file ends here, counted from the request's start.
    EndOfFile(usize),
    Failed(Error),
}

impl UringReader {
    /// Sets up a ring for `files` with room for `queue_depth` pieces, or says why the system refuses.
    pub(super) fn new(files: Arc<[ReadFile]>, queue_depth: usize) -> Result<Self, String> {
        let max_in_kernel = queue_depth.clamp(1, MAX_QUEUE_DEPTH);
        let ring = probe::ring(max_in_kernel.next_power_of_two() as u32)?;
        let descriptors: Vec<_> = files.iter().map(|file| file.file.as_raw_fd()).collect();
        let files_registered = match ring.submitter().register_files(&descriptors) {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(%error, "io_uring takes no registered files; going on without");
                false
            }
        };
        Ok(Self {
            ring,
            files,
            files_registered,
            buffers: Vec::new(),
            max_in_kernel,
            flights: BTreeMap::new(),
            waiting: VecDeque::new(),
            in_kernel: BTreeMap::new(),
            ready: VecDeque::new(),
            next_number: 0,
        })
    }

    /// Hands waiting pieces to the system and waits until `want` results are there.
    fn push(&mut self, want: usize) -> Result<()> {
        while self.in_kernel.len() < self.max_in_kernel {
            let Some(mut piece) = self.waiting.pop_front() else { break };
            let Some(flight) = self.flights.get(&piece.flight) else { continue };
            piece.direct = self.files[flight.file].is_direct();
            let number = self.next_number;
            let entry = self.entry(flight, piece).user_data(number);
            // SAFETY: the file stays open as long as the ring, and `Reader::submit` demands that the
            // memory is valid until the request's completion, which comes after this piece's result;
            // who owns it asks `stop` before the memory goes.
            if unsafe { self.ring.submission().push(&entry) }.is_err() {
                self.waiting.push_front(piece);
                break;
            }
            self.next_number += 1;
            self.in_kernel.insert(number, piece);
        }
        match self.ring.submit_and_wait(want) {
            Ok(_) => Ok(()),
            // Interrupted, or short of room for requests or results: the caller collects and asks again.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ENOMEM)
                ) =>
            {
                std::thread::yield_now();
                Ok(())
            }
            Err(error) => Err(Error::io("wait for reads of", "io_uring")(error)),
        }
    }

    fn entry(&self, flight: &Flight, piece: Piece) -> Entry {
        let start = flight.address + piece.start;
        let num_bytes = piece.end - piece.start;
        let into = start as *mut u8;
        let offset = flight.offset_bytes + piece.start as u64;
        let buffer = self
            .buffers
            .iter()
            .position(|range| range.start <= start && start + num_bytes <= range.end);
        // A piece is at most PIECE_BYTES, and registered buffers are counted by 16 bits.
        let (length, slot) = (num_bytes as u32, flight.file as u32);
        let plain = types::Fd(self.files[flight.file].file.as_raw_fd());
        match (self.files_registered, buffer) {
            (true, Some(buffer)) => {
                opcode::ReadFixed::new(types::Fixed(slot), into, length, buffer as u16)
                    .offset(offset)
                    .build()
            }
            (false, Some(buffer)) => {
                opcode::ReadFixed::new(plain, into, length, buffer as u16).offset(offset).build()
            }
            (true, None) => {
                opcode::Read::new(types::Fixed(slot), into, length).offset(offset).build()
            }
            (false, None) => opcode::Read::new(plain, into, length).offset(offset).build(),
        }
    }

    /// Takes the results that are there.
    fn collect(&mut self) {
        let results: Vec<_> =
            self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        for (number, result) in results {
            if let Some(piece) = self.in_kernel.remove(&number) {
                self.advance(piece, result);
            }
        }
    }

    fn advance(&mut self, piece: Piece, result: i32) {
        let Some(flight) = self.flights.get_mut(&piece.flight) else { return };
        let file = &self.files[flight.file];
        if let Ok(num_bytes) = usize::try_from(result) {
            flight.read_bytes += num_bytes;
        }
        match step(file, piece, result) {
            Step::Again(rest) => return self.waiting.push_front(rest),
            Step::Whole => {}
            Step::EndOfFile(end) => {
                flight.end_bytes = Some(flight.end_bytes.map_or(end, |known| known.min(end)));
            }
            Step::Failed(error) => flight.error = flight.error.take().or(Some(error)),
        }
        flight.num_pieces_open -= 1;
        if flight.num_pieces_open == 0
            && let Some(flight) = self.flights.remove(&piece.flight)
        {
            self.ready.push_back(flight.complete(file));
        }
    }

    fn take(&mut self) -> Result<Option<Completion>> {
        self.collect();
        // Room that has become free is used before the caller computes on.
        if !self.waiting.is_empty() && self.in_kernel.len() < self.max_in_kernel {
            self.push(0)?;
        }
        Ok(self.ready.pop_front())
    }
}

impl Flight {
    fn complete(self, file: &ReadFile) -> Completion {
        let checked = match (self.error, self.end_bytes) {
            (Some(error), _) => Err(error),
            (None, None) => Ok(()),
            (None, Some(end)) => file.check_end(
                self.offset_bytes + end as u64,
                self.offset_bytes + self.needed_bytes as u64,
            ),
        };
        Completion { tag: self.tag, outcome: checked.map(|()| self.read_bytes) }
    }
}

/// What `result` means for `piece` of `file`.
fn step(file: &ReadFile, piece: Piece, result: i32) -> Step {
    match result {
        0 => Step::EndOfFile(piece.start),
        1.. => {
            let start = piece.start + result as usize;
            if start >= piece.end {
                Step::Whole
            } else if piece.direct && !start.is_multiple_of(file.alignment_bytes()) {
                // A direct read returns no broken block but the file's last one.
                Step::EndOfFile(start)
            } else {
                Step::Again(Piece { start, ..piece })
            }
        }
        _ => match -result {
            libc::EINTR | libc::EAGAIN => Step::Again(piece),
            libc::EINVAL if piece.direct => match file.go_buffered() {
                Ok(()) => Step::Again(piece),
                Err(error) => Step::Failed(error),
            },
            code => Step::Failed(Error::io("read", &file.path)(io::Error::from_raw_os_error(code))),
        },
    }
}

impl Reader for UringReader {
    fn describe(&self) -> String {
        let registered = if self.buffers.is_empty() { "" } else { ", registered memory" };
        format!("io_uring, {}{registered}", files::describe(&self.files))
    }

    fn alignment_bytes(&self, file: usize) -> usize {
        self.files.get(file).map_or(1, ReadFile::alignment_bytes)
    }

    unsafe fn register(&mut self, buffers: &[(*mut u8, usize)]) {
        let submitter = self.ring.submitter();
        if !self.buffers.is_empty() {
            self.buffers.clear();
            if let Err(error) = submitter.unregister_buffers() {
                tracing::debug!(%error, "io_uring keeps the memory registered before");
            }
        }
        // A read across the end of one goes into it as into any other memory.
        let pieces = |(start, num_bytes): &(*mut u8, usize)| {
            let (start, end) = (*start as usize, *start as usize + num_bytes);
            (start..end)
                .step_by(MAX_BUFFER_BYTES)
                .map(move |piece| piece..end.min(piece + MAX_BUFFER_BYTES))
        };
        let ranges: Vec<_> = buffers.iter().flat_map(pieces).collect();
        let vectors: Vec<_> = ranges
            .iter()
            .map(|range| libc::iovec {
                iov_base: range.start as *mut libc::c_void,
                iov_len: range.len(),
            })
            .collect();
        if vectors.is_empty() || vectors.len() > usize::from(u16::MAX) {
            return;
        }
        // SAFETY: the caller keeps the memory mapped until the reader is dropped.
        match unsafe { submitter.register_buffers(&vectors) } {
            Ok(()) => self.buffers = ranges,
            Err(error) => {
                tracing::debug!(
                    %error,
                    "io_uring takes no registered memory (locked memory is limited?); going on without"
                );
            }
        }
    }

    fn enough_bytes(&self) -> usize {
        self.max_in_kernel * PIECE_BYTES
    }

    unsafe fn submit(&mut self, tag: u64, request: Request, into: *mut u8) -> Result<()> {
        files::check(&self.files, &request, into)?;
        let Request::File { file, offset_bytes, num_bytes, needed_bytes } = request else {
            let message = "io_uring reads files, not blocks; read this source with threads";
            return Err(Error::usage(message));
        };
        let number = self.next_number;
        self.next_number += 1;
        let flight = Flight {
            tag,
            file,
            offset_bytes,
            needed_bytes,
            address: into as usize,
            num_pieces_open: num_bytes.div_ceil(PIECE_BYTES),
            read_bytes: 0,
            end_bytes: None,
            error: None,
        };
        if flight.num_pieces_open == 0 {
            self.ready.push_back(flight.complete(&self.files[file]));
            return Ok(());
        }
        let piece = |start| {
            let end = num_bytes.min(start + PIECE_BYTES);
            Piece { flight: number, start, end, direct: false }
        };
        self.flights.insert(number, flight);
        self.waiting.extend((0..num_bytes).step_by(PIECE_BYTES).map(piece));
        if self.in_kernel.len() < self.max_in_kernel
            && let Err(error) = self.push(0)
        {
            // What the ring itself cannot do, `wait` reports: the request counts as started.
            tracing::debug!(%error, "reads wait");
        }
        Ok(())
    }

    fn num_in_flight(&self) -> usize {
        self.flights.len() + self.ready.len()
    }

    fn wait(&mut self) -> Result<Option<Completion>> {
        loop {
            if let Some(completion) = self.take()? {
                return Ok(Some(completion));
            }
            if self.flights.is_empty() {
                return Ok(None);
            }
            self.push(1)?;
        }
    }

    fn poll(&mut self) -> Result<Option<Completion>> {
        self.take()
    }

    fn stop(&mut self) -> Result<()> {
        // The system writes into memory that soon belongs to somebody else: nothing but the results tells
        // when it has stopped. A call that waits for one and brings none has failed.
        let mut num_failed = 0;
        loop {
            self.waiting.clear();
            let num_left = self.in_kernel.len();
            if num_left == 0 {
                return Ok(());
            }
            let pushed = self.push(1);
            self.collect();
            if self.in_kernel.len() < num_left {
                num_failed = 0;
                continue;
            }
            num_failed += 1;
            if num_failed == MOST_FAILED_WAITS {
                // Asked once is enough.
                self.in_kernel.clear();
                let reason = pushed.err().map_or_else(String::new, |error| format!(" ({error})"));
                return Err(Error::usage(format!(
                    "io_uring does not say whether {num_left} reads have ended{reason}"
                )));
            }
            std::thread::sleep(RETRY);
        }
    }
}

impl Drop for UringReader {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            tracing::error!("{error}");
        }
    }
}

impl fmt::Debug for UringReader {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("UringReader")
            .field("files", &self.files)
            .field("in_flight", &self.num_in_flight())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::Path;

    use super::*;
    use crate::device::HostBuffer;

    /// A reader for a file of 4 MiB, unless the machine refuses io_uring, which is printed.
    fn reader(folder: &Path) -> Option<(UringReader, Vec<u8>)> {
        let path = folder.join("file");
        let bytes: Vec<u8> =
            (0..4_u32 << 20).map(|at| (at.wrapping_mul(40_503) >> 7) as u8).collect();
        std::fs::File::create(&path).unwrap().write_all(&bytes).unwrap();
        let (file, _) = ReadFile::open_direct(&path).unwrap();
        match UringReader::new(Arc::new([file]), 4) {
            Ok(reader) => Some((reader, bytes)),
            Err(reason) => {
                println!("skipped: this machine refuses io_uring: {reason}");
                None
            }
        }
    }

    fn whole(bytes: &[u8]) -> Request {
        let num_bytes = bytes.len();
        Request::File { file: 0, offset_bytes: 0, num_bytes, needed_bytes: num_bytes }
    }

    #[test]
    fn memory_of_more_than_a_gibibyte_is_registered_in_pieces_and_read_into_across_them() {
        let folder = tempfile::tempdir().unwrap();
        let Some((mut reader, bytes)) = reader(folder.path()) else { return };
        let mut memory = HostBuffer::new(MAX_BUFFER_BYTES + bytes.len()).unwrap();
        let range =
            |memory: &mut HostBuffer, num_bytes| (memory.bytes_mut().as_mut_ptr(), num_bytes);
        let num_bytes = memory.bytes().len();
        // SAFETY: the memory outlives the reader's use of it, and nothing is in flight.
        unsafe { reader.register(&[range(&mut memory, num_bytes)]) };
        if reader.buffers.is_empty() {
            println!("skipped: this machine registers no memory, or not as much");
            return;
        }
        assert_eq!(reader.buffers.len(), 2, "{}", reader.describe());
        for start in [0, MAX_BUFFER_BYTES - (3 << 19), MAX_BUFFER_BYTES] {
            let into = memory.bytes_mut()[start..][..bytes.len()].as_mut_ptr();
            // SAFETY: the slice is as long as the request, which is waited for.
            unsafe { reader.submit(0, whole(&bytes), into).unwrap() };
            assert_eq!(reader.wait().unwrap().unwrap().outcome.unwrap(), bytes.len());
            assert!(memory.bytes()[start..].starts_with(&bytes), "at {start}");
        }
        reader.stop().unwrap();
    }

    #[test]
    fn a_ring_that_only_fails_is_given_up_and_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let Some((mut reader, bytes)) = reader(folder.path()) else { return };
        let nothing = std::fs::File::open("/dev/null").unwrap();
        // SAFETY: the ring's descriptor stays open and stays its own; what it stands for cannot be waited on.
        let replaced = unsafe { libc::dup2(nothing.as_raw_fd(), reader.ring.as_raw_fd()) };
        assert_eq!(replaced, reader.ring.as_raw_fd());
        let mut memory = HostBuffer::new(bytes.len()).unwrap();
        // SAFETY: the memory is as long as the request; the system never hears of it.
        unsafe { reader.submit(0, whole(&bytes), memory.bytes_mut().as_mut_ptr()).unwrap() };
        let error = reader.stop().unwrap_err().to_string();
        assert!(error.contains("whether 4 reads have ended"), "{error}");
        assert!(reader.wait().is_err());
    }
}
