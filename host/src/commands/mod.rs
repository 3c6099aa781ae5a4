//! What each command does. `Ok(false)` is work that was done and found something wrong.

mod bench;
mod conformance;
mod doctor;
mod eval;
pub mod families;
mod merge;
mod plan;
mod shard;
mod synth;
mod train;

use std::io::Write;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};

use crate::cli::{Cli, Command};
use crate::plugins::Registry;

/// Runs the command that was typed.
///
/// # Errors
/// Whatever keeps it from doing its work, for people to read.
pub fn run(cli: Cli) -> Result<bool> {
    // Before anything asks libtorch about CUDA: it keeps its first answer.
    if let Err(reason) = blockstreamer_core::device::load_cuda() {
        tracing::debug!(%reason, "CUDA is not available");
    }
    let registry = Registry::discover(&cli.plugin_dirs);
    match cli.command {
        Command::Families { json } => families::run(&registry, json).map(|()| true),
        Command::Synth(args) => synth::run(&registry, &args).map(|()| true),
        Command::Plan(args) => plan::run(&registry, &args).map(|()| true),
        Command::Shard(args) => shard::run(&registry, &args),
        Command::Train(args) => train::run(&registry, args).map(|()| true),
        Command::Eval(args) => eval::run(&registry, &args).map(|()| true),
        Command::Merge(args) => merge::run(&registry, &args).map(|()| true),
        Command::Bench(what) => bench::run(&registry, &what).map(|()| true),
        Command::Conformance(args) => conformance::run(&registry, &args),
        Command::Doctor { json, path } => doctor::run(&registry, json, &path).map(|()| true),
    }
}

/// Prints a result on stdout. A reader that went away (`| head`) is no failure.
fn print(text: &str) -> Result<()> {
    match writeln!(std::io::stdout().lock(), "{text}") {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to stdout"),
    }
}

fn print_json(document: &impl serde::Serialize) -> Result<()> {
    print(&serde_json::to_string_pretty(document)?)
}

/// A bar on stderr for bytes of which the total becomes known.
fn byte_bar() -> ProgressBar {
    let bar = ProgressBar::new(0);
    if let Ok(style) =
        ProgressStyle::with_template("{bar:30} {bytes}/{total_bytes}  {bytes_per_sec}  {msg}")
    {
        bar.set_style(style);
    }
    bar
}
