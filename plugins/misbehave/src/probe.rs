//! A model of one block that reports how the process looks from inside the plugin, or panics.
#![allow(clippy::panic, reason = "it is here to panic")]

use std::fmt;

use blockstreamer_core::batch::Batch;
use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::context::Context;
use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::family::{Model, ModelDimensions};
use blockstreamer_core::scope::Scope;
use blockstreamer_core::site::Site;
use blockstreamer_core::state::{HIDDEN, State};
use blockstreamer_core::tch::{Kind, Tensor};
use blockstreamer_core::weights::{Role, WeightTable, row};
use blockstreamer_core::{Error, Result};

/// The model. `panic_in` names the method that panics, with the prefix `panic_in_`.
pub(crate) struct Probe {
    pub(crate) panic_in: String,
}

impl Probe {
    /// What `config.json` asks for.
    pub(crate) fn panic_in(family: &str, config_json: &str) -> Result<String> {
        let config: serde_json::Value = serde_json::from_str(config_json).map_err(|error| {
            Error::Config { family: family.to_owned(), message: error.to_string() }
        })?;
        Ok(format!("panic_in_{}", config["panic_in"].as_str().unwrap_or("nothing")))
    }

    fn check(&self, method: &str) {
        if self.panic_in == format!("panic_in_{method}") {
            // With a text that is formatted, so not a literal: the harder kind of payload.
            std::panic::panic_any(format!("asked to panic in {method}"));
        }
    }
}

impl fmt::Debug for Probe {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.check("fmt");
        formatter.write_str("Probe")
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.check("drop");
    }
}

impl Model for Probe {
    fn dimensions(&self) -> ModelDimensions {
        self.check("dimensions");
        ModelDimensions {
            hidden_size: 4,
            vocab_size: 8,
            num_hidden_layers: 1,
            num_experts: 0,
            num_experts_per_tok: 0,
            max_position_embeddings: 16,
            initializer_range_ppm: 20_000,
        }
    }

    fn weights(&self) -> Result<WeightTable> {
        self.check("weights");
        let rows = [row("layers.{n}.up.weight", "up.weight", Role::Linear, &[4, 4])];
        Ok(WeightTable::new(Dtype::F32).layers("layers.{n}", 1, &rows))
    }

    fn ignores(&self, checkpoint_name: &str) -> Result<bool> {
        self.check("ignores");
        Ok(checkpoint_name == "ignored")
    }

    fn sites(&self) -> Result<Vec<Site>> {
        self.check("sites");
        Ok(self.weights()?.sites())
    }

    fn embed(&self, scope: &dyn Scope, batch: &Batch) -> Result<(Context, State)> {
        self.check("embed");
        let hidden = scope.embedding("embed", &batch.input_ids)?;
        Ok((Context::default(), State::new().with(HIDDEN, hidden)))
    }

    /// The host's linear on the hidden states, and whether a graph was recorded here.
    fn forward_block(
        &self,
        block: BlockIndex,
        scope: &dyn Scope,
        _context: &Context,
        mut state: State,
    ) -> Result<State> {
        self.check("forward_block");
        let hidden = scope.linear("up", &state.take(HIDDEN)?)?;
        let leaf = Tensor::f_ones([1], (Kind::Float, scope.device()))?.f_set_requires_grad(true)?;
        let grad_enabled = leaf.f_mul_scalar(2.0)?.requires_grad();
        tracing::info!(block = block.0, grad_enabled, "inside the plugin");
        let grad_enabled = Tensor::f_from_slice(&[grad_enabled])?;
        Ok(state.with(HIDDEN, hidden.f_add_scalar(1.0)?).with("grad_enabled", grad_enabled))
    }

    fn final_hidden(&self, _scope: &dyn Scope, _context: &Context, state: State) -> Result<Tensor> {
        self.check("final_hidden");
        Ok(state.get(HIDDEN)?.shallow_clone())
    }

    fn logits(&self, scope: &dyn Scope, hidden: &Tensor) -> Result<Tensor> {
        self.check("logits");
        scope.linear("lm_head", hidden)
    }
}
