//! Rotary position embeddings, with one to several position axes.

use tch::{Kind, Tensor};

use crate::batch::Batch;
use crate::device::upload;
use crate::error::{Error, Result};

/// Frequencies `rope_theta^(-2j / rotary_dim)` for `j < rotary_dim / 2`, fp32.
///
/// Computed on the CPU in fp32, operation by operation as transformers does: at position 100,000 one
/// more correct bit would show in the angle.
///
/// # Errors
/// [`Error::Torch`] when libtorch refuses.
pub fn inverse_frequencies(rope_theta: f64, rotary_dim: usize) -> Result<Vec<f32>> {
    Ok(inverses(rope_theta, rotary_dim)?.into_iter().map(f32::recip).collect())
}

/// `rope_theta^(2j / rotary_dim)`, fp32.
pub(super) fn inverses(rope_theta: f64, rotary_dim: usize) -> Result<Vec<f32>> {
    let exponents: Vec<f32> =
        (0..rotary_dim).step_by(2).map(|index| index as f32 / rotary_dim as f32).collect();
    let powers = Tensor::f_pow_scalar(rope_theta, &Tensor::f_from_slice(&exponents)?)?;
    Ok(Vec::try_from(&powers)?)
}

/// Which axis (0 time, 1 height, 2 width) each frequency of interleaved M-RoPE follows: height takes
/// the frequencies 1, 4, .. below `3 * sections[1]`, width 2, 5, .. below `3 * sections[2]`, time the
/// rest (Qwen3-VL; Qwen2-VL has whole chunks instead).
///
/// # Errors
/// [`Error::Usage`] when the sections do not add up to the number of frequencies.
pub fn interleaved_mrope_axes(sections: [usize; 3], num_frequencies: usize) -> Result<Vec<i64>> {
    if sections.iter().sum::<usize>() != num_frequencies {
        return Err(Error::usage(format!(
            "mrope_section {sections:?} must add up to half the head dimension, {num_frequencies}"
        )));
    }
    let axis = |frequency: usize| match frequency % 3 {
        1 if frequency < 3 * sections[1] => 1,
        2 if frequency < 3 * sections[2] => 2,
        _ => 0,
    };
    Ok((0..num_frequencies).map(axis).collect())
}

/// Position of every token in its own sample, `[batch, sequence]`, Int64, on the batch's device:
/// how many tokens of the same packed sample precede it. Padding does not count.
///
/// # Errors
/// [`Error::Torch`] when the batch's tensors have different shapes.
pub fn text_positions(batch: &Batch) -> Result<Tensor> {
    let input_ids = &batch.input_ids;
    let tokens = match &batch.attention_mask {
        Some(mask) => mask.f_to_kind(Kind::Int64)?,
        None => input_ids.f_ones_like()?,
    };
    let preceding = tokens.f_cumsum(-1, Kind::Int64)?.f_sub(&tokens)?;
    let Some(segments) = &batch.segments else { return Ok(preceding) };
    let (_, sequence) = segments.size2()?;
    let changes = segments.f_narrow(1, 1, sequence - 1)?.f_ne_tensor(&segments.f_narrow(
        1,
        0,
        sequence - 1,
    )?)?;
    // A sample starts with what precedes its first position; the running maximum carries that on.
    let starts = preceding.f_narrow(1, 1, sequence - 1)?.f_mul(&changes)?;
    let starts = Tensor::f_cat(&[preceding.f_narrow(1, 0, 1)?, starts], 1)?;
    Ok(preceding.f_sub(&starts.f_cummax(1)?.0)?)
}

/// Tables of cosines and sines for [`apply_rotary`], each `[batch, sequence, 1, 2 * num_frequencies]` in
/// `kind`: frequency `j` turns by `positions[axes[j]] * inverse_frequencies[j]`, and the second half repeats
/// the first, but that the first half of the sines is negative: the sign is here once instead of in every
/// block. Angles, cosines and sines are fp32, multiplied by `attention_factor` (1 but for scaled embeddings,
/// [`Yarn::attention_factor`](super::Yarn::attention_factor)) and rounded once.
///
/// `positions` is `[num_axes, batch, sequence]`, Int64; `axes` has one entry per frequency.
///
/// # Errors
/// [`Error::Torch`] when an axis is out of range.
pub fn rotary_tables(
    inverse_frequencies: &[f32],
    axes: &[i64],
    positions: &Tensor,
    attention_factor: f64,
    kind: Kind,
) -> Result<(Tensor, Tensor)> {
    let device = positions.device();
    let axes = upload(&Tensor::f_from_slice(axes)?, device)?;
    let frequencies = upload(&Tensor::f_from_slice(inverse_frequencies)?, device)?;
    let positions = positions.f_index_select(0, &axes)?.f_permute([1, 2, 0])?;
    let angles = positions.f_to_kind(Kind::Float)?.f_mul(&frequencies)?;
    let rounded = |table: Tensor| table.f_mul_scalar(attention_factor)?.f_to_kind(kind);
    let (cos, sin) = (rounded(angles.f_cos()?)?, rounded(angles.f_sin()?)?);
    let cos = Tensor::f_cat(&[&cos, &cos], -1)?;
    let sin = Tensor::f_cat(&[&sin.f_neg()?, &sin], -1)?;
    Ok((cos.f_unsqueeze(2)?, sin.f_unsqueeze(2)?))
}

/// `x * cos + rotate_half(x) * sin`, where `rotate_half` swaps the halves of the last dimension and
/// negates the new first one. In the dtype of `x`, every operation rounded.
///
/// `x` is `[batch, sequence, heads, head_dim]`; the tables are those of [`rotary_tables`], in the same
/// dtype.
///
/// # Errors
/// [`Error::Torch`] when the shapes do not fit.
pub fn apply_rotary(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    // The tables negate: swapping is all that is left, forward and backward.
    let swapped = x.f_roll([x.size4()?.3 / 2], [-1])?;
    Ok(x.f_mul(cos)?.f_add(&swapped.f_mul(sin)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    fn positions(batch: &Batch) -> Vec<Vec<i64>> {
        Vec::try_from(text_positions(batch).unwrap()).unwrap()
    }

    #[test]
    fn axes_of_the_published_sections_are_interleaved() {
        let axes = interleaved_mrope_axes([24, 20, 20], 64).unwrap();
        assert_eq!(axes[..60], [0, 1, 2].repeat(20));
        assert_eq!(axes[60..], [0; 4]);
        let uneven = interleaved_mrope_axes([3, 2, 1], 6).unwrap();
        assert_eq!(uneven, [0, 1, 2, 0, 1, 0]);
        assert!(interleaved_mrope_axes([24, 20, 20], 16).is_err());
    }

    #[test]
    fn every_frequency_turns_by_the_position_on_its_own_axis() {
        let frequencies = inverse_frequencies(100.0, 6).unwrap();
        // [axis, batch 1, sequence 2]
        let positions = Tensor::from_slice(&[1_i64, 2, 30, 40, 500, 600]).view([3, 1, 2]);
        let (cos, sin) =
            rotary_tables(&frequencies, &[0, 1, 2], &positions, 1.0, Kind::Float).unwrap();
        assert_eq!(cos.size(), [1, 2, 1, 6]);
        for (token, axes) in [[1.0, 30.0, 500.0], [2.0, 40.0, 600.0]].into_iter().enumerate() {
            for entry in 0..6 {
                let angle = axes[entry % 3] * 100_f64.powf(-((entry % 3) as f64) / 3.0);
                let at = [0, token as i64, 0, entry as i64];
                let sign = if entry < 3 { -1.0 } else { 1.0 };
                assert!((cos.double_value(&at) - angle.cos()).abs() < 1e-4);
                assert!((sin.double_value(&at) - sign * angle.sin()).abs() < 1e-4);
            }
        }
    }

    #[test]
    fn the_attention_factor_scales_before_the_rounding() {
        let frequencies = inverse_frequencies(10_000.0, 64).unwrap();
        let positions = Tensor::arange(50, (Kind::Int64, Device::Cpu)).view([1, 1, 50]);
        let tables = |factor, kind| {
            let (cos, sin) =
                rotary_tables(&frequencies, &[0; 32], &positions, factor, kind).unwrap();
            Tensor::cat(&[cos, sin], -1)
        };
        let factor = 1.346_573_590_279_972_7;
        let exact = tables(1.0, Kind::Float) * factor;
        assert!(tables(factor, Kind::Float).equal(&exact));
        let rounded_twice = tables(1.0, Kind::BFloat16) * factor;
        let found = tables(factor, Kind::BFloat16);
        assert!(found.equal(&exact.to_kind(Kind::BFloat16)));
        assert!(!found.equal(&rounded_twice));
    }

    #[test]
    fn turning_depends_on_the_distance_alone() {
        let frequencies = inverse_frequencies(10_000.0, 8).unwrap();
        let turn = |vector: &Tensor, position: i64| {
            let position = Tensor::from_slice(&[position]).view([1, 1, 1]);
            let (cos, sin) =
                rotary_tables(&frequencies, &[0; 4], &position, 1.0, Kind::Float).unwrap();
            apply_rotary(&vector.view([1, 1, 1, 8]), &cos, &sin).unwrap()
        };
        let query = (Tensor::arange(8, (Kind::Float, Device::Cpu)) * 1.3).sin();
        let key = (Tensor::arange(8, (Kind::Float, Device::Cpu)) * 0.7).cos();
        let score = |q: i64, k: i64| (turn(&query, q) * turn(&key, k)).sum(None).double_value(&[]);
        assert!((score(3, 1) - score(45, 43)).abs() < 1e-5);
        assert!((score(3, 1) - score(3, 2)).abs() > 1e-2);
    }

    #[test]
    fn halves_are_swapped_and_the_new_first_one_is_negated() {
        let frequencies = inverse_frequencies(10_000.0, 4).unwrap();
        let position = Tensor::from_slice(&[3_i64]).view([1, 1, 1]);
        let (cos, sin) =
            rotary_tables(&frequencies, &[0; 2], &position, 1.0, Kind::Double).unwrap();
        let x = Tensor::from_slice(&[1.0_f64, 2.0, 3.0, 4.0]).view([1, 1, 1, 4]);
        let turned = Vec::<f64>::try_from(apply_rotary(&x, &cos, &sin).unwrap().view([4])).unwrap();
        let angle = [3.0_f64, 0.03];
        let wanted = [
            angle[0].cos() - 3.0 * angle[0].sin(),
            2.0 * angle[1].cos() - 4.0 * angle[1].sin(),
            3.0 * angle[0].cos() + angle[0].sin(),
            4.0 * angle[1].cos() + 2.0 * angle[1].sin(),
        ];
        for (found, wanted) in turned.iter().zip(wanted) {
            assert!((found - wanted).abs() < 1e-6, "{turned:?}");
        }
    }

    #[test]
    fn positions_count_tokens_and_restart_with_each_packed_sample() {
        let ids = Tensor::zeros([2, 5], (Kind::Int64, Device::Cpu));
        let mut batch = Batch::new(ids);
        assert_eq!(positions(&batch), vec![vec![0, 1, 2, 3, 4]; 2]);

        let mask = Tensor::from_slice(&[1_i64, 1, 1, 0, 0, 0, 0, 1, 1, 1]).view([2, 5]);
        batch.attention_mask = Some(mask.to_kind(Kind::Bool));
        assert_eq!(positions(&batch)[0][..3], [0, 1, 2]);
        assert_eq!(positions(&batch)[1][2..], [0, 1, 2]);

        batch.attention_mask = None;
        let segments = Tensor::from_slice(&[0_i64, 0, 1, 1, 1, 7, 3, 3, 3, 4]).view([2, 5]);
        batch.segments = Some(segments);
        assert_eq!(positions(&batch), [[0, 1, 0, 1, 2], [0, 0, 1, 2, 0]]);
    }
}
