//! Small models and adapters that the integration tests drive the engine with.

pub mod toy;

pub use toy::{Part, Probe, ToyModel, blocks_of, reference, wave};
