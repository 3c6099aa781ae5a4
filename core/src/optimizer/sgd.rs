//! Stochastic gradient descent with momentum.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use tch::Tensor;

use super::{Optimizer, OptimizerState, Parameter, check, own_tensor};
use crate::error::{Error, Result};

/// Settings of [`Sgd`], with the defaults of `torch.optim.SGD` (dampening is always 0).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SgdOptions {
    /// Decay of the sum of gradients. Default 0: none is kept.
    pub momentum: f64,
    /// Whether to look ahead along the sum (Nesterov). Needs momentum. Default false.
    pub nesterov: bool,
    /// Adds this times the parameter to the gradient. Default 0.
    pub weight_decay: f64,
}

/// Stochastic gradient descent, as `torch.optim.SGD` defines it.
#[derive(Debug)]
pub struct Sgd {
    options: SgdOptions,
    momenta: BTreeMap<String, Tensor>,
}

const MOMENTUM: &str = "momentum_buffer";

impl Sgd {
    /// An optimizer that has taken no step.
    ///
    /// # Errors
    /// [`Error::Usage`] for a setting out of range.
    pub fn new(options: SgdOptions) -> Result<Self> {
        super::check_not_negative("momentum", options.momentum)?;
        super::check_not_negative("weight_decay", options.weight_decay)?;
        if options.nesterov && options.momentum == 0.0 {
            return Err(Error::usage("nesterov needs a momentum greater than 0"));
        }
        Ok(Self { options, momenta: BTreeMap::new() })
    }
}

impl Optimizer for Sgd {
    fn step(&mut self, parameters: &[Parameter<'_>], learning_rate: f64) -> Result<()> {
        let _guard = tch::no_grad_guard();
        let SgdOptions { momentum, nesterov, weight_decay } = self.options;
        for parameter in parameters {
            check(parameter, self.momenta.get(parameter.name))?;
        }
        for parameter in parameters {
            let mut value = parameter.value.shallow_clone();
            let mut gradient = parameter.gradient.shallow_clone();
            if weight_decay != 0.0 {
                gradient = value.f_mul_scalar(weight_decay)?.f_add_(&gradient)?;
            }
            if momentum != 0.0 {
                let sum = match self.momenta.entry(parameter.name.to_owned()) {
                    Entry::Vacant(entry) => entry.insert(gradient.f_detach_copy()?),
                    Entry::Occupied(entry) => {
                        let sum = entry.into_mut();
                        // A restored state may come from a file, in host memory.
                        *sum = sum.f_to_device(value.device())?;
                        let _ = sum.f_mul_scalar_(momentum)?.f_add_(&gradient)?;
                        sum
                    }
                };
                gradient = if nesterov {
                    sum.f_mul_scalar(momentum)?.f_add_(&gradient)?
                } else {
                    sum.shallow_clone()
                };
            }
            let _ = value.f_add_(&gradient.f_mul_scalar(-learning_rate)?)?;
        }
        Ok(())
    }

    fn state(&self) -> OptimizerState {
        let entry =
            |(name, sum): (&String, &Tensor)| (format!("{name}.{MOMENTUM}"), sum.shallow_clone());
        OptimizerState {
            counters: BTreeMap::new(),
            tensors: self.momenta.iter().map(entry).collect(),
        }
    }

    fn restore(&mut self, state: OptimizerState) -> Result<()> {
        if let Some(key) = state.counters.keys().next() {
            return Err(super::foreign_state("SGD", key));
        }
        let mut restored = BTreeMap::new();
        for (key, _) in state.tensors.iter() {
            let name = key.strip_suffix(MOMENTUM).and_then(|name| name.strip_suffix('.'));
            let name = name.filter(|_| self.options.momentum != 0.0);
            let name = name.ok_or_else(|| super::foreign_state("SGD", key))?;
            restored.insert(name.to_owned(), own_tensor(&state, "SGD", key)?);
        }
        self.momenta = restored;
        Ok(())
    }
}
