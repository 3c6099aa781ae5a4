//! Pictures and films: what a family says of how they are prepared, and what the host hands it.
//!
//! The host decodes, resizes and cuts; a family only describes its format. The published processors of
//! the families served here differ in numbers, not in kind.

use tch::Tensor;

/// Name in [`Batch::prepared`](crate::batch::Batch::prepared) of the positions on every axis that a family
/// turns by (time, height, width), `[num_axes, batch, sequence]`, Int64. Padding may hold anything.
pub const POSITIONS: &str = "positions";

/// Name in [`Batch::prepared`](crate::batch::Batch::prepared) of the places of pictures and films among
/// the flattened positions of a batch, `[num_places]`, Int64: those of all pictures in their order, then
/// those of all films. After the last block that is
/// [`only_with_vision`](crate::weights::BlockPlan::only_with_vision) the rows of
/// [`HIDDEN`](crate::state::HIDDEN) there are what the vision tower made.
pub const VISION_ROWS: &str = "vision_rows";

/// Name in the state of what the vision tower hands to the decoder's layer `number` beside that,
/// `[num_places, hidden_size]`.
pub fn deepstack(number: usize) -> String {
    format!("deepstack.{number}")
}

/// Pictures or films of one micro-batch, cut into patches.
#[derive(Debug)]
pub struct Patches {
    /// `[num_patches, in_channels * temporal_patch_size * patch_size * patch_size]`, fp32, normalised: all
    /// items one after another. Within an item the patches of one merged cell lie together.
    pub pixels: Tensor,
    /// Size of every item in patches: time, height, width.
    pub grids: Vec<[usize; 3]>,
}

impl Clone for Patches {
    fn clone(&self) -> Self {
        Self { pixels: self.pixels.shallow_clone(), grids: self.grids.clone() }
    }
}

/// How a family wants pictures, as its published processor makes them.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionFormat {
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Frames of a patch. A picture is one frame, repeated.
    pub temporal_patch_size: usize,
    /// Patches of a merged cell along each side: a cell becomes one position of the decoder.
    pub spatial_merge_size: usize,
    /// Fewest pixels of a picture, after resizing.
    pub min_pixels: usize,
    /// Most pixels of a picture, after resizing.
    pub max_pixels: usize,
    /// Fewest pixels of a film, over all its frames.
    pub video_min_pixels: usize,
    /// Most pixels of a film, over all its frames.
    pub video_max_pixels: usize,
    /// Longest side over shortest that is accepted.
    pub max_aspect_ratio: f64,
    /// Mean per channel that is taken off, of values from 0 to 1.
    pub image_mean: [f64; 3],
    /// Standard deviation per channel that is divided by.
    pub image_std: [f64; 3],
    /// What the chat template prints for a picture and [`Model::media_text`](crate::family::Model::media_text)
    /// replaces: `<|image_pad|>`.
    pub image_placeholder: String,
    /// The same for a film, with whatever around it is replaced, too.
    pub video_placeholder: String,
    /// Tokens that stand for pictures and films, of which no loss is ever taken.
    pub vision_token_ids: Vec<i64>,
}

/// A picture or a film in a conversation, once its size is known.
#[derive(Debug, Clone, PartialEq)]
pub struct Media {
    /// Size in patches: time, height, width.
    pub grid: [usize; 3],
    /// For a film the time of each of its frames, in seconds, as many as `temporal_patch_size` times the
    /// grid's first number. `None`: a picture.
    pub frame_seconds: Option<Vec<f64>>,
}
