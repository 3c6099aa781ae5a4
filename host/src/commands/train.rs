//! `train`: a LoRA adapter over streamed blocks.

use anyhow::Result;

use super::print;
use crate::cli::TrainArgs;
use crate::plugins::Registry;
use crate::run::{Overrides, RunConfig, train};
use crate::size::Size;

pub(super) fn run(registry: &Registry, args: TrainArgs) -> Result<()> {
    let overrides = Overrides { model: args.model, data: args.data, out: args.out, set: args.set };
    let config = RunConfig::load(args.config.as_deref(), &overrides)?;
    let summary = train(registry, &config, args.resume)?;
    let stats = &summary.stats;
    print(&format!(
        "loss {:.4} -> {:.4} in {} steps\n\
         read {} from storage, copied {} to the device\n\
         at most {} blocks on the device ({})\n\
         adapter in {}",
        summary.first_loss,
        summary.last_loss,
        summary.steps,
        Size { num_bytes: stats.read_bytes },
        Size { num_bytes: stats.h2d_bytes },
        stats.peak_resident_blocks,
        Size { num_bytes: stats.peak_bytes },
        summary.adapter.display()
    ))
}
