//! The host: discovers model families and runs the commands of `blockstreamer`.

pub mod commands;
pub mod plugins;
