//! Random checkpoints in the published layout.
//!
//! Values come from a table of 65,536, indexed by 16 bits of a counter-based stream (SplitMix64 of seed,
//! tensor name and position): one multiplication chain gives four values, any part of any tensor can be
//! filled alone, and the result depends on neither threads nor file sizes. Making values takes a core less
//! time than any drive takes for them; they are written past the page cache, several pieces at a time. The table is the normal
//! distribution on a grid of 256 radii by 256 angles (Box-Muller), cut at 3.5 standard deviations.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;
use tch::{Kind, Tensor};

use super::atomic::{AtomicDirectory, remove_partials};
use super::identity::Fingerprint;
use super::sized_file::page_part;
use super::tensor_bytes;
use super::weight_files::{NewTensor, WeightFiles};
use crate::device::HostBuffer;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::weights::{Role, Weight, WeightTable};

/// Written beside the weights: says that they are random, and marks the folder as ours to replace.
pub(crate) const MARKER_FILE: &str = "synthetic.json";
/// Bytes that a thread fills and writes at once, at most.
const PIECE_BYTES: usize = 8 << 20;
/// At least as many threads fill and write: those that wait for the drive need no core.
const MIN_THREADS: usize = 8;
/// Entries of a value table.
const NUM_VALUES: usize = 1 << 16;

/// Standard deviation of random MXFP4 codes with a scale that is one of 1/4, 1/2, 1, 2 and 4, all equally
/// likely: the root of 68.5/8, the mean of the squared codes, times 341/80, that of the squared scales.
const MXFP4_DEVIATION: f64 = 6.041;

/// What to write where.
#[derive(Debug, Clone)]
pub struct SynthesizeOptions {
    /// The folder. It may be empty or hold an earlier synthetic checkpoint, which is replaced.
    pub directory: PathBuf,
    /// Text of `config.json`.
    pub config_json: String,
    /// The same seed gives the same bytes.
    pub seed: u64,
    /// Standard deviation of linears, embeddings and biases, and of norm scales around one; of packed numbers
    /// as nearly as powers of two allow.
    pub initializer_range: f64,
    /// Largest file, unless a single tensor is larger.
    pub max_file_bytes: u64,
    /// Further files of the folder, by name: tokenizer, chat template.
    pub extra_files: Vec<(String, Vec<u8>)>,
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Synthesized {
    /// Safetensors files.
    pub num_files: usize,
    /// Tensors in them.
    pub num_tensors: usize,
    /// Bytes of all tensors.
    pub num_bytes: u64,
}

/// One tensor to write.
struct Target<'a> {
    weight: &'a Weight,
    dtype: Dtype,
    num_bytes: usize,
    seed: u64,
    values: usize,
}

/// One part of one tensor.
struct Piece {
    target: usize,
    start_bytes: usize,
    num_bytes: usize,
    /// How far behind the start of a page it starts in its file.
    skipped_bytes: usize,
}

/// Writes a random checkpoint for `table`: `config.json`, the weights in one file or in several with an
/// index, and the extra files. The folder appears whole or not at all.
///
/// # Errors
/// [`Error::File`] when the folder holds something else; [`Error::Tensor`] when the table contradicts
/// itself; [`Error::Io`], for example when the disk is full.
pub fn synthesize(table: &WeightTable, options: &SynthesizeOptions) -> Result<Synthesized> {
    let (targets, values) = targets(table, options)?;
    remove_partials(&options.directory)?;
    let directory = AtomicDirectory::create(&options.directory, MARKER_FILE)?;
    let write = |name: &str, bytes: &[u8]| {
        let path = directory.path().join(name);
        std::fs::write(&path, bytes).map_err(Error::io("write", options.directory.join(name)))
    };

    let tensors: Vec<_> = (targets.iter())
        .map(|target| NewTensor {
            name: &target.weight.checkpoint,
            dtype: target.dtype,
            shape: &target.weight.shape,
            num_bytes: target.num_bytes,
        })
        .collect();
    let files = WeightFiles::create(
        directory.path(),
        &options.directory,
        &tensors,
        options.max_file_bytes,
    )?;
    let mut pieces = Vec::new();
    for (target, tensor) in tensors.iter().enumerate() {
        let mut start_bytes = 0;
        while start_bytes < tensor.num_bytes {
            // All but the first start at a page of the file.
            let skipped_bytes = page_part(files.offset_bytes(target) + start_bytes as u64);
            let num_bytes = (PIECE_BYTES - skipped_bytes).min(tensor.num_bytes - start_bytes);
            pieces.push(Piece { target, start_bytes, num_bytes, skipped_bytes });
            start_bytes += num_bytes;
        }
    }
    fill_all(&targets, &values, &pieces, &files)?;

    let num_bytes = targets.iter().map(|target| target.num_bytes as u64).sum();
    for (name, bytes) in &options.extra_files {
        write(name, bytes)?;
    }
    let marker = json!({
        "note": "random weights",
        "tool": concat!("blockstreamer-core ", env!("CARGO_PKG_VERSION")),
        "seed": options.seed,
        "initializer_range": options.initializer_range,
    });
    write(MARKER_FILE, format!("{marker:#}").as_bytes())?;
    write("config.json", options.config_json.as_bytes())?;
    directory.commit()?;
    Ok(Synthesized { num_files: files.num_files(), num_tensors: targets.len(), num_bytes })
}

/// Every checkpoint tensor once, and the value tables that they draw from.
fn targets<'a>(
    table: &'a WeightTable,
    options: &SynthesizeOptions,
) -> Result<(Vec<Target<'a>>, Vec<Vec<u8>>)> {
    let mut targets: Vec<Target<'a>> = Vec::new();
    let mut positions = BTreeMap::new();
    let mut values: Vec<(Role, Vec<u8>)> = Vec::new();
    for weight in &table.weights {
        if let Some(position) = positions.get(&weight.checkpoint) {
            let first: &Target<'_> = &targets[*position];
            if first.weight.shape != weight.shape {
                let message = format!(
                    "the weight table gives it the shapes {:?} and {:?}",
                    first.weight.shape, weight.shape
                );
                return Err(Error::tensor(&weight.checkpoint, message));
            }
            continue;
        }
        positions.insert(&weight.checkpoint, targets.len());
        let dtype = weight.role.buffer_dtype().unwrap_or(table.dtype);
        let num_bytes = (weight.shape.iter())
            .try_fold(dtype.size_bytes(), |bytes, extent| bytes.checked_mul(*extent))
            .ok_or_else(|| Error::tensor(&weight.checkpoint, "its shape is too large"))?;
        // Tied tensors take the role of their first place.
        let table_position = match values.iter().position(|entry| entry.0 == weight.role) {
            Some(position) => position,
            None => {
                let bytes = value_table(weight.role, dtype, options.initializer_range)?;
                values.push((weight.role, bytes));
                values.len() - 1
            }
        };
        let mut fingerprint = Fingerprint::new();
        fingerprint.add(&options.seed.to_le_bytes());
        fingerprint.add(weight.checkpoint.as_bytes());
        let hash = fingerprint.value();
        let seed = (hash >> 64) as u64 ^ hash as u64;
        targets.push(Target { weight, dtype, num_bytes, seed, values: table_position });
    }
    Ok((targets, values.into_iter().map(|entry| entry.1).collect()))
}

/// The 65,536 values of a role, as bytes of `dtype`.
fn value_table(role: Role, dtype: Dtype, initializer_range: f64) -> Result<Vec<u8>> {
    let normal = |index: usize| {
        let radius = (-2.0 * (((index / 256) as f64 + 0.5) / 256.0).ln()).sqrt();
        radius * (std::f64::consts::TAU * ((index % 256) as f64 + 0.5) / 256.0).cos()
    };
    let middle = (127.0 + (initializer_range / MXFP4_DEVIATION).log2()).round();
    let value = |index: usize| match (role, dtype) {
        (Role::Buffer(_), Dtype::BOOL) => (index % 2) as f64,
        (Role::Buffer(_), Dtype::U8) => (index % 256) as f64,
        (Role::Buffer(_), dtype) if !dtype.is_float() => (index % 128) as f64,
        // Two codes per byte, every one as likely as the others.
        (Role::Mxfp4Blocks, _) => (index % 256) as f64,
        (Role::Mxfp4Scales, _) => (middle - 2.0 + (index % 5) as f64).clamp(0.0, 254.0),
        (Role::NormScale, _) => 1.0 + initializer_range * normal(index),
        _ => initializer_range * normal(index),
    };
    let values: Vec<f64> = (0..NUM_VALUES).map(value).collect();
    let values = Tensor::f_from_slice(&values)?;
    // libtorch goes to 8 bits by way of fp32 in any case.
    tensor_bytes(&values.f_to_kind(Kind::Float)?.f_to_kind(dtype.kind())?)
}

/// Fills and writes all pieces on several threads.
fn fill_all(
    targets: &[Target<'_>],
    values: &[Vec<u8>],
    pieces: &[Piece],
    files: &WeightFiles,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let work = || {
        // It starts at a page, so that a piece can lie in memory as it will in the file.
        let mut buffer = HostBuffer::new(PIECE_BYTES)?;
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            let target = &targets[piece.target];
            let bytes = &mut buffer.bytes_mut()[piece.skipped_bytes..][..piece.num_bytes];
            fill(target.dtype, target.seed, &values[target.values], piece.start_bytes, bytes);
            files.write(piece.target, piece.start_bytes, bytes).inspect_err(|_| {
                // The others need not go on.
                next.store(pieces.len(), Ordering::Relaxed);
            })?;
        }
        Ok(())
    };
    let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
    let num_threads = num_cores.max(MIN_THREADS).min(pieces.len());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..num_threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| {
            thread
                .join()
                .unwrap_or_else(|_| Err(Error::usage("a thread that fills weights panicked")))
        })
    })
}

/// Bytes `start_bytes..` of the tensor with this seed.
fn fill(dtype: Dtype, seed: u64, values: &[u8], start_bytes: usize, into: &mut [u8]) {
    match dtype.size_bytes() {
        1 => fill_elements::<1>(seed, values, start_bytes, into),
        2 => fill_elements::<2>(seed, values, start_bytes, into),
        4 => fill_elements::<4>(seed, values, start_bytes, into),
        _ => fill_elements::<8>(seed, values, start_bytes, into),
    }
}

fn fill_elements<const SIZE: usize>(seed: u64, values: &[u8], start_bytes: usize, into: &mut [u8]) {
    // Of a length that the compiler knows: no look-up is checked.
    let values = &values.as_chunks::<SIZE>().0[..NUM_VALUES];
    let first = start_bytes / SIZE;
    let elements = into.as_chunks_mut::<SIZE>().0;
    let (before, elements) = elements.split_at_mut(((4 - first % 4) % 4).min(elements.len()));
    let quartet = |word: u64| {
        let bits = split_mix(seed, word);
        [0, 16, 32, 48].map(|shift| values[usize::from((bits >> shift) as u16)])
    };
    for (element, value) in before.iter_mut().zip(quartet(first as u64 / 4).iter().skip(first % 4))
    {
        *element = *value;
    }
    let first_word = first.div_ceil(4) as u64;
    let (quartets, after) = elements.as_chunks_mut::<4>();
    for (word, into) in (first_word..).zip(&mut *quartets) {
        *into = quartet(word);
    }
    for (element, value) in after.iter_mut().zip(quartet(first_word + quartets.len() as u64)) {
        *element = value;
    }
}

/// Word number `position` of the stream `seed`. Source: Steele, Lea and Flood, "Fast splittable
/// pseudorandom number generators" (2014), in the variant 13 of its finaliser.
fn split_mix(seed: u64, position: u64) -> u64 {
    let state = seed.wrapping_add(position.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_filled_in_parts_is_the_tensor_filled_at_once() {
        for dtype in [Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::F64] {
            let values = value_table(Role::Linear, dtype, 0.02).unwrap();
            let mut whole = vec![0; 4096 + 24];
            fill(dtype, 5, &values, 0, &mut whole);
            let mut parts = vec![0; whole.len()];
            // Some start amid four elements, some end there, some do both.
            let size = dtype.size_bytes();
            let mut start = 0;
            for num_elements in [256, 3, 8, 2, 1, 1, 5, 5000] {
                let end = parts.len().min(start + size * num_elements);
                fill(dtype, 5, &values, start, &mut parts[start..end]);
                start = end;
            }
            assert_eq!(whole, parts, "{dtype:?}");
        }
    }
}
