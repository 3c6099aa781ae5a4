//! Softmax attention under a pattern that is described rather than spelled out.

use tch::{Kind, Tensor};

use crate::context::AttentionPattern;
use crate::device::{flash_attention, has_flash_attention};
use crate::error::{Error, Result};
use crate::scope::AttentionOptions;

mod eager;
mod full;
mod sinks;
#[cfg(test)]
mod tests;
mod tiled;

/// How attention is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AttentionKernel {
    /// Scores, softmax and sum one after another, rounded where transformers' eager attention rounds; with
    /// sinks that is gpt-oss's, which stays in the dtype of the scores. Memory grows with the square of the
    /// sequence; for parity and for the CPU.
    Eager,
    /// libtorch's fused kernels, fp32 inside: no scores in memory. Without padding and packed samples memory
    /// grows with the sequence, under a window with sequence times window in any case; only a mask for the
    /// full pattern is a square, one for all heads.
    ///
    /// In 16 bits on a GPU, without padding and packed samples, flash attention does sinks and windows too (heads
    /// of a multiple of 8 up to 192); elsewhere sinks become a key, and windows tiles.
    #[default]
    Fused,
}

/// `softmax(scale * query key^T) value` under `pattern` and `options`.
///
/// `query` is `[batch, num_attention_heads, sequence, head_dim]`; `key` and `value` have
/// `num_key_value_heads`, which divides the former. The result has the shape of `query` with the head
/// dimension of `value`. A position that may see nothing (padding) gets finite values; with sinks it gets
/// zeros. A window looks back only: it makes any pattern causal.
///
/// # Errors
/// [`Error::Tensor`] when the shapes do not fit one another or the sinks do not fit the heads,
/// [`Error::Usage`] for a window of no positions.
pub fn attention(
    kernel: AttentionKernel,
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    pattern: &AttentionPattern,
    options: &AttentionOptions<'_>,
) -> Result<Tensor> {
    let call = Call::new(query, key, value, pattern, options)?;
    match (kernel, call.window) {
        (AttentionKernel::Eager, _) => call.eager(),
        _ if call.is_flash() => call.flash(),
        (AttentionKernel::Fused, None) => call.full(),
        (AttentionKernel::Fused, Some(window)) => call.tiled(window),
    }
}

/// Whether `mask` (`[batch, sequence]`, Bool, true where there is a token) has padding only at the end
/// of rows. Under a causal pattern such padding needs no mask, because tokens never see it: whoever
/// still has the batch on the host can leave [`AttentionPattern::key_mask`] out.
///
/// Reads the answer back: on a CUDA tensor the host waits.
///
/// # Errors
/// [`Error::Torch`] when `mask` is no matrix.
pub fn padding_is_on_the_right(mask: &Tensor) -> Result<bool> {
    let pairs = (mask.size2()?.1 - 1).max(0);
    let resumes = mask.f_narrow(1, 1, pairs)?.f_gt_tensor(&mask.f_narrow(1, 0, pairs)?)?;
    Ok(resumes.f_any()?.f_int64_value(&[])? == 0)
}

/// One call, with its sizes checked.
#[derive(Debug)]
struct Call<'a> {
    query: &'a Tensor,
    key: &'a Tensor,
    value: &'a Tensor,
    pattern: &'a AttentionPattern,
    causal: bool,
    scale: f64,
    /// Smaller than the sequence: others hide nothing.
    window: Option<i64>,
    sinks: Option<&'a Tensor>,
    batch: i64,
    heads: i64,
    /// Key heads.
    groups: i64,
    /// Query heads for each of them.
    sharing: i64,
    sequence: i64,
}

impl<'a> Call<'a> {
    fn new(
        query: &'a Tensor,
        key: &'a Tensor,
        value: &'a Tensor,
        pattern: &'a AttentionPattern,
        options: &AttentionOptions<'a>,
    ) -> Result<Self> {
        let (q, k, v) = (query.size(), key.size(), value.size());
        let fits = q.len() == 4
            && k.len() == 4
            && v.len() == 4
            && k[..3] == v[..3]
            && k[1] > 0
            && q[1] % k[1] == 0
            && [q[0], q[2], q[3]] == [k[0], k[2], k[3]];
        if !fits {
            return Err(Error::tensor(
                "query, key, value",
                format!("shapes {q:?}, {k:?} and {v:?} do not fit one another in attention"),
            ));
        }
        let (batch, heads, groups, sequence) = (q[0], q[1], k[1], q[2]);
        let AttentionOptions { scale, window, sinks } = *options;
        if window == Some(0) {
            let message = "an attention window of 0 positions hides every position from itself; 1 is the \
                           smallest, and None is no window";
            return Err(Error::usage(message));
        }
        if let Some(sinks) = sinks
            && (sinks.size() != [heads] || sinks.f_kind()? != query.f_kind()?)
        {
            let message = format!(
                "of shape {:?} in {:?} must be one number for each of {heads} heads in {:?}",
                sinks.size(),
                sinks.kind(),
                query.kind()
            );
            return Err(Error::tensor("sinks", message));
        }
        Ok(Self {
            query,
            key,
            value,
            pattern,
            causal: pattern.causal || window.is_some(),
            scale,
            window: window.map(|window| window as i64).filter(|window| *window < sequence),
            sinks,
            batch,
            heads,
            groups,
            sharing: heads / groups,
            sequence,
        })
    }

    /// Whether a window or sinks, which libtorch's own choice of kernels knows nothing of, are for [`flash`].
    ///
    /// [`flash`]: Self::flash
    fn is_flash(&self) -> bool {
        let head_dim = self.query.size().last().copied().unwrap_or_default();
        (self.window.is_some() || self.sinks.is_some())
            && self.pattern.key_mask.is_none()
            && self.pattern.segments.is_none()
            && matches!(self.query.kind(), Kind::Half | Kind::BFloat16)
            && self.query.numel() > 0
            && head_dim % 8 == 0
            // Wider ones have no backward on some devices.
            && head_dim <= 192
            && self.value.size().last() == Some(&head_dim)
            && has_flash_attention(self.query.device())
    }

    fn flash(&self) -> Result<Tensor> {
        let &Self { query, key, value, sinks, causal, window, scale, .. } = self;
        flash_attention(query, key, value, sinks, causal, window, scale)
    }

    /// Which keys each query sees, Bool, broadcastable to `[batch, heads, sequence, sequence]`.
    /// `None`: all of them.
    fn visible(&self) -> Result<Option<Tensor>> {
        let mut parts = Vec::new();
        if self.causal {
            let square = [self.sequence, self.sequence];
            let causal = Tensor::f_ones(square, (Kind::Bool, self.query.device()))?.f_tril(0)?;
            parts.push(match self.window {
                Some(window) => causal.f_triu(1 - window)?,
                None => causal,
            });
        }
        if let Some(key_mask) = &self.pattern.key_mask {
            parts.push(key_mask.f_unsqueeze(1)?.f_unsqueeze(1)?);
        }
        if let Some(segments) = &self.pattern.segments {
            let of_query = segments.f_unsqueeze(1)?.f_unsqueeze(-1)?;
            parts.push(of_query.f_eq_tensor(&segments.f_unsqueeze(1)?.f_unsqueeze(1)?)?);
        }
        let mut parts = parts.into_iter();
        let Some(first) = parts.next() else { return Ok(None) };
        Ok(Some(parts.try_fold(first, |all, part| all.f_logical_and(&part))?))
    }
}
