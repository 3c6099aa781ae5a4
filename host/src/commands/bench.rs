//! `bench`: measurements beside what the hardware allows.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use super::{print, print_json, synth};
use crate::bench::{BenchCommand, StepArgs, bench_step, bench_stream};
use crate::cli::SynthArgs;
use crate::plugins::Registry;
use crate::size::Size;

/// Largest file of a model that is written, as the published ones have it.
const MAX_FILE_BYTES: u64 = 5_000_000_000;

pub(super) fn run(registry: &Registry, what: &BenchCommand) -> Result<()> {
    match what {
        BenchCommand::Stream(args) => show(&bench_stream(args)?, args.json),
        BenchCommand::Step(args) => {
            let model = model(registry, args)?;
            show(&bench_step(registry, &model, args)?, args.json)
        }
    }
}

fn show(report: &(impl Display + Serialize), json: bool) -> Result<()> {
    if json { print_json(report) } else { print(&report.to_string()) }
}

/// The folder of the model to measure; a family and size are written first, unless they were before.
fn model(registry: &Registry, args: &StepArgs) -> Result<PathBuf> {
    let folder = Path::new(&args.model);
    if folder.is_dir() {
        if args.layers.is_some() {
            bail!("--layers is for a model that is written; {} is there already", folder.display());
        }
        return Ok(folder.to_owned());
    }
    if !args.model.contains(':') {
        bail!(
            "{} is no folder; name one, or a family and size, for example qwen3-vl:8b",
            args.model
        );
    }
    let layers = args.layers.map_or_else(String::new, |layers| format!("-{layers}"));
    let default = || std::env::temp_dir().join("blockstreamer-bench");
    let work_dir = args.work_dir.clone().unwrap_or_else(default);
    let out = work_dir.join(format!("{}{layers}", args.model.replace([':', '/'], "-")));
    // `synth` writes a folder whole or not at all.
    if !out.join("config.json").exists() {
        let max_file = Size { num_bytes: MAX_FILE_BYTES };
        let (model, layers) = (args.model.clone(), args.layers);
        let args = SynthArgs { model, out: out.clone(), layers, seed: 0, max_file };
        // A size that is not there leaves no folder.
        synth::config(registry, &args)?;
        std::fs::create_dir_all(&work_dir)
            .with_context(|| format!("cannot make the folder {}", work_dir.display()))?;
        tracing::info!("writing {} to {}", args.model, out.display());
        synth::write(registry, &args)?;
    }
    Ok(out)
}
