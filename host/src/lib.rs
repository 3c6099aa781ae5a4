//! The host of BlockStreamer: plugin discovery, command line, data, training loop, reports.
//!
//! It knows no model family by name. All process-wide state (subscribers, progress bars, thread pools)
//! lives here, never in core or in a plugin.

pub mod bench;
pub mod cli;
pub mod commands;
pub mod data;
pub mod engine;
pub mod plugins;
pub mod run;
pub mod size;
pub mod trace;
