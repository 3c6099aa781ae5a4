//! A new file of known size that is written in parts, in any order and from several threads.
//!
//! Bytes go past the page cache where they can: nothing is copied, the drive is busy from the first part on, and
//! nothing is left for the end. Direct writes take whole pages; where a part starts or ends within one, those
//! few bytes go through the cache.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate};
use rustix::io::{Errno, retry_on_intr};

use crate::error::{Error, Result};

/// Offset, length and memory address of direct writes are multiples of this: no drive asks for more.
pub(super) const PAGE_BYTES: usize = 4096;
/// A part that goes through the page cache and is as large as this is sent to the drive at once.
const EARLY_BYTES: usize = 1 << 20;

/// How far a place in a file lies behind the start of its page.
pub(super) fn page_part(offset_bytes: u64) -> usize {
    (offset_bytes % PAGE_BYTES as u64) as usize
}

/// The file.
#[derive(Debug)]
pub(super) struct SizedFile {
    file: File,
    /// The same file, past the page cache. None where the file system refuses that.
    direct: Option<File>,
    /// The path that messages name.
    target: PathBuf,
}

impl SizedFile {
    /// Starts the file `path` of `num_bytes`, none of them written; messages call it `target`.
    ///
    /// # Errors
    /// [`Error::Io`], for example when the disk has no room for it.
    pub(super) fn create(path: &Path, target: PathBuf, num_bytes: u64) -> Result<Self> {
        let file = File::create(path).map_err(Error::io("create", &target))?;
        // Writes into a file that has its size and its blocks need not wait for each other.
        let reserve = || fallocate(&file, FallocateFlags::empty(), 0, num_bytes);
        let reserved = match retry_on_intr(reserve) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => file.set_len(num_bytes),
            reserved => reserved.map_err(io::Error::from),
        };
        reserved.map_err(Error::io("write", &target))?;
        let direct = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path).ok();
        Ok(Self { file, direct, target })
    }

    /// Writes `bytes` from byte `offset_bytes` of the file on. They go past the page cache, but for what does not fill a
    /// page, if they lie as far behind a multiple of [`PAGE_BYTES`] in memory as in the file.
    ///
    /// # Errors
    /// [`Error::Io`], for example when the disk is full.
    pub(super) fn write(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        self.write_parts(offset_bytes, bytes).map_err(Error::io("write", &self.target))
    }

    fn write_parts(&self, offset_bytes: u64, bytes: &[u8]) -> io::Result<()> {
        let skipped = page_part(offset_bytes);
        let head = ((PAGE_BYTES - skipped) % PAGE_BYTES).min(bytes.len());
        let end = bytes.len() - (bytes.len() - head) % PAGE_BYTES;
        let mut done = 0;
        if let Some(direct) = &self.direct
            && bytes.as_ptr() as usize % PAGE_BYTES == skipped
        {
            self.write_buffered(offset_bytes, &bytes[..head])?;
            done = head;
            while done < end {
                match direct.write_at(&bytes[done..end], offset_bytes + done as u64) {
                    Ok(0) => return Err(ErrorKind::WriteZero.into()),
                    Ok(num_bytes) => done += num_bytes,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    // The drive asks for more, or a write ended within a page.
                    Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
                    Err(error) => return Err(error),
                }
            }
        }
        self.write_buffered(offset_bytes + done as u64, &bytes[done..])
    }

    fn write_buffered(&self, offset_bytes: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, offset_bytes)?;
        if bytes.len() >= EARLY_BYTES {
            // Left alone, the system begins when memory is full of what was written. Only a hint.
            let length = std::num::NonZeroU64::new(bytes.len() as u64);
            let _ = fadvise(&self.file, offset_bytes, length, Advice::DontNeed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::{ReadWriteFlags, preadv2};

    use super::*;
    use crate::device::HostBuffer;

    #[test]
    fn parts_of_any_place_and_alignment_are_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let num_bytes = 5 * PAGE_BYTES + 77;
        let expected: Vec<_> = (0..num_bytes).map(|byte| (byte % 251) as u8).collect();
        let cuts = [0, 8, 9, PAGE_BYTES, 3 * PAGE_BYTES - 1, 5 * PAGE_BYTES, num_bytes];
        // In memory as in the file, and a byte off: direct and through the cache.
        for shift in [0, 1] {
            let path = folder.path().join(shift.to_string());
            let file = SizedFile::create(&path, path.clone(), num_bytes as u64).unwrap();
            assert_eq!(path.metadata().unwrap().len(), num_bytes as u64);
            let mut memory = HostBuffer::new(num_bytes + shift).unwrap();
            memory.bytes_mut()[shift..].copy_from_slice(&expected);
            for part in cuts.windows(2).rev() {
                let bytes = &memory.bytes()[shift + part[0]..shift + part[1]];
                file.write(part[0] as u64, bytes).unwrap();
            }
            assert_eq!(std::fs::read(&path).unwrap(), expected);
        }
    }

    #[test]
    fn whole_pages_go_past_the_page_cache() {
        let folder = tempfile::tempdir().unwrap();
        let num_pages = 16;
        let write = |name: &str, shift: usize| {
            let path = folder.path().join(name);
            let num_bytes = num_pages * PAGE_BYTES;
            let file = SizedFile::create(&path, path.clone(), num_bytes as u64).unwrap();
            let mut memory = HostBuffer::new(num_bytes + shift).unwrap();
            memory.bytes_mut().fill(7);
            file.write(8, &memory.bytes()[shift + 8..shift + num_bytes]).unwrap();
            File::open(path).unwrap()
        };
        let is_cached = |file: &File, page: usize| {
            let mut byte = [0];
            let offset_bytes = (page * PAGE_BYTES + 9) as u64;
            let into = &mut [io::IoSliceMut::new(&mut byte)];
            match preadv2(file, into, offset_bytes, ReadWriteFlags::NOWAIT) {
                Ok(_) => Some(true),
                Err(Errno::AGAIN) => Some(false),
                // Not every file system tells.
                Err(_) => None,
            }
        };
        let (direct, buffered) = (write("direct", 0), write("buffered", 1));
        // A whole page that was written past the cache, without any of this code.
        let plain = folder.path().join("plain");
        let open =
            OpenOptions::new().write(true).create(true).custom_flags(libc::O_DIRECT).open(&plain);
        let mut page = HostBuffer::new(PAGE_BYTES).unwrap();
        page.bytes_mut().fill(7);
        let written = open.and_then(|file| file.write_all_at(page.bytes(), 0));
        let goes_past =
            written.is_ok() && is_cached(&File::open(&plain).unwrap(), 0) == Some(false);
        if !goes_past || is_cached(&buffered, 1) != Some(true) {
            println!(
                "skipped: on this file system nothing goes past the cache, or it does not tell"
            );
            return;
        }
        // The last one first: a read may bring in what follows.
        for page in (1..num_pages).rev() {
            assert_eq!(is_cached(&direct, page), Some(false), "page {page}");
        }
    }
}
