//! Reading shards.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::manifest::{CHUNK_BYTES, Manifest, ShardEntry};
use super::write::ShardProgress;
use crate::block::{BlockIndex, BlockSpec};
use crate::checkpoint::read_exact_at;
use crate::error::{Error, Result};
use crate::source::{BlockSource, check_request};

/// Reads blocks from shard files and compares checksums on the way.
#[derive(Debug)]
pub struct ShardSource {
    directory: PathBuf,
    blocks: Vec<BlockSpec>,
    shards: Vec<Shard>,
    verify: bool,
}

#[derive(Debug)]
struct Shard {
    entry: ShardEntry,
    path: PathBuf,
    file: File,
}

impl ShardSource {
    /// Opens the shards whose manifest is in `directory`, with checksums.
    ///
    /// `expected_identity` is the [`Layout::identity`](crate::checkpoint::Layout::identity) of the
    /// checkpoint at hand; `None` takes the shards as they are.
    ///
    /// # Errors
    /// [`Error::File`] when the manifest is missing, damaged, of another version or of another checkpoint,
    /// or a file has the wrong size; [`Error::Io`] when a file is missing.
    pub fn open(directory: &Path, expected_identity: Option<&str>) -> Result<Self> {
        let manifest = Manifest::read(directory)?;
        manifest.check_identity(directory, expected_identity)?;
        let blocks = manifest.blocks.iter().map(|entry| entry.block.clone()).collect();
        let open = |entry: &ShardEntry| {
            let path = manifest.path(directory, entry);
            Ok(Shard { file: entry.open(&path)?, entry: entry.clone(), path })
        };
        let shards = manifest.blocks.iter().map(open).collect::<Result<_>>()?;
        Ok(Self { directory: directory.to_owned(), blocks, shards, verify: true })
    }

    /// Whether checksums are compared on every read.
    #[must_use]
    pub fn with_verify(mut self, verify: bool) -> Self {
        self.verify = verify;
        self
    }
}

impl BlockSource for ShardSource {
    fn describe(&self) -> String {
        format!("shards in {}", self.directory.display())
    }

    fn blocks(&self) -> &[BlockSpec] {
        &self.blocks
    }

    /// With checksums, chunks that the range covers in part are read whole, and counted as such.
    fn read(&self, block: BlockIndex, range: Range<usize>, into: &mut [u8]) -> Result<usize> {
        check_request(&self.blocks, block, &range, into)?;
        let Shard { entry, path, file } = &self.shards[block.0];
        if !self.verify || range.is_empty() {
            read_exact_at(file, path, range.start as u64, into)?;
            return Ok(range.len());
        }
        let mut read_bytes = 0;
        for number in range.start / CHUNK_BYTES..range.end.div_ceil(CHUNK_BYTES) {
            let chunk = entry.chunk(number);
            let wanted = chunk.start.max(range.start)..chunk.end.min(range.end);
            let part = &mut into[wanted.start - range.start..wanted.end - range.start];
            if wanted == chunk {
                entry.read_chunk(file, path, number, part)?;
            } else {
                let mut whole = vec![0; chunk.len()];
                entry.read_chunk(file, path, number, &mut whole)?;
                part.copy_from_slice(&whole[wanted.start - chunk.start..wanted.end - chunk.start]);
            }
            read_bytes += chunk.len();
        }
        Ok(read_bytes)
    }
}

/// A block whose file is missing or damaged.
#[derive(Debug)]
pub struct Damage {
    /// Name of the block.
    pub block: String,
    /// What is wrong, naming the file.
    pub reason: Error,
}

/// Reads every shard of the folder `directory` and returns the damaged blocks.
/// `expected_identity` is that of [`ShardSource::open`].
///
/// # Errors
/// As [`Manifest::read`]; [`Error::File`] when the shards are of another checkpoint.
pub fn verify_shards(
    directory: &Path,
    expected_identity: Option<&str>,
    progress: &mut dyn FnMut(ShardProgress<'_>),
) -> Result<Vec<Damage>> {
    let manifest = Manifest::read(directory)?;
    manifest.check_identity(directory, expected_identity)?;
    let total_bytes = manifest.blocks.iter().map(|entry| entry.block.image_bytes as u64).sum();
    let (mut damaged, mut done_bytes) = (Vec::new(), 0);
    for entry in &manifest.blocks {
        if let Err(reason) = entry.verify(&manifest.path(directory, entry)) {
            damaged.push(Damage { block: entry.block.name.clone(), reason });
        }
        done_bytes += entry.block.image_bytes as u64;
        progress(ShardProgress { block: &entry.block.name, done_bytes, total_bytes });
    }
    Ok(damaged)
}
