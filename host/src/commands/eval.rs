//! `eval`: loss and perplexity on rows.

use anyhow::{Context, Result};
use blockstreamer_core::adapter::{Adapter, Lora};
use blockstreamer_core::device::set_deterministic;
use serde_json::json;

use super::{print, print_json};
use crate::cli::EvalArgs;
use crate::data::{BatchOptions, DatasetOptions, Overflow};
use crate::engine::{Job, Launch, OpenModel, StreamConfig, device};
use crate::plugins::Registry;
use crate::run::load_rows;

pub(super) fn run(registry: &Registry, args: &EvalArgs) -> Result<()> {
    let device = device(&args.device)?;
    set_deterministic(true)?;
    let open = OpenModel::open(registry, &args.model)?;
    let rows =
        DatasetOptions { sequence_length: args.sequence_length, overflow: Overflow::Truncate };
    let order =
        BatchOptions { batch_size: args.batch_size, micro_batches: 1, seed: 0, shuffle: false };
    let batches = load_rows(&open, &args.data, rows, order)?;
    let stream = StreamConfig {
        tier: args.tier,
        vram: args.vram,
        ram: args.ram,
        prefetch_ahead: args.prefetch_ahead,
        ..StreamConfig::default()
    };
    let rows_per_pass = ROWS_PER_PASS.div_ceil(args.batch_size);
    let launch = Launch {
        registry,
        open: &open,
        stream: &stream,
        device,
        dtype: args.dtype,
        job: Job {
            trains: false,
            tokens: args.batch_size * batches.longest_row(),
            num_micro_batches: rows_per_pass,
        },
        seed: 0,
    };
    let sites = open.model.sites()?;
    let adapter = || -> Result<Option<Box<dyn Adapter>>> {
        let Some(folder) = &args.adapter else { return Ok(None) };
        Ok(Some(Box::new(Lora::import(folder, &sites, device)?)))
    };
    let executor = launch.start(&adapter)?.executor;

    // Many rows pass through a block during one visit: weights are read once for all of them.
    let (mut sum, mut num_targets, mut num_rows) = (0.0, 0_usize, 0);
    let steps = batches.in_order().collect::<Result<Vec<_>, _>>()?;
    for group in steps.chunks(rows_per_pass) {
        let group: Vec<_> = group.iter().flat_map(|step| step.batches.iter().cloned()).collect();
        num_rows += group.iter().map(|batch| batch.input_ids.size()[0]).sum::<i64>();
        let loss = executor.evaluate(&group)?;
        sum += executor.loss_value(&loss)? * loss.num_targets as f64;
        num_targets += loss.num_targets;
    }
    let loss = sum / num_targets.max(1) as f64;
    if args.json {
        return print_json(&json!({
            "loss": loss,
            "perplexity": loss.exp(),
            "targets": num_targets,
            "rows": num_rows,
        }));
    }
    print(&format!(
        "loss {loss:.6}  perplexity {:.4}  over {num_targets} tokens of {num_rows} rows",
        loss.exp()
    ))
    .context("cannot report")
}

/// Rows that share one visit of each block.
const ROWS_PER_PASS: usize = 16;
