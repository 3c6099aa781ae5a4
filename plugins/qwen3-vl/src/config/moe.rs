//! The mixture-of-experts part of `text_config`.

use blockstreamer_core::Result;
use blockstreamer_core::config::ConfigSection;

/// Router and experts of the layers that have them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MoeConfig {
    pub(crate) num_experts: usize,
    /// Experts that each token goes to.
    pub(crate) num_experts_per_tok: usize,
    pub(crate) moe_intermediate_size: usize,
    /// Layers with a dense MLP in spite of all.
    mlp_only_layers: Vec<usize>,
    /// Every how many layers there are experts, the last of each so many.
    decoder_sparse_step: usize,
}

impl MoeConfig {
    /// `text` is the section of a model whose type says that it has experts.
    pub(super) fn parse(text: &ConfigSection) -> Result<Self> {
        let positive = |key: &str, value: usize| match value {
            0 => Err(text.error(key, "is 0")),
            value => Ok(value),
        };
        let num_experts = positive("num_experts", num_experts(text)?)?;
        let num_experts_per_tok = text.required("num_experts_per_tok")?;
        if num_experts_per_tok == 0 || num_experts_per_tok > num_experts {
            let message = format!("is {num_experts_per_tok}, but there are {num_experts} experts");
            return Err(text.error("num_experts_per_tok", message));
        }
        // transformers has never looked at this flag for Qwen3-VL: it always normalises. A file that asks
        // for something else would be computed otherwise here or there, whatever we did.
        if !text.optional("norm_topk_prob")?.unwrap_or(true) {
            return Err(text.error(
                "norm_topk_prob",
                "false is not supported: transformers normalises all the same; write true if that is meant",
            ));
        }
        if text.optional("output_router_logits")?.unwrap_or(false) {
            return Err(text.error(
                "output_router_logits",
                "true is not supported: it would add a loss of the router; write false",
            ));
        }
        let step = text.optional("decoder_sparse_step")?.unwrap_or(1);
        Ok(Self {
            num_experts,
            num_experts_per_tok,
            moe_intermediate_size: positive(
                "moe_intermediate_size",
                text.required("moe_intermediate_size")?,
            )?,
            mlp_only_layers: text.optional("mlp_only_layers")?.unwrap_or_default(),
            decoder_sparse_step: positive("decoder_sparse_step", step)?,
        })
    }

    /// Whether this layer has experts rather than a dense MLP.
    pub(crate) fn covers(&self, layer: usize) -> bool {
        !self.mlp_only_layers.contains(&layer)
            && (layer + 1).is_multiple_of(self.decoder_sparse_step)
    }
}

/// `num_experts` as published, `num_local_experts` as transformers 5 saves it.
fn num_experts(text: &ConfigSection) -> Result<usize> {
    let published: Option<usize> = text.optional("num_experts")?;
    let saved: Option<usize> = text.optional("num_local_experts")?;
    match (published, saved) {
        (Some(published), Some(saved)) if published != saved => {
            let message = format!("is {saved}, but num_experts is {published}");
            Err(text.error("num_local_experts", message))
        }
        (Some(count), _) | (None, Some(count)) => Ok(count),
        (None, None) => Err(text.error("num_experts", "is missing (num_local_experts, too)")),
    }
}

/// Refuses a dense model that names experts.
pub(super) fn refuse_experts(text: &ConfigSection) -> Result<()> {
    for key in ["num_experts", "num_local_experts"] {
        if text.optional::<usize>(key)?.is_some_and(|count| count > 0) {
            let message = "says mixture of experts, but model_type says that the model is dense";
            return Err(text.error(key, message));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::Config;
    use super::*;
    use crate::sizes;

    fn tiny_moe() -> Value {
        serde_json::from_str(&sizes::config_json("tiny-moe").unwrap()).unwrap()
    }

    fn parse(config: &Value) -> Result<MoeConfig> {
        Ok(Config::parse(&config.to_string())?.moe.unwrap())
    }

    #[test]
    fn both_spellings_give_the_same_config() {
        let published = tiny_moe();
        let mut saved = published.clone();
        let text = saved["text_config"].as_object_mut().unwrap();
        let count = text.remove("num_experts").unwrap();
        text.insert("num_local_experts".into(), count);
        text.remove("norm_topk_prob");
        saved["vision_config"]["model_type"] = json!("qwen3_vl_moe_vision");
        assert_eq!(parse(&published).unwrap(), parse(&saved).unwrap());
        assert_eq!(parse(&saved).unwrap().num_experts, 8);
    }

    #[test]
    fn layers_with_experts_are_those_of_transformers() {
        let mut config = tiny_moe();
        let layers = |config: &Value| {
            let moe = parse(config).unwrap();
            (0..6).filter(|layer| moe.covers(*layer)).collect::<Vec<_>>()
        };
        assert_eq!(layers(&config), [0, 2, 3, 4, 5]);
        config["text_config"]["mlp_only_layers"] = json!([]);
        assert_eq!(layers(&config), [0, 1, 2, 3, 4, 5]);
        config["text_config"]["decoder_sparse_step"] = json!(2);
        assert_eq!(layers(&config), [1, 3, 5]);
        config["text_config"]["mlp_only_layers"] = json!([3]);
        assert_eq!(layers(&config), [1, 5]);
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        for (key, value, wanted) in [
            ("num_experts", json!(0), "text_config.num_experts is 0"),
            ("num_experts", json!(null), "text_config.num_experts is missing"),
            ("num_local_experts", json!(9), "text_config.num_local_experts is 9"),
            ("num_experts_per_tok", json!(9), "text_config.num_experts_per_tok is 9"),
            ("num_experts_per_tok", json!(0), "text_config.num_experts_per_tok is 0"),
            ("moe_intermediate_size", json!(null), "text_config.moe_intermediate_size is missing"),
            ("decoder_sparse_step", json!(0), "text_config.decoder_sparse_step is 0"),
            ("norm_topk_prob", json!(false), "text_config.norm_topk_prob false"),
            ("output_router_logits", json!(true), "text_config.output_router_logits true"),
            ("mlp_only_layers", json!("1"), "text_config.mlp_only_layers is \"1\""),
        ] {
            let mut config = tiny_moe();
            config["text_config"][key] = value;
            let error = parse(&config).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
