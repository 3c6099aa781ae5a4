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
mod cuda;
mod ends;
mod engine_rules;
mod faults;
mod gradients;
mod held_graphs;
mod inference;
mod inputs;
mod loss;
mod misuse;
mod overlap;
mod placements;
mod plan;
mod residency;
mod rig;
mod shaky_driver;
mod split_layers;
mod stress;
mod stumbling;
