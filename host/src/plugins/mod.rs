//! Model families: those linked into the host and those found as shared libraries.

mod discover;
mod elf;
mod linked;
mod load;
mod registry;

pub use discover::{PATH_VARIABLE, search};
pub use registry::{Found, Refused, Registry, model_type};
