//! Streaming changes no bit: every source, prefetch depth and placement gives what everything resident gives.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use blockstreamer_core::Error;
use blockstreamer_core::batch::Batch;
use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::device::HostBuffer;
use blockstreamer_core::execute::{Executor, Gradients, Residency, StepOptions};
use blockstreamer_core::family::{ModelFamily, ModelOptions};
use blockstreamer_core::read::ReadMethod;
use blockstreamer_core::source::shards::{ShardSource, write_shards};
use blockstreamer_core::source::{BlockSource, TieredSource};
use tch::Tensor;

use crate::compare::identical;
use crate::open::Opened;
use crate::report::{Check, Report};
use crate::{Options, Result};

/// What one configuration computes.
pub(crate) struct Outcome {
    logits: Vec<Tensor>,
    losses: Vec<f64>,
    gradients: Vec<Option<Tensor>>,
}

/// Logits, losses and gradients of two steps over `batches`, from safetensors files, pinned RAM and shards,
/// at prefetch depths 0 to 5, against slots for the whole model. `what` goes before the names of the checks.
pub(crate) fn check_identical(
    opened: &Opened<'_>,
    batches: &[Batch],
    adapter: &Path,
    what: &str,
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
    let all: Vec<_> = (0..opened.layout.blocks.len()).map(BlockIndex).collect();
    let sources: [(&str, Arc<dyn BlockSource>); 3] = [
        ("safetensors", Arc::clone(&files)),
        ("ram", Arc::new(TieredSource::load(Arc::clone(&files), &all, ReadMethod::Auto, reserve)?)),
        ("shards", Arc::new(ShardSource::open(&folder.path().join("shards"), Some(&identity))?)),
    ];
    let num_blocks = opened.layout.blocks.len();
    let run = |source: &Arc<dyn BlockSource>, prefetch_ahead, residency| {
        let adapter = Some(opened.import(adapter, options)?);
        let source = Arc::clone(source);
        let executor =
            opened.placed_executor(source, adapter, prefetch_ahead, residency, options)?;
        outcome(&executor, batches)
    };
    let resident = run(&sources[1].1, num_blocks, Residency::default())?;
    for (name, source) in &sources {
        for prefetch_ahead in 0..=5 {
            let streamed = run(source, prefetch_ahead, Residency::default())?;
            let name = format!("{what}streaming {name} prefetch {prefetch_ahead} changes no bit");
            report.push(same(name, &resident, &streamed)?);
        }
    }
    for (name, residency) in placements(opened) {
        for (source_name, source) in &sources {
            let name = format!("{what}placement: {name}, {source_name}, changes no bit");
            // A family that multiplies by a table of which only rows may be looked up fails here.
            report.push(match run(source, 1, residency.clone()) {
                Ok(placed) => same(name, &resident, &placed)?,
                Err(error) => Check::of(name, false, error.to_string()),
            });
        }
    }
    Ok(())
}

/// Other places for the embedding, the head and every second block.
fn placements(opened: &Opened<'_>) -> [(&'static str, Residency); 3] {
    let streamed = opened.layout.blocks.iter().enumerate();
    let streamed = streamed.filter(|(_, spec)| spec.placement.is_streamed());
    let kept: BTreeSet<_> = streamed.map(|(index, _)| BlockIndex(index)).step_by(2).collect();
    let graphs = kept.clone();
    let plain = Residency::default();
    [
        ("rows gathered from host memory", Residency { gather_from_host: true, ..plain.clone() }),
        ("a streamed head", Residency { stream_head: true, ..plain.clone() }),
        ("kept blocks with held graphs", Residency { kept, graphs, ..plain }),
    ]
}

fn same(name: String, wanted: &Outcome, found: &Outcome) -> Result<Check> {
    Ok(match differs(wanted, found)? {
        None => Check::of(name, true, ""),
        Some(what) => Check::of(name, false, format!("{what} differ")),
    })
}

/// With the experts of each layer in one block, in several and in one block each: the same bits in fp32.
pub(crate) fn check_expert_groups(
    family: &dyn ModelFamily,
    directory: &Path,
    batches: &[Batch],
    adapter: &Path,
    options: &Options,
    report: &mut Report,
) -> Result<()> {
    let whole = Opened::new(family, directory)?;
    let num_experts = whole.model()?.dimensions().num_experts;
    let run = |opened: &Opened<'_>| {
        let adapter = Some(opened.import(adapter, options)?);
        outcome(&opened.executor(opened.files()?, adapter, 1, options)?, batches)
    };
    let wanted = run(&whole)?;
    let several = (2..num_experts).find(|groups| num_experts.is_multiple_of(*groups));
    for num_expert_groups in several.into_iter().chain([num_experts]) {
        let model_options = ModelOptions { num_expert_groups, ..ModelOptions::default() };
        let split = Opened::with_options(family, directory, model_options)?;
        let name = format!("experts in {num_expert_groups} blocks a layer give the same bits");
        report.push(same(name, &wanted, &run(&split)?)?);
    }
    let model_options =
        ModelOptions { num_expert_groups: num_experts + 1, ..ModelOptions::default() };
    let refused = family.open(&whole.checkpoint.config_json, &model_options).is_err();
    let name = "more groups than experts are refused";
    report.push(Check::of(name, refused, ""));
    Ok(())
}

/// Two steps over the micro-batches, the second announced while the first runs.
pub(crate) fn outcome(executor: &Executor, batches: &[Batch]) -> Result<Outcome> {
    let logits = batches.iter().map(|batch| executor.logits(batch, &mut |_, _| Ok(())));
    let logits = logits.collect::<Result<Vec<_>>>()?;
    let next_has_vision = batches.iter().any(Batch::has_vision);
    let mut sums = Gradients::new();
    let first = StepOptions { step: 0, another_follows: true, next_has_vision };
    let second = StepOptions { step: 1, ..StepOptions::default() };
    let losses = [
        executor.train_step(batches, first, &mut sums)?,
        executor.train_step(batches, second, &mut sums)?,
    ];
    let losses = losses.iter().map(|loss| executor.loss_value(loss)).collect::<Result<_>>()?;
    let num_trainables = executor.adapter().map_or(0, |adapter| adapter.trainables().len());
    let gradients =
        (0..num_trainables).map(|index| sums.get(index).map(Tensor::shallow_clone)).collect();
    Ok(Outcome { logits, losses, gradients })
}

fn differs(a: &Outcome, b: &Outcome) -> Result<Option<&'static str>> {
    for (a, b) in a.logits.iter().zip(&b.logits) {
        if !identical(a, b)? {
            return Ok(Some("logits"));
        }
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
