//! Streaming changes no bit: every source and every prefetch depth gives what everything resident gives.

use std::path::Path;
use std::sync::Arc;

use blockstreamer_core::Error;
use blockstreamer_core::batch::Batch;
use blockstreamer_core::device::HostBuffer;
use blockstreamer_core::execute::{Executor, Gradients, StepOptions};
use blockstreamer_core::source::shards::{ShardSource, write_shards};
use blockstreamer_core::source::{BlockSource, RamSource};
use tch::Tensor;

use crate::compare::identical;
use crate::open::Opened;
use crate::report::{Check, Report};
use crate::{Options, Result};

/// What one configuration computes.
struct Outcome {
    logits: Tensor,
    losses: Vec<f64>,
    gradients: Vec<Option<Tensor>>,
}

/// Logits, loss and gradients of `batch`, from safetensors files, pinned RAM and shards, at prefetch
/// depths 0 to 5, against slots for the whole model.
pub(crate) fn check_identical(
    opened: &Opened<'_>,
    batch: &Batch,
    adapter: &Path,
    options: &Options,
    report: &mut Report,
) -> Result<()> {
    let folder = tempfile::tempdir().map_err(|source| Error::Io {
        action: "create",
        path: std::env::temp_dir(),
        source,
    })?;
    let files = opened.files()?;
    let identity = opened.layout.identity(&opened.checkpoint)?;
    write_shards(&*files, &identity, &[folder.path().join("shards")], &mut |_| {})?;
    let reserve = |num_bytes| HostBuffer::for_device(num_bytes, options.device);
    let sources: [(&str, Arc<dyn BlockSource>); 3] = [
        ("safetensors", Arc::clone(&files)),
        ("ram", Arc::new(RamSource::load(&*files, reserve)?)),
        ("shards", Arc::new(ShardSource::open(&folder.path().join("shards"), Some(&identity))?)),
    ];
    let num_blocks = opened.layout.blocks.len();
    let run = |source: &Arc<dyn BlockSource>, prefetch_ahead| {
        let adapter = opened.import(adapter, options)?;
        outcome(
            &opened.executor(Arc::clone(source), Some(adapter), prefetch_ahead, options)?,
            batch,
        )
    };
    let resident = run(&sources[1].1, num_blocks)?;
    for (name, source) in &sources {
        for prefetch_ahead in 0..=5 {
            let streamed = run(source, prefetch_ahead)?;
            let name = format!("streaming {name} prefetch {prefetch_ahead} changes no bit");
            report.push(match differs(&resident, &streamed)? {
                None => Check::of(name, true, ""),
                Some(what) => Check::of(name, false, format!("{what} differ")),
            });
        }
    }
    Ok(())
}

/// Two steps of two micro-batches, the second announced while the first runs.
fn outcome(executor: &Executor, batch: &Batch) -> Result<Outcome> {
    let logits = executor.logits(batch, &mut |_, _| Ok(()))?;
    let steps = [batch.clone(), batch.clone()];
    let mut sums = Gradients::new();
    let first = StepOptions { step: 0, another_follows: true };
    let losses = [
        executor.train_step(&steps, first, &mut sums)?,
        executor.train_step(&steps, StepOptions { step: 1, another_follows: false }, &mut sums)?,
    ];
    let losses = losses.iter().map(|loss| executor.loss_value(loss)).collect::<Result<_>>()?;
    let num_trainables = executor.adapter().map_or(0, |adapter| adapter.trainables().len());
    let gradients =
        (0..num_trainables).map(|index| sums.get(index).map(Tensor::shallow_clone)).collect();
    Ok(Outcome { logits, losses, gradients })
}

fn differs(a: &Outcome, b: &Outcome) -> Result<Option<&'static str>> {
    if !identical(&a.logits, &b.logits)? {
        return Ok(Some("logits"));
    }
    if a.losses.iter().zip(&b.losses).any(|(a, b)| a.to_bits() != b.to_bits()) {
        return Ok(Some("losses"));
    }
    for (a, b) in a.gradients.iter().zip(&b.gradients) {
        let same = match (a, b) {
            (Some(a), Some(b)) => identical(a, b)?,
            (a, b) => a.is_none() && b.is_none(),
        };
        if !same {
            return Ok(Some("gradients"));
        }
    }
    Ok(None)
}
