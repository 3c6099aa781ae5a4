//! Threads that read: works everywhere and for every source.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::files::{self, ReadFile};
use super::{Completion, Reader, Request};
use crate::error::{Error, Result};
use crate::source::{BlockSource, guarded};

/// More threads than this read no faster from any drive, but cost switches.
const MAX_THREADS: usize = 16;
/// Most bytes asked for at once: Linux never returns more than 0x7fff_f000 from one call.
const MAX_READ_BYTES: usize = 1 << 30;

/// Carries out requests on threads of its own.
#[derive(Debug)]
pub(super) struct PoolReader {
    files: Arc<[ReadFile]>,
    // None once the reader was stopped.
    jobs: Option<Sender<Job>>,
    completions: Receiver<Completion>,
    threads: Vec<JoinHandle<()>>,
    abandoned: Arc<AtomicBool>,
    num_in_flight: usize,
}

/// One request on its way to a thread.
#[derive(Debug)]
struct Job {
    tag: u64,
    request: Request,
    into: Memory,
}

/// Memory that belongs to one request.
#[derive(Debug)]
struct Memory(*mut u8);

// SAFETY: `Reader::submit` demands that nobody else touches the memory until the completion was
// returned, so exactly one thread does: the one that carries out the request.
unsafe impl Send for Memory {}

/// What every thread needs.
#[derive(Clone)]
struct Shared {
    files: Arc<[ReadFile]>,
    source: Option<Arc<dyn BlockSource>>,
    jobs: Arc<Mutex<Receiver<Job>>>,
    completions: Sender<Completion>,
    abandoned: Arc<AtomicBool>,
}

impl PoolReader {
    /// Starts as many threads as there may be requests, within reason.
    ///
    /// # Errors
    /// [`Error::Io`] when the system starts no more threads.
    pub(super) fn new(
        files: Arc<[ReadFile]>,
        source: Option<Arc<dyn BlockSource>>,
        queue_depth: usize,
    ) -> Result<Self> {
        let (jobs, receiver) = channel();
        let (sender, completions) = channel();
        let abandoned = Arc::new(AtomicBool::new(false));
        let shared = Shared {
            files: Arc::clone(&files),
            source,
            jobs: Arc::new(Mutex::new(receiver)),
            completions: sender,
            abandoned: Arc::clone(&abandoned),
        };
        let spawn = |number: usize| {
            let shared = shared.clone();
            std::thread::Builder::new()
                .name(format!("read-{number}"))
                .spawn(move || shared.serve())
                .map_err(Error::io("start the thread", format!("read-{number}")))
        };
        let threads = (0..queue_depth.clamp(1, MAX_THREADS)).map(spawn).collect::<Result<_>>()?;
        Ok(Self { files, jobs: Some(jobs), completions, threads, abandoned, num_in_flight: 0 })
    }
}

impl Reader for PoolReader {
    fn describe(&self) -> String {
        format!("{} threads, {}", self.threads.len(), files::describe(&self.files))
    }

    fn alignment_bytes(&self, file: usize) -> usize {
        self.files.get(file).map_or(1, ReadFile::alignment_bytes)
    }

    unsafe fn submit(&mut self, tag: u64, request: Request, into: *mut u8) -> Result<()> {
        files::check(&self.files, &request, into)?;
        let job = Job { tag, request, into: Memory(into) };
        let jobs = self.jobs.as_ref().ok_or_else(ended)?;
        jobs.send(job).map_err(|_| ended())?;
        self.num_in_flight += 1;
        Ok(())
    }

    fn num_in_flight(&self) -> usize {
        self.num_in_flight
    }

    fn wait(&mut self) -> Result<Option<Completion>> {
        if self.num_in_flight == 0 {
            return Ok(None);
        }
        let completion = self.completions.recv().map_err(|_| ended())?;
        self.num_in_flight -= 1;
        Ok(Some(completion))
    }

    fn poll(&mut self) -> Result<Option<Completion>> {
        match self.completions.try_recv() {
            Ok(completion) => {
                self.num_in_flight -= 1;
                Ok(Some(completion))
            }
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(ended()),
        }
    }

    fn stop(&mut self) -> Result<()> {
        // What no thread has begun is not begun any more; what is under way ends before the memory goes.
        self.abandoned.store(true, Ordering::Relaxed);
        self.jobs = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        Ok(())
    }
}

impl Drop for PoolReader {
    fn drop(&mut self) {
        let _ = self.stop();
    }
}

fn ended() -> Error {
    Error::usage("the threads that read have ended; open a new reader")
}

impl Shared {
    fn serve(self) {
        loop {
            let job = self.jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok(Job { tag, request, into }) = job else { return };
            if self.abandoned.load(Ordering::Relaxed) {
                continue;
            }
            let outcome = self.carry_out(request, &into);
            // Nobody waits for it when the reader is being dropped.
            let _ = self.completions.send(Completion { tag, outcome });
        }
    }

    fn carry_out(&self, request: Request, into: &Memory) -> Result<usize> {
        match request {
            Request::File { file, offset_bytes, num_bytes, needed_bytes } => {
                // SAFETY: `Reader::submit` demands that the memory is valid for the request's length
                // and that nobody else touches it until the completion was returned.
                let memory = unsafe { std::slice::from_raw_parts_mut(into.0, num_bytes) };
                read_file(&self.files[file], offset_bytes, memory, needed_bytes)
            }
            Request::Block { block, range } => {
                let Some(source) = &self.source else {
                    return Err(Error::usage("this reader has no source to read blocks from"));
                };
                let Some(spec) = source.blocks().get(block.0) else {
                    return Err(Error::usage(format!("block {block} does not exist")));
                };
                // SAFETY: as above.
                let memory = unsafe { std::slice::from_raw_parts_mut(into.0, range.len()) };
                let read = || source.read(block, range, memory);
                guarded(read)
                    .and_then(|outcome| outcome)
                    .map_err(|error| error.in_block(&spec.name))
            }
        }
    }
}

/// Reads as much of `memory` as the file has; `needed_bytes` of it must come.
fn read_file(
    file: &ReadFile,
    offset_bytes: u64,
    memory: &mut [u8],
    needed_bytes: usize,
) -> Result<usize> {
    let mut done = 0;
    while done < memory.len() {
        let direct = file.is_direct();
        let stop = memory.len().min(done + MAX_READ_BYTES);
        match file.file.read_at(&mut memory[done..stop], offset_bytes + done as u64) {
            Ok(0) => break,
            Ok(num_bytes) => {
                done += num_bytes;
                // A direct read returns no broken block but the file's last one, and takes no other
                // offset than a block's.
                if direct && !done.is_multiple_of(file.alignment_bytes()) {
                    break;
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) if direct && error.raw_os_error() == Some(libc::EINVAL) => {
                file.go_buffered()?;
            }
            Err(error) => return Err(Error::io("read", &file.path)(error)),
        }
    }
    file.check_end(offset_bytes + done as u64, offset_bytes + needed_bytes as u64)?;
    Ok(done)
}
