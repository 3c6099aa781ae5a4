//! Weight table against headers.

use blockstreamer_core::Error;
use blockstreamer_core::block::{BlockIndex, Placement};
use blockstreamer_core::checkpoint::{Checkpoint, Layout};
use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::source::SafetensorsSource;
use blockstreamer_core::weights::{Role, WeightTable, row};

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
    let result = Layout::new(&checkpoint, &table, |_| Ok(true));
    assert!(
        matches!(&result, Err(Error::MissingTensor { tensor, .. }) if tensor == "layers.0.weight")
    );
    assert_says(result, &[directory.path().to_str().unwrap(), "2 more", "incomplete"]);
}

#[test]
fn a_wrong_shape_names_both_shapes_and_the_file() {
    let (_directory, checkpoint) = checkpoint(&[("layers.0.weight", Dtype::BF16, &[2, 3])]);
    let result = Layout::new(&checkpoint, &one_linear(&[3, 2]), |_| Ok(true));
    assert_says(result, &["layers.0.weight", "[2, 3]", "[3, 2]", "model.safetensors"]);
}

#[test]
fn any_float_will_do_but_codes_are_no_weights() {
    let (_directory, stored) = checkpoint(&[("layers.0.weight", Dtype::F8E4M3, &[2, 3])]);
    let layout = Layout::new(&stored, &one_linear(&[2, 3]), |_| Ok(false)).unwrap();
    assert_eq!(layout.blocks[0].tensors[0].dtype, Dtype::F8E4M3);
    let (_directory, stored) = checkpoint(&[("layers.0.weight", Dtype::U8, &[2, 3])]);
    let result = Layout::new(&stored, &one_linear(&[2, 3]), |_| Ok(false));
    assert_says(result, &["U8", "BF16", "model.safetensors", "quantised"]);
    let mut table = one_linear(&[2, 3]);
    table.weights[0].role = Role::Buffer(Dtype::I8);
    assert_says(Layout::new(&stored, &table, |_| Ok(false)), &["stored as U8", "needs I8"]);
}

#[test]
fn tensors_left_over_are_listed_unless_ignored() {
    let (_directory, checkpoint) = checkpoint(&[
        ("layers.0.weight", Dtype::BF16, &[2, 3]),
        ("visual.a", Dtype::BF16, &[1]),
        ("visual.b", Dtype::BF16, &[1]),
    ]);
    let result = Layout::new(&checkpoint, &one_linear(&[2, 3]), |name| Ok(name == "visual.b"));
    assert_says(result, &["1 tensors", "visual.a"]);
    Layout::new(&checkpoint, &one_linear(&[2, 3]), |name| Ok(name.starts_with("visual."))).unwrap();
}

#[test]
fn slices_must_lie_inside_and_leave_no_row_over() {
    let (_directory, checkpoint) = checkpoint(&[("layers.0.weight", Dtype::BF16, &[8, 3])]);
    let mut table = one_linear(&[8, 3]);
    table.weights[0].slice = Some(0..5);
    assert_says(Layout::new(&checkpoint, &table, |_| Ok(false)), &["row 5 of 8"]);
    let mut rest = table.weights[0].clone();
    (rest.slice, rest.local) = (Some(4..8), "rest".to_owned());
    table.weights.push(rest);
    let layout = Layout::new(&checkpoint, &table, |_| Ok(false)).unwrap();
    assert_eq!(layout.blocks[0].tensors[1].shape, [4, 3]);
    let [first, rest] = &layout.sources[0][..] else { unreachable!() };
    assert_eq!(rest.offset_bytes, first.offset_bytes + 4 * 3 * 2);
    table.weights[1].slice = Some(4..9);
    assert_says(Layout::new(&checkpoint, &table, |_| Ok(false)), &["4..9", "[8, 3]"]);
}

#[test]
fn a_wrong_table_is_refused() {
    let (_directory, checkpoint) = checkpoint(&[("layers.0.weight", Dtype::BF16, &[2, 3])]);
    let mut table = one_linear(&[2, 3]);
    table.weights[0].block = BlockIndex(7);
    assert_says(Layout::new(&checkpoint, &table, |_| Ok(false)), &["block 7"]);
    let mut table = one_linear(&[2, 3]);
    table.weights.push(table.weights[0].clone());
    assert_says(Layout::new(&checkpoint, &table, |_| Ok(false)), &["layers.0", "occurs twice"]);
    let mut table = one_linear(&[2, 3]).resident("head", &[]);
    table.push("late", Placement::Streamed, None, &[]);
    assert_says(Layout::new(&checkpoint, &table, |_| Ok(false)), &["'late'", "'head'"]);
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
        Layout::new(&checkpoint, table, |_| Ok(false)).unwrap().identity(&checkpoint).unwrap()
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
        let layout = Layout::new(&checkpoint, &one_linear(&[2, 3]), |_| Ok(false)).unwrap();
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
