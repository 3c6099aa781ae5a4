//! Arithmetic that families share: norms, rotary embeddings, attention.
//!
//! Everything here is stateless and blind to formats, adapters and sources. Rounding points follow
//! Hugging Face transformers in eager mode, which is what parity is measured against.

mod attention;
mod norm;
mod rope;

pub use attention::{AttentionKernel, attention, padding_is_on_the_right};
pub use norm::rms_norm;
pub use rope::{
    apply_rotary, interleaved_mrope_axes, inverse_frequencies, rotary_tables, text_positions,
};
