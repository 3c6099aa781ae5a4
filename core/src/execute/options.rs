//! How a model is executed.

use std::collections::BTreeSet;

use tch::{Device, Kind};

use crate::block::BlockIndex;
use crate::numerics::{AttentionKernel, ExpertKernel};
use crate::stream::StreamOptions;

/// What stays on the device for the whole run, besides the resident blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Residency {
    /// Streamed blocks that stay on the device; the window is for the others.
    pub kept: BTreeSet<BlockIndex>,
    /// Kept blocks whose graph is held from forward to backward instead of being recomputed. Blocks below
    /// the lowest trainable one have no backward, and nothing of theirs is held.
    pub graphs: BTreeSet<BlockIndex>,
    /// Streamed blocks that the run never visits, such as those for pictures in a run without any: no slot
    /// is made for them.
    pub unused: BTreeSet<BlockIndex>,
    /// Whether [`Placement::Gathered`](crate::block::Placement::Gathered) blocks stay in host memory.
    pub gather_from_host: bool,
    /// Whether the [`Placement::Head`](crate::block::Placement::Head) block is visited at the
    /// turn-around instead of staying.
    pub stream_head: bool,
}

/// How a model is executed.
#[derive(Debug, Clone)]
pub struct ExecutorOptions {
    /// Where everything is computed.
    pub device: Device,
    /// Dtype of activations; weights are cast to it where they are used.
    pub compute_kind: Kind,
    /// How attention is computed.
    pub attention: AttentionKernel,
    /// How experts are computed.
    pub experts: ExpertKernel,
    /// The streaming engine. Which blocks it keeps, and whether it streams the head, follows from
    /// `residency`.
    pub stream: StreamOptions,
    /// What stays on the device.
    pub residency: Residency,
    /// Most bytes of fp32 logits at one time: the loss is computed in chunks of rows.
    pub loss_chunk_bytes: usize,
    /// Seed of the run, for dropout.
    pub seed: u64,
}

impl ExecutorOptions {
    /// Fused attention, grouped experts, three slots, 160 MiB of logits.
    pub fn new(device: Device, compute_kind: Kind) -> Self {
        Self {
            device,
            compute_kind,
            attention: AttentionKernel::Fused,
            experts: ExpertKernel::Auto,
            stream: StreamOptions::default(),
            residency: Residency::default(),
            loss_chunk_bytes: 160 << 20,
            seed: 0,
        }
    }
}

/// The seed of one visit's dropout, from (run, step, block, micro-batch): the recompute in backward gets
/// the same one without any generator state being saved. The mixing is that of SplitMix64.
pub(super) fn dropout_seed(run: u64, step: u64, block: u64, micro_batch: u64) -> u64 {
    [step, block, micro_batch].into_iter().fold(mix(run), |seed, part| mix(seed ^ mix(part)))
}

fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
