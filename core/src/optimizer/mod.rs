//! Optimizers over trainable tensors on the device.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::state::NamedTensors;

mod adam;
mod clip;
mod schedule;
mod sgd;
#[cfg(test)]
mod tests;

pub use adam::{Adam, AdamOptions};
pub use clip::clip_gradient_norm;
pub use schedule::{Decay, Schedule};
pub use sgd::{Sgd, SgdOptions};

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
    /// [`Error::Torch`] when libtorch refuses.
    fn step(&mut self, parameters: &[Parameter<'_>], learning_rate: f64) -> Result<()>;

    /// The state, sharing memory with the optimizer.
    fn state(&self) -> OptimizerState;

    /// Takes a saved state; the next step continues bit for bit.
    ///
    /// # Errors
    /// [`Error::Usage`] when it belongs to another kind of optimizer.
    fn restore(&mut self, state: OptimizerState) -> Result<()>;
}

/// Settings for [`by_name`]. What is `None` takes the default of the optimizer; what is given must be
/// one of its settings.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerOptions {
    /// `adamw`, `adam`: decays of the two means. Default 0.9 and 0.999.
    pub betas: Option<(f64, f64)>,
    /// `adamw`, `adam`: default 1e-8.
    pub eps: Option<f64>,
    /// All. Default 0.01 for `adamw`, 0 for the others.
    pub weight_decay: Option<f64>,
    /// `sgd`: default 0.
    pub momentum: Option<f64>,
    /// `sgd`: default false.
    pub nesterov: Option<bool>,
}

/// The optimizer of this name: `adamw`, `adam` or `sgd`.
///
/// # Errors
/// [`Error::Usage`] for an unknown name (lists those there are), a setting that the optimizer does not
/// have, and one out of range.
pub fn by_name(name: &str, options: OptimizerOptions) -> Result<Box<dyn Optimizer>> {
    let OptimizerOptions { betas, eps, weight_decay, momentum, nesterov } = options;
    let foreign = match name {
        "adamw" | "adam" => [("momentum", momentum.is_some()), ("nesterov", nesterov.is_some())],
        "sgd" => [("betas", betas.is_some()), ("eps", eps.is_some())],
        _ => {
            let message = format!("optimizer '{name}' is not known; there are: adamw, adam, sgd");
            return Err(Error::usage(message));
        }
    };
    if let Some((setting, _)) = foreign.iter().find(|entry| entry.1) {
        return Err(Error::usage(format!("optimizer '{name}' has no setting '{setting}'")));
    }
    if name == "sgd" {
        return Ok(Box::new(Sgd::new(SgdOptions {
            momentum: momentum.unwrap_or_default(),
            nesterov: nesterov.unwrap_or_default(),
            weight_decay: weight_decay.unwrap_or_default(),
        })?));
    }
    let defaults = AdamOptions::default();
    let decoupled = name == "adamw";
    let default_decay = if decoupled { defaults.weight_decay } else { 0.0 };
    let (beta1, beta2) = betas.unwrap_or((defaults.beta1, defaults.beta2));
    Ok(Box::new(Adam::new(AdamOptions {
        beta1,
        beta2,
        eps: eps.unwrap_or(defaults.eps),
        weight_decay: weight_decay.unwrap_or(default_decay),
        decoupled,
    })?))
}

fn check_not_negative(name: &str, value: f64) -> Result<()> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(Error::usage(format!("{name} must be a number of at least 0, not {value}")))
}

/// Whether value, gradient and what is remembered fit one another; broadcasting would hide it.
fn check(parameter: &Parameter<'_>, remembered: Option<&Tensor>) -> Result<()> {
    let Parameter { name, value, gradient } = *parameter;
    let size = value.size();
    if gradient.size() != size || remembered.is_some_and(|tensor| tensor.size() != size) {
        let remembered = remembered.map(Tensor::size);
        let message = format!(
            "the parameter has shape {size:?}, its gradient {:?}, the optimizer's state {remembered:?}; \
             they must be equal",
            gradient.size()
        );
        return Err(Error::tensor(name, message));
    }
    for (what, tensor) in [("parameter", value), ("gradient", gradient)] {
        let kind = tensor.f_kind()?;
        if kind != Kind::Float {
            return Err(Error::tensor(name, format!("the {what} is {kind:?}; it must be fp32")));
        }
    }
    Ok(())
}

/// A copy of a saved fp32 tensor, so that no two optimizers share one.
fn own_tensor(state: &OptimizerState, optimizer: &str, key: &str) -> Result<Tensor> {
    let tensor = state.tensors.find(key).filter(|tensor| tensor.kind() == Kind::Float);
    Ok(tensor.ok_or_else(|| foreign_state(optimizer, key))?.f_detach_copy()?)
}

fn foreign_state(optimizer: &str, key: &str) -> Error {
    Error::usage(format!(
        "the saved optimizer state does not belong to {optimizer}, at '{key}'; resume with the \
         optimizer that wrote it"
    ))
}
