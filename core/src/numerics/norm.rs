//! Norms.

use tch::{Kind, Tensor};

use crate::error::Result;

/// Root-mean-square norm over the last dimension, rounded as Qwen and Llama do:
/// `y = x / sqrt(mean(x^2) + epsilon)` in fp32, rounded to the dtype of `x`, and then `weight * y` in
/// that dtype. Two roundings; families that multiply by the weight in fp32 need another function.
///
/// `x` is `[.., size]`, `weight` is `[size]` in the dtype of `x`; the result is like `x`.
///
/// # Errors
/// [`Error::Torch`](crate::Error::Torch) when the sizes differ.
pub fn rms_norm(x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor> {
    let wide = x.f_to_kind(Kind::Float)?;
    let mean_square = wide.f_mul(&wide)?.f_mean_dim(-1, true, Kind::Float)?;
    let normed = wide.f_mul(&mean_square.f_add_scalar(epsilon)?.f_rsqrt()?)?;
    Ok(weight.f_mul(&normed.f_to_kind(x.kind())?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_agrees_with_the_formula_in_fp64() {
        let x = (Tensor::arange(24, (Kind::Double, tch::Device::Cpu)) * 0.7).sin().view([2, 3, 4]);
        let weight = Tensor::from_slice(&[0.5, 1.0, -2.0, 3.0]);
        let wanted = &x * &weight / ((&x * &x).mean_dim(-1, true, None) + 1e-6).sqrt();
        let single = |tensor: &Tensor| tensor.to_kind(Kind::Float);
        let got = rms_norm(&single(&x), &single(&weight), 1e-6).unwrap();
        let error = (got.to_kind(Kind::Double) - wanted).abs().max().double_value(&[]);
        assert!(error < 1e-6, "{error}");
    }

    #[test]
    fn it_rounds_before_the_weight_and_after_it() {
        // 1 / sqrt(mean) of this row is not a bf16 number, and 1.3671875 times its rounding is not
        // the rounding of the exact product: one rounding would give another last bit.
        let x = (Tensor::arange(64, (Kind::Float, tch::Device::Cpu)) * 0.37 + 0.1).sin();
        let x = x.to_kind(Kind::BFloat16);
        let weight = Tensor::full([64], 1.367_187_5, (Kind::BFloat16, tch::Device::Cpu));
        let wide = x.to_kind(Kind::Float);
        let exact = &wide * ((&wide * &wide).mean(None) + 1e-6).rsqrt();
        let once = (&exact * 1.367_187_5).to_kind(Kind::BFloat16);
        let twice = (exact.to_kind(Kind::BFloat16) * &weight).to_kind(Kind::BFloat16);
        let got = rms_norm(&x, &weight, 1e-6).unwrap();
        assert!(got.equal(&twice));
        assert!(!got.equal(&once));
    }

    #[test]
    fn a_weight_of_another_size_is_an_error() {
        let x = Tensor::ones([2, 4], (Kind::Float, tch::Device::Cpu));
        let weight = Tensor::ones([3], (Kind::Float, tch::Device::Cpu));
        assert!(rms_norm(&x, &weight, 1e-6).is_err());
    }
}
