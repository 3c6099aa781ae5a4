//! Optimizers over trainable tensors on the device.

use std::collections::BTreeMap;
use std::fmt;

use tch::Tensor;

use crate::error::Result;
use crate::state::NamedTensors;

/// One trainable tensor with its gradient, both fp32 on the same device.
#[derive(Debug, Clone, Copy)]
pub struct Parameter<'a> {
    /// Unique name: the key of its state.
    pub name: &'a str,
    /// Updated in place.
    pub value: &'a Tensor,
    /// Gradient of the whole step.
    pub gradient: &'a Tensor,
}

/// Everything an optimizer must remember to go on exactly where it was.
#[derive(Debug, Default)]
pub struct OptimizerState {
    /// Counters such as the steps taken, by `{parameter}.{what}`.
    pub counters: BTreeMap<String, u64>,
    /// Moments, by `{parameter}.{what}`.
    pub tensors: NamedTensors,
}

/// Steps trainable tensors and owns what it remembers of them.
pub trait Optimizer: Send + fmt::Debug {
    /// Updates the given parameters in place. They may be those of one block or all: each has its own
    /// step count. No graph is recorded and the host does not wait for the device.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch) when libtorch refuses.
    fn step(&mut self, parameters: &[Parameter<'_>], learning_rate: f64) -> Result<()>;

    /// The state, sharing memory with the optimizer.
    fn state(&self) -> OptimizerState;

    /// Takes a saved state; the next step continues bit for bit.
    ///
    /// # Errors
    /// [`Error::Usage`](crate::Error::Usage) when it belongs to another kind of optimizer.
    fn restore(&mut self, state: OptimizerState) -> Result<()>;
}
