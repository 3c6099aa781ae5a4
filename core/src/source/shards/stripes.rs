//! Where the stripes of a block lie, and the files that hold them.
//!
//! Every block is cut into stripes of [`CHUNK_BYTES`] (the last may be shorter), which are dealt over all
//! folders: stripe `i` of block `b` lies in folder `(b + i) % num_folders`, in that folder's file of the
//! block, one after another. So every block comes from all folders (disks) at once, and short blocks
//! are spread evenly too.

use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;

use super::claim::check_claims;
use super::manifest::{CHUNK_BYTES, Manifest, ShardEntry};
use crate::block::BlockIndex;
use crate::checkpoint::{open, read_exact_at};
use crate::error::{Error, Result};
use crate::source::{BlockSource, Extent, push_extent};

/// Files are padded to a multiple of this, so that they can be read past the page cache.
const FILE_ALIGNMENT_BYTES: usize = 4096;

/// How one block is dealt over the folders.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stripes {
    block: usize,
    image_bytes: usize,
    num_folders: usize,
}

impl Stripes {
    /// Of block number `block` over `num_folders` folders, of which there is at least one.
    pub(super) fn new(block: usize, image_bytes: usize, num_folders: usize) -> Self {
        Self { block, image_bytes, num_folders: num_folders.max(1) }
    }

    pub(super) fn num_stripes(self) -> usize {
        self.image_bytes.div_ceil(CHUNK_BYTES)
    }

    /// The part of the image that stripe number `stripe` is.
    pub(super) fn range(self, stripe: usize) -> Range<usize> {
        stripe * CHUNK_BYTES..((stripe + 1) * CHUNK_BYTES).min(self.image_bytes)
    }

    /// The folder of a stripe, and where it starts in that folder's file.
    pub(super) fn place(self, stripe: usize) -> (usize, u64) {
        let folder = (self.block + stripe) % self.num_folders;
        (folder, (stripe / self.num_folders * CHUNK_BYTES) as u64)
    }

    /// The folders that hold a file of the block. A block without bytes still has one, which is empty.
    pub(super) fn folders(self) -> impl Iterator<Item = usize> {
        let num_files = self.num_stripes().clamp(1, self.num_folders);
        (0..num_files).map(move |position| (self.block + position) % self.num_folders)
    }

    /// Size of the file in `folder`, padding included.
    pub(super) fn file_bytes(self, folder: usize) -> u64 {
        let stripes = (0..self.num_stripes()).filter(|stripe| self.place(*stripe).0 == folder);
        let num_bytes: usize = stripes.map(|stripe| self.range(stripe).len()).sum();
        num_bytes.next_multiple_of(FILE_ALIGNMENT_BYTES) as u64
    }
}

/// The open files of one block.
#[derive(Debug)]
pub(super) struct BlockFiles {
    pub(super) entry: ShardEntry,
    stripes: Stripes,
    files: Vec<FolderFile>,
}

/// The file of a block in one folder.
#[derive(Debug)]
struct FolderFile {
    folder: usize,
    path: PathBuf,
    file: File,
}

impl BlockFiles {
    /// Opens the files of block number `block`, which must have the right sizes. `directories` are the
    /// folders as the system finds them.
    ///
    /// # Errors
    /// [`Error::Io`] when one cannot be opened; [`Error::File`] when one has another size.
    pub(super) fn open(entry: &ShardEntry, block: usize, directories: &[PathBuf]) -> Result<Self> {
        let stripes = Stripes::new(block, entry.block.image_bytes, directories.len());
        let open = |folder: usize| {
            // People read it: without the `.` that stands for the manifest's own folder.
            let path: PathBuf = directories[folder].join(&entry.file).components().collect();
            let file = open(&path)?;
            let found = file.metadata().map_err(Error::io("inspect", &path))?.len();
            let expected = stripes.file_bytes(folder);
            if found != expected {
                let message = format!(
                    "has {found} bytes instead of the {expected} of block '{}'; write the shards again",
                    entry.block.name
                );
                return Err(Error::file(path, message));
            }
            Ok(FolderFile { folder, path, file })
        };
        let files = stripes.folders().map(open).collect::<Result<_>>()?;
        Ok(Self { entry: entry.clone(), stripes, files })
    }

    /// The paths of the files.
    pub(super) fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        self.files.iter().map(|file| &file.path)
    }

    /// The stripes that `range` of the image touches.
    pub(super) fn touched(&self, range: &Range<usize>) -> Range<usize> {
        range.start / CHUNK_BYTES..range.end.div_ceil(CHUNK_BYTES)
    }

    /// The part of the image that stripe number `stripe` is.
    pub(super) fn range(&self, stripe: usize) -> Range<usize> {
        self.stripes.range(stripe)
    }

    /// Reads a part of a stripe: `range` of the image, which lies inside it.
    pub(super) fn read(&self, stripe: usize, range: Range<usize>, into: &mut [u8]) -> Result<()> {
        let (FolderFile { path, file, .. }, start) = self.place(stripe);
        let skipped = range.start - self.range(stripe).start;
        read_exact_at(file, path, start + skipped as u64, into)
    }

    /// Reads stripe number `stripe` and compares its checksum.
    pub(super) fn read_checked(&self, stripe: usize, into: &mut [u8]) -> Result<()> {
        self.read(stripe, self.range(stripe), into)?;
        self.check(stripe, into)
    }

    /// Compares the bytes of a stripe with its checksum.
    ///
    /// # Errors
    /// [`Error::File`] naming the file of the stripe.
    pub(super) fn check(&self, stripe: usize, bytes: &[u8]) -> Result<()> {
        if crc32fast::hash(bytes) == self.entry.chunk_crc32[stripe] {
            return Ok(());
        }
        let Range { start, end } = self.range(stripe);
        let message = format!(
            "bytes {start} to {end} of block '{}' do not match their checksum; the file is damaged: write the shards again",
            self.entry.block.name
        );
        Err(Error::file(&self.place(stripe).0.path, message))
    }

    /// Where the image lies, when the files of this block are numbered from `first_file` on.
    pub(super) fn extents(&self, first_file: usize) -> Vec<Extent> {
        let mut extents = Vec::new();
        for stripe in 0..self.stripes.num_stripes() {
            let range = self.range(stripe);
            let (folder, file_offset_bytes) = self.stripes.place(stripe);
            let extent = Extent {
                file: first_file + self.position(folder),
                file_offset_bytes,
                image_offset_bytes: range.start,
                num_bytes: range.len(),
            };
            push_extent(&mut extents, extent);
        }
        extents
    }

    fn place(&self, stripe: usize) -> (&FolderFile, u64) {
        let (folder, start) = self.stripes.place(stripe);
        (&self.files[self.position(folder)], start)
    }

    /// The folder's place in `files`, which holds every folder with a stripe.
    fn position(&self, folder: usize) -> usize {
        self.files.iter().position(|file| file.folder == folder).unwrap_or_default()
    }
}

/// What is wrong with the shards of block number `block` of `source`, which `entry` describes: a file is missing
/// or damaged, or holds other bytes than `source` does. Both are read whole.
///
/// # Errors
/// Whatever `source` returns.
pub(super) fn find_damage(
    source: &dyn BlockSource,
    block: usize,
    entry: &ShardEntry,
    directories: &[PathBuf],
) -> Result<Option<Error>> {
    let files = match BlockFiles::open(entry, block, directories) {
        Ok(files) => files,
        Err(reason) => return Ok(Some(reason)),
    };
    let mut found = vec![0; CHUNK_BYTES.min(entry.block.image_bytes)];
    let mut expected = found.clone();
    for stripe in 0..files.stripes.num_stripes() {
        let range = files.range(stripe);
        let found = &mut found[..range.len()];
        let expected = &mut expected[..range.len()];
        if let Err(reason) = files.read_checked(stripe, found) {
            return Ok(Some(reason));
        }
        source
            .read(BlockIndex(block), range.clone(), expected)
            .map_err(|error| error.in_block(&entry.block.name))?;
        if found != expected {
            let message = format!(
                "bytes {} to {} of block '{}' match their checksum but not the {}, changed since; if these are right, write the shards again",
                range.start,
                range.end,
                entry.block.name,
                source.describe()
            );
            return Ok(Some(Error::file(&files.place(stripe).0.path, message)));
        }
    }
    Ok(None)
}

/// The folders of `manifest` as the system finds them, all of which must exist and hold its stripes.
///
/// # Errors
/// [`Error::File`] naming the one that is missing or holds others.
pub(super) fn directories(manifest: &Manifest, home: &std::path::Path) -> Result<Vec<PathBuf>> {
    let find = |directory: &PathBuf| {
        let path = home.join(directory);
        if path.is_dir() {
            return Ok(path);
        }
        let message = format!(
            "is missing, and the shards of {} are striped over it; bring the folder back (is the disk mounted?) or write the shards again",
            home.display()
        );
        Err(Error::file(path, message))
    };
    let directories = manifest.directories.iter().map(find).collect::<Result<Vec<_>>>()?;
    check_claims(manifest, &directories)?;
    Ok(directories)
}
