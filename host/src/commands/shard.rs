//! `shard`: a model as aligned, checksummed block files.

use anyhow::Result;
use blockstreamer_core::source::SafetensorsSource;
use blockstreamer_core::source::shards::{ShardProgress, verify_shards, write_shards};

use super::{byte_bar, print};
use crate::cli::ShardArgs;
use crate::engine::OpenModel;
use crate::plugins::Registry;
use crate::size::Size;

pub(super) fn run(registry: &Registry, args: &ShardArgs) -> Result<bool> {
    let bar = byte_bar();
    let mut show = |progress: ShardProgress<'_>| {
        bar.set_length(progress.total_bytes);
        bar.set_position(progress.done_bytes);
        bar.set_message(progress.block.to_owned());
    };
    let open = OpenModel::open(registry, &args.model, args.experts.options())?;
    let identity = open.layout.identity(&open.checkpoint)?;
    let source = SafetensorsSource::open(open.layout.clone())?;
    if args.verify {
        return verify(args, &source, &identity, &mut show);
    }
    let summary = write_shards(&source, &identity, &args.out, &mut show)?;
    bar.finish_and_clear();
    print(&format!(
        "{} blocks, {}: {} written, {} were whole already; use them with --set stream.shards={}",
        summary.num_written + summary.num_kept,
        Size { num_bytes: summary.total_bytes },
        summary.num_written,
        summary.num_kept,
        args.out[0].display()
    ))?;
    Ok(true)
}

fn verify(
    args: &ShardArgs,
    source: &SafetensorsSource,
    identity: &str,
    show: &mut dyn FnMut(ShardProgress<'_>),
) -> Result<bool> {
    let mut whole = true;
    for damage in verify_shards(source, identity, &args.out, show)? {
        whole = false;
        print(&format!("block {}: {}", damage.block, damage.reason))?;
    }
    if whole {
        print("all shards are whole and hold the bytes of this model")?;
    } else {
        print(
            "run shard again without --verify: it writes these blocks anew and keeps the others",
        )?;
    }
    Ok(whole)
}
