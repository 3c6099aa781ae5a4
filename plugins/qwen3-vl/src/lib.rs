//! Qwen3-VL: dense models and those with experts, with pictures and films.
//!
//! `config.rs` reads `config.json`, `weights.rs` is the table of its tensors, `model.rs` the decoder, `moe.rs`
//! its experts, `vision.rs` the tower; `prepare.rs` works out places, positions and grids on the host;
//! `sizes.rs` has the published configurations, `chat.rs` the special tokens, `media.rs` the processor.

mod chat;
mod config;
mod grids;
mod media;
mod model;
mod moe;
mod positions;
mod prepare;
mod sizes;
mod vision;
mod weights;

use blockstreamer_core::Result;
use blockstreamer_core::family::{ChatFormat, FamilySize, Model, ModelFamily, ModelOptions};

use config::{Config, DENSE, FAMILY, MOE};
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
        vec![DENSE.into(), MOE.into()]
    }

    fn sizes(&self) -> Result<Vec<FamilySize>> {
        let size = |name| {
            Some(FamilySize { name: String::from(name), config_json: sizes::config_json(name)? })
        };
        Ok(sizes::names().filter_map(size).collect())
    }

    fn open(&self, config_json: &str, options: &ModelOptions) -> Result<Box<dyn Model>> {
        Ok(Box::new(Qwen3VlModel::new(Config::parse(config_json)?, options)?))
    }

    fn chat_format(&self, config_json: &str) -> Result<ChatFormat> {
        chat::format(config_json)
    }

    fn processor_files(&self, config_json: &str) -> Result<Vec<(String, Vec<u8>)>> {
        Ok(media::processor_files(&Config::parse(config_json)?))
    }
}
