//! Arithmetic that families share: norms, rotary embeddings, activations.
