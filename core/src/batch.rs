//! One micro-batch of token rows.

use tch::Tensor;

/// Label of a position that takes no part in the loss, as in `torch.nn.CrossEntropyLoss`.
pub const IGNORE_LABEL: i64 = -100;

/// One micro-batch, as the host's data code makes it and a family's `embed` takes it.
///
/// The tensors are on the host until the executor moves them.
#[derive(Debug)]
pub struct Batch {
    /// Token ids, `[batch, sequence]`, Int64.
    pub input_ids: Tensor,
    /// Which positions are tokens rather than padding, `[batch, sequence]`, Bool.
    /// `None`: all of them.
    pub attention_mask: Option<Tensor>,
    /// Target of each position *before* the shift by one, `[batch, sequence]`, Int64, [`IGNORE_LABEL`]
    /// where there is none. `None`: no loss is wanted.
    pub labels: Option<Tensor>,
    /// Which packed sample each position belongs to, `[batch, sequence]`, Int64.
    /// Attention stays inside a sample and positions restart with it. `None`: one sample per row.
    pub segments: Option<Tensor>,
}

impl Batch {
    /// A batch of full rows without labels. `input_ids` is `[batch, sequence]`, Int64.
    pub fn new(input_ids: Tensor) -> Self {
        Self { input_ids, attention_mask: None, labels: None, segments: None }
    }
}

impl Clone for Batch {
    fn clone(&self) -> Self {
        let share = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::shallow_clone);
        Self {
            input_ids: self.input_ids.shallow_clone(),
            attention_mask: share(&self.attention_mask),
            labels: share(&self.labels),
            segments: share(&self.segments),
        }
    }
}
