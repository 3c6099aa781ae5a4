//! A checkpoint with an adapter's change folded into its weights.
//!
//! Work goes checkpoint tensor by checkpoint tensor, in pieces of bounded size, on all cores, whatever blocks the
//! family cuts the model into: read, add `scaling * B A` in fp32 where the adapter has a site, round once to the
//! dtype of the file, write. What no site touches is copied byte by byte.

mod config;
mod loss;
mod plan;
#[cfg(test)]
mod tests;
mod work;

use std::path::{Path, PathBuf};

use serde_json::json;
use tch::Device;

pub use loss::PackingLoss;

use crate::adapter::Adapter;
use crate::checkpoint::atomic::{AtomicDirectory, remove_partials};
use crate::checkpoint::{Checkpoint, Layout, WeightFiles};
use crate::error::{Error, Result};
use crate::site::Site;
use crate::weights::WeightTable;
use plan::Plan;

/// Written beside the weights: says where they come from, and marks the folder as ours to replace.
const MARKER_FILE: &str = "merged.json";

/// What is merged.
#[derive(Debug, Clone, Copy)]
pub struct MergeInputs<'a> {
    /// The model's files.
    pub checkpoint: &'a Checkpoint,
    /// Its weight table.
    pub table: &'a WeightTable,
    /// Both matched.
    pub layout: &'a Layout,
    /// Where its adapters may attach.
    pub sites: &'a [Site],
    /// The change: whatever has [`Adapter::expert_factors`] in fp32.
    pub adapter: &'a dyn Adapter,
}

/// What becomes of experts that are packed in MXFP4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackedExperts {
    /// All of the model are stored in BF16, `[num_experts, in_features, out_features]`, and `config.json`
    /// loses its `quantization_config`.
    Bf16,
    /// Those that change are packed again, which keeps a part of the change alone; the others are copied.
    Mxfp4,
}

impl PackedExperts {
    /// As the command line spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Mxfp4 => "mxfp4",
        }
    }
}

/// How to merge.
#[derive(Debug, Clone)]
pub struct MergeOptions {
    /// The folder. It may be empty or hold an earlier merged checkpoint, which is replaced.
    pub directory: PathBuf,
    /// Folders that are read beside the model's. None of them may lie in `directory`.
    pub also_read: Vec<PathBuf>,
    /// What packed experts become. `None`: there are none, or none that changes.
    pub packed_experts: Option<PackedExperts>,
    /// Where to compute; the adapter is there.
    pub device: Device,
    /// Largest file, unless a single tensor is larger.
    pub max_file_bytes: u64,
    /// Weights that each thread works on at a time, counted in fp32; at least one row. Small pieces stay in the
    /// caches. Of packed experts a thread holds one beside them, as it was and as it becomes.
    pub piece_bytes: usize,
}

impl MergeOptions {
    /// Files of up to 5 GB and pieces of 2 MiB, on the CPU.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
            also_read: Vec::new(),
            packed_experts: None,
            device: Device::Cpu,
            max_file_bytes: 5_000_000_000,
            piece_bytes: 2 << 20,
        }
    }
}

/// How far a merge has come.
#[derive(Debug, Clone, Copy)]
pub struct MergeProgress<'a> {
    /// The tensor at hand.
    pub tensor: &'a str,
    /// Bytes written.
    pub done_bytes: u64,
    /// Bytes of all tensors.
    pub total_bytes: u64,
}

/// What was written.
#[derive(Debug, Clone, PartialEq)]
pub struct Merged {
    /// Safetensors files.
    pub num_files: usize,
    /// Tensors in them.
    pub num_tensors: usize,
    /// Tensors that the adapter changed.
    pub num_changed: usize,
    /// Bytes of all tensors.
    pub num_bytes: u64,
    /// What packed experts became; `None` without any.
    pub packed_experts: Option<PackedExperts>,
    /// What packing cost, for every tensor that was packed again.
    pub losses: Vec<PackingLoss>,
}

/// Writes the checkpoint with the adapter's change in it, in the published names and layout, with all files
/// that lie beside the weights. The folder appears whole or not at all; what an earlier, killed merge left of
/// it is removed first.
///
/// # Errors
/// [`Error::File`] when the folder holds something else, is one that is read, or has no room;
/// [`Error::Adapter`] when the adapter changes nothing in this model; [`Error::Tensor`] for a weight that is
/// tied to one that the adapter leaves alone, for dtypes that cannot take a change, and for results that are
/// not finite; [`Error::Usage`] when it is not said what packed experts become; [`Error::Io`], for example
/// when the disk is full.
pub fn merge(
    inputs: MergeInputs<'_>,
    options: &MergeOptions,
    progress: &mut dyn FnMut(MergeProgress<'_>),
) -> Result<Merged> {
    let _no_graph = tch::no_grad_guard();
    for folder in [&inputs.checkpoint.directory].into_iter().chain(&options.also_read) {
        refuse_inside(folder, &options.directory)?;
    }
    let plan = Plan::new(inputs, options.packed_experts)?;
    let side_files = config::side_files(&inputs.checkpoint.directory)?;
    remove_partials(&options.directory)?;
    let directory = AtomicDirectory::create(&options.directory, MARKER_FILE)?;
    let tensors: Vec<_> = plan.outputs.iter().map(plan::Output::as_new).collect();
    let files = WeightFiles::create(
        directory.path(),
        &options.directory,
        &tensors,
        options.max_file_bytes,
    )?;
    let total_bytes = tensors.iter().map(|tensor| tensor.num_bytes as u64).sum();
    let losses =
        work::run(&plan, inputs.checkpoint, options, &files, &mut |tensor, done_bytes| {
            progress(MergeProgress { tensor, done_bytes, total_bytes });
        })?;

    let place = |name: &str| options.directory.join(name);
    for path in side_files {
        let name = path.file_name().unwrap_or_default();
        std::fs::copy(&path, directory.path().join(name)).map_err(Error::io("copy", &path))?;
    }
    let write = |name: &str, text: String| {
        std::fs::write(directory.path().join(name), text).map_err(Error::io("write", place(name)))
    };
    if plan.packed_experts == Some(PackedExperts::Bf16) {
        write("config.json", config::without_quantization(&inputs.checkpoint.config_json)?)?;
    }
    let total = PackingLoss::total(&losses);
    let marker = json!({
        "note": "weights with the change of an adapter in them",
        "tool": concat!("blockstreamer-core ", env!("CARGO_PKG_VERSION")),
        "experts": plan.packed_experts.map(PackedExperts::name),
        "packing": total.as_ref().map(PackingLoss::report),
    });
    write(MARKER_FILE, format!("{marker:#}\n"))?;
    directory.commit()?;
    Ok(Merged {
        num_files: files.num_files(),
        num_tensors: tensors.len(),
        num_changed: plan.num_changed,
        num_bytes: total_bytes,
        packed_experts: plan.packed_experts,
        losses,
    })
}

/// Refuses to replace a folder that is being read, or that holds it.
fn refuse_inside(read: &Path, written: &Path) -> Result<()> {
    let Ok(written) = written.canonicalize() else { return Ok(()) };
    let read = read.canonicalize().map_err(Error::io("find", read))?;
    if read == written {
        return Err(Error::file(
            written,
            "is read from and cannot be written; choose another folder",
        ));
    }
    if read.starts_with(&written) {
        let message =
            format!("would be replaced, but {} is in it; choose another folder", read.display());
        return Err(Error::file(written, message));
    }
    Ok(())
}
