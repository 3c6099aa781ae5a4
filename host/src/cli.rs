//! The command line: what may be typed. What it does is in [`crate::commands`].

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use blockstreamer_core::family::ModelOptions;
use blockstreamer_core::weights::ExpertLayout;

use crate::bench::{BenchCommand, at_least_one};
use crate::engine::{Precision, Tier};
use crate::size::Size;

/// Finetune and run transformer models far larger than the GPU they run on.
#[derive(Debug, Parser)]
#[command(name = "blockstreamer", version, propagate_version = true)]
pub struct Cli {
    /// Folder to look for plugins in, before BLOCKSTREAMER_PLUGIN_PATH and the program's own folder
    #[arg(long = "plugin-dir", value_name = "DIR", global = true)]
    pub plugin_dirs: Vec<PathBuf>,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the model families found, and what was refused and why
    Families {
        /// Print one JSON document
        #[arg(long)]
        json: bool,
    },
    /// Write a random checkpoint in the published layout, with a tokenizer
    Synth(SynthArgs),
    /// What would be where during a training run, and how long a step would take
    Plan(PlanArgs),
    /// Write a model as aligned, checksummed block files
    Shard(ShardArgs),
    /// Train a LoRA adapter
    Train(TrainArgs),
    /// Loss and perplexity of a model on rows
    Eval(EvalArgs),
    /// Write a checkpoint with the change of a LoRA adapter in its weights
    Merge(MergeArgs),
    /// Measure streaming and training beside what the hardware allows
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Check a model family, or a plugin file
    Conformance(ConformanceArgs),
    /// What this machine offers: device, libtorch, link and disk speed, memory, plugins
    Doctor {
        /// Print one JSON document
        #[arg(long)]
        json: bool,
        /// Folder whose disk is measured
        #[arg(long, default_value = ".")]
        path: PathBuf,
    },
}

/// `synth`
#[derive(Debug, Args)]
pub struct SynthArgs {
    /// Family and size, for example qwen3-vl:tiny; `families` lists them
    pub model: String,
    /// Folder to write
    #[arg(long)]
    pub out: PathBuf,
    /// Decoder layers, instead of the size's own number
    #[arg(long)]
    pub layers: Option<usize>,
    /// The same seed gives the same weights
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Largest file
    #[arg(long, default_value = "5GB")]
    pub max_file: Size,
}

/// What is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Mode {
    /// A LoRA adapter on all linears
    #[default]
    Lora,
    /// All weights
    Full,
}

/// How the experts of a model are taken.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct ExpertArgs {
    /// How experts lie in the files, where their shapes cannot tell: in_out, out_in
    #[arg(long, value_parser = expert_layout)]
    pub expert_layout: Option<ExpertLayout>,
    /// Blocks that the experts of a layer are dealt over; if not given, as few as leave room for all slots, or more where that saves reads
    #[arg(long, value_parser = at_least_one)]
    pub expert_groups: Option<usize>,
}

impl ExpertArgs {
    /// The same for a family.
    pub fn options(&self) -> ModelOptions {
        let Self { expert_layout, expert_groups } = *self;
        ModelOptions { num_expert_groups: expert_groups.unwrap_or(1), expert_layout }
    }
}

fn expert_layout(text: &str) -> Result<ExpertLayout, String> {
    serde_json::from_value(text.into())
        .map_err(|_| format!("'{text}' is not known; there are in_out and out_in"))
}

/// `plan`
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Folder of the model
    pub model: PathBuf,
    /// Device memory that may be used; what is free if not given. Without a GPU: that of the GPU to plan for
    #[arg(long, value_name = "SIZE")]
    pub vram: Option<Size>,
    /// Host memory that may be used; what the system leaves if not given
    #[arg(long, value_name = "SIZE")]
    pub ram: Option<Size>,
    /// What is trained
    #[arg(long, value_enum, default_value_t = Mode::Lora)]
    pub mode: Mode,
    /// Tokens of one optimizer step
    #[arg(long, default_value_t = 2048)]
    pub tokens: usize,
    /// Patches of the pictures of one optimizer step; 0: it has none
    #[arg(long, default_value_t = 0)]
    pub patches: usize,
    /// Share of the layers, from the top, that is trained
    #[arg(long, default_value_t = 1.0)]
    pub top_fraction: f64,
    /// Experts
    #[command(flatten)]
    pub experts: ExpertArgs,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// `shard`
#[derive(Debug, Args)]
pub struct ShardArgs {
    /// Folder of the model
    pub model: PathBuf,
    /// Folders to write, separated by commas; every block is striped over all of them
    #[arg(long, value_delimiter = ',', required = true)]
    pub out: Vec<PathBuf>,
    /// Compare existing shards with the model, byte by byte, instead of writing
    #[arg(long)]
    pub verify: bool,
    /// Experts: a run takes shards as they were cut
    #[command(flatten)]
    pub experts: ExpertArgs,
}

/// `train`
#[derive(Debug, Args)]
pub struct TrainArgs {
    /// Run file
    pub config: Option<PathBuf>,
    /// Folder of the model
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// JSONL file of {"text": …} or {"messages": […]} rows
    #[arg(long)]
    pub data: Option<PathBuf>,
    /// Folder of the run
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Go on from the newest checkpoint
    #[arg(long)]
    pub resume: bool,
    /// Device memory that may be used; what is free if not given
    #[arg(long, value_name = "SIZE")]
    pub vram: Option<Size>,
    /// Host memory that may be used; what the system leaves if not given
    #[arg(long, value_name = "SIZE")]
    pub ram: Option<Size>,
    /// File for a Chrome trace of the first three steps after the first one
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Experts
    #[command(flatten)]
    pub experts: ExpertArgs,
    /// Change a setting of the run file: lora.rank=8
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// `eval`
#[derive(Debug, Args)]
pub struct EvalArgs {
    /// Folder of the model
    pub model: PathBuf,
    /// Folder of a LoRA adapter
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    /// JSONL file of rows
    #[arg(long)]
    pub data: PathBuf,
    /// Most tokens of a row; longer rows lose their end
    #[arg(long, default_value_t = 2048)]
    pub sequence_length: usize,
    /// Fewest pixels of a picture; the model's own bound if not given
    #[arg(long)]
    pub min_pixels: Option<usize>,
    /// Most pixels of a picture; the model's own bound if not given
    #[arg(long)]
    pub max_pixels: Option<usize>,
    /// What chat templates print as the current date, for example 2026-11-30; today if not given
    #[arg(long)]
    pub date: Option<jiff::civil::Date>,
    /// Rows of one pass
    #[arg(long, default_value_t = 1)]
    pub batch_size: usize,
    /// auto, cpu, cuda, cuda:N
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Compute dtype
    #[arg(long, value_enum, default_value_t = Precision::Auto)]
    pub dtype: Precision,
    /// Where blocks are while they are not in use
    #[arg(long, value_enum, default_value_t = Tier::Auto)]
    pub tier: Tier,
    /// Device memory that may be used; what is free if not given
    #[arg(long, value_name = "SIZE")]
    pub vram: Option<Size>,
    /// Host memory that may be used; what the system leaves if not given
    #[arg(long, value_name = "SIZE")]
    pub ram: Option<Size>,
    /// Blocks on the device beyond the one in use
    #[arg(long, default_value_t = 2)]
    pub prefetch_ahead: usize,
    /// Experts
    #[command(flatten)]
    pub experts: ExpertArgs,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// What becomes of experts that are packed in MXFP4.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum PackedExpertsArg {
    /// All are stored in BF16
    Bf16,
    /// Those that change are packed again, with a loss that is reported
    Mxfp4,
}

/// `merge`
#[derive(Debug, Args)]
pub struct MergeArgs {
    /// Folder of the model
    pub model: PathBuf,
    /// Folder of a LoRA adapter
    #[arg(long)]
    pub adapter: PathBuf,
    /// Folder to write
    #[arg(long)]
    pub out: PathBuf,
    /// auto, cpu, cuda, cuda:N
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// What becomes of experts that are packed in MXFP4, when the adapter changes some
    #[arg(long, value_enum)]
    pub experts: Option<PackedExpertsArg>,
    /// How experts lie in the files, where their shapes cannot tell: in_out, out_in
    #[arg(long, value_parser = expert_layout)]
    pub expert_layout: Option<ExpertLayout>,
    /// Largest file
    #[arg(long, default_value = "5GB")]
    pub max_file: Size,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// `conformance`
#[derive(Debug, Args)]
pub struct ConformanceArgs {
    /// Name of a family, or path of a plugin
    pub family: String,
    /// Folder with a checkpoint and golden tensors, as goldens/make_tiny.py writes it
    #[arg(long, value_name = "DIR")]
    pub golden: Vec<PathBuf>,
    /// auto, cpu, cuda, cuda:N
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// fp32 or bf16
    #[arg(long, value_enum, default_value_t = Precision::Fp32)]
    pub dtype: Precision,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}
