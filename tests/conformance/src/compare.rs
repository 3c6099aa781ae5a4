//! Errors between tensors.

use tch::{Device, Kind, Tensor};

use crate::Result;

/// Largest absolute difference where `mask` (broadcast over the last dimension) is true, and the largest
/// magnitude of `expected` there. Infinite when the shapes differ or a value is not a number.
pub(crate) fn max_difference(
    found: &Tensor,
    expected: &Tensor,
    mask: Option<&Tensor>,
) -> Result<(f64, f64)> {
    if found.size() != expected.size() {
        return Ok((f64::INFINITY, 0.0));
    }
    let plain =
        |tensor: &Tensor| tensor.f_detach()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double);
    let (mut found, mut expected) = (plain(found)?, plain(expected)?);
    if let Some(mask) = mask {
        let mask = mask.f_unsqueeze(-1)?.f_expand_as(&expected)?;
        found = found.f_masked_select(&mask)?;
        expected = expected.f_masked_select(&mask)?;
    }
    if expected.numel() == 0 {
        return Ok((0.0, 0.0));
    }
    let difference = found.f_sub(&expected)?.f_abs()?.f_max()?.f_double_value(&[])?;
    let magnitude = expected.f_abs()?.f_max()?.f_double_value(&[])?;
    Ok((if difference.is_nan() { f64::INFINITY } else { difference }, magnitude))
}

/// Length of the difference over that of `expected`, all values taken as one vector. Infinite when the
/// shapes differ or a value is not a number.
pub(crate) fn relative_distance(found: &Tensor, expected: &Tensor) -> Result<f64> {
    let length = squared_distance(expected, &expected.f_zeros_like()?)?.sqrt();
    let relative = squared_distance(found, expected)?.sqrt() / length.max(f64::MIN_POSITIVE);
    Ok(if relative.is_nan() { f64::INFINITY } else { relative })
}

/// Squared length of the difference. Infinite when the shapes differ.
pub(crate) fn squared_distance(found: &Tensor, expected: &Tensor) -> Result<f64> {
    if found.size() != expected.size() {
        return Ok(f64::INFINITY);
    }
    let plain =
        |tensor: &Tensor| tensor.f_detach()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double);
    let difference = plain(found)?.f_sub(&plain(expected)?)?;
    Ok(difference.f_square()?.f_sum(Kind::Double)?.f_double_value(&[])?)
}

/// Distance between neighbouring values of `kind` at `magnitude`.
pub(crate) fn ulp(kind: Kind, magnitude: f64) -> f64 {
    let mantissa_bits = match kind {
        Kind::BFloat16 => 7,
        Kind::Half => 10,
        _ => 23,
    };
    2.0_f64.powi(magnitude.max(f64::MIN_POSITIVE).log2().floor() as i32 - mantissa_bits)
}

/// Whether two tensors hold the same bits.
pub(crate) fn identical(a: &Tensor, b: &Tensor) -> Result<bool> {
    Ok(a.size() == b.size() && a.kind() == b.kind() && a.f_equal(b)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_seen_only_where_the_mask_is_true_and_a_nan_is_infinite() {
        let a = Tensor::from_slice(&[1.0_f32, 2.0, 3.0, 4.0]).view([2, 2]);
        let b = Tensor::from_slice(&[1.0_f32, 2.0, 3.0, 9.0]).view([2, 2]);
        let mask = Tensor::from_slice(&[true, false]);
        assert_eq!(max_difference(&a, &b, None).unwrap(), (5.0, 9.0));
        assert_eq!(max_difference(&a, &b, Some(&mask)).unwrap(), (0.0, 2.0));
        let nan = Tensor::from_slice(&[f32::NAN, 2.0, 3.0, 4.0]).view([2, 2]);
        assert_eq!(max_difference(&nan, &a, None).unwrap().0, f64::INFINITY);
        assert_eq!(max_difference(&a.view([4]), &a, None).unwrap().0, f64::INFINITY);
    }

    #[test]
    fn a_distance_is_relative_to_the_expected_length() {
        let expected = Tensor::from_slice(&[3.0_f32, 4.0]);
        let found = Tensor::from_slice(&[3.0_f32, 3.0]);
        assert_eq!(relative_distance(&found, &expected).unwrap(), 0.2);
        let nan = Tensor::from_slice(&[f32::NAN, 4.0]);
        assert_eq!(relative_distance(&nan, &expected).unwrap(), f64::INFINITY);
        assert_eq!(relative_distance(&found.view([2, 1]), &expected).unwrap(), f64::INFINITY);
    }

    #[test]
    fn an_ulp_is_the_distance_to_the_next_value() {
        assert_eq!(ulp(Kind::BFloat16, 1.5), 2.0_f64.powi(-7));
        assert_eq!(ulp(Kind::Float, 4.0), 2.0_f64.powi(-21));
    }
}
