//! Safetensors files of named tensors, written whole and read back.

use std::path::Path;

use tch::Tensor;

use super::atomic::AtomicFile;
use super::{header, open, read_exact_at, read_header};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::state::NamedTensors;

/// A tensor as bytes, row-major and little endian.
#[derive(Debug, Clone)]
pub struct RawTensor<'a> {
    /// Name in the file.
    pub name: &'a str,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// The elements.
    pub bytes: &'a [u8],
}

/// The elements of `tensor` from any device and in any strides, row-major.
///
/// # Errors
/// [`Error::Torch`].
pub fn tensor_bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let mut bytes = vec![0; tensor.numel() * tensor.f_kind()?.elt_size_in_bytes()];
    tensor.f_copy_data_u8(&mut bytes, tensor.numel())?;
    Ok(bytes)
}

/// A tensor on the CPU with these elements.
///
/// # Errors
/// [`Error::Usage`] when `bytes` is not as long as dtype and shape say; [`Error::Torch`].
pub fn tensor_from_bytes(dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Result<Tensor> {
    let num_bytes = shape.iter().product::<usize>() * dtype.size_bytes();
    if bytes.len() != num_bytes {
        let found = bytes.len();
        return Err(Error::usage(format!(
            "{} {shape:?} takes {num_bytes} bytes, not {found}",
            dtype.name()
        )));
    }
    let shape: Vec<_> = shape.iter().map(|extent| *extent as i64).collect();
    Ok(Tensor::f_from_data_size(bytes, &shape, dtype.kind())?)
}

/// Writes `tensors` as the safetensors file `target`, whole or not at all. `metadata` is free-form text.
///
/// # Errors
/// [`Error::Io`], for example when the disk is full; [`Error::Tensor`] for a kind that the format lacks.
pub fn write_safetensors(
    target: &Path,
    tensors: &NamedTensors,
    metadata: &[(&str, &str)],
) -> Result<()> {
    let mut entries = Vec::new();
    for (name, tensor) in tensors.iter() {
        let dtype = Dtype::from_kind(tensor.f_kind()?)
            .map_err(|error| Error::tensor(name, error.to_string()))?;
        let shape: Vec<_> = tensor.size().iter().map(|extent| *extent as usize).collect();
        entries.push((name, dtype, shape, tensor));
    }
    write(target, entries, metadata, |tensor, file| file.write(&tensor_bytes(tensor)?))
}

/// Writes raw tensors as the safetensors file `target`, whole or not at all.
///
/// # Errors
/// As [`write_safetensors`]; [`Error::Tensor`] when the bytes do not match dtype and shape.
pub fn write_raw_safetensors(
    target: &Path,
    tensors: &[RawTensor<'_>],
    metadata: &[(&str, &str)],
) -> Result<()> {
    for RawTensor { name, dtype, shape, bytes } in tensors {
        if shape.iter().product::<usize>() * dtype.size_bytes() != bytes.len() {
            let message = format!("{} {shape:?} does not take {} bytes", dtype.name(), bytes.len());
            return Err(Error::tensor(*name, message));
        }
    }
    let entries = tensors.iter().map(|raw| (raw.name, raw.dtype, raw.shape.clone(), raw.bytes));
    write(target, entries.collect(), metadata, |bytes, file| file.write(bytes))
}

fn write<T>(
    target: &Path,
    mut entries: Vec<(&str, Dtype, Vec<usize>, T)>,
    metadata: &[(&str, &str)],
    mut write_data: impl FnMut(T, &mut AtomicFile) -> Result<()>,
) -> Result<()> {
    // Widest elements first keep every tensor aligned to its own element, which readers that map the
    // file rely on.
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.1.size_bytes()));
    let named = entries.iter().map(|(name, dtype, shape, _)| (*name, *dtype, shape.as_slice()));
    let header = header::encode(named, metadata)?;
    let mut file = AtomicFile::create(target)?;
    file.write(&header)?;
    for (.., data) in entries {
        write_data(data, &mut file)?;
    }
    file.commit()
}

/// Every tensor of a safetensors file, on the CPU, in file order.
///
/// # Errors
/// As [`read_header`].
pub fn read_safetensors(path: &Path) -> Result<NamedTensors> {
    let header = read_header(path)?;
    let file = open(path)?;
    let read = |tensor: &super::HeaderTensor| {
        let mut bytes = vec![0; tensor.num_bytes];
        read_exact_at(&file, path, tensor.offset_bytes, &mut bytes)?;
        Ok((tensor.name.clone(), tensor_from_bytes(tensor.dtype, &tensor.shape, &bytes)?))
    };
    header.tensors.iter().map(read).collect()
}
