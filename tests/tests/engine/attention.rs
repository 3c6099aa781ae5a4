//! Attention with sinks, windows, padding and packed samples, against the definition.

use blockstreamer_core::context::AttentionPattern;
use blockstreamer_core::device::{grad, memory_stats, reset_peak_memory, set_deterministic};
use blockstreamer_core::numerics::{AttentionKernel, attention};
use blockstreamer_core::scope::AttentionOptions;
use tch::{Device, Kind, Tensor};

use crate::experts::assert_near;
use crate::rig::device;

const BATCH: i64 = 2;
const HEAD_DIM: i64 = 16;
const WINDOW: usize = 5;
/// Around one and several windows, none of which divides the last one.
const LENGTHS: [i64; 5] = [1, 4, 5, 6, 18];

/// Values in [-1, 1) that depend on nothing but `salt` and the position.
fn values(salt: i64, size: &[i64]) -> Tensor {
    let numbers: Vec<f32> = (0..size.iter().product::<i64>())
        .map(|i| ((i * 7919 + salt * 104_729 + 13) % 2017) as f32 / 1008.5 - 1.0)
        .collect();
    Tensor::from_slice(&numbers).reshape(size).to_device(device())
}

/// Which rows hold padding where.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Padding {
    None,
    /// A third of the second row in front, half of it behind.
    Around,
    /// The first half of the first row.
    Left,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    sequence: i64,
    heads: i64,
    groups: i64,
    scale: f64,
    window: Option<usize>,
    has_sinks: bool,
    padding: Padding,
    is_packed: bool,
}

impl Case {
    /// Every combination.
    fn all() -> Vec<Self> {
        let mut cases = Vec::new();
        for sequence in LENGTHS {
            for (heads, groups, scale) in [(4, 2, 0.25), (8, 1, 0.3), (3, 3, 0.25)] {
                for window in [None, Some(WINDOW)] {
                    for has_sinks in [false, true] {
                        for padding in [Padding::None, Padding::Around, Padding::Left] {
                            for is_packed in [false, true] {
                                cases.push(Self {
                                    sequence,
                                    heads,
                                    groups,
                                    scale,
                                    window,
                                    has_sinks,
                                    padding,
                                    is_packed,
                                });
                            }
                        }
                    }
                }
            }
        }
        cases
    }

    fn is_token(&self, row: i64, place: i64) -> bool {
        match (self.padding, row) {
            (Padding::Around, 1) => {
                place >= self.sequence / 3 && place < self.sequence - self.sequence / 2
            }
            (Padding::Left, 0) => place >= self.sequence / 2,
            _ => true,
        }
    }

    fn segment(&self, row: i64, place: i64) -> i64 {
        match self.is_packed {
            // Samples of 4 in one row and of 7 in the other.
            true => place / (4 + 3 * row),
            false => 0,
        }
    }

    fn sees(&self, row: i64, query: i64, key: i64) -> bool {
        key <= query
            && self.window.is_none_or(|window| query - key < window as i64)
            && self.is_token(row, key)
            && self.segment(row, query) == self.segment(row, key)
    }

    fn table<T: tch::kind::Element>(&self, entry: impl Fn(i64, i64) -> T) -> Tensor {
        let places = (0..BATCH).flat_map(|row| (0..self.sequence).map(move |place| (row, place)));
        let entries: Vec<T> = places.map(|(row, place)| entry(row, place)).collect();
        Tensor::from_slice(&entries).view([BATCH, self.sequence]).to_device(device())
    }

    fn pattern(&self) -> AttentionPattern {
        AttentionPattern {
            causal: true,
            key_mask: (self.padding != Padding::None)
                .then(|| self.table(|row, place| self.is_token(row, place))),
            segments: self.is_packed.then(|| self.table(|row, place| self.segment(row, place))),
        }
    }

    /// Leaves: query, key, value, and sinks, used or not.
    fn leaves(&self, kind: Kind) -> Vec<Tensor> {
        let rows = |heads| [BATCH, heads, self.sequence, HEAD_DIM];
        let sinks = values(4, &[self.heads]) * 2.0 + 0.37;
        [values(1, &rows(self.heads)) * 3.0, values(2, &rows(self.groups)) * 2.0]
            .into_iter()
            .chain([values(3, &rows(self.groups)), sinks])
            // In bf16 the same numbers everywhere, so that only the arithmetic differs.
            .map(|leaf| leaf.to_kind(Kind::BFloat16).to_kind(kind).set_requires_grad(true))
            .collect()
    }

    fn run(&self, kernel: AttentionKernel, leaves: &[Tensor]) -> Tensor {
        let [query, key, value, sinks] = leaves else { panic!("four leaves") };
        let mut options = AttentionOptions::new(self.scale).window(self.window);
        if self.has_sinks {
            options = options.sinks(sinks);
        }
        attention(kernel, query, key, value, &self.pattern(), &options).unwrap()
    }

    /// The definition in fp64: exponentials, their sum with the sink's, and a quotient.
    fn by_definition(&self, leaves: &[Tensor]) -> Tensor {
        let double: Vec<_> = leaves.iter().map(|leaf| leaf.to_kind(Kind::Double)).collect();
        let shared = self.heads / self.groups;
        let wide = |tensor: &Tensor| tensor.repeat_interleave_self_int(shared, 1, None);
        let sees = (0..BATCH).flat_map(|row| {
            (0..self.sequence * self.sequence)
                .map(move |index| self.sees(row, index / self.sequence, index % self.sequence))
        });
        let sees = Tensor::from_slice(&sees.map(f64::from).collect::<Vec<_>>());
        let sees = sees.view([BATCH, 1, self.sequence, self.sequence]).to_device(device());
        let scores = double[0].matmul(&wide(&double[1]).transpose(2, 3)) * self.scale;
        let parts = scores.exp() * sees;
        let mut total = parts.sum_dim_intlist([-1_i64].as_slice(), true, Kind::Double);
        if self.has_sinks {
            total += double[3].exp().view([1, -1, 1, 1]);
        }
        // A row that sees nothing is padding, and compared with nothing.
        let total = &total + total.eq(0.0);
        (parts / total).matmul(&wide(&double[2]))
    }

    /// 1 where a row has a token. What padding gets is not defined.
    fn tokens(&self) -> Tensor {
        let tokens = self.table(|row, place| self.is_token(row, place));
        tokens.view([BATCH, 1, self.sequence, 1])
    }

    /// The output at tokens, and gradients of query, key, value and, where used, the sinks.
    fn results(&self, output: &Tensor, leaves: &[Tensor]) -> Vec<Tensor> {
        let tokens = self.tokens();
        let zero = Tensor::zeros_like(output);
        let upstream = values(9, &output.size()).to_kind(output.kind()) * &tokens;
        let used: Vec<_> = leaves[..3 + usize::from(self.has_sinks)].iter().collect();
        let gradients = grad(&[output], &[&upstream], &used).unwrap();
        std::iter::once(output.where_self(&tokens, &zero).detach())
            .chain(gradients.into_iter().map(Option::unwrap))
            .collect()
    }

    fn results_of(&self, kernel: AttentionKernel, kind: Kind) -> Vec<Tensor> {
        let leaves = self.leaves(kind);
        self.results(&self.run(kernel, &leaves), &leaves)
    }

    fn results_by_definition(&self) -> Vec<Tensor> {
        let leaves = self.leaves(Kind::Double);
        self.results(&self.by_definition(&leaves), &leaves)
    }
}

/// The largest difference, against the largest number there is.
fn error(found: &Tensor, wanted: &Tensor) -> f64 {
    let (found, wanted) = (found.to_kind(Kind::Double), wanted.to_kind(Kind::Double));
    let largest = wanted.abs().max().double_value(&[]).max(1.0);
    // NaN would win against nothing.
    assert_eq!(found.isfinite().all().int64_value(&[]), 1);
    (found - wanted).abs().max().double_value(&[]) / largest
}

fn assert_close(case: &Case, found: &[Tensor], wanted: &[Tensor], tolerance: f64) {
    assert_eq!(found.len(), wanted.len());
    let names = ["output", "d query", "d key", "d value", "d sinks"];
    for ((found, wanted), name) in found.iter().zip(wanted).zip(names) {
        let error = error(found, wanted);
        assert!(error < tolerance, "{name} of {case:?}: {error}");
    }
}

#[test]
fn eager_attention_is_the_definition_under_every_combination() {
    for case in Case::all() {
        let found = case.results_of(AttentionKernel::Eager, Kind::Double);
        // Without sinks the softmax is in fp32, as transformers has it.
        let tolerance = if case.has_sinks { 1e-12 } else { 1e-6 };
        assert_close(&case, &found, &case.results_by_definition(), tolerance);
    }
}

#[test]
fn fused_attention_is_eager_attention_under_every_combination_forward_and_backward() {
    // Kernels of a GPU may build an fp32 product of several narrower ones.
    let tolerance = if device().is_cuda() { 5e-5 } else { 5e-6 };
    for case in Case::all() {
        let [fused, eager] = [AttentionKernel::Fused, AttentionKernel::Eager]
            .map(|kernel| case.results_of(kernel, Kind::Float));
        assert_close(&case, &fused, &eager, tolerance);
    }
}

#[test]
fn sixteen_bit_attention_stays_near_the_definition() {
    for case in Case::all() {
        let wanted = case.results_by_definition();
        for (kernel, kind, tolerance) in [
            (AttentionKernel::Fused, Kind::BFloat16, 0.03),
            (AttentionKernel::Fused, Kind::Half, 0.006),
            // Scores reach 10, and eager attention rounds them to 8 bits.
            (AttentionKernel::Eager, Kind::BFloat16, 0.04),
        ] {
            assert_close(&case, &case.results_of(kernel, kind), &wanted, tolerance);
        }
    }
}

#[test]
fn equal_calls_give_equal_bits() {
    // As in training. It holds for the whole process: on CUDA tests run one at a time.
    if device().is_cuda() {
        set_deterministic(true).unwrap();
    }
    // Long enough for several blocks of keys, whose parts of a gradient meet in any order unless told otherwise.
    let sequence = if device().is_cuda() { 1500 } else { 150 };
    let long = [None, Some(128)].map(|window| Case {
        sequence,
        heads: 8,
        groups: 2,
        scale: 0.25,
        window,
        has_sinks: true,
        padding: Padding::None,
        is_packed: false,
    });
    for case in Case::all().into_iter().chain(long) {
        for kind in [Kind::Float, Kind::BFloat16] {
            let [first, second] = [(); 2].map(|()| case.results_of(AttentionKernel::Fused, kind));
            for (first, second) in first.iter().zip(&second) {
                assert!(first.equal(second), "{case:?} in {kind:?}");
            }
        }
    }
    if device().is_cuda() {
        set_deterministic(false).unwrap();
    }
}

#[test]
fn a_sink_gets_a_gradient_only_when_it_asks_for_one() {
    let case = Case { has_sinks: true, sequence: 18, ..Case::all()[0] };
    for (kernel, kind) in [
        (AttentionKernel::Fused, Kind::Float),
        (AttentionKernel::Fused, Kind::BFloat16),
        (AttentionKernel::Eager, Kind::Float),
    ] {
        let leaves: Vec<_> = case.leaves(kind).iter().map(Tensor::detach).collect();
        assert!(!case.run(kernel, &leaves).requires_grad());
        for leaf in [&leaves[0], &leaves[3]] {
            let leaf = leaf.set_requires_grad(true);
            let output = case.run(kernel, &leaves);
            let found = grad(&[&output], &[&output.ones_like()], &[&leaf]).unwrap();
            assert!(found[0].as_ref().is_some_and(|it| it.abs().max().double_value(&[]) > 0.0));
            let _ = leaf.set_requires_grad(false);
        }
    }
}

#[test]
fn padding_that_sees_nothing_but_its_sink_gets_zeros() {
    for window in [None, Some(WINDOW)] {
        let case = Case {
            sequence: 18,
            heads: 4,
            groups: 2,
            scale: 0.25,
            window,
            has_sinks: true,
            padding: Padding::Left,
            is_packed: false,
        };
        for kernel in [AttentionKernel::Fused, AttentionKernel::Eager] {
            let output = case.run(kernel, &case.leaves(Kind::Float));
            let padding = output.get(0).narrow(1, 0, 9);
            assert_eq!(padding.abs().max().double_value(&[]), 0.0, "{kernel:?} {window:?}");
        }
    }
}

/// Bytes that the forward and backward of one layer of gpt-oss's shape at 4,096 tokens take at most on the
/// device, beside its inputs.
fn peak_bytes(window: Option<usize>, is_padded: bool) -> usize {
    let rows = |heads| [1, heads, 4096, 64];
    let leaf = |salt, size: &[i64]| values(salt, size).to_kind(Kind::BFloat16);
    let inputs = [leaf(1, &rows(64)), leaf(2, &rows(8)), leaf(3, &rows(8))]
        .map(|leaf| leaf.set_requires_grad(true));
    let [query, key, value] = &inputs;
    let sinks = leaf(4, &[64]);
    let padding = Tensor::arange(4096, (Kind::Int64, device())).ge(700).view([1, 4096]);
    let pattern =
        AttentionPattern { causal: true, key_mask: is_padded.then_some(padding), segments: None };
    let options = AttentionOptions::new(0.125).window(window).sinks(&sinks);
    let upstream = leaf(5, &rows(64));
    let before = memory_stats(device()).unwrap().current_bytes;
    reset_peak_memory(device()).unwrap();
    let kernel = AttentionKernel::Fused;
    let output = attention(kernel, query, key, value, &pattern, &options).unwrap();
    let gradients = grad(&[&output], &[&upstream], &inputs.each_ref()).unwrap();
    assert_eq!(gradients.iter().flatten().count(), 3);
    memory_stats(device()).unwrap().peak_bytes - before
}

#[test]
fn long_sequences_take_far_less_memory_than_their_scores_would() {
    if device() == Device::Cpu {
        println!("skipped: BLOCKSTREAMER_TEST_DEVICE is not cuda");
        return;
    }
    // On CUDA tests run one at a time: what the process takes is what this one takes.
    let scores_bytes = 64 * 4096_usize.pow(2) * size_of::<f32>();
    for window in [None, Some(128)] {
        for is_padded in [false, true] {
            let peak = peak_bytes(window, is_padded);
            println!("window {window:?}, padded {is_padded}: {} MiB", peak >> 20);
            let limit = if window.is_some() { scores_bytes / 8 } else { scores_bytes / 4 };
            assert!(peak < limit, "{peak} bytes, window {window:?}, padded {is_padded}");
        }
    }
}

/// The last rows of a long sequence in fp32, of one row of a batch: output, and gradients of query (these rows
/// alone), key, value and sinks for `upstream` of these rows.
fn last_rows_by_definition(
    leaves: &[Tensor; 4],
    window: Option<usize>,
    key_mask: &Tensor,
    upstream: &Tensor,
) -> Vec<Tensor> {
    let num_rows = upstream.size()[2];
    let leaf = |tensor: &Tensor| tensor.detach().to_kind(Kind::Float).set_requires_grad(true);
    let [query, key, value, sinks] = leaves.each_ref().map(leaf);
    let (sequence, shared) = (key.size()[2], query.size()[1] / key.size()[1]);
    let wide = |tensor: &Tensor| tensor.repeat_interleave_self_int(shared, 1, None);
    let places = Tensor::arange(sequence, (Kind::Int64, device()));
    let rows = places.narrow(0, sequence - num_rows, num_rows).unsqueeze(1);
    let mut sees = rows.ge_tensor(&places).logical_and(key_mask);
    if let Some(window) = window {
        sees = sees.logical_and(&(&rows - &places).lt(window as i64));
    }
    let last = query.narrow(2, sequence - num_rows, num_rows);
    let scores = last.matmul(&wide(&key).transpose(2, 3)) * 0.125;
    let scores = scores.masked_fill(&sees.logical_not(), f64::NEG_INFINITY);
    let sink = sinks.view([1, -1, 1, 1]).expand([1, -1, num_rows, 1], false);
    let shares = Tensor::cat(&[scores, sink], 3).softmax(-1, Kind::Float);
    let output = shares.narrow(3, 0, sequence).matmul(&wide(&value));
    let upstream = upstream.to_kind(Kind::Float);
    let gradients = grad(&[&output], &[&upstream], &[&query, &key, &value, &sinks]).unwrap();
    std::iter::once(output.detach()).chain(gradients.into_iter().map(Option::unwrap)).collect()
}

#[test]
fn the_last_rows_of_a_long_sequence_are_those_of_the_definition_forward_and_backward() {
    const NUM_ROWS: i64 = 64;
    // gpt-oss's own shape where it is quick.
    let (sequence, heads, groups) = if device().is_cuda() { (4096, 64, 8) } else { (1100, 8, 2) };
    let kind = if device().is_cuda() { Kind::BFloat16 } else { Kind::Float };
    let tolerance = if kind == Kind::Float { 1e-4 } else { 2e-2 };
    let leaf = |salt, size: &[i64], range: f64| {
        (values(salt, size) * range).to_kind(Kind::BFloat16).to_kind(kind).set_requires_grad(true)
    };
    let rows = |heads| [1, heads, sequence, 64];
    let leaves = [
        leaf(1, &rows(heads), 2.0),
        leaf(2, &rows(groups), 2.0),
        leaf(3, &rows(groups), 1.0),
        leaf(4, &[heads], 3.0),
    ];
    let upstream = leaf(5, &[1, heads, NUM_ROWS, 64], 1.0).detach();
    let before = upstream.new_zeros([1, heads, sequence - NUM_ROWS, 64], (kind, device()));
    let places = Tensor::arange(sequence, (Kind::Int64, device()));
    for window in [None, Some(128)] {
        for is_padded in [false, true] {
            let key_mask = places.ge(if is_padded { 700 } else { 0 });
            let pattern = AttentionPattern {
                causal: true,
                key_mask: is_padded.then(|| key_mask.view([1, -1])),
                segments: None,
            };
            let [query, key, value, sinks] = &leaves;
            let options = AttentionOptions::new(0.125).window(window).sinks(sinks);
            let kernel = AttentionKernel::Fused;
            let output = attention(kernel, query, key, value, &pattern, &options).unwrap();
            let whole = Tensor::cat(&[&before, &upstream], 2);
            let gradients = grad(&[&output], &[&whole], &leaves.each_ref()).unwrap();
            let last = output.narrow(2, sequence - NUM_ROWS, NUM_ROWS).detach();
            let found = std::iter::once(last).chain(gradients.into_iter().map(Option::unwrap));
            let found: Vec<_> = found.collect();
            let wanted = last_rows_by_definition(&leaves, window, &key_mask, &upstream);
            let what = format!("window {window:?}, padded {is_padded}");
            assert_near(&found, &wanted, tolerance, &what);
        }
    }
}
