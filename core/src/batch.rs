//! One micro-batch of token rows, with the pictures that they name.

use tch::Tensor;

use crate::state::NamedTensors;
use crate::vision::Patches;

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
    /// The pictures of all rows, in the order in which the rows name them. `None`: there are none.
    pub images: Option<Patches>,
    /// The films of all rows, likewise.
    pub videos: Option<Patches>,
    /// What [`Model::prepare`](crate::family::Model::prepare) made of all this. The executor moves it to
    /// the device before [`Model::embed`](crate::family::Model::embed) sees it.
    pub prepared: NamedTensors,
    /// The same, for what is needed on the host: counts and lengths that shape the computation.
    pub prepared_on_host: NamedTensors,
}

impl Batch {
    /// A batch of full rows without labels. `input_ids` is `[batch, sequence]`, Int64.
    pub fn new(input_ids: Tensor) -> Self {
        Self {
            input_ids,
            attention_mask: None,
            labels: None,
            segments: None,
            images: None,
            videos: None,
            prepared: NamedTensors::new(),
            prepared_on_host: NamedTensors::new(),
        }
    }

    /// Whether any row names a picture or a film.
    pub fn has_vision(&self) -> bool {
        self.images.is_some() || self.videos.is_some()
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
            images: self.images.clone(),
            videos: self.videos.clone(),
            prepared: self.prepared.clone(),
            prepared_on_host: self.prepared_on_host.clone(),
        }
    }
}
