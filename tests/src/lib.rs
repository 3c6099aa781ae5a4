//! What the integration tests share: built plugins, small models and adapters.
#![allow(clippy::expect_used, reason = "a test that cannot be set up has failed")]

pub mod built;
pub mod toy;

pub use toy::{Part, Probe, ToyModel, blocks_of, reference, wave};
