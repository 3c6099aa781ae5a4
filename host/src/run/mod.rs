//! A training run: settings, loop, and what its folder holds.

mod checkpoint;
mod config;
mod folder;
mod metrics;
mod progress;
mod rows;
mod shares;
mod step;
mod train;

pub use config::{DataConfig, LoraConfig, OptimizerConfig, Overrides, RunConfig};
pub use folder::RunFolder;
pub use metrics::StepMetrics;
pub use rows::load_rows;
pub use shares::{Shares, StepTimes};
pub(crate) use step::Stepper;
pub use train::{RunSummary, TrainOptions, train};
