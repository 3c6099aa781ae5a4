//! `vision_config`.

use blockstreamer_core::Result;
use blockstreamer_core::config::ConfigSection;

/// The values of `model_type` in use: the hub repeats that of the whole model.
const MODEL_TYPES: [&str; 4] =
    ["qwen3_vl", "qwen3_vl_moe", "qwen3_vl_vision", "qwen3_vl_moe_vision"];

/// The vision tower.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct VisionConfig {
    /// Transformer blocks.
    pub(crate) depth: usize,
    pub(crate) hidden_size: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) num_heads: usize,
    pub(crate) in_channels: usize,
    /// Side of a patch in pixels.
    pub(crate) patch_size: usize,
    /// Frames of a patch.
    pub(crate) temporal_patch_size: usize,
    /// Patches of a merged cell along each side.
    pub(crate) spatial_merge_size: usize,
    /// Rows and columns of the square position table.
    pub(crate) table_side: usize,
    /// Width of the decoder that the tower feeds.
    pub(crate) out_hidden_size: usize,
    /// Blocks whose output goes to the decoder's first layers, ascending.
    pub(crate) deepstack: Vec<usize>,
    pub(crate) rope_theta: f64,
}

impl VisionConfig {
    /// Reads the section. `text_hidden_size` is the decoder's width.
    pub(super) fn parse(section: &ConfigSection, text_hidden_size: usize) -> Result<Self> {
        let model_type: Option<String> = section.optional("model_type")?;
        if let Some(other) = model_type.filter(|name| !MODEL_TYPES.contains(&name.as_str())) {
            let message = format!("'{other}' is none of {}", MODEL_TYPES.join(", "));
            return Err(section.error("model_type", message));
        }
        let hidden_act: Option<String> = section.optional("hidden_act")?;
        if let Some(other) = hidden_act.filter(|name| name != "gelu_pytorch_tanh") {
            let message = format!("'{other}' is not supported (only gelu_pytorch_tanh)");
            return Err(section.error("hidden_act", message));
        }
        let positive = |key: &str| match section.required(key)? {
            0_usize => Err(section.error(key, "is 0")),
            value => Ok(value),
        };
        let depth = positive("depth")?;
        let hidden_size = positive("hidden_size")?;
        let num_heads = positive("num_heads")?;
        // Rows turn one half of half a head, columns the other.
        if !hidden_size.is_multiple_of(4 * num_heads) {
            let message = format!(
                "is {num_heads}, but hidden_size {hidden_size} must be a multiple of four times as much"
            );
            return Err(section.error("num_heads", message));
        }
        let in_channels = section.optional("in_channels")?.unwrap_or(3);
        if in_channels != 3 {
            let message = format!("is {in_channels}; pictures have 3");
            return Err(section.error("in_channels", message));
        }
        let num_position_embeddings = positive("num_position_embeddings")?;
        let table_side = num_position_embeddings.isqrt();
        if table_side * table_side != num_position_embeddings {
            let message = format!("is {num_position_embeddings}, which is no square");
            return Err(section.error("num_position_embeddings", message));
        }
        let out_hidden_size = positive("out_hidden_size")?;
        if out_hidden_size != text_hidden_size {
            let message =
                format!("is {out_hidden_size}, but text_config.hidden_size is {text_hidden_size}");
            return Err(section.error("out_hidden_size", message));
        }
        let deepstack: Vec<usize> = section.required("deepstack_visual_indexes")?;
        let ascending = deepstack.is_sorted_by(|a, b| a < b);
        if !ascending || deepstack.last().is_some_and(|last| *last >= depth) {
            let message =
                format!("is {deepstack:?}; it must name blocks below {depth}, in ascending order");
            return Err(section.error("deepstack_visual_indexes", message));
        }
        Ok(Self {
            depth,
            hidden_size,
            intermediate_size: positive("intermediate_size")?,
            num_heads,
            in_channels,
            patch_size: positive("patch_size")?,
            temporal_patch_size: positive("temporal_patch_size")?,
            spatial_merge_size: positive("spatial_merge_size")?,
            table_side,
            out_hidden_size,
            deepstack,
            rope_theta: rope_theta(section)?,
        })
    }

    pub(crate) fn head_dim(&self) -> usize {
        self.hidden_size / self.num_heads
    }

    /// Values of one patch.
    pub(crate) fn patch_values(&self) -> usize {
        self.in_channels * self.temporal_patch_size * self.patch_size * self.patch_size
    }

    /// Width of a merged cell: all its patches side by side.
    pub(crate) fn cell_size(&self) -> usize {
        self.hidden_size * self.spatial_merge_size * self.spatial_merge_size
    }
}

/// Published files do not name it; transformers 5 saves `rope_parameters`.
fn rope_theta(section: &ConfigSection) -> Result<f64> {
    let Some(rope) = section.section("rope_parameters")? else { return Ok(10_000.0) };
    let rope_type: Option<String> = rope.optional("rope_type")?;
    if let Some(other) = rope_type.filter(|name| !["axial", "default"].contains(&name.as_str())) {
        return Err(rope.error("rope_type", format!("'{other}' is not supported (only axial)")));
    }
    Ok(rope.optional("rope_theta")?.unwrap_or(10_000.0))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::Config;
    use super::*;
    use crate::sizes;

    fn tiny() -> Value {
        serde_json::from_str(&sizes::config_json("tiny").unwrap()).unwrap()
    }

    fn parse(config: &Value) -> Result<VisionConfig> {
        Ok(Config::parse(&config.to_string())?.vision)
    }

    #[test]
    fn a_tower_as_transformers_5_saves_it_is_the_published_one() {
        let published = tiny();
        let mut saved = published.clone();
        saved["vision_config"]["model_type"] = json!("qwen3_vl_vision");
        let rope = json!({"rope_type": "axial", "rope_theta": 10000.0});
        saved["vision_config"]["rope_parameters"] = rope;
        assert_eq!(parse(&published).unwrap(), parse(&saved).unwrap());
        saved["vision_config"]["rope_parameters"]["rope_theta"] = json!(5000);
        assert_eq!(parse(&saved).unwrap().rope_theta, 5000.0);
    }

    #[test]
    fn what_the_tower_cannot_be_is_refused_by_name() {
        for (key, value, wanted) in [
            ("model_type", json!("siglip"), "vision_config.model_type 'siglip'"),
            ("hidden_act", json!("gelu"), "vision_config.hidden_act 'gelu'"),
            ("depth", json!(0), "vision_config.depth is 0"),
            ("depth", json!(null), "vision_config.depth is missing"),
            ("depth", json!(2), "vision_config.deepstack_visual_indexes is [0, 2]"),
            ("deepstack_visual_indexes", json!([2, 0]), "deepstack_visual_indexes is [2, 0]"),
            ("num_heads", json!(3), "vision_config.num_heads is 3"),
            ("num_heads", json!(32), "vision_config.num_heads is 32"),
            ("in_channels", json!(4), "vision_config.in_channels is 4"),
            ("num_position_embeddings", json!(24), "num_position_embeddings is 24"),
            ("out_hidden_size", json!(32), "vision_config.out_hidden_size is 32"),
            ("patch_size", json!([16, 16]), "vision_config.patch_size is [16,16]"),
            ("spatial_merge_size", json!(0), "vision_config.spatial_merge_size is 0"),
            ("rope_parameters", json!({"rope_type": "yarn"}), "rope_parameters.rope_type 'yarn'"),
        ] {
            let mut config = tiny();
            config["vision_config"][key] = value;
            let error = parse(&config).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        let mut config = tiny();
        config.as_object_mut().unwrap().remove("vision_config");
        let error = parse(&config).unwrap_err().to_string();
        assert!(error.contains("vision_config is missing"), "{error}");
    }
}
