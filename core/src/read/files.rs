//! Opening files so that reads go past the page cache where the file system takes that.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, OFlags, StatxFlags, fcntl_getfl, fcntl_setfl, fstatfs, statx};

use super::Request;
use crate::checkpoint;
use crate::device::HostBuffer;
use crate::error::{Error, Result};

/// Assumed where the system does not state what direct reads must be multiples of: no drive asks for
/// more.
const USUAL_ALIGNMENT_BYTES: usize = 4096;
/// `f_type` of file systems that keep files in memory (`linux/magic.h`: tmpfs, ramfs).
const MEMORY_FILE_SYSTEMS: [u64; 2] = [0x0102_1994, 0x8584_58f6];

/// A file that is read from several places at a time.
#[derive(Debug)]
pub(super) struct ReadFile {
    pub(super) path: PathBuf,
    pub(super) file: File,
    direct: AtomicBool,
    alignment_bytes: usize,
}

impl ReadFile {
    /// Opens `path` for reads past the page cache; the reason comes with it when the file system
    /// refuses them and reads go through the cache instead.
    ///
    /// # Errors
    /// [`Error::Io`] when the file cannot be opened at all.
    pub(super) fn open_direct(path: &Path) -> Result<(Self, Option<String>)> {
        match try_direct(path) {
            Ok((file, alignment_bytes)) => {
                let path = path.to_owned();
                let direct = AtomicBool::new(true);
                Ok((Self { path, file, direct, alignment_bytes }, None))
            }
            Err(reason) => Ok((Self::open_buffered(path)?, Some(reason))),
        }
    }

    /// Opens `path` for reads through the page cache.
    ///
    /// # Errors
    /// [`Error::Io`] when the file cannot be opened.
    pub(super) fn open_buffered(path: &Path) -> Result<Self> {
        let file = checkpoint::open(path)?;
        let direct = AtomicBool::new(false);
        Ok(Self { path: path.to_owned(), file, direct, alignment_bytes: 1 })
    }

    /// Whether reads go past the page cache.
    pub(super) fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// What offset, length and memory address must be multiples of.
    pub(super) fn alignment_bytes(&self) -> usize {
        self.alignment_bytes
    }

    /// After a refused direct read: from now on reads go through the page cache. Those that are under
    /// way keep their mode.
    ///
    /// # Errors
    /// [`Error::Io`] when the system refuses even that.
    pub(super) fn go_buffered(&self) -> Result<()> {
        // A flag of the open file, so a ring that has the file registered follows.
        fcntl_getfl(&self.file)
            .and_then(|flags| fcntl_setfl(&self.file, flags - OFlags::DIRECT))
            .map_err(|error| Error::io("read through the page cache", &self.path)(error.into()))?;
        if self.direct.swap(false, Ordering::Relaxed) {
            tracing::warn!(
                "{}: the file system refused a read past the page cache; reading through it",
                self.path.display()
            );
        }
        Ok(())
    }

    /// What a read that reached the end of the file at `end_bytes` is worth when the bytes before
    /// `needed_end_bytes` were needed.
    ///
    /// # Errors
    /// [`Error::File`] when they did not all come.
    pub(super) fn check_end(&self, end_bytes: u64, needed_end_bytes: u64) -> Result<()> {
        if end_bytes >= needed_end_bytes {
            return Ok(());
        }
        let message = format!(
            "ends at byte {end_bytes}, but bytes up to {needed_end_bytes} are needed; was it truncated since it was opened? Restore it and start again"
        );
        Err(Error::file(&self.path, message))
    }
}

/// How `files` are read, for people.
pub(super) fn describe(files: &[ReadFile]) -> String {
    let num_direct = files.iter().filter(|file| file.is_direct()).count();
    let alignment_bytes = files.iter().map(ReadFile::alignment_bytes).max().unwrap_or(1);
    if files.is_empty() {
        "through the source".to_owned()
    } else if num_direct == 0 {
        "through the page cache".to_owned()
    } else if num_direct == files.len() {
        format!("direct, {alignment_bytes}-byte alignment")
    } else {
        format!("direct for {num_direct} of {} files", files.len())
    }
}

/// Checks a request against the rules of its file.
///
/// # Errors
/// [`Error::Usage`] that says which rule it breaks.
pub(super) fn check(files: &[ReadFile], request: &Request, into: *mut u8) -> Result<()> {
    let Request::File { file, offset_bytes, num_bytes, needed_bytes } = *request else {
        return Ok(());
    };
    let Some(found) = files.get(file) else {
        let message = format!("file {file} is to be read, but the source has only {}", files.len());
        return Err(Error::usage(message));
    };
    let alignment_bytes = found.alignment_bytes;
    let address = into as usize;
    let aligned = offset_bytes.is_multiple_of(alignment_bytes as u64)
        && num_bytes.is_multiple_of(alignment_bytes)
        && address.is_multiple_of(alignment_bytes);
    let in_range = needed_bytes <= num_bytes
        && offset_bytes.checked_add(num_bytes as u64).is_some_and(|end| end <= i64::MAX as u64);
    if aligned && in_range {
        return Ok(());
    }
    Err(Error::usage(format!(
        "{}: cannot read {num_bytes} bytes ({needed_bytes} of them needed) at {offset_bytes} into memory at {address:#x}: all must be multiples of {alignment_bytes} and lie inside a file",
        found.path.display()
    )))
}

/// The file opened for direct reads with their alignment, or why that cannot be.
fn try_direct(path: &Path) -> Result<(File, usize), String> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)
        .map_err(|error| format!("the file system refuses O_DIRECT ({error})"))?;
    if fstatfs(&file).is_ok_and(|found| MEMORY_FILE_SYSTEMS.contains(&(found.f_type as u64))) {
        return Err("the file system keeps its files in memory".to_owned());
    }
    let alignment_bytes = stated_alignment_bytes(&file).unwrap_or(USUAL_ALIGNMENT_BYTES);
    if alignment_bytes > USUAL_ALIGNMENT_BYTES {
        return Err(format!("direct reads need an alignment of {alignment_bytes} bytes"));
    }
    match probe_read(&file, alignment_bytes) {
        Ok(()) => Ok((file, alignment_bytes)),
        // Some file systems state less than they take.
        Err(_) if alignment_bytes < USUAL_ALIGNMENT_BYTES => {
            probe_read(&file, USUAL_ALIGNMENT_BYTES).map(|()| (file, USUAL_ALIGNMENT_BYTES))
        }
        Err(error) => Err(error),
    }
    .map_err(|error| format!("a direct read failed ({error})"))
}

fn probe_read(file: &File, num_bytes: usize) -> io::Result<()> {
    let mut block = HostBuffer::new(num_bytes).map_err(io::Error::other)?;
    file.read_at(block.bytes_mut(), 0).map(|_| ())
}

/// The larger of what the system says memory and offsets must be aligned to (Linux 6.1 and newer).
fn stated_alignment_bytes(file: &File) -> Option<usize> {
    let stat = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let larger = stat.stx_dio_mem_align.max(stat.stx_dio_offset_align);
    let stated = stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0 && larger > 0;
    stated.then(|| (larger as usize).next_power_of_two())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::read::pool::PoolReader;
    use crate::read::uring::UringReader;
    use crate::read::{Completion, Reader};

    /// A direct file that promises to take any offset: the system refuses what it is then asked for.
    fn promising(path: &Path) -> Option<Arc<[ReadFile]>> {
        let (mut file, refusal) = ReadFile::open_direct(path).unwrap();
        if let Some(reason) = refusal {
            println!("skipped: {reason}");
            return None;
        }
        file.alignment_bytes = 1;
        Some(Arc::new([file]))
    }

    /// Reads nine odd spans at once and compares them.
    fn check_odd_spans(mut reader: impl Reader, bytes: &[u8]) {
        let mut memory = HostBuffer::new(9 << 20).unwrap();
        let mut places: Vec<_> = memory.bytes_mut().chunks_mut(1 << 20).collect();
        let num_bytes = 777_777;
        for (tag, place) in places.iter_mut().enumerate() {
            let request = Request::File {
                file: 0,
                offset_bytes: tag as u64 * 100_001,
                num_bytes,
                needed_bytes: num_bytes,
            };
            let into = place[tag..].as_mut_ptr();
            // SAFETY: every request has memory of its own that lives until all have completed.
            unsafe { reader.submit(tag as u64, request, into).unwrap() };
        }
        while let Some(Completion { tag, outcome }) = reader.wait().unwrap() {
            let tag = tag as usize;
            assert_eq!(outcome.unwrap(), num_bytes);
            let expected = &bytes[tag * 100_001..][..num_bytes];
            assert!(places[tag][tag..].starts_with(expected), "span {tag}");
        }
        assert!(reader.describe().contains("through the page cache"), "{}", reader.describe());
    }

    #[test]
    fn a_file_system_that_refuses_a_direct_read_is_read_through_the_page_cache_from_then_on() {
        // `/tmp` may be in memory; where the test itself lies is a disk.
        let program = std::env::current_exe().unwrap();
        let folder = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
        let path = folder.path().join("file");
        let bytes: Vec<u8> =
            (0..2_000_000_u32).map(|at| (at.wrapping_mul(40_503) >> 7) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let Some(files) = promising(&path) else { return };
        check_odd_spans(PoolReader::new(files, None, 4).unwrap(), &bytes);
        let Some(files) = promising(&path) else { return };
        match UringReader::new(files, 4) {
            Ok(reader) => check_odd_spans(reader, &bytes),
            Err(reason) => println!("skipped: this machine refuses io_uring: {reason}"),
        }
    }

    #[test]
    fn files_in_memory_are_not_asked_for_direct_reads() {
        let Ok(file) = tempfile::NamedTempFile::new_in("/dev/shm") else {
            println!("skipped: /dev/shm cannot be written here");
            return;
        };
        let (opened, refusal) = ReadFile::open_direct(file.path()).unwrap();
        assert!(!opened.is_direct() && opened.alignment_bytes() == 1);
        assert!(refusal.is_some());
    }
}
