//! The one node that a linear's adapter is, held against the same formula made of libtorch's own functions.

use std::sync::{Arc, Weak};

use super::*;
use crate::device::{HostBuffer, add_low_rank, dropout, grad, tensor_over};

const RANK: i64 = 4;
const IN: i64 = 24;
const OUT: i64 = 40;

/// Input, output of the linear underneath, A and B.
struct Inputs {
    x: Tensor,
    output: Tensor,
    a: Tensor,
    b: Tensor,
}

impl Inputs {
    fn new(leading: &[i64], kind: Kind) -> Self {
        let size = |width| [leading, &[width]].concat();
        let leaf = |size: &[i64], factor: f64| (values(size) * factor).set_requires_grad(true);
        Self {
            x: values(&size(IN)).to_kind(kind).set_requires_grad(true),
            output: (values(&size(OUT)) * 0.7).to_kind(kind).set_requires_grad(true),
            a: leaf(&[RANK, IN], 0.3),
            b: leaf(&[OUT, RANK], 0.4),
        }
    }

    fn all(&self) -> [&Tensor; 4] {
        [&self.x, &self.output, &self.a, &self.b]
    }

    /// The formula as libtorch's functions compute it, a node for each.
    fn composed(&self, x: &Tensor, scaling: f64) -> Tensor {
        let kind = x.kind();
        let inner = x.linear(&self.a.to_kind(kind), None::<&Tensor>) * scaling;
        let rows = |tensor: &Tensor, width| tensor.reshape([-1, width]);
        let sum = rows(&self.output, OUT).addmm(&rows(&inner, RANK), &self.b.to_kind(kind).tr());
        sum.reshape(self.output.size())
    }

    fn in_one(&self, x: &Tensor, scaling: f64) -> Tensor {
        // As from a linear: a tensor that somebody else made, and that nobody keeps.
        add_low_rank(x, &self.output * 1.0, &self.a, &self.b, scaling).unwrap()
    }
}

/// Gradients of `inputs` where `y` is weighed by values that differ everywhere.
fn gradients(y: &Tensor, inputs: &[&Tensor]) -> Vec<Option<Tensor>> {
    let weights = (values(&y.size()) + 0.125).to_kind(y.kind());
    grad(&[y], &[&weights], inputs).unwrap()
}

#[test]
fn values_and_gradients_are_the_bits_of_the_formula_made_of_single_functions() {
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for leading in [&[7][..], &[2, 5], &[1, 1], &[2, 1, 3], &[0], &[2, 0]] {
            for scaling in [1.0, 2.0, 0.25] {
                for dropped in [false, true] {
                    let inputs = Inputs::new(leading, kind);
                    let x = || match dropped {
                        true => dropout(&inputs.x, 0.3, 5).unwrap(),
                        false => inputs.x.shallow_clone(),
                    };
                    let case = format!("{kind:?} {leading:?} {scaling} {dropped}");
                    let (expected, found) =
                        (inputs.composed(&x(), scaling), inputs.in_one(&x(), scaling));
                    assert_eq!((found.kind(), found.size()), (kind, expected.size()));
                    assert!(found.equal(&expected), "{case}");
                    let without = tch::no_grad(|| inputs.in_one(&x(), scaling));
                    assert!(without.equal(&found) && !without.requires_grad(), "{case}");
                    let expected = gradients(&expected, &inputs.all());
                    let found = gradients(&found, &inputs.all());
                    for (place, (one, two)) in expected.into_iter().zip(found).enumerate() {
                        let (one, two) = (one.unwrap(), two.unwrap());
                        assert_eq!((two.kind(), two.size()), (one.kind(), one.size()), "{case}");
                        assert!(two.equal(&one), "{case}: gradient {place}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_scaling_that_is_no_power_of_two_comes_as_near_the_exact_result_as_single_functions() {
    for (kind, eps) in [(Kind::Float, 4e-7), (Kind::BFloat16, 8e-3)] {
        let inputs = Inputs::new(&[3, 11], kind);
        let (composed, found) = (inputs.composed(&inputs.x, 0.3), inputs.in_one(&inputs.x, 0.3));
        // What both would be without rounding anything but the operands.
        let exact = |tensor: &Tensor| tensor.detach().to_kind(kind).to_kind(Kind::Double);
        let [x, output, a, b] = inputs.all().map(exact);
        let [x, a, b] = [x, a, b].map(|tensor| tensor.set_requires_grad(true));
        let truth = &output + x.matmul(&a.tr()).matmul(&b.tr()) * 0.3;
        let distance = |found: &Tensor, truth: &Tensor| {
            let error = found.to_kind(Kind::Double) - truth;
            error.norm().double_value(&[]) / truth.norm().double_value(&[])
        };
        let close = |found: &Tensor, composed: &Tensor, truth: &Tensor, what: &str| {
            let (one, other) = (distance(found, truth), distance(composed, truth));
            assert!(one <= eps && one <= 1.25 * other, "{kind:?} {what}: {one}, composed {other}");
        };
        close(&found, &composed, &truth, "values");
        let of = |y: &Tensor, inputs: [&Tensor; 3]| {
            gradients(y, &inputs).into_iter().map(Option::unwrap).collect::<Vec<_>>()
        };
        let weights = (values(&truth.size()) + 0.125).to_kind(kind).to_kind(Kind::Double);
        let truth = grad(&[&truth], &[&weights], &[&x, &a, &b]).unwrap();
        let leaves = [&inputs.x, &inputs.a, &inputs.b];
        let (found, composed) = (of(&found, leaves), of(&composed, leaves));
        for (place, truth) in truth.into_iter().enumerate() {
            let what = ["x", "a", "b"][place];
            close(&found[place], &composed[place], &truth.unwrap(), what);
        }
    }
}

#[test]
fn inputs_and_gradients_may_lie_in_memory_in_any_way() {
    let mut inputs = Inputs::new(&[6, 5], Kind::BFloat16);
    inputs.x = inputs.x.detach().transpose(0, 1).set_requires_grad(true);
    inputs.output = inputs.output.detach().transpose(0, 1).set_requires_grad(true);
    assert!(!inputs.x.is_contiguous() && !inputs.output.is_contiguous());
    let run = |y: &Tensor| {
        let weights = values(&[OUT, 6, 5]).to_kind(Kind::BFloat16).permute([2, 1, 0]);
        grad(&[y], &[&weights], &inputs.all()).unwrap()
    };
    let (expected, found) = (inputs.composed(&inputs.x, 2.0), inputs.in_one(&inputs.x, 2.0));
    assert!(found.equal(&expected));
    for (one, two) in run(&expected).into_iter().zip(run(&found)) {
        assert!(one.unwrap().equal(&two.unwrap()));
    }
    // One number for all places, as the gradient of a sum is.
    let [one, two] = [inputs.composed(&inputs.x, 2.0), inputs.in_one(&inputs.x, 2.0)]
        .map(|y| grad(&[&y.sum(Kind::Float)], &[&Tensor::from(1_f32)], &inputs.all()).unwrap());
    for (one, two) in one.into_iter().zip(two) {
        assert!(one.unwrap().equal(&two.unwrap()));
    }
}

#[test]
fn only_what_is_asked_for_gets_a_gradient() {
    for wanted in 1..16_usize {
        let inputs = Inputs::new(&[2, 3], Kind::BFloat16);
        let mut leaves = Vec::new();
        for (place, tensor) in inputs.all().into_iter().enumerate() {
            let is_wanted = wanted >> place & 1 == 1;
            let _ = tensor.shallow_clone().set_requires_grad(is_wanted);
            leaves.extend(is_wanted.then_some(tensor));
        }
        let expected = gradients(&inputs.composed(&inputs.x, 2.0), &leaves);
        let found = gradients(&inputs.in_one(&inputs.x, 2.0), &leaves);
        assert_eq!(found.len(), wanted.count_ones() as usize);
        for (one, two) in expected.into_iter().zip(found) {
            assert!(one.unwrap().equal(&two.unwrap()), "{wanted:04b}");
        }
    }
    // Of a graph with all of them, one at a time.
    let inputs = Inputs::new(&[2, 3], Kind::Float);
    for leaf in inputs.all() {
        let expected = gradients(&inputs.composed(&inputs.x, 2.0), &[leaf]);
        let found = gradients(&inputs.in_one(&inputs.x, 2.0), &[leaf]);
        assert_eq!(expected, found);
    }
    let frozen = inputs.all().map(Tensor::detach);
    let [x, output, a, b] = &frozen;
    let plain = add_low_rank(x, output.copy(), a, b, 2.0).unwrap();
    assert!(!plain.requires_grad());
}

/// A tensor whose memory can be seen to go.
fn watched(numbers: &Tensor) -> (Tensor, Weak<HostBuffer>) {
    let mut buffer = HostBuffer::new(4096).unwrap();
    let num_bytes = numbers.numel() * 4;
    numbers.copy_data_u8(&mut buffer.bytes_mut()[..num_bytes], numbers.numel());
    let owner = Arc::new(buffer);
    let bytes = tensor_over(&owner, |owner| Some(owner), CPU).unwrap().unwrap();
    let bytes = bytes.narrow(0, 0, num_bytes as i64);
    // Detached: a view would keep its base, which refers to the memory as well.
    (bytes.view_dtype(Kind::Float).view_(numbers.size()).detach(), Arc::downgrade(&owner))
}

#[test]
fn a_graph_holds_its_input_until_it_is_freed_and_cannot_be_gone_through_again() {
    let inputs = Inputs::new(&[2, 3], Kind::Float);
    for (needs_a, goes_backward) in [(true, true), (true, false), (false, true)] {
        let _ = inputs.a.shallow_clone().set_requires_grad(needs_a);
        let (x, memory) = watched(&inputs.x.detach());
        let y = inputs.in_one(&x, 2.0);
        drop(x);
        assert_eq!(
            memory.strong_count(),
            usize::from(needs_a),
            "only A's gradient needs the input"
        );
        if goes_backward {
            assert!(gradients(&y, &[&inputs.b])[0].is_some());
            assert_eq!(memory.strong_count(), 0, "freed, although `y` is still there");
            let one = y.ones_like();
            let again = grad(&[&y], &[&one], &[&inputs.b]).unwrap_err().to_string();
            assert!(again.contains("second time"), "{again}");
        }
        drop(y);
        assert_eq!(memory.strong_count(), 0);
    }
    let (x, memory) = watched(&inputs.x.detach());
    let y = tch::no_grad(|| inputs.in_one(&x, 2.0));
    drop(x);
    assert!(!y.requires_grad() && memory.upgrade().is_none());
}

#[test]
fn what_is_changed_between_forward_and_backward_is_noticed() {
    let inputs = Inputs::new(&[2, 3], Kind::Float);
    // In fp32 the masters themselves are what backward needs.
    for changed in [&inputs.x, &inputs.a, &inputs.b] {
        let y = inputs.in_one(&inputs.x, 2.0);
        let _ = tch::no_grad(|| changed.shallow_clone().g_add_scalar_(1.0));
        let error = grad(&[&y], &[&y.ones_like()], &[&inputs.x]).unwrap_err().to_string();
        assert!(error.contains("modified by an inplace operation"), "{error}");
    }
    // A step of an optimizer after the graph of it is gone disturbs nobody.
    let y = inputs.in_one(&inputs.x, 2.0);
    assert!(gradients(&y, &[&inputs.a])[0].is_some());
}

#[test]
fn a_second_derivative_is_refused() {
    let inputs = Inputs::new(&[2, 3], Kind::Float);
    let y = inputs.in_one(&inputs.x, 2.0).square().sum(Kind::Float);
    let error = Tensor::f_run_backward(&[y], &[&inputs.x], true, true).unwrap_err().to_string();
    assert!(error.contains("cannot be differentiated again"), "{error}");
}

#[test]
fn the_memory_of_the_output_is_used_again_only_where_nobody_else_can_see_it() {
    let inputs = Inputs::new(&[2, 3], Kind::Float);
    let add = |output| add_low_rank(&inputs.x, output, &inputs.a, &inputs.b, 2.0).unwrap();
    let plain = || inputs.output.detach();
    let alone = plain().copy();
    let address = alone.data_ptr();
    let expected = add(alone);
    assert_eq!(expected.data_ptr(), address);

    let (shared, viewed) = (plain().copy(), plain().copy());
    let (over, _) = watched(&plain());
    let address = over.data_ptr();
    for (output, seen) in [(shared.shallow_clone(), &shared), (viewed.view([2, 3, OUT]), &viewed)] {
        assert!(add(output).equal(&expected));
        assert!(seen.equal(&plain()));
    }
    let found = add(over);
    assert!(found.equal(&expected) && found.data_ptr() != address, "memory of somebody else");

    // The backward of a sigmoid needs its own output.
    let leaf = plain().set_requires_grad(true);
    let found = gradients(&add(leaf.sigmoid()), &[&leaf]);
    let expected = gradients(&(leaf.sigmoid() + (&expected - plain()).detach()), &[&leaf]);
    assert_eq!(found, expected);
}

#[test]
fn shapes_and_dtypes_that_do_not_fit_are_errors() {
    let inputs = Inputs::new(&[2, 3], Kind::Float);
    let of = |size: &[i64]| values(size);
    let Inputs { a, b, .. } = &inputs;
    let cases = [
        (of(&[2, 3, IN + 1]), of(&[2, 3, OUT]), a, b, "does not fit A"),
        (of(&[2, 3, IN]), of(&[2, 3, OUT + 1]), a, b, "does not fit an input"),
        (of(&[2, 3, IN]), of(&[3, 2, OUT]), a, b, "does not fit an input"),
        (of(&[2, 3, IN]), of(&[1, OUT]), a, b, "does not fit an input"),
        (of(&[2, 3, IN]), of(&[2, 3, OUT]), b, a, "are not [rank, in_features]"),
        (of(&[2, 3, IN]), of(&[2, 3, OUT]), &a.to_kind(Kind::BFloat16), b, "must be fp32"),
        (of(&[2, 3, IN]).to_kind(Kind::BFloat16), of(&[2, 3, OUT]), a, b, "dtype"),
        (of(&[2, 3, IN]), of(&[2, 3, OUT]).to_kind(Kind::BFloat16), a, b, "dtype"),
        (values(&[1]).reshape([] as [i64; 0]), of(&[OUT]), a, b, "does not fit A"),
    ];
    for (x, output, a, b, part) in cases {
        let error = add_low_rank(&x, output, a, b, 1.0).unwrap_err().to_string();
        assert!(error.contains(part), "{part}: {error}");
    }
}
