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
mod engine_rules;
mod faults;
mod gradients;
mod inference;
mod inputs;
mod loss;
mod misuse;
mod residency;
mod rig;
mod shaky_driver;
mod split_layers;
mod stumbling;
