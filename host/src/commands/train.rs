//! `train`: a LoRA adapter over streamed blocks.

use anyhow::Result;

use super::print;
use crate::cli::TrainArgs;
use crate::plugins::Registry;
use crate::run::{Overrides, RunConfig, TrainOptions, train};
use crate::size::Size;

pub(super) fn run(registry: &Registry, args: TrainArgs) -> Result<()> {
    let overrides = Overrides {
        model: args.model,
        data: args.data,
        out: args.out,
        vram: args.vram,
        ram: args.ram,
        experts: args.experts,
        set: args.set,
    };
    let config = RunConfig::load(args.config.as_deref(), &overrides)?;
    let options = TrainOptions { resume: args.resume, trace: args.trace.as_deref() };
    let summary = train(registry, &config, options)?;
    let stats = &summary.stats;
    let peak = summary.peak_device_bytes.map_or_else(String::new, |num_bytes| {
        format!("; {} of device memory in all", Size { num_bytes: num_bytes as u64 })
    });
    print(&format!(
        "loss {:.4} -> {:.4} in {} steps\n\
         read {} from storage, copied {} to the device\n\
         at most {} blocks on the device ({}){peak}\n\
         waited {:.1} s for reads, {:.1} s for copies, {:.1} s for results\n\
         adapter in {}",
        summary.first_loss,
        summary.last_loss,
        summary.steps,
        Size { num_bytes: stats.read_bytes },
        Size { num_bytes: stats.h2d_bytes },
        stats.peak_resident_blocks,
        Size { num_bytes: stats.peak_bytes },
        stats.host_wait_ms / 1e3,
        stats.compute_wait_ms / 1e3,
        stats.device_wait_ms / 1e3,
        summary.adapter.display()
    ))
}
