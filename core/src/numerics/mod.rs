//! Arithmetic that families share: norms, rotary embeddings, attention, experts, packed numbers.
//!
//! Everything here is stateless and blind to adapters and sources. Rounding points follow
//! Hugging Face transformers in eager mode, which is what parity is measured against.

mod attention;
mod experts;
mod mxfp4;
mod norm;
mod rope;
mod yarn;

pub use attention::{AttentionKernel, attention, padding_is_on_the_right};
pub(crate) use experts::EXPANSION_BYTES;
pub use experts::{ExpertCall, ExpertKernel, ExpertStack, ExpertWeight, LowRankFactors, experts};
pub use mxfp4::Mxfp4;
pub use norm::{rms_norm, rms_norm_rounded_once};
pub use rope::{
    apply_rotary, interleaved_mrope_axes, inverse_frequencies, rotary_tables, text_positions,
};
pub use yarn::Yarn;
