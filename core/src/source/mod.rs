//! Where the bytes of blocks come from.

mod faulty;
mod ram;
mod safetensors;
pub mod shards;
mod throttled;

use std::fmt;
use std::ops::Range;

use crate::block::{BlockIndex, BlockSpec};
use crate::device::HostBuffer;
use crate::error::{Error, Result};

pub use faulty::FaultySource;
pub use ram::RamSource;
pub use safetensors::SafetensorsSource;
pub use throttled::ThrottledSource;

/// Where the bytes of blocks come from: pinned RAM, checkpoint files, shard files.
///
/// Reads may run on several threads at once. A source holds no device memory and knows neither family
/// nor engine. Wrappers (checksums, faults, rate limits) implement it over another source.
pub trait BlockSource: Send + Sync + fmt::Debug {
    /// What and where, for messages: `safetensors files in /models/x`.
    fn describe(&self) -> String;

    /// The blocks in order, streamed ones first.
    fn blocks(&self) -> &[BlockSpec];

    /// Fills `into` with the bytes `range` of the image of `block`, gaps as zeros.
    ///
    /// `into` is exactly as long as `range`, which lies inside the image. Returns how many bytes came
    /// from storage (gaps cost none).
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::File`] naming the file; `into`
    /// is then undefined. A later call may succeed.
    fn read(&self, block: BlockIndex, range: Range<usize>, into: &mut [u8]) -> Result<usize>;

    /// The whole image of `block` in memory that a copy engine can read in place.
    /// `None`: read it instead.
    fn lend(&self, _block: BlockIndex) -> Option<&HostBuffer> {
        None
    }
}

/// The spec of the block that a read asks for.
///
/// # Errors
/// [`Error::Usage`] when there is no such block or the range and the memory do not fit it.
fn check_request<'a>(
    blocks: &'a [BlockSpec],
    block: BlockIndex,
    range: &Range<usize>,
    into: &[u8],
) -> Result<&'a BlockSpec> {
    let spec = blocks.get(block.0).ok_or_else(|| {
        Error::usage(format!("block {block} was asked for, but there are only {}", blocks.len()))
    })?;
    if range.start > range.end || range.end > spec.image_bytes || range.len() != into.len() {
        return Err(Error::usage(format!(
            "bytes {range:?} of block '{}' ({} bytes) were asked for, into {} bytes of memory",
            spec.name,
            spec.image_bytes,
            into.len()
        )));
    }
    Ok(spec)
}
