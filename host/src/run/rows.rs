//! The rows of a model's run as batches.

use std::path::Path;

use anyhow::{Result, bail};

use crate::data::{BatchOptions, Batches, ChatTemplate, Dataset, DatasetOptions, Tokenizer};
use crate::engine::OpenModel;

/// Tokenises the JSONL file `path` with the model's own tokenizer and chat template.
///
/// # Errors
/// Whatever is wrong with the rows, the tokenizer or the sizes asked for, naming file and line.
pub fn load_rows(
    open: &OpenModel,
    path: &Path,
    rows: DatasetOptions,
    batches: BatchOptions,
) -> Result<Batches> {
    let tokenizer = Tokenizer::load(&open.directory)?;
    let dimensions = open.model.dimensions();
    if rows.sequence_length > dimensions.max_position_embeddings {
        bail!(
            "sequence_length {} is more than the {} positions of this model",
            rows.sequence_length,
            dimensions.max_position_embeddings
        );
    }
    let template = ChatTemplate::find(&open.directory, tokenizer.special_tokens())?;
    let dataset = Dataset::load(path, &tokenizer, template.as_ref(), rows)?;
    if dataset.num_skipped > 0 || dataset.num_truncated > 0 {
        tracing::warn!(
            "{} rows are longer than {} tokens and were left out, {} lost their end",
            dataset.num_skipped,
            rows.sequence_length,
            dataset.num_truncated
        );
    }
    Ok(Batches::new(dataset, tokenizer.pad_id(), batches)?)
}
