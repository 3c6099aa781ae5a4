//! Reading shards.

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::manifest::{CHUNK_BYTES, Manifest};
use super::stripes::{self, BlockFiles};
use super::write::ShardProgress;
use crate::block::{BlockIndex, BlockSpec};
use crate::error::{Error, Result};
use crate::source::{BlockSource, Extent, check_request};

/// Reads blocks from shard files and compares checksums on the way.
#[derive(Debug)]
pub struct ShardSource {
    directory: PathBuf,
    blocks: Vec<BlockSpec>,
    shards: Vec<BlockFiles>,
    /// For every block, the position of its first file among those of all blocks.
    first_files: Vec<usize>,
    verify: bool,
}

impl ShardSource {
    /// Opens the shards whose manifest is in `directory`, with checksums.
    ///
    /// `expected_identity` is the [`Layout::identity`](crate::checkpoint::Layout::identity) of the
    /// checkpoint at hand; `None` takes the shards as they are.
    ///
    /// # Errors
    /// [`Error::File`] when the manifest is missing, damaged, of another version or of another checkpoint,
    /// a folder is missing or holds stripes of other shards, or a file has the wrong size; [`Error::Io`] when a file is missing.
    pub fn open(directory: &Path, expected_identity: Option<&str>) -> Result<Self> {
        let manifest = Manifest::read(directory)?;
        manifest.check_identity(directory, expected_identity)?;
        let directories = stripes::directories(&manifest, directory)?;
        let (mut shards, mut first_files, mut num_files) = (Vec::new(), Vec::new(), 0);
        for (block, entry) in manifest.blocks.iter().enumerate() {
            let files = BlockFiles::open(entry, block, &directories)?;
            first_files.push(num_files);
            num_files += files.paths().count();
            shards.push(files);
        }
        let blocks = manifest.blocks.into_iter().map(|entry| entry.block).collect();
        Ok(Self { directory: directory.to_owned(), blocks, shards, first_files, verify: true })
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
        if range.is_empty() {
            return Ok(0);
        }
        let files = &self.shards[block.0];
        let mut read_bytes = 0;
        for stripe in files.touched(&range) {
            let whole = files.range(stripe);
            let wanted = whole.start.max(range.start)..whole.end.min(range.end);
            let part = &mut into[wanted.start - range.start..wanted.end - range.start];
            if !self.verify {
                read_bytes += part.len();
                files.read(stripe, wanted, part)?;
                continue;
            }
            if wanted == whole {
                files.read_checked(stripe, part)?;
            } else {
                let mut bytes = vec![0; whole.len()];
                files.read_checked(stripe, &mut bytes)?;
                part.copy_from_slice(&bytes[wanted.start - whole.start..wanted.end - whole.start]);
            }
            read_bytes += whole.len();
        }
        Ok(read_bytes)
    }

    fn files(&self) -> Vec<&Path> {
        self.shards.iter().flat_map(BlockFiles::paths).map(PathBuf::as_path).collect()
    }

    fn extents(&self, block: BlockIndex) -> Option<Vec<Extent>> {
        Some(self.shards.get(block.0)?.extents(*self.first_files.get(block.0)?))
    }

    fn check_unit_bytes(&self) -> usize {
        if self.verify { CHUNK_BYTES } else { 1 }
    }

    fn check(&self, block: BlockIndex, range: Range<usize>, bytes: &[u8]) -> Result<()> {
        let spec = check_request(&self.blocks, block, &range, bytes)?;
        if !self.verify || range.is_empty() {
            return Ok(());
        }
        let at_end = range.end == spec.image_bytes || range.end.is_multiple_of(CHUNK_BYTES);
        if !range.start.is_multiple_of(CHUNK_BYTES) || !at_end {
            return Err(Error::usage(format!(
                "bytes {range:?} of block '{}' cannot be checked: checksums cover multiples of {CHUNK_BYTES} bytes",
                spec.name
            )));
        }
        let files = &self.shards[block.0];
        let mut stripes = files.touched(&range).zip(bytes.chunks(CHUNK_BYTES));
        stripes.try_for_each(|(stripe, bytes)| files.check(stripe, bytes))
    }
}

/// A block whose shards are not what they should be.
#[derive(Debug)]
pub struct Damage {
    /// Name of the block.
    pub block: String,
    /// What is wrong, naming the file.
    pub reason: Error,
}

/// Reads every shard of `directories` and every block of `source`, and returns the blocks of which a file is missing
/// or damaged or holds other bytes than `source`.
///
/// `identity` is that of the checkpoint behind `source`, as for [`write_shards`](super::write_shards).
/// `directories` are the folders that [`write_shards`](super::write_shards) was given, or the first of them.
///
/// # Errors
/// As [`Manifest::read`]; [`Error::File`] when the shards are of another checkpoint or layout, are striped
/// over other folders, or a folder is missing; [`Error::Usage`] without directories; whatever `source` returns.
pub fn verify_shards(
    source: &dyn BlockSource,
    identity: &str,
    directories: &[PathBuf],
    progress: &mut dyn FnMut(ShardProgress<'_>),
) -> Result<Vec<Damage>> {
    let Some(home) = directories.first() else {
        return Err(Error::usage("shards are checked in at least one folder"));
    };
    let manifest = Manifest::read(home)?;
    manifest.check_identity(home, Some(identity))?;
    let listed = stripes::directories(&manifest, home)?;
    let given: Vec<_> = directories.iter().filter_map(|path| path.canonicalize().ok()).collect();
    if directories.len() > 1 && !manifest.is_over(home, &given) {
        let listed: Vec<_> = manifest.directories.iter().map(|path| home.join(path)).collect();
        let message = format!(
            "its shards are striped over {}, not over the folders given; name these, in this order",
            names(&listed)
        );
        return Err(Error::file(home, message));
    }
    if !manifest.blocks.iter().map(|entry| &entry.block).eq(source.blocks()) {
        let message = "its shards have other blocks than the model; write them again";
        return Err(Error::file(home, message));
    }
    let total_bytes = manifest.blocks.iter().map(|entry| entry.block.image_bytes as u64).sum();
    let (mut damaged, mut done_bytes) = (Vec::new(), 0);
    for (block, entry) in manifest.blocks.iter().enumerate() {
        let found = stripes::find_damage(source, block, entry, &listed)?;
        damaged.extend(found.map(|reason| Damage { block: entry.block.name.clone(), reason }));
        done_bytes += entry.block.image_bytes as u64;
        progress(ShardProgress { block: &entry.block.name, done_bytes, total_bytes });
    }
    Ok(damaged)
}

/// The folders as people write them after `--out`, without the `.` that stands for the manifest's own.
fn names(directories: &[PathBuf]) -> String {
    let name = |path: &PathBuf| path.components().collect::<PathBuf>().display().to_string();
    directories.iter().map(name).collect::<Vec<_>>().join(",")
}
