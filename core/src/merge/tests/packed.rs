//! Experts that are packed in MXFP4.

use super::*;
use crate::numerics::Mxfp4;

const PACKED: [&[&str]; 2] = [&[], &["0.experts.up", "0.experts.down"]];

/// Two layers of packed experts; those of the first are dealt over two blocks.
fn packed_table() -> WeightTable {
    let mut table = WeightTable::new(Dtype::BF16);
    let (e, h, m) = (EXPERTS, HIDDEN, INTER);
    let shapes = [("up", [e, 2 * m, h / 32, 16]), ("down", [e, h, m / 32, 16])];
    for (layer, groups) in [(0, 2), (1, 1)] {
        for group in 0..groups {
            let part = group * e / groups..(group + 1) * e / groups;
            let names: Vec<_> = (shapes.iter())
                .map(|(name, shape)| {
                    let names = ["blocks", "scales", "bias"];
                    (
                        names.map(|end| {
                            (
                                format!("{layer}.experts.{name}_{end}"),
                                format!("experts.{name}_{end}"),
                            )
                        }),
                        shape,
                    )
                })
                .collect();
            let rows: Vec<_> = (names.iter())
                .flat_map(|([blocks, scales, bias], shape)| {
                    [
                        row(&blocks.0, &blocks.1, Role::Mxfp4Blocks, &shape[..]),
                        row(&scales.0, &scales.1, Role::Mxfp4Scales, &shape[..3]),
                        row(&bias.0, &bias.1, Role::Bias, &shape[..2]),
                    ]
                })
                .map(|row| row.part(part.clone()))
                .collect();
            let plan = BlockPlan::new(format!("{layer}.{{n}}"), Placement::Streamed, Some(layer));
            table.add(plan, group, &rows);
        }
    }
    let head = [row("head.weight", "head.weight", Role::Linear, &[m, h])];
    table.add(BlockPlan::new("last", Placement::Streamed, None), 0, &head);
    table
}

fn packed(targets: [&[&str]; 2]) -> Fixture {
    let table = packed_table();
    let mut tensors = NamedTensors::new();
    for weight in table.weights.iter().filter(|weight| weight.role == Role::Mxfp4Blocks) {
        let [e, outer, groups, _] = weight.shape[..] else { panic!() };
        let seed = weight.checkpoint.len() as i64 + weight.block.0 as i64;
        let real = values(seed, &size(&[e, outer, groups * 32]));
        let codes = Mxfp4::pack(&real).unwrap();
        let name = weight.checkpoint.strip_suffix("_blocks").unwrap();
        if tensors.find(&weight.checkpoint).is_none() {
            let bias = values(3, &size(&[e, outer])).to_kind(Kind::BFloat16);
            tensors = tensors
                .with(format!("{name}_blocks"), codes.blocks().shallow_clone())
                .with(format!("{name}_scales"), codes.scales().shallow_clone())
                .with(format!("{name}_bias"), bias);
        }
    }
    let head = values(9, &size(&[INTER, HIDDEN])).to_kind(Kind::BFloat16);
    Fixture::new(table, &tensors.with("head.weight", head), targets)
}

/// What a pair of packed tensors stands for.
fn unpacked(tensors: &NamedTensors, name: &str) -> Tensor {
    let part = |end: &str| tensors.get(&format!("{name}_{end}")).unwrap().shallow_clone();
    Mxfp4::new(part("blocks"), part("scales")).unwrap().unpack(Kind::Float).unwrap()
}

const MATRICES: [(&str, Option<&str>); 4] = [
    ("0.experts.up", Some("0.experts.base_layer")),
    ("0.experts.down", Some("0.experts")),
    ("1.experts.up", None),
    ("1.experts.down", None),
];

#[test]
fn in_bf16_all_experts_are_unpacked_and_the_whole_change_is_there() {
    let fixture = packed(PACKED);
    let before = tensors_of(&fixture.checkpoint.directory);
    for piece_bytes in [1, 64 << 20] {
        let merged = fixture.merge(|options| {
            options.packed_experts = Some(PackedExperts::Bf16);
            options.piece_bytes = piece_bytes;
        });
        let merged = merged.unwrap();
        assert_eq!((merged.num_changed, merged.num_tensors), (2, 4 + 4 + 1));
        assert_eq!((merged.packed_experts, merged.losses.len()), (Some(PackedExperts::Bf16), 0));
        let after = fixture.merged();
        assert!(
            !names(&after)
                .iter()
                .any(|name| name.ends_with("_blocks") || name.ends_with("_scales"))
        );
        for (name, key) in MATRICES {
            let mut wanted = unpacked(&before, name);
            if let Some(key) = key {
                wanted += fixture.change(key, EXPERTS as i64);
            }
            let found = after.get(name).unwrap();
            let wanted = wanted.transpose(1, 2);
            assert_eq!((found.size(), found.kind()), (wanted.size(), Kind::BFloat16), "{name}");
            if key.is_none() {
                assert_eq!(found.to_kind(Kind::Float), wanted, "{name}");
            }
            let error = (found.to_kind(Kind::Float) - &wanted).abs().max().double_value(&[]);
            let bound = 2.0_f64.powi(-8) * wanted.abs().max().double_value(&[]);
            assert!(error <= bound, "{name}: {error}");
        }
        let bias = "0.experts.up_bias";
        assert_eq!(after.get(bias).unwrap(), before.get(bias).unwrap());
        let config = std::fs::read_to_string(fixture.out().join("config.json")).unwrap();
        assert!(config.contains("made-up") && !config.contains("quantization_config"), "{config}");
    }
}

#[test]
fn in_mxfp4_what_changes_is_packed_again_with_its_loss_and_the_rest_is_copied() {
    let fixture = packed(PACKED);
    let before = tensors_of(&fixture.checkpoint.directory);
    for piece_bytes in [1, 64 << 20] {
        let merged = fixture.merge(|options| {
            options.packed_experts = Some(PackedExperts::Mxfp4);
            options.piece_bytes = piece_bytes;
        });
        let merged = merged.unwrap();
        assert_eq!((merged.num_changed, merged.num_tensors), (2, before.iter().count()));
        let after = fixture.merged();
        assert_eq!(names(&after), names(&before));
        assert_eq!(merged.losses.len(), 2);
        for (name, key) in MATRICES {
            let Some(key) = key else {
                for end in ["blocks", "scales", "bias"] {
                    let name = format!("{name}_{end}");
                    assert_eq!(after.get(&name).unwrap(), before.get(&name).unwrap(), "{name}");
                }
                continue;
            };
            let (old, new) = (unpacked(&before, name), unpacked(&after, name));
            let change = fixture.change(key, EXPERTS as i64);
            let wanted = &old + &change;
            // The whole tensor at once gives the codes of its pieces.
            let at_once = Mxfp4::pack(&wanted).unwrap().unpack(Kind::Float).unwrap();
            let num_others = new.ne_tensor(&at_once).sum(Kind::Int64).int64_value(&[]);
            assert!(num_others <= 2, "{name}: {num_others} codes differ");
            let loss = merged.losses.iter().find(|loss| loss.tensor == name).unwrap();
            let norm =
                |tensor: &Tensor| (tensor * tensor).sum(Kind::Double).double_value(&[]).sqrt();
            let error = norm(&(&new - &wanted)) / norm(&change);
            let kept = ((&new - &old) * &change).sum(Kind::Double).double_value(&[]);
            let kept = kept / norm(&change).powi(2);
            assert!((loss.relative_error() / error - 1.0).abs() < 1e-4, "{name}: {error}");
            assert!((loss.change_kept() - kept).abs() < 1e-4, "{name}: {kept}");
            assert!(error > 0.01 && kept > 0.5, "{name}: {error} {kept}");
        }
        let config = std::fs::read(fixture.out().join("config.json")).unwrap();
        assert_eq!(
            config,
            std::fs::read(fixture.checkpoint.directory.join("config.json")).unwrap()
        );
        let marker = std::fs::read_to_string(fixture.out().join("merged.json")).unwrap();
        assert!(marker.contains("relative_error"), "{marker}");
    }
}

#[test]
fn a_change_far_below_a_step_of_the_codes_is_reported_as_lost() {
    let fixture = packed(PACKED);
    fixture.scale_adapter(1e-4);
    let merged = fixture.merge(|options| options.packed_experts = Some(PackedExperts::Mxfp4));
    let total = PackingLoss::total(&merged.unwrap().losses).unwrap();
    assert!((total.relative_error() - 1.0).abs() < 0.05, "{}", total.relative_error());
    assert!(total.change_kept().abs() < 0.05, "{}", total.change_kept());
}

#[test]
fn experts_that_do_not_change_stay_packed_unless_asked() {
    let fixture = packed([&["head"], &[]]);
    let before = tensors_of(&fixture.checkpoint.directory);
    let merged = fixture.merge(|_| {}).unwrap();
    assert_eq!((merged.num_changed, merged.packed_experts), (1, Some(PackedExperts::Mxfp4)));
    assert_eq!(merged.losses, []);
    for (name, tensor) in fixture.merged().iter() {
        assert_eq!(tensor == before.get(name).unwrap(), name != "head.weight", "{name}");
    }
    let merged = fixture.merge(|options| options.packed_experts = Some(PackedExperts::Bf16));
    assert_eq!(merged.unwrap().num_changed, 1);
    let found = fixture.merged();
    let found = found.get("1.experts.down").unwrap().to_kind(Kind::Float).transpose(1, 2);
    assert_eq!(found, unpacked(&before, "1.experts.down"));
}

#[test]
fn what_packed_experts_become_must_be_said_where_there_is_a_choice_and_only_there() {
    let message = packed(PACKED).refused(|_| {});
    for word in ["--experts bf16", "--experts mxfp4", "four times"] {
        assert!(message.contains(word), "{message}");
    }
    let plain = dense(ExpertLayout::InOut, Kind::BFloat16);
    let message = plain.refused(|options| options.packed_experts = Some(PackedExperts::Bf16));
    assert!(message.contains("--experts bf16") && message.contains("has none"), "{message}");
    assert!(!plain.out().exists());
}
