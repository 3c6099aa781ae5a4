//! The executor: a whole step through source, stream, model, adapter and gradients.
