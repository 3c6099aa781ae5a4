use std::collections::{BTreeMap, BTreeSet};

use blockstreamer_core::block::BlockSpec;
use blockstreamer_core::routed::deal;
use blockstreamer_core::site::SiteKind;

use super::*;
use crate::sizes;

fn table_of(config_json: &str, num_expert_groups: usize) -> WeightTable {
    let config = Config::parse(config_json).unwrap();
    let groups = deal(config.num_experts, num_expert_groups).unwrap();
    table(&config, &parts(&config, &groups))
}

fn size(name: &str, num_expert_groups: usize) -> WeightTable {
    table_of(&sizes::config_json(name).unwrap(), num_expert_groups)
}

/// Bytes of each block as published, padding left out.
fn block_bytes(table: &WeightTable) -> Vec<(&BlockPlan, usize)> {
    let mut blocks = Vec::new();
    for (index, plan) in table.blocks.iter().enumerate() {
        let weights = table.weights.iter().filter(|weight| weight.block.0 == index);
        let tensors = weights.map(|weight| {
            let mut shape = weight.shape.clone();
            if let Some(slice) = &weight.slice {
                shape[0] = slice.len();
            }
            (weight.local.clone(), weight.role.buffer_dtype().unwrap_or(table.dtype), shape)
        });
        let spec = BlockSpec::pack(&plan.name, plan.placement, tensors).unwrap();
        blocks.push((plan, spec.payload_bytes()));
    }
    blocks
}

/// Size, bytes of a layer, layers, tensors of the checkpoint, bytes of all of them as its index says.
const PUBLISHED: [(&str, usize, usize, usize, usize); 2] = [
    ("20b", 476_863_552, 24, 459, 13_761_264_768),
    ("120b", 1_748_118_784, 36, 687, 65_248_815_744),
];

#[test]
fn layers_and_totals_of_the_published_sizes_are_exact_however_experts_are_dealt() {
    for (name, layer_bytes, num_layers, num_tensors, num_bytes) in PUBLISHED {
        for groups in [1, 2, 32] {
            let table = size(name, groups);
            let names: BTreeSet<_> = table.weights.iter().map(|w| &w.checkpoint).collect();
            assert_eq!(names.len(), num_tensors, "{name}");
            let mut layers = BTreeMap::new();
            let blocks = block_bytes(&table);
            for (plan, bytes) in &blocks {
                if let Some(layer) = plan.layer {
                    *layers.entry(layer).or_default() += bytes;
                }
            }
            let wanted: BTreeMap<_, _> = (0..num_layers).map(|n| (n, layer_bytes)).collect();
            assert_eq!(layers, wanted, "{name} in {groups} groups");
            let all: usize = blocks.iter().map(|(_, bytes)| bytes).sum();
            assert_eq!(all, num_bytes, "{name} in {groups} groups");
        }
    }
}

#[test]
fn the_parts_of_a_published_layer_are_exact() {
    for (name, blocks, scales, biases, router) in [
        ("20b", 398_131_200, 24_883_200, 552_960, 184_384),
        ("120b", 1_592_524_800, 99_532_800, 2_211_840, 737_536),
    ] {
        let table = size(name, 1);
        let bytes = |belongs: &dyn Fn(&str) -> bool| -> usize {
            let weights = table.weights.iter().filter(|weight| {
                weight.checkpoint.starts_with("model.layers.3.") && belongs(&weight.local)
            });
            weights
                .map(|weight| {
                    let dtype = weight.role.buffer_dtype().unwrap_or(table.dtype);
                    weight.shape.iter().product::<usize>() * dtype.size_bytes()
                })
                .sum()
        };
        assert_eq!(bytes(&|local| local.ends_with("_blocks")), blocks, "{name}");
        assert_eq!(bytes(&|local| local.ends_with("_scales")), scales, "{name}");
        assert_eq!(bytes(&|local| local.ends_with("_proj_bias")), biases, "{name}");
        assert_eq!(bytes(&|local| local.starts_with("mlp.router.")), router, "{name}");
        assert_eq!(bytes(&|local| local.starts_with("self_attn.")), 53_100_288, "{name}");
        assert_eq!(bytes(&|local| local.ends_with("layernorm.weight")), 11_520, "{name}");
    }
}

#[test]
fn experts_of_a_layer_are_dealt_in_order_in_all_their_tensors() {
    let table = size("tiny", 4);
    let names: Vec<_> = table.blocks.iter().map(|plan| plan.name.as_str()).collect();
    assert_eq!(names[..2], ["layers.0", "layers.0.experts.0"]);
    assert_eq!(names[4..6], ["layers.0.experts.3", "layers.1"]);
    assert_eq!(names[20..], ["embedding", "final norm", "head"]);
    for plan in &table.blocks {
        assert_eq!(plan.is_tokenwise, plan.name.contains(".experts."), "{}", plan.name);
    }
    let mut num_tensors = 0;
    for (index, plan) in table.blocks.iter().enumerate().filter(|(_, plan)| plan.is_tokenwise) {
        let group: usize = plan.name.rsplit('.').next().unwrap().parse().unwrap();
        for weight in table.weights.iter().filter(|weight| weight.block.0 == index) {
            assert_eq!(weight.slice, Some(2 * group..2 * group + 2), "{}", weight.checkpoint);
            assert_eq!(weight.shape[0], 8, "{}", weight.checkpoint);
            num_tensors += 1;
        }
    }
    assert_eq!(num_tensors, 4 * 4 * 6);
}

#[test]
fn linears_routers_and_every_group_of_experts_are_sites_packed_or_not() {
    let packed = sizes::config_json("tiny").unwrap();
    let mut plain: serde_json::Value = serde_json::from_str(&packed).unwrap();
    plain.as_object_mut().unwrap().remove("quantization_config");
    let sites = table_of(&packed, 2).sites();
    assert_eq!(sites, table_of(&plain.to_string(), 2).sites());
    // Four linears, the router and two parameters in each of two groups; the head.
    assert_eq!(sites.len(), 4 * (4 + 1 + 2 * 2) + 1);
    let find = |module: &str| -> Vec<_> {
        let module = format!("model.layers.2.{module}");
        sites.iter().filter(|site| site.module == module).collect()
    };
    let query = find("self_attn.q_proj");
    assert_eq!((query[0].in_features, query[0].out_features), (64, 128));
    let router = find("mlp.router.weight");
    assert_eq!((router.len(), router[0].local.as_str()), (1, "mlp.router"));
    assert_eq!((router[0].in_features, router[0].out_features), (64, 8));
    let (gate_up, down) = (find("mlp.experts.gate_up_proj"), find("mlp.experts.down_proj"));
    for (sites, [inner, outer]) in [(gate_up, [64, 192]), (down, [96, 64])] {
        let kind = |experts| SiteKind::Experts { num_experts: 8, experts };
        let kinds: Vec<_> = sites.iter().map(|site| site.kind.clone()).collect();
        assert_eq!(kinds, [kind(0..4), kind(4..8)]);
        assert!(sites.iter().all(|site| (site.in_features, site.out_features) == (inner, outer)));
    }
}
