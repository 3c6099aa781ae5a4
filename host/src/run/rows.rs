//! The rows of a model's run as batches.

use std::sync::Arc;

use anyhow::{Result, bail};
use blockstreamer_core::vision::Media;

use crate::data::{
    BatchOptions, Batches, ChatTemplate, Dataset, DatasetOptions, PixelLimits, Processor,
    Tokenizer, Vision, today,
};
use crate::engine::OpenModel;
use crate::plugins::Registry;

use super::DataConfig;

/// Tokenises the rows of `data` with the model's own tokenizer and chat template, and finds its pictures. Where
/// this template does not tell what the assistant says, and the one of the model's family prints the same text and
/// does, that is asked.
///
/// # Errors
/// Whatever is wrong with the rows, the pictures, the tokenizer or the sizes asked for, naming file and line.
pub fn load_rows(
    registry: &Registry,
    open: &OpenModel,
    data: &DataConfig,
    sequence_length: usize,
    batches: BatchOptions,
) -> Result<Batches> {
    let tokenizer = Tokenizer::load(&open.directory)?;
    let dimensions = open.model.dimensions();
    if sequence_length > dimensions.max_position_embeddings {
        bail!(
            "sequence_length {} is more than the {} positions of this model",
            sequence_length,
            dimensions.max_position_embeddings
        );
    }
    let own = ChatTemplate::find(&open.directory, tokenizer.special_tokens())?;
    let config_json = &open.checkpoint.config_json;
    let format = registry.family_of(config_json)?.family().chat_format(config_json);
    let template = match (own, format) {
        (Some(own), Ok(format)) => Some(own.with_marked_twin(&format.chat_template)?),
        (own, _) => own,
    };
    let template = template.map(|template| template.on(data.date.unwrap_or_else(today)));
    let pixels = data.pixels();
    let processor = match open.model.vision_format()? {
        Some(format) => Some(Processor::new(format, &open.directory, pixels)?),
        None if pixels != PixelLimits::default() => {
            bail!("data.min_pixels and data.max_pixels are for pictures, and this model takes none")
        }
        None => None,
    };
    let media_text = |media: &Media| open.model.media_text(media);
    let vision = processor
        .map(|processor| Vision { processor: Arc::new(processor), media_text: &media_text });
    let rows = DatasetOptions { sequence_length, overflow: data.overflow };
    let dataset = Dataset::load(&data.path, &tokenizer, template.as_ref(), vision, rows)?;
    if dataset.num_skipped > 0 || dataset.num_truncated > 0 {
        tracing::warn!(
            "{} rows are longer than {} tokens and were left out, {} lost their end",
            dataset.num_skipped,
            sequence_length,
            dataset.num_truncated
        );
    }
    for warning in dataset.unprinted.warnings() {
        tracing::warn!("{}: {warning}", data.path.display());
    }
    Ok(Batches::new(dataset, tokenizer.pad_id(), batches)?)
}
