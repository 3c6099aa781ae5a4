//! A source that fails when told to.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::BlockSource;
use crate::block::{BlockIndex, BlockSpec};
use crate::error::{Error, Result};

/// Fails chosen reads of another source, once each: proves that an error leaves everything usable.
/// It lends nothing, so that every use is a read.
#[derive(Debug)]
pub struct FaultySource {
    inner: Arc<dyn BlockSource>,
    faults: Vec<(BlockIndex, usize)>,
    num_reads: Mutex<BTreeMap<BlockIndex, usize>>,
}

impl FaultySource {
    /// Fails read number `n` (counted from 0 for each block) of a block, for each `(block, n)`.
    pub fn new(inner: Arc<dyn BlockSource>, faults: Vec<(BlockIndex, usize)>) -> Self {
        Self { inner, faults, num_reads: Mutex::default() }
    }
}

impl BlockSource for FaultySource {
    fn describe(&self) -> String {
        format!("{} with injected faults", self.inner.describe())
    }

    fn blocks(&self) -> &[BlockSpec] {
        self.inner.blocks()
    }

    fn read(&self, block: BlockIndex, range: Range<usize>, into: &mut [u8]) -> Result<usize> {
        let number = {
            let mut num_reads = self.num_reads.lock().unwrap_or_else(PoisonError::into_inner);
            let count = num_reads.entry(block).or_default();
            *count += 1;
            *count - 1
        };
        if self.faults.contains(&(block, number)) {
            let source =
                std::io::Error::other(format!("injected fault in read {number} of block {block}"));
            return Err(Error::io("read", self.inner.describe())(source));
        }
        self.inner.read(block, range, into)
    }
}
