//! Writing shards, so that an interruption costs at most one block.
//!
//! Every finished file is noted in a journal beside the manifest-to-be. A later run keeps the files that
//! journal or manifest vouch for and whose checksums still match. The manifest comes last: without one,
//! a folder is no folder of shards.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::manifest::{CHUNK_BYTES, MANIFEST_FILE, Manifest, ShardEntry};
use crate::block::{BlockIndex, BlockSpec};
use crate::checkpoint::atomic::{AtomicFile, remove_partials, write_file};
use crate::error::{Error, Result};
use crate::source::BlockSource;

/// Notes the finished files until the manifest does.
const JOURNAL_FILE: &str = "manifest.journal";

/// How far the writing or verifying has come.
#[derive(Debug, Clone, Copy)]
pub struct ShardProgress<'a> {
    /// The block at hand.
    pub block: &'a str,
    /// Bytes of blocks that are done.
    pub done_bytes: u64,
    /// Bytes of all blocks.
    pub total_bytes: u64,
}

/// What [`write_shards`] did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShardSummary {
    /// Blocks written.
    pub num_written: usize,
    /// Blocks of an earlier run that were whole.
    pub num_kept: usize,
    /// Bytes of all blocks.
    pub total_bytes: u64,
}

/// One line of the journal.
#[derive(Serialize, Deserialize)]
struct JournalLine {
    identity: String,
    path: PathBuf,
    entry: ShardEntry,
}

/// Writes every block of `source` as a shard, dealt round over `directories`, then the manifest into the
/// first of them. Blocks of an earlier run are kept if they are whole.
///
/// `identity` is that of the checkpoint behind `source`
/// ([`Layout::identity`](crate::checkpoint::Layout::identity)).
///
/// # Errors
/// [`Error::Usage`] without directories; [`Error::File`] when a folder holds another kind of
/// `manifest.json`; [`Error::Io`], for example when the disk is full; whatever `source` returns. What was
/// finished before is kept for the next run, and no half-written file has a shard's name.
pub fn write_shards(
    source: &dyn BlockSource,
    identity: &str,
    directories: &[PathBuf],
    progress: &mut dyn FnMut(ShardProgress<'_>),
) -> Result<ShardSummary> {
    let Some(first) = directories.first() else {
        return Err(Error::usage("shards need at least one folder"));
    };
    for directory in directories {
        fs::create_dir_all(directory).map_err(Error::io("create", directory))?;
    }
    let absolute = directories
        .iter()
        .map(|directory| fs::canonicalize(directory).map_err(Error::io("find", directory)))
        .collect::<Result<Vec<_>>>()?;
    let vouched = vouched_files(first, identity)?;

    let mut journal = Journal::open(first)?;
    let total_bytes = source.blocks().iter().map(|spec| spec.image_bytes as u64).sum();
    let mut summary = ShardSummary { total_bytes, ..ShardSummary::default() };
    let mut entries = Vec::new();
    let mut done_bytes = 0;
    for (index, spec) in source.blocks().iter().enumerate() {
        progress(ShardProgress { block: &spec.name, done_bytes, total_bytes });
        let file = format!("block-{index:05}.bin");
        let directory = index % directories.len();
        let path = absolute[directory].join(&file);
        let kept = vouched.iter().find(|(vouched, entry)| {
            *vouched == path && entry.block == *spec && entry.verify(&path).is_ok()
        });
        let chunk_crc32 = match kept {
            Some((_, entry)) => entry.chunk_crc32.clone(),
            None => write_block(source, BlockIndex(index), spec, &path)
                .map_err(|error| error.in_block(&spec.name))?,
        };
        let entry = ShardEntry { block: spec.clone(), directory, file, chunk_crc32 };
        match kept {
            Some(_) => summary.num_kept += 1,
            None => {
                summary.num_written += 1;
                journal.note(&JournalLine {
                    identity: identity.to_owned(),
                    path,
                    entry: entry.clone(),
                })?;
            }
        }
        entries.push(entry);
        done_bytes += spec.image_bytes as u64;
        progress(ShardProgress { block: &spec.name, done_bytes, total_bytes });
    }
    // The first folder may be moved together with its manifest.
    let mut listed = absolute;
    listed[0] = PathBuf::from(".");
    let text = to_json(&Manifest::new(identity, listed, entries))?;
    write_file(&first.join(MANIFEST_FILE), &text)?;
    journal.remove()?;
    Ok(summary)
}

/// The files that a manifest or a journal of the same checkpoint vouch for. A manifest of another one
/// is removed: from now on it would describe files that change.
fn vouched_files(directory: &Path, identity: &str) -> Result<Vec<(PathBuf, ShardEntry)>> {
    let manifest_path = directory.join(MANIFEST_FILE);
    let journal_path = directory.join(JOURNAL_FILE);
    let mut vouched = Vec::new();
    if manifest_path.exists() {
        let manifest = Manifest::read(directory);
        match manifest {
            Ok(manifest) if manifest.identity == identity => {
                for entry in &manifest.blocks {
                    if let Ok(path) = fs::canonicalize(manifest.path(directory, entry)) {
                        vouched.push((path, entry.clone()));
                    }
                }
            }
            _ if !is_ours(&manifest_path)? => {
                let message =
                    "was not written by this program; choose another folder for the shards";
                return Err(Error::file(manifest_path, message));
            }
            _ => fs::remove_file(&manifest_path).map_err(Error::io("remove", &manifest_path))?,
        }
    }
    match fs::read_to_string(&journal_path) {
        // The last line may be torn; then its block is written again.
        Ok(text) => vouched.extend(
            text.lines()
                .filter_map(|line| serde_json::from_str::<JournalLine>(line).ok())
                .filter(|line| line.identity == identity)
                .map(|line| (line.path, line.entry)),
        ),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(Error::io("read", journal_path)(error)),
    }
    // The latest word on a file counts.
    vouched.reverse();
    Ok(vouched)
}

/// Whether a manifest that cannot be used is an old or damaged one of ours.
fn is_ours(path: &Path) -> Result<bool> {
    let text = fs::read(path).map_err(Error::io("read", path))?;
    Ok(String::from_utf8_lossy(&text).contains("\"blockstreamer-shards\""))
}

/// Writes one block and returns its checksums.
fn write_block(
    source: &dyn BlockSource,
    block: BlockIndex,
    spec: &BlockSpec,
    path: &Path,
) -> Result<Vec<u32>> {
    remove_partials(path)?;
    let mut file = AtomicFile::create(path)?;
    let mut checksums = Vec::new();
    let mut buffer = vec![0; CHUNK_BYTES.min(spec.image_bytes)];
    for start in (0..spec.image_bytes).step_by(CHUNK_BYTES) {
        let end = (start + CHUNK_BYTES).min(spec.image_bytes);
        let chunk = &mut buffer[..end - start];
        source.read(block, start..end, chunk)?;
        checksums.push(crc32fast::hash(chunk));
        file.write(chunk)?;
    }
    let padded = spec.image_bytes.next_multiple_of(super::manifest::FILE_ALIGNMENT_BYTES);
    file.write(&vec![0; padded - spec.image_bytes])?;
    file.commit()?;
    Ok(checksums)
}

struct Journal {
    file: File,
    path: PathBuf,
}

impl Journal {
    fn open(directory: &Path) -> Result<Self> {
        let path = directory.join(JOURNAL_FILE);
        let file = File::options().create(true).append(true).open(&path);
        Ok(Self { file: file.map_err(Error::io("write", &path))?, path })
    }

    fn note(&mut self, line: &JournalLine) -> Result<()> {
        // The line break comes first: it also ends a line that an interruption tore.
        let mut text = vec![b'\n'];
        text.extend(to_json(line)?);
        let written = self.file.write_all(&text).and_then(|()| self.file.sync_data());
        written.map_err(Error::io("write", &self.path))
    }

    fn remove(self) -> Result<()> {
        fs::remove_file(&self.path).map_err(Error::io("remove", &self.path))
    }
}

fn to_json(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|error| {
        Error::usage(format!("cannot be written as JSON ({error}); use folder names in UTF-8"))
    })
}
