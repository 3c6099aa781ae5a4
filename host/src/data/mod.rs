//! From a JSONL file to micro-batches: tokenizer, chat template, pictures, loss mask, dataset, batches.
//!
//! ```text
//! folder --Tokenizer::load, ChatTemplate::find, Processor::new--> encoder
//! file   --Dataset::load (template, sizes of pictures, tokens, mask, length rule)--> samples
//! samples --Batches::step(n) (pixels of pictures)--> the micro-batches of optimizer step n
//! ```
//! Of pictures only sizes are read with the rows. Pixels are made for one step at a time, while the step before
//! is computed, so that neither memory nor device waits for them.
//!
//! Everything here is deterministic: the same files, settings and step number give the same tensors.

mod batches;
mod channels;
mod dataset;
mod error;
mod images;
mod json;
mod making;
mod mask;
mod parts;
mod placing;
mod row;
mod sample;
mod template;
mod tokenizer;
mod train_tokenizer;
mod unprinted;

pub use batches::{BatchOptions, Batches, Step};
pub use dataset::{Dataset, DatasetOptions, Overflow};
pub use error::{DataError, Result};
pub use images::{PixelLimits, Processor};
pub use mask::{assistant_spans, target_tokens};
pub use row::Conversation;
pub use sample::{Picture, Sample, Vision};
pub use template::{ChatTemplate, Rendered, today};
pub use tokenizer::{Encoded, Tokenizer};
pub use train_tokenizer::write_tokenizer;
pub use unprinted::{Piece, Unprinted};

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

/// A format with small patches and pictures, with the placeholders of Qwen3-VL.
#[cfg(test)]
fn test_vision_format() -> blockstreamer_core::vision::VisionFormat {
    blockstreamer_core::vision::VisionFormat {
        patch_size: 4,
        temporal_patch_size: 2,
        spatial_merge_size: 2,
        min_pixels: 512,
        max_pixels: 1024,
        video_min_pixels: 512,
        video_max_pixels: 2048,
        max_aspect_ratio: 200.0,
        image_mean: [0.5; 3],
        image_std: [0.5; 3],
        image_placeholder: "<|image_pad|>".into(),
        video_placeholder: "<|vision_start|><|video_pad|><|vision_end|>".into(),
        vision_token_ids: Vec::new(),
    }
}

/// The committed pictures.
#[cfg(test)]
fn test_pictures() -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/pictures")
}
