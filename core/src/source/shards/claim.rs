//! Whose stripes lie in a folder: a note in every folder of shards but the first, which has the manifest.
//!
//! Files of blocks have the same names in all shards. The note keeps shards that share a folder with others from
//! being written over theirs, and from being read where that has happened.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::manifest::{JOURNAL_FILE, MANIFEST_FILE, Manifest, is_ours};
use super::write::to_json;
use crate::checkpoint::atomic::write_file;
use crate::error::{Error, Result};

/// Name of the note in its folder.
const CLAIM_FILE: &str = "stripes.json";

/// The content of the note.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Claim {
    /// The folder with the manifest, as it was called when this was written.
    pub(super) home: PathBuf,
    #[serde(flatten)]
    stripes: ClaimedStripes,
}

/// What decides which bytes lie in the folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ClaimedStripes {
    /// Identity of checkpoint and layout.
    identity: String,
    /// Place among the folders; the first one has 0.
    position: usize,
    num_folders: usize,
}

impl Claim {
    /// The note in `directory`, if there is one.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::File`] when it is damaged.
    pub(super) fn read(directory: &Path) -> Result<Option<Self>> {
        let path = directory.join(CLAIM_FILE);
        let text = match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            text => text.map_err(Error::io("read", &path))?,
        };
        serde_json::from_slice(&text).map(Some).map_err(|error| {
            let message = format!(
                "is damaged ({error}), so nobody knows whose stripes lie beside it; remove it and run `shard --verify` with the folders that it belonged to"
            );
            Error::file(path, message)
        })
    }
}

/// Refuses `directories` when one of them holds stripes or the manifest of other shards than those whose
/// first folder is the first of them. The paths are canonical.
///
/// # Errors
/// [`Error::File`] naming the folder and the other shards; as [`Claim::read`].
pub(super) fn check_free(directories: &[PathBuf]) -> Result<()> {
    for (position, directory) in directories.iter().enumerate() {
        let claim = Claim::read(directory)?;
        let other = match claim {
            Some(claim) if position == 0 || !is_of(&claim, directories, position)? => {
                format!("stripes of the shards in {}", claim.home.display())
            }
            None if position > 0 && is_home(directory)? => "shards of its own".to_owned(),
            _ => continue,
        };
        let message = format!(
            "holds {other}, which would be overwritten; choose another folder, or empty this one if those shards are not needed any more"
        );
        return Err(Error::file(directory, message));
    }
    Ok(())
}

/// Whether a note is of the shards whose first folder is the first of `directories`, which may have been moved
/// with its manifest since.
fn is_of(claim: &Claim, directories: &[PathBuf], position: usize) -> Result<bool> {
    if claim.home == directories[0] {
        return Ok(true);
    }
    if is_home(&claim.home)? {
        return Ok(false);
    }
    let is_same = |manifest: Manifest| {
        let num_folders = manifest.directories.len();
        num_folders == directories.len()
            && claim.stripes == stripes(&manifest.identity, position, num_folders)
    };
    Ok(Manifest::read(&directories[0]).is_ok_and(is_same))
}

/// Notes in all of `directories` but the first whose stripes lie there from now on.
///
/// # Errors
/// [`Error::Io`].
pub(super) fn claim(directories: &[PathBuf], identity: &str) -> Result<()> {
    for (position, directory) in directories.iter().enumerate().skip(1) {
        let stripes = stripes(identity, position, directories.len());
        let claim = Claim { home: directories[0].clone(), stripes };
        if Claim::read(directory)?.as_ref() == Some(&claim) {
            continue;
        }
        write_file(&directory.join(CLAIM_FILE), &to_json(&claim)?)?;
    }
    Ok(())
}

/// Refuses to read `manifest` where stripes of other shards lie in its folders, `directories`. A folder
/// without a note is taken as it is: its files may be missing, or not.
///
/// # Errors
/// [`Error::File`] naming the folder; as [`Claim::read`].
pub(super) fn check_claims(manifest: &Manifest, directories: &[PathBuf]) -> Result<()> {
    for (position, directory) in directories.iter().enumerate().skip(1) {
        let expected = stripes(&manifest.identity, position, directories.len());
        if let Some(claim) = Claim::read(directory)?.filter(|claim| claim.stripes != expected) {
            let message = format!(
                "holds stripes of other shards by now, those in {}; write the shards again, into other folders",
                claim.home.display()
            );
            return Err(Error::file(directory, message));
        }
    }
    Ok(())
}

fn stripes(identity: &str, position: usize, num_folders: usize) -> ClaimedStripes {
    ClaimedStripes { identity: identity.to_owned(), position, num_folders }
}

/// Whether shards have their manifest in `directory`, or will have.
fn is_home(directory: &Path) -> Result<bool> {
    let manifest = directory.join(MANIFEST_FILE);
    Ok(directory.join(JOURNAL_FILE).exists() || (manifest.exists() && is_ours(&manifest)?))
}
