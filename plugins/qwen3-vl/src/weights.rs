//! Which checkpoint tensor goes to which block under which name.

use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::weights::Role::{Embedding, Linear, NormScale};
use blockstreamer_core::weights::{WeightTable, row};

use crate::config::Config;

/// One streamed block per decoder layer, and blocks of their own for what comes before and after them.
#[rustfmt::skip]
pub(crate) fn table(config: &Config) -> WeightTable {
    let &Config { vocab_size: vocab, hidden_size: hidden, intermediate_size: inter, head_dim, .. } = config;
    let query = config.num_attention_heads * head_dim;
    let key = config.num_key_value_heads * head_dim;

    let layer = [
        row("model.language_model.layers.{n}.input_layernorm.weight",          "input_layernorm.weight",          NormScale, &[hidden]),
        row("model.language_model.layers.{n}.self_attn.q_proj.weight",         "self_attn.q_proj.weight",         Linear,    &[query, hidden]),
        row("model.language_model.layers.{n}.self_attn.k_proj.weight",         "self_attn.k_proj.weight",         Linear,    &[key, hidden]),
        row("model.language_model.layers.{n}.self_attn.v_proj.weight",         "self_attn.v_proj.weight",         Linear,    &[key, hidden]),
        row("model.language_model.layers.{n}.self_attn.q_norm.weight",         "self_attn.q_norm.weight",         NormScale, &[head_dim]),
        row("model.language_model.layers.{n}.self_attn.k_norm.weight",         "self_attn.k_norm.weight",         NormScale, &[head_dim]),
        row("model.language_model.layers.{n}.self_attn.o_proj.weight",         "self_attn.o_proj.weight",         Linear,    &[hidden, query]),
        row("model.language_model.layers.{n}.post_attention_layernorm.weight", "post_attention_layernorm.weight", NormScale, &[hidden]),
        row("model.language_model.layers.{n}.mlp.gate_proj.weight",            "mlp.gate_proj.weight",            Linear,    &[inter, hidden]),
        row("model.language_model.layers.{n}.mlp.up_proj.weight",              "mlp.up_proj.weight",              Linear,    &[inter, hidden]),
        row("model.language_model.layers.{n}.mlp.down_proj.weight",            "mlp.down_proj.weight",            Linear,    &[hidden, inter]),
    ];
    let embedding = [
        row("model.language_model.embed_tokens.weight",                        "embed_tokens.weight",             Embedding, &[vocab, hidden]),
    ];
    let norm = [
        row("model.language_model.norm.weight",                                "norm.weight",                     NormScale, &[hidden]),
    ];
    let head = [
        row("lm_head.weight",                                                  "lm_head.weight",                  Linear,    &[vocab, hidden]),
    ];

    let table = WeightTable::new(Dtype::BF16).layers("layers.{n}", config.num_hidden_layers, &layer);
    if config.tie_word_embeddings {
        // The head is the embedding matrix, which is multiplied then, and no tensor of its own.
        return table.resident("embedding", &embedding).resident("final norm", &norm);
    }
    table.gathered("embedding", &embedding).resident("final norm", &norm).head("head", &head)
}

/// The vision tower is not used for text, and a tied head needs no copy of its own.
pub(crate) fn ignores(config: &Config, checkpoint_name: &str) -> bool {
    checkpoint_name.starts_with("model.visual.")
        || (config.tie_word_embeddings && checkpoint_name == "lm_head.weight")
}

#[cfg(test)]
mod tests {
    use blockstreamer_core::block::{BlockSpec, Placement};
    use serde_json::Value;

    use super::*;
    use crate::sizes;

    fn config(size: &str) -> Config {
        Config::parse(&sizes::config_json(size).unwrap()).unwrap()
    }

    fn specs(table: &WeightTable) -> Vec<BlockSpec> {
        let mut specs = Vec::new();
        for (index, plan) in table.blocks.iter().enumerate() {
            let weights = table.weights.iter().filter(|weight| weight.block.0 == index);
            let tensors = weights.map(|w| (w.local.clone(), table.dtype, w.shape.clone()));
            specs.push(BlockSpec::pack(&plan.name, plan.placement, tensors).unwrap());
        }
        specs
    }

    /// Parameters of the vision tower by its published shapes.
    fn vision_parameters(size: &str) -> usize {
        let config: Value = serde_json::from_str(&sizes::config_json(size).unwrap()).unwrap();
        let vision = &config["vision_config"];
        let get = |key: &str| vision[key].as_u64().unwrap() as usize;
        let (d, f, h) = (get("hidden_size"), get("intermediate_size"), get("out_hidden_size"));
        let linear = |out: usize, inputs: usize| out * inputs + out;
        let (patch, merge) = (get("patch_size"), get("spatial_merge_size"));
        let pixels = get("in_channels") * get("temporal_patch_size") * patch * patch;
        let block = 4 * d + linear(3 * d, d) + linear(d, d) + linear(f, d) + linear(d, f);
        let wide = merge * merge * d;
        let merger = |norm: usize| 2 * norm + linear(wide, wide) + linear(h, wide);
        let deepstack = vision["deepstack_visual_indexes"].as_array().unwrap().len();
        linear(d, pixels)
            + get("num_position_embeddings") * d
            + get("depth") * block
            + merger(d)
            + deepstack * merger(wide)
    }

    #[test]
    fn blocks_and_parameters_of_the_published_sizes_are_exact() {
        for (size, layer_bytes, layers, tensors, parameters) in [
            ("2b", 100_672_000, 28, 310, 2_127_532_032_usize),
            ("4b", 201_861_632, 36, 398, 4_437_815_808),
            ("8b", 385_892_864, 36, 399, 8_767_123_696),
            ("32b", 975_196_672, 64, 707, 33_357_390_064),
        ] {
            let table = table(&config(size));
            assert_eq!(table.num_streamed(), layers, "{size}");
            assert_eq!(table.weights.len(), tensors, "{size}");
            let specs = specs(&table);
            for (index, spec) in specs[..layers].iter().enumerate() {
                assert_eq!(spec.name, format!("layers.{index}"));
                assert_eq!(spec.placement, Placement::Streamed);
                assert_eq!(spec.payload_bytes(), layer_bytes, "{size}");
            }
            let rest = &table.blocks[layers..];
            let placements: Vec<_> = rest.iter().map(|plan| plan.placement).collect();
            let tied = [Placement::Resident, Placement::Resident];
            let untied = [Placement::Gathered, Placement::Resident, Placement::Head];
            let expected = if tensors % 11 == 2 { &tied[..] } else { &untied };
            assert_eq!(placements, expected, "{size}");
            let text = specs.iter().map(BlockSpec::payload_bytes).sum::<usize>() / 2;
            assert_eq!(text + vision_parameters(size), parameters, "{size}");
        }
    }

    #[test]
    fn every_linear_is_a_site_under_its_peft_module() {
        let table = table(&config("tiny"));
        let sites = table.linear_sites();
        assert_eq!(sites.len(), 4 * 7 + 1);
        let down = &sites[7 + 6];
        assert_eq!(down.module, "model.language_model.layers.1.mlp.down_proj");
        assert_eq!((down.local.as_str(), down.layer), ("mlp.down_proj", Some(1)));
        assert_eq!((down.in_features, down.out_features), (160, 64));
        assert_eq!((sites[28].module.as_str(), sites[28].layer), ("lm_head", None));
    }

    #[test]
    fn only_the_tower_and_the_copy_of_a_tied_head_may_be_left_over() {
        let (tied, untied) = (config("2b"), config("8b"));
        let tower = "model.visual.blocks.0.attn.qkv.weight";
        assert!(ignores(&tied, tower) && ignores(&untied, tower));
        assert!(ignores(&tied, "lm_head.weight") && !ignores(&untied, "lm_head.weight"));
        assert!(!ignores(&tied, "model.language_model.layers.99.input_layernorm.weight"));
    }
}
