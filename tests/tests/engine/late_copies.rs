//! Copies and computation that are as late as events let them be: an order that is missing changes bits.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::device::{CopyEngine, CopyPiece, Event};
use blockstreamer_core::execute::Executor;
use blockstreamer_core::source::{BlockSource, FaultySource};
use blockstreamer_core::{Error, Result};
use blockstreamer_tests::ToyModel;
use tch::{Device, Kind, Tensor};

use crate::links::busy;
use crate::rig::{assert_same_bits, device, options, probe, ram};
use crate::stress::{calm, step, survives, trainer};
use crate::stumbling::Stumbling;

/// A link in host memory that makes a copy no sooner than somebody waits for it or hears that it has
/// happened, all of them in order, as a copy stream does.
#[derive(Debug)]
struct LateLink {
    state: Mutex<State>,
    /// Frozen tensors that blocks were computed with and whose use has no end yet.
    used: Arc<Mutex<Vec<Tensor>>>,
}

#[derive(Debug)]
struct State {
    /// The last time handed out: no two events have the same.
    now: Instant,
    late: VecDeque<LateCopy>,
    num_made: usize,
    /// Until when the copy stream has waited for the compute stream.
    ordered_after: Option<Instant>,
    /// When memory was used last on the compute stream, by its address.
    last_uses: BTreeMap<usize, Instant>,
    num_asked: usize,
    /// Orders that were missing.
    broken: Vec<String>,
}

/// A copy that was started and not made.
#[derive(Debug)]
struct LateCopy {
    end: Instant,
    pieces: Vec<LatePiece>,
}

#[derive(Debug)]
struct LatePiece {
    source: usize,
    destination: usize,
    /// What the source held at the start.
    bytes: Vec<u8>,
}

impl LateLink {
    fn new(used: Arc<Mutex<Vec<Tensor>>>) -> Self {
        let state = State {
            now: Instant::now(),
            late: VecDeque::new(),
            num_made: 0,
            ordered_after: None,
            last_uses: BTreeMap::new(),
            num_asked: 0,
            broken: Vec::new(),
        };
        Self { state: Mutex::new(state), used }
    }

    /// Nothing was out of order, and nothing is left to be done.
    #[track_caller]
    fn assert_in_order(&self) {
        let state = self.state.lock().unwrap();
        assert!(state.broken.is_empty(), "{:?}", state.broken);
        assert!(state.late.is_empty(), "memory went before {} copies", state.late.len());
        assert!(state.num_made > 100, "{}", state.num_made);
    }
}

impl State {
    fn tick(&mut self) -> Instant {
        self.now = Instant::now().max(self.now + Duration::from_nanos(1));
        self.now
    }

    fn is_late(&self, end: Instant) -> bool {
        self.late.iter().any(|copy| copy.end == end)
    }

    /// Makes the copy that ends at `end` and those before it.
    fn make(&mut self, end: Instant) {
        if !self.is_late(end) {
            return;
        }
        while let Some(copy) = self.late.pop_front_if(|copy| copy.end <= end) {
            self.num_made += 1;
            for LatePiece { source, destination, bytes } in copy.pieces {
                let source = source as *const u8;
                // SAFETY: `CopyEngine::copy` demands that both ranges live until the copy has ended.
                unsafe {
                    if std::slice::from_raw_parts(source, bytes.len()) != bytes {
                        self.broken.push("a source changed before it was copied".to_owned());
                    }
                    std::ptr::copy_nonoverlapping(source, destination as *mut u8, bytes.len());
                }
            }
        }
    }

    /// A copy to `destination` must come after the visits that used what lies there.
    fn check(&mut self, destination: std::ops::Range<usize>, in_use: &[Tensor]) {
        let there = |tensor: &&Tensor| destination.contains(&(tensor.data_ptr() as usize));
        let last = self.last_uses.range(destination.clone()).map(|(_, last)| *last).max();
        if in_use.iter().any(|tensor| there(&tensor)) {
            self.broken.push("a copy was started to memory in use".to_owned());
        } else if last > self.ordered_after {
            self.broken.push("a copy does not wait for the visit before it".to_owned());
        }
    }
}

fn time(event: &Event) -> Result<Instant> {
    match event {
        Event::Host(time) => Ok(*time),
        Event::Cuda(_) => Err(Error::usage("an event of another device")),
    }
}

impl CopyEngine for LateLink {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn is_host_memory(&self) -> bool {
        true
    }

    unsafe fn copy(
        &self,
        pieces: &[CopyPiece<'_>],
        after: Option<&Event>,
    ) -> Result<(Event, Event)> {
        let mut state = self.state.lock().unwrap();
        let after = after.map(time).transpose()?;
        state.ordered_after = state.ordered_after.max(after);
        let start = state.tick();
        let used = self.used.lock().unwrap();
        for piece in pieces {
            let start = piece.destination;
            state.check(start..start + piece.source.len(), &used);
        }
        let pieces = pieces.iter().map(|piece| LatePiece {
            source: piece.source.as_ptr() as usize,
            destination: piece.destination,
            bytes: piece.source.to_vec(),
        });
        let end = state.tick();
        state.late.push_back(LateCopy { end, pieces: pieces.collect() });
        Ok((Event::Host(start), Event::Host(end)))
    }

    fn record(&self) -> Result<Event> {
        let mut state = self.state.lock().unwrap();
        let now = state.tick();
        for tensor in self.used.lock().unwrap().drain(..) {
            state.last_uses.insert(tensor.data_ptr() as usize, now);
        }
        Ok(Event::Host(now))
    }

    fn wait(&self, event: &Event) -> Result<()> {
        self.state.lock().unwrap().make(time(event)?);
        Ok(())
    }

    fn synchronize(&self, event: &Event) -> Result<()> {
        self.wait(event)
    }

    /// What is asked for has sometimes just happened.
    fn has_happened(&self, event: &Event) -> Result<bool> {
        let mut state = self.state.lock().unwrap();
        state.num_asked += 1;
        let event = time(event)?;
        if state.num_asked.is_multiple_of(3) {
            state.make(event);
        }
        Ok(!state.is_late(event))
    }

    fn elapsed_ms(&self, start: &Event, end: &Event) -> Result<Option<f64>> {
        let (start, end) = (time(start)?, time(end)?);
        let has_ended = !self.state.lock().unwrap().is_late(end);
        Ok(has_ended.then(|| end.saturating_duration_since(start).as_secs_f64() * 1e3))
    }
}

/// Blocks that are lent, and blocks that are read.
fn sources(model: &ToyModel) -> [Arc<dyn BlockSource>; 2] {
    [ram(model), Arc::new(FaultySource::new(ram(model), vec![]))]
}

#[test]
fn copies_that_are_late_are_waited_for_and_wait_for_the_visits_before_them() {
    if device().is_cuda() {
        println!("skipped: the GPU's own copies are late");
        return;
    }
    let calm = calm(&ToyModel::mixed());
    for depth in 0..4 {
        for (number, source) in sources(&ToyModel::mixed()).into_iter().enumerate() {
            let model = Stumbling::default();
            let link = Arc::new(LateLink::new(Arc::clone(&model.frozen)));
            let adapter = Some(Box::new(probe(&[2, 5, 9], 0.1)) as _);
            let mut options = options(Kind::Float, depth);
            if depth == 1 {
                options.stream.kept = [3, 8].map(BlockIndex).into();
            }
            let executor =
                Executor::with_engine(Box::new(model), source, adapter, link.clone(), options);
            let executor = executor.unwrap();
            for number in 0..10 {
                let found = step(&executor, number, true).unwrap();
                let wanted = step(&calm, number, false).unwrap();
                assert_eq!(found.0, wanted.0, "step {number}");
                assert_same_bits(&found.1, &wanted.1);
            }
            drop(executor);
            println!("depth {depth}, source {number}");
            link.assert_in_order();
        }
    }
}

#[test]
fn visits_that_are_late_keep_their_blocks_until_they_are_done() {
    if !device().is_cuda() {
        println!("skipped: without a GPU computation is done when it is launched");
        return;
    }
    let model = ToyModel::mixed();
    for depth in [0, 2] {
        for source in sources(&model) {
            let executor = trainer(&model, source, Arc::new(busy()), options(Kind::Float, depth));
            survives(&model, &executor, depth, 20);
        }
    }
}
