//! Rotary embedding with YaRN, in either spelling.

use blockstreamer_core::Result;
use blockstreamer_core::config::ConfigSection;
use blockstreamer_core::numerics::Yarn;

/// How positions turn.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rope {
    pub(crate) inverse_frequencies: Vec<f32>,
    /// Factor on cosines and sines.
    pub(crate) attention_factor: f64,
}

/// `rope_parameters`, or `rope_scaling` with `rope_theta` beside it.
pub(super) fn rope(root: &ConfigSection, head_dim: usize) -> Result<Rope> {
    let (key, section) = match root.section("rope_parameters")? {
        Some(section) => ("rope_parameters", Some(section)),
        None => ("rope_scaling", root.section("rope_scaling")?),
    };
    let Some(section) = section else { return Err(root.error(key, "is missing")) };
    let spelling = if section.optional::<String>("type")?.is_some() { "type" } else { "rope_type" };
    let rope_type: String = section.required(spelling)?;
    if rope_type != "yarn" {
        let message = format!("'{rope_type}' is not supported (only yarn)");
        return Err(section.error(spelling, message));
    }
    for (key, neutral) in
        [("attention_factor", None), ("mscale", None), ("partial_rotary_factor", Some(1.0))]
    {
        if let Some(value) = section.optional::<f64>(key)?.filter(|value| Some(*value) != neutral) {
            return Err(section.error(key, format!("{value} is not supported; no gpt-oss has it")));
        }
    }
    let rope_theta = match section.optional("rope_theta")? {
        Some(theta) => theta,
        None => root.required("rope_theta")?,
    };
    const ORIGINAL: &str = "original_max_position_embeddings";
    let original = match section.optional(ORIGINAL)? {
        Some(original) => Some(original),
        // As the reference implementation calls it.
        None => root.optional("initial_context_length")?,
    };
    let yarn = Yarn {
        factor: section.required("factor")?,
        beta_fast: section.optional("beta_fast")?.unwrap_or(32.0),
        beta_slow: section.optional("beta_slow")?.unwrap_or(1.0),
        original_max_position_embeddings: original
            .ok_or_else(|| section.error(ORIGINAL, "is missing"))?,
        truncate: section.optional("truncate")?.unwrap_or(true),
    };
    let inverse_frequencies = yarn
        .inverse_frequencies(rope_theta, head_dim)
        .map_err(|error| root.error(key, format!("is unusable: {error}")))?;
    Ok(Rope { inverse_frequencies, attention_factor: yarn.attention_factor() })
}
