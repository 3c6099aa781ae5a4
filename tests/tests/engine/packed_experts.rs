//! Experts packed in MXFP4, with biases and the activation of gpt-oss, against the same numbers unpacked.

use std::ops::Range;

use blockstreamer_core::device::grad;
use blockstreamer_core::numerics::{
    ExpertCall, ExpertKernel, ExpertStack, ExpertWeight, LowRankFactors, Mxfp4, experts,
};
use blockstreamer_core::scope::{ExpertActivation, ExpertShape, GateUp, Routing};
use tch::{IndexOp, Kind, Tensor};

use crate::experts::{assert_near, gradients, largest};
use crate::rig::device;

const ACTIVATION: ExpertActivation = ExpertActivation::ClampedSwiglu { alpha: 1.702, limit: 7.0 };

// Range of the first matrix: some of its outputs are cut off, or none is. A little more or less of one that is
// close to being cut off decides whether it has a gradient, so that 16 bits are compared without.
const CLIPPED: f64 = 2.0;
const UNCLIPPED: f64 = 0.2;

/// Values in [-1, 1) without a pattern that sums could add up.
fn noise(salt: u64, size: &[i64]) -> Tensor {
    let number = |i: u64| {
        let mixed = (i ^ (salt << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let count = size.iter().product::<i64>() as u64;
    let numbers: Vec<f32> = (0..count).map(number).collect();
    Tensor::from_slice(&numbers).reshape(size).to_device(device())
}

/// A layer's packed experts with biases and an adapter on both matrices, and tokens for them.
struct Layer {
    num_experts: usize,
    x: Tensor,
    routing: Routing,
    gate_up: Mxfp4,
    down: Mxfp4,
    biases: [Tensor; 2],
    factors: [Tensor; 4],
}

/// In which form the experts are handed over.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    Packed,
    Dense,
}

impl Layer {
    /// So many tokens for each expert, each of which goes to one more: to the next.
    fn new(counts: &[usize], [hidden, intermediate]: [i64; 2], gate_up_range: f64) -> Self {
        let (num_experts, rank) = (counts.len(), 3);
        let chosen: Vec<i64> = (0..num_experts)
            .flat_map(|expert| {
                let pair = [expert as i64, ((expert + 1) % num_experts) as i64];
                std::iter::repeat_n(pair, counts[expert]).flatten()
            })
            .collect();
        let tokens = chosen.len() as i64 / 2;
        let (count, rows) = (num_experts as i64, 2 * intermediate);
        let routing = Routing {
            experts: Tensor::from_slice(&chosen).view([tokens, 2]).to_device(device()),
            weights: noise(1, &[tokens, 2]).abs() + 0.1,
        };
        let pack =
            |salt, size: &[i64], scale: f64| Mxfp4::pack(&(noise(salt, size) * scale)).unwrap();
        Self {
            num_experts,
            x: noise(2, &[tokens, hidden]),
            routing,
            gate_up: pack(3, &[count, rows, hidden], gate_up_range),
            down: pack(4, &[count, hidden, intermediate], 0.2),
            biases: [noise(5, &[count, rows]), noise(6, &[count, hidden])],
            factors: [
                noise(7, &[count, rank, hidden]) * 0.2,
                noise(8, &[count, rows, rank]) * 0.2,
                noise(9, &[count, rank, intermediate]) * 0.2,
                noise(10, &[count, hidden, rank]) * 0.2,
            ],
        }
    }

    /// The leaves of a graph in `kind`: x, routing weights, and A and B of both matrices.
    fn leaves(&self, kind: Kind) -> Vec<Tensor> {
        let inputs = [&self.x, &self.routing.weights];
        let leaf = |tensor: &Tensor| tensor.detach().to_kind(kind).set_requires_grad(true);
        inputs.into_iter().chain(&self.factors).map(leaf).collect()
    }

    fn run(
        &self,
        kernel: ExpertKernel,
        form: Form,
        range: Range<usize>,
        leaves: &[Tensor],
        sum: Option<&Tensor>,
    ) -> Tensor {
        let kind = leaves[0].kind();
        let part = |tensor: &Tensor| tensor.i(range.start as i64..range.end as i64);
        let packed =
            |whole: &Mxfp4| Mxfp4::new(part(whole.blocks()), part(whole.scales())).unwrap();
        let [gate_up, down] = [&self.gate_up, &self.down].map(packed);
        let dense = [&gate_up, &down].map(|packed| packed.unpack(kind).unwrap());
        let stack = |position: usize, packed| ExpertStack {
            weight: match form {
                Form::Packed => ExpertWeight::Packed(packed),
                Form::Dense => ExpertWeight::Dense(&dense[position]),
            },
            bias: Some(part(&self.biases[position]).to_kind(kind)),
            factors: Some(LowRankFactors {
                a: part(&leaves[2 + 2 * position]),
                b: part(&leaves[3 + 2 * position]),
                scaling: 0.5,
            }),
        };
        let routing = Routing {
            experts: self.routing.experts.shallow_clone(),
            weights: leaves[1].shallow_clone(),
        };
        let shape = ExpertShape {
            experts: range.clone(),
            gate_up: GateUp::Interleaved,
            activation: ACTIVATION,
        };
        let call = ExpertCall {
            x: &leaves[0],
            routing: &routing,
            shape: &shape,
            gate_up: stack(0, gate_up),
            down: stack(1, down),
            sum,
        };
        experts(kernel, &call).unwrap()
    }

    /// The formula, every expert on every token, in fp64.
    fn formula(&self, range: Range<usize>, leaves: &[Tensor]) -> Tensor {
        let leaves: Vec<_> = leaves.iter().map(|leaf| leaf.to_kind(Kind::Double)).collect();
        let [gate_up, down] =
            [&self.gate_up, &self.down].map(|it| it.unpack(Kind::Double).unwrap());
        let kind = self.x.kind();
        let mut sum = leaves[0].zeros_like();
        for expert in range {
            let expert = expert as i64;
            let linear = |x: &Tensor, weight: &Tensor, position: usize| {
                let (a, b) = (&leaves[2 + 2 * position], &leaves[3 + 2 * position]);
                let weight = weight.i(expert) + b.i(expert).matmul(&a.i(expert)) * 0.5;
                let bias = self.biases[position].i(expert).to_kind(kind).to_kind(Kind::Double);
                x.matmul(&weight.tr()) + bias
            };
            let pairs = linear(&leaves[0], &gate_up, 0).view([self.x.size()[0], -1, 2]);
            let gate = pairs.i((.., .., 0)).clamp_max(7.0);
            let up = pairs.i((.., .., 1)).clamp(-7.0, 7.0);
            let inner = (up + 1.0) * &gate * (&gate * 1.702).sigmoid();
            let chosen = self.routing.experts.eq(expert).to_kind(Kind::Double) * &leaves[1];
            let weight = chosen.sum_dim_intlist(1, true, None::<Kind>);
            sum += linear(&inner, &down, 1) * weight;
        }
        sum
    }
}

#[test]
fn packed_experts_give_the_bits_of_dense_ones_in_fp32_forward_and_backward() {
    let layer = Layer::new(&[3, 0, 0, 1, 9], [64, 96], CLIPPED);
    for range in [0..5, 1..4, 4..5] {
        let leaves = [Form::Packed, Form::Dense].map(|_| layer.leaves(Kind::Float));
        let [packed, dense] = [(Form::Packed, &leaves[0]), (Form::Dense, &leaves[1])]
            .map(|(form, leaves)| layer.run(ExpertKernel::Loop, form, range.clone(), leaves, None));
        assert_eq!(packed, dense, "{range:?}");
        let [of_packed, of_dense] = [gradients(&packed, &leaves[0]), gradients(&dense, &leaves[1])];
        assert!(of_packed.iter().all(|gradient| largest(gradient) > 0.0));
        assert_eq!(of_packed, of_dense, "{range:?}");
        let wanted = layer.formula(range.clone(), &leaves[0]);
        assert_near(&[packed], &[wanted.detach()], 1e-5, &format!("{range:?}"));
        assert_near(&of_packed, &gradients(&wanted, &leaves[0]), 1e-5, &format!("{range:?}"));
    }
}

#[test]
fn packed_experts_in_groups_add_up_to_the_same_bits() {
    let layer = Layer::new(&[3, 0, 5, 1], [64, 32], CLIPPED);
    let leaves = layer.leaves(Kind::Float);
    let run = |range, sum: Option<&Tensor>| {
        layer.run(ExpertKernel::Loop, Form::Packed, range, &leaves, sum)
    };
    let whole = run(0..4, None);
    let first = run(0..1, None);
    let second = run(1..3, Some(&first));
    assert_eq!(run(3..4, Some(&second)), whole);
}

#[test]
fn backward_expands_the_packed_codes_again() {
    for (kernel, kind) in [
        (ExpertKernel::Loop, Kind::Float),
        (ExpertKernel::Grouped, Kind::BFloat16),
        (ExpertKernel::Fused, Kind::BFloat16),
    ] {
        let layer = Layer::new(&[3, 0, 2], [64, 32], CLIPPED);
        let found = [false, true].map(|are_doubled| {
            let leaves = layer.leaves(kind);
            let output = layer.run(kernel, Form::Packed, 0..3, &leaves, None);
            if are_doubled {
                // Nothing dense can know of this.
                let _ = layer.down.scales().shallow_clone().f_add_scalar_(1).unwrap();
            }
            gradients(&output, &leaves)
        });
        // The factors of the first matrix see the gradient through the second one, and their own share.
        assert_ne!(found[0][2], found[1][2], "{kernel:?}");
        assert_eq!(found[0][5], found[1][5], "{kernel:?}: B of the second matrix sees neither");
    }
}

#[test]
fn what_is_clipped_has_no_gradient() {
    // Of a width that experts in one product take, and that is more than one block of threads. All but the last
    // gate and up are zero.
    const SIZE: i64 = 264;
    let call = |kernel: ExpertKernel, kind: Kind, gate_up_order: GateUp, gate: f32, up: f32| {
        let mut numbers = [0.0_f32; SIZE as usize];
        numbers[..2].copy_from_slice(&[gate, up]);
        let x = Tensor::from_slice(&numbers).view([1, SIZE]).to_device(device());
        let x = x.to_kind(kind).set_requires_grad(true);
        let rows = match gate_up_order {
            GateUp::Interleaved => [2 * SIZE - 2, 2 * SIZE - 1],
            GateUp::Concatenated => [SIZE - 1, 2 * SIZE - 1],
        };
        let one = Tensor::zeros([1, 2 * SIZE, SIZE], (kind, device()));
        for (column, row) in (0..).zip(rows) {
            let _ = one.get(0).get(row).get(column).fill_(1.0);
        }
        let down = Tensor::ones([1, SIZE, SIZE], (kind, device()));
        let ones = Tensor::ones([1, 1], (kind, device()));
        let routing = Routing { experts: ones.zeros_like().to_kind(Kind::Int64), weights: ones };
        let shape = ExpertShape { experts: 0..1, gate_up: gate_up_order, activation: ACTIVATION };
        let stack =
            |weight| ExpertStack { weight: ExpertWeight::Dense(weight), bias: None, factors: None };
        let (gate_up, down) = (stack(&one), stack(&down));
        let call = ExpertCall { x: &x, routing: &routing, shape: &shape, gate_up, down, sum: None };
        let output = experts(kernel, &call).unwrap().narrow(1, 0, 1);
        let found = grad(&[&output], &[&output.ones_like()], &[&x]).unwrap();
        let gradient = Vec::<f64>::try_from(found[0].as_ref().unwrap().view(-1)).unwrap();
        (output.double_value(&[0, 0]), gradient[0] != 0.0, gradient[1] != 0.0)
    };
    let inner = |gate: f64, up: f64| (up + 1.0) * gate / (1.0 + (-1.702 * gate).exp());
    for (gate, up, clipped) in [
        (1.5, -2.0, [1.5, -2.0]),
        (9.0, 2.0, [7.0, 2.0]),
        (-30.0, 8.0, [-30.0, 7.0]),
        (0.5, -9.0, [0.5, -7.0]),
        (8.0, 7.5, [7.0, 7.0]),
    ] {
        for (kernel, kind, order, tolerance) in [
            (ExpertKernel::Loop, Kind::Float, GateUp::Interleaved, 1e-5),
            (ExpertKernel::Loop, Kind::BFloat16, GateUp::Concatenated, 2e-2),
            (ExpertKernel::Auto, Kind::BFloat16, GateUp::Concatenated, 2e-2),
            (ExpertKernel::Auto, Kind::BFloat16, GateUp::Interleaved, 2e-2),
        ] {
            let (output, of_gate, of_up) = call(kernel, kind, order, gate, up);
            let wanted = inner(clipped[0], clipped[1]);
            assert!(
                (output - wanted).abs() < tolerance * wanted.abs() + 1e-9,
                "{kernel:?} {kind:?} {order:?} {gate} {up}: {output} {wanted}"
            );
            assert_eq!(
                (of_gate, of_up),
                (clipped[0] == f64::from(gate), clipped[1] == f64::from(up)),
                "{kernel:?} {kind:?} {order:?} {gate} {up}"
            );
        }
    }
}

#[test]
fn every_kernel_agrees_with_the_formula_at_odd_sizes_and_any_number_of_tokens() {
    for (counts, hidden, intermediate) in [
        (&[3_usize, 0, 0, 1, 9][..], 96, 32),
        (&[1, 0][..], 32, 96),
        (&[300, 0, 0, 17][..], 160, 64),
        (&[2, 31, 0][..], 224, 288),
    ] {
        let layer = Layer::new(counts, [hidden, intermediate], UNCLIPPED);
        let count = layer.num_experts;
        for range in [0..count, 1..count, count - 1..count] {
            let leaves = layer.leaves(Kind::BFloat16);
            let sum = noise(11, &leaves[0].size()).to_kind(Kind::BFloat16);
            let wanted = layer.formula(range.clone(), &leaves) + &sum;
            let of_wanted = gradients(&wanted, &leaves);
            for kernel in
                [ExpertKernel::Loop, ExpertKernel::Grouped, ExpertKernel::Fused, ExpertKernel::Auto]
            {
                let what = format!("{kernel:?} {counts:?} [{hidden}, {intermediate}] {range:?}");
                // Several times: memory that nobody wrote looks different each time.
                for _ in 0..2 {
                    let output =
                        layer.run(kernel, Form::Packed, range.clone(), &leaves, Some(&sum));
                    assert_eq!(output.kind(), Kind::BFloat16);
                    assert_near(&[output.detach()], &[wanted.detach()], 3e-2, &what);
                    // Without a token there is no graph.
                    if output.requires_grad() {
                        assert_near(&gradients(&output, &leaves), &of_wanted, 6e-2, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn packed_experts_and_biases_that_do_not_fit_are_refused_by_name() {
    let layer = Layer::new(&[2, 1], [64, 32], CLIPPED);
    let shape = ExpertShape { experts: 0..2, gate_up: GateUp::Interleaved, activation: ACTIVATION };
    let refused = |gate_up: &Mxfp4, down: &Mxfp4, bias: &Tensor| {
        let stack = |packed: &Mxfp4, bias: Option<&Tensor>| ExpertStack {
            weight: ExpertWeight::Packed(
                Mxfp4::new(packed.blocks().shallow_clone(), packed.scales().shallow_clone())
                    .unwrap(),
            ),
            bias: bias.map(Tensor::shallow_clone),
            factors: None,
        };
        let call = ExpertCall {
            x: &layer.x,
            routing: &layer.routing,
            shape: &shape,
            gate_up: stack(gate_up, None),
            down: stack(down, Some(bias)),
            sum: None,
        };
        experts(ExpertKernel::Auto, &call).unwrap_err().to_string()
    };
    let bias = &layer.biases[1];
    for (message, parts) in [
        (refused(&layer.down, &layer.down, bias), ["'gate_up_proj'", "[2, 64, 32]"]),
        (refused(&layer.gate_up, &layer.gate_up, bias), ["'down_proj'", "[2, 64, 64]"]),
        (
            refused(&layer.gate_up, &layer.down, &bias.to_kind(Kind::Half)),
            ["'down_proj_bias'", "Half"],
        ),
        (
            refused(&layer.gate_up, &layer.down, &bias.i((.., ..63))),
            ["'down_proj_bias'", "[2, 63]"],
        ),
    ] {
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
}

#[test]
fn every_kernel_expands_every_code_with_every_scale_exactly() {
    const WIDTH: i64 = 64;
    // Scale 8 and more: six times the smallest code is normal. Up to 249: six times the largest is finite.
    let scales: Vec<u8> = (0..=255).map(|scale: u8| scale.clamp(8, 249)).collect();
    let codes: Vec<u8> = (0..16).map(|b| (b * 2 % 16) | ((b * 2 + 1) % 16) << 4).collect();
    let bytes =
        |values: &[u8], size: &[i64]| Tensor::from_slice(values).view(size).to_device(device());
    let down =
        Mxfp4::new(bytes(&codes.repeat(256), &[2, WIDTH, 2, 16]), bytes(&scales, &[2, WIDTH, 2]))
            .unwrap();
    // Token i has a 1 at i. Its gate is 6 there, and 0 elsewhere, as is the other half: the activation is 6.
    let eye = Tensor::eye(WIDTH, (Kind::Float, device()));
    let gate_up = Tensor::stack(&[&eye * 6.0, eye.zeros_like()], 1).view([1, 2 * WIDTH, WIDTH]);
    let gate_up = Mxfp4::pack(&gate_up.repeat([2, 1, 1])).unwrap();
    let routing = Routing {
        experts: Tensor::arange(2 * WIDTH, (Kind::Int64, device()))
            .divide_scalar_mode(WIDTH, "floor")
            .view([-1, 1]),
        weights: Tensor::ones([2 * WIDTH, 1], (Kind::BFloat16, device())),
    };
    let x = eye.repeat([2, 1]).to_kind(Kind::BFloat16);
    let shape = ExpertShape { experts: 0..2, gate_up: GateUp::Interleaved, activation: ACTIVATION };
    let stack = |packed: &Mxfp4| ExpertStack {
        weight: ExpertWeight::Packed(
            Mxfp4::new(packed.blocks().shallow_clone(), packed.scales().shallow_clone()).unwrap(),
        ),
        bias: None,
        factors: None,
    };
    // [2 experts, out, in] to one row per token.
    let wanted = down.unpack(Kind::Double).unwrap().transpose(1, 2).reshape([-1, WIDTH]) * 6.0;
    for kernel in [ExpertKernel::Loop, ExpertKernel::Grouped, ExpertKernel::Fused] {
        let (gate_up, down) = (stack(&gate_up), stack(&down));
        let call = ExpertCall { x: &x, routing: &routing, shape: &shape, gate_up, down, sum: None };
        let found = experts(kernel, &call).unwrap().to_kind(Kind::Double);
        let num_wrong = found.ne_tensor(&wanted).sum(Kind::Int64).int64_value(&[]);
        assert_eq!(num_wrong, 0, "{kernel:?}: {} numbers", wanted.numel());
    }
}
