//! Blocks of a file over readers and links that are late, fail and break down.

use std::collections::VecDeque;
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

use tch::Device;

use super::*;
use crate::block::Placement;
use crate::read::{Completion, Reader, Request};
use crate::source::Extent;

const CHUNK_BYTES: usize = 4096;
const NUM_CHUNKS: usize = 4;

/// Small numbers from a seed: splitmix64.
#[derive(Debug)]
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((mixed ^ (mixed >> 27)) >> 8) as usize % limit
    }
}

/// Blocks whose images lie one after another in a file, at odd places.
#[derive(Debug)]
struct Stored {
    file: tempfile::NamedTempFile,
    bytes: Vec<u8>,
    blocks: Vec<BlockSpec>,
    starts: Vec<usize>,
}

impl Stored {
    fn new(numbers: &mut Numbers) -> Arc<Self> {
        // `/tmp` may be in memory; where the test itself lies is a disk.
        let program = std::env::current_exe().unwrap();
        let mut file = tempfile::NamedTempFile::new_in(program.parent().unwrap()).unwrap();
        let (mut blocks, mut starts, mut end) = (Vec::new(), Vec::new(), 0);
        for block in 0..6 {
            let name = format!("block.{block}");
            let mut spec = BlockSpec::pack(name, Placement::Streamed, []).unwrap();
            spec.image_bytes = [0, 1, 5000, 20_000, 60_000][numbers.below(5)];
            starts.push(end + numbers.below(9000));
            end = starts[block] + spec.image_bytes;
            blocks.push(spec);
        }
        let bytes: Vec<u8> = (0..end).map(|_| numbers.below(256) as u8).collect();
        file.write_all(&bytes).unwrap();
        Arc::new(Self { file, bytes, blocks, starts })
    }

    fn image(&self, block: BlockIndex) -> &[u8] {
        &self.bytes[self.starts[block.0]..][..self.blocks[block.0].image_bytes]
    }
}

impl BlockSource for Stored {
    fn describe(&self) -> String {
        "a file of a test".into()
    }
    fn blocks(&self) -> &[BlockSpec] {
        &self.blocks
    }
    fn read(&self, block: BlockIndex, range: Range<usize>, into: &mut [u8]) -> Result<usize> {
        into.copy_from_slice(&self.image(block)[range]);
        Ok(into.len())
    }
    fn files(&self) -> Vec<&Path> {
        vec![self.file.path()]
    }
    fn extents(&self, block: BlockIndex) -> Option<Vec<Extent>> {
        let (file_offset_bytes, num_bytes) =
            (self.starts[block.0] as u64, self.blocks[block.0].image_bytes);
        Some(vec![Extent { file: 0, file_offset_bytes, image_offset_bytes: 0, num_bytes }])
    }
}

/// A reader that hands completions out late and in another order, fails some, and breaks down in the end.
#[derive(Debug)]
struct Unsteady {
    inner: Box<dyn Reader>,
    held: Vec<Completion>,
    numbers: Numbers,
    num_calls_left: usize,
}

impl Unsteady {
    fn call(&mut self) -> Result<()> {
        self.num_calls_left = self.num_calls_left.saturating_sub(1);
        match self.num_calls_left {
            0 => Err(Error::usage("the reader broke down")),
            _ => Ok(()),
        }
    }

    fn hand_out(&mut self) -> Option<Completion> {
        let at = self.numbers.below(self.held.len().max(1));
        let mut completion = (!self.held.is_empty()).then(|| self.held.swap_remove(at))?;
        if self.numbers.below(12) == 0 {
            let failed = std::io::Error::from_raw_os_error(libc::EIO);
            completion.outcome = Err(Error::io("read", "a bad sector")(failed));
        }
        Some(completion)
    }
}

impl Reader for Unsteady {
    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn alignment_bytes(&self, file: usize) -> usize {
        self.inner.alignment_bytes(file)
    }
    unsafe fn register(&mut self, buffers: &[(*mut u8, usize)]) {
        // SAFETY: the caller's promises.
        unsafe { self.inner.register(buffers) }
    }
    fn enough_bytes(&self) -> usize {
        self.inner.enough_bytes()
    }
    unsafe fn submit(&mut self, tag: u64, request: Request, into: *mut u8) -> Result<()> {
        if self.numbers.below(40) == 0 {
            return Err(Error::usage("a read was refused"));
        }
        // SAFETY: the caller's promises.
        unsafe { self.inner.submit(tag, request, into) }
    }
    fn num_in_flight(&self) -> usize {
        self.inner.num_in_flight() + self.held.len()
    }
    fn wait(&mut self) -> Result<Option<Completion>> {
        self.call()?;
        if self.held.is_empty() || self.numbers.below(2) == 0 {
            self.held.extend(self.inner.wait()?);
        }
        Ok(self.hand_out())
    }
    fn poll(&mut self) -> Result<Option<Completion>> {
        self.call()?;
        self.held.extend(self.inner.poll()?);
        Ok(if self.numbers.below(3) == 0 { self.hand_out() } else { None })
    }
    fn stop(&mut self) -> Result<()> {
        self.inner.stop()
    }
}

/// A link in host memory whose copies are made when somebody waits for them, and which now and then refuses
/// the rest of a copy that it has begun.
#[derive(Debug)]
struct LateLink {
    state: Mutex<LateState>,
    fails: bool,
}

#[derive(Debug)]
struct LateState {
    copies: VecDeque<(Instant, usize, usize, Vec<u8>)>,
    numbers: Numbers,
    /// After a copy of which nothing was begun: no mark of its end either.
    refuses_mark: bool,
}

impl LateLink {
    fn new(fails: bool, seed: u64) -> Self {
        let (copies, numbers) = (VecDeque::new(), Numbers(seed));
        Self { state: Mutex::new(LateState { copies, numbers, refuses_mark: false }), fails }
    }
}

impl LateState {
    /// Makes the copies that end at `end` or before.
    fn make(&mut self, end: Instant) {
        while let Some((_, source, destination, bytes)) = self.copies.pop_front_if(|it| it.0 <= end)
        {
            let source = source as *const u8;
            // SAFETY: `CopyEngine::copy` demands that both ranges live until the copy has ended.
            unsafe {
                let now = std::slice::from_raw_parts(source, bytes.len());
                assert!(now == bytes, "staging memory changed before it was copied");
                std::ptr::copy_nonoverlapping(source, destination as *mut u8, bytes.len());
            }
        }
    }
}

impl CopyEngine for LateLink {
    fn device(&self) -> Device {
        Device::Cpu
    }
    fn is_host_memory(&self) -> bool {
        true
    }
    unsafe fn copy(&self, pieces: &[CopyPiece<'_>], _: Option<&Event>) -> Result<(Event, Event)> {
        let mut state = self.state.lock().unwrap();
        let refused = match pieces.is_empty() {
            true => std::mem::take(&mut state.refuses_mark),
            false => self.fails && state.numbers.below(10) == 0,
        };
        let num_begun = if refused { state.numbers.below(pieces.len() + 1) } else { pieces.len() };
        state.refuses_mark = refused && num_begun == 0 && !pieces.is_empty();
        let now = Instant::now();
        for CopyPiece { source, destination } in &pieces[..num_begun] {
            let from = source.as_ptr() as usize;
            state.copies.push_back((now, from, *destination, source.to_vec()));
        }
        match refused {
            true => Err(Error::Cuda { action: "copy", message: "not today".into() }),
            false => Ok((Event::Host(now), Event::Host(now))),
        }
    }
    fn record(&self) -> Result<Event> {
        Ok(Event::Host(Instant::now()))
    }
    fn wait(&self, event: &Event) -> Result<()> {
        self.synchronize(event)
    }
    fn synchronize(&self, event: &Event) -> Result<()> {
        let Event::Host(end) = event else { panic!("{event:?}") };
        self.state.lock().unwrap().make(*end);
        Ok(())
    }
    fn has_happened(&self, event: &Event) -> Result<bool> {
        let Event::Host(end) = event else { panic!("{event:?}") };
        let mut state = self.state.lock().unwrap();
        if state.numbers.below(3) == 0 {
            state.make(*end);
        }
        Ok(state.copies.front().is_none_or(|copy| copy.0 > *end))
    }
    fn elapsed_ms(&self, _: &Event, _: &Event) -> Result<Option<f64>> {
        Ok(Some(0.0))
    }
}

/// Serves what is asked for as the transfer thread does. Returns the slots in order.
fn serve(transfer: &mut Transfer) -> Vec<Served> {
    let mut all = Vec::new();
    loop {
        while let Some(served) = transfer.advance() {
            all.push(served);
        }
        if !transfer.can_wait() {
            return all;
        }
        if let Err(error) = transfer.wait() {
            all.extend(transfer.give_up(error));
        }
    }
}

fn unsteady(transfer: &Transfer, read: ReadMethod, numbers: &mut Numbers) -> Ring {
    let inner = read::open(&transfer.source, read, 1 + numbers.below(6)).unwrap();
    let num_calls_left = 5 + numbers.below(120);
    let numbers = Numbers(numbers.below(1 << 30) as u64);
    let reader = Unsteady { inner, held: Vec::new(), numbers, num_calls_left };
    Ring::new(Box::new(reader), Arc::clone(&transfer.engine), NUM_CHUNKS, CHUNK_BYTES).unwrap()
}

/// Fetches blocks in random order over one unsteady ring after another. Returns how many came and how many
/// failed, by what was said.
fn check(read: ReadMethod, fails: bool, seed: u64) -> (usize, [usize; 4]) {
    const SAID: [&str; 4] = ["a bad sector", "broke down", "was refused", "not today"];
    let numbers = &mut Numbers(seed);
    let source = Stored::new(numbers);
    let link = Arc::new(LateLink::new(fails, seed + 1));
    let options = TransferOptions {
        chunk_bytes: CHUNK_BYTES,
        num_chunks: NUM_CHUNKS,
        read,
        queue_depth: 4,
        is_told: false,
    };
    let engine: Arc<dyn CopyEngine> = link.clone();
    let mut transfer = Transfer::new(Arc::clone(&source) as _, engine, options);
    let (mut num_right, mut num_failed) = (0, [0; 4]);
    let mut places = vec![vec![0xEE_u8; 60_000]; 5];
    for _ in 0..12 {
        if transfer.ring.is_none() && numbers.below(4) > 0 {
            transfer.ring = Some(unsteady(&transfer, read, numbers));
        }
        let blocks: Vec<_> = (0..numbers.below(6)).map(|_| BlockIndex(numbers.below(6))).collect();
        // Some are announced; what is announced need not be asked for.
        for block in blocks.iter().take(numbers.below(4)) {
            transfer.expect(*block).unwrap();
        }
        if numbers.below(4) == 0 {
            transfer.advance();
            transfer.forget();
        }
        for (slot, block) in blocks.iter().enumerate() {
            let address = places[slot].as_mut_ptr() as usize;
            let after = Arc::new(Event::Host(Instant::now()));
            let place = Place { slot, address, num_bytes: 60_000, after };
            transfer.request(*block, place).unwrap();
        }
        let served = serve(&mut transfer);
        let slots: Vec<_> = served.iter().map(|(slot, _)| *slot).collect();
        assert_eq!(slots, (0..blocks.len()).collect::<Vec<_>>(), "each is served once, in order");
        for ((slot, outcome), block) in served.into_iter().zip(blocks) {
            match outcome {
                Ok(copy) => {
                    link.synchronize(&copy.end).unwrap();
                    let image = source.image(block);
                    assert!(places[slot].starts_with(image), "block {block}, seed {seed}");
                    num_right += 1;
                }
                Err(error) => {
                    let text = error.to_string();
                    assert!(text.contains(&format!("block.{block}")), "{text}");
                    let said = SAID.iter().position(|said| text.contains(said));
                    num_failed[said.unwrap_or_else(|| panic!("{text}"))] += 1;
                }
            }
        }
    }
    drop(transfer);
    let num_left = link.state.lock().unwrap().copies.len();
    assert_eq!(num_left, 0, "memory went before it was copied");
    (num_right, num_failed)
}

fn check_all(fails: bool) -> [usize; 4] {
    let mut num_failed = [0; 4];
    for read in [ReadMethod::Auto, ReadMethod::Threads, ReadMethod::Buffered] {
        let mut num_right = 0;
        for seed in 0..30 {
            let (right, failed) = check(read, fails, seed);
            num_right += right;
            num_failed.iter_mut().zip(failed).for_each(|(all, failed)| *all += failed);
        }
        println!("{read:?}: {num_right} right, {num_failed:?} failed so far");
        assert!(num_right > 200, "{num_right}");
    }
    num_failed
}

#[test]
fn reads_that_are_late_fail_or_break_the_reader_cost_their_own_block_and_no_other() {
    let num_failed = check_all(false);
    assert!(num_failed[..3].iter().all(|number| *number > 2), "{num_failed:?}");
}

#[test]
fn copies_that_fail_half_way_keep_their_staging_memory_until_they_have_ended() {
    let num_failed = check_all(true);
    assert!(num_failed[3] > 20, "{num_failed:?}");
}
