//! How long the experts of one layer of gpt-oss-120b take, and how much memory beside their codes. On a GPU
//! that nothing else uses, in a release build:
//! `BLOCKSTREAMER_TEST_DEVICE=cuda cargo test --release --workspace --test engine -- --ignored --nocapture
//! mxfp4_layer_speed`. `benches/gpt_oss_layer.py` measures the same in transformers.

use std::time::Instant;

use blockstreamer_core::device::{grad, memory_stats, reset_peak_memory};
use blockstreamer_core::numerics::{
    ExpertCall, ExpertKernel, ExpertStack, ExpertWeight, LowRankFactors, Mxfp4, experts,
};
use blockstreamer_core::scope::{ExpertActivation, ExpertShape, GateUp, Routing};
use tch::{Cuda, Kind, Tensor};

use crate::rig::device;

const NUM_EXPERTS: i64 = 128;
const WIDTH: i64 = 2880;
const TOP_K: i64 = 4;
const RANK: i64 = 8;
/// Each step is one forward, one recompute and one backward.
const NUM_STEPS: usize = 10;
const NUM_WARMUP_STEPS: usize = 3;
/// Device memory that a layer may take beside what is stored.
const MOST_BYTES: usize = 1 << 30;

struct Layer {
    matrices: [Mxfp4; 2],
    biases: [Tensor; 2],
    factors: [Tensor; 4],
}

impl Layer {
    fn random() -> Self {
        let rows = [2 * WIDTH, WIDTH];
        let uniform = |low: i64, high: i64, size: &[i64]| {
            Tensor::randint_low(low, high, size, (Kind::Uint8, device()))
        };
        let normal = |size: &[i64]| Tensor::randn(size, (Kind::BFloat16, device())) * 0.02;
        Self {
            matrices: rows.map(|rows| {
                let size = [NUM_EXPERTS, rows, WIDTH / 32];
                let blocks = uniform(0, 256, &[size[0], size[1], size[2], 16]);
                Mxfp4::new(blocks, uniform(117, 122, &size)).unwrap()
            }),
            biases: rows.map(|rows| normal(&[NUM_EXPERTS, rows])),
            factors: [
                normal(&[NUM_EXPERTS, RANK, WIDTH]),
                normal(&[NUM_EXPERTS, rows[0], RANK]),
                normal(&[NUM_EXPERTS, RANK, WIDTH]),
                normal(&[NUM_EXPERTS, rows[1], RANK]),
            ]
            .map(|factor| factor.set_requires_grad(true)),
        }
    }

    fn run(&self, kernel: ExpertKernel, x: &Tensor, routing: &Routing) -> Tensor {
        let stack = |position: usize| {
            let packed = &self.matrices[position];
            let (blocks, scales) = (packed.blocks(), packed.scales());
            let packed = Mxfp4::new(blocks.shallow_clone(), scales.shallow_clone()).unwrap();
            ExpertStack {
                weight: ExpertWeight::Packed(packed),
                bias: Some(self.biases[position].shallow_clone()),
                factors: Some(LowRankFactors {
                    a: self.factors[2 * position].shallow_clone(),
                    b: self.factors[2 * position + 1].shallow_clone(),
                    scaling: 2.0,
                }),
            }
        };
        let shape = ExpertShape {
            experts: 0..NUM_EXPERTS as usize,
            gate_up: GateUp::Interleaved,
            activation: ExpertActivation::ClampedSwiglu { alpha: 1.702, limit: 7.0 },
        };
        let (gate_up, down) = (stack(0), stack(1));
        let call = ExpertCall { x, routing, shape: &shape, gate_up, down, sum: None };
        experts(kernel, &call).unwrap()
    }
}

#[test]
#[ignore = "a measurement, for a GPU that nothing else uses"]
fn mxfp4_layer_speed() {
    if !device().is_cuda() {
        println!("skipped: BLOCKSTREAMER_TEST_DEVICE is not cuda");
        return;
    }
    let layer = Layer::random();
    for tokens in [128, 512, 2048, 8192] {
        let x = Tensor::randn([tokens, WIDTH], (Kind::BFloat16, device())).set_requires_grad(true);
        let scores = Tensor::randn([tokens, NUM_EXPERTS], (Kind::Float, device()));
        let (scores, chosen) = scores.topk(TOP_K, -1, true, true);
        let weights = scores.softmax(-1, Kind::Float).to_kind(Kind::BFloat16);
        let routing = Routing { experts: chosen, weights };
        let gradient = Tensor::randn([tokens, WIDTH], (Kind::BFloat16, device()));
        for kernel in
            [ExpertKernel::Loop, ExpertKernel::Grouped, ExpertKernel::Fused, ExpertKernel::Auto]
        {
            let step = || {
                let forward = tch::no_grad(|| layer.run(kernel, &x, &routing));
                let output = layer.run(kernel, &x, &routing);
                drop(forward);
                let inputs: Vec<_> = std::iter::once(&x).chain(&layer.factors).collect();
                grad(&[&output], &[&gradient], &inputs).unwrap()
            };
            for _ in 0..NUM_WARMUP_STEPS {
                step();
            }
            Cuda::synchronize(0);
            reset_peak_memory(device()).unwrap();
            let before = memory_stats(device()).unwrap().current_bytes;
            let mut times_ms: Vec<f64> = (0..NUM_STEPS)
                .map(|_| {
                    let start = Instant::now();
                    step();
                    Cuda::synchronize(0);
                    start.elapsed().as_secs_f64() * 1e3
                })
                .collect();
            times_ms.sort_by(f64::total_cmp);
            let extra_bytes = memory_stats(device()).unwrap().peak_bytes - before;
            println!(
                "{{\"kernel\": \"{kernel:?}\", \"tokens\": {tokens}, \"step_ms\": {:.3}, \"fastest_ms\": {:.3}, \
                 \"extra_mib\": {:.1}}}",
                times_ms[NUM_STEPS / 2],
                times_ms[0],
                extra_bytes as f64 / f64::from(1 << 20)
            );
            if tokens == 128 {
                assert!(extra_bytes < MOST_BYTES, "{kernel:?} takes {extra_bytes} bytes");
            }
        }
    }
}
