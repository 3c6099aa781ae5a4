//! Everything about bytes on disk: headers, layouts, sources, shards, atomic and synthetic files.
//!
//! The files are made here byte by byte, not by the code under test.

// The lint knows tests, but not their helpers.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod atomic;
mod checkpoint;
mod extents;
mod layout;
mod reading;
mod shards;
mod sources;
mod stripes;
mod synthesize;
mod tensors;
mod tiered;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use blockstreamer_core::block::{BlockIndex, Placement};
use blockstreamer_core::checkpoint::{Checkpoint, Layout};
use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::source::BlockSource;
use blockstreamer_core::weights::{BlockPlan, Role, Weight, WeightTable};

/// A small deterministic generator (SplitMix64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn bytes(&mut self, num_bytes: usize) -> Vec<u8> {
        (0..num_bytes).map(|_| self.next() as u8).collect()
    }
}

/// A tensor of a file made by hand.
#[derive(Clone)]
struct Made {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn made(name: &str, dtype: Dtype, shape: &[usize], numbers: &mut Numbers) -> Made {
    let mut bytes = numbers.bytes(shape.iter().product::<usize>() * dtype.size_bytes());
    if dtype == Dtype::BOOL {
        bytes.iter_mut().for_each(|byte| *byte &= 1);
    }
    Made { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes }
}

/// A safetensors file whose data starts after `padding` more spaces: any alignment can be had.
fn file_bytes(tensors: &[Made], padding: usize) -> Vec<u8> {
    let (mut header, mut data) = (String::from("{"), Vec::new());
    for Made { name, dtype, shape, bytes } in tensors {
        let (start, end) = (data.len(), data.len() + bytes.len());
        let comma = if header.len() > 1 { "," } else { "" };
        let dtype = dtype.name();
        write!(header, r#"{comma}"{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#).unwrap();
        data.extend_from_slice(bytes);
    }
    header.push('}');
    header.push_str(&" ".repeat(padding));
    raw_file(header.as_bytes(), &data)
}

fn raw_file(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

/// A folder with `config.json` and the given files.
fn folder(files: &[(&str, Vec<u8>)]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("config.json"), "{}").unwrap();
    for (name, bytes) in files {
        std::fs::write(directory.path().join(name), bytes).unwrap();
    }
    directory
}

fn index_of(entries: &[(&str, &str)]) -> Vec<u8> {
    let map: serde_json::Map<_, _> =
        entries.iter().map(|(name, file)| ((*name).to_owned(), (*file).into())).collect();
    serde_json::json!({ "weight_map": map }).to_string().into_bytes()
}

/// The error's text, which must hold every one of `parts`.
#[track_caller]
fn assert_says<T>(result: blockstreamer_core::Result<T>, parts: &[&str]) {
    let text = result.err().expect("an error").to_string();
    for part in parts {
        assert!(text.contains(part), "'{part}' is not in: {text}");
    }
}

/// A checkpoint on disk with its table and, per block, the tensors that must be found there.
struct Fixture {
    directory: tempfile::TempDir,
    table: WeightTable,
    expected: Vec<Vec<Made>>,
}

impl Fixture {
    /// Random blocks over random files: all dtypes, any alignment, tied and sliced tensors, blocks that
    /// straddle files, blocks without tensors.
    fn random(seed: u64) -> Self {
        let numbers = &mut Numbers(seed);
        let mut table = WeightTable::new(Dtype::BF16);
        let mut expected = Vec::new();
        let mut stored: Vec<Made> = Vec::new();
        let num_blocks = 1 + numbers.below(5);
        for block in 0..num_blocks {
            let placement =
                if block + 1 == num_blocks { Placement::Resident } else { Placement::Streamed };
            table.add(BlockPlan::new(format!("block.{block}"), placement, None), 0, &[]);
            let mut tensors = Vec::new();
            for position in 0..numbers.below(7) {
                let local = format!("tensor.{position}");
                let tied = !stored.is_empty() && numbers.below(4) == 0;
                if !tied {
                    let dtype = ALL_DTYPES[numbers.below(ALL_DTYPES.len())];
                    let shape: Vec<_> = (0..numbers.below(4)).map(|_| numbers.below(9)).collect();
                    stored.push(made(&format!("{block}.{position}"), dtype, &shape, numbers));
                }
                let source = match tied {
                    true => stored[numbers.below(stored.len())].clone(),
                    false => stored[stored.len() - 1].clone(),
                };
                // The first use takes all of it, so that nothing is left over.
                let rows = source.shape.first().copied().filter(|_| tied).map(|extent| {
                    let start = numbers.below(extent + 1);
                    start..start + numbers.below(extent - start + 1)
                });
                tensors.push(cut(&source, &local, rows.clone()));
                table.weights.push(Weight {
                    checkpoint: source.name,
                    shape: source.shape,
                    slice: rows,
                    block: BlockIndex(block),
                    local,
                    role: Role::Buffer(source.dtype),
                });
            }
            expected.push(tensors);
        }
        // Dealt at random: neighbours in a block end up in different files.
        let mut files = vec![Vec::new(); 1 + numbers.below(3)];
        for tensor in stored {
            let file = numbers.below(files.len());
            files[file].push(tensor);
        }
        let named: Vec<_> = (files.iter().enumerate())
            .map(|(file, tensors)| {
                (format!("part-{file}.safetensors"), file_bytes(tensors, numbers.below(8)))
            })
            .collect();
        let borrowed: Vec<_> =
            named.iter().map(|(name, bytes)| (name.as_str(), bytes.clone())).collect();
        Self { directory: folder(&borrowed), table, expected }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn checkpoint(&self) -> Checkpoint {
        Checkpoint::open(self.path()).unwrap()
    }

    fn layout(&self) -> Layout {
        Layout::new(&self.checkpoint(), &self.table, None, |_| Ok(false)).unwrap()
    }

    /// The image that a block must have, made from its tensors alone.
    fn image(&self, block: usize) -> Vec<u8> {
        let mut image = Vec::new();
        for tensor in &self.expected[block] {
            image.resize(image.len().next_multiple_of(256), 0);
            image.extend_from_slice(&tensor.bytes);
        }
        image.resize(image.len().next_multiple_of(256), 0);
        image
    }

    /// Checks every image, whole and in random ranges.
    fn check(&self, source: &dyn BlockSource, numbers: &mut Numbers) {
        assert_eq!(source.blocks(), self.layout().blocks);
        for block in 0..self.expected.len() {
            let image = self.image(block);
            assert_eq!(read(source, block, 0..image.len()), image);
            for _ in 0..8 {
                let start = numbers.below(image.len() + 1);
                let end = start + numbers.below(image.len() - start + 1);
                assert_eq!(read(source, block, start..end), image[start..end]);
            }
        }
    }
}

const ALL_DTYPES: [Dtype; 12] = [
    Dtype::F64,
    Dtype::F32,
    Dtype::F16,
    Dtype::BF16,
    Dtype::F8E4M3,
    Dtype::F8E5M2,
    Dtype::I64,
    Dtype::I32,
    Dtype::I16,
    Dtype::I8,
    Dtype::U8,
    Dtype::BOOL,
];

fn cut(source: &Made, local: &str, rows: Option<std::ops::Range<usize>>) -> Made {
    let mut tensor = Made { name: local.to_owned(), ..source.clone() };
    if let Some(rows) = rows {
        let row_bytes = source.bytes.len() / source.shape[0].max(1);
        tensor.bytes = source.bytes[rows.start * row_bytes..rows.end * row_bytes].to_vec();
        tensor.shape[0] = rows.len();
    }
    tensor
}

fn read(source: &dyn BlockSource, block: usize, range: std::ops::Range<usize>) -> Vec<u8> {
    // Not zero, so that a gap that is left alone is found.
    let mut bytes = vec![0xa5; range.len()];
    source.read(BlockIndex(block), range, &mut bytes).unwrap();
    bytes
}

/// Names of everything in a folder, hidden files included.
fn names_in(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Flips one bit of a file.
fn damage(path: &PathBuf, offset: usize) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[offset] ^= 0x10;
    std::fs::write(path, bytes).unwrap();
}
