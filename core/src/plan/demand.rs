//! What computing a pass takes: memory beside the weights, arithmetic, and launches. Memory and arithmetic are
//! estimates on the high side.

use tch::Kind;

use super::Pass;
use crate::block::{BlockSpec, Placement, TensorSpec};
use crate::dtype::Dtype;
use crate::numerics::EXPANSION_BYTES;

/// fp32 master, gradient and Adam's two means of one trainable value.
const BYTES_PER_TRAINABLE: u64 = 16;
/// Tensors of the size of a linear's output that its graph holds until backward is done with it: the
/// output, and most of them once more behind an activation function or a rotation. Measured for a dense
/// layer of 8B size: 1.65 with the norms.
const GRAPH_TENSORS_PER_OUTPUT: f64 = 1.75;
/// fp32 tensors of the size of the hidden states that a norm's graph holds.
const GRAPH_TENSORS_PER_NORM: u64 = 1;
/// Logits in the compute dtype and in fp32, and their gradient.
const LOGITS_TENSORS: u64 = 3;
/// The driver's context, workspaces of cuBLAS and cuDNN, kernels that are loaded late, and what the
/// allocator's blocks waste.
const CUDA_MARGIN_BYTES: u64 = 1100 << 20;
/// The same on the CPU, where allocations are exact.
const CPU_MARGIN_BYTES: u64 = 32 << 20;

/// One pass, in numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Workload {
    /// Tokens of one micro-batch, padding included.
    pub tokens: usize,
    /// Streamed blocks for pictures alone, which are the first ones.
    pub num_vision_blocks: usize,
    /// Patches of all pictures of one micro-batch; 0 when the pass has none.
    pub patches: usize,
    /// Experts of a layer; 0 in a dense model.
    pub num_experts: usize,
    /// Experts that a token goes to.
    pub top_k: usize,
    /// Micro-batches that pass through a block during one visit.
    pub num_micro_batches: usize,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Dtype of activations.
    pub compute_kind: Kind,
    /// Most bytes of fp32 logits at one time.
    pub loss_chunk_bytes: usize,
    /// Trainable values of the adapter.
    pub num_trainable: usize,
    /// Trainable tensors of the adapter, each as often as there are blocks that it touches.
    pub num_attached: usize,
    /// Whether it runs on a CUDA device.
    pub is_cuda: bool,
}

/// What a [`Workload`] takes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Demand {
    /// Device memory beside weights and held graphs.
    pub working_set_bytes: u64,
    /// Device memory of a block's graph over all micro-batches, per block.
    pub graph_bytes: Vec<u64>,
    /// Floating-point operations of one forward visit, per block.
    pub forward_flops: Vec<f64>,
    /// What the host queues for one forward visit over all micro-batches, per block, in small kernels that
    /// would take it as long.
    pub forward_launches: Vec<f64>,
    /// What it queues in a whole pass beside the blocks, likewise.
    pub other_launches: f64,
    /// Bytes of the rows that are gathered when the embedding is in host memory.
    pub gathered_bytes: u64,
}

impl Workload {
    /// What `pass` over `blocks` takes.
    pub fn demand(&self, blocks: &[BlockSpec], pass: Pass) -> Demand {
        let total_tokens = (self.tokens * self.num_micro_batches) as u64;
        let hidden_bytes = (self.hidden_size * self.compute_kind.elt_size_in_bytes()) as u64;
        let streamed = blocks.iter().filter(|block| block.placement.is_streamed());
        let num_streamed = streamed.clone().count();
        let lowest = match pass {
            Pass::Training { lowest } => lowest.map_or(usize::MAX, |block| block.0),
            Pass::Inference => usize::MAX,
        };
        // Without a graph a tensor goes as soon as the next one is there.
        let share = if pass == Pass::Inference { 0.5 } else { 1.0 };
        let num_saved = |blocks: std::ops::Range<usize>| blocks.len() as u64;
        // Behind a router its input to the experts is held besides the residual.
        let is_first_of_layer = |block: usize| {
            block >= lowest
                && self.holds_experts(&blocks[block])
                && block.checked_sub(1).is_none_or(|before| !self.holds_experts(&blocks[before]))
        };
        let num_routed = (0..num_streamed).filter(|block| is_first_of_layer(*block)).count();
        let of_decoder =
            num_saved(lowest.max(self.num_vision_blocks)..num_streamed) + num_routed as u64;
        let of_tower = num_saved(lowest..self.num_vision_blocks);
        // The input, the output and one between, besides what is kept for backward.
        let patch_bytes = (self.patches * self.num_micro_batches) as u64 * hidden_bytes;
        let states = total_tokens * hidden_bytes * (of_decoder + 3) + patch_bytes * (of_tower + 3);
        let expansion =
            streamed.clone().map(|block| expansion_bytes(block, self.compute_kind)).max();
        let graph = |(index, block): (usize, &BlockSpec)| {
            self.graph_bytes(block, self.rows_at_a_time(index, block))
        };
        let largest = streamed.enumerate().map(graph).max();
        let logits = (self.loss_chunk_bytes as u64)
            .min((self.tokens * self.vocab_size * size_of::<f32>()) as u64);
        let margin = if self.is_cuda { CUDA_MARGIN_BYTES } else { CPU_MARGIN_BYTES };
        let rows = |index| self.rows_per_micro_batch(index) * self.num_micro_batches;
        let graph_bytes = |(index, block)| self.graph_bytes(block, rows(index));
        let flops = |(index, block): (usize, &BlockSpec)| match block.placement {
            Placement::Gathered => 0.0,
            _ => 2.0 * rows(index) as f64 * self.matrices(block).map(|it| it.products).sum::<f64>(),
        };
        Demand {
            working_set_bytes: states
                + (largest.unwrap_or(0) as f64 * share) as u64
                + expansion.unwrap_or(0) as u64
                + logits * LOGITS_TENSORS
                + self.num_trainable as u64 * BYTES_PER_TRAINABLE
                + margin,
            graph_bytes: blocks.iter().enumerate().map(graph_bytes).collect(),
            forward_flops: blocks.iter().enumerate().map(flops).collect(),
            forward_launches: blocks.iter().map(|block| self.forward_launches(block)).collect(),
            other_launches: self.other_launches(pass),
            gathered_bytes: total_tokens * hidden_bytes,
        }
    }

    /// What passes through a block: tokens, or patches of pictures.
    fn rows_per_micro_batch(&self, block: usize) -> usize {
        if block < self.num_vision_blocks { self.patches } else { self.tokens }
    }

    /// What is in a block at one time: all micro-batches pass through experts as one.
    fn rows_at_a_time(&self, index: usize, block: &BlockSpec) -> usize {
        let joined = if self.holds_experts(block) { self.num_micro_batches } else { 1 };
        self.rows_per_micro_batch(index) * joined
    }

    pub(super) fn holds_experts(&self, block: &BlockSpec) -> bool {
        self.num_experts > 0 && block.tensors.iter().any(|tensor| tensor.shape.len() == 3)
    }

    /// Activations of `tokens` that a block's graph holds, and weights that it holds in another dtype
    /// than they are stored in.
    fn graph_bytes(&self, block: &BlockSpec, tokens: usize) -> u64 {
        let element_bytes = self.compute_kind.elt_size_in_bytes();
        let outputs: usize = self.matrices(block).map(|it| it.outputs).sum();
        let num_norms = block.tensors.iter().filter(|tensor| is_vector(tensor)).count();
        let norm_bytes = num_norms as u64
            * GRAPH_TENSORS_PER_NORM
            * (self.hidden_size * size_of::<f32>()) as u64;
        let cast: usize = block
            .tensors
            .iter()
            // Codes are no numbers: they are used as they are.
            .filter(|tensor| tensor.dtype.is_float() && tensor.dtype.kind() != self.compute_kind)
            .map(|tensor| tensor.shape.iter().product::<usize>() * element_bytes)
            .sum();
        let output_bytes = (outputs * element_bytes) as f64 * GRAPH_TENSORS_PER_OUTPUT;
        tokens as u64 * (output_bytes as u64 + norm_bytes) + cast as u64
    }

    /// What one row has to do with each matrix of a block.
    fn matrices(&self, block: &BlockSpec) -> impl Iterator<Item = RowWork> {
        block.tensors.iter().filter_map(|tensor| {
            let shape = unpacked_shape(tensor)?;
            let size: usize = shape.iter().product();
            match shape[..] {
                [outputs, _] => Some(RowWork { outputs, products: size as f64 }),
                // Experts: a row goes through `top_k` of the whole layer, and is held before and after
                // each, whichever of the two dimensions is which.
                [num_here, rows, columns] if self.num_experts > 0 => {
                    let num_used = (self.top_k * num_here) as f64 / self.num_experts as f64;
                    Some(RowWork {
                        // A row for every expert of a token, also for those that are elsewhere.
                        outputs: (rows + columns) * self.top_k,
                        products: (rows * columns) as f64 * num_used,
                    })
                }
                [outputs, ..] if shape.len() > 2 => {
                    Some(RowWork { outputs, products: size as f64 })
                }
                _ => None,
            }
        })
    }
}

/// Whether a tensor is a norm's, or another vector that is no bias of a linear.
pub(super) fn is_vector(tensor: &TensorSpec) -> bool {
    tensor.shape.len() == 1 && !tensor.name.ends_with(".bias")
}

/// The shape of the numbers in a tensor that rows pass through; `None` when they pass through none.
pub(super) fn unpacked_shape(tensor: &TensorSpec) -> Option<Vec<usize>> {
    match (tensor.dtype, &tensor.shape[..]) {
        (Dtype::U8, &[experts, rows, groups, half]) => Some(vec![experts, rows, groups * half * 2]),
        (Dtype::U8, _) => None,
        // One number per output of each expert, added and not multiplied.
        _ if tensor.name.ends_with("_bias") => None,
        _ => Some(tensor.shape.clone()),
    }
}

/// Bytes of matrices that are expanded at one time while the block runs.
fn expansion_bytes(block: &BlockSpec, compute_kind: Kind) -> usize {
    let packed = block.tensors.iter().filter(|tensor| tensor.dtype == Dtype::U8);
    let largest = packed.filter_map(unpacked_shape).map(|shape| {
        let matrix_bytes: usize =
            shape.iter().skip(1).product::<usize>() * compute_kind.elt_size_in_bytes();
        let all_bytes = matrix_bytes * shape.first().copied().unwrap_or_default();
        // A single one takes its numbers before and after the scale, and an index for two.
        all_bytes.min(EXPANSION_BYTES) + 3 * matrix_bytes
    });
    largest.max().unwrap_or_default()
}

/// What one row has to do with a matrix.
struct RowWork {
    /// Numbers that its graph holds.
    outputs: usize,
    /// Multiplications.
    products: f64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::BlockIndex;

    fn workload() -> Workload {
        Workload {
            num_vision_blocks: 0,
            patches: 0,
            num_experts: 0,
            top_k: 0,
            tokens: 10,
            num_micro_batches: 2,
            hidden_size: 4,
            vocab_size: 100,
            compute_kind: Kind::BFloat16,
            loss_chunk_bytes: 1000,
            num_trainable: 7,
            num_attached: 2,
            is_cuda: true,
        }
    }

    fn block(placement: Placement) -> BlockSpec {
        let tensors = [
            ("norm".to_owned(), Dtype::BF16, vec![4]),
            ("up.weight".to_owned(), Dtype::BF16, vec![6, 4]),
            ("down.weight".to_owned(), Dtype::F32, vec![4, 6]),
        ];
        BlockSpec::pack("b", placement, tensors).unwrap()
    }

    #[test]
    fn each_part_of_the_estimate_is_there_once() {
        let blocks = [Placement::Streamed, Placement::Streamed, Placement::Gathered].map(block);
        let lowest = Some(BlockIndex(1));
        let demand = workload().demand(&blocks, Pass::Training { lowest });
        // 10 outputs, 2 bytes, 1.75 of them; one norm of 4 fp32; the fp32 matrix cast to 2 bytes.
        let graph = |tokens: u64| tokens * (35 + 16) + 48;
        assert_eq!(demand.graph_bytes[0], graph(20));
        let states = 20 * 8 * (1 + 3);
        let rest = 3 * 1000 + 7 * 16 + (1100 << 20);
        assert_eq!(demand.working_set_bytes, states + graph(10) + rest);
        assert_eq!(demand.gathered_bytes, 20 * 8);
        assert_eq!(demand.forward_flops, [2.0 * 20.0 * 48.0, 2.0 * 20.0 * 48.0, 0.0]);
    }

    #[test]
    fn pictures_and_experts_take_what_passes_through_them() {
        let experts = [("gate_up".to_owned(), Dtype::BF16, vec![4, 5, 6])];
        let experts = BlockSpec::pack("experts", Placement::Streamed, experts).unwrap();
        let blocks = [block(Placement::Streamed), experts];
        let workload =
            Workload { num_vision_blocks: 1, patches: 100, num_experts: 8, top_k: 2, ..workload() };
        let lowest = Some(BlockIndex(1));
        let demand = workload.demand(&blocks, Pass::Training { lowest });
        // Half of the experts are here, and one of the two of a token on average; both have a row.
        assert_eq!(demand.forward_flops, [2.0 * 200.0 * 48.0, 2.0 * 20.0 * 30.0]);
        assert_eq!(demand.graph_bytes, [200 * (35 + 16) + 48, 20 * (2 * 11 * 2 * 7 / 4)]);
        // The router's input is held besides; both micro-batches are in the experts at a time.
        let states = 20 * 8 * (1 + 1 + 3) + 200 * 8 * 3;
        let rest = 3 * 1000 + 7 * 16 + (1100 << 20);
        let largest = 100 * 51 + 48;
        assert_eq!(demand.working_set_bytes, states + largest + rest);
        let without = Workload { patches: 0, ..workload };
        assert_eq!(without.demand(&blocks, Pass::Inference).forward_flops[0], 0.0);
    }

    #[test]
    fn packed_experts_count_as_what_they_unpack_to_and_are_expanded_some_at_a_time() {
        let parts = |dtype: Dtype, blocks: &[usize]| {
            let mut tensors = vec![("up".to_owned(), dtype, blocks.to_vec())];
            if dtype == Dtype::U8 {
                tensors[0].0 += "_blocks";
                tensors.push(("up_scales".to_owned(), dtype, blocks[..3].to_vec()));
                tensors.push(("up_bias".to_owned(), Dtype::BF16, blocks[..2].to_vec()));
            }
            BlockSpec::pack("experts", Placement::Streamed, tensors).unwrap()
        };
        let workload = Workload { num_experts: 8, top_k: 2, ..workload() };
        let demand = |block| workload.demand(&[block], Pass::Inference);
        let packed = demand(parts(Dtype::U8, &[8, 6, 2, 16]));
        let dense = demand(parts(Dtype::BF16, &[8, 6, 64]));
        assert_eq!(packed.forward_flops, dense.forward_flops);
        assert_eq!(packed.graph_bytes, dense.graph_bytes);
        // Of 8 small ones all at once, and what the expansion of one takes.
        let matrix_bytes = 6 * 64 * 2;
        assert_eq!(packed.working_set_bytes - dense.working_set_bytes, (8 + 3) * matrix_bytes);
        let large = demand(parts(Dtype::U8, &[128, 5760, 90, 16]));
        let dense = demand(parts(Dtype::BF16, &[128, 5760, 2880]));
        let matrix_bytes = 5760 * 2880 * 2;
        assert_eq!(
            large.working_set_bytes - dense.working_set_bytes,
            EXPANSION_BYTES as u64 + 3 * matrix_bytes
        );
    }

    #[test]
    fn more_tokens_more_trained_blocks_and_training_itself_take_more() {
        let blocks = [Placement::Streamed; 3].map(block);
        let set = |workload: Workload, pass| workload.demand(&blocks, pass).working_set_bytes;
        let train = |lowest| Pass::Training { lowest: Some(BlockIndex(lowest)) };
        let least = set(workload(), Pass::Inference);
        assert!(least < set(workload(), Pass::Training { lowest: None }));
        assert!(set(workload(), train(2)) < set(workload(), train(0)));
        assert!(least < set(Workload { tokens: 11, ..workload() }, Pass::Inference));
        assert!(least > set(Workload { is_cuda: false, ..workload() }, Pass::Inference));
    }
}
