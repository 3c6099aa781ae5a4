//! Headers of safetensors files.
//!
//! A file is the header's length (u64, little endian), the header (JSON) and the data. The header maps
//! a tensor's name to its dtype, shape and byte range in the data; the ranges cover the data without
//! holes or overlaps. Source: the format description at <https://github.com/huggingface/safetensors>.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{open, read_exact_at};
use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// Longest header that the format allows.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Key of the free-form text in a header.
const METADATA_KEY: &str = "__metadata__";

/// One tensor of a safetensors file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderTensor {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Start in the file, counted from its first byte.
    pub offset_bytes: u64,
    /// Size.
    pub num_bytes: usize,
}

/// What the header of a safetensors file says, checked against the file's size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The tensors in file order.
    pub tensors: Vec<HeaderTensor>,
    /// Free-form text.
    pub metadata: BTreeMap<String, String>,
    /// Size of the whole file.
    pub file_bytes: u64,
}

/// A tensor's entry as it stands in the JSON.
#[derive(Serialize, Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

/// Reads and checks the header of the safetensors file at `path`.
///
/// # Errors
/// [`Error::Io`] when it cannot be read; [`Error::File`] when it is cut short, is no safetensors file, or
/// its header contradicts itself or the file's size: the message names the tensor.
pub fn read_header(path: &Path) -> Result<Header> {
    let file = open(path)?;
    let file_bytes = file.metadata().map_err(Error::io("inspect", path))?.len();
    let mut length = [0; 8];
    if file_bytes < length.len() as u64 {
        let message =
            format!("has only {file_bytes} bytes; the download is incomplete: fetch it again");
        return Err(Error::file(path, message));
    }
    read_exact_at(&file, path, 0, &mut length)?;
    if &length == b"version " {
        return Err(Error::file(path, "is a Git LFS pointer, not the weights; run `git lfs pull`"));
    }
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > MAX_HEADER_BYTES {
        let message = format!(
            "claims a header of {header_bytes} bytes, over the format's limit of {MAX_HEADER_BYTES}; it is damaged or no safetensors file"
        );
        return Err(Error::file(path, message));
    }
    let data_start = 8 + header_bytes;
    if data_start > file_bytes {
        let message = format!(
            "claims a header of {header_bytes} bytes but has only {file_bytes} in all; the download is incomplete: fetch it again"
        );
        return Err(Error::file(path, message));
    }
    let mut text = vec![0; header_bytes as usize];
    read_exact_at(&file, path, 8, &mut text)?;
    parse(&text, data_start, file_bytes).map_err(|message| Error::file(path, message))
}

fn parse(text: &[u8], data_start: u64, file_bytes: u64) -> Result<Header, String> {
    let mut entries: Map<String, Value> = serde_json::from_slice(text)
        .map_err(|error| format!("its header is not JSON ({error}); fetch the file again"))?;
    let metadata = match entries.remove(METADATA_KEY) {
        None | Some(Value::Null) => BTreeMap::new(),
        Some(value) => serde_json::from_value(value)
            .map_err(|error| format!("{METADATA_KEY} is not a map of texts ({error})"))?,
    };
    let mut tensors = entries
        .into_iter()
        .map(|(name, value)| {
            check_entry(&name, value, data_start, file_bytes)
                .map_err(|message| format!("tensor '{name}': {message}"))
        })
        .collect::<Result<Vec<_>, _>>()?;
    tensors.sort_by_key(|tensor| (tensor.offset_bytes, tensor.num_bytes));

    let mut end = data_start;
    for tensor in &tensors {
        if tensor.offset_bytes != end {
            let what =
                if tensor.offset_bytes < end { "overlap the tensor" } else { "leave a hole" };
            return Err(format!(
                "tensor '{}': its data_offsets {what} before it; the header is damaged",
                tensor.name
            ));
        }
        end += tensor.num_bytes as u64;
    }
    if end != file_bytes {
        return Err(format!(
            "holds {} bytes after its last tensor; it is damaged",
            file_bytes - end
        ));
    }
    Ok(Header { tensors, metadata, file_bytes })
}

fn check_entry(
    name: &str,
    value: Value,
    data_start: u64,
    file_bytes: u64,
) -> Result<HeaderTensor, String> {
    let Entry { dtype, shape, data_offsets: [start, end] } = serde_json::from_value(value)
        .map_err(|error| format!("its header entry is malformed ({error})"))?;
    let dtype = Dtype::from_name(&dtype).map_err(|error| error.to_string())?;
    let num_bytes =
        size_bytes(dtype, &shape).ok_or_else(|| format!("shape {shape:?} is too large"))?;
    if start.checked_add(num_bytes as u64) != Some(end) {
        return Err(format!(
            "{} {shape:?} takes {num_bytes} bytes, but its data_offsets are [{start}, {end}]; the header is damaged",
            dtype.name()
        ));
    }
    let data_bytes = file_bytes - data_start;
    if end > data_bytes {
        return Err(format!(
            "its data ends at byte {end} of the data, which has only {data_bytes}; the file is cut short, the download incomplete: fetch it again"
        ));
    }
    let offset_bytes = data_start + start;
    Ok(HeaderTensor { name: name.to_owned(), dtype, shape, offset_bytes, num_bytes })
}

fn size_bytes(dtype: Dtype, shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(dtype.size_bytes(), |bytes, extent| bytes.checked_mul(*extent))
}

/// Length and header for tensors whose data follows in this order, padded so that the data starts on a
/// multiple of 8.
pub(super) fn encode<'a>(
    tensors: impl IntoIterator<Item = (&'a str, Dtype, &'a [usize])>,
    metadata: &[(&str, &str)],
) -> Result<Vec<u8>> {
    let mut entries = Map::new();
    if !metadata.is_empty() {
        let texts = metadata.iter().map(|(key, text)| ((*key).to_owned(), Value::from(*text)));
        entries.insert(METADATA_KEY.to_owned(), Value::Object(texts.collect()));
    }
    let mut start = 0;
    for (name, dtype, shape) in tensors {
        let end = size_bytes(dtype, shape)
            .and_then(|num_bytes| u64::checked_add(start, num_bytes as u64))
            .ok_or_else(|| Error::tensor(name, format!("shape {shape:?} is too large")))?;
        let entry = Entry {
            dtype: dtype.name().to_owned(),
            shape: shape.to_vec(),
            data_offsets: [start, end],
        };
        let value = serde_json::to_value(entry).map_err(|error| Error::usage(error.to_string()))?;
        if name == METADATA_KEY || entries.insert(name.to_owned(), value).is_some() {
            return Err(Error::tensor(name, "occurs twice in one file, or its name is reserved"));
        }
        start = end;
    }
    let mut text = Value::Object(entries).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    Ok(bytes)
}
