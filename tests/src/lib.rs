//! What the integration tests share: built plugins, small models and adapters.
#![allow(clippy::expect_used, reason = "a test that cannot be set up has failed")]

pub mod built;
pub mod resident;
pub mod toy;

pub use resident::AllResident;
pub use toy::{Part, Probe, ToyModel, blocks_of, wave};
