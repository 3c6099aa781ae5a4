//! The library behind the `blockstreamer` binary.

pub mod data;
