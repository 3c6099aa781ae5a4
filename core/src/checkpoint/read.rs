//! Reading exact byte ranges of files.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::error::{Error, Result};

/// Most bytes asked for at once: Linux never returns more than 0x7fff_f000 from one call.
const MAX_READ_BYTES: usize = 1 << 30;

/// Opens a file for reading.
pub(crate) fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(Error::io("open", path))
}

/// Fills `into` from `offset_bytes` on, in as many reads as it takes.
///
/// # Errors
/// [`Error::File`] when the file ends before; [`Error::Io`] when the system refuses.
pub(crate) fn read_exact_at(
    file: &File,
    path: &Path,
    offset_bytes: u64,
    into: &mut [u8],
) -> Result<()> {
    let end = offset_bytes + into.len() as u64;
    let mut done = 0;
    while done < into.len() {
        let stop = into.len().min(done + MAX_READ_BYTES);
        match file.read_at(&mut into[done..stop], offset_bytes + done as u64) {
            Ok(0) => {
                let found = offset_bytes + done as u64;
                return Err(Error::file(
                    path,
                    format!(
                        "ends at byte {found}, but bytes up to {end} are needed; it was cut short: restore it"
                    ),
                ));
            }
            Ok(num_bytes) => done += num_bytes,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Error::io("read", path)(error)),
        }
    }
    Ok(())
}
