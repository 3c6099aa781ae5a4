//! What a folder of shards says of itself.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::claim::Claim;
use crate::block::BlockSpec;
use crate::checkpoint::check_streamed_first;
use crate::error::{Error, Result};

/// Name of the manifest in its folder.
pub const MANIFEST_FILE: &str = "manifest.json";
/// Notes the finished blocks until the manifest does.
pub(super) const JOURNAL_FILE: &str = "manifest.journal";
/// Version of manifest and files. Other versions are refused.
pub const SHARD_VERSION: u32 = 2;
/// Size of a stripe: bytes of an image that lie together and share a checksum. Reads that start and end on multiples of it (or at the
/// image's end) are verified without reading more than was asked for.
pub const CHUNK_BYTES: usize = 4 << 20;
/// What a manifest calls itself.
const FORMAT: &str = "blockstreamer-shards";

/// One block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardEntry {
    /// The block. Its image is what the files hold.
    pub block: BlockSpec,
    /// Name of its file in every folder that holds stripes of it.
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
    /// The folders that every block is striped over; relative ones start at the manifest's folder.
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
        let text = match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let message = match Claim::read(directory)? {
                    Some(claim) => format!(
                        "holds stripes of the shards in {}; name that folder",
                        claim.home.display()
                    ),
                    None => format!(
                        "holds no {MANIFEST_FILE}: no shards were written here, or the writing was interrupted; write them (again)"
                    ),
                };
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
        if manifest.directories.is_empty() {
            return Err("names no folder for the shards; write the shards again".to_owned());
        }
        for entry in &manifest.blocks {
            entry.check().map_err(|message| {
                format!("block '{}': {message}; write the shards again", entry.block.name)
            })?;
        }
        let placements =
            manifest.blocks.iter().map(|entry| (&*entry.block.name, entry.block.placement));
        check_streamed_first(placements).map_err(|error| error.to_string())?;
        Ok(manifest)
    }

    /// Whether the folders are `directories`, which are canonical paths, when the manifest's is `home`.
    pub(super) fn is_over(&self, home: &Path, directories: &[PathBuf]) -> bool {
        let same = |(listed, wanted): (&PathBuf, &PathBuf)| {
            fs::canonicalize(home.join(listed)).is_ok_and(|found| found == *wanted)
        };
        self.directories.len() == directories.len()
            && self.directories.iter().zip(directories).all(same)
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
}

/// Whether a manifest that cannot be used is an old or damaged one of ours.
///
/// # Errors
/// [`Error::Io`].
pub(super) fn is_ours(path: &Path) -> Result<bool> {
    let text = fs::read(path).map_err(Error::io("read", path))?;
    Ok(String::from_utf8_lossy(&text).contains(&format!("\"{FORMAT}\"")))
}

impl ShardEntry {
    /// Whether it is one that a writer could have written.
    fn check(&self) -> Result<(), String> {
        let Self { block, file, chunk_crc32 } = self;
        let tensors = block
            .tensors
            .iter()
            .map(|tensor| (tensor.name.clone(), tensor.dtype, tensor.shape.clone()));
        let packed = BlockSpec::pack(&block.name, block.placement, tensors);
        let mut packed = packed.map_err(|error| error.to_string())?;
        for (packed, tensor) in packed.tensors.iter_mut().zip(&block.tensors) {
            packed.is_transposed = tensor.is_transposed && tensor.shape.len() == 3;
        }
        if packed != *block {
            return Err("its tensors are not where they belong".to_owned());
        }
        if Path::new(file).file_name() != Some(file.as_ref()) {
            return Err(format!("its file '{file}' cannot be"));
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
}
