//! What stays on the device, what streams and what is gathered from host memory changes no bit.

use std::collections::BTreeSet;
use std::sync::Arc;

use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::execute::{
    Executor, ExecutorOptions, Gradients, PassInput, Residency, StepOptions,
};
use blockstreamer_core::source::BlockSource;
use blockstreamer_core::state::{HIDDEN, NamedTensors};
use blockstreamer_tests::{AllResident, Part, ToyModel, wave};
use tch::{Kind, Tensor};

use crate::rig::{Disk, assert_same_bits, batch, device, executor, options, probe, ram, values};

type Named = Vec<(String, Tensor)>;

pub(crate) fn blocks(indices: impl IntoIterator<Item = usize>) -> BTreeSet<BlockIndex> {
    indices.into_iter().map(BlockIndex).collect()
}

/// Kept blocks and held graphs: none, some and all of them. Block 1 lies below every adapter; blocks 5 to
/// 7 are one layer in three parts.
fn kept_and_graphs() -> Vec<(BTreeSet<BlockIndex>, BTreeSet<BlockIndex>)> {
    let (none, all) = (blocks([]), blocks(0..10));
    let some = blocks([1, 3, 5, 6, 9]);
    vec![
        (none.clone(), none.clone()),
        (some.clone(), none.clone()),
        (some.clone(), blocks([5])),
        (some.clone(), some.clone()),
        (all.clone(), none),
        (all.clone(), some),
        (all.clone(), all),
    ]
}

fn residencies() -> Vec<Residency> {
    let mut all = Vec::new();
    for (kept, graphs) in kept_and_graphs() {
        for (gather_from_host, stream_head) in
            [(false, false), (true, false), (false, true), (true, true)]
        {
            let (kept, graphs) = (kept.clone(), graphs.clone());
            all.push(Residency {
                kept,
                graphs,
                gather_from_host,
                stream_head,
                ..Residency::default()
            });
        }
    }
    all
}

fn with_residency(options: ExecutorOptions, residency: &Residency) -> ExecutorOptions {
    ExecutorOptions { residency: residency.clone(), ..options }
}

/// Logits, loss of an evaluation, and losses and gradients of two steps, the second announced by the first.
fn everything(executor: &Executor) -> (Tensor, Vec<f64>, Named) {
    let batches = [batch(6, 2, 1), batch(4, 0, 8)];
    let logits = executor.logits(&batches[0], &mut |_, _| Ok(())).unwrap();
    let mut losses = vec![executor.evaluate(&batches).unwrap()];
    let mut gradients = Gradients::new();
    for step in 0..2 {
        let options = StepOptions { step, another_follows: step == 0, ..StepOptions::default() };
        losses.push(executor.train_step(&batches, options, &mut gradients).unwrap());
    }
    let losses = losses.iter().map(|loss| executor.loss_value(loss).unwrap()).collect();
    assert_eq!(executor.stream().num_upcoming().unwrap(), 0);
    (logits, losses, values(&gradients, executor.adapter().unwrap()))
}

fn trainer(source: Arc<dyn BlockSource>, residency: &Residency, prefetch_ahead: usize) -> Executor {
    // Block 10 is the head.
    let adapter = Box::new(probe(&[3, 6, 7, 9, 10], 0.3));
    let options = with_residency(options(Kind::Float, prefetch_ahead), residency);
    executor(&ToyModel::mixed(), source, Some(adapter), options)
}

#[test]
fn every_combination_of_placements_gives_the_bits_of_everything_streamed() {
    let model = ToyModel::mixed();
    let (logits, losses, gradients) = everything(&trainer(ram(&model), &Residency::default(), 0));
    let mut names: Vec<&str> = gradients.iter().map(|entry| entry.0.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["own.10", "own.3", "own.6", "own.7", "own.9", "shared"]);
    assert!(gradients.iter().all(|entry| entry.1.abs().max().double_value(&[]) > 0.0));
    for residency in residencies() {
        for prefetch_ahead in 0..=3 {
            let sources: [Arc<dyn BlockSource>; 2] = [ram(&model), Disk::new(&model)];
            for source in sources {
                let found = everything(&trainer(source, &residency, prefetch_ahead));
                assert!(found.0.equal(&logits), "{residency:?}, {prefetch_ahead} ahead");
                assert_eq!(found.1, losses, "{residency:?}, {prefetch_ahead} ahead");
                assert_same_bits(&found.2, &gradients);
            }
        }
    }
}

#[test]
fn half_precisions_and_layers_in_parts_give_the_same_bits_too() {
    for (model, kind) in [
        (ToyModel::mixed(), Kind::BFloat16),
        (ToyModel::split(2), Kind::Float),
        (
            ToyModel { parts: vec![Part::Mlp(5), Part::Alias, Part::Mlp(9), Part::Alias] },
            Kind::Half,
        ),
    ] {
        let num_blocks = model.parts.len();
        let run = |residency: &Residency| {
            let adapter = Box::new(probe(&[1, num_blocks - 1], 0.4));
            let options = with_residency(options(kind, 1), residency);
            everything(&executor(&model, ram(&model), Some(adapter), options))
        };
        let wanted = run(&Residency::default());
        for kept in [blocks([1]), blocks(0..num_blocks)] {
            let graphs = kept.clone();
            let residency = Residency {
                kept,
                graphs,
                gather_from_host: true,
                stream_head: true,
                ..Residency::default()
            };
            let found = run(&residency);
            assert!(found.0.equal(&wanted.0), "{model:?}");
            assert_eq!(found.1, wanted.1, "{model:?}");
            assert_same_bits(&found.2, &wanted.2);
        }
    }
}

/// Inputs and context tensors that ask for gradients, a tensor that is handed on, and an adapter.
#[test]
fn inputs_and_contexts_get_the_same_gradients_from_held_graphs() {
    use Part::{Extra, Mlp, Split1, Split2, Split3};
    let model =
        ToyModel { parts: vec![Mlp(5), Extra, Mlp(9), Extra, Split1, Split2, Split3, Extra] };
    let resident = AllResident::new(&model, None, Kind::Float, device());
    let run = |names: &[&str], residency: &Residency| {
        let adapter = Box::new(probe(&[2, 5, 6], 0.2));
        let options = with_residency(options(Kind::Float, 1), residency);
        let executor = executor(&model, ram(&model), Some(adapter), options);
        let input = |seed: i64| -> PassInput {
            let input = resident.embed(&batch(4, 0, seed)).unwrap();
            for (name, tensor) in input.state.iter().chain(input.context.tensors.iter()) {
                let _ = tensor.set_requires_grad(names.contains(&name));
            }
            input
        };
        let pass = executor.forward_for_backward(vec![input(1), input(2)], 3).unwrap();
        let cotangent =
            |seed| NamedTensors::new().with(HIDDEN, wave(&[2, 4, 8], seed).to_device(device()));
        let mut gradients = Gradients::new();
        let grads = vec![cotangent(1.0), cotangent(2.0)];
        let inputs = executor.backward(pass, grads, 3, &mut gradients).unwrap();
        let mut all = values(&gradients, executor.adapter().unwrap());
        for (number, input) in inputs.iter().enumerate() {
            let named = input.state.iter().chain(input.context.iter());
            all.extend(named.map(|(name, it)| (format!("{number}.{name}"), it.shallow_clone())));
        }
        all
    };
    for names in [&[HIDDEN, "extra"][..], &[HIDDEN], &["extra"], &[]] {
        let wanted = run(names, &Residency::default());
        assert_eq!(wanted.len(), 4 + 2 * names.len());
        for graphs in [blocks([]), blocks([0, 4, 5]), blocks([7]), blocks(0..8)] {
            let residency = Residency { kept: blocks(0..8), graphs, ..Residency::default() };
            assert_same_bits(&run(names, &residency), &wanted);
        }
    }
}
