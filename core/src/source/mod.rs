//! Where the bytes of blocks come from.

mod faulty;
mod ram;
mod safetensors;
pub mod shards;
mod throttled;
mod tiered;

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use crate::block::{BlockIndex, BlockSpec};
use crate::device::HostBuffer;
use crate::error::{Error, Result};

pub use faulty::FaultySource;
pub use ram::RamSource;
pub use safetensors::SafetensorsSource;
pub use throttled::ThrottledSource;
pub use tiered::TieredSource;

/// A run of bytes of a block's image, and where they lie in one of the source's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Position in [`BlockSource::files`].
    pub file: usize,
    /// Where the run starts in the file.
    pub file_offset_bytes: u64,
    /// Where it starts in the image.
    pub image_offset_bytes: usize,
    /// Its length.
    pub num_bytes: usize,
}

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

    /// The files that [`BlockSource::extents`] speaks of.
    fn files(&self) -> Vec<&Path> {
        Vec::new()
    }

    /// Where the image of `block` lies in files, in image order, gaps left out, so that a reader can go
    /// to the drive itself. `None`: only [`BlockSource::read`] knows.
    fn extents(&self, _block: BlockIndex) -> Option<Vec<Extent>> {
        None
    }

    /// What [`BlockSource::check`] can check: ranges of the image that start and end on multiples of
    /// this, or at its end.
    fn check_unit_bytes(&self) -> usize {
        1
    }

    /// Checks bytes of the image that a reader took from the files itself. The default has nothing to
    /// compare them with.
    ///
    /// # Errors
    /// [`Error::File`] when they are damaged, naming the file.
    fn check(&self, _block: BlockIndex, _range: Range<usize>, _bytes: &[u8]) -> Result<()> {
        Ok(())
    }
}

/// Makes a call into a source: a panic of it becomes an error.
pub(crate) fn guarded<T>(call: impl FnOnce() -> T) -> Result<T> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Error::usage(format!(
            "the source panicked: {}",
            text.unwrap_or_else(|| "no message".into())
        ))
    })
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

/// Adds `next`, as a part of the last extent where it follows that one in file and image.
fn push_extent(extents: &mut Vec<Extent>, next: Extent) {
    match extents.last_mut() {
        _ if next.num_bytes == 0 => {}
        Some(last)
            if last.file == next.file
                && last.file_offset_bytes + last.num_bytes as u64 == next.file_offset_bytes
                && last.image_offset_bytes + last.num_bytes == next.image_offset_bytes =>
        {
            last.num_bytes += next.num_bytes;
        }
        _ => extents.push(next),
    }
}
