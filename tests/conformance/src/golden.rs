//! Comparison with tensors that Hugging Face transformers and peft made.

use std::path::Path;

use blockstreamer_core::Error;
use blockstreamer_core::batch::Batch;
use blockstreamer_core::checkpoint::read_safetensors;
use blockstreamer_core::execute::{Executor, Gradients, StepOptions};
use blockstreamer_core::family::ModelFamily;
use blockstreamer_core::state::{HIDDEN, NamedTensors};
use tch::{Kind, Tensor};

use crate::compare::{max_difference, ulp};
use crate::open::Opened;
use crate::report::{Check, Report};
use crate::streaming;
use crate::{Options, Result};

/// Loads the checkpoint in `directory`, streams it, and compares every layer's output, the logits, the
/// loss, and with the adapter beside it the logits, the loss and every gradient, with the golden
/// tensors of the compute dtype. Positions outside the attention mask are left out.
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
    };
    let mut report = Report::default();

    let plain = opened.executor(opened.files()?, None, 2, options)?;
    let mut layer = 0;
    let mut layers = Vec::new();
    let logits = plain.logits(&batch, &mut |block, state| {
        // A layer split over several blocks is compared after its last part.
        let blocks = plain.model().weights()?.blocks;
        let this = blocks[block.0].layer;
        if blocks.get(block.0 + 1).and_then(|next| next.layer) != this {
            layers.push((layer, state.get(HIDDEN)?.shallow_clone()));
            layer += 1;
        }
        Ok(())
    })?;
    for (layer, hidden) in &layers {
        report.push(comparison.activation(&format!("layer_out.{layer}"), hidden, *layer + 1)?);
    }
    report.push(comparison.activation("logits", &logits, layers.len() + 1)?);
    let loss = plain.evaluate(std::slice::from_ref(&batch))?;
    report.push(comparison.loss("loss", &plain, &loss)?);

    let adapted = opened.executor(
        opened.files()?,
        Some(opened.import(&directory.join("adapter"), options)?),
        2,
        options,
    )?;
    let logits = adapted.logits(&batch, &mut |_, _| Ok(()))?;
    report.push(comparison.activation("lora.logits", &logits, layers.len() + 1)?);
    let mut gradients = Gradients::new();
    let loss =
        adapted.train_step(std::slice::from_ref(&batch), StepOptions::default(), &mut gradients)?;
    report.push(comparison.loss("lora.loss", &adapted, &loss)?);
    let trainables = adapted.adapter().map_or(&[][..], |adapter| adapter.trainables());
    for (index, trainable) in trainables.iter().enumerate() {
        report.push(comparison.gradient(&trainable.name, gradients.get(index))?);
    }
    let expected = golden.iter().filter(|(name, _)| name.starts_with("grad.")).count();
    let detail = format!("{} trainable tensors, {expected} golden gradients", trainables.len());
    report.push(Check::of(
        "every golden gradient has its tensor",
        expected == trainables.len(),
        detail,
    ));

    streaming::check_identical(&opened, &batch, &directory.join("adapter"), options, &mut report)?;
    Ok(report)
}

fn batch(golden: &NamedTensors) -> Result<Batch> {
    let mut batch = Batch::new(golden.get("in.input_ids")?.shallow_clone());
    batch.attention_mask =
        golden.find("in.attention_mask").map(|mask| mask.f_to_kind(Kind::Bool)).transpose()?;
    batch.labels = golden.find("in.labels").map(Tensor::shallow_clone);
    Ok(batch)
}

struct Comparison<'a> {
    golden: &'a NamedTensors,
    exact: &'a NamedTensors,
    mask: Option<&'a Tensor>,
    kind: Kind,
}

impl Comparison<'_> {
    /// fp32: 1e-5 of the largest magnitude (1e-4 for logits). Lower precision: roundings of `depth`
    /// layers add up like a random walk, three units in the last place of the largest magnitude each.
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
        Ok(Check::within(name, difference, tolerance, ulps))
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

    /// Relative to the largest gradient of the tensor: 1e-4 in fp32. In lower precision the golden
    /// itself is far from the exact value (peft's adapter and gradient are rounded to it, ours are fp32
    /// masters): we must be about as close to the fp32 golden as transformers is.
    fn gradient(&self, key: &str, found: Option<&Tensor>) -> Result<Check> {
        let name = format!("grad.{key}");
        let exact = self.exact.get(&name)?;
        let Some(found) = found else {
            return Ok(Check::of(name, false, "no gradient came back"));
        };
        let (difference, magnitude) = max_difference(found, exact, None)?;
        let scale = 1.0 / magnitude.max(f64::MIN_POSITIVE);
        if self.kind == Kind::Float {
            return Ok(Check::within(name, difference * scale, 1e-4, "relative to the largest"));
        }
        let (theirs, _) = max_difference(self.golden.get(&name)?, exact, None)?;
        let detail =
            format!("relative to the largest fp32 gradient; transformers {:.2e}", theirs * scale);
        Ok(Check::within(name, difference * scale, 1.5 * theirs * scale + 1e-2, detail))
    }
}
