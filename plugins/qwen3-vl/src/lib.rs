//! Qwen3-VL, dense, text side.
//!
//! `config.rs` reads `config.json`, `weights.rs` is the table of its tensors, `model.rs` the forward,
//! `sizes.rs` the published configurations, `chat.rs` the special tokens.

mod chat;
mod config;
mod model;
mod sizes;
mod weights;

use blockstreamer_core::Result;
use blockstreamer_core::family::{ChatFormat, FamilySize, Model, ModelFamily};

use config::{Config, FAMILY, MODEL_TYPE};
use model::Qwen3VlModel;

/// The family `qwen3-vl`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Qwen3Vl;

blockstreamer_core::export_family!(Qwen3Vl);

impl ModelFamily for Qwen3Vl {
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
        Ok(sizes::names().filter_map(size).collect())
    }

    fn open(&self, config_json: &str) -> Result<Box<dyn Model>> {
        Ok(Box::new(Qwen3VlModel::new(Config::parse(config_json)?)?))
    }

    fn chat_format(&self, config_json: &str) -> Result<ChatFormat> {
        chat::format(config_json)
    }
}
