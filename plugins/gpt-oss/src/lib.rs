//! gpt-oss: experts packed in MXFP4, attention with sinks and sliding windows.
//!
//! `config.rs` reads `config.json`, `weights.rs` is the table of its tensors, `model.rs` the decoder;
//! `sizes.rs` has the published configurations, `chat.rs` the special tokens and the chat template.

mod chat;
mod config;
mod model;
mod sizes;
mod weights;

use blockstreamer_core::Result;
use blockstreamer_core::family::{ChatFormat, FamilySize, Model, ModelFamily, ModelOptions};

use config::{Config, FAMILY, MODEL_TYPE};
use model::GptOssModel;

/// The family `gpt-oss`.
#[derive(Debug, Clone, Copy, Default)]
pub struct GptOss;

blockstreamer_core::export_family!(GptOss);

impl ModelFamily for GptOss {
    fn name(&self) -> String {
        FAMILY.into()
    }

    fn model_types(&self) -> Vec<String> {
        vec![MODEL_TYPE.into()]
    }

    fn sizes(&self) -> Result<Vec<FamilySize>> {
        let size = |name| {
            Some(FamilySize { name: String::from(name), config_json: sizes::config_json(name)? })
        };
        Ok(sizes::NAMES.into_iter().filter_map(size).collect())
    }

    fn open(&self, config_json: &str, options: &ModelOptions) -> Result<Box<dyn Model>> {
        Ok(Box::new(GptOssModel::new(Config::parse(config_json)?, options)?))
    }

    fn with_layers(&self, config_json: &str, num_hidden_layers: usize) -> Result<String> {
        sizes::with_layers(config_json, num_hidden_layers)
    }

    fn chat_format(&self, config_json: &str) -> Result<ChatFormat> {
        chat::format(config_json)
    }
}
