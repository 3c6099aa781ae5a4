//! `eval`: loss and perplexity on rows.

use anyhow::{Context, Result, bail};
use blockstreamer_core::adapter::{Adapter, Lora};
use blockstreamer_core::device::set_deterministic;
use blockstreamer_core::site::Site;
use serde_json::json;

use super::{print, print_json};
use crate::cli::EvalArgs;
use crate::data::{BatchOptions, Overflow};
use crate::engine::{Job, Launch, OpenModel, Precision, StreamConfig, device};
use crate::plugins::Registry;
use crate::run::{DataConfig, load_rows};

pub(super) fn run(registry: &Registry, args: &EvalArgs) -> Result<()> {
    let device = device(&args.device)?;
    set_deterministic(true)?;
    let open = OpenModel::open(registry, &args.model, args.experts.options())?;
    let data = DataConfig {
        path: args.data.clone(),
        overflow: Overflow::Truncate,
        min_pixels: args.min_pixels,
        max_pixels: args.max_pixels,
        date: args.date,
        ..DataConfig::default()
    };
    let order =
        BatchOptions { batch_size: args.batch_size, micro_batches: 1, seed: 0, shuffle: false };
    let batches = load_rows(registry, &open, &data, args.sequence_length, order)?;
    let stream = StreamConfig {
        tier: args.tier,
        vram: args.vram,
        ram: args.ram,
        prefetch_ahead: args.prefetch_ahead,
        expert_groups: args.experts.expert_groups,
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
            patches: batches.max_patches(),
        },
        seed: 0,
    };
    let adapter = |sites: &[Site]| -> Result<Option<Box<dyn Adapter>>> {
        let Some(folder) = &args.adapter else { return Ok(None) };
        Ok(Some(Box::new(Lora::import(folder, sites, device)?)))
    };
    let executor = launch.start(&adapter)?.executor;

    // Many rows pass through a block during one visit: weights are read once for all of them.
    let (mut sum, mut num_targets, mut num_rows) = (0.0, 0_usize, 0);
    let mut steps = batches.in_order();
    loop {
        let group = steps.by_ref().take(rows_per_pass).collect::<Result<Vec<_>, _>>()?;
        if group.is_empty() {
            break;
        }
        let group: Vec<_> = group.into_iter().flat_map(|step| step.batches).collect();
        num_rows += group.iter().map(|batch| batch.input_ids.size()[0]).sum::<i64>();
        let of_group = executor.evaluate(&group)?;
        let loss = executor.loss_value(&of_group)?;
        if !loss.is_finite() {
            bail!(
                "the loss of the rows up to number {num_rows} is {loss}: a weight or the adapter is broken, or values \
                 are too large for {}; search the weights: train with --set stream.check_finite=true does before \
                 its first step",
                if args.dtype == Precision::Fp32 {
                    "fp32"
                } else {
                    "this dtype (try --dtype fp32)"
                }
            );
        }
        sum += loss * of_group.num_targets as f64;
        num_targets += of_group.num_targets;
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
