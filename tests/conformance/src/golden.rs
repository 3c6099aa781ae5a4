//! Comparison with tensors that Hugging Face transformers and peft made.

use std::path::Path;

use blockstreamer_core::Error;
use blockstreamer_core::batch::Batch;
use blockstreamer_core::checkpoint::read_safetensors;
use blockstreamer_core::execute::{Executor, Gradients, StepOptions};
use blockstreamer_core::family::ModelFamily;
use blockstreamer_core::state::{HIDDEN, NamedTensors};
use blockstreamer_core::vision::{POSITIONS, Patches, VISION_ROWS, deepstack};
use tch::{Device, Kind, Tensor};

use crate::compare::{max_difference, relative_distance, squared_distance, ulp};
use crate::open::Opened;
use crate::report::{Check, Report};
use crate::streaming;
use crate::{Options, Result};

/// Loads the checkpoint in `directory`, streams it, and compares every layer's output, the logits, the
/// loss, and with the adapter beside it the logits, the loss and every gradient, with the golden
/// tensors of the compute dtype. Where there are pictures, their embeddings, what the vision tower hands to
/// the first layers beside them, and the positions of all tokens are compared, too. Positions outside the
/// attention mask are left out.
///
/// Then it streams the same again from every source at prefetch depths 0 to 5 and demands the same bits.
///
/// # Errors
/// When the checkpoint or the golden tensors cannot be read, or an operation fails outright.
pub fn check_golden(
    family: &dyn ModelFamily,
    directory: &Path,
    options: &Options,
) -> Result<Report> {
    let tag = match options.compute_kind {
        Kind::Float => "fp32",
        Kind::BFloat16 => "bf16",
        other => return Err(Error::usage(format!("there are no golden tensors in {other:?}"))),
    };
    let golden = read_safetensors(&directory.join(format!("golden_{tag}.safetensors")))?;
    let exact = read_safetensors(&directory.join("golden_fp32.safetensors"))?;
    let opened = Opened::new(family, directory)?;
    let batch = batch(&golden)?;
    let comparison = Comparison {
        golden: &golden,
        exact: &exact,
        mask: batch.attention_mask.as_ref(),
        kind: options.compute_kind,
        has_experts: opened.model()?.dimensions().num_experts > 0,
    };
    let mut report = Report::default();

    let plain = opened.executor(opened.files()?, None, 2, options)?;
    let plans = plain.model().weights()?.blocks;
    // Roundings of the tower are in every layer behind it.
    let vision = plans.iter().filter(|plan| plan.only_with_vision);
    let num_before = if batch.has_vision() { vision.count() } else { 0 };
    let mut layers = Vec::new();
    let mut seen = None;
    let logits = plain.logits(&batch, &mut |block, state| {
        let next = plans.get(block.0 + 1);
        let this = &plans[block.0];
        if this.only_with_vision && next.is_none_or(|next| !next.only_with_vision) {
            seen = Some(state.clone());
        }
        // A layer split over several blocks is compared after its last part.
        if this.layer.is_some() && next.and_then(|next| next.layer) != this.layer {
            layers.push(state.get(HIDDEN)?.shallow_clone());
        }
        Ok(())
    })?;
    if batch.has_vision() {
        let mut prepared = batch.clone();
        plain.model().prepare(&mut prepared)?;
        let seen = seen.ok_or_else(|| Error::usage("no block for pictures alone was visited"))?;
        comparison.vision(&prepared, &seen, num_before, &mut report)?;
    }
    for (layer, hidden) in layers.iter().enumerate() {
        let depth = num_before + layer + 1;
        report.push(comparison.activation(&format!("layer_out.{layer}"), hidden, depth)?);
    }
    let depth = num_before + layers.len() + 1;
    report.push(comparison.activation("logits", &logits, depth)?);
    let loss = plain.evaluate(std::slice::from_ref(&batch))?;
    report.push(comparison.loss("loss", &plain, &loss)?);

    let adapted = opened.executor(
        opened.files()?,
        Some(opened.import(&directory.join("adapter"), options)?),
        2,
        options,
    )?;
    let logits = adapted.logits(&batch, &mut |_, _| Ok(()))?;
    report.push(comparison.activation("lora.logits", &logits, depth)?);
    for check in comparison.step(&adapted, &batch)? {
        report.push(check);
    }
    let trainables = adapted.adapter().map_or(&[][..], |adapter| adapter.trainables());
    let expected = golden.iter().filter(|(name, _)| name.starts_with("grad.")).count();
    let detail = format!("{} trainable tensors, {expected} golden gradients", trainables.len());
    report.push(Check::of(
        "every golden gradient has its tensor",
        expected == trainables.len(),
        detail,
    ));

    let adapter = directory.join("adapter");
    let fast = opened.training_executor(&adapter, options)?;
    for check in comparison.fast_step(&fast, &batch)? {
        report.push(Check { name: format!("training kernels: {}", check.name), ..check });
    }
    let twice = [batch.clone(), batch];
    streaming::check_identical(&opened, &twice, &adapter, "", options, &mut report)?;
    Ok(report)
}

fn batch(golden: &NamedTensors) -> Result<Batch> {
    let mut batch = Batch::new(golden.get("in.input_ids")?.shallow_clone());
    batch.attention_mask =
        golden.find("in.attention_mask").map(|mask| mask.f_to_kind(Kind::Bool)).transpose()?;
    batch.labels = golden.find("in.labels").map(Tensor::shallow_clone);
    batch.images = patches(golden, "in.pixel_values", "in.image_grid_thw")?;
    batch.videos = patches(golden, "in.pixel_values_videos", "in.video_grid_thw")?;
    Ok(batch)
}

fn patches(golden: &NamedTensors, pixels: &str, grids: &str) -> Result<Option<Patches>> {
    let Some(pixels) = golden.find(pixels) else { return Ok(None) };
    let rows = Vec::<Vec<i64>>::try_from(golden.get(grids)?)?;
    let grid = |row: &Vec<i64>| match row[..] {
        [time, height, width] => Ok([time, height, width].map(|extent| extent as usize)),
        _ => Err(Error::tensor(grids, "must be [num_items, 3]")),
    };
    let grids = rows.iter().map(grid).collect::<Result<_>>()?;
    Ok(Some(Patches { pixels: pixels.f_to_kind(Kind::Float)?, grids }))
}

struct Comparison<'a> {
    golden: &'a NamedTensors,
    exact: &'a NamedTensors,
    mask: Option<&'a Tensor>,
    kind: Kind,
    has_experts: bool,
}

impl Comparison<'_> {
    /// fp32: 1e-5 of the largest magnitude (1e-4 for logits). Lower precision: roundings of `depth`
    /// layers add up like a random walk, three units in the last place of the largest magnitude each. Where two
    /// experts come out almost alike, such a rounding decides which one a token goes to, here as there; then we
    /// must be about as close to the fp32 golden as transformers is.
    fn activation(&self, name: &str, found: &Tensor, depth: usize) -> Result<Check> {
        let expected = self.golden.get(name)?;
        let (difference, magnitude) = max_difference(found, expected, self.mask)?;
        let tolerance = match self.kind {
            Kind::Float if name.contains("logits") => 1e-4 * magnitude.max(1.0),
            Kind::Float => 1e-5 * magnitude.max(1.0),
            kind => 3.0 * (depth as f64).sqrt() * ulp(kind, magnitude),
        };
        let ulps =
            format!("{:.2} ulp of the largest value", difference / ulp(self.kind, magnitude));
        if difference > tolerance && self.has_experts && self.kind != Kind::Float {
            let exact = self.exact.get(name)?;
            let ours = relative_distance(&self.valid(found)?, &self.valid(exact)?)?;
            let theirs = relative_distance(&self.valid(expected)?, &self.valid(exact)?)?;
            let detail = format!("distance to fp32 in norm; transformers {theirs:.2e}; {ulps}");
            return Ok(Check::within(name, ours, 1.5 * theirs, detail));
        }
        Ok(Check::within(name, difference, tolerance, ulps))
    }

    /// `tensor` with zeros where there are no tokens.
    fn valid(&self, tensor: &Tensor) -> Result<Tensor> {
        let tensor = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?;
        let Some(mask) = self.mask else { return Ok(tensor) };
        let mask = mask.f_unsqueeze(-1)?.f_logical_not()?;
        Ok(tensor.f_masked_fill(&mask, 0.0)?)
    }

    /// What the tower made of the pictures (the goldens leave films out), and where every token stands.
    /// `prepared` is the batch as the family prepared it, `seen` the state after the tower of `depth` blocks.
    fn vision(
        &self,
        prepared: &Batch,
        seen: &NamedTensors,
        depth: usize,
        report: &mut Report,
    ) -> Result<()> {
        let Some(embeddings) = self.golden.find("vis.embeds") else { return Ok(()) };
        let num_places = embeddings.size2()?.0;
        let rows = prepared.prepared.get(VISION_ROWS)?.f_narrow(0, 0, num_places)?;
        let hidden = seen.get(HIDDEN)?.f_flatten(0, 1)?;
        let found = hidden.f_index_select(0, &rows.f_to_device(hidden.device())?)?;
        let unmasked = Comparison { mask: None, ..*self };
        report.push(unmasked.activation("vis.embeds", &found, depth)?);
        for number in 0.. {
            let name = format!("vis.deepstack.{number}");
            if self.golden.find(&name).is_none() {
                break;
            }
            let found = seen.get(&deepstack(number))?.f_narrow(0, 0, num_places)?;
            report.push(unmasked.activation(&name, &found, depth)?);
        }
        let mut positions = prepared.prepared.get(POSITIONS)?.shallow_clone();
        let mut expected = self.golden.get("pos3")?.shallow_clone();
        if let Some(mask) = self.mask {
            let mask = mask.f_to_kind(Kind::Int64)?;
            (positions, expected) = (positions.f_mul(&mask)?, expected.f_mul(&mask)?);
        }
        let same = positions.size() == expected.size() && positions.f_equal(&expected)?;
        report.push(Check::of("pos3", same, format!("{:?}", expected.size())));
        Ok(())
    }

    /// Loss and gradients of one optimizer step.
    fn step(&self, executor: &Executor, batch: &Batch) -> Result<Vec<Check>> {
        let mut gradients = Gradients::new();
        let batches = std::slice::from_ref(batch);
        let loss = executor.train_step(batches, StepOptions::default(), &mut gradients)?;
        let mut checks = vec![self.loss("lora.loss", executor, &loss)?];
        let trainables = executor.adapter().map_or(&[][..], |adapter| adapter.trainables());
        for (index, trainable) in trainables.iter().enumerate() {
            checks.push(self.gradient(&trainable.name, gradients.get(index))?);
        }
        Ok(checks)
    }

    /// The same by kernels that round elsewhere than the golden's. Single tokens then may go to other experts,
    /// and single activations may be cut off or not, which changes single tensors: all gradients are taken
    /// together.
    fn fast_step(&self, executor: &Executor, batch: &Batch) -> Result<Vec<Check>> {
        let mut gradients = Gradients::new();
        let batches = std::slice::from_ref(batch);
        let loss = executor.train_step(batches, StepOptions::default(), &mut gradients)?;
        let (mut ours, mut theirs, mut exact) = (0.0, 0.0, 0.0);
        for (trainable, gradient) in
            gradients.of(executor.adapter().map_or(&[], |it| it.trainables()))
        {
            let name = format!("grad.{}", trainable.name);
            let wanted = self.exact.get(&name)?;
            ours += squared_distance(gradient, wanted)?;
            theirs += squared_distance(self.golden.get(&name)?, wanted)?;
            exact += squared_distance(wanted, &wanted.f_zeros_like()?)?;
        }
        let (ours, theirs) = ((ours / exact).sqrt(), (theirs / exact).sqrt());
        let detail = format!("distance to the fp32 gradients in norm; transformers {theirs:.2e}");
        let gradients = Check::within("gradients", ours, (5.0 * theirs).max(1e-3), detail);
        Ok(vec![self.loss("lora.loss", executor, &loss)?, gradients])
    }

    fn loss(
        &self,
        name: &str,
        executor: &Executor,
        loss: &blockstreamer_core::execute::StepLoss,
    ) -> Result<Check> {
        let expected = self.golden.get(name)?.f_double_value(&[0])?;
        let found = executor.loss_value(loss)?;
        let tolerance = if self.kind == Kind::Float { 1e-5 } else { 1e-2 } * expected.abs();
        Ok(Check::within(name, (found - expected).abs(), tolerance, format!("{found:.6}")))
    }

    /// fp32: 1e-4 of the largest gradient of the tensor. In lower precision the golden itself is far from
    /// the exact value (peft's adapter and gradient are rounded to it, ours are fp32 masters): we must be
    /// about as close to the fp32 golden as transformers is, at this tensor or at the average one. A few
    /// roundings upstream decide how well a single tensor comes off, so that is chance within a factor of two.
    fn gradient(&self, key: &str, found: Option<&Tensor>) -> Result<Check> {
        let name = format!("grad.{key}");
        let exact = self.exact.get(&name)?;
        let Some(found) = found else {
            return Ok(Check::of(name, false, "no gradient came back"));
        };
        if self.kind == Kind::Float {
            let (difference, magnitude) = max_difference(found, exact, None)?;
            let relative = difference / magnitude.max(f64::MIN_POSITIVE);
            return Ok(Check::within(name, relative, 1e-4, "relative to the largest"));
        }
        let ours = relative_distance(found, exact)?;
        let theirs = relative_distance(self.golden.get(&name)?, exact)?;
        let detail = format!("distance to the fp32 gradient in norm; transformers {theirs:.2e}");
        Ok(Check::within(name, ours, 2.0 * theirs.max(self.average_distance()?), detail))
    }

    /// How far the golden gradients are from the fp32 ones on the average.
    fn average_distance(&self) -> Result<f64> {
        let (mut sum, mut count) = (0.0, 0.0_f64);
        for (name, golden) in self.golden.iter().filter(|(name, _)| name.starts_with("grad.")) {
            sum += relative_distance(golden, self.exact.get(name)?)?;
            count += 1.0;
        }
        Ok(sum / count.max(1.0))
    }
}
