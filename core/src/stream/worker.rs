//! The transfer thread: serves places in the order it is told, and reads ahead of them.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::trace::Timed;
use super::transfer::{Moved, Place, Served, Transfer};
use crate::block::BlockIndex;
use crate::error::{Error, Result};
use crate::source::guarded;

/// How long the thread sleeps when reads are under way and the next place is not known.
const POLL: Duration = Duration::from_millis(1);

/// What the engine tells the transfer thread.
#[derive(Debug)]
enum Order {
    /// A block that will be wanted after all those before it.
    Expect(BlockIndex),
    /// A place for the next block.
    Fetch(BlockIndex, Place),
    /// The blocks that have no place will not be wanted.
    Forget,
}

/// What a slot's memory holds.
#[derive(Debug)]
pub(super) enum Content {
    /// Nothing yet.
    Pending,
    /// The copies are on their way; the last one's end is when the block is there.
    Started(Arc<Timed>),
    /// The block could not be brought in.
    Failed(Error),
}

/// What the transfer thread tells the engine.
#[derive(Debug, Default)]
pub(super) struct Progress {
    pub(super) contents: Vec<Option<Content>>,
    pub(super) num_open: usize,
    pub(super) moved: Moved,
    pub(super) staging_bytes: usize,
    /// Whether the thread is gone: nothing more will come.
    has_ended: bool,
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

    /// Waits until `ready` holds, or the thread has ended.
    pub(super) fn wait_until(&self, ready: impl Fn(&Progress) -> bool) -> MutexGuard<'_, Progress> {
        let mut progress = self.lock();
        while !ready(&progress) && !progress.has_ended {
            progress = self.changed.wait(progress).unwrap_or_else(PoisonError::into_inner);
        }
        progress
    }

    /// Waits until slot `slot` holds the block it was given.
    pub(super) fn started(&self, slot: usize) -> Result<Arc<Timed>> {
        let mut progress =
            self.wait_until(|progress| !matches!(progress.contents[slot], Some(Content::Pending)));
        match &mut progress.contents[slot] {
            Some(Content::Started(copy)) => Ok(Arc::clone(copy)),
            content => match content.take() {
                Some(Content::Failed(error)) => Err(error),
                _ => Err(Error::usage("the transfer thread ended before the block was there")),
            },
        }
    }

    fn serve(&self, transfer: &mut Transfer, served: Option<Served>) {
        let mut progress = self.lock();
        let Moved { read_bytes, read_busy_ms, staging_wait_ms, copied_bytes, timed } =
            transfer.take_moved();
        progress.moved.read_bytes += read_bytes;
        progress.moved.read_busy_ms += read_busy_ms;
        progress.moved.staging_wait_ms += staging_wait_ms;
        progress.moved.copied_bytes += copied_bytes;
        progress.moved.timed.extend(timed);
        progress.staging_bytes = transfer.staging_bytes();
        if let Some((slot, outcome)) = served {
            progress.num_open -= 1;
            progress.contents[slot] = Some(match outcome {
                Ok(copy) => Content::Started(copy),
                Err(error) => Content::Failed(error),
            });
            self.changed.notify_all();
        }
    }
}

/// The running thread. Dropping it ends the thread after the places it was given.
#[derive(Debug)]
pub(super) struct Worker {
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
    pub(super) shared: Arc<Shared>,
}

impl Worker {
    pub(super) fn spawn(transfer: Transfer, num_slots: usize) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        shared.lock().contents.resize_with(num_slots, || None);
        let (orders, receiver) = channel();
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("block-transfer".into())
            .spawn(move || Thread { transfer, orders: receiver, shared: for_thread }.run())
            .map_err(Error::io("start the thread", "block-transfer"))?;
        Ok(Self { orders: Some(orders), thread: Some(thread), shared })
    }

    /// Queues the fetch of a block to a place.
    pub(super) fn fetch(&self, block: BlockIndex, place: Place) -> Result<()> {
        {
            let mut progress = self.shared.lock();
            progress.contents[place.slot] = Some(Content::Pending);
            progress.num_open += 1;
        }
        self.send(Order::Fetch(block, place)).inspect_err(|_| self.shared.lock().num_open -= 1)
    }

    /// Announces a block that will be fetched after all those before it.
    pub(super) fn expect(&self, block: BlockIndex) -> Result<()> {
        self.send(Order::Expect(block))
    }

    /// Takes back all announcements.
    pub(super) fn forget(&self) -> Result<()> {
        self.send(Order::Forget)
    }

    fn send(&self, order: Order) -> Result<()> {
        match self.orders.as_ref().is_some_and(|orders| orders.send(order).is_ok()) {
            true => Ok(()),
            false => Err(Error::usage("the transfer thread has ended; open a new engine")),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Thread {
    transfer: Transfer,
    orders: Receiver<Order>,
    shared: Arc<Shared>,
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.shared.lock().has_ended = true;
        self.shared.changed.notify_all();
    }
}

impl Thread {
    fn run(mut self) {
        while self.take_orders() {
            // Places are served one after another until one has to be waited for.
            while let Some(served) =
                self.guarded(Transfer::advance).unwrap_or_else(|e| self.fail(e))
            {
                self.shared.serve(&mut self.transfer, Some(served));
            }
            if self.transfer.can_wait()
                && let Err(error) = self.guarded(|transfer| transfer.wait()).and_then(|done| done)
                && let Some(served) = self.fail(error)
            {
                self.shared.serve(&mut self.transfer, Some(served));
            }
        }
        self.transfer.forget();
    }

    /// Takes the orders that are there; waits for one where nothing else can be waited for. `false` when
    /// there will be no more and nothing is left to do.
    fn take_orders(&mut self) -> bool {
        loop {
            let order = match (self.transfer.can_wait(), self.transfer.is_idle()) {
                (true, _) => self.orders.try_recv(),
                (false, true) => self.orders.recv().map_err(|_| TryRecvError::Disconnected),
                // All that can be read ahead is there.
                (false, false) if self.transfer.is_still() => {
                    self.orders.recv().map_err(|_| TryRecvError::Disconnected)
                }
                // Reads for places to come: chunks that become free are put to use.
                (false, false) => match self.orders.recv_timeout(POLL) {
                    Err(RecvTimeoutError::Timeout) => return true,
                    order => order.map_err(|_| TryRecvError::Disconnected),
                },
            };
            match order {
                Ok(order) => self.obey(order),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return self.transfer.can_wait(),
            }
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Forget => self.transfer.forget(),
            Order::Expect(block) => {
                let expected = self.guarded(|transfer| transfer.expect(block));
                if let Err(error) = expected.and_then(|done| done) {
                    // Whoever asks for the block will be told.
                    tracing::debug!(%error, "a block cannot be read ahead");
                }
            }
            Order::Fetch(block, place) => {
                let slot = place.slot;
                let requested = self.guarded(|transfer| transfer.request(block, place));
                if let Err(error) = requested.and_then(|done| done) {
                    let error = error.in_block(self.transfer.block_name(block));
                    self.shared.serve(&mut self.transfer, Some((slot, Err(error))));
                }
            }
        }
    }

    /// Gives up the oldest place because of an error that is not its own.
    fn fail(&mut self, error: Error) -> Option<Served> {
        self.transfer.give_up(error)
    }

    /// A panic of the source is an error of the block.
    fn guarded<T>(&mut self, run: impl FnOnce(&mut Transfer) -> T) -> Result<T> {
        guarded(|| run(&mut self.transfer))
    }
}
