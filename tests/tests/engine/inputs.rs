//! Passes over inputs of the caller's making: gradients of block inputs and context tensors.

use blockstreamer_core::adapter::Adapter;
use blockstreamer_core::execute::{Gradients, InputGradients, PassInput};
use blockstreamer_core::state::{HIDDEN, NamedTensors};
use blockstreamer_tests::{AllResident, Part, Probe, ToyModel, wave};
use tch::{Kind, Tensor};

use crate::rig::{
    assert_close, assert_same_bits, autograd_values, batch, device, executor, infer, options,
    probe, ram, values,
};

/// Three blocks share the context's tensor.
fn model() -> ToyModel {
    use Part::{Extra, Mlp, Split1, Split2, Split3};
    ToyModel { parts: vec![Mlp(5), Extra, Mlp(9), Extra, Split1, Split2, Split3, Extra] }
}

/// An input of the first block; what is named in `wanted` asks for a gradient.
fn input(model: &ToyModel, seed: i64, wanted: &[&str]) -> PassInput {
    let resident = AllResident::new(model, None, Kind::Float, device());
    let input = resident.embed(&batch(4, 0, seed)).unwrap();
    for (name, tensor) in input.state.iter().chain(input.context.tensors.iter()) {
        let _ = tensor.set_requires_grad(wanted.contains(&name));
    }
    input
}

fn cotangent(seed: f64) -> NamedTensors {
    NamedTensors::new().with(HIDDEN, wave(&[2, 4, 8], seed).to_device(device()))
}

fn named(gradients: &InputGradients) -> Vec<(String, Tensor)> {
    let all = gradients.state.iter().chain(gradients.context.iter());
    all.map(|(name, tensor)| (name.to_owned(), tensor.shallow_clone())).collect()
}

/// Plain autograd over one graph.
fn wanted(adapter: Option<&Probe>, names: &[&str]) -> Vec<(String, Tensor)> {
    let model = model();
    let adapter = adapter.map(|adapter| adapter as &dyn Adapter);
    let resident = AllResident::new(&model, adapter, Kind::Float, device());
    let input = input(&model, 1, names);
    let states = resident.states(&input, 0, None).unwrap();
    let output = states.last().unwrap().get(HIDDEN).unwrap();
    (output * cotangent(1.0).get(HIDDEN).unwrap()).sum(Kind::Float).backward();
    let all = input.state.iter().chain(input.context.tensors.iter());
    all.filter(|(_, tensor)| tensor.requires_grad())
        .map(|(name, tensor)| (name.to_owned(), tensor.grad()))
        .collect()
}

#[test]
fn block_inputs_and_context_tensors_that_ask_get_the_gradients_of_one_graph() {
    let model = model();
    for names in [&[HIDDEN, "extra"][..], &[HIDDEN], &["extra"]] {
        for prefetch_ahead in [0, 1, 3, 5] {
            let expected_adapter = probe(&[5, 6], 0.0);
            let expected = wanted(Some(&expected_adapter), names);
            let adapter = Box::new(probe(&[5, 6], 0.0));
            let executor =
                executor(&model, ram(&model), Some(adapter), options(Kind::Float, prefetch_ahead));
            let pass = executor.forward_for_backward(vec![input(&model, 1, names)], 0).unwrap();
            let mut gradients = Gradients::new();
            let inputs = executor.backward(pass, vec![cotangent(1.0)], 0, &mut gradients).unwrap();
            // One graph adds the blocks' shares of the context in another order.
            assert_close(&named(&inputs[0]), &expected, 1e-5);
            let trained = values(&gradients, executor.adapter().unwrap());
            assert_close(&trained, &autograd_values(&expected_adapter), 1e-5);
            assert_eq!(executor.stream().num_upcoming().unwrap(), 0);
        }
    }
}

#[test]
fn inputs_get_gradients_without_any_adapter_and_only_those_that_ask() {
    let model = model();
    let executor = executor(&model, ram(&model), None, options(Kind::Float, 2));
    let expected = wanted(None, &["extra"]);
    let inputs = vec![input(&model, 1, &["extra"]), input(&model, 2, &[])];
    let pass = executor.forward_for_backward(inputs, 0).unwrap();
    let grads = vec![cotangent(1.0), cotangent(2.0)];
    let inputs = executor.backward(pass, grads, 0, &mut Gradients::new()).unwrap();
    assert_close(&named(&inputs[0]), &expected, 1e-5);
    assert!(named(&inputs[1]).is_empty(), "the second micro-batch asked for nothing");
}

#[test]
fn a_pass_with_nothing_to_train_keeps_nothing_and_visits_nothing_in_backward() {
    let model = model();
    let executor = executor(&model, ram(&model), None, options(Kind::Float, 2));
    let pass = executor.forward_for_backward(vec![input(&model, 1, &[])], 0).unwrap();
    assert_eq!(executor.stream().num_upcoming().unwrap(), 0);
    let mut gradients = Gradients::new();
    let inputs = executor.backward(pass, vec![cotangent(1.0)], 0, &mut gradients).unwrap();
    assert!(named(&inputs[0]).is_empty());
}

#[test]
fn several_micro_batches_in_one_pass_equal_separate_passes_summed() {
    let model = model();
    let adapter = Box::new(probe(&[0, 5], 0.0));
    let executor = executor(&model, ram(&model), Some(adapter), options(Kind::Float, 2));
    let run = |seeds: &[i64], sink: &mut Gradients| {
        let inputs = seeds.iter().map(|seed| input(&model, *seed, &[HIDDEN, "extra"])).collect();
        let pass = executor.forward_for_backward(inputs, 0).unwrap();
        let grads = seeds.iter().map(|seed| cotangent(*seed as f64)).collect();
        let inputs = executor.backward(pass, grads, 0, sink).unwrap();
        inputs.iter().map(named).collect::<Vec<_>>()
    };
    let (mut together, mut apart) = (Gradients::new(), Gradients::new());
    let inputs_together = run(&[1, 2, 3], &mut together);
    let inputs_apart: Vec<_> =
        [1, 2, 3].iter().flat_map(|seed| run(&[*seed], &mut apart)).collect();
    for (found, wanted) in inputs_together.iter().zip(&inputs_apart) {
        assert_same_bits(found, wanted);
    }
    let adapter = executor.adapter().unwrap();
    // The shared trainable's shares are added block by block in one case, pass by pass in the other.
    assert_close(&values(&together, adapter), &values(&apart, adapter), 1e-5);
}

#[test]
fn backward_wants_the_gradients_of_every_micro_batch() {
    let model = model();
    let executor = executor(&model, ram(&model), None, options(Kind::Float, 1));
    let pass = executor.forward_for_backward(vec![input(&model, 1, &[HIDDEN])], 0).unwrap();
    let error = executor.backward(pass, vec![], 0, &mut Gradients::new()).unwrap_err();
    assert!(error.to_string().contains("every micro-batch"), "{error}");
    infer(&executor).unwrap();
}

#[test]
fn an_input_without_hidden_states_is_refused() {
    let model = model();
    let executor = executor(&model, ram(&model), None, options(Kind::Float, 1));
    let mut input = input(&model, 1, &[]);
    input.state = NamedTensors::new().with("other", wave(&[2], 1.0).to_device(device()));
    let error = executor.forward_for_backward(vec![input], 0).unwrap_err().to_string();
    assert!(error.contains("'hidden'") && error.contains("other"), "{error}");
    infer(&executor).unwrap();
}
