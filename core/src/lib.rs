//! Traits, streaming engine, numerics, adapters and plugin boundary of BlockStreamer.
//!
//! A model is an ordered list of [blocks](block::BlockSpec): named sets of tensors that are staged,
//! used and dropped together.
//! A [`BlockSource`](source::BlockSource) knows where their bytes are, the [stream] moves them through a
//! bounded window of device memory, a [`Model`](family::Model) computes with them through a
//! [`Scope`](scope::Scope), an [`Adapter`](adapter::Adapter) changes its linears, and an
//! [`Optimizer`](optimizer::Optimizer) steps what is trainable.
//! The [executor](execute) walks the itinerary of a whole step through all of them.
//!
//! This crate knows no model family by name.
#![deny(missing_docs)]

pub mod adapter;
pub mod batch;
pub mod block;
pub mod checkpoint;
pub mod config;
pub mod context;
pub mod device;
pub mod dtype;
pub mod error;
pub mod execute;
pub mod family;
pub mod merge;
pub mod numerics;
pub mod optimizer;
pub mod plan;
pub mod plugin;
pub mod read;
pub mod routed;
pub mod scope;
pub mod site;
mod size;
pub mod source;
pub mod state;
pub mod stream;
pub mod vision;
pub mod weights;

pub use error::{Error, Result};
// Families build and return these; one version on both sides of the boundary is part of the fingerprint.
pub use inventory;
pub use tch;
