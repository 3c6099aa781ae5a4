//! Softmax attention under a pattern that is described rather than spelled out.

use tch::{Kind, Tensor};

use crate::context::AttentionPattern;
use crate::error::{Error, Result};

/// How attention is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AttentionKernel {
    /// Scores, softmax and sum one after another, rounded where transformers' eager attention rounds.
    /// Memory grows with the square of the sequence; for parity and for the CPU.
    Eager,
    /// libtorch's fused kernels, fp32 inside.
    #[default]
    Fused,
}

/// `softmax(scale * query key^T) value` under `pattern`.
///
/// `query` is `[batch, num_attention_heads, sequence, head_dim]`; `key` and `value` have
/// `num_key_value_heads`, which divides the former. The result has the shape of `query` with the head
/// dimension of `value`. A position that may see nothing (padding) gets finite values.
///
/// # Errors
/// [`Error::Tensor`] when the shapes do not fit one another.
pub fn attention(
    kernel: AttentionKernel,
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    pattern: &AttentionPattern,
    scale: f64,
) -> Result<Tensor> {
    let call = Call::new(query, key, value, pattern, scale)?;
    match kernel {
        AttentionKernel::Eager => call.eager(),
        AttentionKernel::Fused => call.fused(),
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
    scale: f64,
    batch: i64,
    heads: i64,
    groups: i64,
    sequence: i64,
}

impl<'a> Call<'a> {
    fn new(
        query: &'a Tensor,
        key: &'a Tensor,
        value: &'a Tensor,
        pattern: &'a AttentionPattern,
        scale: f64,
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
        Ok(Self { query, key, value, pattern, scale, batch, heads, groups, sequence })
    }

    fn eager(&self) -> Result<Tensor> {
        let &Self { query, key, value, batch, heads, groups, sequence, .. } = self;
        let kind = query.kind();
        // The query heads that share a key head become rows of one product: keys are never repeated.
        let rows = heads / groups * sequence;
        let folded = query.f_reshape([batch, groups, rows, -1])?;
        let scores = folded.f_matmul(&key.f_transpose(2, 3)?)?.f_mul_scalar(self.scale)?;
        let mut scores = scores.f_view([batch, heads, sequence, sequence])?;
        if let Some(visible) = self.visible()? {
            // Replacing instead of adding gives the same weights, and cannot overflow to -inf in fp16.
            scores = scores.f_masked_fill(&visible.f_logical_not()?, lowest(kind)?)?;
        }
        let weights = scores.f_softmax(-1, Kind::Float)?.f_to_kind(kind)?;
        let mixed = weights.f_view([batch, groups, rows, sequence])?.f_matmul(value)?;
        Ok(mixed.f_view([batch, heads, sequence, -1])?)
    }

    fn fused(&self) -> Result<Tensor> {
        let &Self { query, key, value, pattern, scale, heads, groups, sequence, .. } = self;
        let kernel = |key: &Tensor, value: &Tensor, mask: Option<&Tensor>, causal, grouped| {
            Tensor::f_scaled_dot_product_attention(
                query, key, value, mask, 0.0, causal, scale, grouped,
            )
        };
        let plain = pattern.key_mask.is_none() && pattern.segments.is_none();
        let half = matches!(query.kind(), Kind::Half | Kind::BFloat16);
        let grouped = heads != groups;
        // Flash attention takes grouped heads as they are; the kernels for masks and fp32 do not.
        if plain && (half || !grouped) {
            return Ok(kernel(key, value, None, pattern.causal, grouped)?);
        }
        let repeat = |tensor: &Tensor| -> Result<Tensor> {
            let size = tensor.size();
            let wide = [size[0], size[1], heads / groups, size[2], size[3]];
            let wide = tensor.f_unsqueeze(2)?.f_expand(wide, false)?;
            Ok(wide.f_reshape([size[0], heads, size[2], size[3]])?)
        };
        let (key, value) = (repeat(key)?, repeat(value)?);
        if plain {
            return Ok(kernel(&key, &value, None, pattern.causal, false)?);
        }
        // Every token sees itself anyway; padding that does too has something to normalise by.
        let itself = Tensor::f_eye(sequence, (Kind::Bool, query.device()))?;
        let mask = self.visible()?.map(|mask| mask.f_logical_or(&itself)).transpose()?;
        Ok(kernel(&key, &value, mask.as_ref(), false, false)?)
    }

    /// Which keys each query sees, Bool, broadcastable to `[batch, heads, sequence, sequence]`.
    /// `None`: all of them.
    fn visible(&self) -> Result<Option<Tensor>> {
        let mut parts = Vec::new();
        if self.pattern.causal {
            let square = [self.sequence, self.sequence];
            parts.push(Tensor::f_ones(square, (Kind::Bool, self.query.device()))?.f_tril(0)?);
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

/// The lowest finite number.
fn lowest(kind: Kind) -> Result<f64> {
    match kind {
        Kind::Half => Ok(-65_504.0),
        Kind::BFloat16 => Ok(f64::from(f32::from_bits(0xFF7F_0000))),
        Kind::Float => Ok(f64::from(f32::MIN)),
        Kind::Double => Ok(f64::MIN),
        other => Err(Error::usage(format!("attention cannot compute in {other:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// Deterministic numbers in -1..1.
    fn wave(shape: &[i64], step: f64) -> Tensor {
        let count = shape.iter().product::<i64>();
        (Tensor::arange(count, (Kind::Float, Device::Cpu)) * step).sin().view(shape)
    }

    fn heads(sequence: i64) -> [Tensor; 3] {
        [
            wave(&[2, 4, sequence, 8], 0.37),
            wave(&[2, 2, sequence, 8], 0.91),
            wave(&[2, 2, sequence, 6], 1.73),
        ]
    }

    fn mask(rows: [[i64; 6]; 2]) -> Tensor {
        Tensor::from_slice2(&rows).to_kind(Kind::Bool)
    }

    fn causal() -> AttentionPattern {
        AttentionPattern { causal: true, ..Default::default() }
    }

    fn error(a: &Tensor, b: &Tensor) -> f64 {
        (a - b).abs().max().double_value(&[])
    }

    /// Whether in this row this query sees this key.
    type Sees<'a> = &'a dyn Fn(usize, usize, usize) -> bool;

    /// The definition, one query at a time in fp64.
    fn by_definition([q, k, v]: &[Tensor; 3], scale: f64, sees: Sees<'_>) -> Tensor {
        let (batch, heads, sequence) = (2_usize, 4_usize, 6_usize);
        let rows: Vec<Tensor> = (0..batch * heads * sequence)
            .map(|index| {
                let (b, h, i) =
                    (index / heads / sequence, index / sequence % heads, index % sequence);
                let at = |tensor: &Tensor, head: usize, place: usize| {
                    tensor.get(b as i64).get(head as i64).get(place as i64).to_kind(Kind::Double)
                };
                let mut total = 0.0;
                let mut sum = Tensor::zeros([6], (Kind::Double, Device::Cpu));
                for j in (0..sequence).filter(|j| sees(b, i, *j)) {
                    let score = at(q, h, i).dot(&at(k, h / 2, j)).double_value(&[]);
                    total += (score * scale).exp();
                    sum += at(v, h / 2, j) * (score * scale).exp();
                }
                sum / total
            })
            .collect();
        let size = [batch as i64, heads as i64, sequence as i64, 6];
        Tensor::stack(&rows, 0).view(size).to_kind(Kind::Float)
    }

    const BOTH: [AttentionKernel; 2] = [AttentionKernel::Eager, AttentionKernel::Fused];

    #[test]
    fn both_kernels_compute_the_definition_under_every_pattern() {
        let inputs = heads(6);
        let [q, k, v] = &inputs;
        let left = [[0, 0, 1, 1, 1, 1], [1; 6]];
        let packed = [[0_i64, 0, 0, 4, 4, 4], [1, 2, 2, 2, 2, 3]];
        let with_mask = AttentionPattern { key_mask: Some(mask(left)), ..causal() };
        let segments = Some(Tensor::from_slice2(&packed));
        let with_segments = AttentionPattern { segments, ..causal() };
        let sees_left = |b: usize, i: usize, j: usize| i == j || (j <= i && left[b][j] == 1);
        let cases: [(AttentionPattern, Sees<'_>); 4] = [
            (AttentionPattern::default(), &|_, _, _| true),
            (causal(), &|_, i, j| j <= i),
            (with_mask, &sees_left),
            (with_segments, &|b, i, j| j <= i && packed[b][i] == packed[b][j]),
        ];
        for (case, (pattern, sees)) in cases.iter().enumerate() {
            let wanted = by_definition(&inputs, 0.3, sees);
            for kernel in BOTH {
                let got = attention(kernel, q, k, v, pattern, 0.3).unwrap();
                // Rows of padding may hold anything finite.
                let valid = if case == 2 { mask(left) } else { mask([[1; 6]; 2]) };
                let valid = valid.view([2, 1, 6, 1]).to_kind(Kind::Float);
                let error = error(&(&got * &valid), &(&wanted * &valid));
                assert!(error < 1e-5, "case {case} {kernel:?}: {error}");
            }
        }
    }

    #[test]
    fn a_row_that_sees_nothing_is_finite_forward_and_backward() {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            for kernel in BOTH {
                let [q, k, v] = heads(6).map(|tensor| {
                    // Large scores: adding the lowest number to them would overflow in fp16.
                    (tensor * 30.0).to_kind(kind).set_requires_grad(true)
                });
                let key_mask = Some(mask([[0; 6], [0, 0, 0, 1, 1, 1]]));
                let pattern = AttentionPattern { key_mask, ..causal() };
                let out = attention(kernel, &q, &k, &v, &pattern, 0.3).unwrap();
                out.to_kind(Kind::Float).sum(None).backward();
                for tensor in [out, q.grad(), k.grad(), v.grad()] {
                    let finite = tensor.isfinite().all().int64_value(&[]);
                    assert_eq!(finite, 1, "{kernel:?} {kind:?}");
                }
            }
        }
    }

    #[test]
    fn padding_on_the_right_needs_no_mask_under_causal_attention() {
        let rows = [[1; 6], [1, 1, 1, 0, 0, 0]];
        assert!(padding_is_on_the_right(&mask(rows)).unwrap());
        assert!(!padding_is_on_the_right(&mask([[1; 6], [0, 1, 1, 0, 0, 0]])).unwrap());
        assert!(!padding_is_on_the_right(&mask([[1, 0, 1, 1, 1, 1], [1; 6]])).unwrap());
        let [q, k, v] = heads(6);
        for kernel in BOTH {
            let masked = AttentionPattern { key_mask: Some(mask(rows)), ..causal() };
            let masked = attention(kernel, &q, &k, &v, &masked, 0.3).unwrap();
            let plain = attention(kernel, &q, &k, &v, &causal(), 0.3).unwrap();
            let valid = mask(rows).view([2, 1, 6, 1]).to_kind(Kind::Float);
            assert!(error(&(masked * &valid), &(plain * &valid)) < 1e-6);
        }
    }

    #[test]
    fn gradients_of_both_kernels_agree_for_grouped_heads() {
        let gradients = |kernel| {
            let [q, k, v] = heads(6).map(|tensor| tensor.set_requires_grad(true));
            let out = attention(kernel, &q, &k, &v, &causal(), 0.3).unwrap();
            (&out * wave(&[2, 4, 6, 6], 0.11)).sum(None).backward();
            [q.grad(), k.grad(), v.grad()]
        };
        for (eager, fused) in gradients(BOTH[0]).iter().zip(gradients(BOTH[1])) {
            assert!(error(eager, &fused) < 1e-5);
        }
    }

    #[test]
    fn heads_that_do_not_group_are_refused_with_their_shapes() {
        let [q, _, v] = heads(6);
        let key = wave(&[2, 3, 6, 8], 0.5);
        let error = attention(BOTH[0], &q, &key, &v, &causal(), 0.3).unwrap_err();
        assert!(error.to_string().contains("[2, 3, 6, 8]"), "{error}");
    }
}
