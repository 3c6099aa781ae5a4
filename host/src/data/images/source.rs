//! Where the bytes of a picture are.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, Seek};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A picture that was named in a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::data) enum Source {
    /// A file.
    File(PathBuf),
    /// The bytes of a file that stood in the row.
    Bytes(Arc<[u8]>),
}

/// Bytes as the decoders want them.
pub(super) trait Stream: BufRead + Seek {}

impl<T: BufRead + Seek> Stream for T {}

impl Source {
    /// What a row calls a picture: a path, relative to `folder` unless it is absolute, a `file://` address, or a
    /// `data:` address in base64.
    ///
    /// # Errors
    /// A message that says what is wrong with the name. Whether the file exists is not looked at.
    pub(in crate::data) fn resolve(name: &str, folder: &Path) -> Result<Self, String> {
        if name.is_empty() {
            return Err("its path is empty".to_owned());
        }
        if let Some(data) = name.strip_prefix("data:") {
            let encoded = data.split_once(";base64,").map(|(_, encoded)| encoded);
            let encoded =
                encoded.ok_or("a data: address must hold its picture as ';base64,…'".to_owned())?;
            return Self::from_base64(encoded);
        }
        let path = name.strip_prefix("file://").unwrap_or(name);
        if let Some((scheme, _)) = path.split_once("://") {
            return Err(format!(
                "'{name}' is an address: nothing is fetched over {scheme}; download the picture and give its path"
            ));
        }
        Ok(Self::File(folder.join(path)))
    }

    /// A picture in base64, with or without line breaks.
    pub(in crate::data) fn from_base64(encoded: &str) -> Result<Self, String> {
        let letters: String =
            encoded.chars().filter(|letter| !letter.is_ascii_whitespace()).collect();
        let bytes = base64::decode(letters)
            .map_err(|error| format!("its data is not valid base64: {error}"))?;
        Ok(Self::Bytes(bytes.into()))
    }

    /// The bytes from the beginning, read as they are asked for.
    pub(super) fn open(&self) -> Result<Box<dyn Stream>, String> {
        match self {
            Self::File(path) => Ok(Box::new(BufReader::new(open(path)?))),
            Self::Bytes(bytes) => Ok(Box::new(Cursor::new(Arc::clone(bytes)))),
        }
    }

    /// All bytes.
    pub(super) fn read(&self) -> Result<Arc<[u8]>, String> {
        match self {
            Self::File(path) => {
                let mut bytes = Vec::new();
                std::io::Read::read_to_end(&mut open(path)?, &mut bytes)
                    .map_err(|error| format!("cannot be read: {error}"))?;
                Ok(bytes.into())
            }
            Self::Bytes(bytes) => Ok(Arc::clone(bytes)),
        }
    }
}

/// Opens a regular file. Anything else is refused before it is opened: opening a pipe would wait.
fn open(path: &Path) -> Result<File, String> {
    let failed = |error: std::io::Error| format!("cannot be opened: {error}");
    let kind = std::fs::metadata(path).map_err(failed)?;
    if kind.is_dir() {
        return Err("is a folder, not a picture".to_owned());
    }
    if !kind.is_file() {
        return Err("is not a regular file".to_owned());
    }
    File::open(path).map_err(failed)
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Bytes(bytes) => write!(f, "the picture in the row ({} bytes)", bytes.len()),
        }
    }
}
