//! From a JSONL file to micro-batches: tokenizer, chat template, loss mask, dataset, batches.
//!
//! ```text
//! folder --Tokenizer::load, ChatTemplate::find--> encoder
//! file   --Dataset::load (template, tokens, mask, length rule)--> samples
//! samples --Batches::step(n)--> the micro-batches of optimizer step n
//! ```
//! Everything here is deterministic: the same files, settings and step number give the same tensors.

mod batches;
mod dataset;
mod error;
mod json;
mod mask;
mod row;
mod template;
mod tokenizer;
mod train_tokenizer;

pub use batches::{BatchOptions, Batches, Step};
pub use dataset::{Dataset, DatasetOptions, Overflow, Sample};
pub use error::{DataError, Result};
pub use mask::{assistant_spans, target_tokens};
pub use row::Conversation;
pub use template::{ChatTemplate, Rendered};
pub use tokenizer::{Encoded, Tokenizer};
pub use train_tokenizer::write_tokenizer;

/// English prose to train the tokenizer of a synthetic checkpoint on, see [`write_tokenizer`].
pub const CORPUS: &str = include_str!("../../assets/corpus.txt");

/// The demo's dataset: JSONL chat rows of a harbour master's assistant.
pub const DEMO_JSONL: &str = include_str!("../../assets/demo.jsonl");

/// The small tokenizer in `tests/data`.
#[cfg(test)]
fn test_folder() -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizer")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
fn test_model() -> (Tokenizer, ChatTemplate) {
    let tokenizer = Tokenizer::load(&test_folder()).unwrap();
    let template = ChatTemplate::find(&test_folder(), tokenizer.special_tokens()).unwrap().unwrap();
    (tokenizer, template)
}
