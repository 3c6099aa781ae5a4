//! Pictures and films: what the tower makes of them, where they stand, and that nothing else notices.

use blockstreamer_core::batch::Batch;
use blockstreamer_core::numerics::{AttentionKernel, text_positions};
use blockstreamer_core::state::{HIDDEN, NamedTensors, State};
use blockstreamer_core::tch::{Device, Kind, Tensor};
use blockstreamer_core::vision::{POSITIONS, Patches, VISION_ROWS, deepstack};

use crate::harness::{Outputs, Resident, batch, bf16_ulp, compare, config, max_abs, read};

const VARIANTS: [&str; 3] = ["qwen3_vl", "qwen3_vl_tied", "qwen3_vl_moe"];
const BOTH: [AttentionKernel; 2] = [AttentionKernel::Eager, AttentionKernel::Fused];
const TEXT: i64 = 5;
const IMAGE: i64 = 250;

/// The state after the tower.
fn seen(out: &Outputs) -> &State {
    let mut tower = out.states.iter().filter(|(plan, _)| plan.only_with_vision);
    &tower.next_back().unwrap().1
}

fn prepared(resident: &Resident, batch: &Batch) -> NamedTensors {
    let mut batch = batch.clone();
    resident.model.prepare(&mut batch).unwrap();
    batch.prepared
}

/// Rows of ids, with the pictures that they name.
fn rows(ids: &[&[i64]], grids: &[[usize; 3]]) -> Batch {
    let count: usize = grids.iter().map(|grid| grid.iter().product::<usize>()).sum();
    let wave = Tensor::arange(count as i64 * 96, (Kind::Float, Device::Cpu)) * 0.37;
    let images = Patches { pixels: wave.sin().view([-1, 96]), grids: grids.to_vec() };
    let images = (!grids.is_empty()).then_some(images);
    Batch { images, ..Batch::new(Tensor::from_slice2(ids)) }
}

fn logits(resident: &Resident, batch: &Batch, kernel: AttentionKernel) -> Tensor {
    resident.run(batch, kernel, Kind::Float, None).logits
}

#[test]
fn fp32_embeddings_deep_stack_layers_logits_and_loss_are_those_of_transformers() {
    for variant in VARIANTS {
        let golden = read(variant, "golden_fp32.safetensors");
        let (resident, batch) = (Resident::load(variant), batch(&golden));
        assert_eq!(resident.left_over(variant), [""; 0]);
        let places = prepared(&resident, &batch);
        assert!(places.get(POSITIONS).unwrap().equal(golden.get("pos3").unwrap()), "{variant}");
        for kernel in BOTH {
            let out = resident.run(&batch, kernel, Kind::Float, None);
            let wanted = golden.get("vis.embeds").unwrap();
            // The goldens are of the pictures alone, which come before the films.
            let num_places = wanted.size()[0];
            let rows = places.get(VISION_ROWS).unwrap().narrow(0, 0, num_places);
            let hidden = seen(&out).get(HIDDEN).unwrap().flatten(0, 1).index_select(0, &rows);
            let error = max_abs(&(hidden - wanted));
            println!("{variant} {kernel:?} vis.embeds: {error:.2e}");
            assert!(error < 1e-5, "{variant} {kernel:?} vis.embeds: {error}");
            for number in 0..2 {
                let found = seen(&out).get(&deepstack(number)).unwrap().narrow(0, 0, num_places);
                let wanted = golden.get(&format!("vis.deepstack.{number}")).unwrap();
                let error = max_abs(&(found - wanted));
                println!("{variant} {kernel:?} vis.deepstack.{number}: {error:.2e}");
                assert!(error < 1e-5, "{variant} {kernel:?} vis.deepstack.{number}: {error}");
            }
            for (name, got) in out.named() {
                let (error, size) = compare(got, golden.get(&name).unwrap(), &batch);
                println!("{variant} {kernel:?} {name}: {error:.2e} of {size:.2}");
                assert!(error < 2e-5, "{variant} {kernel:?} {name}: {error}");
            }
            let error = max_abs(&(&out.loss - golden.get("loss").unwrap()));
            assert!(error < 1e-5, "{variant} {kernel:?} loss: {error}");
        }
    }
}

#[test]
fn bf16_rounds_where_transformers_rounds() {
    for variant in VARIANTS {
        let golden = read(variant, "golden_bf16.safetensors");
        let (resident, batch) = (Resident::load(variant), batch(&golden));
        let out = resident.run(&batch, AttentionKernel::Eager, Kind::BFloat16, None);
        for (name, got) in out.named() {
            let (error, size) = compare(got, golden.get(&name).unwrap(), &batch);
            let ulps = error / bf16_ulp(size);
            println!("{variant} {name}: {ulps} ulps of {size:.2}");
            // Measured: 0. Other processors sum in another order.
            assert!(ulps <= 3.0, "{variant} {name}: {ulps}");
        }
    }
}

#[test]
fn a_row_of_text_beside_one_with_a_picture_is_what_it_is_alone() {
    let resident = Resident::load("qwen3_vl");
    let row = [TEXT, 6, 7, 8, 9, 10, 11, 12];
    let both = rows(&[&[TEXT, 252, IMAGE, IMAGE, 253, 9, 10, 11], &row], &[[1, 2, 4]]);
    let alone = rows(&[&row], &[]);
    let positions = prepared(&resident, &both);
    let positions = positions.get(POSITIONS).unwrap().select(1, 1);
    let text = text_positions(&alone).unwrap();
    assert!((0..3).all(|axis| positions.get(axis).equal(&text.get(0))));
    assert!(prepared(&resident, &alone).is_empty());
    for kernel in BOTH {
        let found = logits(&resident, &both, kernel).narrow(0, 1, 1);
        let error = max_abs(&(found - logits(&resident, &alone, kernel)));
        assert!(error < 1e-5, "{kernel:?}: {error}");
    }
}

#[test]
fn padding_on_either_side_and_packing_leave_a_sample_with_pictures_as_it_is() {
    let resident = Resident::load("qwen3_vl");
    let sample = [TEXT, 252, IMAGE, IMAGE, 253, 6, 252, IMAGE, 253, 7];
    let grids = [[1, 4, 2], [1, 2, 2]];
    let alone = rows(&[&sample], &grids);
    let padded = |left: usize, right: usize| {
        let ids = [&vec![0; left][..], &sample, &vec![0; right]].concat();
        let mask: Vec<bool> =
            (0..ids.len()).map(|place| (left..left + sample.len()).contains(&place)).collect();
        let mask = Tensor::from_slice(&mask).unsqueeze(0);
        Batch { attention_mask: Some(mask), ..rows(&[&ids], &grids) }
    };
    let packed = || {
        let ids = [&[6, 7, 8], &sample[..]].concat();
        let segments: Vec<i64> = (0..ids.len()).map(|place| i64::from(place >= 3)).collect();
        let segments = Some(Tensor::from_slice(&segments).unsqueeze(0));
        Batch { segments, ..rows(&[&ids], &grids) }
    };
    for kernel in BOTH {
        let wanted = logits(&resident, &alone, kernel);
        for (name, batch, start) in
            [("left", padded(4, 0), 4), ("right", padded(0, 3), 0), ("packed", packed(), 3)]
        {
            let found = logits(&resident, &batch, kernel).narrow(1, start, sample.len() as i64);
            let error = max_abs(&(found - &wanted));
            assert!(error < 1e-5, "{kernel:?} {name}: {error}");
        }
    }
}

#[test]
fn frames_of_different_sizes_are_computed_as_they_are_alone() {
    let resident = Resident::load("qwen3_vl");
    let grids = [[1, 2, 2], [1, 2, 2], [1, 4, 2], [1, 2, 2]];
    let ids = [TEXT, IMAGE, 6, IMAGE, 6, IMAGE, IMAGE, 6, IMAGE];
    let all = rows(&[&ids], &grids);
    let pixels = &all.images.as_ref().unwrap().pixels;
    let out = resident.run(&all, BOTH[0], Kind::Float, None);
    let rows_of = |out: &Outputs, batch: &Batch| {
        let places = prepared(&resident, batch);
        let hidden = seen(out).get(HIDDEN).unwrap().flatten(0, 1);
        hidden.index_select(0, places.get(VISION_ROWS).unwrap())
    };
    let together = rows_of(&out, &all);
    let (mut patch, mut cell) = (0, 0);
    for grid in grids {
        let num_patches = (grid[1] * grid[2]) as i64;
        let pixels = pixels.narrow(0, patch, num_patches);
        let ids = vec![IMAGE; grid[1] * grid[2] / 4];
        let images = Some(Patches { pixels, grids: vec![grid] });
        let one = Batch { images, ..rows(&[&ids], &[]) };
        let alone = rows_of(&resident.run(&one, BOTH[0], Kind::Float, None), &one);
        let error = max_abs(&(together.narrow(0, cell, num_patches / 4) - alone));
        assert!(error < 1e-5, "{grid:?}: {error}");
        (patch, cell) = (patch + num_patches, cell + num_patches / 4);
    }
}

/// transformers adds the deep stack while there are layers, after the last one just before the norm.
#[test]
fn a_decoder_with_as_many_or_fewer_layers_than_the_deep_stack_takes_what_it_can() {
    let variant = "qwen3_vl";
    let batch = batch(&read(variant, "golden_fp32.safetensors"));
    let whole = Resident::load(variant);
    let out = whole.run(&batch, BOTH[0], Kind::Float, None);
    let places = prepared(&whole, &batch);
    let rows = places.get(VISION_ROWS).unwrap();
    for layers in [1, 2] {
        let fewer = format!("\"num_hidden_layers\": {layers}");
        let config = config(variant).replace("\"num_hidden_layers\": 4", &fewer);
        let short = Resident::with_config(variant, &config, 1);
        let found = short.run(&batch, BOTH[0], Kind::Float, None);
        let hidden = out.layers()[layers - 1];
        assert!(found.layers()[layers - 1].equal(hidden));
        let features = seen(&out).get(&deepstack(layers - 1)).unwrap();
        let added = hidden.flatten(0, 1).index_add(0, rows, features).view_as(hidden);
        let none = NamedTensors::new();
        let scope = short.scope(&none, BOTH[0], Kind::Float, None);
        let context = Default::default();
        let state = State::new().with(HIDDEN, added);
        let normed = short.model.final_hidden(&scope, &context, state).unwrap();
        let wanted = short.model.logits(&scope, &normed).unwrap();
        assert!(found.logits.equal(&wanted), "{layers} layers");
    }
}

#[test]
fn pictures_that_do_not_fit_the_batch_are_refused_with_what_is_wrong() {
    let resident = Resident::load("qwen3_vl");
    let refused = |batch: &Batch| {
        let mut batch = batch.clone();
        resident.model.prepare(&mut batch).unwrap_err().to_string()
    };
    let row = [TEXT, IMAGE, IMAGE, 6];
    for (grids, wanted) in [
        (vec![[1, 2, 2]], "row 0 has 1 more placeholders"),
        (vec![[1, 2, 6]], "row 0 has 2 placeholders"),
        (vec![[1, 2, 3]], "[1, 2, 3] patches"),
        (vec![[0, 2, 4]], "[0, 2, 4] patches"),
        (vec![[2, 2, 4]], "has 2 frames; give it as a film"),
    ] {
        let error = refused(&rows(&[&row], &grids));
        assert!(error.contains(wanted), "{error}");
    }
    let mut batch = rows(&[&row], &[[1, 2, 4]]);
    let images = batch.images.take().unwrap();
    let with = |pixels: Tensor| {
        let images = Some(Patches { pixels, grids: images.grids.clone() });
        refused(&Batch { images, ..rows(&[&row], &[]) })
    };
    for pixels in [
        images.pixels.narrow(0, 0, 7),
        images.pixels.narrow(1, 0, 95),
        images.pixels.to_kind(Kind::Half),
    ] {
        let error = with(pixels);
        assert!(error.contains("must be [8, 96] in fp32"), "{error}");
    }
    // Without pictures the same ids are text, as in transformers.
    assert!(prepared(&resident, &rows(&[&row], &[])).is_empty());
}
