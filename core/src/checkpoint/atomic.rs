//! Files and folders that appear whole or not at all.
//!
//! Everything is written beside its place under a hidden name ending in `.partial`, brought to the disk,
//! and renamed. Whatever fails before the rename leaves the place as it was and removes the partial
//! copy; only a killed process leaves one behind, and nothing ever reads it.

use std::fs::{self, File, Permissions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::{Builder, NamedTempFile, TempDir};

use super::exchange::exchange;
use crate::error::{Error, Result};

/// A file that takes its name when it is complete.
#[derive(Debug)]
pub struct AtomicFile {
    temporary: NamedTempFile,
    target: PathBuf,
}

impl AtomicFile {
    /// Starts a file that will be `target`. Its folder must exist.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn create(target: &Path) -> Result<Self> {
        let (prefix, parent) = (partial_prefix(target), parent(target));
        // The process's own mask narrows this, as for any other file.
        let temporary = Builder::new()
            .prefix(&prefix)
            .suffix(PARTIAL_SUFFIX)
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(parent)
            .map_err(Error::io("create", target))?;
        Ok(Self { temporary, target: target.to_owned() })
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// [`Error::Io`], for example when the disk is full.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.temporary.write_all(bytes).map_err(Error::io("write", &self.target))
    }

    /// The file takes its name, replacing one that had it.
    ///
    /// # Errors
    /// [`Error::Io`]; the name then means what it meant before.
    pub fn commit(self) -> Result<()> {
        let Self { temporary, target } = self;
        temporary.as_file().sync_all().map_err(Error::io("write", &target))?;
        temporary.persist(&target).map_err(|error| Error::io("rename", &target)(error.error))?;
        sync_directory(parent(&target))
    }
}

/// Writes `bytes` as the file `target`, whole or not at all.
///
/// # Errors
/// [`Error::Io`]; the name then means what it meant before.
pub fn write_file(target: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = AtomicFile::create(target)?;
    file.write(bytes)?;
    file.commit()
}

/// A folder of files that takes its name when it is complete.
#[derive(Debug)]
pub struct AtomicDirectory {
    temporary: TempDir,
    target: PathBuf,
}

impl AtomicDirectory {
    /// Starts a folder that will be `target`. Write its files into [`AtomicDirectory::path`].
    ///
    /// A folder that is already there is replaced as a whole, but only if it is empty or holds a file
    /// called `marker`, by which the caller knows its own.
    ///
    /// # Errors
    /// [`Error::File`] when `target` is something that must not be replaced; [`Error::Io`].
    pub fn create(target: &Path, marker: &str) -> Result<Self> {
        match fs::read_dir(target) {
            Ok(mut entries) => {
                if entries.next().is_some() && !target.join(marker).exists() {
                    let message = format!(
                        "is not empty and holds no {marker}, so it is not replaced; choose a new folder or empty this one"
                    );
                    return Err(Error::file(target, message));
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io("write the folder", target)(error)),
        }
        let parent = parent(target);
        fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
        let temporary = Builder::new()
            .prefix(&partial_prefix(target))
            .suffix(PARTIAL_SUFFIX)
            .permissions(Permissions::from_mode(0o777))
            .tempdir_in(parent)
            .map_err(Error::io("create", target))?;
        Ok(Self { temporary, target: target.to_owned() })
    }

    /// Where the files go until then.
    pub fn path(&self) -> &Path {
        self.temporary.path()
    }

    /// The folder takes its name, and what had it is removed.
    ///
    /// # Errors
    /// [`Error::Io`]; the name then means what it meant before.
    pub fn commit(self) -> Result<()> {
        let Self { temporary, target } = self;
        sync_tree(temporary.path())?;
        if target.exists() {
            match exchange(temporary.path(), &target) {
                // The old folder now has the temporary name and goes with it.
                Ok(()) => {}
                // Some network file systems cannot exchange; a kill between the two renames leaves
                // the old folder whole, under the temporary name.
                Err(error)
                    if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) =>
                {
                    replace_in_two_steps(temporary.path(), &target)?;
                }
                Err(error) => return Err(Error::io("replace", &target)(error)),
            }
            sync_directory(parent(&target))?;
            let old = temporary.path().to_owned();
            return temporary.close().map_err(Error::io("remove the replaced folder", old));
        }
        fs::rename(temporary.path(), &target).map_err(Error::io("rename", &target))?;
        // It has another name now: nothing to remove.
        let _ = temporary.keep();
        sync_directory(parent(&target))
    }
}

const PARTIAL_SUFFIX: &str = ".partial";
/// Random letters between prefix and suffix: as many as tempfile takes.
const NUM_RANDOM: usize = 6;

/// The hidden beginning of the names under which `target` is written.
fn partial_prefix(target: &Path) -> String {
    format!(".{}.", target.file_name().unwrap_or_default().to_string_lossy())
}

/// Removes what killed processes left of `target`, a file or a folder.
///
/// # Errors
/// [`Error::Io`].
pub fn remove_partials(target: &Path) -> Result<()> {
    let wanted = partial_prefix(target);
    remove_partials_with(parent(target), |prefix| prefix == wanted)
}

/// Removes what killed processes left of anything in `folder`. Nobody else may be writing there.
///
/// # Errors
/// [`Error::Io`].
pub fn remove_all_partials(folder: &Path) -> Result<()> {
    remove_partials_with(folder, |prefix| prefix.starts_with('.'))
}

fn remove_partials_with(folder: &Path, is_meant: impl Fn(&str) -> bool) -> Result<()> {
    let entries = match fs::read_dir(folder) {
        // Nothing was left where nothing can be; the writing says what is wrong there.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(());
        }
        entries => entries.map_err(Error::io("list", folder))?,
    };
    for entry in entries {
        let path = entry.map_err(Error::io("list", folder))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if random_prefix(&name).is_some_and(&is_meant) {
            let removed =
                if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.map_err(Error::io("remove", &path))?;
        }
    }
    Ok(())
}

/// What stands before the random letters of a partial's name; `None` for other names. Another target's name may
/// go on where this one's ends.
fn random_prefix(name: &str) -> Option<&str> {
    let stem = name.strip_suffix(PARTIAL_SUFFIX)?;
    let (prefix, random) = stem.split_at_checked(stem.len().checked_sub(NUM_RANDOM)?)?;
    let is_random = random.bytes().all(|byte| byte.is_ascii_alphanumeric());
    (prefix.ends_with('.') && is_random).then_some(prefix)
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn replace_in_two_steps(new: &Path, target: &Path) -> Result<()> {
    let aside = new.with_extension("old");
    fs::rename(target, &aside).map_err(Error::io("rename", target))?;
    if let Err(error) = fs::rename(new, target) {
        fs::rename(&aside, target).map_err(Error::io("put back", target))?;
        return Err(Error::io("rename", target)(error));
    }
    fs::rename(&aside, new).map_err(Error::io("rename", aside))
}

fn sync_directory(path: &Path) -> Result<()> {
    File::open(path).and_then(|file| file.sync_all()).map_err(Error::io("write", path))
}

fn sync_tree(directory: &Path) -> Result<()> {
    for entry in fs::read_dir(directory).map_err(Error::io("list", directory))? {
        let path = entry.map_err(Error::io("list", directory))?.path();
        if path.is_dir() {
            sync_tree(&path)?;
        } else {
            sync_directory(&path)?;
        }
    }
    sync_directory(directory)
}
