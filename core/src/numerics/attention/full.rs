//! Fused attention without a window.

use tch::{Kind, Tensor};

use super::Call;
use super::sinks::Inputs;
use crate::error::Result;

impl Call<'_> {
    pub(super) fn full(&self) -> Result<Tensor> {
        let Self { sharing, sequence, scale, .. } = *self;
        let Inputs { query, mut key, mut value, sink } = self.inputs()?;
        let plain = self.pattern.key_mask.is_none() && self.pattern.segments.is_none();
        if let Some(sink) = &sink {
            key = Tensor::f_cat(&[sink, &key], 2)?;
            value = value.f_constant_pad_nd([0, 0, 1, 0])?;
        }
        let half = matches!(query.kind(), Kind::Half | Kind::BFloat16);
        let mut grouped = sharing > 1;
        // Flash attention takes grouped heads as they are; the kernels for masks and fp32 do not.
        if grouped && !(plain && half) {
            grouped = false;
            (key, value) = (repeat(&key, sharing)?, repeat(&value, sharing)?);
        }
        let kernel = |query: &Tensor, mask: Option<&Tensor>, causal| {
            Tensor::f_scaled_dot_product_attention(
                query, &key, &value, mask, 0.0, causal, scale, grouped,
            )
        };
        let output = match (plain, &sink) {
            (true, None) => kernel(&query, None, self.causal)?,
            // One query more in front, for the sink's place on the diagonal: a causal kernel then needs no
            // mask. Nobody reads what it finds, so it has no gradient.
            (true, Some(_)) => kernel(&query.f_constant_pad_nd([0, 0, 1, 0])?, None, self.causal)?
                .f_narrow(2, 1, sequence)?,
            (false, _) => kernel(&query, self.mask(sink.is_some())?.as_ref(), false)?,
        };
        match sink {
            Some(_) => Ok(output.f_narrow(3, 0, self.value.size4()?.3)?),
            None => Ok(output),
        }
    }

    /// [`visible`](Self::visible), with the sink in front or, without one, every position visible to itself:
    /// tokens are anyway, and padding needs something to normalise by.
    fn mask(&self, has_sink: bool) -> Result<Option<Tensor>> {
        let Some(visible) = self.visible()? else { return Ok(None) };
        if has_sink {
            return Ok(Some(with_sink(&visible)?));
        }
        let itself = Tensor::f_eye(self.sequence, (Kind::Bool, self.query.device()))?;
        Ok(Some(visible.f_logical_or(&itself)?))
    }
}

/// `mask` with one more key in front, which everybody sees.
pub(super) fn with_sink(mask: &Tensor) -> Result<Tensor> {
    let mut size = mask.size();
    if let Some(keys) = size.last_mut() {
        *keys = 1;
    }
    let sink = Tensor::f_ones(size, (Kind::Bool, mask.device()))?;
    Ok(Tensor::f_cat(&[&sink, mask], -1)?)
}

/// Every head of `tensor` so many times in a row.
fn repeat(tensor: &Tensor, times: i64) -> Result<Tensor> {
    let (batch, heads, sequence, width) = tensor.size4()?;
    let wide = tensor.f_unsqueeze(2)?.f_expand([batch, heads, times, sequence, width], false)?;
    Ok(wide.f_reshape([batch, heads * times, sequence, width])?)
}
