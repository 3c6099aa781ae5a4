//! Weight table against headers.

use blockstreamer_core::Error;
use blockstreamer_core::block::{BlockIndex, Placement};
use blockstreamer_core::checkpoint::{Checkpoint, Layout};
use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::source::shards::{ShardSource, write_shards};
use blockstreamer_core::source::{BlockSource, SafetensorsSource};
use blockstreamer_core::weights::{BlockPlan, ExpertLayout, Role, Row, WeightTable, row};

use crate::{Fixture, Numbers, assert_says, damage, file_bytes, folder, made};

fn checkpoint(tensors: &[(&str, Dtype, &[usize])]) -> (tempfile::TempDir, Checkpoint) {
    let numbers = &mut Numbers(2);
    let tensors: Vec<_> =
        tensors.iter().map(|(name, dtype, shape)| made(name, *dtype, shape, numbers)).collect();
    let directory = folder(&[("model.safetensors", file_bytes(&tensors, 0))]);
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    (directory, checkpoint)
}

fn one_linear(shape: &[usize]) -> WeightTable {
    let rows = [row("layers.{n}.weight", "weight", Role::Linear, shape)];
    WeightTable::new(Dtype::BF16).layers("layers.{n}", 1, &rows)
}

#[test]
fn a_missing_tensor_is_named_with_the_number_of_others() {
    let (directory, checkpoint) = checkpoint(&[("other", Dtype::BF16, &[2])]);
    let rows = [row("layers.{n}.weight", "weight", Role::Linear, &[2, 2])];
    let table = WeightTable::new(Dtype::BF16).layers("layers.{n}", 3, &rows);
    let result = Layout::new(&checkpoint, &table, None, |_| Ok(true));
    assert!(
        matches!(&result, Err(Error::MissingTensor { tensor, .. }) if tensor == "layers.0.weight")
    );
    assert_says(result, &[directory.path().to_str().unwrap(), "2 more", "incomplete"]);
}

#[test]
fn a_wrong_shape_names_both_shapes_and_the_file() {
    let (_directory, checkpoint) = checkpoint(&[("layers.0.weight", Dtype::BF16, &[2, 3])]);
    let result = Layout::new(&checkpoint, &one_linear(&[3, 2]), None, |_| Ok(true));
    assert_says(result, &["layers.0.weight", "[2, 3]", "[3, 2]", "model.safetensors"]);
}

#[test]
fn any_float_will_do_but_codes_are_no_weights() {
    let (_directory, stored) = checkpoint(&[("layers.0.weight", Dtype::F8E4M3, &[2, 3])]);
    let layout = Layout::new(&stored, &one_linear(&[2, 3]), None, |_| Ok(false)).unwrap();
    assert_eq!(layout.blocks[0].tensors[0].dtype, Dtype::F8E4M3);
    let (_directory, stored) = checkpoint(&[("layers.0.weight", Dtype::U8, &[2, 3])]);
    let result = Layout::new(&stored, &one_linear(&[2, 3]), None, |_| Ok(false));
    assert_says(result, &["U8", "BF16", "model.safetensors", "quantised"]);
    let mut table = one_linear(&[2, 3]);
    table.weights[0].role = Role::Buffer(Dtype::I8);
    assert_says(Layout::new(&stored, &table, None, |_| Ok(false)), &["stored as U8", "needs I8"]);
}

#[test]
fn tensors_left_over_are_listed_unless_ignored() {
    let (_directory, checkpoint) = checkpoint(&[
        ("layers.0.weight", Dtype::BF16, &[2, 3]),
        ("visual.a", Dtype::BF16, &[1]),
        ("visual.b", Dtype::BF16, &[1]),
    ]);
    let result =
        Layout::new(&checkpoint, &one_linear(&[2, 3]), None, |name| Ok(name == "visual.b"));
    assert_says(result, &["1 tensors", "visual.a"]);
    Layout::new(&checkpoint, &one_linear(&[2, 3]), None, |name| Ok(name.starts_with("visual.")))
        .unwrap();
}

#[test]
fn slices_must_lie_inside_and_leave_no_row_over() {
    let (_directory, checkpoint) = checkpoint(&[("layers.0.weight", Dtype::BF16, &[8, 3])]);
    let mut table = one_linear(&[8, 3]);
    table.weights[0].slice = Some(0..5);
    assert_says(Layout::new(&checkpoint, &table, None, |_| Ok(false)), &["row 5 of 8"]);
    let mut rest = table.weights[0].clone();
    (rest.slice, rest.local) = (Some(4..8), "rest".to_owned());
    table.weights.push(rest);
    let layout = Layout::new(&checkpoint, &table, None, |_| Ok(false)).unwrap();
    assert_eq!(layout.blocks[0].tensors[1].shape, [4, 3]);
    let [first, rest] = &layout.sources[0][..] else { unreachable!() };
    assert_eq!(rest.offset_bytes, first.offset_bytes + 4 * 3 * 2);
    table.weights[1].slice = Some(4..9);
    assert_says(Layout::new(&checkpoint, &table, None, |_| Ok(false)), &["4..9", "[8, 3]"]);
}

#[test]
fn a_wrong_table_is_refused() {
    let (_directory, checkpoint) = checkpoint(&[("layers.0.weight", Dtype::BF16, &[2, 3])]);
    let mut table = one_linear(&[2, 3]);
    table.weights[0].block = BlockIndex(7);
    assert_says(Layout::new(&checkpoint, &table, None, |_| Ok(false)), &["block 7"]);
    let mut table = one_linear(&[2, 3]);
    table.weights.push(table.weights[0].clone());
    assert_says(
        Layout::new(&checkpoint, &table, None, |_| Ok(false)),
        &["layers.0", "occurs twice"],
    );
    let mut table = one_linear(&[2, 3]).resident("head", &[]);
    table.add(BlockPlan::new("late", Placement::Streamed, None), 0, &[]);
    assert_says(Layout::new(&checkpoint, &table, None, |_| Ok(false)), &["'late'", "'head'"]);
}

#[test]
fn the_identity_follows_content_and_layout_but_not_place_or_time() {
    let fixture = Fixture::random(11);
    let identity = fixture.layout().identity(&fixture.checkpoint()).unwrap();
    let copy = tempfile::tempdir().unwrap();
    for name in crate::names_in(fixture.path()) {
        std::fs::copy(fixture.path().join(&name), copy.path().join(&name)).unwrap();
    }
    let identity_of_copy = |table: &WeightTable| {
        let checkpoint = Checkpoint::open(copy.path()).unwrap();
        Layout::new(&checkpoint, table, None, |_| Ok(false)).unwrap().identity(&checkpoint).unwrap()
    };
    assert_eq!(identity_of_copy(&fixture.table), identity);
    let mut renamed = fixture.table.clone();
    renamed.weights[0].local = "renamed".to_owned();
    assert_ne!(identity_of_copy(&renamed), identity);
    // Same headers, same sizes, other weights: a finetuned copy.
    let file = copy.path().join("part-0.safetensors");
    damage(&file, std::fs::read(&file).unwrap().len() - 1);
    assert_ne!(identity_of_copy(&fixture.table), identity);
}

#[test]
fn a_nan_is_reported_with_tensor_file_and_position() {
    let ones = |dtype: Dtype, one: &[u8], other: &[u8]| {
        let mut tensor = made("layers.0.weight", dtype, &[2, 3], &mut Numbers(0));
        tensor.bytes = [one, one, one, one, other, one].concat();
        let directory = folder(&[("model.safetensors", file_bytes(&[tensor], 1))]);
        let checkpoint = Checkpoint::open(directory.path()).unwrap();
        let layout = Layout::new(&checkpoint, &one_linear(&[2, 3]), None, |_| Ok(false)).unwrap();
        layout.check_finite(&SafetensorsSource::open(layout.clone()).unwrap())
    };
    for (dtype, one, bad, largest) in [
        (
            Dtype::F64,
            &1_f64.to_le_bytes()[..],
            &f64::NAN.to_le_bytes()[..],
            &f64::MAX.to_le_bytes()[..],
        ),
        (
            Dtype::F32,
            &1_f32.to_le_bytes(),
            &f32::NEG_INFINITY.to_le_bytes(),
            &f32::MAX.to_le_bytes(),
        ),
        (Dtype::BF16, &[0x80, 0x3f], &[0xc0, 0x7f], &[0x7f, 0x7f]),
        (Dtype::F16, &[0x00, 0x3c], &[0x00, 0x7c], &[0xff, 0x7b]),
        (Dtype::F8E4M3, &[0x38], &[0xff], &[0x7e]),
        (Dtype::F8E5M2, &[0x3c], &[0x7c], &[0x7b]),
    ] {
        ones(dtype, one, largest).unwrap();
        let parts = ["'layers.0.weight'", "1 NaN", "element 4", "model.safetensors"];
        assert_says(ones(dtype, one, bad), &parts);
    }
}

/// One layer's experts in two groups, published as [experts, in, out].
fn two_groups(hidden: usize, inter: usize) -> WeightTable {
    let mut table = WeightTable::new(Dtype::BF16);
    for group in 0..2 {
        let part = |row: Row<'static>| row.part(group * 2..group * 2 + 2);
        let experts = Role::Experts(ExpertLayout::InOut);
        let rows = [
            part(row("experts.gate_up_proj", "gate_up", experts, &[4, hidden, 2 * inter])),
            part(row("experts.down_proj", "down", experts, &[4, inter, hidden])),
        ];
        table.add(BlockPlan::new("experts.{n}", Placement::Streamed, Some(0)), group, &rows);
    }
    table
}

fn stored(gate_up: &[usize], down: &[usize]) -> (tempfile::TempDir, Checkpoint) {
    checkpoint(&[
        ("experts.gate_up_proj", Dtype::BF16, gate_up),
        ("experts.down_proj", Dtype::BF16, down),
    ])
}

fn transposed(layout: &Layout) -> Vec<bool> {
    layout.blocks.iter().flat_map(|block| &block.tensors).map(|spec| spec.is_transposed).collect()
}

#[test]
fn experts_are_taken_in_either_layout_and_cut_along_the_experts() {
    for (gate_up, down, is_transposed) in
        [([4, 8, 6], [4, 3, 8], true), ([4, 6, 8], [4, 8, 3], false)]
    {
        let (_directory, checkpoint) = stored(&gate_up, &down);
        let layout = Layout::new(&checkpoint, &two_groups(8, 3), None, |_| Ok(false)).unwrap();
        assert_eq!(transposed(&layout), [is_transposed; 4]);
        assert_eq!(layout.blocks[1].tensors[1].shape, [2, down[1], down[2]]);
        let [first, second] = &layout.sources[..] else { unreachable!() };
        assert_eq!(second[0].offset_bytes, first[0].offset_bytes + 2 * 6 * 8 * 2);
        // A manifest of shards says so, and says nothing of other tensors.
        let shards = tempfile::tempdir().unwrap();
        let source = SafetensorsSource::open(layout.clone()).unwrap();
        write_shards(&source, "id", &[shards.path().to_owned()], &mut |_| {}).unwrap();
        let text = std::fs::read_to_string(shards.path().join("manifest.json")).unwrap();
        assert_eq!(text.contains("is_transposed"), is_transposed, "{text}");
        let shards = ShardSource::open(shards.path(), None).unwrap();
        assert_eq!(shards.blocks(), layout.blocks);
    }
    let (_directory, foreign) = stored(&[4, 8, 6], &[4, 4, 8]);
    let result = Layout::new(&foreign, &two_groups(8, 3), None, |_| Ok(false));
    assert_says(result, &["experts.down_proj", "[4, 4, 8]", "[4, 3, 8]", "different models"]);
}

#[test]
fn the_layout_of_experts_is_never_guessed() {
    let new = |stored: &(tempfile::TempDir, Checkpoint), table: &WeightTable, setting| {
        Layout::new(&stored.1, table, setting, |_| Ok(false))
    };
    // 2 * 4 = 8: the fused tensor cannot tell, the other one can, and it tells for both.
    let half_told = two_groups(8, 4);
    for (down, is_transposed) in [([4, 4, 8], true), ([4, 8, 4], false)] {
        let files = stored(&[4, 8, 8], &down);
        assert_eq!(transposed(&new(&files, &half_told, None).unwrap()), [is_transposed; 4]);
    }
    let published = stored(&[4, 8, 8], &[4, 4, 8]);
    new(&published, &half_told, Some(ExpertLayout::InOut)).unwrap();
    assert_says(
        new(&published, &half_told, Some(ExpertLayout::OutIn)),
        &["experts.down_proj", "[4, 4, 8]", "[experts, in, out]", "expert_layout = \"out_in\""],
    );
    let mixed = stored(&[4, 8, 6], &[4, 8, 3]);
    assert_says(
        new(&mixed, &two_groups(8, 3), None),
        &["'experts.down_proj'", "'experts.gate_up_proj'", "different programs"],
    );

    // Neither tells: a table whose experts have one square matrix each.
    let mut silent = half_told.clone();
    silent.weights.retain(|weight| weight.local == "gate_up");
    let square = checkpoint(&[("experts.gate_up_proj", Dtype::BF16, &[4, 8, 8])]);
    assert_says(
        new(&square, &silent, None),
        &["experts.gate_up_proj", "[4, 8, 8]", "equally wide", "\"in_out\"", "--expert-layout"],
    );
    let mut identities = Vec::new();
    for (setting, is_transposed) in [(ExpertLayout::InOut, true), (ExpertLayout::OutIn, false)] {
        let layout = new(&square, &silent, Some(setting)).unwrap();
        assert_eq!(transposed(&layout), [is_transposed; 2]);
        identities.push(layout.identity(&square.1).unwrap());
    }
    // The same bytes in one group: another layout, too.
    let mut whole = WeightTable::new(Dtype::BF16);
    let experts = Role::Experts(ExpertLayout::InOut);
    let rows = [row("experts.gate_up_proj", "gate_up", experts, &[4, 8, 8])];
    whole.add(BlockPlan::new("experts.{n}", Placement::Streamed, Some(0)), 0, &rows);
    let layout = new(&square, &whole, Some(ExpertLayout::InOut)).unwrap();
    identities.push(layout.identity(&square.1).unwrap());
    identities.sort();
    identities.dedup();
    assert_eq!(identities.len(), 3);
}

#[test]
fn packed_experts_must_be_bytes_of_the_right_shape_and_their_scales_numbers() {
    let rows = [
        row("l.{n}.up_blocks", "up_blocks", Role::Mxfp4Blocks, &[4, 6, 2, 16]),
        row("l.{n}.up_scales", "up_scales", Role::Mxfp4Scales, &[4, 6, 2]),
    ];
    let mut table = WeightTable::new(Dtype::BF16);
    for group in 0..2 {
        let rows = rows.clone().map(|row| row.part(2 * group..2 * group + 2));
        let rows = rows.map(|row| Row {
            checkpoint: if row.role == Role::Mxfp4Blocks {
                "l.0.up_blocks"
            } else {
                "l.0.up_scales"
            },
            ..row
        });
        table.add(
            BlockPlan::new("l.0.{n}", Placement::Streamed, Some(0)).tokenwise(),
            group,
            &rows,
        );
    }
    let layout = |blocks: (Dtype, &[usize]), scales: u8| {
        let mut tensors = [
            made("l.0.up_blocks", blocks.0, blocks.1, &mut Numbers(4)),
            made("l.0.up_scales", Dtype::U8, &[4, 6, 2], &mut Numbers(4)),
        ];
        tensors[1].bytes.fill(120);
        tensors[1].bytes[24] = scales;
        let directory = folder(&[("model.safetensors", file_bytes(&tensors, 1))]);
        let checkpoint = Checkpoint::open(directory.path()).unwrap();
        let layout = Layout::new(&checkpoint, &table, None, |_| Ok(false))?;
        let source = SafetensorsSource::open(layout.clone())?;
        layout.check_finite(&source)?;
        Ok::<_, Error>(layout)
    };
    let found = layout((Dtype::U8, &[4, 6, 2, 16]), 121).unwrap();
    let shapes: Vec<_> = found.blocks[1].tensors.iter().map(|tensor| &tensor.shape[..]).collect();
    assert_eq!(shapes, [&[2, 6, 2, 16][..], &[2, 6, 2]]);
    assert_eq!(found.sources[1][0].offset_bytes - found.sources[0][0].offset_bytes, 2 * 6 * 32);
    assert_says(
        layout((Dtype::U8, &[4, 6, 4, 8]), 1),
        &["l.0.up_blocks", "[4, 6, 4, 8]", "[4, 6, 2, 16]"],
    );
    assert_says(layout((Dtype::I8, &[4, 6, 2, 16]), 1), &["l.0.up_blocks", "I8", "needs U8"]);
    let parts = ["'l.0.up_scales'", "1 NaN", "element 0", "l.0.1"];
    for scale in [253, 254, 255] {
        assert_says(layout((Dtype::U8, &[4, 6, 2, 16]), scale), &parts);
    }
    layout((Dtype::U8, &[4, 6, 2, 16]), 252).unwrap();
}
