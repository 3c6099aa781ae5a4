//! The `blockstreamer` program.

use std::io::IsTerminal;
use std::process::ExitCode;

use blockstreamer_host::cli::{Cli, Command};
use blockstreamer_host::commands;
use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing_subscriber::EnvFilter;

/// The error with its causes, each said once: some errors quote their cause themselves.
fn explain(error: &anyhow::Error) -> String {
    error.chain().skip(1).fold(error.to_string(), |text, cause| {
        let cause = cause.to_string();
        if text.contains(&cause) { text } else { format!("{text}: {cause}") }
    })
}

/// Shards have a file per block and folder, and several readers open all of them: as many as the system allows.
fn allow_many_files() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::debug!(%error, "the number of open files keeps its limit");
    }
}

fn main() -> ExitCode {
    // Logs go to stderr: stdout belongs to results, and with --json to one document.
    // clap ends the program with exit code 2 on wrong usage.
    let cli = Cli::parse();
    // Its hundreds of short runs would each say how they read.
    let level = if matches!(cli.command, Command::Conformance(_)) { "warn" } else { "info" };
    let filter =
        EnvFilter::try_from_env("BLOCKSTREAMER_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
    allow_many_files();
    match commands::run(cli) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            // Not through the log, which may be turned off.
            eprintln!("error: {}", explain(&error));
            ExitCode::FAILURE
        }
    }
}
