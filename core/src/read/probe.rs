//! What this machine and a place in its file systems offer for fast reads, and why not more.

use std::fs;
use std::path::Path;

use io_uring::{IoUring, Probe, opcode};

use super::files::ReadFile;
use crate::error::Result;

/// What there is for reading one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadOffer {
    /// Whether io_uring can be used, or why not.
    pub io_uring: Result<(), String>,
    /// What direct reads, past the page cache, must be multiples of in bytes, or why there are none.
    pub direct: Result<usize, String>,
}

impl ReadOffer {
    /// Asks the system about io_uring and the file system about the existing file `path`.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) when the file cannot be opened.
    pub fn of(path: &Path) -> Result<Self> {
        let (file, refusal) = ReadFile::open_direct(path)?;
        let direct = refusal.map_or_else(|| Ok(file.alignment_bytes()), Err);
        Ok(Self { io_uring: ring(2).map(|_| ()), direct })
    }

    /// How [`ReadMethod::Auto`](super::ReadMethod::Auto) reads such a file and why not better, for
    /// people.
    pub fn choice(&self) -> String {
        match (&self.direct, &self.io_uring) {
            (Ok(bytes), Ok(())) => format!("io_uring past the page cache, {bytes}-byte alignment"),
            (Ok(bytes), Err(reason)) => {
                format!(
                    "threads past the page cache, {bytes}-byte alignment; no io_uring: {reason}"
                )
            }
            (Err(reason), _) => format!("threads through the page cache: {reason}"),
        }
    }
}

/// A ring with room for `num_entries` reads, or why the system refuses.
pub(super) fn ring(num_entries: u32) -> Result<IoUring, String> {
    let ring = IoUring::new(num_entries).map_err(|error| refusal(&error))?;
    let mut probe = Probe::new();
    let asked = ring.submitter().register_probe(&mut probe);
    // Linux 5.6 has both: reads into plain memory and the question whether there are any.
    if asked.is_err() || !probe.is_supported(opcode::Read::CODE) {
        return Err("the kernel's io_uring is too old (Linux 5.6 has what is needed)".to_owned());
    }
    Ok(ring)
}

fn refusal(error: &std::io::Error) -> String {
    let disabled = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    match (error.raw_os_error(), disabled.trim()) {
        (Some(libc::ENOSYS), _) => "the kernel has no io_uring".to_owned(),
        (Some(libc::EPERM), "2") => "it is switched off (sysctl kernel.io_uring_disabled=2)".into(),
        (Some(libc::EPERM), "1") => {
            "it is kept for privileged processes (sysctl kernel.io_uring_disabled=1)".to_owned()
        }
        (Some(libc::EPERM), _) => {
            "a filter of system calls forbids it (seccomp, as containers have)".to_owned()
        }
        (Some(libc::ENOMEM), _) => {
            "too little memory may be locked (ulimit -l, RLIMIT_MEMLOCK)".to_owned()
        }
        _ => format!("the system refuses it ({error})"),
    }
}
