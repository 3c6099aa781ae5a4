//! Both kernels against the definition, and what is refused.

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
            let (b, h, i) = (index / heads / sequence, index / sequence % heads, index % sequence);
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

const SCALE: AttentionOptions<'_> = AttentionOptions { scale: 0.3, window: None, sinks: None };
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
            let got = attention(kernel, q, k, v, pattern, &SCALE).unwrap();
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
            let out = attention(kernel, &q, &k, &v, &pattern, &SCALE).unwrap();
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
        let masked = attention(kernel, &q, &k, &v, &masked, &SCALE).unwrap();
        let plain = attention(kernel, &q, &k, &v, &causal(), &SCALE).unwrap();
        let valid = mask(rows).view([2, 1, 6, 1]).to_kind(Kind::Float);
        assert!(error(&(masked * &valid), &(plain * &valid)) < 1e-6);
    }
}

#[test]
fn gradients_of_both_kernels_agree_for_grouped_heads() {
    let gradients = |kernel| {
        let [q, k, v] = heads(6).map(|tensor| tensor.set_requires_grad(true));
        let out = attention(kernel, &q, &k, &v, &causal(), &SCALE).unwrap();
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
    let error = attention(BOTH[0], &q, &key, &v, &causal(), &SCALE).unwrap_err();
    assert!(error.to_string().contains("[2, 3, 6, 8]"), "{error}");
}

#[test]
fn eager_attention_with_sinks_rounds_where_transformers_does() {
    let [q, k, v] = heads(6).map(|tensor| (tensor * 3.0).to_kind(Kind::BFloat16));
    let sinks = Tensor::from_slice(&[0.3, -1.2, 2.1, 0.9]).to_kind(Kind::BFloat16);
    let options = AttentionOptions { sinks: Some(&sinks), window: Some(4), ..SCALE };
    let got = attention(BOTH[0], &q, &k, &v, &causal(), &options).unwrap();

    let repeated = |tensor: &Tensor| tensor.repeat_interleave_self_int(2, 1, None);
    let lowest = f64::from(f32::from_bits(0xFF7F_0000));
    let scores = q.matmul(&repeated(&k).transpose(2, 3)) * 0.3;
    let hidden = Tensor::ones([6, 6], (Kind::Bool, Device::Cpu)).tril(0).triu(-3);
    let scores = scores.masked_fill(&hidden.logical_not(), lowest);
    let column = sinks.view([1, 4, 1, 1]).expand([2, 4, 6, 1], false);
    let scores = Tensor::cat(&[scores, column], -1);
    let finish = |scores: Tensor, kind| {
        let weights = scores.softmax(-1, kind).narrow(-1, 0, 6);
        weights.to_kind(Kind::BFloat16).matmul(&repeated(&v))
    };
    let shifted = &scores - scores.max_dim(-1, true).0;
    assert!(got.equal(&finish(shifted, Kind::BFloat16)));
    // The subtraction has a rounding of its own.
    assert!(!got.equal(&finish(scores, Kind::Float)));
}

#[test]
fn both_kernels_agree_on_sinks_without_causality() {
    let [q, k, v] = heads(6);
    let sinks = Tensor::from_slice(&[0.3_f32, -1.2, 2.1, 0.9]);
    let options = SCALE.sinks(&sinks);
    let [eager, fused] = BOTH.map(|kernel| {
        attention(kernel, &q, &k, &v, &AttentionPattern::default(), &options).unwrap()
    });
    assert!(error(&eager, &fused) < 1e-6);
    let plain = attention(BOTH[0], &q, &k, &v, &AttentionPattern::default(), &SCALE).unwrap();
    assert!(error(&eager, &plain) > 1e-2);
}

#[test]
fn sinks_and_windows_that_make_no_sense_are_refused_saying_why() {
    let [q, k, v] = heads(6);
    let short = wave(&[3], 0.1);
    let half = wave(&[4], 0.1).to_kind(Kind::Half);
    for kernel in BOTH {
        for (options, wanted) in [
            (SCALE.sinks(&short), "[3]"),
            (SCALE.sinks(&half), "Half"),
            (SCALE.window(Some(0)), "0 positions"),
        ] {
            let error = attention(kernel, &q, &k, &v, &causal(), &options).unwrap_err();
            assert!(error.to_string().contains(wanted), "{error}");
        }
    }
}

#[test]
fn a_window_as_long_as_the_sequence_hides_nothing_and_makes_any_pattern_causal() {
    let [q, k, v] = heads(6);
    for kernel in BOTH {
        let plain = attention(kernel, &q, &k, &v, &causal(), &SCALE).unwrap();
        for window in [6, 7, 1000] {
            let pattern = AttentionPattern::default();
            let options = SCALE.window(Some(window));
            let found = attention(kernel, &q, &k, &v, &pattern, &options).unwrap();
            assert!(found.equal(&plain), "{kernel:?} {window}");
        }
    }
}
