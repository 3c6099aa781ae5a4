//! Streaming changes no bit of a forward pass.

use std::sync::Arc;

use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::device::CopyEngine;
use blockstreamer_core::execute::Executor;
use blockstreamer_core::source::{BlockSource, ThrottledSource};
use blockstreamer_core::state::State;
use blockstreamer_core::stream::BlockStream;
use blockstreamer_tests::{AllResident, Part, ToyModel, blocks_of, wave};
use tch::{Kind, Tensor};

use crate::rig::{Disk, batch, device, executor, infer, options, ram, stream_options};

fn check(model: &ToyModel, source: &Arc<dyn BlockSource>, kind: Kind, prefetch_ahead: usize) {
    let resident = AllResident::new(model, None, kind, device());
    let batch = batch(5, 0, 3);
    let input = resident.embed(&batch).unwrap();
    let states = tch::no_grad(|| resident.states(&input, 0, None)).unwrap();
    let last = states.last().unwrap().clone();
    let wanted = tch::no_grad(|| resident.head(&input, last, None)).unwrap();

    let executor = executor(model, Arc::clone(source), None, options(kind, prefetch_ahead));
    for _ in 0..2 {
        let mut num_blocks = 0;
        let logits = executor
            .logits(&batch, &mut |block, state| {
                assert_equal_states(state, &states[block.0]);
                num_blocks += 1;
                Ok(())
            })
            .unwrap();
        assert_eq!(num_blocks, model.parts.len());
        assert_eq!((logits.kind(), logits.size()), (kind, vec![2, 5, 11]));
        assert!(logits.equal(&wanted), "{model:?} in {kind:?} at depth {prefetch_ahead}");
        assert!(!logits.requires_grad());
    }
}

fn assert_equal_states(found: &State, wanted: &State) {
    assert_eq!(found.len(), wanted.len());
    for (name, tensor) in wanted.iter() {
        assert!(found.get(name).unwrap().equal(tensor), "{name}");
    }
}

#[test]
fn logits_and_every_state_have_the_bits_of_the_resident_model_at_every_depth_and_dtype() {
    for model in [ToyModel::mixed(), ToyModel::split(2), ToyModel::equal(5)] {
        let sources: [Arc<dyn BlockSource>; 2] = [ram(&model), Disk::new(&model)];
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            for prefetch_ahead in 0..=5 {
                for source in &sources {
                    check(&model, source, kind, prefetch_ahead);
                }
            }
        }
    }
}

#[test]
fn a_hundred_passes_over_a_slow_source_give_the_same_bits() {
    let model = ToyModel::mixed();
    let slow = Arc::new(ThrottledSource::new(Disk::new(&model), 10e6).unwrap());
    let executor = executor(&model, slow, None, options(Kind::Float, 3));
    let mut first: Option<Tensor> = None;
    for _ in 0..100 {
        let logits = executor.logits(&batch(4, 0, 1), &mut |_, _| Ok(())).unwrap();
        assert!(logits.equal(first.get_or_insert(logits.shallow_clone())));
    }
    assert_eq!(executor.stats().unwrap().peak_resident_blocks, 4);
}

#[test]
fn a_state_that_is_a_view_of_a_weight_survives_the_reuse_of_its_slot() {
    let mut parts = vec![Part::Mlp(16); 6];
    parts[1] = Part::Alias;
    let model = ToyModel { parts };
    let weight = wave(&[8, 8], 2.0).to_device(device());
    for prefetch_ahead in 0..=3 {
        let executor = executor(&model, ram(&model), None, options(Kind::Float, prefetch_ahead));
        let mut kept = None;
        let logits = executor
            .logits(&batch(4, 0, 1), &mut |_, state| {
                kept = state.find("weight").map(Tensor::shallow_clone);
                Ok(())
            })
            .unwrap();
        assert_eq!(logits.kind(), Kind::Float);
        // Once more, so that other blocks have passed through every slot.
        let kept = kept.unwrap();
        infer(&executor).unwrap();
        assert!(kept.equal(&weight));
    }
}

#[test]
fn several_engines_live_side_by_side() {
    let model = ToyModel::equal(4);
    let resident = executor(&model, ram(&model), None, options(Kind::Float, 4));
    let streamed = executor(&model, ram(&model), None, options(Kind::Float, 0));
    for seed in 0..5 {
        let run =
            |executor: &Executor| executor.logits(&batch(4, 0, seed), &mut |_, _| Ok(())).unwrap();
        assert!(run(&resident).equal(&run(&streamed)));
    }
}

#[test]
fn a_lease_shows_the_tensors_as_stored() {
    let model = ToyModel::mixed();
    let engine = <dyn CopyEngine>::for_device(device()).unwrap();
    let stream = BlockStream::new(Disk::new(&model), engine.into(), &stream_options(1)).unwrap();
    stream.schedule((0..10).map(BlockIndex)).unwrap();
    for (_, _, tensors) in blocks_of(&model).into_iter().take(10) {
        let lease = stream.lease().unwrap();
        assert_eq!(lease.tensors().len(), tensors.len());
        for (name, wanted) in tensors {
            let found = lease.tensors().get(name).unwrap();
            assert_eq!((found.kind(), found.size()), (wanted.kind(), wanted.size()));
            assert!(found.equal(&wanted.to_device(device())), "{name}");
        }
    }
}
