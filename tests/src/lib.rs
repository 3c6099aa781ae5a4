//! What the integration tests share: built plugins, small models and adapters.

pub mod built;
pub mod toy;

pub use toy::{Part, Probe, ToyModel, blocks_of, reference, wave};
