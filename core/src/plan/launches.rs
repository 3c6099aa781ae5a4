//! How much the host has to queue for a pass: it launches kernels one by one, and with few tokens on a fast
//! device that takes longer than anything else.
//!
//! The unit is the time that the host takes for one small kernel. What a block queues is estimated from its
//! tensors alone.

use super::Pass;
use super::demand::{Workload, is_vector, unpacked_shape};
use crate::block::BlockSpec;

// Kernels of one visit, as seen in steps of 128 tokens through 8 layers with LoRA of rank 8 on four linears of
// each of the upper four (graphs held, one micro-batch, an H200): 452 small kernels and 176 matrix products in
// a dense model of 8B size, 1406 and 152 in a model with a block of packed experts behind every block of
// attention. A backward is counted as two forwards, so that these are means over the three.
//
/// A matrix product, which costs the host more than a small kernel.
const PER_PRODUCT: f64 = 3.5;
/// A norm, or another vector that is no bias of a linear.
const PER_VECTOR: f64 = 2.0;
/// What else a block with attention queues: rotations, attention itself, residuals, an activation function.
const PER_ATTENTION: f64 = 9.0;
/// With fewer matrices there is no attention in a block: queries, keys and values in one, what comes out of
/// it, and two of a gated network.
const FEWEST_MATRICES_WITH_ATTENTION: usize = 4;
/// A block of experts: sorting tokens by expert, two products of all experts, and the way back.
const PER_EXPERTS: f64 = 60.0;
/// A trainable tensor in a block that it touches: a cast and the product that it is for.
const PER_TRAINABLE: f64 = 5.0;

// The rest is calibrated with the seconds of these two steps, at 10 us for one small kernel (0.0228 s and
// 0.0454 s), and with those of the whole models, of 36 layers (0.075 s) and of 24 (0.080 s). Attention, experts
// and adapters have queued about a fifth less since. Where a block is computed again, its adapter's kernels are
// counted once too few.
//
/// What lies between kernels: views, memory, nodes of a graph.
const HOST_WORK_PER_KERNEL: f64 = 1.35;
/// For each micro-batch beside the blocks: positions, embedding, the loss.
const PER_MICRO_BATCH: f64 = 100.0;
/// For each step beside the blocks: clipping, optimizer, values on their way back.
const PER_STEP: f64 = 200.0;

/// Forwards that cost the host as much as a backward with its graph.
pub(super) const FORWARDS_PER_BACKWARD: f64 = 2.0;

impl Workload {
    /// Launches of one forward visit of `block`. Each micro-batch takes as many, but all of them pass through
    /// experts as one.
    pub(super) fn forward_launches(&self, block: &BlockSpec) -> f64 {
        let holds_experts = self.holds_experts(block);
        let shapes: Vec<_> = block.tensors.iter().filter_map(unpacked_shape).collect();
        let is_matrix =
            |shape: &&Vec<usize>| shape.len() > 1 && !(holds_experts && shape.len() == 3);
        let num_matrices = shapes.iter().filter(is_matrix).count();
        let num_vectors = block.tensors.iter().filter(|tensor| is_vector(tensor)).count();
        let mut kernels = PER_PRODUCT * num_matrices as f64 + PER_VECTOR * num_vectors as f64;
        if num_matrices >= FEWEST_MATRICES_WITH_ATTENTION {
            kernels += PER_ATTENTION;
        }
        if holds_experts {
            kernels += PER_EXPERTS;
        }
        let num_times = if holds_experts { 1 } else { self.num_micro_batches };
        kernels * HOST_WORK_PER_KERNEL * num_times as f64
    }

    /// Launches of a whole pass that belong to no block.
    pub(super) fn other_launches(&self, pass: Pass) -> f64 {
        let (num_forwards, per_step) = match pass {
            Pass::Inference => (1.0, 0.0),
            Pass::Training { .. } => (1.0 + FORWARDS_PER_BACKWARD, PER_STEP),
        };
        let adapter = PER_TRAINABLE * self.num_attached as f64 * num_forwards;
        let of_each = (adapter + PER_MICRO_BATCH) * self.num_micro_batches as f64;
        (of_each + per_step) * HOST_WORK_PER_KERNEL
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::{BlockIndex, Placement};
    use crate::dtype::Dtype;
    use crate::plan::{Bound, Plan, PlanRequest, Rates, Traffic};

    type Tensors = Vec<(String, Dtype, Vec<usize>)>;

    fn named(dtype: Dtype, tensors: &[(&str, &[usize])]) -> Tensors {
        tensors.iter().map(|(name, shape)| ((*name).to_owned(), dtype, shape.to_vec())).collect()
    }

    fn block(tensors: &Tensors) -> BlockSpec {
        BlockSpec::pack("b", Placement::Streamed, tensors.clone()).unwrap()
    }

    /// A layer of a dense model of 8B size.
    fn dense() -> Vec<BlockSpec> {
        vec![block(&named(
            Dtype::BF16,
            &[
                ("norm.weight", &[4096]),
                ("q.weight", &[4096, 4096]),
                ("k.weight", &[1024, 4096]),
                ("v.weight", &[1024, 4096]),
                ("q_norm.weight", &[128]),
                ("k_norm.weight", &[128]),
                ("o.weight", &[4096, 4096]),
                ("post_norm.weight", &[4096]),
                ("gate.weight", &[12_288, 4096]),
                ("up.weight", &[12_288, 4096]),
                ("down.weight", &[4096, 12_288]),
            ],
        ))]
    }

    /// A layer of attention and 32 experts, in two blocks.
    fn with_experts() -> Vec<BlockSpec> {
        let attention = named(
            Dtype::BF16,
            &[
                ("norm.weight", &[2880]),
                ("q.weight", &[4096, 2880]),
                ("q.bias", &[4096]),
                ("k.weight", &[512, 2880]),
                ("k.bias", &[512]),
                ("v.weight", &[512, 2880]),
                ("v.bias", &[512]),
                ("o.weight", &[2880, 4096]),
                ("o.bias", &[2880]),
                ("sinks", &[64]),
                ("post_norm.weight", &[2880]),
                ("router.weight", &[32, 2880]),
                ("router.bias", &[32]),
            ],
        );
        let mut experts = named(
            Dtype::U8,
            &[
                ("up_blocks", &[32, 5760, 90, 16]),
                ("up_scales", &[32, 5760, 90]),
                ("down_blocks", &[32, 2880, 90, 16]),
                ("down_scales", &[32, 2880, 90]),
            ],
        );
        let biases = [("up_bias", &[32, 5760][..]), ("down_bias", &[32, 2880])];
        experts.extend(named(Dtype::BF16, &biases));
        vec![block(&attention), block(&experts)]
    }

    fn workload(num_experts: usize, tokens: usize) -> Workload {
        Workload {
            tokens,
            num_vision_blocks: 0,
            patches: 0,
            num_experts,
            top_k: num_experts.min(4),
            num_micro_batches: 1,
            hidden_size: 4096,
            vocab_size: 150_000,
            compute_kind: tch::Kind::BFloat16,
            loss_chunk_bytes: 128 << 20,
            num_trainable: 1 << 20,
            num_attached: 0,
            is_cuda: true,
        }
    }

    /// Training of the upper half of the layers, four linears in each, everything on the device.
    fn plan(layer: &[BlockSpec], num_layers: usize, workload: Workload, rates: Rates) -> Plan {
        let mut blocks = vec![layer; num_layers].concat();
        let lowest = Some(BlockIndex(blocks.len() / 2));
        let head = named(Dtype::BF16, &[("head.weight", &[workload.vocab_size, 4096])]);
        blocks.push(BlockSpec::pack("head", Placement::Head, head).unwrap());
        let workload = Workload { num_attached: num_layers / 2 * 4 * 2, ..workload };
        let pass = Pass::Training { lowest };
        Plan::new(&PlanRequest {
            first_block: 0,
            blocks: &blocks,
            fetch_from_disk: &vec![Traffic::default(); blocks.len()],
            pass,
            num_slots: 3,
            slot_budget_bytes: None,
            device_bytes: 140 << 30,
            host_bytes: 0,
            staging_bytes: 0,
            has_one_memory: false,
            demand: &workload.demand(&blocks, pass),
            rates,
            only: None,
        })
        .unwrap()
    }

    /// A card and a host on which few tokens were measured.
    const MEASURED: Rates = Rates {
        disk_gb_per_s: Some(3.0),
        link_gb_per_s: Some(50.0),
        memory_gb_per_s: Some(4000.0),
        tflops: Some(700.0),
        launch_us: Some(10.0),
    };

    #[test]
    fn few_tokens_on_the_device_are_bound_by_the_host_and_take_what_it_was_fitted_to_within_a_half()
    {
        for (layer, num_experts, num_layers, measured_s) in [
            (dense(), 0, 8, 0.0228),
            (dense(), 0, 36, 0.075),
            (with_experts(), 32, 8, 0.0454),
            (with_experts(), 32, 24, 0.080),
        ] {
            let few = plan(&layer, num_layers, workload(num_experts, 128), MEASURED);
            assert!(few.residency().graphs.len() >= num_layers / 2, "{few}");
            assert_eq!(few.prediction.bound, Some(Bound::Host), "{few}");
            assert!(few.to_string().ends_with("as long as queueing kernels takes"), "{few}");
            let ratio = few.prediction.seconds / measured_s;
            assert!((1.0 / 1.5..1.5).contains(&ratio), "{num_layers} layers, {ratio}: {few}");
        }
    }

    #[test]
    fn many_tokens_are_bound_by_arithmetic_and_queue_as_much_as_few() {
        let of = |tokens| plan(&dense(), 36, workload(0, tokens), MEASURED).prediction;
        let (few, many) = (of(128), of(8192));
        assert_eq!(many.bound, Some(Bound::Compute));
        assert_eq!(many.seconds, many.compute_seconds.unwrap());
        assert!(many.seconds > 2.0 * few.seconds, "{few:?} {many:?}");
        assert_eq!(many.launch_seconds, few.launch_seconds);
    }

    #[test]
    fn without_the_hosts_rate_its_lane_is_left_out() {
        let rates = Rates { launch_us: None, ..MEASURED };
        let plan = plan(&dense(), 36, workload(0, 128), rates);
        assert_eq!(plan.prediction.launch_seconds, None);
        assert_eq!(plan.prediction.bound, Some(Bound::Compute));
        assert!(!plan.to_string().contains("queueing"), "{plan}");
    }

    #[test]
    fn every_micro_batch_is_queued_but_for_experts_which_take_all_as_one() {
        let of = |num_micro_batches, blocks: &[BlockSpec]| {
            let workload = Workload { num_micro_batches, num_attached: 10, ..workload(32, 128) };
            workload.demand(blocks, Pass::Inference)
        };
        let blocks = with_experts();
        let (one, five) = (of(1, &blocks), of(5, &blocks));
        assert!((five.forward_launches[0] / one.forward_launches[0] - 5.0).abs() < 1e-9);
        assert_eq!(five.forward_launches[1], one.forward_launches[1]);
        assert!((five.other_launches / one.other_launches - 5.0).abs() < 1e-9);
        // Clipping and optimizer are there once.
        let once = |num_micro_batches| {
            let pass = Pass::Training { lowest: None };
            let workload = Workload { num_micro_batches, ..workload(32, 128) };
            workload.demand(&blocks, pass).other_launches
        };
        assert!(once(5) > once(1) && once(5) < 5.0 * once(1));
    }

    #[test]
    fn a_held_graph_saves_the_recompute_and_a_frozen_block_is_queued_once() {
        // One layer adapted and one not; what the adapter queues is the same everywhere.
        let launches = |device_bytes| {
            let blocks = vec![dense(); 2].concat();
            let pass = Pass::Training { lowest: Some(BlockIndex(1)) };
            let demand = workload(0, 128).demand(&blocks, pass);
            let plan = Plan::new(&PlanRequest {
                first_block: 0,
                blocks: &blocks,
                fetch_from_disk: &[Traffic::default(); 2],
                pass,
                num_slots: 1,
                slot_budget_bytes: None,
                device_bytes,
                host_bytes: 0,
                staging_bytes: 0,
                has_one_memory: false,
                demand: &demand,
                rates: Rates { launch_us: Some(1e6), ..Rates::default() },
                only: None,
            })
            .unwrap();
            let rest = plan.prediction.seconds - demand.other_launches;
            (plan.device.used_bytes(), rest / demand.forward_launches[0])
        };
        let (all_bytes, held) = launches(u64::MAX);
        let (_, recomputed) = launches(all_bytes - 1);
        assert!((held - (1.0 + 1.0 + 2.0)).abs() < 1e-9, "{held}");
        assert!((recomputed - (1.0 + 2.0 + 2.0)).abs() < 1e-9, "{recomputed}");
    }
}
