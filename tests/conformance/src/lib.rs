//! What every BlockStreamer model family must pass.
//!
//! Two entry points. [`check_family`] needs nothing but the family: it opens every size, checks the
//! weight tables, writes a tiny random checkpoint and proves that streaming changes no bit.
//! [`check_golden`] compares with tensors that Hugging Face transformers and peft made.
//!
//! A plugin author calls both from a test; `blockstreamer conformance` calls them on a plugin file.
#![deny(missing_docs)]

mod compare;
mod contract;
mod golden;
mod open;
mod pictures;
mod report;
mod streaming;

use tch::{Device, Kind};

pub use contract::check_family;
pub use golden::check_golden;
pub use report::{Check, Report};

/// Result of the checks' own work; a check that fails is not an error.
pub type Result<T> = std::result::Result<T, blockstreamer_core::Error>;

/// Where and in which dtype to check.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Where to compute.
    pub device: Device,
    /// Compute dtype.
    pub compute_kind: Kind,
}

impl Options {
    /// On `device` in `compute_kind`.
    pub fn new(device: Device, compute_kind: Kind) -> Self {
        Self { device, compute_kind }
    }
}
