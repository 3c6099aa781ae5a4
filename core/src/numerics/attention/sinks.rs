//! Attention sinks for kernels that know of none.
//!
//! A sink becomes one more key, in front of the others, with a value of zeros. It has nothing but columns
//! that ordinary keys leave empty: two for each query head that shares the key head, in which that head's
//! queries hold ones. So every head finds its own sink as the product with that key, unscaled because the
//! key holds `sink / scale`, in two parts because one of them would be rounded to 8 bits in bf16. Gradients
//! of all inputs are those of the kernel.

use tch::{Kind, Tensor};

use super::Call;
use crate::error::Result;

/// What goes to a kernel.
#[derive(Debug)]
pub(super) struct Inputs {
    pub(super) query: Tensor,
    pub(super) key: Tensor,
    pub(super) value: Tensor,
    /// The keys of the sinks, `[batch, num_key_value_heads, 1, _]`, as wide as the others. Their values are
    /// zeros.
    pub(super) sink: Option<Tensor>,
}

impl Call<'_> {
    /// The inputs, wider where there are sinks. What is more than `value`'s width in the result is to be
    /// cut off.
    pub(super) fn inputs(&self) -> Result<Inputs> {
        let &Self { query, key, value, scale, batch, heads, groups, sharing, sequence, .. } = self;
        let Some(sinks) = self.sinks else {
            let [query, key, value] = [query, key, value].map(Tensor::shallow_clone);
            return Ok(Inputs { query, key, value, sink: None });
        };
        let (kind, device) = (query.kind(), query.device());
        let (_, _, _, head_dim) = query.size4()?;
        // Fused kernels want widths of whole 16 bytes.
        let columns = 2 * sharing;
        let wide = head_dim + (columns as u64).next_multiple_of(8) as i64;
        let widen = |tensor: &Tensor, width: i64| -> Result<Tensor> {
            let missing = (width - tensor.size4()?.3).max(0);
            Ok(tensor.f_constant_pad_nd([0, missing])?)
        };

        let exact_kind = if kind == Kind::Double { Kind::Double } else { Kind::Float };
        let exact = sinks.f_to_kind(exact_kind)?.f_div_scalar(scale)?;
        let high = exact.f_to_kind(kind)?;
        let low = exact.f_detach()?.f_sub(&high.f_detach()?)?.f_to_kind(kind)?;
        let parts = Tensor::f_stack(&[high, low], -1)?.f_view([1, groups, 1, columns])?;
        let empty = Tensor::f_zeros([1, groups, 1, head_dim], (kind, device))?;
        let sink = widen(&Tensor::f_cat(&[empty, parts], -1)?, wide)?;

        let own = Tensor::f_eye(sharing, (kind, device))?.f_unsqueeze(-1)?;
        let own = own.f_expand([groups, sharing, sharing, 2], false)?;
        let own = own.f_reshape([1, heads, 1, columns])?;
        let own = own.f_expand([batch, heads, sequence, columns], false)?;
        let query = widen(&Tensor::f_cat(&[query, &own], -1)?, wide)?;
        Ok(Inputs {
            query,
            key: widen(key, wide)?,
            // Flash attention wants values as wide as keys.
            value: widen(value, wide)?,
            sink: Some(sink.f_expand([batch, groups, 1, wide], false)?),
        })
    }
}
