//! Norms.

use tch::{Kind, Tensor};

use crate::error::{Error, Result};

/// Root-mean-square norm over the last dimension, rounded as Qwen and Llama do:
/// `y = x / sqrt(mean(x^2) + epsilon)` in fp32, rounded to the dtype of `x`, and then `weight * y` in
/// that dtype. Two roundings; gpt-oss has one, in [`rms_norm_rounded_once`].
///
/// `x` is `[.., size]`, `weight` is `[size]` in the dtype of `x`; the result is like `x`.
///
/// # Errors
/// [`Error::Tensor`] when the sizes differ.
pub fn rms_norm(x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor> {
    let size = size_of(x, weight)?;
    // Without a weight libtorch's kernel does the first rounding and nothing more: one kernel, and one more
    // for the gradient, instead of seven and about a dozen.
    let normed = x.f_rms_norm(size, None::<&Tensor>, epsilon)?;
    Ok(weight.f_mul(&normed)?)
}

/// Root-mean-square norm over the last dimension, rounded as gpt-oss does: everything in fp32, the product
/// with `weight` too, and then to the dtype of `x`.
///
/// `x` is `[.., size]`, `weight` is `[size]` in any dtype of real numbers; the result is like `x`.
///
/// # Errors
/// [`Error::Tensor`] when the sizes differ.
pub fn rms_norm_rounded_once(x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor> {
    let size = size_of(x, weight)?;
    let kind = x.f_kind()?;
    // Its kernel for a GPU computes in fp32 and rounds once; its formula for the CPU rounds before the weight.
    if x.device().is_cuda()
        && matches!(kind, Kind::Half | Kind::BFloat16)
        && weight.f_kind()? == kind
    {
        return Ok(x.f_rms_norm(size, Some(weight), epsilon)?);
    }
    let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
    let normed = x.f_to_kind(wide)?.f_rms_norm(size, None::<&Tensor>, epsilon)?;
    Ok(weight.f_mul(&normed)?.f_to_kind(kind)?)
}

/// The size of a norm, when `weight` fits `x`.
fn size_of(x: &Tensor, weight: &Tensor) -> Result<Vec<i64>> {
    let size = weight.size();
    if size.len() != 1 || x.size().last() != size.first() {
        let message = format!("of shape {size:?} does not fit an input of shape {:?}", x.size());
        return Err(Error::tensor("the weight of a norm", message));
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    type Norm = fn(&Tensor, &Tensor, f64) -> Result<Tensor>;
    const BOTH: [Norm; 2] = [rms_norm, rms_norm_rounded_once];

    #[test]
    fn both_agree_with_the_formula_in_fp64() {
        let x = (Tensor::arange(24, (Kind::Double, tch::Device::Cpu)) * 0.7).sin().view([2, 3, 4]);
        let weight = Tensor::from_slice(&[0.5, 1.0, -2.0, 3.0]);
        let wanted = &x * &weight / ((&x * &x).mean_dim(-1, true, None) + 1e-6).sqrt();
        let single = |tensor: &Tensor| tensor.to_kind(Kind::Float);
        for norm in BOTH {
            let got = norm(&single(&x), &single(&weight), 1e-6).unwrap();
            let error = (got.to_kind(Kind::Double) - &wanted).abs().max().double_value(&[]);
            assert!(error < 1e-6, "{error}");
        }
    }

    #[test]
    fn one_rounds_before_the_weight_and_after_it_and_the_other_only_after_it() {
        // 1 / sqrt(mean) of this row is not a bf16 number, and 1.3671875 times its rounding is not
        // the rounding of the exact product: one rounding would give another last bit.
        let x = (Tensor::arange(64, (Kind::Float, tch::Device::Cpu)) * 0.37 + 0.1).sin();
        let x = x.to_kind(Kind::BFloat16);
        let weight = Tensor::full([64], 1.367_187_5, (Kind::BFloat16, tch::Device::Cpu));
        let wide = x.to_kind(Kind::Float);
        let exact = &wide * ((&wide * &wide).mean(None) + 1e-6).rsqrt();
        let once = (&exact * 1.367_187_5).to_kind(Kind::BFloat16);
        let twice = (exact.to_kind(Kind::BFloat16) * &weight).to_kind(Kind::BFloat16);
        assert!(!once.equal(&twice));
        assert!(rms_norm(&x, &weight, 1e-6).unwrap().equal(&twice));
        for weight in [weight.shallow_clone(), weight.to_kind(Kind::Float)] {
            let got = rms_norm_rounded_once(&x, &weight, 1e-6).unwrap();
            assert_eq!(got.kind(), Kind::BFloat16);
            assert!(got.equal(&once));
        }
    }

    #[test]
    fn gradients_are_those_of_the_formula() {
        let leaf = |values: Tensor| values.to_kind(Kind::Double).set_requires_grad(true);
        let x =
            leaf((Tensor::arange(24, (Kind::Double, tch::Device::Cpu)) * 0.7).sin().view([6, 4]));
        let weight = leaf(Tensor::from_slice(&[0.5, 1.0, -2.0, 3.0]));
        let upstream =
            (Tensor::arange(24, (Kind::Double, tch::Device::Cpu)) * 1.3).cos().view([6, 4]);
        let by_formula = &x * &weight / ((&x * &x).mean_dim(-1, true, None) + 1e-6).sqrt();
        let gradients = |y: Tensor| {
            let inputs = [&x, &weight];
            crate::device::grad(&[&y], &[&upstream], &inputs).unwrap().into_iter().flatten()
        };
        let wanted: Vec<_> = gradients(by_formula).collect();
        for norm in BOTH {
            for (found, wanted) in gradients(norm(&x, &weight, 1e-6).unwrap()).zip(&wanted) {
                assert!((found - wanted).abs().max().double_value(&[]) < 1e-12);
            }
        }
    }

    #[test]
    fn a_weight_of_another_size_is_an_error() {
        let x = Tensor::ones([2, 4], (Kind::Float, tch::Device::Cpu));
        for shape in [&[3_i64][..], &[1], &[2, 4], &[]] {
            let weight = Tensor::ones(shape, (Kind::Float, tch::Device::Cpu));
            for norm in BOTH {
                let error = norm(&x, &weight, 1e-6).unwrap_err().to_string();
                assert!(error.contains("[2, 4]"), "{error}");
            }
        }
    }
}
