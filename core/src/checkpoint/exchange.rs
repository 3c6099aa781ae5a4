//! Two paths change places in one step.

use std::io;
use std::path::Path;

/// Makes `first` name what `second` named, and the other way round. No other process sees a moment
/// without either.
///
/// # Errors
/// `Unsupported` or `InvalidInput` where the file system cannot do it; nothing has changed then.
#[cfg(target_os = "linux")]
pub(super) fn exchange(first: &Path, second: &Path) -> io::Result<()> {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;

    let first = CString::new(first.as_os_str().as_bytes())?;
    let second = CString::new(second.as_os_str().as_bytes())?;
    // SAFETY: both pointers are to strings that end in zero and live until the call returns.
    let code = unsafe {
        libc::renameat2(
            libc::AT_FDCWD,
            first.as_ptr(),
            libc::AT_FDCWD,
            second.as_ptr(),
            libc::RENAME_EXCHANGE,
        )
    };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn exchange(_first: &Path, _second: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
