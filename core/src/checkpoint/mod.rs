//! Checkpoints on disk: safetensors files, their layout into blocks, and files written whole or not at all.
//!
//! ```text
//! Checkpoint   what the headers say is there          (open)
//! Layout       which bytes go where in which block    (checkpoint x weight table)
//! ```

pub mod atomic;
mod exchange;
mod expert_layout;
mod finite;
mod header;
mod identity;
mod index;
mod layout;
mod read;
mod sized_file;
mod synthesize;
mod tensors;
mod weight_files;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use finite::{NonFinite, scan_block};
pub use header::{Header, HeaderTensor, MAX_HEADER_BYTES, read_header};
pub(crate) use layout::check_streamed_first;
pub use layout::{Layout, TensorSource};
pub(crate) use read::{open, read_exact_at};
pub(crate) use synthesize::MARKER_FILE as SYNTHETIC_MARKER;
pub use synthesize::{SynthesizeOptions, Synthesized, synthesize};
pub use tensors::{
    RawTensor, read_safetensors, tensor_bytes, tensor_from_bytes, write_raw_safetensors,
    write_safetensors,
};
pub(crate) use weight_files::{NewTensor, WeightFiles};

use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// One safetensors file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its size when the header was read.
    pub num_bytes: u64,
}

/// Where a tensor of a checkpoint lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTensor {
    /// Position in [`Checkpoint::files`].
    pub file: usize,
    /// Element type as stored.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Start in the file, counted from its first byte.
    pub offset_bytes: u64,
    /// Size.
    pub num_bytes: usize,
}

/// A model folder as downloaded: its configuration and where every tensor lies. No weight is read.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    /// The folder.
    pub directory: PathBuf,
    /// Text of `config.json`, known to be JSON.
    pub config_json: String,
    /// The safetensors files.
    pub files: Vec<CheckpointFile>,
    /// Every tensor by its name.
    pub tensors: BTreeMap<String, StoredTensor>,
}

impl Checkpoint {
    /// Reads `config.json` and all headers in `directory`.
    ///
    /// The files are, as transformers looks for them: `model.safetensors`; else those that
    /// `model.safetensors.index.json` names; else every `*.safetensors`, sorted.
    ///
    /// # Errors
    /// [`Error::File`] when `config.json` or the weights are missing or damaged, naming file, tensor and
    /// remedy; [`Error::MissingTensor`] when a file lacks a tensor that the index promises.
    pub fn open(directory: &Path) -> Result<Self> {
        if !directory.is_dir() {
            return Err(Error::file(
                directory,
                "is not a folder; give the folder that holds config.json and the *.safetensors files",
            ));
        }
        let config_json = read_config(directory)?;
        let (paths, weight_map) = index::find_files(directory)?;

        let mut files = Vec::new();
        let mut tensors: BTreeMap<String, StoredTensor> = BTreeMap::new();
        for (file, path) in paths.into_iter().enumerate() {
            let header = read_header(&path)?;
            for HeaderTensor { name, dtype, shape, offset_bytes, num_bytes } in header.tensors {
                // A copy in a file other than the one that the index names is dead weight.
                if weight_map.get(&name).is_some_and(|owner| *owner != path) {
                    continue;
                }
                let stored = StoredTensor { file, dtype, shape, offset_bytes, num_bytes };
                if tensors.insert(name.clone(), stored).is_some() {
                    return Err(Error::file(
                        &path,
                        format!("tensor '{name}' is in another file of the folder too; remove one"),
                    ));
                }
            }
            files.push(CheckpointFile { path, num_bytes: header.file_bytes });
        }
        if let Some((tensor, path)) = weight_map.iter().find(|entry| !tensors.contains_key(entry.0))
        {
            let place = format!("{}, where {} says it is", path.display(), index::INDEX_FILE);
            return Err(Error::MissingTensor { tensor: tensor.clone(), place });
        }
        Ok(Self { directory: directory.to_owned(), config_json, files, tensors })
    }
}

fn read_config(directory: &Path) -> Result<String> {
    let path = directory.join("config.json");
    let text = match std::fs::read_to_string(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(Error::file(
                directory,
                "holds no config.json; download the model's config.json beside its weights",
            ));
        }
        result => result.map_err(Error::io("read", &path))?,
    };
    match serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&text) {
        Ok(_) => Ok(text),
        Err(error) => {
            Err(Error::file(path, format!("is not a JSON object ({error}); download it again")))
        }
    }
}
