//! Random blocks: in pinned memory, and in files.

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use blockstreamer_core::block::{BlockIndex, BlockSpec, Placement};
use blockstreamer_core::checkpoint::atomic::AtomicFile;
use blockstreamer_core::device::HostBuffer;
use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::plan::host_budget_bytes;
use blockstreamer_core::source::{BlockSource, Extent};
use tch::Device;

use super::random;
use crate::size::Size;

/// Bytes written to a file at once.
const PIECE_BYTES: usize = 16 << 20;
/// Bytes at both ends of a file that tell whether it is the one that would be written.
const END_BYTES: usize = 64;

fn specs(num_blocks: usize, block_bytes: usize) -> Result<Vec<BlockSpec>> {
    let spec = |block| {
        let bytes = ("bytes".to_owned(), Dtype::U8, vec![block_bytes]);
        BlockSpec::pack(format!("block.{block}"), Placement::Streamed, [bytes])
    };
    Ok((0..num_blocks).map(spec).collect::<Result<_, _>>()?)
}

/// Blocks whose images are lent from pinned memory. Where memory is short there are fewer images than
/// blocks and they take turns: every copy still reads all its bytes from memory, because an image is
/// far larger than a cache.
#[derive(Debug)]
pub(super) struct Images {
    blocks: Vec<BlockSpec>,
    images: Vec<HostBuffer>,
}

impl Images {
    /// As many distinct images as blocks, or as fit into the memory that a run may take.
    pub(super) fn new(num_blocks: usize, block_bytes: usize, device: Device) -> Result<Self> {
        let blocks = specs(num_blocks, block_bytes)?;
        let image_bytes = blocks.first().map_or(0, |block| block.image_bytes);
        let free_bytes = host_budget_bytes()?;
        let fit = free_bytes / image_bytes.max(1) as u64;
        if fit == 0 {
            bail!(
                "a block of {} does not fit the {} of memory that are free: choose a smaller --block-size",
                Size { num_bytes: image_bytes as u64 },
                Size { num_bytes: free_bytes }
            );
        }
        let wanted = num_blocks.min(usize::try_from(fit).unwrap_or(usize::MAX));
        let mut images: Vec<HostBuffer> = Vec::with_capacity(wanted);
        while images.len() < wanted {
            let mut image = match HostBuffer::for_device(image_bytes, device) {
                Ok(image) => image,
                // What may be page-locked is not known before.
                Err(error) if images.len() >= 2 => {
                    tracing::warn!("going on with {} images: {error}", images.len());
                    break;
                }
                Err(error) => return Err(error.into()),
            };
            random::fill_on_all_cores(images.len() as u64, image.bytes_mut());
            images.push(image);
        }
        Ok(Self { blocks, images })
    }

    pub(super) fn num_images(&self) -> usize {
        self.images.len()
    }
}

impl BlockSource for Images {
    fn describe(&self) -> String {
        format!("{} random images in host memory", self.images.len())
    }

    fn blocks(&self) -> &[BlockSpec] {
        &self.blocks
    }

    /// Returns 0: nothing comes from storage.
    fn read(
        &self,
        block: BlockIndex,
        range: Range<usize>,
        into: &mut [u8],
    ) -> blockstreamer_core::Result<usize> {
        if let Some(image) = self.lend(block) {
            into.copy_from_slice(&image.bytes()[range]);
        }
        Ok(0)
    }

    fn lend(&self, block: BlockIndex) -> Option<&HostBuffer> {
        self.images.get(block.0 % self.images.len().max(1))
    }
}

/// Blocks in files of a folder, one each, without header or padding.
#[derive(Debug)]
pub(super) struct Files {
    blocks: Vec<BlockSpec>,
    files: Vec<(PathBuf, File)>,
}

impl Files {
    /// Writes the files that are not in `folder` already, with the right size and content at both ends.
    pub(super) fn prepare(folder: &Path, num_blocks: usize, block_bytes: usize) -> Result<Self> {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot make the folder {}", folder.display()))?;
        let path = |block| folder.join(format!("block-{block:04}-{block_bytes}.bin"));
        let missing: Vec<usize> =
            (0..num_blocks).filter(|block| !is_whole(&path(*block), *block, block_bytes)).collect();
        let needed_bytes = missing.len() as u64 * block_bytes as u64;
        let free_bytes = free_bytes(folder)?;
        if needed_bytes > free_bytes {
            bail!(
                "{} more blocks are to be written, {} in all, and {} has {} left: choose another --dir, \
                 or fewer or smaller blocks",
                missing.len(),
                Size { num_bytes: needed_bytes },
                folder.display(),
                Size { num_bytes: free_bytes }
            );
        }
        if !missing.is_empty() {
            let size = Size { num_bytes: needed_bytes };
            tracing::info!("writing {} blocks, {size}, to {}", missing.len(), folder.display());
        }
        for block in missing {
            write(&path(block), block, block_bytes)?;
        }
        let open = |block| {
            let path = path(block);
            let file =
                File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
            Ok((path, file))
        };
        let files = (0..num_blocks).map(open).collect::<Result<_>>()?;
        Ok(Self { blocks: specs(num_blocks, block_bytes)?, files })
    }

    /// Asks the system to forget what it has cached of the files.
    pub(super) fn drop_cached(&self) -> Result<()> {
        self.files.iter().try_for_each(|(path, file)| drop_cached(path, file))
    }
}

/// Asks the system to forget what it has cached of a file.
pub(super) fn drop_cached(path: &Path, file: &File) -> Result<()> {
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)
        .with_context(|| format!("cannot drop {} from the page cache", path.display()))
}

fn free_bytes(folder: &Path) -> Result<u64> {
    let stat = rustix::fs::statvfs(folder)
        .with_context(|| format!("cannot ask how much room {} has", folder.display()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Whether the file is there with the size and the ends that [`write`] gives it.
fn is_whole(path: &Path, block: usize, block_bytes: usize) -> bool {
    let Ok(file) = File::open(path) else { return false };
    if file.metadata().map_or(true, |metadata| metadata.len() != block_bytes as u64) {
        return false;
    }
    let tail_start = block_bytes.saturating_sub(END_BYTES) / PIECE_BYTES * PIECE_BYTES;
    let mut piece = vec![0; PIECE_BYTES.min(block_bytes)];
    [0, tail_start].into_iter().all(|start| {
        let end = (start + PIECE_BYTES).min(block_bytes);
        random::fill(piece_seed(block, start), &mut piece[..end - start]);
        let at = if start == 0 { 0 } else { (end - start).saturating_sub(END_BYTES) };
        let wanted = &piece[at..(at + END_BYTES).min(end - start)];
        let mut found = [0; END_BYTES];
        let found = &mut found[..wanted.len()];
        file.read_exact_at(found, (start + at) as u64).is_ok() && found == wanted
    })
}

fn write(path: &Path, block: usize, block_bytes: usize) -> Result<()> {
    let mut file = AtomicFile::create(path)?;
    let mut piece = vec![0; PIECE_BYTES.min(block_bytes)];
    for start in (0..block_bytes).step_by(PIECE_BYTES) {
        let piece = &mut piece[..PIECE_BYTES.min(block_bytes - start)];
        random::fill(piece_seed(block, start), piece);
        file.write(piece)?;
    }
    Ok(file.commit()?)
}

fn piece_seed(block: usize, start: usize) -> u64 {
    random::value(block as u64, start as u64)
}

impl BlockSource for Files {
    fn describe(&self) -> String {
        let folder = self.files.first().and_then(|(path, _)| path.parent());
        format!("random files in {}", folder.unwrap_or(Path::new("no folder")).display())
    }

    fn blocks(&self) -> &[BlockSpec] {
        &self.blocks
    }

    fn read(
        &self,
        block: BlockIndex,
        range: Range<usize>,
        into: &mut [u8],
    ) -> blockstreamer_core::Result<usize> {
        let (path, file) = &self.files[block.0];
        // The image ends with padding that no file holds.
        let payload = self.blocks[block.0].payload_bytes();
        let num_bytes = range.end.min(payload).saturating_sub(range.start);
        let (from_file, padding) = into.split_at_mut(num_bytes);
        padding.fill(0);
        file.read_exact_at(from_file, range.start as u64)
            .map_err(blockstreamer_core::Error::io("read", path))?;
        Ok(num_bytes)
    }

    fn files(&self) -> Vec<&Path> {
        self.files.iter().map(|(path, _)| path.as_path()).collect()
    }

    fn extents(&self, block: BlockIndex) -> Option<Vec<Extent>> {
        let num_bytes = self.blocks.get(block.0)?.payload_bytes();
        Some(vec![Extent { file: block.0, file_offset_bytes: 0, image_offset_bytes: 0, num_bytes }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(source: &dyn BlockSource, block: usize) -> Vec<u8> {
        let mut bytes = vec![7; source.blocks()[block].image_bytes];
        let range = 0..bytes.len();
        source.read(BlockIndex(block), range, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn files_are_used_again_and_written_anew_when_they_are_not_what_they_should_be() {
        let folder = tempfile::tempdir().unwrap();
        let first = Files::prepare(folder.path(), 2, 5000).unwrap();
        let (images, paths): (Vec<_>, Vec<_>) =
            (0..2).map(|block| (image(&first, block), first.files[block].0.clone())).unzip();
        assert_ne!(images[0], images[1]);
        assert_eq!((images[0].len(), &images[0][5000..]), (5120, &[0; 120][..]));
        let written = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
        let before = written(&paths[1]);
        for damage in [&[0; 5000][..], &[1; 10], &[[0_u8; 4990].as_slice(), &[1; 10]].concat()] {
            fs::write(&paths[0], damage).unwrap();
            let again = Files::prepare(folder.path(), 2, 5000).unwrap();
            assert_eq!(image(&again, 0), images[0]);
            assert_eq!(image(&again, 1), images[1]);
        }
        assert_eq!(written(&paths[1]), before, "a whole file was written again");
    }

    #[test]
    fn more_than_the_disk_holds_is_refused_before_anything_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let error = Files::prepare(folder.path(), 2, 1 << 46).unwrap_err().to_string();
        assert!(error.contains("2 more blocks") && error.contains("--dir"), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn images_are_as_many_as_blocks_where_memory_allows_and_too_large_ones_are_refused() {
        let images = Images::new(3, 1000, Device::Cpu).unwrap();
        assert_eq!(images.num_images(), 3);
        assert_ne!(image(&images, 0), image(&images, 1));
        let error = Images::new(3, 1 << 46, Device::Cpu).unwrap_err().to_string();
        assert!(error.contains("--block-size"), "{error}");
    }
}
