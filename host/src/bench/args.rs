//! What may be typed after `bench`.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use blockstreamer_core::read::ReadMethod;
use clap::{Args, Subcommand, ValueEnum};

use crate::cli::ExpertArgs;
use crate::engine::{Precision, Tier};
use crate::size::Size;

/// Most blocks of `bench stream`: far more than any model has, and few enough to be listed.
const MAX_BLOCKS: usize = 10_000;

/// `bench`
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Stream random blocks with no compute, beside the bare link or drive
    Stream(StreamArgs),
    /// Time full optimizer steps, beside what link, drive and arithmetic allow
    Step(StepArgs),
}

/// Where the blocks of `bench stream` come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StreamTier {
    /// Pinned host memory
    Ram,
    /// Files, one per block
    #[value(alias = "nvme")]
    Disk,
}

/// `bench stream`
#[derive(Debug, Args)]
pub struct StreamArgs {
    /// Where blocks come from
    #[arg(long, value_enum)]
    pub tier: StreamTier,
    /// Blocks of one pass
    #[arg(long, default_value = "36", value_parser = num_blocks)]
    pub blocks: usize,
    /// Size of a block
    #[arg(long, default_value = "368MiB", value_parser = some_bytes)]
    pub block_size: Size,
    /// Folder for the files of tier disk; they are kept and used again
    #[arg(long)]
    pub dir: Option<PathBuf>,
    /// Passes that are timed, after one that is not
    #[arg(long, default_value = "3", value_parser = at_least_one)]
    pub passes: usize,
    /// Blocks on the device beyond the one in use
    #[arg(long, default_value = "2", value_parser = num_ahead)]
    pub prefetch_ahead: usize,
    /// Size of one read and one copy from files
    #[arg(long, value_parser = some_bytes)]
    pub chunk: Option<Size>,
    /// Pinned chunks between files and device
    #[arg(long, value_parser = at_least_one)]
    pub num_chunks: Option<usize>,
    /// Reads of up to 1 MiB under way at a time
    #[arg(long, value_parser = at_least_one)]
    pub queue_depth: Option<usize>,
    /// How files are read: auto, uring, threads, buffered
    #[arg(long, default_value = "auto", value_parser = read_method)]
    pub read: ReadMethod,
    /// auto, cpu, cuda, cuda:N
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// `bench step`
#[derive(Debug, Args)]
pub struct StepArgs {
    /// Folder of a model, or family and size, for example qwen3-vl:8b, to be written first
    pub model: String,
    /// Decoder layers of a model that is written, instead of the size's own number
    #[arg(long, value_parser = at_least_one)]
    pub layers: Option<usize>,
    /// Tokens of a step; with several, one measurement each
    #[arg(long, value_delimiter = ',', default_value = "128,2048", value_parser = at_least_one)]
    pub tokens: Vec<usize>,
    /// Steps that are timed
    #[arg(long, default_value = "6", value_parser = at_least_one)]
    pub steps: usize,
    /// Steps before these
    #[arg(long, default_value = "2", value_parser = at_least_one)]
    pub warmup: usize,
    /// Where blocks are while they are not in use
    #[arg(long, value_enum, default_value_t = Tier::Auto)]
    pub tier: Tier,
    /// Device memory that may be used; what is free if not given
    #[arg(long, value_name = "SIZE")]
    pub vram: Option<Size>,
    /// Host memory that may be used; what the system leaves if not given
    #[arg(long, value_name = "SIZE")]
    pub ram: Option<Size>,
    /// Rank of the adapter
    #[arg(long, default_value = "8", value_parser = at_least_one)]
    pub rank: usize,
    /// Linears with an adapter
    #[arg(long, value_delimiter = ',', default_value = "q_proj,k_proj,v_proj,o_proj")]
    pub target_modules: Vec<String>,
    /// Share of the layers, from the top, with an adapter
    #[arg(long, default_value_t = 0.5)]
    pub top_fraction: f64,
    /// Blocks on the device beyond the one in use
    #[arg(long, default_value_t = 2)]
    pub prefetch_ahead: usize,
    /// auto, cpu, cuda, cuda:N
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Compute dtype
    #[arg(long, value_enum, default_value_t = Precision::Auto)]
    pub dtype: Precision,
    /// Experts
    #[command(flatten)]
    pub experts: ExpertArgs,
    /// Folder for a model that is written; it is kept there and used again [default: a folder in the
    /// system's temporary one]
    #[arg(long)]
    pub work_dir: Option<PathBuf>,
    /// Drop what is cached of the model's files before every step
    #[arg(long)]
    pub cold: bool,
    /// File for a Chrome trace of three more steps; with several token counts the count is put before
    /// the extension
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

pub(crate) fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number >= 1 => Ok(number),
        _ => Err(format!("'{text}' is not a whole number of at least 1")),
    }
}

fn num_blocks(text: &str) -> Result<usize, String> {
    within(text, 1..=MAX_BLOCKS)
}

/// A pass has at least two blocks for each slot.
fn num_ahead(text: &str) -> Result<usize, String> {
    within(text, 0..=MAX_BLOCKS / 2 - 1)
}

fn within(text: &str, range: RangeInclusive<usize>) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if range.contains(&number) => Ok(number),
        _ => Err(format!(
            "'{text}' is not a whole number between {} and {}",
            range.start(),
            range.end()
        )),
    }
}

fn some_bytes(text: &str) -> Result<Size, String> {
    let size = Size::from_str(text)?;
    match usize::try_from(size.num_bytes) {
        Ok(1..) if size.num_bytes <= 1 << 46 => Ok(size),
        _ => Err(format!("'{text}' is not a size between 1 byte and 64TiB")),
    }
}

fn read_method(text: &str) -> Result<ReadMethod, String> {
    serde_json::from_value(text.into())
        .map_err(|_| format!("'{text}' is not known; there are auto, uring, threads and buffered"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_sizes_out_of_range_are_refused_with_what_may_be_typed() {
        assert_eq!(at_least_one("7"), Ok(7));
        for text in ["0", "-1", "", "2.5"] {
            assert!(at_least_one(text).unwrap_err().contains("at least 1"), "{text}");
        }
        assert_eq!((num_blocks("10000"), num_ahead("0")), (Ok(10_000), Ok(0)));
        for (refused, most) in [
            (num_blocks("999999999999"), "1 and 10000"),
            (num_blocks("0"), "1 and 10000"),
            (num_ahead("18446744073709551615"), "0 and 4999"),
            (num_ahead("-1"), "0 and 4999"),
        ] {
            assert!(refused.unwrap_err().contains(most), "{most}");
        }
        assert_eq!(some_bytes("1KiB").map(|size| size.num_bytes), Ok(1024));
        for text in ["0", "1e9", "9000000TB"] {
            assert!(some_bytes(text).unwrap_err().contains("size"), "{text}");
        }
    }

    #[test]
    fn ways_of_reading_have_the_names_of_the_run_file() {
        assert_eq!(read_method("uring"), Ok(ReadMethod::Uring));
        assert!(read_method("mmap").unwrap_err().contains("auto, uring, threads and buffered"));
    }
}
