//! What holds for every family, whatever its numbers: complete tables, causality, streaming.

use blockstreamer_core::Error;
use blockstreamer_core::adapter::{Adapter, Lora, LoraOptions, LoraShape};
use blockstreamer_core::batch::Batch;
use blockstreamer_core::block::Placement;
use blockstreamer_core::checkpoint::{SynthesizeOptions, synthesize};
use blockstreamer_core::execute::Executor;
use blockstreamer_core::family::{ModelFamily, ModelOptions};
use blockstreamer_core::site::SiteKind;
use blockstreamer_core::vision::Media;
use blockstreamer_core::weights::WeightTable;
use tch::{Device, Kind, Tensor};

use crate::compare::{identical, max_difference};
use crate::open::Opened;
use crate::report::{Check, Report};
use crate::{Options, Result};
use crate::{pictures, streaming};

/// Checks that need no golden tensors, on the family's own sizes and on a random `tiny` checkpoint.
///
/// # Errors
/// When a method fails outright where none may.
pub fn check_family(family: &dyn ModelFamily, options: &Options) -> Result<Report> {
    let mut report = Report::default();
    let sizes = family.sizes()?;
    let has_tiny = sizes.iter().any(|size| size.name == "tiny");
    report.push(Check::of("a size called tiny exists", has_tiny, ""));
    for size in &sizes {
        check_size(family, &size.name, &size.config_json, &mut report)?;
    }
    let broken = family.open("{}", &ModelOptions::default());
    report.push(Check::of("a config without keys is refused", broken.is_err(), ""));
    // A family may have several small sizes, for what its larger ones differ in.
    for size in sizes.iter().filter(|size| size.name.starts_with("tiny")) {
        check_tiny(family, &size.name, &size.config_json, options, &mut report)?;
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
    let model = family.open(config_json, &ModelOptions::default())?;
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
            // A linear's weight, or the codes of packed experts, or the experts themselves.
            let ends = [".weight", "_blocks", ""];
            let mut locals = ends.into_iter().filter_map(|end| weight.local.strip_suffix(end));
            weight.block == site.block && locals.any(|local| local == site.local)
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
    size: &str,
    config_json: &str,
    options: &Options,
    report: &mut Report,
) -> Result<()> {
    let model = family.open(config_json, &ModelOptions::default())?;
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
        format!("{size}: logits are [batch, sequence, vocab_size] in the compute dtype"),
        logits.size() == [2, 24, vocab_size] && logits.kind() == options.compute_kind,
        format!("{:?} {:?}", logits.size(), logits.kind()),
    ));
    check_causality(&executor, size, vocab_size, options, report)?;
    check_packed_rows(&executor, size, vocab_size, options, report)?;
    let again = executor.logits(&batch, &mut |_, _| Ok(()))?;
    report.push(Check::of(
        format!("{size}: the same input gives the same bits"),
        identical(&logits, &again)?,
        "",
    ));

    // Everything that an adapter can reach. PEFT trains parameters without dropout.
    let parameters = model.sites()?.into_iter().filter(|site| site.kind != SiteKind::Linear);
    let target_parameters: Vec<_> = parameters.map(|site| site.parameter()).collect();
    let dropout = if target_parameters.is_empty() { 0.1 } else { 0.0 };
    let lora = Lora::new(
        &model.sites()?,
        &LoraOptions {
            shape: LoraShape { rank: 4, alpha: 8.0, dropout, ..LoraShape::default() },
            target_parameters,
            vision: model.sites()?.iter().any(|site| site.is_vision),
            ..LoraOptions::default()
        },
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
    let twice = [batch.clone(), batch.clone()];
    let what = format!("{size}: ");
    streaming::check_identical(&opened, &twice, &adapter, &what, options, report)?;
    let mut batches = twice.to_vec();
    if let Some(format) = model.vision_format()? {
        let chat = family.chat_format(config_json)?;
        let words = |media: &Media| model.media_text(media);
        let seeing = pictures::batch(&batch, &format, &chat, &words)?;
        check_pictures(&executor, size, &table, &batch, &seeing, options, report)?;
        // A step in which one micro-batch has pictures and the other has none.
        batches = vec![seeing, batch];
        let what = format!("{size}, pictures: ");
        streaming::check_identical(&opened, &batches, &adapter, &what, options, report)?;
    }
    if model.dimensions().num_experts > 0 && options.compute_kind == Kind::Float {
        streaming::check_expert_groups(family, &directory, &batches, &adapter, options, report)?;
    }
    Ok(())
}

/// Pictures change the logits behind them and no others, and text visits no block that is for them.
fn check_pictures(
    executor: &Executor,
    size: &str,
    table: &WeightTable,
    text: &Batch,
    seeing: &Batch,
    options: &Options,
    report: &mut Report,
) -> Result<()> {
    let visited = |batch: &Batch| -> Result<(Tensor, usize)> {
        let mut num_visited = 0;
        let logits = executor.logits(batch, &mut |block, _| {
            num_visited += usize::from(table.blocks[block.0].only_with_vision);
            Ok(())
        })?;
        Ok((logits, num_visited))
    };
    let wanted = table.blocks.iter().filter(|plan| plan.only_with_vision).count();
    let (before, seen) = visited(seeing)?;
    let (_, unseen) = visited(text)?;
    report.push(Check::of(
        format!("{size}: blocks for pictures are visited with pictures and only then"),
        (seen, unseen) == (wanted, 0),
        format!("{seen} of {wanted} with pictures, {unseen} without"),
    ));
    let (after, _) = visited(&pictures::with_other_pixels(seeing)?)?;
    // The first picture begins at the third token of the first row.
    let earlier = |logits: &Tensor| logits.f_narrow(0, 0, 1)?.f_narrow(1, 0, 2);
    let other_row = |logits: &Tensor| logits.f_narrow(0, 1, 1);
    let pairs = [(earlier(&after)?, earlier(&before)?), (other_row(&after)?, other_row(&before)?)];
    let name = format!("{size}: a picture changes no logits before it and none of another row");
    report.push(unchanged(name, &pairs, options)?);
    let name = format!("{size}: a picture changes the logits behind it");
    report.push(changed(name, &after, &before)?);
    let mut too_many = seeing.clone();
    if let Some(images) = &mut too_many.images {
        images.grids.truncate(1);
    }
    let refused = executor.logits(&too_many, &mut |_, _| Ok(())).is_err();
    report.push(Check::of(
        format!("{size}: placeholders without a picture are refused"),
        refused,
        "",
    ));
    Ok(())
}

/// A later token changes no earlier logits.
fn check_causality(
    executor: &Executor,
    size: &str,
    vocab_size: i64,
    options: &Options,
    report: &mut Report,
) -> Result<()> {
    let batch = rows(vocab_size, 16)?;
    let other = Batch::new(last_changed(&batch.input_ids, vocab_size)?);
    let plain = Batch::new(batch.input_ids);
    let before = executor.logits(&plain, &mut |_, _| Ok(()))?;
    let after = executor.logits(&other, &mut |_, _| Ok(()))?;
    let earlier = |logits: &Tensor| logits.f_narrow(1, 0, 15);
    let pairs = [(earlier(&after)?, earlier(&before)?)];
    let name = format!("{size}: a later token changes no earlier logits");
    report.push(unchanged(name, &pairs, options)?);
    report.push(changed(format!("{size}: a token changes its own logits"), &after, &before)?);
    Ok(())
}

/// Samples that share a row, and padding behind them, change none of each other's logits.
fn check_packed_rows(
    executor: &Executor,
    size: &str,
    vocab_size: i64,
    options: &Options,
    report: &mut Report,
) -> Result<()> {
    // Of different lengths, so that a position too many or too few shows.
    const LENGTHS: [i64; 2] = [9, 12];
    const PADDED: i64 = 24;
    let ids = rows(vocab_size, PADDED)?.input_ids.f_narrow(0, 0, 1)?;
    let places = Tensor::f_arange(PADDED, (Kind::Int64, Device::Cpu))?.f_view([1, PADDED])?;
    let [first, both] = [LENGTHS[0], LENGTHS[0] + LENGTHS[1]];
    let segments = places.f_ge(first)?.f_to_kind(Kind::Int64)?;
    let attention_mask = Some(places.f_lt(both)?);
    let packed =
        Batch { segments: Some(segments), attention_mask, ..Batch::new(ids.shallow_clone()) };
    let together = executor.logits(&packed, &mut |_, _| Ok(()))?;
    for (sample, (start, length)) in [(0, LENGTHS[0]), (first, LENGTHS[1])].into_iter().enumerate()
    {
        let sample_ids = ids.f_narrow(1, start, length)?;
        let alone = executor.logits(&Batch::new(sample_ids), &mut |_, _| Ok(()))?;
        let found = together.f_narrow(1, start, length)?;
        let name =
            format!("{size}: sample {sample} of a packed row has the logits that it has alone");
        report.push(unchanged(name, &[(found, alone)], options)?);
    }
    Ok(())
}

/// Whether logits are the expected ones, but for sums that were made in another order.
fn unchanged(name: String, pairs: &[(Tensor, Tensor)], options: &Options) -> Result<Check> {
    let (mut leak, mut magnitude): (f64, f64) = (0.0, 0.0);
    for (found, expected) in pairs {
        let (difference, largest) = max_difference(found, expected, None)?;
        (leak, magnitude) = (leak.max(difference), magnitude.max(largest));
    }
    let tolerance = if options.compute_kind == Kind::Float { 1e-5 } else { 2e-2 };
    Ok(Check::within(name, leak, tolerance * magnitude.max(1.0), ""))
}

/// Whether any of the logits is another one.
fn changed(name: String, after: &Tensor, before: &Tensor) -> Result<Check> {
    let (change, _) = max_difference(after, before, None)?;
    Ok(Check::of(name, change > 0.0, format!("{change:.2e}")))
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
    Ok(Batch { attention_mask: Some(mask), labels: Some(labels), ..Batch::new(ids) })
}
