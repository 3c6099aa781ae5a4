//! The streaming engine and the executor, against the same arithmetic with everything resident.
//!
//! `BLOCKSTREAMER_TEST_DEVICE=cuda` runs the very same tests on a GPU.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a test that cannot be set up has failed"
)]

mod accounting;
mod adapted;
mod attention;
mod cuda;
mod ends;
mod engine_rules;
mod experts;
mod faults;
mod files;
mod gradients;
mod held_graphs;
mod inference;
mod inputs;
mod late_copies;
mod links;
mod loss;
mod merging;
mod misuse;
mod norms;
mod overlap;
mod packed_experts;
mod packed_speed;
mod pictures;
mod placements;
mod plan;
mod residency;
mod rig;
mod shaky_driver;
mod split_layers;
mod stress;
mod stumbling;
