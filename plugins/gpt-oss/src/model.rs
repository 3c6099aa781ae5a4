//! gpt-oss: the decoder.

use std::ops::Range;

use blockstreamer_core::batch::Batch;
use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::context::{AttentionPattern, Context};
use blockstreamer_core::family::{Model, ModelDimensions, ModelOptions};
use blockstreamer_core::numerics::{
    apply_rotary, rms_norm_rounded_once, rotary_tables, text_positions,
};
use blockstreamer_core::routed::{choose, deal, receive, send};
use blockstreamer_core::scope::{AttentionOptions, ExpertActivation, ExpertShape, GateUp, Scope};
use blockstreamer_core::state::{HIDDEN, NamedTensors, State};
use blockstreamer_core::tch::Tensor;
use blockstreamer_core::weights::WeightTable;
use blockstreamer_core::{Error, Result};

use crate::config::{Config, Rope};
use crate::weights::{self, Part};

const COS: &str = "cos";
const SIN: &str = "sin";

#[derive(Debug)]
pub(crate) struct GptOssModel {
    config: Config,
    /// What each streamed block computes.
    parts: Vec<Part>,
}

impl GptOssModel {
    pub(crate) fn new(config: Config, options: &ModelOptions) -> Result<Self> {
        let groups = deal(config.num_experts, options.num_expert_groups)?;
        Ok(Self { parts: weights::parts(&config, &groups), config })
    }

    fn norm(&self, scope: &dyn Scope, name: &str, x: &Tensor) -> Result<Tensor> {
        rms_norm_rounded_once(
            x,
            &scope.tensor(&format!("{name}.weight"))?,
            self.config.rms_norm_eps,
        )
    }

    /// `x` is `[batch, sequence, hidden_size]`, and so is the result.
    fn attention(
        &self,
        layer: usize,
        scope: &dyn Scope,
        context: &Context,
        x: &Tensor,
    ) -> Result<Tensor> {
        let (batch, sequence, _) = x.size3()?;
        let head_dim = self.config.head_dim as i64;
        let heads = |site: &str| -> Result<Tensor> {
            Ok(scope.linear(site, x)?.f_view([batch, sequence, -1, head_dim])?)
        };
        let (cos, sin) = (context.tensors.get(COS)?, context.tensors.get(SIN)?);
        let turned = |site: &str| -> Result<Tensor> {
            Ok(apply_rotary(&heads(site)?, cos, sin)?.f_transpose(1, 2)?)
        };
        let (q, k) = (turned("self_attn.q_proj")?, turned("self_attn.k_proj")?);
        let v = heads("self_attn.v_proj")?.f_transpose(1, 2)?;

        let sinks = scope.tensor("self_attn.sinks")?;
        let options = AttentionOptions::new((head_dim as f64).powf(-0.5))
            .window(self.config.windows[layer])
            .sinks(&sinks);
        let mixed = scope.attention("self_attn", &q, &k, &v, context, &options)?;
        let mixed = mixed.f_transpose(1, 2)?.f_reshape([batch, sequence, -1])?;
        scope.linear("self_attn.o_proj", &mixed)
    }

    /// Attention with its residual; what comes next, normed, goes to the experts that the router chooses: those
    /// with the largest logits, weighted by the softmax of these logits alone.
    fn attend(
        &self,
        layer: usize,
        scope: &dyn Scope,
        context: &Context,
        mut state: State,
    ) -> Result<State> {
        let x = state.take(HIDDEN)?;
        let normed = self.norm(scope, "input_layernorm", &x)?;
        let x = x.f_add(&self.attention(layer, scope, context, &normed)?)?;
        let normed = self.norm(scope, "post_attention_layernorm", &x)?;
        let logits = scope.linear("mlp.router", &normed)?;
        let (chosen, experts) = choose(&logits, self.config.num_experts_per_tok)?;
        let weights = chosen.f_softmax(-1, chosen.kind())?;
        Ok(send(state.with(HIDDEN, x), normed, experts, weights))
    }

    fn experts(&self, experts: &Range<usize>) -> ExpertShape {
        ExpertShape {
            experts: experts.clone(),
            gate_up: GateUp::Interleaved,
            activation: ExpertActivation::ClampedSwiglu {
                alpha: self.config.swiglu_alpha,
                limit: self.config.swiglu_limit,
            },
        }
    }
}

impl Model for GptOssModel {
    fn dimensions(&self) -> ModelDimensions {
        ModelDimensions {
            hidden_size: self.config.hidden_size,
            vocab_size: self.config.vocab_size,
            num_hidden_layers: self.config.windows.len(),
            num_experts: self.config.num_experts,
            num_experts_per_tok: self.config.num_experts_per_tok,
            max_position_embeddings: self.config.max_position_embeddings,
            initializer_range_ppm: (self.config.initializer_range * 1e6).round() as u32,
        }
    }

    fn weights(&self) -> Result<WeightTable> {
        Ok(weights::table(&self.config, &self.parts))
    }

    fn ignores(&self, _checkpoint_name: &str) -> Result<bool> {
        Ok(false)
    }

    fn embed(&self, scope: &dyn Scope, batch: &Batch) -> Result<(Context, State)> {
        let hidden = scope.embedding("embed_tokens", &batch.input_ids)?;
        let Rope { inverse_frequencies, attention_factor } = &self.config.rope;
        let axes = vec![0; inverse_frequencies.len()];
        let positions = text_positions(batch)?.f_unsqueeze(0)?;
        let (cos, sin) = rotary_tables(
            inverse_frequencies,
            &axes,
            &positions,
            *attention_factor,
            hidden.kind(),
        )?;
        let context = Context {
            tensors: NamedTensors::new().with(COS, cos).with(SIN, sin),
            on_host: NamedTensors::new(),
            attention: AttentionPattern {
                causal: true,
                key_mask: batch.attention_mask.as_ref().map(Tensor::shallow_clone),
                segments: batch.segments.as_ref().map(Tensor::shallow_clone),
            },
        };
        Ok((context, State::new().with(HIDDEN, hidden)))
    }

    fn forward_block(
        &self,
        block: BlockIndex,
        scope: &dyn Scope,
        context: &Context,
        state: State,
    ) -> Result<State> {
        let part = self.parts.get(block.0).ok_or_else(|| {
            Error::usage(format!("block {block} is none of the {} streamed ones", self.parts.len()))
        })?;
        match part {
            Part::Attention { layer } => self.attend(*layer, scope, context, state),
            Part::Experts { group, .. } => {
                receive(scope, "mlp.experts", &self.experts(&group.experts), group.is_last, state)
            }
        }
    }

    fn final_hidden(
        &self,
        scope: &dyn Scope,
        _context: &Context,
        mut state: State,
    ) -> Result<Tensor> {
        self.norm(scope, "norm", &state.take(HIDDEN)?)
    }

    fn logits(&self, scope: &dyn Scope, hidden: &Tensor) -> Result<Tensor> {
        scope.linear("lm_head", hidden)
    }
}
