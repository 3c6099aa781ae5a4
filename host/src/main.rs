//! The `blockstreamer` program.

use std::io::IsTerminal;
use std::process::ExitCode;

use blockstreamer_host::cli::Cli;
use blockstreamer_host::commands;
use clap::Parser;
use tracing_subscriber::EnvFilter;

/// The error with its causes, each said once: some errors quote their cause themselves.
fn explain(error: &anyhow::Error) -> String {
    error.chain().skip(1).fold(error.to_string(), |text, cause| {
        let cause = cause.to_string();
        if text.contains(&cause) { text } else { format!("{text}: {cause}") }
    })
}

fn main() -> ExitCode {
    // Logs go to stderr: stdout belongs to results, and with --json to one document.
    let filter =
        EnvFilter::try_from_env("BLOCKSTREAMER_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
    // clap ends the program with exit code 2 on wrong usage.
    match commands::run(Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            // Not through the log, which may be turned off.
            eprintln!("error: {}", explain(&error));
            ExitCode::FAILURE
        }
    }
}
