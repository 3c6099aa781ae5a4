//! The transfer thread: fills slots in the order it is told, one block after another.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::transfer::{Copy, Destination, Moved, Transfer};
use crate::block::BlockIndex;
use crate::device::Event;
use crate::error::{Error, Result};

/// One block to be brought into one slot.
pub(super) struct Job {
    pub(super) block: BlockIndex,
    pub(super) slot: usize,
    pub(super) destination: Destination,
    /// The slot's last user on the compute stream.
    pub(super) after: Option<Arc<Event>>,
}

/// What a slot's memory holds.
#[derive(Debug)]
pub(super) enum Content {
    /// Nothing, or the job has not been started.
    Pending,
    /// The copies are on their way; the last one's end is when the block is there.
    Started(Arc<Copy>),
    /// The block could not be brought in.
    Failed(Error),
}

/// What the transfer thread tells the engine.
#[derive(Debug, Default)]
pub(super) struct Progress {
    pub(super) contents: Vec<Option<Content>>,
    pub(super) num_open_jobs: usize,
    pub(super) totals: Moved,
    pub(super) staging_bytes: usize,
}

#[derive(Debug, Default)]
pub(super) struct Shared {
    progress: Mutex<Progress>,
    changed: Condvar,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, Progress> {
        // The data are plain numbers and handles: a panic elsewhere leaves them whole.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready` holds.
    pub(super) fn wait_until(&self, ready: impl Fn(&Progress) -> bool) -> MutexGuard<'_, Progress> {
        let mut progress = self.lock();
        while !ready(&progress) {
            progress = self.changed.wait(progress).unwrap_or_else(PoisonError::into_inner);
        }
        progress
    }
}

/// The running thread. Dropping it ends the thread after the jobs at hand.
#[derive(Debug)]
pub(super) struct Worker {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    pub(super) shared: Arc<Shared>,
}

impl Worker {
    pub(super) fn spawn(transfer: Transfer, num_slots: usize) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        shared.lock().contents.resize_with(num_slots, || None);
        let (jobs, receiver) = channel();
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("block-transfer".into())
            .spawn(move || serve(transfer, &receiver, &for_thread))
            .map_err(Error::io("start the thread", "block-transfer"))?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread), shared })
    }

    /// Queues a job.
    pub(super) fn submit(&self, job: Job) -> Result<()> {
        {
            let mut progress = self.shared.lock();
            progress.contents[job.slot] = Some(Content::Pending);
            progress.num_open_jobs += 1;
        }
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        if sent {
            return Ok(());
        }
        self.shared.lock().num_open_jobs -= 1;
        Err(Error::usage("the transfer thread has ended; open a new engine"))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(mut transfer: Transfer, jobs: &Receiver<Job>, shared: &Shared) {
    while let Ok(job) = jobs.recv() {
        let after = job.after.as_deref();
        let moved =
            catch_unwind(AssertUnwindSafe(|| transfer.start(job.block, job.destination, after)))
                .unwrap_or_else(|panic| {
                    let error = format!("the source panicked: {}", panic_text(&*panic));
                    Err(Error::usage(error).in_block(transfer.block_name(job.block)))
                });
        let mut progress = shared.lock();
        progress.num_open_jobs -= 1;
        progress.staging_bytes = transfer.staging_bytes();
        progress.contents[job.slot] = Some(match moved {
            Ok(moved) => progress.add(moved),
            Err(error) => Content::Failed(error),
        });
        shared.changed.notify_all();
    }
}

impl Progress {
    fn add(&mut self, moved: Moved) -> Content {
        self.totals.read_bytes += moved.read_bytes;
        self.totals.read_ms += moved.read_ms;
        self.totals.staging_wait_ms += moved.staging_wait_ms;
        self.totals.copied_bytes += moved.copied_bytes;
        let last = moved.copies.last().cloned();
        self.totals.copies.extend(moved.copies);
        match last {
            Some(copy) => Content::Started(copy),
            None => Content::Failed(Error::usage("a transfer made no copy")),
        }
    }
}

/// The text of a caught panic.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}
