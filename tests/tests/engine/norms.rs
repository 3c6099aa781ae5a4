//! Norms round where their families do, whichever kernel a device has for them.

use blockstreamer_core::device::grad;
use blockstreamer_core::numerics::{rms_norm, rms_norm_rounded_once};
use tch::{Kind, Tensor};

use crate::experts::values;

const EPSILON: f64 = 1e-5;

/// The norm in fp64.
fn by_definition(x: &Tensor, weight: &Tensor) -> Tensor {
    let square = (x * x).mean_dim([-1_i64].as_slice(), true, Kind::Double);
    x * (square + EPSILON).rsqrt() * weight
}

fn share_of_equal(found: &Tensor, wanted: &Tensor) -> f64 {
    found.eq_tensor(wanted).to_kind(Kind::Double).mean(Kind::Double).double_value(&[])
}

#[test]
fn a_norm_is_rounded_once_or_before_the_weight_and_again_on_every_device() {
    let x = (values(1, &[3, 40, 96]) * 2.0).to_kind(Kind::BFloat16);
    let weight = (values(2, &[96]) + 1.3).to_kind(Kind::BFloat16);
    let [wide_x, wide_weight] = [&x, &weight].map(|tensor| tensor.to_kind(Kind::Double));
    let ones = wide_weight.ones_like();
    let once = by_definition(&wide_x, &wide_weight).to_kind(Kind::BFloat16);
    let twice = by_definition(&wide_x, &ones).to_kind(Kind::BFloat16) * &weight;
    assert!(share_of_equal(&once, &twice) < 0.9, "the two can be told apart");

    // fp32 inside: now and then it is on the other side of a rounding than fp64.
    let found = rms_norm_rounded_once(&x, &weight, EPSILON).unwrap();
    assert!(share_of_equal(&found, &once) > 0.995);
    let found = rms_norm(&x, &weight, EPSILON).unwrap();
    assert!(share_of_equal(&found, &twice) > 0.995);
}

#[test]
fn the_gradient_of_a_norm_is_that_of_the_definition_in_sixteen_bits() {
    let leaf = |kind| (values(1, &[5, 96]) * 2.0).to_kind(Kind::BFloat16).to_kind(kind);
    let weight = (values(2, &[96]) + 1.3).to_kind(Kind::BFloat16);
    let upstream = values(3, &[5, 96]).to_kind(Kind::BFloat16);
    let x = leaf(Kind::Double).set_requires_grad(true);
    let output = by_definition(&x, &weight.to_kind(Kind::Double));
    let wanted = grad(&[&output], &[&upstream.to_kind(Kind::Double)], &[&x]).unwrap();
    let wanted = wanted[0].as_ref().unwrap();
    for norm in [rms_norm, rms_norm_rounded_once] {
        let x = leaf(Kind::BFloat16).set_requires_grad(true);
        let output = norm(&x, &weight, EPSILON).unwrap();
        let found = grad(&[&output], &[&upstream], &[&x]).unwrap();
        let error = (found[0].as_ref().unwrap().to_kind(Kind::Double) - wanted).abs().max();
        let largest = wanted.abs().max().double_value(&[]);
        assert!(error.double_value(&[]) < 0.01 * largest, "{error:?} of {largest}");
    }
}
