//! Learning rates over the steps of a run.

use std::f64::consts::PI;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// How the learning rate goes on after warm-up, named as in transformers' `get_scheduler`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// It stays.
    #[default]
    Constant,
    /// It falls to 0 on a straight line.
    Linear,
    /// It falls to 0 along half a cosine.
    Cosine,
}

impl Decay {
    const ALL: [(Decay, &'static str); 3] =
        [(Self::Constant, "constant"), (Self::Linear, "linear"), (Self::Cosine, "cosine")];
}

impl fmt::Display for Decay {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(Self::ALL[*self as usize].1)
    }
}

impl FromStr for Decay {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.iter().find(|entry| entry.1 == name).map(|entry| entry.0).ok_or_else(|| {
            let known = Self::ALL.map(|entry| entry.1).join(", ");
            Error::usage(format!("schedule '{name}' is not known; there are: {known}"))
        })
    }
}

/// The learning rate as a function of the step: a straight warm-up from 0, then a decay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// The largest rate, reached after warm-up.
    pub learning_rate: f64,
    /// How it goes on.
    pub decay: Decay,
    /// Steps until the largest rate; 0: none.
    pub warmup_steps: u64,
    /// Steps of the whole run, warm-up included.
    pub total_steps: u64,
}

impl Schedule {
    /// The rate of the step after `completed_steps` others, exactly as transformers' schedules give it.
    /// The first step of a warm-up has rate 0.
    pub fn at(&self, completed_steps: u64) -> f64 {
        let (step, warmup) = (completed_steps as f64, self.warmup_steps as f64);
        if completed_steps < self.warmup_steps {
            return self.learning_rate * step / warmup;
        }
        let decay_steps = (self.total_steps as f64 - warmup).max(1.0);
        let factor = match self.decay {
            Decay::Constant => 1.0,
            Decay::Linear => (self.total_steps as f64 - step).max(0.0) / decay_steps,
            // Past the end the rate stays 0 rather than rising again with the cosine.
            Decay::Cosine => 0.5 * (1.0 + (PI * ((step - warmup) / decay_steps).min(1.0)).cos()),
        };
        self.learning_rate * factor
    }
}
