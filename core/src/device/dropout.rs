//! Dropout whose mask depends on a seed alone.

use tch::Tensor;

use crate::error::{Error, Result};

/// `x` with each element zeroed with `probability` and the others scaled by `1 / (1 - probability)`.
///
/// Equal seeds and shapes give equal masks, so that a recompute sees the mask of the first pass.
///
/// # Errors
/// [`Error::Usage`] unless `0 <= probability < 1`; [`Error::Torch`] when libtorch refuses.
pub fn dropout(x: &Tensor, probability: f64, seed: u64) -> Result<Tensor> {
    if !(0.0..1.0).contains(&probability) {
        return Err(Error::usage(format!(
            "the dropout probability must be at least 0 and less than 1, not {probability}"
        )));
    }
    let keep = 1.0 - probability;
    let mask: Vec<f32> = (0..x.numel() as u64)
        .map(|position| {
            // SplitMix64 of the position under the seed.
            let mut bits = seed.wrapping_add(position.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            bits ^= bits >> 31;
            let kept = ((bits >> 11) as f64) < keep * (1_u64 << 53) as f64;
            if kept { (1.0 / keep) as f32 } else { 0.0 }
        })
        .collect();
    let mask = Tensor::f_from_slice(&mask)?.f_reshape(x.size())?;
    let mask = mask.f_to_device(x.device())?.f_to_kind(x.kind())?;
    Ok(x.f_mul(&mask)?)
}
