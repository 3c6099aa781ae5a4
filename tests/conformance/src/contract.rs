//! What holds for every family, whatever its numbers: complete tables, causality, streaming.

use blockstreamer_core::Error;
use blockstreamer_core::adapter::{Adapter, Lora, LoraOptions, LoraShape};
use blockstreamer_core::batch::Batch;
use blockstreamer_core::block::Placement;
use blockstreamer_core::checkpoint::{SynthesizeOptions, synthesize};
use blockstreamer_core::family::ModelFamily;
use blockstreamer_core::weights::WeightTable;
use tch::{Device, Kind, Tensor};

use crate::compare::{identical, max_difference};
use crate::open::Opened;
use crate::report::{Check, Report};
use crate::streaming;
use crate::{Options, Result};

/// Checks that need no golden tensors, on the family's own sizes and on a random `tiny` checkpoint.
///
/// # Errors
/// When a method fails outright where none may.
pub fn check_family(family: &dyn ModelFamily, options: &Options) -> Result<Report> {
    let mut report = Report::default();
    let sizes = family.sizes()?;
    let tiny = sizes.iter().find(|size| size.name == "tiny");
    report.push(Check::of("a size called tiny exists", tiny.is_some(), ""));
    for size in &sizes {
        check_size(family, &size.name, &size.config_json, &mut report)?;
    }
    let broken = family.open("{}");
    report.push(Check::of("a config without keys is refused", broken.is_err(), ""));
    if let Some(tiny) = tiny {
        check_tiny(family, &tiny.config_json, options, &mut report)?;
    }
    Ok(report)
}

fn check_size(
    family: &dyn ModelFamily,
    size: &str,
    config_json: &str,
    report: &mut Report,
) -> Result<()> {
    let model_type = serde_json::from_str::<serde_json::Value>(config_json)
        .ok()
        .and_then(|config| config.get("model_type")?.as_str().map(str::to_owned))
        .unwrap_or_default();
    report.push(Check::of(
        format!("{size}: its model_type is one of the family's"),
        family.model_types().contains(&model_type),
        model_type,
    ));
    let model = family.open(config_json)?;
    let table = model.weights()?;
    let placements: Vec<_> = table.blocks.iter().map(|block| block.placement).collect();
    let ordered = placements.is_sorted_by_key(|placement| !placement.is_streamed());
    report.push(Check::of(format!("{size}: streamed blocks come first"), ordered, ""));
    let num_heads = placements.iter().filter(|placement| **placement == Placement::Head).count();
    report.push(Check::of(format!("{size}: there is at most one head block"), num_heads <= 1, ""));
    report.push(Check::of(
        format!("{size}: every layer has a block"),
        table.blocks.iter().filter_map(|block| block.layer).max().map(|layer| layer + 1)
            == Some(model.dimensions().num_hidden_layers),
        "",
    ));
    let sites = model.sites()?;
    let backed = sites.iter().all(|site| {
        table.weights.iter().any(|weight| {
            weight.block == site.block && weight.local == format!("{}.weight", site.local)
        })
    });
    report.push(Check::of(
        format!("{size}: every adapter site has a weight"),
        backed,
        format!("{} sites", sites.len()),
    ));
    let format = family.chat_format(config_json)?;
    let inside =
        format.special_tokens.iter().all(|(_, id)| (*id as usize) < model.dimensions().vocab_size);
    report.push(Check::of(format!("{size}: special tokens lie in the vocabulary"), inside, ""));
    Ok(())
}

fn check_tiny(
    family: &dyn ModelFamily,
    config_json: &str,
    options: &Options,
    report: &mut Report,
) -> Result<()> {
    let model = family.open(config_json)?;
    let table: WeightTable = model.weights()?;
    let folder = tempfile::tempdir().map_err(|source| Error::Io {
        action: "create",
        path: std::env::temp_dir(),
        source,
    })?;
    let directory = folder.path().join("tiny");
    synthesize(
        &table,
        &SynthesizeOptions {
            directory: directory.clone(),
            config_json: config_json.to_owned(),
            seed: 1,
            initializer_range: 0.05,
            // Small files, so that layers straddle them.
            max_file_bytes: 100_000,
            extra_files: Vec::new(),
        },
    )?;
    let opened = Opened::new(family, &directory)?;
    let vocab_size = model.dimensions().vocab_size as i64;
    let batch = rows(vocab_size, 24)?;
    let executor = opened.executor(opened.files()?, None, 2, options)?;
    let logits = executor.logits(&batch, &mut |_, _| Ok(()))?;
    report.push(Check::of(
        "tiny: logits are [batch, sequence, vocab_size] in the compute dtype",
        logits.size() == [2, 24, vocab_size] && logits.kind() == options.compute_kind,
        format!("{:?} {:?}", logits.size(), logits.kind()),
    ));
    check_causality(&executor, vocab_size, options, report)?;
    let again = executor.logits(&batch, &mut |_, _| Ok(()))?;
    report.push(Check::of(
        "tiny: the same input gives the same bits",
        identical(&logits, &again)?,
        "",
    ));

    let shape = LoraShape { rank: 4, alpha: 8.0, dropout: 0.1, ..LoraShape::default() };
    let lora = Lora::new(
        &model.sites()?,
        &LoraOptions { shape, ..LoraOptions::default() },
        options.device,
    )?;
    // B is zero in a new adapter, and with it every gradient of A.
    for (index, trainable) in lora.trainables().iter().enumerate() {
        let wave =
            Tensor::f_arange(trainable.tensor.numel() as i64, (Kind::Float, options.device))?;
        let values = wave.f_add_scalar(index as f64)?.f_sin()?.f_mul_scalar(0.05)?;
        let _no_graph = tch::no_grad_guard();
        trainable.tensor.shallow_clone().f_copy_(&values.f_view_as(&trainable.tensor)?)?;
    }
    let adapter = folder.path().join("adapter");
    lora.export(&adapter, "tiny")?;
    streaming::check_identical(&opened, &batch, &adapter, options, report)
}

/// A later token changes no earlier logits.
fn check_causality(
    executor: &blockstreamer_core::execute::Executor,
    vocab_size: i64,
    options: &Options,
    report: &mut Report,
) -> Result<()> {
    let batch = rows(vocab_size, 16)?;
    let changed = Batch::new(last_changed(&batch.input_ids, vocab_size)?);
    let plain = Batch::new(batch.input_ids);
    let before = executor.logits(&plain, &mut |_, _| Ok(()))?;
    let after = executor.logits(&changed, &mut |_, _| Ok(()))?;
    let earlier = |logits: &Tensor| logits.f_narrow(1, 0, 15);
    let (leak, magnitude) = max_difference(&earlier(&after)?, &earlier(&before)?, None)?;
    let tolerance =
        if options.compute_kind == Kind::Float { 1e-5 } else { 2e-2 } * magnitude.max(1.0);
    report.push(Check::within(
        "tiny: a later token changes no earlier logits",
        leak,
        tolerance,
        "",
    ));
    let (change, _) = max_difference(&after, &before, None)?;
    report.push(Check::of(
        "tiny: a token changes its own logits",
        change > 0.0,
        format!("{change:.2e}"),
    ));
    Ok(())
}

/// The same ids but for the last of each row.
fn last_changed(ids: &Tensor, vocab_size: i64) -> Result<Tensor> {
    let (_, sequence) = ids.size2()?;
    let last = ids.f_narrow(1, sequence - 1, 1)?.f_add_scalar(1)?.f_remainder(vocab_size / 2)?;
    Ok(Tensor::f_cat(&[&ids.f_narrow(1, 0, sequence - 1)?, &last], 1)?)
}

/// Two rows of ids from the lower half of the vocabulary, the second one padded, with labels.
fn rows(vocab_size: i64, sequence: i64) -> Result<Batch> {
    let numbers = Tensor::f_arange(2 * sequence, (Kind::Int64, Device::Cpu))?;
    let ids = numbers
        .f_mul_scalar(7919)?
        .f_add_scalar(13)?
        .f_remainder(vocab_size / 2)?
        .f_view([2, sequence])?;
    let positions = Tensor::f_arange(sequence, (Kind::Int64, Device::Cpu))?;
    let full = positions.f_ge(0)?;
    let short = positions.f_lt(sequence - 5)?;
    let mask = Tensor::f_stack(&[&full, &short], 0)?;
    let labels = ids.f_masked_fill(&mask.f_logical_not()?, -100)?;
    Ok(Batch { input_ids: ids, attention_mask: Some(mask), labels: Some(labels), segments: None })
}
