//! Chosen blocks in host memory, the others wherever they come from.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use super::{BlockSource, Extent, check_request};
use crate::block::{BlockIndex, BlockSpec};
use crate::device::HostBuffer;
use crate::error::{Error, Result};
use crate::read::ReadMethod;
use crate::stream::HostLoader;

/// Threads that load: page-locking, reading and checking of different blocks overlap.
const NUM_THREADS: usize = 4;

/// Holds the images of chosen blocks in host memory and lends them; everything else is up to the source
/// that they were loaded from.
#[derive(Debug)]
pub struct TieredSource {
    inner: Arc<dyn BlockSource>,
    images: BTreeMap<BlockIndex, HostBuffer>,
    refusal: Option<Error>,
}

impl TieredSource {
    /// Loads `chosen` blocks of `inner`, the most important first, from files that are read by `read`.
    /// `reserve` makes the memory of each: [`HostBuffer::new`], or [`HostBuffer::for_device`] for a CUDA
    /// device.
    ///
    /// When `reserve` refuses, the blocks loaded so far stay, the others remain where they are, and
    /// [`TieredSource::refusal`] says why.
    ///
    /// # Errors
    /// [`Error::Block`] when a block cannot be read, [`Error::Usage`] when there is no such block.
    pub fn load(
        inner: Arc<dyn BlockSource>,
        chosen: &[BlockIndex],
        read: ReadMethod,
        reserve: impl Fn(usize) -> Result<HostBuffer> + Sync,
    ) -> Result<Self> {
        if let Some(block) = chosen.iter().find(|block| block.0 >= inner.blocks().len()) {
            return Err(Error::usage(format!("{} has no block {block}", inner.describe())));
        }
        let image_bytes = |block: &BlockIndex| inner.blocks()[block.0].image_bytes;
        let largest_bytes = chosen.iter().map(image_bytes).max().unwrap_or(0);
        let (next, loaded) = (AtomicUsize::new(0), Mutex::new(Loaded::default()));
        let work = || {
            let mut loader = HostLoader::new(&inner, read, largest_bytes);
            while let Some(&block) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
                let outcome = match reserve(image_bytes(&block)) {
                    Err(error) => Err(Failure::Refused(error)),
                    Ok(mut image) => match loader.fill(block, &mut image) {
                        Ok(_) => Ok(image),
                        Err(error) => Err(Failure::Read(error)),
                    },
                };
                let mut loaded = loaded.lock().unwrap_or_else(PoisonError::into_inner);
                match outcome {
                    Ok(image) => {
                        loaded.images.insert(block, image);
                    }
                    Err(failure) => {
                        // The other threads end with the block that they are at.
                        next.store(chosen.len(), Ordering::Relaxed);
                        match failure {
                            Failure::Refused(error) => loaded.refusal.get_or_insert(error),
                            Failure::Read(error) => loaded.failure.get_or_insert(error),
                        };
                    }
                }
            }
        };
        thread::scope(|scope| {
            for _ in 1..NUM_THREADS.min(chosen.len()) {
                scope.spawn(work);
            }
            work();
        });
        let Loaded { images, refusal, failure } =
            loaded.into_inner().unwrap_or_else(PoisonError::into_inner);
        match failure {
            Some(error) => Err(error),
            None => Ok(Self { inner, images, refusal }),
        }
    }

    /// Blocks in host memory.
    pub fn num_held(&self) -> usize {
        self.images.len()
    }

    /// Bytes of host memory that they take.
    pub fn held_bytes(&self) -> usize {
        self.images.values().map(|image| image.bytes().len()).sum()
    }

    /// Why not all chosen blocks are in host memory.
    pub fn refusal(&self) -> Option<&Error> {
        self.refusal.as_ref()
    }
}

#[derive(Default)]
struct Loaded {
    images: BTreeMap<BlockIndex, HostBuffer>,
    refusal: Option<Error>,
    failure: Option<Error>,
}

enum Failure {
    /// No memory for a block.
    Refused(Error),
    /// The block cannot be read.
    Read(Error),
}

impl BlockSource for TieredSource {
    fn describe(&self) -> String {
        format!(
            "{} blocks of {} bytes in host memory, the others from {}",
            self.num_held(),
            self.held_bytes(),
            self.inner.describe()
        )
    }

    fn blocks(&self) -> &[BlockSpec] {
        self.inner.blocks()
    }

    /// Returns 0 for a block in host memory: nothing comes from storage.
    fn read(&self, block: BlockIndex, range: Range<usize>, into: &mut [u8]) -> Result<usize> {
        let Some(image) = self.images.get(&block) else {
            return self.inner.read(block, range, into);
        };
        check_request(self.blocks(), block, &range, into)?;
        into.copy_from_slice(&image.bytes()[range]);
        Ok(0)
    }

    fn lend(&self, block: BlockIndex) -> Option<&HostBuffer> {
        self.images.get(&block).or_else(|| self.inner.lend(block))
    }

    fn files(&self) -> Vec<&Path> {
        self.inner.files()
    }

    fn extents(&self, block: BlockIndex) -> Option<Vec<Extent>> {
        self.inner.extents(block)
    }

    fn check_unit_bytes(&self) -> usize {
        self.inner.check_unit_bytes()
    }

    fn check(&self, block: BlockIndex, range: Range<usize>, bytes: &[u8]) -> Result<()> {
        self.inner.check(block, range, bytes)
    }
}
