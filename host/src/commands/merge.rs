//! `merge`: a checkpoint with the change of a LoRA adapter in its weights.

use std::fmt::Write;

use anyhow::{Context, Result};
use blockstreamer_core::adapter::Lora;
use blockstreamer_core::family::ModelOptions;
use blockstreamer_core::merge::{
    MergeInputs, MergeOptions, MergeProgress, Merged, PackedExperts, PackingLoss, merge,
};
use serde_json::json;

use super::{byte_bar, print, print_json};
use crate::cli::{MergeArgs, PackedExpertsArg};
use crate::engine::{OpenModel, device};
use crate::plugins::Registry;
use crate::size::Size;

/// Errors of packing, in units of the change, from which nothing is left of it.
const ALL_LOST: f64 = 0.95;

pub(super) fn run(registry: &Registry, args: &MergeArgs) -> Result<()> {
    let device = device(&args.device)?;
    let layout = ModelOptions { expert_layout: args.expert_layout, ..ModelOptions::default() };
    let open = OpenModel::open(registry, &args.model, layout)?;
    let sites = open.model.sites()?;
    let adapter = Lora::import(&args.adapter, &sites, device)
        .with_context(|| format!("cannot use the adapter in {}", args.adapter.display()))?;
    let inputs = MergeInputs {
        checkpoint: &open.checkpoint,
        table: &open.model.weights()?,
        layout: &open.layout,
        sites: &sites,
        adapter: &adapter,
    };
    let options = MergeOptions {
        also_read: vec![args.adapter.clone()],
        packed_experts: args.experts.map(|experts| match experts {
            PackedExpertsArg::Bf16 => PackedExperts::Bf16,
            PackedExpertsArg::Mxfp4 => PackedExperts::Mxfp4,
        }),
        device,
        max_file_bytes: args.max_file.num_bytes,
        ..MergeOptions::new(&args.out)
    };
    let bar = byte_bar();
    let merged = merge(inputs, &options, &mut |progress: MergeProgress<'_>| {
        bar.set_length(progress.total_bytes);
        bar.set_position(progress.done_bytes);
        bar.set_message(progress.tensor.to_owned());
    })?;
    bar.finish_and_clear();
    let error = PackingLoss::total(&merged.losses).map_or(0.0, |total| total.relative_error());
    if error >= ALL_LOST {
        tracing::warn!(
            "packing again has lost what the adapter changed (the error is {error:.2} times the change): \
             merge with --experts bf16, or use the adapter beside the model"
        );
    }
    report(args, &merged)
}

fn report(args: &MergeArgs, merged: &Merged) -> Result<()> {
    let Merged { num_files, num_tensors, num_changed, num_bytes, packed_experts, losses } = merged;
    let total = PackingLoss::total(losses);
    if args.json {
        return print_json(&json!({
            "out": args.out,
            "files": num_files,
            "tensors": num_tensors,
            "changed": num_changed,
            "bytes": num_bytes,
            "experts": packed_experts.map(PackedExperts::name),
            "packing": total.map(|total| json!({
                "relative_error": total.relative_error(),
                "change_kept": total.change_kept(),
                "tensors": losses.iter().map(PackingLoss::report).collect::<Vec<_>>(),
            })),
        }));
    }
    let mut text = format!(
        "changed {num_changed} of {num_tensors} tensors, {} in {num_files} file(s), in {}",
        Size { num_bytes: *num_bytes },
        args.out.display()
    );
    if let Some(total) = total {
        text +=
            "\npacked again in MXFP4: error beside the change, part of the change that is kept\n";
        for loss in losses.iter().chain([&total]) {
            let (error, kept) = (loss.relative_error(), 100.0 * loss.change_kept());
            writeln!(text, "{error:>8.3}  {kept:>6.1} %  {}", loss.tensor)?;
        }
        text += "with --experts bf16 all of it is kept";
    }
    print(&text)
}
