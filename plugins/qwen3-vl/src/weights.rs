//! Which checkpoint tensor goes to which block under which name.

use std::ops::Range;

use blockstreamer_core::block::Placement;
use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::routed::ExpertGroup;
use blockstreamer_core::weights::ExpertLayout::InOut;
use blockstreamer_core::weights::Role::{Bias, Embedding, Experts, Linear, NormScale, Router};
use blockstreamer_core::weights::{BlockPlan, Row, WeightTable, row};

use crate::config::{Config, MoeConfig, VisionConfig};

/// What a streamed block computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Part {
    /// Patches to the tower's first hidden states.
    VisionEmbed,
    /// A block of the tower, with the number of the merger that reads its output, if one does.
    VisionBlock { number: usize, deepstack: Option<usize> },
    /// The tower's output to the decoder's rows.
    VisionMerger,
    /// A whole decoder layer.
    Dense { layer: usize },
    /// Attention and router of a decoder layer with experts.
    Router { layer: usize },
    /// Some of its experts.
    Experts { layer: usize, group: ExpertGroup },
}

/// The streamed blocks in order, with the experts of a layer in these groups.
pub(crate) fn parts(config: &Config, groups: &[ExpertGroup]) -> Vec<Part> {
    let vision = &config.vision;
    let deepstack = |number| vision.deepstack.iter().position(|index| *index == number);
    let tower =
        (0..vision.depth).map(|number| Part::VisionBlock { number, deepstack: deepstack(number) });
    let mut parts = vec![Part::VisionEmbed];
    parts.extend(tower);
    parts.push(Part::VisionMerger);
    for layer in 0..config.num_hidden_layers {
        if !config.moe.as_ref().is_some_and(|moe| moe.covers(layer)) {
            parts.push(Part::Dense { layer });
            continue;
        }
        parts.push(Part::Router { layer });
        parts.extend(groups.iter().map(|group| Part::Experts { layer, group: group.clone() }));
    }
    parts
}

/// The streamed blocks of [`parts`], and blocks of their own for what comes before and after them.
pub(crate) fn table(config: &Config, parts: &[Part]) -> WeightTable {
    let mut table = WeightTable::new(Dtype::BF16);
    for part in parts {
        let streamed = |name: &str, layer| BlockPlan::new(name, Placement::Streamed, layer);
        match part {
            Part::VisionEmbed => {
                let plan = streamed("vision.embed", None).only_with_vision();
                table.add(plan, 0, &tower_embed(&config.vision));
            }
            Part::VisionBlock { number, deepstack } => {
                let plan = streamed("vision.blocks.{n}", None).only_with_vision();
                let names = deepstack.map(merger_names);
                let mut rows = tower_block(&config.vision);
                if let Some(names) = &names {
                    rows.extend(merger(&config.vision, names, config.vision.cell_size()));
                }
                table.add(plan, *number, &rows);
            }
            Part::VisionMerger => {
                let plan = streamed("vision.merger", None).only_with_vision();
                let names = names_below("model.visual.merger", "merger");
                let rows = merger(&config.vision, &names, config.vision.hidden_size);
                table.add(plan, 0, &rows);
            }
            Part::Dense { layer } => {
                let rows = [attention(config), mlp(config)].concat();
                table.add(streamed("layers.{n}", Some(*layer)), *layer, &rows);
            }
            Part::Router { layer } => {
                let rows = [attention(config), router(config)].concat();
                table.add(streamed("layers.{n}", Some(*layer)), *layer, &rows);
            }
            Part::Experts { layer, group } => {
                let name = format!("layers.{{n}}.experts.{}", group.number);
                let rows = expert_rows(config, &group.experts);
                table.add(streamed(&name, Some(*layer)).tokenwise(), *layer, &rows);
            }
        }
    }
    ends(config, table)
}

#[rustfmt::skip]
fn attention(config: &Config) -> Vec<Row<'static>> {
    let &Config { hidden_size: hidden, head_dim, .. } = config;
    let query = config.num_attention_heads * head_dim;
    let key = config.num_key_value_heads * head_dim;
    vec![
        row("model.language_model.layers.{n}.input_layernorm.weight",          "input_layernorm.weight",          NormScale, &[hidden]),
        row("model.language_model.layers.{n}.self_attn.q_proj.weight",         "self_attn.q_proj.weight",         Linear,    &[query, hidden]),
        row("model.language_model.layers.{n}.self_attn.k_proj.weight",         "self_attn.k_proj.weight",         Linear,    &[key, hidden]),
        row("model.language_model.layers.{n}.self_attn.v_proj.weight",         "self_attn.v_proj.weight",         Linear,    &[key, hidden]),
        row("model.language_model.layers.{n}.self_attn.q_norm.weight",         "self_attn.q_norm.weight",         NormScale, &[head_dim]),
        row("model.language_model.layers.{n}.self_attn.k_norm.weight",         "self_attn.k_norm.weight",         NormScale, &[head_dim]),
        row("model.language_model.layers.{n}.self_attn.o_proj.weight",         "self_attn.o_proj.weight",         Linear,    &[hidden, query]),
        row("model.language_model.layers.{n}.post_attention_layernorm.weight", "post_attention_layernorm.weight", NormScale, &[hidden]),
    ]
}

#[rustfmt::skip]
fn mlp(config: &Config) -> Vec<Row<'static>> {
    let &Config { hidden_size: hidden, intermediate_size: inter, .. } = config;
    vec![
        row("model.language_model.layers.{n}.mlp.gate_proj.weight",            "mlp.gate_proj.weight",            Linear,    &[inter, hidden]),
        row("model.language_model.layers.{n}.mlp.up_proj.weight",              "mlp.up_proj.weight",              Linear,    &[inter, hidden]),
        row("model.language_model.layers.{n}.mlp.down_proj.weight",            "mlp.down_proj.weight",            Linear,    &[hidden, inter]),
    ]
}

#[rustfmt::skip]
fn router(config: &Config) -> Vec<Row<'static>> {
    let experts = config.moe.as_ref().map_or(0, |moe| moe.num_experts);
    vec![
        row("model.language_model.layers.{n}.mlp.gate.weight",                 "mlp.gate.weight",                 Router,    &[experts, config.hidden_size]),
    ]
}

#[rustfmt::skip]
fn expert_rows(config: &Config, experts: &Range<usize>) -> Vec<Row<'static>> {
    let hidden = config.hidden_size;
    let (all, inter) = config.moe.as_ref().map_or((0, 0), |moe: &MoeConfig| (moe.num_experts, moe.moe_intermediate_size));
    vec![
        row("model.language_model.layers.{n}.mlp.experts.gate_up_proj",        "mlp.experts.gate_up_proj",        Experts(InOut), &[all, hidden, 2 * inter]).part(experts.clone()),
        row("model.language_model.layers.{n}.mlp.experts.down_proj",           "mlp.experts.down_proj",           Experts(InOut), &[all, inter, hidden]).part(experts.clone()),
    ]
}

// The weight of the patch embedding is that of a convolution, which is no linear to peft: no adapter site.
#[rustfmt::skip]
fn tower_embed(vision: &VisionConfig) -> Vec<Row<'static>> {
    let &VisionConfig { hidden_size: hidden, in_channels, temporal_patch_size: frames, patch_size: side, .. } = vision;
    vec![
        row("model.visual.patch_embed.proj.weight",          "patch_embed.proj.weight", Embedding, &[hidden, in_channels, frames, side, side]),
        row("model.visual.patch_embed.proj.bias",            "patch_embed.proj.bias",   Bias,      &[hidden]),
        row("model.visual.pos_embed.weight",                 "pos_embed.weight",        Embedding, &[vision.table_side * vision.table_side, hidden]),
    ]
}

#[rustfmt::skip]
fn tower_block(vision: &VisionConfig) -> Vec<Row<'static>> {
    let &VisionConfig { hidden_size: hidden, intermediate_size: inter, .. } = vision;
    vec![
        row("model.visual.blocks.{n}.norm1.weight",          "norm1.weight",            NormScale, &[hidden]),
        row("model.visual.blocks.{n}.norm1.bias",            "norm1.bias",              Bias,      &[hidden]),
        row("model.visual.blocks.{n}.attn.qkv.weight",       "attn.qkv.weight",         Linear,    &[3 * hidden, hidden]),
        row("model.visual.blocks.{n}.attn.qkv.bias",         "attn.qkv.bias",           Bias,      &[3 * hidden]),
        row("model.visual.blocks.{n}.attn.proj.weight",      "attn.proj.weight",        Linear,    &[hidden, hidden]),
        row("model.visual.blocks.{n}.attn.proj.bias",        "attn.proj.bias",          Bias,      &[hidden]),
        row("model.visual.blocks.{n}.norm2.weight",          "norm2.weight",            NormScale, &[hidden]),
        row("model.visual.blocks.{n}.norm2.bias",            "norm2.bias",              Bias,      &[hidden]),
        row("model.visual.blocks.{n}.mlp.linear_fc1.weight", "mlp.linear_fc1.weight",   Linear,    &[inter, hidden]),
        row("model.visual.blocks.{n}.mlp.linear_fc1.bias",   "mlp.linear_fc1.bias",     Bias,      &[inter]),
        row("model.visual.blocks.{n}.mlp.linear_fc2.weight", "mlp.linear_fc2.weight",   Linear,    &[hidden, inter]),
        row("model.visual.blocks.{n}.mlp.linear_fc2.bias",   "mlp.linear_fc2.bias",     Bias,      &[hidden]),
    ]
}

/// Names of a merger's tensors, in the checkpoint and in the block.
type MergerNames = [(String, String); 6];

fn names_below(checkpoint: &str, local: &str) -> MergerNames {
    [
        "norm.weight",
        "norm.bias",
        "linear_fc1.weight",
        "linear_fc1.bias",
        "linear_fc2.weight",
        "linear_fc2.bias",
    ]
    .map(|name| (format!("{checkpoint}.{name}"), format!("{local}.{name}")))
}

fn merger_names(number: usize) -> MergerNames {
    names_below(&format!("model.visual.deepstack_merger_list.{number}"), "deepstack_merger")
}

/// The last merger and those of the deep stack, which differ in the width of the norm.
#[rustfmt::skip]
fn merger<'a>(vision: &VisionConfig, names: &'a MergerNames, norm: usize) -> Vec<Row<'a>> {
    let (cell, out) = (vision.cell_size(), vision.out_hidden_size);
    let [norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias] = names;
    vec![
        row(&norm_weight.0, &norm_weight.1, NormScale, &[norm]),
        row(&norm_bias.0,   &norm_bias.1,   Bias,      &[norm]),
        row(&fc1_weight.0,  &fc1_weight.1,  Linear,    &[cell, cell]),
        row(&fc1_bias.0,    &fc1_bias.1,    Bias,      &[cell]),
        row(&fc2_weight.0,  &fc2_weight.1,  Linear,    &[out, cell]),
        row(&fc2_bias.0,    &fc2_bias.1,    Bias,      &[out]),
    ]
}

#[rustfmt::skip]
fn ends(config: &Config, table: WeightTable) -> WeightTable {
    let &Config { vocab_size: vocab, hidden_size: hidden, .. } = config;
    let embedding = [
        row("model.language_model.embed_tokens.weight",                        "embed_tokens.weight",             Embedding, &[vocab, hidden]),
    ];
    let norm = [
        row("model.language_model.norm.weight",                                "norm.weight",                     NormScale, &[hidden]),
    ];
    let head = [
        row("lm_head.weight",                                                  "lm_head.weight",                  Linear,    &[vocab, hidden]),
    ];
    if config.tie_word_embeddings {
        // The head is the embedding matrix, which is multiplied then, and no tensor of its own.
        return table.resident("embedding", &embedding).resident("final norm", &norm);
    }
    table.gathered("embedding", &embedding).resident("final norm", &norm).head("head", &head)
}

/// A tied head needs no copy of its own.
pub(crate) fn ignores(config: &Config, checkpoint_name: &str) -> bool {
    config.tie_word_embeddings && checkpoint_name == "lm_head.weight"
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use blockstreamer_core::block::BlockSpec;
    use blockstreamer_core::routed::deal;
    use blockstreamer_core::site::SiteKind;

    use super::*;
    use crate::sizes;

    fn config(size: &str) -> Config {
        Config::parse(&sizes::config_json(size).unwrap()).unwrap()
    }

    fn table_of(size: &str, num_expert_groups: usize) -> WeightTable {
        let config = config(size);
        let num_experts = config.moe.as_ref().map_or(0, |moe| moe.num_experts);
        table(&config, &parts(&config, &deal(num_experts, num_expert_groups).unwrap()))
    }

    /// Bytes of each block in the published dtype, padding left out.
    fn block_bytes(table: &WeightTable) -> Vec<(&BlockPlan, usize)> {
        let mut blocks = Vec::new();
        for (index, plan) in table.blocks.iter().enumerate() {
            let weights = table.weights.iter().filter(|weight| weight.block.0 == index);
            let tensors = weights.map(|weight| {
                let mut shape = weight.shape.clone();
                if let Some(slice) = &weight.slice {
                    shape[0] = slice.len();
                }
                (weight.local.clone(), table.dtype, shape)
            });
            let spec = BlockSpec::pack(&plan.name, plan.placement, tensors).unwrap();
            blocks.push((plan, spec.payload_bytes()));
        }
        blocks
    }

    /// Size, bytes of a decoder layer, layers, tensors of the checkpoint, parameters, MiB of the tower.
    const PUBLISHED: [(&str, usize, usize, usize, usize, f64); 6] = [
        ("2b", 100_672_000, 28, 625, 2_127_532_032, 776.2),
        ("4b", 201_861_632, 36, 713, 4_437_815_808, 792.2),
        ("8b", 385_892_864, 36, 750, 8_767_123_696, 1099.4),
        ("32b", 975_196_672, 64, 1058, 33_357_390_064, 1135.4),
        ("30b-a3b", 1_246_241_280, 48, 882, 31_070_754_032, 1027.4),
        ("235b-a22b", 4_975_510_016, 94, 1388, 235_670_022_896, 1099.4),
    ];

    #[test]
    fn layers_tower_and_parameters_of_the_published_sizes_are_exact_however_experts_are_dealt() {
        for (size, layer_bytes, num_layers, num_tensors, num_parameters, tower_mib) in PUBLISHED {
            for groups in [1, 8, 128] {
                let table = table_of(size, groups);
                let names: BTreeSet<_> = table.weights.iter().map(|w| &w.checkpoint).collect();
                assert_eq!(names.len(), num_tensors, "{size}");
                let blocks = block_bytes(&table);
                let mut layers = BTreeMap::new();
                let mut tower = 0;
                for (plan, bytes) in &blocks {
                    match plan.layer {
                        Some(layer) => *layers.entry(layer).or_default() += bytes,
                        None if plan.only_with_vision => tower += bytes,
                        None => {}
                    }
                }
                let wanted: BTreeMap<_, _> = (0..num_layers).map(|n| (n, layer_bytes)).collect();
                assert_eq!(layers, wanted, "{size} in {groups} groups");
                let mib = tower as f64 / f64::from(1 << 20);
                assert!((mib - tower_mib).abs() <= 0.05, "{size}: {mib}");
                let all: usize = blocks.iter().map(|(_, bytes)| bytes).sum();
                assert_eq!(all, 2 * num_parameters, "{size} in {groups} groups");
            }
        }
    }

    #[test]
    fn the_head_is_the_embedding_exactly_where_it_is_tied() {
        for (size, ..) in PUBLISHED {
            let table = table_of(size, 1);
            let rest = &table.blocks[table.num_streamed()..];
            let placements: Vec<_> = rest.iter().map(|plan| plan.placement).collect();
            let tied = [Placement::Resident, Placement::Resident];
            let untied = [Placement::Gathered, Placement::Resident, Placement::Head];
            let expected = if ["2b", "4b"].contains(&size) { &tied[..] } else { &untied };
            assert_eq!(placements, expected, "{size}");
        }
    }

    #[test]
    fn blocks_are_named_by_what_they_hold_and_the_experts_of_a_layer_are_dealt_in_order() {
        let table = table_of("tiny-moe", 4);
        let names: Vec<_> = table.blocks.iter().map(|plan| plan.name.as_str()).collect();
        let tower: Vec<_> = (0..4).map(|n| format!("vision.blocks.{n}")).collect();
        assert_eq!(names[0], "vision.embed");
        assert_eq!(names[1..5], tower);
        assert_eq!(names[5], "vision.merger");
        assert_eq!(names[6..8], ["layers.0", "layers.0.experts.0"]);
        assert_eq!(names[10..13], ["layers.0.experts.3", "layers.1", "layers.2"]);
        for plan in &table.blocks {
            assert_eq!(plan.only_with_vision, plan.name.starts_with("vision."), "{}", plan.name);
            assert_eq!(plan.is_tokenwise, plan.name.contains(".experts."), "{}", plan.name);
        }
        let slices = table.weights.iter().filter(|weight| {
            weight.checkpoint == "model.language_model.layers.2.mlp.experts.down_proj"
        });
        let slices: Vec<_> = slices.map(|weight| weight.slice.clone().unwrap()).collect();
        assert_eq!(slices, [0..2, 2..4, 4..6, 6..8]);
    }

    #[test]
    fn every_linear_is_a_site_under_its_peft_module_and_the_patch_embedding_is_none() {
        let table = table_of("tiny", 1);
        let sites = table.sites();
        // Blocks of the tower, its merger and those of the deep stack, decoder layers, head.
        assert_eq!(sites.len(), 4 * 4 + 3 * 2 + 4 * 7 + 1);
        let find = |module: &str| sites.iter().find(|site| site.module == module).unwrap();
        let down = find("model.language_model.layers.1.mlp.down_proj");
        assert_eq!((down.local.as_str(), down.layer), ("mlp.down_proj", Some(1)));
        assert_eq!((down.in_features, down.out_features), (160, 64));
        let deep = find("model.visual.deepstack_merger_list.1.linear_fc1");
        assert_eq!(table.blocks[deep.block.0].name, "vision.blocks.2");
        assert_eq!((deep.local.as_str(), deep.layer), ("deepstack_merger.linear_fc1", None));
        assert_eq!((deep.in_features, deep.out_features), (256, 256));
        let merger = find("model.visual.merger.linear_fc2");
        assert_eq!((merger.local.as_str(), merger.out_features), ("merger.linear_fc2", 64));
        assert_eq!(find("model.visual.blocks.3.attn.qkv").out_features, 192);
        assert_eq!(find("lm_head").layer, None);
        assert!(sites.iter().all(|site| site.is_vision == site.module.contains(".visual.")));
    }

    #[test]
    fn routers_and_every_group_of_experts_are_sites_under_their_peft_parameters() {
        let sites = table_of("tiny-moe", 2).sites();
        let find = |module: &str| -> Vec<_> {
            let module = format!("model.language_model.layers.2.mlp.{module}");
            sites.iter().filter(|site| site.module == module).collect()
        };
        let router = find("gate.weight");
        assert_eq!((router.len(), router[0].local.as_str()), (1, "mlp.gate"));
        assert_eq!((router[0].in_features, router[0].out_features), (64, 8));
        let (gate_up, down) = (find("experts.gate_up_proj"), find("experts.down_proj"));
        for (sites, [inner, outer]) in [(gate_up, [64, 96]), (down, [48, 64])] {
            let kind = |experts| SiteKind::Experts { num_experts: 8, experts };
            let kinds: Vec<_> = sites.iter().map(|site| site.kind.clone()).collect();
            assert_eq!(kinds, [kind(0..4), kind(4..8)]);
            assert!(
                sites.iter().all(|site| (site.in_features, site.out_features) == (inner, outer))
            );
        }
    }

    #[test]
    fn only_the_copy_of_a_tied_head_may_be_left_over() {
        let (tied, untied) = (config("2b"), config("8b"));
        let tower = "model.visual.blocks.99.attn.qkv.weight";
        assert!(!ignores(&tied, tower) && !ignores(&untied, tower));
        assert!(ignores(&tied, "lm_head.weight") && !ignores(&untied, "lm_head.weight"));
        assert!(!ignores(&tied, "model.language_model.layers.99.input_layernorm.weight"));
    }
}
