//! What computing a pass takes: memory beside the weights, and arithmetic. Estimates, on the high side.

use tch::Kind;

use super::Pass;
use crate::block::{BlockSpec, Placement};

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
    /// Bytes of the rows that are gathered when the embedding is in host memory.
    pub gathered_bytes: u64,
}

impl Workload {
    /// What `pass` over `blocks` takes.
    pub fn demand(&self, blocks: &[BlockSpec], pass: Pass) -> Demand {
        let total_tokens = (self.tokens * self.num_micro_batches) as u64;
        let hidden_bytes = (self.hidden_size * self.compute_kind.elt_size_in_bytes()) as u64;
        let streamed = blocks.iter().filter(|block| block.placement.is_streamed());
        let (num_saved, share) = match pass {
            Pass::Training { lowest } => {
                let lowest = lowest.map_or(usize::MAX, |block| block.0);
                (streamed.clone().count().saturating_sub(lowest), 1.0)
            }
            // Without a graph a tensor goes as soon as the next one is there.
            Pass::Inference => (0, 0.5),
        };
        // The input, the output and one between, besides what is kept for backward.
        let states = total_tokens * hidden_bytes * (num_saved as u64 + 3);
        let largest = streamed.map(|block| self.graph_bytes(block, self.tokens)).max();
        let logits = (self.loss_chunk_bytes as u64)
            .min((self.tokens * self.vocab_size * size_of::<f32>()) as u64);
        let margin = if self.is_cuda { CUDA_MARGIN_BYTES } else { CPU_MARGIN_BYTES };
        let graph_bytes = |block| self.graph_bytes(block, total_tokens as usize);
        let flops = |block: &BlockSpec| match block.placement {
            Placement::Gathered => 0.0,
            _ => {
                2.0 * total_tokens as f64
                    * matrices(block).map(|(_, size)| size as f64).sum::<f64>()
            }
        };
        Demand {
            working_set_bytes: states
                + (largest.unwrap_or(0) as f64 * share) as u64
                + logits * LOGITS_TENSORS
                + self.num_trainable as u64 * BYTES_PER_TRAINABLE
                + margin,
            graph_bytes: blocks.iter().map(graph_bytes).collect(),
            forward_flops: blocks.iter().map(flops).collect(),
            gathered_bytes: total_tokens * hidden_bytes,
        }
    }

    /// Activations of `tokens` that a block's graph holds, and weights that it holds in another dtype
    /// than they are stored in.
    fn graph_bytes(&self, block: &BlockSpec, tokens: usize) -> u64 {
        let element_bytes = self.compute_kind.elt_size_in_bytes();
        let outputs: usize = matrices(block).map(|(out_features, _)| out_features).sum();
        let num_norms = block.tensors.iter().filter(|tensor| tensor.shape.len() == 1).count();
        let norm_bytes = num_norms as u64
            * GRAPH_TENSORS_PER_NORM
            * (self.hidden_size * size_of::<f32>()) as u64;
        let cast: usize = block
            .tensors
            .iter()
            .filter(|tensor| tensor.dtype.kind() != self.compute_kind)
            .map(|tensor| tensor.shape.iter().product::<usize>() * element_bytes)
            .sum();
        let output_bytes = (outputs * element_bytes) as f64 * GRAPH_TENSORS_PER_OUTPUT;
        tokens as u64 * (output_bytes as u64 + norm_bytes) + cast as u64
    }
}

/// Out-features and number of elements of a block's matrices, also of those in a stack.
fn matrices(block: &BlockSpec) -> impl Iterator<Item = (usize, usize)> {
    block.tensors.iter().filter(|tensor| tensor.shape.len() >= 2).map(|tensor| {
        let out_features = tensor.shape[tensor.shape.len() - 2];
        (out_features, tensor.shape.iter().product())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::BlockIndex;
    use crate::dtype::Dtype;

    fn workload() -> Workload {
        Workload {
            tokens: 10,
            num_micro_batches: 2,
            hidden_size: 4,
            vocab_size: 100,
            compute_kind: Kind::BFloat16,
            loss_chunk_bytes: 1000,
            num_trainable: 7,
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
