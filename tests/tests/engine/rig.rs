//! What the tests of this binary share.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use blockstreamer_core::adapter::{Adapter, AdapterCall, Trainable};
use blockstreamer_core::batch::{Batch, IGNORE_LABEL};
use blockstreamer_core::block::{BlockIndex, BlockSpec};
use blockstreamer_core::device::{HostBuffer, load_cuda};
use blockstreamer_core::execute::{Executor, ExecutorOptions, Gradients};
use blockstreamer_core::numerics::{AttentionKernel, ExpertKernel};
use blockstreamer_core::source::{BlockSource, RamSource};
use blockstreamer_core::stream::{StreamOptions, Transition};
use blockstreamer_core::{Error, Result};
use blockstreamer_tests::{Probe, ToyModel, blocks_of};
use tch::{Device, Kind, Tensor};

/// The device under test.
pub(crate) fn device() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    *DEVICE.get_or_init(|| match std::env::var("BLOCKSTREAMER_TEST_DEVICE").as_deref() {
        Err(_) | Ok("cpu") => Device::Cpu,
        Ok("cuda") => {
            load_cuda().unwrap();
            Device::Cuda(0)
        }
        Ok(other) => panic!("BLOCKSTREAMER_TEST_DEVICE is cpu or cuda, not {other}"),
    })
}

/// The blocks in memory that the engine may copy from in place.
pub(crate) fn ram(model: &ToyModel) -> Arc<RamSource> {
    let reserve = |num_bytes| HostBuffer::for_device(num_bytes, device());
    Arc::new(RamSource::from_tensors(blocks_of(model), reserve).unwrap())
}

/// A source that lends nothing, counts its reads, and gets into trouble once when told to.
#[derive(Debug)]
pub(crate) struct Disk {
    inner: Arc<RamSource>,
    num_reads: AtomicUsize,
    fails_at: AtomicUsize,
    panics_at: AtomicUsize,
}

impl Disk {
    pub(crate) fn new(model: &ToyModel) -> Arc<Self> {
        let never = || AtomicUsize::new(usize::MAX);
        let inner = ram(model);
        Arc::new(Self { inner, num_reads: 0.into(), fails_at: never(), panics_at: never() })
    }

    pub(crate) fn num_reads(&self) -> usize {
        self.num_reads.load(Ordering::SeqCst)
    }

    /// The read after `reads` more ones fails.
    pub(crate) fn fail_after(&self, reads: usize) {
        self.fails_at.store(self.num_reads() + reads, Ordering::SeqCst);
    }

    /// The read after `reads` more ones panics.
    pub(crate) fn panic_after(&self, reads: usize) {
        self.panics_at.store(self.num_reads() + reads, Ordering::SeqCst);
    }
}

impl BlockSource for Disk {
    fn describe(&self) -> String {
        "a disk for tests".into()
    }

    fn blocks(&self) -> &[BlockSpec] {
        self.inner.blocks()
    }

    fn read(&self, block: BlockIndex, range: Range<usize>, into: &mut [u8]) -> Result<usize> {
        let number = self.num_reads.fetch_add(1, Ordering::SeqCst);
        assert_ne!(number, self.panics_at.load(Ordering::SeqCst), "the disk fell over");
        if number == self.fails_at.load(Ordering::SeqCst) {
            return Err(Error::usage("the disk would not read"));
        }
        self.inner.read(block, range, into)?;
        Ok(into.len())
    }
}

/// A probe that remembers the dropout seed of each block and micro-batch, and insists that a block's
/// recompute gets the seed of its forward.
#[derive(Debug)]
pub(crate) struct SeedLog {
    probe: Probe,
    pub(crate) seeds: Arc<Mutex<BTreeMap<usize, Vec<u64>>>>,
}

impl SeedLog {
    pub(crate) fn new(probe: Probe) -> Self {
        Self { probe, seeds: Arc::default() }
    }
}

impl Adapter for SeedLog {
    fn trainables(&self) -> &[Trainable] {
        self.probe.trainables()
    }

    fn linear(&self, call: AdapterCall<'_>, x: &Tensor, output: Tensor) -> Result<Tensor> {
        let mut seeds = self.seeds.lock().unwrap();
        let of_block = seeds.entry(call.block.0).or_default();
        let seed = call.dropout_seed.expect("training has dropout");
        if !of_block.contains(&seed) {
            of_block.push(seed);
        }
        drop(seeds);
        self.probe.linear(call, x, output)
    }

    fn export(&self, directory: &Path, base_model: &str) -> Result<()> {
        self.probe.export(directory, base_model)
    }
}

/// Eager, on the device under test, with small and odd staging chunks.
pub(crate) fn options(kind: Kind, prefetch_ahead: usize) -> ExecutorOptions {
    ExecutorOptions {
        attention: AttentionKernel::Eager,
        experts: ExpertKernel::Loop,
        stream: stream_options(prefetch_ahead),
        seed: 5,
        ..ExecutorOptions::new(device(), kind)
    }
}

pub(crate) fn stream_options(prefetch_ahead: usize) -> StreamOptions {
    StreamOptions { prefetch_ahead, chunk_bytes: 700, num_chunks: 2, ..StreamOptions::default() }
}

/// One staging chunk holds any block: one read per fetch on every device.
pub(crate) fn whole_blocks(prefetch_ahead: usize) -> ExecutorOptions {
    let mut options = options(Kind::Float, prefetch_ahead);
    options.stream.chunk_bytes = 1 << 20;
    options
}

pub(crate) fn probe(blocks: &[usize], probability: f64) -> Probe {
    Probe::new(blocks, probability, device())
}

pub(crate) fn executor(
    model: &ToyModel,
    source: Arc<dyn BlockSource>,
    adapter: Option<Box<dyn Adapter>>,
    options: ExecutorOptions,
) -> Executor {
    Executor::new(Box::new(model.clone()), source, adapter, options).unwrap()
}

/// Two rows of `length` tokens; the first `num_ignored` positions of each have no label.
pub(crate) fn batch(length: i64, num_ignored: i64, seed: i64) -> Batch {
    let ids = (Tensor::arange(2 * length, (Kind::Int64, Device::Cpu)) * 7 + seed)
        .remainder(11)
        .view([2, length]);
    let labels = ids.copy();
    let _ = labels.narrow(1, 0, num_ignored).fill_(IGNORE_LABEL);
    Batch { labels: Some(labels), ..Batch::new(ids) }
}

/// One forward pass whose result nobody wants.
pub(crate) fn infer(executor: &Executor) -> Result<()> {
    executor.logits(&batch(4, 0, 1), &mut |_, _| Ok(())).map(drop)
}

/// The gradients of all trainables, on the host.
pub(crate) fn values(gradients: &Gradients, adapter: &dyn Adapter) -> Vec<(String, Tensor)> {
    let entry = |(trainable, gradient): (&Trainable, &Tensor)| {
        (trainable.name.clone(), gradient.to_device(Device::Cpu))
    };
    gradients.of(adapter.trainables()).map(entry).collect()
}

/// What plain autograd left in the trainables.
pub(crate) fn autograd_values(adapter: &dyn Adapter) -> Vec<(String, Tensor)> {
    let trained = adapter.trainables().iter().filter(|entry| entry.tensor.grad().defined());
    trained.map(|entry| (entry.name.clone(), entry.tensor.grad().to_device(Device::Cpu))).collect()
}

pub(crate) fn assert_same_bits(found: &[(String, Tensor)], wanted: &[(String, Tensor)]) {
    assert_close(found, wanted, 0.0);
}

/// The same names, and values within a relative error (0: the same bits).
pub(crate) fn assert_close(found: &[(String, Tensor)], wanted: &[(String, Tensor)], error: f64) {
    let names = |list: &[(String, Tensor)]| -> Vec<String> {
        list.iter().map(|entry| entry.0.clone()).collect()
    };
    assert_eq!(names(found), names(wanted));
    for ((name, found), (_, wanted)) in found.iter().zip(wanted) {
        let close = match error == 0.0 {
            true => found.equal(wanted),
            false => found.allclose(wanted, error, error * 0.1, false),
        };
        assert!(close, "{name}: {found:?} {wanted:?}\n{found}\n{wanted}");
    }
}

/// Everything that happens in an engine from now on.
pub(crate) fn watch(executor: &Executor) -> Arc<Mutex<Vec<Transition>>> {
    let seen: Arc<Mutex<Vec<Transition>>> = Arc::default();
    let for_observer = Arc::clone(&seen);
    let observer = move |transition: &Transition| {
        // A test that failed may have left it poisoned; leases are still given back then.
        for_observer.lock().unwrap_or_else(PoisonError::into_inner).push(*transition);
    };
    executor.stream().observe(Box::new(observer)).unwrap();
    seen
}
