//! MXFP4: matrices in four bits per number and one exponent per 32 of them.
//!
//! Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification" 1.0: E2M1 codes with E8M0
//! scales. Byte `b` of a group holds element `2b` in its low half and `2b + 1` in its high half, as gpt-oss
//! was published. A number is `code * 2^(scale - 127)`; every one is exact in bf16 and fp32, as long as it is
//! smaller than their largest one. Scale 255 is not a number, and makes none of its 32.

use tch::{Device, Kind, Tensor};

use crate::device::upload;
use crate::error::{Error, Result};

/// Elements that share a scale.
pub(crate) const GROUP: i64 = 32;
/// Bytes of their codes.
const GROUP_BYTES: i64 = GROUP / 2;
/// What the codes 0 to 7 stand for; 8 to 15 are the same below zero.
const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
/// Between two magnitudes; what lies on one of these goes to the smaller.
const BOUNDS: [f32; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
/// Exponent of the largest magnitude.
const LARGEST_EXPONENT: i64 = 2;
const SCALE_BIAS: i64 = 127;
/// The largest scale with which all numbers are finite in fp32.
const LARGEST_FINITE: i64 = 252;

/// Numbers packed in MXFP4 along their last dimension.
#[derive(Debug)]
pub struct Mxfp4 {
    blocks: Tensor,
    scales: Tensor,
}

impl Mxfp4 {
    /// Codes `[.., num_groups, 16]` and scales `[.., num_groups]`, both U8, as checkpoints store them.
    ///
    /// # Errors
    /// [`Error::Tensor`] naming `blocks` or `scales` for another dtype or shape.
    pub fn new(blocks: Tensor, scales: Tensor) -> Result<Self> {
        let (size, kinds) = (blocks.size(), [blocks.f_kind()?, scales.f_kind()?]);
        if kinds[0] != Kind::Uint8 || size.len() < 2 || size.last() != Some(&GROUP_BYTES) {
            let message = format!("are {:?} {size:?}, but must be U8 [.., groups, 16]", kinds[0]);
            return Err(Error::tensor("blocks", message));
        }
        if kinds[1] != Kind::Uint8 || scales.size() != size[..size.len() - 1] {
            let message = format!(
                "are {:?} {:?}, but blocks {size:?} need U8 {:?}",
                kinds[1],
                scales.size(),
                &size[..size.len() - 1]
            );
            return Err(Error::tensor("scales", message));
        }
        Ok(Self { blocks, scales })
    }

    /// Rounds real numbers `[.., 32 * num_groups]`. Of two scales each group takes the one with the smaller
    /// squared error: the one of the specification, which brings the group's largest magnitude between 4 and 8
    /// and cuts it off at 6, or twice that. A group whose largest number is hardly below a power of two would
    /// lose a quarter of it with the former. Ties go to the smaller magnitude, and to the smaller scale. What
    /// was unpacked is packed without loss.
    ///
    /// # Errors
    /// [`Error::Tensor`] naming `values` when they are no real numbers, not finite, or not a multiple of 32.
    pub fn pack(values: &Tensor) -> Result<Self> {
        let size = values.size();
        let Some((last, outer)) = size.split_last().filter(|(last, _)| **last % GROUP == 0) else {
            let message =
                format!("{size:?} cannot be packed: the last dimension is no multiple of 32");
            return Err(Error::tensor("values", message));
        };
        if !values.is_floating_point() {
            let message =
                format!("are {:?}, but only real numbers can be packed", values.f_kind()?);
            return Err(Error::tensor("values", message));
        }
        let grouped = |tail: &[i64]| [outer, &[last / GROUP], tail].concat();
        let groups = values.f_to_kind(Kind::Float)?.f_reshape(grouped(&[GROUP]))?;
        let largest = groups.f_abs()?.f_amax([-1_i64].as_slice(), false)?;
        if !bool::try_from(largest.f_isfinite()?.f_all()?)? {
            return Err(Error::tensor(
                "values",
                "are not all finite, so that they cannot be packed",
            ));
        }
        // The fraction is in [0.5, 1), so that the exponent is one more than that of the leading bit.
        let exponents = largest.f_frexp()?.1.f_sub_scalar(1 + LARGEST_EXPONENT)?;
        let exponents = exponents.f_masked_fill(&largest.f_eq(0)?, -SCALE_BIAS)?;
        let scales = exponents.f_clamp(-SCALE_BIAS, SCALE_BIAS)?.f_add_scalar(SCALE_BIAS)?;
        // With a larger scale than that, 4 is infinite in fp32.
        let twice = scales.f_add_scalar(1)?.f_clamp_max(LARGEST_FINITE)?.f_maximum(&scales)?;
        let (magnitudes, errors) = round(&groups, &scales)?;
        let (magnitudes_at_twice, errors_at_twice) = round(&groups, &twice)?;
        // Both errors are in units of their scale.
        let is_better = errors_at_twice.f_mul_scalar(4)?.f_lt_tensor(&errors)?;
        let scales = twice.f_where_self(&is_better, &scales)?;
        let magnitudes =
            magnitudes_at_twice.f_where_self(&is_better.f_unsqueeze(-1)?, &magnitudes)?;
        let signs = groups.f_signbit()?.f_to_kind(Kind::Int)?.f_mul_scalar(8)?;
        let codes = magnitudes.f_add(&signs)?.f_view(grouped(&[GROUP_BYTES, 2]).as_slice())?;
        let (low, high) = (codes.f_select(-1, 0)?, codes.f_select(-1, 1)?);
        let blocks = high.f_mul_scalar(16)?.f_add(&low)?.f_to_kind(Kind::Uint8)?;
        Self::new(blocks, scales.f_to_kind(Kind::Uint8)?)
    }

    /// The numbers, `[.., 32 * num_groups]` in `kind`.
    ///
    /// # Errors
    /// [`Error::NotSupported`] for other kinds than fp64, fp32, bf16 and fp16; [`Error::OutOfMemory`].
    pub fn unpack(&self, kind: Kind) -> Result<Tensor> {
        let (work_kind, pair_kind) = match kind {
            Kind::Double => (kind, Kind::ComplexDouble),
            Kind::BFloat16 => (kind, Kind::Int),
            // The range of fp16 is too small for the scales alone.
            Kind::Float | Kind::Half => (Kind::Float, Kind::Int64),
            _ => {
                return Err(Error::NotSupported {
                    operation: "unpacking MXFP4",
                    implementer: format!("{kind:?}"),
                });
            }
        };
        let device = self.blocks.device();
        // Both numbers of a byte as one element: several times faster than as a row of two.
        let pairs = pairs(work_kind, device)?.f_view_dtype(pair_kind)?.f_view([256])?;
        let mut values = lookup(&pairs, &self.blocks)?.f_view_dtype(work_kind)?;
        let scales = lookup(&powers(work_kind, device)?, &self.scales)?.f_unsqueeze(-1)?;
        let values = values.f_mul_(&scales)?.f_view(self.size().as_slice())?;
        Ok(if work_kind == kind { values } else { values.f_to_kind(kind)? })
    }

    /// The size of what [`Mxfp4::unpack`] returns.
    pub fn size(&self) -> Vec<i64> {
        let mut size = self.scales.size();
        if let Some(last) = size.last_mut() {
            *last *= GROUP;
        }
        size
    }

    /// Codes, `[.., num_groups, 16]`, U8.
    pub fn blocks(&self) -> &Tensor {
        &self.blocks
    }

    /// Exponents, `[.., num_groups]`, U8.
    pub fn scales(&self) -> &Tensor {
        &self.scales
    }

    /// Another handle to the same memory.
    pub(crate) fn shallow_clone(&self) -> Self {
        Self { blocks: self.blocks.shallow_clone(), scales: self.scales.shallow_clone() }
    }

    /// `length` of the outermost dimension, without a copy.
    pub(crate) fn narrow(&self, start: i64, length: i64) -> Result<Self> {
        let part = |tensor: &Tensor| tensor.f_narrow(0, start, length);
        Ok(Self { blocks: part(&self.blocks)?, scales: part(&self.scales)? })
    }

    /// One of the outermost dimension, without a copy.
    pub(crate) fn select(&self, position: i64) -> Result<Self> {
        let one = |tensor: &Tensor| tensor.f_select(0, position);
        Ok(Self { blocks: one(&self.blocks)?, scales: one(&self.scales)? })
    }
}

/// The nearest magnitudes of `groups`, `[.., 32]`, by `scales`, `[..]`: their codes, Int, and the sum of the
/// squared errors of each group, in units of its scale.
fn round(groups: &Tensor, scales: &Tensor) -> Result<(Tensor, Tensor)> {
    let device = groups.device();
    let inverse = scales.f_mul_scalar(-1)?.f_add_scalar(2 * SCALE_BIAS)?;
    let inverse = lookup(&powers(Kind::Float, device)?, &inverse)?.f_unsqueeze(-1)?;
    let scaled = groups.f_abs()?.f_mul(&inverse)?;
    let bounds = upload(&Tensor::f_from_slice(&BOUNDS)?, device)?;
    let magnitudes = scaled.f_bucketize(&bounds, true, false)?;
    let rounded = lookup(&upload(&Tensor::f_from_slice(&MAGNITUDES)?, device)?, &magnitudes)?;
    let errors = scaled.f_sub(&rounded)?.f_square()?;
    Ok((magnitudes, errors.f_sum_dim_intlist([-1_i64].as_slice(), false, Kind::Float)?))
}

/// Rows of `table` by bytes or other whole numbers.
fn lookup(table: &Tensor, positions: &Tensor) -> Result<Tensor> {
    let rows = positions.f_reshape([-1])?.f_to_kind(Kind::Int)?;
    let size = [positions.size(), table.size()[1..].to_vec()].concat();
    Ok(table.f_index_select(0, &rows)?.f_view(size.as_slice())?)
}

/// The two numbers of every byte of codes, `[256, 2]`.
fn pairs(kind: Kind, device: Device) -> Result<Tensor> {
    let value = |code: usize| {
        let magnitude = MAGNITUDES[code % 8];
        if code < 8 { magnitude } else { -magnitude }
    };
    let values: Vec<f32> = (0..256).flat_map(|byte| [value(byte % 16), value(byte / 16)]).collect();
    upload(&Tensor::f_from_slice(&values)?.f_view([256, 2])?.f_to_kind(kind)?, device)
}

/// What every scale stands for, `[256]`.
fn powers(kind: Kind, device: Device) -> Result<Tensor> {
    let power = |scale: u32| match scale {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits(scale << 23),
    };
    let values: Vec<f32> = (0..256).map(power).collect();
    upload(&Tensor::f_from_slice(&values)?.f_to_kind(kind)?, device)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[u8], size: &[i64]) -> Tensor {
        Tensor::from_slice(values).view(size)
    }

    /// All sixteen codes, twice, with every scale.
    fn everything() -> Mxfp4 {
        let group: Vec<u8> = (0..16).map(|b| (b * 2 % 16) | ((b * 2 + 1) % 16) << 4).collect();
        let scales: Vec<u8> = (0..=255).collect();
        Mxfp4::new(bytes(&group.repeat(256), &[4, 64, 16]), bytes(&scales, &[4, 64])).unwrap()
    }

    #[test]
    fn every_code_with_every_scale_is_exact_in_every_kind_that_can_hold_it() {
        let packed = everything();
        assert_eq!(packed.size(), [4, 2048]);
        let double: Vec<f64> =
            Vec::try_from(packed.unpack(Kind::Double).unwrap().view(-1)).unwrap();
        for (position, found) in double.iter().enumerate() {
            let (scale, code) = ((position / 32) as i32, position % 16);
            let sign = if code < 8 { 1.0 } else { -1.0 };
            let wanted = sign * f64::from(MAGNITUDES[code % 8]) * 2.0_f64.powi(scale - 127);
            match scale {
                255 => assert!(found.is_nan()),
                _ => assert_eq!(found.to_bits(), wanted.to_bits(), "code {code} scale {scale}"),
            }
        }
        let double = packed.unpack(Kind::Double).unwrap();
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            let found = packed.unpack(kind).unwrap();
            // What is too large becomes infinite, as in any conversion.
            let wanted = double.to_kind(Kind::Float).to_kind(kind);
            let is_equal =
                found.eq_tensor(&wanted).logical_or(&found.isnan().logical_and(&wanted.isnan()));
            assert_eq!((found.kind(), bool::try_from(is_equal.all()).unwrap()), (kind, true));
        }
        assert!(matches!(packed.unpack(Kind::Int8), Err(Error::NotSupported { .. })));
    }

    #[test]
    fn packing_takes_the_nearest_code_and_the_smaller_of_two() {
        // The largest is 5.5: scale 127. 0.25 lies between 0 and 0.5, and 5 between 4 and 6.
        let mut values = vec![0.0_f32; 64];
        values[..9].copy_from_slice(&[5.5, 0.25, 0.26, -0.75, -0.76, 2.5, 2.51, 5.0, -0.1]);
        // 7.9 would be cut off at 6; with twice the scale it is 4, and a sixteenth of it nothing.
        values[32..35].copy_from_slice(&[7.9 / 1024.0, -7.9 / 16_384.0, 1e-9]);
        let packed = Mxfp4::pack(&Tensor::from_slice(&values).view([1, 64])).unwrap();
        let scales: Vec<u8> = Vec::try_from(packed.scales().view(-1)).unwrap();
        assert_eq!(scales, [127, 118]);
        let blocks: Vec<u8> = Vec::try_from(packed.blocks().view(-1)).unwrap();
        assert_eq!(blocks[..5], [0x07, 0x91, 0x4a, 0x65, 0x08]);
        assert_eq!(blocks[16..18], [0x86, 0x00]);
        let zeros = Mxfp4::pack(&Tensor::zeros([3, 32], (Kind::Half, Device::Cpu))).unwrap();
        assert_eq!((zeros.blocks().size(), zeros.scales().size()), (vec![3, 1, 16], vec![3, 1]));
        assert_eq!(
            (zeros.blocks().max(), zeros.scales().max()),
            (Tensor::from(0_u8), Tensor::from(0_u8))
        );
    }

    #[test]
    fn a_change_too_small_for_the_codes_leaves_them_as_they_are() {
        // Groups whose largest code is 4, as every second one is where real weights were packed.
        let codes = [0x69_u8, 0xa1, 0x25, 0xcb].repeat(8);
        let packed = Mxfp4::new(bytes(&codes, &[2, 1, 16]), bytes(&[120, 0], &[2, 1])).unwrap();
        let values = packed.unpack(Kind::Float).unwrap();
        let huge = Tensor::full([1, 32], 3.3e38, (Kind::Float, Device::Cpu));
        let huge = Mxfp4::pack(&huge).unwrap().unpack(Kind::Float).unwrap();
        assert!(bool::try_from(huge.isfinite().all()).unwrap());
        for factor in [0.99, 0.9999, 1.0001, 1.01] {
            let again = Mxfp4::pack(&(&values * factor)).unwrap();
            assert_eq!(again.unpack(Kind::Float).unwrap(), values, "{factor}");
        }
    }

    #[test]
    fn a_group_takes_the_better_of_two_scales() {
        let values = Tensor::randn([64, 320], (Kind::Float, Device::Cpu));
        let error = |packed: &Mxfp4| -> Tensor {
            let error = (packed.unpack(Kind::Float).unwrap() - &values).square();
            error.view([64, 10, 32]).sum_dim_intlist([-1_i64].as_slice(), false, Kind::Float)
        };
        let packed = Mxfp4::pack(&values).unwrap();
        for step in [-1, 1] {
            // Every code that there is, with the neighbouring scale.
            let scales = packed.scales().to_kind(Kind::Int) + step;
            let groups = values.view([64, 10, 32]);
            let (magnitudes, _) = round(&groups, &scales).unwrap();
            let codes = magnitudes + groups.signbit().to_kind(Kind::Int) * 8;
            let pairs = codes.view([64, 10, 16, 2]);
            let blocks = (pairs.select(-1, 1) * 16 + pairs.select(-1, 0)).to_kind(Kind::Uint8);
            let other = Mxfp4::new(blocks, scales.to_kind(Kind::Uint8)).unwrap();
            assert_eq!(
                error(&other).lt_tensor(&error(&packed)).sum(Kind::Int64),
                Tensor::from(0_i64)
            );
        }
    }

    #[test]
    fn what_was_unpacked_is_packed_without_loss() {
        let finite = everything().blocks;
        // Exponents whose numbers are all finite.
        let scales: Vec<u8> = (0..=252).chain([0; 3]).collect();
        let packed = Mxfp4::new(finite.view([256, 1, 16]), bytes(&scales, &[256, 1])).unwrap();
        for kind in [Kind::Float, Kind::BFloat16] {
            let again = Mxfp4::pack(&packed.unpack(kind).unwrap()).unwrap();
            assert_eq!(
                (&again.blocks, &again.scales),
                (&packed.blocks, &packed.scales),
                "{kind:?}"
            );
        }
        // Groups of small codes get another scale, and keep their values.
        let small = bytes(&[0x9a_u8; 32], &[2, 1, 16]);
        let small = Mxfp4::new(small, bytes(&[0, 120], &[2, 1])).unwrap();
        let values = small.unpack(Kind::Float).unwrap();
        assert_eq!(Mxfp4::pack(&values).unwrap().unpack(Kind::Float).unwrap(), values);
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let zeros = |size: &[i64], kind| Tensor::zeros(size, (kind, Device::Cpu));
        let byte = Kind::Uint8;
        let new = |blocks, scales| Mxfp4::new(blocks, scales).unwrap_err().to_string();
        for (found, parts) in [
            (new(zeros(&[2, 3, 16], Kind::Int8), zeros(&[2, 3], byte)), ["'blocks'", "Int8"]),
            (new(zeros(&[2, 3, 8], byte), zeros(&[2, 3], byte)), ["'blocks'", "[2, 3, 8]"]),
            (new(zeros(&[2, 3, 16], byte), zeros(&[2, 4], byte)), ["'scales'", "[2, 4]"]),
            (new(zeros(&[2, 3, 16], byte), zeros(&[2, 3], Kind::Half)), ["'scales'", "Half"]),
            (
                Mxfp4::pack(&zeros(&[2, 33], Kind::Float)).unwrap_err().to_string(),
                ["'values'", "32"],
            ),
            (Mxfp4::pack(&zeros(&[2, 32], byte)).unwrap_err().to_string(), ["'values'", "Uint8"]),
            (
                Mxfp4::pack(&(zeros(&[32], Kind::Float) / 0.0)).unwrap_err().to_string(),
                ["'values'", "finite"],
            ),
        ] {
            assert!(parts.iter().all(|part| found.contains(part)), "{found}");
        }
    }
}
