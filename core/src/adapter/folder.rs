//! Writing a small folder whole or not at all.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use tempfile::{Builder, TempDir};

use crate::error::{Error, Result};

/// Puts a folder with exactly `files` (name, content) at `directory`; on an error nothing is left behind.
///
/// An earlier folder there is replaced if it holds nothing but files of these names.
///
/// # Errors
/// [`Error::File`] when other files are there; [`Error::Io`] when the system refuses.
pub(crate) fn write_folder(directory: &Path, files: &[(&str, &[u8])]) -> Result<()> {
    if directory.file_name().is_none() {
        return Err(Error::file(directory, "does not end in the name of a folder"));
    }
    let parent = match directory.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
    let exists = directory.symlink_metadata().is_ok();
    if exists {
        refuse_foreign_files(directory, files)?;
    }

    let staged = temporary(parent)?;
    for (name, content) in files {
        let path = staged.path().join(name);
        let mut file = File::create_new(&path).map_err(Error::io("create", &path))?;
        file.write_all(content).map_err(Error::io("write", directory.join(name)))?;
        file.sync_all().map_err(Error::io("write", directory.join(name)))?;
    }
    let mut earlier = exists.then(|| temporary(parent)).transpose()?;
    if let Some(earlier) = &earlier {
        let aside = earlier.path().join("earlier");
        fs::rename(directory, aside).map_err(Error::io("replace", directory))?;
    }
    if let Err(error) = fs::rename(staged.path(), directory) {
        if let Some(earlier) = &mut earlier {
            // Whatever happens now, what was there before is not deleted.
            earlier.disable_cleanup(true);
            let aside = earlier.path().join("earlier");
            fs::rename(&aside, directory).map_err(Error::io("put back", aside))?;
            earlier.disable_cleanup(false);
        }
        return Err(Error::io("create", directory)(error));
    }
    let _moved = staged.keep();
    File::open(parent).and_then(|parent| parent.sync_all()).map_err(Error::io("write", parent))
}

fn refuse_foreign_files(directory: &Path, files: &[(&str, &[u8])]) -> Result<()> {
    for entry in fs::read_dir(directory).map_err(Error::io("read", directory))? {
        let name = entry.map_err(Error::io("read", directory))?.file_name();
        if !files.iter().any(|file| *file.0 == *name) {
            let name = name.display();
            let message = format!("holds another file, '{name}'; name a new or an empty folder");
            return Err(Error::file(directory, message));
        }
    }
    Ok(())
}

/// A folder beside the one to be written, removed when dropped.
fn temporary(parent: &Path) -> Result<TempDir> {
    let mut builder = Builder::new();
    builder.prefix(".adapter-");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755));
    builder.tempdir_in(parent).map_err(Error::io("create a folder in", parent))
}
