//! Which files of a folder hold the weights.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use crate::error::{Error, Result};

/// The index of a checkpoint of several files.
pub(super) const INDEX_FILE: &str = "model.safetensors.index.json";
/// The weights of a checkpoint of one file.
pub(super) const SINGLE_FILE: &str = "model.safetensors";

/// Which tensor an index promises in which file; empty without an index.
type WeightMap = BTreeMap<String, PathBuf>;

/// The safetensors files of `directory`, and what the index says of them.
pub(super) fn find_files(directory: &Path) -> Result<(Vec<PathBuf>, WeightMap)> {
    let single = directory.join(SINGLE_FILE);
    if single.exists() {
        return Ok((vec![single], WeightMap::new()));
    }
    let index = directory.join(INDEX_FILE);
    if index.exists() {
        let weight_map = read_index(directory, &index)?;
        let files: BTreeSet<_> = weight_map.values().cloned().collect();
        return Ok((files.into_iter().collect(), weight_map));
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(Error::io("list", directory))? {
        let path = entry.map_err(Error::io("list", directory))?.path();
        if path.extension() == Some(OsStr::new("safetensors")) {
            files.push(path);
        }
    }
    files.sort();
    if files.is_empty() {
        return Err(Error::file(
            directory,
            "holds no *.safetensors file; download the model's weights in safetensors form (pytorch_model.bin and GGUF files must be converted first)",
        ));
    }
    Ok((files, WeightMap::new()))
}

fn read_index(directory: &Path, path: &Path) -> Result<WeightMap> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text = std::fs::read(path).map_err(Error::io("read", path))?;
    let index: Index = serde_json::from_slice(&text).map_err(|error| {
        Error::file(path, format!("is not an index ({error}); download it again"))
    })?;
    if index.weight_map.is_empty() {
        return Err(Error::file(path, "names no tensor; download it again"));
    }
    let mut weight_map = WeightMap::new();
    for (tensor, name) in index.weight_map {
        let mut parts = Path::new(&name).components();
        if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
            let message = format!("tensor '{tensor}': '{name}' is not a file name in this folder");
            return Err(Error::file(path, message));
        }
        weight_map.insert(tensor, directory.join(name));
    }
    let mut missing = weight_map.values().filter(|file| !file.exists());
    if let Some(file) = missing.next() {
        return Err(Error::file(
            file,
            format!(
                "does not exist, but {INDEX_FILE} names it; the download may be incomplete: fetch it again"
            ),
        ));
    }
    Ok(weight_map)
}
