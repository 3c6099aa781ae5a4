//! The plugin boundary.
//!
//! A plugin is a shared library of Rust types behind three C functions, which [`export_family!`]
//! writes:
//!
//! | symbol | says |
//! | --- | --- |
//! | `blockstreamer_abi` | the number of the [entry points' own shape](abi::ABI) |
//! | `blockstreamer_fingerprint` | [toolchain, core, libtorch, locked versions](fingerprint) |
//! | `blockstreamer_register` | hands the families over, each under a panic guard |
//!
//! The host asks in this order and goes on only if the answer equals its own. Behind equal
//! fingerprints both sides agree on every layout, so that trait objects may cross. Libraries are never
//! unloaded: vtables, thread locals and callbacks of libtorch may outlive everything that is known of.
//!
//! Each library has its own copy of `std`, of `tracing` and of this crate, so of their statics. Three
//! things follow: a panic must be caught on the side that raised it, the host's subscriber must be
//! handed over, and a plugin's own list of families is walked by the plugin.
//!
//! [`export_family!`]: crate::export_family

pub mod abi;
mod export;
pub mod fingerprint;
mod guard;
mod host_guard;

pub use export::{FamilyEntry, adopt_host, linked_families, register};
pub use host_guard::guard_scopes;
