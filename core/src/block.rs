//! Blocks: the unit of movement.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// Start of every tensor inside a block image.
///
/// 256 bytes satisfy every vector load and cuBLAS; the slot itself starts on a page.
pub const TENSOR_ALIGNMENT_BYTES: usize = 256;

/// Position of a block in a model's list: the streamed ones first, in the order of a forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockIndex(pub usize);

impl fmt::Display for BlockIndex {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

/// How long a block stays on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Passes through the bounded window, visit by visit.
    Streamed,
    /// Stays for the whole run.
    Resident,
    /// Tables whose rows are looked up and nothing else: stays on the device when there is room, else
    /// in pinned host memory, from which the device gathers the rows that a batch names.
    Gathered,
    /// Used once per pass, after the last streamed block: stays on the device when there is room, else
    /// it is visited at the turn-around like a streamed block.
    Head,
}

impl Placement {
    /// Whether blocks of this placement come first and are visited in the order of a forward pass.
    pub fn is_streamed(self) -> bool {
        self == Self::Streamed
    }
}

/// One tensor of a block, where it lies in the block's image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Name inside the block, for example `self_attn.q_proj.weight`.
    pub name: String,
    /// Element type as stored.
    pub dtype: Dtype,
    /// Dimensions as stored, outermost first.
    pub shape: Vec<usize>,
    /// Start in the image; a multiple of [`TENSOR_ALIGNMENT_BYTES`].
    pub offset_bytes: usize,
    /// Size without padding.
    pub num_bytes: usize,
    /// Whether it is `[num_experts, in_features, out_features]` and seen on the device with the last two
    /// dimensions exchanged, without a copy.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_transposed: bool,
}

/// A named set of tensors that is staged, used and dropped together.
///
/// The image of a block is its tensors one after another, each aligned, gaps zero.
/// The image is the same in host memory, in a shard file and in a device slot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockSpec {
    /// Name for messages, for example `layers.7`.
    pub name: String,
    /// Whether it is streamed.
    pub placement: Placement,
    /// The tensors in image order.
    pub tensors: Vec<TensorSpec>,
    /// Size of the image, padding included. 0 for a block without parameters.
    pub image_bytes: usize,
}

impl BlockSpec {
    /// Lays tensors out one after another.
    ///
    /// # Errors
    /// [`Error::Tensor`] when a name occurs twice or a size does not fit into memory.
    pub fn pack(
        name: impl Into<String>,
        placement: Placement,
        tensors: impl IntoIterator<Item = (String, Dtype, Vec<usize>)>,
    ) -> Result<Self> {
        let mut specs: Vec<TensorSpec> = Vec::new();
        let mut end = 0_usize;
        for (name, dtype, shape) in tensors {
            if specs.iter().any(|spec| spec.name == name) {
                return Err(Error::tensor(name, "occurs twice in one block"));
            }
            let too_large = || Error::tensor(&name, format!("shape {shape:?} is too large"));
            let num_bytes = shape
                .iter()
                .try_fold(dtype.size_bytes(), |bytes, extent| bytes.checked_mul(*extent))
                .ok_or_else(too_large)?;
            let offset_bytes = end.next_multiple_of(TENSOR_ALIGNMENT_BYTES);
            // Half of all addresses at most, so that no later rounding up can overflow.
            end = offset_bytes
                .checked_add(num_bytes)
                .filter(|end| *end <= isize::MAX as usize)
                .ok_or_else(too_large)?;
            let is_transposed = false;
            specs.push(TensorSpec { name, dtype, shape, offset_bytes, num_bytes, is_transposed });
        }
        let image_bytes = end.next_multiple_of(TENSOR_ALIGNMENT_BYTES);
        Ok(Self { name: name.into(), placement, tensors: specs, image_bytes })
    }

    /// The tensor called `name`, if the block has it.
    pub fn tensor(&self, name: &str) -> Option<&TensorSpec> {
        self.tensors.iter().find(|spec| spec.name == name)
    }

    /// Bytes of all tensors without padding: what a checkpoint stores for this block.
    pub fn payload_bytes(&self) -> usize {
        self.tensors.iter().map(|spec| spec.num_bytes).sum()
    }
}
