//! What a folder of shards says of itself.

use std::fs::File;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::block::BlockSpec;
use crate::checkpoint::{check_streamed_first, open, read_exact_at};
use crate::error::{Error, Result};

/// Name of the manifest in its folder.
pub const MANIFEST_FILE: &str = "manifest.json";
/// Version of manifest and files. Other versions are refused.
pub const SHARD_VERSION: u32 = 1;
/// Bytes of an image that share a checksum. Reads that start and end on multiples of it (or at the
/// image's end) are verified without reading more than was asked for.
pub const CHUNK_BYTES: usize = 4 << 20;
/// Files are padded to a multiple of this, so that they can be read past the page cache.
pub(super) const FILE_ALIGNMENT_BYTES: usize = 4096;
/// What a manifest calls itself.
const FORMAT: &str = "blockstreamer-shards";

/// The file of one block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardEntry {
    /// The block. Its image is what the file holds.
    pub block: BlockSpec,
    /// Position in [`Manifest::directories`].
    pub directory: usize,
    /// File name.
    pub file: String,
    /// CRC-32 of every [`CHUNK_BYTES`] of the image.
    pub chunk_crc32: Vec<u32>,
}

/// The content of `manifest.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    format: String,
    /// [`SHARD_VERSION`] of the writer.
    pub version: u32,
    /// Which program wrote it.
    pub tool: String,
    /// Identity of the checkpoint and layout that the shards were made from.
    pub identity: String,
    /// The folders of the files; relative ones start at the manifest's folder.
    pub directories: Vec<PathBuf>,
    /// The blocks in order.
    pub blocks: Vec<ShardEntry>,
}

impl Manifest {
    pub(super) fn new(identity: &str, directories: Vec<PathBuf>, blocks: Vec<ShardEntry>) -> Self {
        Self {
            format: FORMAT.to_owned(),
            version: SHARD_VERSION,
            tool: concat!("blockstreamer-core ", env!("CARGO_PKG_VERSION")).to_owned(),
            identity: identity.to_owned(),
            directories,
            blocks,
        }
    }

    /// Reads and checks the manifest of the folder `directory`. The files are not looked at.
    ///
    /// # Errors
    /// [`Error::File`] when there is none, it is damaged, or another version wrote it.
    pub fn read(directory: &Path) -> Result<Self> {
        let path = directory.join(MANIFEST_FILE);
        let text = match std::fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let message = format!(
                    "holds no {MANIFEST_FILE}: no shards were written here, or the writing was interrupted; write them (again)"
                );
                return Err(Error::file(directory, message));
            }
            result => result.map_err(Error::io("read", &path))?,
        };
        Self::parse(&text).map_err(|message| Error::file(path, message))
    }

    fn parse(text: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Head {
            format: Option<String>,
            version: Option<u32>,
        }
        let head: Head = serde_json::from_slice(text)
            .map_err(|error| format!("is damaged ({error}); write the shards again"))?;
        if head.format.as_deref() != Some(FORMAT) {
            return Err(format!("is not a manifest of shards (its format is not \"{FORMAT}\")"));
        }
        if head.version != Some(SHARD_VERSION) {
            let found = head.version.map_or("none".to_owned(), |version| version.to_string());
            return Err(format!(
                "has version {found}, but this program reads version {SHARD_VERSION}; write the shards again"
            ));
        }
        let manifest: Self = serde_json::from_slice(text)
            .map_err(|error| format!("is damaged ({error}); write the shards again"))?;
        for entry in &manifest.blocks {
            manifest.check(entry).map_err(|message| {
                format!("block '{}': {message}; write the shards again", entry.block.name)
            })?;
        }
        let placements =
            manifest.blocks.iter().map(|entry| (&*entry.block.name, entry.block.placement));
        check_streamed_first(placements).map_err(|error| error.to_string())?;
        Ok(manifest)
    }

    /// Refuses shards of another checkpoint or layout than `expected`, if one is given.
    pub(super) fn check_identity(&self, directory: &Path, expected: Option<&str>) -> Result<()> {
        match expected.filter(|expected| *expected != self.identity) {
            None => Ok(()),
            Some(expected) => {
                let message = format!(
                    "the shards were made from another checkpoint or layout (identity {}, now {expected}); write them again",
                    self.identity
                );
                Err(Error::file(directory, message))
            }
        }
    }

    /// Whether an entry is one that a writer could have written.
    fn check(
        &self,
        ShardEntry { block, directory, file, chunk_crc32 }: &ShardEntry,
    ) -> Result<(), String> {
        let tensors = block
            .tensors
            .iter()
            .map(|tensor| (tensor.name.clone(), tensor.dtype, tensor.shape.clone()));
        let packed = BlockSpec::pack(&block.name, block.placement, tensors);
        if packed.map_err(|error| error.to_string())? != *block {
            return Err("its tensors are not where they belong".to_owned());
        }
        if *directory >= self.directories.len()
            || Path::new(file).file_name() != Some(file.as_ref())
        {
            return Err(format!("its file '{file}' in folder {directory} cannot be"));
        }
        if chunk_crc32.len() != block.image_bytes.div_ceil(CHUNK_BYTES) {
            return Err(format!(
                "it has {} checksums for {} bytes",
                chunk_crc32.len(),
                block.image_bytes
            ));
        }
        Ok(())
    }

    /// The path of an entry's file when the manifest is in `directory`.
    pub(super) fn path(&self, directory: &Path, entry: &ShardEntry) -> PathBuf {
        let path = directory.join(&self.directories[entry.directory]).join(&entry.file);
        // People read it: without the `.` that stands for the manifest's own folder.
        path.components().collect()
    }
}

impl ShardEntry {
    /// Size of the file.
    pub(super) fn file_bytes(&self) -> u64 {
        self.block.image_bytes.next_multiple_of(FILE_ALIGNMENT_BYTES) as u64
    }

    /// The part of the image that checksum number `chunk` covers.
    pub(super) fn chunk(&self, chunk: usize) -> Range<usize> {
        chunk * CHUNK_BYTES..((chunk + 1) * CHUNK_BYTES).min(self.block.image_bytes)
    }

    /// Opens the file, which must have the right size.
    pub(super) fn open(&self, path: &Path) -> Result<File> {
        let file = open(path)?;
        let found = file.metadata().map_err(Error::io("inspect", path))?.len();
        let expected = self.file_bytes();
        if found != expected {
            let message = format!(
                "has {found} bytes instead of the {expected} of block '{}'; write the shards again",
                self.block.name
            );
            return Err(Error::file(path, message));
        }
        Ok(file)
    }

    /// Reads chunk number `chunk` and compares its checksum.
    pub(super) fn read_chunk(
        &self,
        file: &File,
        path: &Path,
        chunk: usize,
        into: &mut [u8],
    ) -> Result<()> {
        let Range { start, end } = self.chunk(chunk);
        read_exact_at(file, path, start as u64, into)?;
        if crc32fast::hash(into) != self.chunk_crc32[chunk] {
            let message = format!(
                "bytes {start} to {end} of block '{}' do not match their checksum; the file is damaged: write the shards again",
                self.block.name
            );
            return Err(Error::file(path, message));
        }
        Ok(())
    }

    /// Reads the whole image and compares every checksum.
    pub(super) fn verify(&self, path: &Path) -> Result<()> {
        let file = self.open(path)?;
        let mut buffer = vec![0; CHUNK_BYTES.min(self.block.image_bytes)];
        (0..self.chunk_crc32.len()).try_for_each(|chunk| {
            self.read_chunk(&file, path, chunk, &mut buffer[..self.chunk(chunk).len()])
        })
    }
}
