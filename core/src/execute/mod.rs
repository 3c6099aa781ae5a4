//! The executor: a whole step through source, stream, model, adapter and gradients.

mod scope;

pub use scope::BlockScope;
