//! Mixtures of experts: the arithmetic that a block's scope offers.

use std::ops::Range;

use blockstreamer_core::device::grad;
use blockstreamer_core::numerics::{
    ExpertCall, ExpertKernel, ExpertStack, ExpertWeight, LowRankFactors, experts,
};
use blockstreamer_core::scope::{ExpertActivation, ExpertShape, GateUp, Routing};
use blockstreamer_core::{Error, Result};
use tch::{Device, IndexOp, Kind, Tensor};

use crate::rig::device;

const NUM_EXPERTS: usize = 8;
const HIDDEN: i64 = 32;
const INTER: i64 = 16;

/// Values in [-1, 1) that depend on nothing but `salt` and the position.
pub(crate) fn values(salt: i64, size: &[i64]) -> Tensor {
    let numbers: Vec<f32> = (0..size.iter().product::<i64>())
        .map(|i| ((i * 7919 + salt * 104_729 + 13) % 2017) as f32 / 1008.5 - 1.0)
        .collect();
    Tensor::from_slice(&numbers).reshape(size).to_device(device())
}

fn stack(weight: &Tensor, factors: Option<LowRankFactors>) -> ExpertStack<'_> {
    ExpertStack { weight: ExpertWeight::Dense(weight), bias: None, factors }
}

/// A layer's experts with an adapter on both matrices, and tokens for them, all in fp32.
struct Layer {
    x: Tensor,
    routing: Routing,
    gate_up: [Tensor; 3],
    down: [Tensor; 3],
    order: GateUp,
}

impl Layer {
    /// Tokens that go to `chosen`, with an adapter of this rank.
    fn new(chosen: &[&[i64]], rank: i64, order: GateUp) -> Self {
        let top_k = chosen.first().map_or(2, |experts| experts.len()) as i64;
        let experts: Vec<i64> = chosen.iter().flat_map(|experts| experts.iter().copied()).collect();
        let size = [chosen.len() as i64, top_k];
        let count = NUM_EXPERTS as i64;
        let routing = Routing {
            experts: Tensor::from_slice(&experts).reshape(size).to_device(device()),
            weights: values(1, &size).abs() + 0.1,
        };
        Self {
            x: values(2, &[chosen.len() as i64, HIDDEN]),
            routing,
            gate_up: [
                values(3, &[count, 2 * INTER, HIDDEN]) * 0.2,
                values(4, &[count, rank, HIDDEN]) * 0.2,
                values(5, &[count, 2 * INTER, rank]) * 0.2,
            ],
            down: [
                values(6, &[count, HIDDEN, INTER]) * 0.2,
                values(7, &[count, rank, INTER]) * 0.2,
                values(8, &[count, HIDDEN, rank]) * 0.2,
            ],
            order,
        }
    }

    fn usual(rank: i64) -> Self {
        let chosen: Vec<[i64; 3]> =
            (0..23).map(|t| [t % 7, (t + 2) % 7, (t * 3 + 4) % 7]).collect();
        // Nobody goes to expert 7; a choice made twice becomes another one.
        let distinct: Vec<Vec<i64>> = chosen
            .iter()
            .map(|c| {
                if c[2] == c[0] || c[2] == c[1] {
                    vec![c[0], c[1], (c[1] + 1) % 7]
                } else {
                    c.to_vec()
                }
            })
            .collect();
        let slices: Vec<&[i64]> = distinct.iter().map(Vec::as_slice).collect();
        Self::new(&slices, rank, GateUp::Concatenated)
    }

    /// The leaves of a graph in `kind`: x, routing weights, and A and B of both matrices.
    fn leaves(&self, kind: Kind) -> Vec<Tensor> {
        let Self { x, routing, gate_up, down, .. } = self;
        [x, &routing.weights, &gate_up[1], &gate_up[2], &down[1], &down[2]]
            .map(|tensor| tensor.detach().to_kind(kind).set_requires_grad(true))
            .into()
    }

    /// Experts `range` with `leaves` and stored weights in `kind`; those in [E, in, out] where
    /// `is_transposed`.
    fn run(
        &self,
        kernel: ExpertKernel,
        range: Range<usize>,
        leaves: &[Tensor],
        is_transposed: bool,
        sum: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (start, end) = (range.start as i64, range.end as i64);
        let part = |tensor: &Tensor| tensor.i(start..end);
        let weight = |tensor: &Tensor| {
            let weight = part(tensor).to_kind(leaves[0].kind()).contiguous();
            match is_transposed {
                true => weight.transpose(1, 2).contiguous().transpose(1, 2),
                false => weight,
            }
        };
        let (gate_up, down) = (weight(&self.gate_up[0]), weight(&self.down[0]));
        let factors =
            |a: &Tensor, b: &Tensor| Some(LowRankFactors { a: part(a), b: part(b), scaling: 0.5 });
        let routing = Routing {
            experts: self.routing.experts.shallow_clone(),
            weights: leaves[1].shallow_clone(),
        };
        let shape =
            ExpertShape { experts: range, gate_up: self.order, activation: ExpertActivation::Silu };
        experts(
            kernel,
            &ExpertCall {
                x: &leaves[0],
                routing: &routing,
                shape: &shape,
                gate_up: stack(&gate_up, factors(&leaves[2], &leaves[3])),
                down: stack(&down, factors(&leaves[4], &leaves[5])),
                sum,
            },
        )
    }

    /// The formula, every expert on every token, in fp64.
    fn formula(&self, range: Range<usize>, leaves: &[Tensor]) -> Tensor {
        let leaves: Vec<_> = leaves.iter().map(|leaf| leaf.to_kind(Kind::Double)).collect();
        let mut sum = leaves[0].zeros_like();
        for expert in range {
            let expert = expert as i64;
            let matrix = |weight: &Tensor, a: usize| {
                let delta = leaves[a + 1].i(expert).matmul(&leaves[a].i(expert)) * 0.5;
                weight.i(expert).to_kind(Kind::Double) + delta
            };
            let fused = leaves[0].matmul(&matrix(&self.gate_up[0], 2).tr());
            let (gate, up) = match self.order {
                GateUp::Concatenated => (fused.i((.., ..INTER)), fused.i((.., INTER..))),
                GateUp::Interleaved => {
                    let pairs = fused.view([-1, INTER, 2]);
                    (pairs.i((.., .., 0)), pairs.i((.., .., 1)))
                }
            };
            let inner = gate.sigmoid() * &gate * up;
            let output = inner.matmul(&matrix(&self.down[0], 4).tr());
            let chosen = self.routing.experts.eq(expert).to_kind(Kind::Double);
            let weight = (chosen * &leaves[1]).sum_dim_intlist(1, true, None::<Kind>);
            sum += output * weight;
        }
        sum
    }
}

pub(crate) fn largest(tensor: &Tensor) -> f64 {
    if tensor.numel() == 0 { 0.0 } else { tensor.abs().max().double_value(&[]) }
}

/// Gradients of all leaves for a fixed gradient of `output`; zeros where there is none.
pub(crate) fn gradients(output: &Tensor, leaves: &[Tensor]) -> Vec<Tensor> {
    let seed = values(9, &output.size()).to_kind(output.kind());
    let found = grad(&[output], &[&seed], &leaves.iter().collect::<Vec<_>>()).unwrap();
    found.into_iter().zip(leaves).map(|(g, leaf)| g.unwrap_or_else(|| leaf.zeros_like())).collect()
}

pub(crate) fn assert_near(found: &[Tensor], wanted: &[Tensor], tolerance: f64, what: &str) {
    for (position, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let wanted = wanted.to_kind(Kind::Double);
        let error = largest(&(found.to_kind(Kind::Double) - &wanted));
        let allowed = tolerance * largest(&wanted);
        assert!(error <= allowed, "{what}, tensor {position}: {error} of {}", largest(&wanted));
    }
}

#[test]
fn experts_one_by_one_are_the_formula_in_every_layout_and_range() {
    for order in [GateUp::Concatenated, GateUp::Interleaved] {
        let layer = Layer { order, ..Layer::usual(3) };
        for (range, is_transposed) in [(0..8, false), (0..8, true), (2..5, false), (3..4, true)] {
            let leaves = layer.leaves(Kind::Float);
            let run = layer.run(ExpertKernel::Loop, range.clone(), &leaves, is_transposed, None);
            let output = run.unwrap();
            assert_eq!((output.kind(), output.size()), (Kind::Float, leaves[0].size()));
            let found = gradients(&output, &leaves);
            let wanted = layer.formula(range.clone(), &leaves);
            let what = format!("{order:?} {range:?} {is_transposed}");
            assert_near(&[output], &[wanted.detach()], 1e-5, &what);
            assert_near(&found, &gradients(&wanted, &leaves), 1e-5, &what);
        }
    }
}

#[test]
fn a_layer_in_groups_gives_the_same_bits_as_in_one_call() {
    let layer = Layer::usual(4);
    let leaves = layer.leaves(Kind::Float);
    let whole = layer.run(ExpertKernel::Loop, 0..NUM_EXPERTS, &leaves, true, None).unwrap();
    let wanted = gradients(&whole, &leaves);
    assert!(wanted.iter().all(|gradient| largest(gradient) > 0.0));
    for groups in [2, 4, 8] {
        // Each group has a graph of its own, whose inputs x and weights are handed on untouched, as blocks do.
        let size = NUM_EXPERTS / groups;
        let mut graphs = Vec::new();
        let mut sum: Option<Tensor> = None;
        for group in 0..groups {
            let leaves = layer.leaves(Kind::Float);
            let before = sum.map(|sum| sum.detach().set_requires_grad(true));
            let range = group * size..(group + 1) * size;
            let after =
                layer.run(ExpertKernel::Loop, range, &leaves, true, before.as_ref()).unwrap();
            sum = Some(after.detach());
            graphs.push((leaves, before, after));
        }
        assert_eq!(sum.unwrap(), whole, "{groups} groups");

        let mut of_sum = values(9, &whole.size());
        let mut handed_on: Option<[Tensor; 2]> = None;
        let mut of_adapter: Vec<Tensor> = wanted[2..].iter().map(Tensor::zeros_like).collect();
        for (leaves, before, after) in graphs.iter().rev() {
            let mut outputs = Vec::new();
            let mut grad_outputs = Vec::new();
            // A group to which no token goes has no graph at the end of the layer.
            if after.requires_grad() {
                outputs.push(after);
                grad_outputs.push(&of_sum);
            }
            if let Some([x, weights]) = &handed_on {
                outputs.extend([&leaves[0], &leaves[1]]);
                grad_outputs.extend([x, weights]);
            }
            let mut inputs: Vec<&Tensor> = leaves.iter().collect();
            inputs.extend(before);
            let mut found = grad(&outputs, &grad_outputs, &inputs).unwrap();
            if before.is_some() {
                of_sum = found.pop().flatten().unwrap();
            }
            for (total, gradient) in of_adapter.iter_mut().zip(&found[2..]) {
                if let Some(gradient) = gradient {
                    *total += gradient;
                }
            }
            let or_zeros = |position: usize| {
                let found = found[position].as_ref().map(Tensor::shallow_clone);
                found.unwrap_or_else(|| leaves[position].zeros_like())
            };
            handed_on = Some([or_zeros(0), or_zeros(1)]);
        }
        let [x, weights] = handed_on.unwrap();
        assert_eq!((&x, &weights), (&wanted[0], &wanted[1]), "{groups} groups");
        assert_eq!(of_adapter, wanted[2..], "{groups} groups");
    }
}

#[test]
fn one_product_for_all_experts_agrees_with_the_formula_and_leaks_nothing_from_other_experts() {
    for (kind, tolerance) in [(Kind::BFloat16, 3e-2), (Kind::Half, 4e-3)] {
        for (rank, order) in [(3, GateUp::Interleaved), (8, GateUp::Concatenated)] {
            let layer = Layer { order, ..Layer::usual(rank) };
            for (range, is_transposed) in [(0..8, true), (0..8, false), (2..5, true), (7..8, false)]
            {
                let what = format!("{kind:?} rank {rank} {range:?} {is_transposed}");
                let leaves = layer.leaves(kind);
                let sum = values(10, &leaves[0].size()).to_kind(kind);
                // Several times: memory that nobody wrote looks different each time.
                for _ in 0..3 {
                    let kernel = ExpertKernel::Grouped;
                    let run = layer.run(kernel, range.clone(), &leaves, is_transposed, Some(&sum));
                    let output = run.unwrap();
                    assert_eq!(output.kind(), kind);
                    let found = gradients(&output, &leaves);
                    let wanted = layer.formula(range.clone(), &leaves) + &sum;
                    assert_near(&[output], &[wanted.detach()], tolerance, &what);
                    if wanted.requires_grad() {
                        assert_near(&found, &gradients(&wanted, &leaves), tolerance, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn one_product_for_all_experts_rounds_the_sum_over_a_tokens_experts_once() {
    let layer = Layer::usual(8);
    let leaves = layer.leaves(Kind::BFloat16);
    let [one_by_one, at_once] = [ExpertKernel::Loop, ExpertKernel::Grouped].map(|kernel| {
        let output = layer.run(kernel, 0..8, &leaves, true, None).unwrap().to_kind(Kind::Double);
        (output - layer.formula(0..8, &leaves)).square().mean(Kind::Double).double_value(&[])
    });
    assert!(at_once < one_by_one, "{at_once:e} {one_by_one:e}");
}

#[test]
fn what_does_not_fit_one_product_is_computed_one_by_one() {
    let layer = Layer::usual(3);
    let leaves = layer.leaves(Kind::Float);
    let [looped, grouped] = [ExpertKernel::Loop, ExpertKernel::Grouped]
        .map(|kernel| layer.run(kernel, 1..6, &leaves, false, None).unwrap());
    assert_eq!(looped, grouped);

    // Stored in fp32, computed in bf16; and widths that are no multiple of 8.
    let half = |tensor: &Tensor| tensor.to_kind(Kind::BFloat16);
    let narrow = |tensor: &Tensor| half(&tensor.i((.., ..24, ..))).contiguous();
    for (gate_up, down) in [
        (layer.gate_up[0].shallow_clone(), layer.down[0].shallow_clone()),
        (narrow(&layer.gate_up[0]), half(&layer.down[0].i((.., .., ..12))).contiguous()),
    ] {
        let routing = Routing {
            experts: layer.routing.experts.shallow_clone(),
            weights: half(&layer.routing.weights),
        };
        let shape = ExpertShape {
            experts: 0..8,
            gate_up: GateUp::Concatenated,
            activation: ExpertActivation::Silu,
        };
        let call = ExpertCall {
            x: &half(&layer.x),
            routing: &routing,
            shape: &shape,
            gate_up: stack(&gate_up, None),
            down: stack(&down, None),
            sum: None,
        };
        let [looped, grouped] = [ExpertKernel::Loop, ExpertKernel::Grouped]
            .map(|kernel| experts(kernel, &call).unwrap());
        assert!(largest(&looped) > 0.0);
        assert_eq!(looped, grouped);
    }
}

#[test]
fn few_tokens_one_expert_each_and_none_at_all_work() {
    let cases: [&[&[i64]]; 4] = [&[&[4, 2]], &[&[5]], &[&[3], &[3], &[0]], &[]];
    for kind in [Kind::Float, Kind::BFloat16] {
        for chosen in cases {
            let layer = Layer::new(chosen, 8, GateUp::Concatenated);
            for kernel in [ExpertKernel::Loop, ExpertKernel::Grouped] {
                for range in [0..8, 5..6, 6..8, 3..3] {
                    let leaves = layer.leaves(kind);
                    let output = layer.run(kernel, range.clone(), &leaves, false, None).unwrap();
                    let wanted = layer.formula(range.clone(), &leaves);
                    let tolerance = if kind == Kind::Float { 1e-5 } else { 3e-2 };
                    let what = format!("{kind:?} {kernel:?} {chosen:?} {range:?}");
                    assert_near(&[output.detach()], &[wanted.detach()], tolerance, &what);
                    // Without a token or an expert there is no graph.
                    if output.requires_grad() {
                        let found = gradients(&output, &leaves);
                        assert_near(&found, &gradients(&wanted, &leaves), tolerance, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused_by_name() {
    let layer = Layer::usual(4);
    let on_host = |size: &[i64]| Tensor::zeros(size, (Kind::Float, Device::Cpu));
    let good = (on_host(&[23, HIDDEN]), on_host(&[8, 32, 32]), on_host(&[8, 32, 16]));
    let refused =
        |x: &Tensor, gate_up: &Tensor, down: &Tensor, top_k: i64, sum: Option<&Tensor>| {
            let routing = Routing {
                experts: layer.routing.experts.to_device(Device::Cpu),
                weights: on_host(&[23, top_k]),
            };
            let shape = ExpertShape {
                experts: 0..8,
                gate_up: GateUp::Concatenated,
                activation: ExpertActivation::Silu,
            };
            let call = ExpertCall {
                x,
                routing: &routing,
                shape: &shape,
                gate_up: stack(gate_up, None),
                down: stack(down, None),
                sum,
            };
            match experts(ExpertKernel::Loop, &call) {
                Err(Error::Tensor { tensor, message }) => format!("{tensor}: {message}"),
                other => panic!("{other:?}"),
            }
        };
    let (x, gate_up, down) = (&good.0, &good.1, &good.2);
    for (message, parts) in [
        (refused(&on_host(&[1, 23, 32]), gate_up, down, 3, None), ["x: ", "[1, 23, 32]"]),
        (refused(x, &on_host(&[7, 32, 32]), down, 3, None), ["gate_up_proj: ", "[7, 32, 32]"]),
        (refused(x, &on_host(&[8, 31, 32]), down, 3, None), ["gate_up_proj: ", "31 rows"]),
        (refused(x, gate_up, &on_host(&[8, 32, 32]), 3, None), ["down_proj: ", "[8, 32, 16]"]),
        (refused(x, gate_up, down, 2, None), ["routing: ", "[23, 2]"]),
        (refused(x, gate_up, down, 3, Some(&on_host(&[22, 32]))), ["sum: ", "[22, 32]"]),
    ] {
        for part in parts {
            assert!(message.contains(part), "{message} lacks {part}");
        }
    }
}
