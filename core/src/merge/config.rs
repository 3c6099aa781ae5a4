//! What lies beside the weights.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::MARKER_FILE;
use crate::checkpoint::SYNTHETIC_MARKER;
use crate::error::{Error, Result};

/// Ends of names of weights in any format, and of their indices.
const WEIGHT_ENDINGS: [&str; 12] = [
    ".safetensors",
    ".index.json",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".ggml",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
];

/// The files of `directory` that belong to a merged model as well: configuration, tokenizer, template,
/// preprocessors, licence. Not the weights, nor the base model's card, nor hidden files.
pub(super) fn side_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(Error::io("list", directory))? {
        let path = entry.map_err(Error::io("list", directory))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let is_left_out = name.starts_with('.')
            || WEIGHT_ENDINGS.iter().any(|ending| name.ends_with(ending))
            || [MARKER_FILE, SYNTHETIC_MARKER, "README.md"].contains(&&*name);
        // Folders hold the same weights in other formats. A cache of downloads holds links to files.
        if !is_left_out && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// `config.json` of the same model with nothing quantised.
pub(super) fn without_quantization(config_json: &str) -> Result<String> {
    let refuse = |error: serde_json::Error| Error::usage(format!("config.json: {error}"));
    let mut config: Map<String, Value> = serde_json::from_str(config_json).map_err(refuse)?;
    // Models with a vision tower may keep it with the decoder's settings.
    if let Some(Value::Object(text)) = config.get_mut("text_config") {
        text.shift_remove("quantization_config");
    }
    config.shift_remove("quantization_config");
    serde_json::to_string_pretty(&config).map_err(refuse)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_config_loses_its_quantization_and_nothing_else() {
        let text = r#"{"b": 1, "quantization_config": {"quant_method": "mxfp4"}, "a": {"c": 2}}"#;
        let found: Value = serde_json::from_str(&without_quantization(text).unwrap()).unwrap();
        assert_eq!(found, serde_json::json!({"b": 1, "a": {"c": 2}}));
        let text = r#"{"text_config": {"quantization_config": {}, "d": 3}}"#;
        let found: Value = serde_json::from_str(&without_quantization(text).unwrap()).unwrap();
        assert_eq!(found, serde_json::json!({"text_config": {"d": 3}}));
    }

    #[test]
    fn weights_and_the_card_of_the_base_model_are_not_copied() {
        let folder = tempfile::tempdir().unwrap();
        let kept = ["chat_template.jinja", "config.json", "merges.txt", "tokenizer.json"];
        let left_out = [
            ".gitattributes",
            "README.md",
            "merged.json",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "pytorch_model.bin",
            "pytorch_model.bin.index.json",
            "synthetic.json",
        ];
        for name in kept.iter().chain(&left_out) {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        std::fs::create_dir(folder.path().join("original")).unwrap();
        let found = side_files(folder.path()).unwrap();
        let names: Vec<_> = found.iter().map(|path| path.file_name().unwrap()).collect();
        assert_eq!(names, kept);
    }
}
