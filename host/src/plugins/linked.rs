//! Families linked into the host with the feature `static-plugins`.
//!
//! Naming a crate here is enough: its entry in the inventory comes with it.

#[cfg(feature = "static-plugins")]
use {blockstreamer_gpt_oss as _, blockstreamer_qwen3_vl as _};
