//! The decoder of Qwen3-VL.

use blockstreamer_core::Result;
use blockstreamer_core::batch::Batch;
use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::context::{AttentionPattern, Context};
use blockstreamer_core::family::{Model, ModelDimensions};
use blockstreamer_core::numerics::{
    apply_rotary, interleaved_mrope_axes, inverse_frequencies, rms_norm, rotary_tables,
    text_positions,
};
use blockstreamer_core::scope::{AttentionOptions, Scope};
use blockstreamer_core::state::{HIDDEN, NamedTensors, State};
use blockstreamer_core::tch::Tensor;
use blockstreamer_core::weights::WeightTable;

use crate::config::Config;
use crate::weights;

const COS: &str = "cos";
const SIN: &str = "sin";

#[derive(Debug)]
pub(crate) struct Qwen3VlModel {
    config: Config,
    inverse_frequencies: Vec<f32>,
    /// The position axis of each frequency: time, height or width.
    axes: Vec<i64>,
}

impl Qwen3VlModel {
    pub(crate) fn new(config: Config) -> Result<Self> {
        Ok(Self {
            inverse_frequencies: inverse_frequencies(config.rope_theta, config.head_dim)?,
            axes: interleaved_mrope_axes(config.mrope_section, config.head_dim / 2)?,
            config,
        })
    }

    fn norm(&self, scope: &dyn Scope, name: &str, x: &Tensor) -> Result<Tensor> {
        rms_norm(x, &scope.tensor(&format!("{name}.weight"))?, self.config.rms_norm_eps)
    }

    /// `x` is `[batch, sequence, hidden_size]`, and so is the result.
    fn attention(&self, scope: &dyn Scope, context: &Context, x: &Tensor) -> Result<Tensor> {
        let (batch, sequence, _) = x.size3()?;
        let head_dim = self.config.head_dim as i64;
        let heads = |site: &str| -> Result<Tensor> {
            Ok(scope.linear(site, x)?.f_view([batch, sequence, -1, head_dim])?)
        };
        // [batch, sequence, heads, head_dim]: norms run over each head, before the rotation
        let q = self.norm(scope, "self_attn.q_norm", &heads("self_attn.q_proj")?)?;
        let k = self.norm(scope, "self_attn.k_norm", &heads("self_attn.k_proj")?)?;
        let v = heads("self_attn.v_proj")?.f_transpose(1, 2)?;

        let (cos, sin) = (context.tensors.get(COS)?, context.tensors.get(SIN)?);
        let q = apply_rotary(&q, cos, sin)?.f_transpose(1, 2)?;
        let k = apply_rotary(&k, cos, sin)?.f_transpose(1, 2)?;

        let options = AttentionOptions::new((head_dim as f64).powf(-0.5));
        let mixed = scope.attention("self_attn", &q, &k, &v, context, &options)?;
        let mixed = mixed.f_transpose(1, 2)?.f_reshape([batch, sequence, -1])?;
        scope.linear("self_attn.o_proj", &mixed)
    }

    fn mlp(&self, scope: &dyn Scope, x: &Tensor) -> Result<Tensor> {
        let gate = scope.linear("mlp.gate_proj", x)?.f_silu()?;
        let up = scope.linear("mlp.up_proj", x)?;
        scope.linear("mlp.down_proj", &gate.f_mul(&up)?)
    }
}

impl Model for Qwen3VlModel {
    fn dimensions(&self) -> ModelDimensions {
        ModelDimensions {
            hidden_size: self.config.hidden_size,
            vocab_size: self.config.vocab_size,
            num_hidden_layers: self.config.num_hidden_layers,
            max_position_embeddings: self.config.max_position_embeddings,
            initializer_range_ppm: (self.config.initializer_range * 1e6).round() as u32,
        }
    }

    fn weights(&self) -> Result<WeightTable> {
        Ok(weights::table(&self.config))
    }

    fn ignores(&self, checkpoint_name: &str) -> Result<bool> {
        Ok(weights::ignores(&self.config, checkpoint_name))
    }

    fn embed(&self, scope: &dyn Scope, batch: &Batch) -> Result<(Context, State)> {
        let hidden = scope.embedding("embed_tokens", &batch.input_ids)?;
        // Text stands at the same place in time, height and width.
        let positions = text_positions(batch)?.f_unsqueeze(0)?.f_expand([3, -1, -1], false)?;
        let (cos, sin) =
            rotary_tables(&self.inverse_frequencies, &self.axes, &positions, hidden.kind())?;
        let context = Context {
            tensors: NamedTensors::new().with(COS, cos).with(SIN, sin),
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
        _block: BlockIndex,
        scope: &dyn Scope,
        context: &Context,
        mut state: State,
    ) -> Result<State> {
        let x = state.take(HIDDEN)?;
        let x =
            x.f_add(&self.attention(scope, context, &self.norm(scope, "input_layernorm", &x)?)?)?;
        let x = x.f_add(&self.mlp(scope, &self.norm(scope, "post_attention_layernorm", &x)?)?)?;
        Ok(state.with(HIDDEN, x))
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
        let head = if self.config.tie_word_embeddings { "embed_tokens" } else { "lm_head" };
        scope.linear(head, hidden)
    }
}
