//! `blockstreamer families [--json] [--plugin-dir DIR]...`

use std::path::PathBuf;

use blockstreamer_host::commands::families;
use blockstreamer_host::plugins::Registry;
use clap::Parser;

#[derive(Parser)]
#[command(name = "blockstreamer")]
enum Command {
    /// What was found, where, which sizes, and what was refused and why.
    Families {
        #[arg(long)]
        json: bool,
        #[arg(long)]
        plugin_dir: Vec<PathBuf>,
    },
}

fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .init();
    let Command::Families { json, plugin_dir } = Command::parse();
    families::run(&Registry::discover(&plugin_dir), json)
}
