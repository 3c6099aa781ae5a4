//! Adam, with weight decay in the gradient (Kingma and Ba 2015) or apart from it (AdamW, Loshchilov and
//! Hutter 2019).

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use tch::{Kind, Tensor};

use super::{Optimizer, OptimizerState, Parameter, check, own_tensor};
use crate::device::{AdamStep, AdamTensors, fused_adam};
use crate::error::{Error, Result};

/// Settings of [`Adam`], with the defaults of `torch.optim.AdamW`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamOptions {
    /// Decay of the mean of gradients. Default 0.9.
    pub beta1: f64,
    /// Decay of the mean of squared gradients. Default 0.999.
    pub beta2: f64,
    /// Added to the root of the latter. Default 1e-8.
    pub eps: f64,
    /// Default 0.01.
    pub weight_decay: f64,
    /// Whether weight decay shrinks the parameter (AdamW) rather than adding to the gradient (Adam with
    /// L2 regularisation). Default true.
    pub decoupled: bool,
}

impl Default for AdamOptions {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, decoupled: true }
    }
}

/// Adam and AdamW, as `torch.optim` defines them.
#[derive(Debug)]
pub struct Adam {
    options: AdamOptions,
    moments: BTreeMap<String, Moments>,
}

#[derive(Debug)]
struct Moments {
    num_steps: u64,
    mean: Tensor,
    square: Tensor,
}

const STEP: &str = "step";
const MEAN: &str = "exp_avg";
const SQUARE: &str = "exp_avg_sq";

impl Adam {
    /// An optimizer that has taken no step.
    ///
    /// # Errors
    /// [`Error::Usage`] for a setting out of range.
    pub fn new(options: AdamOptions) -> Result<Self> {
        for (name, beta) in [("beta1", options.beta1), ("beta2", options.beta2)] {
            if !(0.0..1.0).contains(&beta) {
                let message = format!("{name} must be at least 0 and less than 1, not {beta}");
                return Err(Error::usage(message));
            }
        }
        super::check_not_negative("eps", options.eps)?;
        super::check_not_negative("weight_decay", options.weight_decay)?;
        Ok(Self { options, moments: BTreeMap::new() })
    }
}

impl Optimizer for Adam {
    fn step(&mut self, parameters: &[Parameter<'_>], learning_rate: f64) -> Result<()> {
        let _guard = tch::no_grad_guard();
        for parameter in parameters {
            let known = self.moments.get(parameter.name);
            check(parameter, known.map(|moments| &moments.mean))?;
        }
        for parameter in parameters {
            let value = parameter.value;
            let moments = match self.moments.entry(parameter.name.to_owned()) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => entry.insert(Moments {
                    num_steps: 0,
                    mean: value.f_zeros_like()?,
                    square: value.f_zeros_like()?,
                }),
            };
            if moments.mean.device() != value.device() {
                // A restored state may come from a file, in host memory.
                moments.mean = moments.mean.f_to_device(value.device())?;
                moments.square = moments.square.f_to_device(value.device())?;
            }
            moments.num_steps += 1;
        }
        // What has taken equally many steps is updated by the same few kernels.
        let mut groups: BTreeMap<u64, Vec<AdamTensors<'_>>> = BTreeMap::new();
        for &Parameter { name, value, gradient } in parameters {
            let Some(Moments { num_steps, mean, square }) = self.moments.get(name) else {
                continue;
            };
            let gradient = gradient.f_contiguous()?;
            let tensors = AdamTensors { value, gradient, mean, square };
            groups.entry(*num_steps).or_default().push(tensors);
        }
        let AdamOptions { beta1, beta2, eps, weight_decay, decoupled } = self.options;
        let decoupled = decoupled.into();
        let step = AdamStep { learning_rate, beta1, beta2, weight_decay, eps, decoupled };
        for (num_steps, tensors) in groups {
            let kind = (Kind::Float, tensors[0].value.device());
            fused_adam(&tensors, &Tensor::f_full([], num_steps as f64, kind)?, &step)?;
        }
        Ok(())
    }

    fn state(&self) -> OptimizerState {
        let mut state = OptimizerState::default();
        for (name, moments) in &self.moments {
            state.counters.insert(format!("{name}.{STEP}"), moments.num_steps);
            state.tensors.insert(format!("{name}.{MEAN}"), moments.mean.shallow_clone());
            state.tensors.insert(format!("{name}.{SQUARE}"), moments.square.shallow_clone());
        }
        state
    }

    fn restore(&mut self, state: OptimizerState) -> Result<()> {
        let mut restored = BTreeMap::new();
        for (key, &num_steps) in &state.counters {
            let Some(name) = key.strip_suffix(STEP).and_then(|name| name.strip_suffix('.')) else {
                return Err(super::foreign_state("Adam", key));
            };
            let moment = |what: &str| own_tensor(&state, "Adam", &format!("{name}.{what}"));
            let moments = Moments { num_steps, mean: moment(MEAN)?, square: moment(SQUARE)? };
            if moments.mean.size() != moments.square.size() {
                return Err(super::foreign_state("Adam", &format!("{name}.{SQUARE}")));
            }
            restored.insert(name.to_owned(), moments);
        }
        if state.tensors.len() != 2 * restored.len() {
            let known = |key: &str| {
                let name = key.rsplit_once('.').map_or("", |parts| parts.0);
                restored.contains_key(name) && (key.ends_with(MEAN) || key.ends_with(SQUARE))
            };
            let left_over = state.tensors.iter().map(|entry| entry.0).find(|key| !known(key));
            return Err(super::foreign_state("Adam", left_over.unwrap_or_default()));
        }
        self.moments = restored;
        Ok(())
    }
}
