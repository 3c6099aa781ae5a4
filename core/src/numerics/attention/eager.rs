//! Attention step by step, as transformers' eager functions do it.

use tch::{Kind, Tensor};

use super::Call;
use crate::error::{Error, Result};

impl Call<'_> {
    pub(super) fn eager(&self) -> Result<Tensor> {
        let &Self { query, key, value, batch, heads, groups, sharing, sequence, .. } = self;
        let kind = query.kind();
        // The query heads that share a key head become rows of one product: keys are never repeated.
        let rows = sharing * sequence;
        let folded = query.f_reshape([batch, groups, rows, -1])?;
        let scores = folded.f_matmul(&key.f_transpose(2, 3)?)?.f_mul_scalar(self.scale)?;
        let mut scores = scores.f_view([batch, heads, sequence, sequence])?;
        if let Some(visible) = self.visible()? {
            // Replacing instead of adding gives the same weights, and cannot overflow to -inf in fp16.
            scores = scores.f_masked_fill(&visible.f_logical_not()?, lowest(kind)?)?;
        }
        let weights = match self.sinks {
            Some(sinks) => {
                let column = sinks.f_view([1, heads, 1, 1])?;
                let column = column.f_expand([batch, heads, sequence, 1], false)?;
                let scores = Tensor::f_cat(&[scores, column], -1)?;
                let (largest, _) = scores.f_max_dim(-1, true)?;
                scores.f_sub(&largest)?.f_softmax(-1, kind)?.f_narrow(-1, 0, sequence)?
            }
            None => scores.f_softmax(-1, Kind::Float)?.f_to_kind(kind)?,
        };
        let mixed = weights.f_reshape([batch, groups, rows, sequence])?.f_matmul(value)?;
        Ok(mixed.f_view([batch, heads, sequence, -1])?)
    }
}

/// The lowest finite number, in the softmax too.
fn lowest(kind: Kind) -> Result<f64> {
    match kind {
        Kind::Half => Ok(-65_504.0),
        Kind::BFloat16 => Ok(f64::from(f32::from_bits(0xFF7F_0000))),
        // The softmax is in fp32 for fp64 too.
        Kind::Float | Kind::Double => Ok(f64::from(f32::MIN)),
        other => Err(Error::usage(format!("attention cannot compute in {other:?}"))),
    }
}
