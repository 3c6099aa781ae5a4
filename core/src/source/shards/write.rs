//! Writing shards, so that an interruption costs at most one block.
//!
//! Every finished block is noted in a journal beside the manifest-to-be. A later run keeps the blocks that
//! journal or manifest vouch for and which still hold the bytes of the source. The manifest comes last: without one,
//! a folder is no folder of shards.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::claim::{check_free, claim};
use super::manifest::{CHUNK_BYTES, JOURNAL_FILE, MANIFEST_FILE, Manifest, ShardEntry, is_ours};
use super::stripes::{Stripes, find_damage};
use crate::block::BlockIndex;
use crate::checkpoint::atomic::{AtomicFile, remove_partials, write_file};
use crate::error::{Error, Result};
use crate::source::BlockSource;

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
    #[serde(flatten)]
    finished: Finished,
}

/// A block whose files were whole when this was noted.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Finished {
    block: usize,
    directories: Vec<PathBuf>,
    entry: ShardEntry,
}

/// Writes every block of `source` as shards, striped over `directories`, then the manifest into the
/// first of them. Blocks of an earlier run are kept if they are whole.
///
/// `identity` is that of the checkpoint behind `source`
/// ([`Layout::identity`](crate::checkpoint::Layout::identity)).
///
/// # Errors
/// [`Error::Usage`] without directories; [`Error::File`] when one is given twice, holds another kind
/// of `manifest.json`, or holds other shards than those whose manifest is in the first; [`Error::Io`], for example when the disk is full; whatever `source` returns. What
/// was finished before is kept for the next run, and no half-written file has a shard's name.
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
    for (position, directory) in absolute.iter().enumerate() {
        if absolute[..position].contains(directory) {
            return Err(Error::file(directory, "is given twice; name every folder once"));
        }
    }
    check_free(&absolute)?;
    let vouched = vouched_blocks(first, identity, &absolute)?;
    claim(&absolute, identity)?;

    let mut journal = Journal::open(first)?;
    let total_bytes = source.blocks().iter().map(|spec| spec.image_bytes as u64).sum();
    let mut summary = ShardSummary { total_bytes, ..ShardSummary::default() };
    let mut entries = Vec::new();
    let mut done_bytes = 0;
    for (index, spec) in source.blocks().iter().enumerate() {
        progress(ShardProgress { block: &spec.name, done_bytes, total_bytes });
        let file = format!("block-{index:05}.bin");
        let mut candidates = vouched.iter().filter(|finished| {
            finished.block == index
                && finished.directories == absolute
                && finished.entry.block == *spec
                && finished.entry.file == file
        });
        let kept = candidates.find_map(|Finished { entry, .. }| {
            let damage = find_damage(source, index, entry, &absolute);
            damage.map(|damage| damage.is_none().then_some(entry)).transpose()
        });
        let entry = match kept.transpose()? {
            Some(entry) => {
                summary.num_kept += 1;
                entry.clone()
            }
            None => {
                let entry = write_block(source, BlockIndex(index), &absolute, file)
                    .map_err(|error| error.in_block(&spec.name))?;
                summary.num_written += 1;
                journal.note(&JournalLine {
                    identity: identity.to_owned(),
                    finished: Finished {
                        block: index,
                        directories: absolute.clone(),
                        entry: entry.clone(),
                    },
                })?;
                entry
            }
        };
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

/// The blocks that a manifest or a journal of the same checkpoint and folders vouch for. A manifest of
/// others is removed: from now on it would describe files that change.
fn vouched_blocks(
    directory: &Path,
    identity: &str,
    directories: &[PathBuf],
) -> Result<Vec<Finished>> {
    let manifest_path = directory.join(MANIFEST_FILE);
    let journal_path = directory.join(JOURNAL_FILE);
    let mut vouched = Vec::new();
    if manifest_path.exists() {
        match Manifest::read(directory) {
            Ok(manifest)
                if manifest.identity == identity && manifest.is_over(directory, directories) =>
            {
                let entries = manifest.blocks.into_iter().enumerate();
                vouched.extend(entries.map(|(block, entry)| Finished {
                    block,
                    directories: directories.to_vec(),
                    entry,
                }));
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
                .map(|line| line.finished),
        ),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(Error::io("read", journal_path)(error)),
    }
    // The latest word on a block counts.
    vouched.reverse();
    Ok(vouched)
}

/// Writes the files of one block, named `file` in every folder, and describes them.
fn write_block(
    source: &dyn BlockSource,
    block: BlockIndex,
    directories: &[PathBuf],
    file: String,
) -> Result<ShardEntry> {
    let spec = &source.blocks()[block.0];
    let stripes = Stripes::new(block.0, spec.image_bytes, directories.len());
    let mut files = BTreeMap::new();
    for folder in stripes.folders() {
        let path = directories[folder].join(&file);
        remove_partials(&path)?;
        files.insert(folder, (AtomicFile::create(&path)?, 0_u64));
    }
    let mut chunk_crc32 = Vec::new();
    let mut buffer = vec![0; CHUNK_BYTES.min(spec.image_bytes)];
    for stripe in 0..stripes.num_stripes() {
        let range = stripes.range(stripe);
        let bytes = &mut buffer[..range.len()];
        source.read(block, range, bytes)?;
        chunk_crc32.push(crc32fast::hash(bytes));
        if let Some((file, written)) = files.get_mut(&stripes.place(stripe).0) {
            file.write(bytes)?;
            *written += bytes.len() as u64;
        }
    }
    for (folder, (file, written)) in &mut files {
        file.write(&vec![0; (stripes.file_bytes(*folder) - *written) as usize])?;
    }
    // Bringing bytes to a disk takes its time; the disks take it together.
    std::thread::scope(|scope| {
        let commits: Vec<_> =
            files.into_values().map(|(file, _)| scope.spawn(|| file.commit())).collect();
        commits.into_iter().try_for_each(|commit| {
            commit.join().unwrap_or_else(|_| Err(Error::usage("writing shards panicked")))
        })
    })?;
    Ok(ShardEntry { block: spec.clone(), file, chunk_crc32 })
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

pub(super) fn to_json(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|error| {
        Error::usage(format!("cannot be written as JSON ({error}); use folder names in UTF-8"))
    })
}
