//! The forward and its gradients against tensors that transformers and peft computed
//! (`tests/goldens/make_tiny.py`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod experts;
mod harness;
mod pictures;
mod template;
mod text;
