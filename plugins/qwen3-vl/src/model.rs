//! Qwen3-VL: the decoder, and how its parts follow one another.

use blockstreamer_core::batch::Batch;
use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::context::{AttentionPattern, Context};
use blockstreamer_core::family::{Model, ModelDimensions, ModelOptions};
use blockstreamer_core::numerics::{
    apply_rotary, interleaved_mrope_axes, inverse_frequencies, rms_norm, rotary_tables,
    text_positions,
};
use blockstreamer_core::routed::{deal, receive};
use blockstreamer_core::scope::{AttentionOptions, Scope};
use blockstreamer_core::state::{HIDDEN, NamedTensors, State};
use blockstreamer_core::tch::{Kind, Tensor};
use blockstreamer_core::vision::{Media, POSITIONS, VisionFormat};
use blockstreamer_core::weights::WeightTable;
use blockstreamer_core::{Error, Result};

use crate::config::Config;
use crate::prepare::{COORDINATES, ROWS, SEGMENTS, TAP_WEIGHTS, TAPS};
use crate::vision::VISION;
use crate::weights::Part;
use crate::{media, moe, prepare, vision, weights};

const COS: &str = "cos";
const SIN: &str = "sin";

#[derive(Debug)]
pub(crate) struct Qwen3VlModel {
    config: Config,
    /// What each streamed block computes.
    parts: Vec<Part>,
    inverse_frequencies: Vec<f32>,
    /// The position axis of each frequency: time, height or width.
    axes: Vec<i64>,
    /// The same for the tower: row or column.
    vision_frequencies: Vec<f32>,
    vision_axes: Vec<i64>,
}

impl Qwen3VlModel {
    pub(crate) fn new(config: Config, options: &ModelOptions) -> Result<Self> {
        let groups = match &config.moe {
            Some(moe) => deal(moe.num_experts, options.num_expert_groups)?,
            None => Vec::new(),
        };
        // Half of the tower's frequencies turn with the row, half with the column.
        let by_axis = inverse_frequencies(config.vision.rope_theta, config.vision.head_dim() / 2)?;
        let vision_axes = [vec![0; by_axis.len()], vec![1; by_axis.len()]].concat();
        Ok(Self {
            parts: weights::parts(&config, &groups),
            inverse_frequencies: inverse_frequencies(config.rope_theta, config.head_dim)?,
            axes: interleaved_mrope_axes(config.mrope_section, config.head_dim / 2)?,
            vision_frequencies: by_axis.repeat(2),
            vision_axes,
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

    /// Attention of decoder layer `layer` with its residual, and what comes next, normed.
    fn attend(
        &self,
        layer: usize,
        scope: &dyn Scope,
        context: &Context,
        state: &mut State,
    ) -> Result<(Tensor, Tensor)> {
        let x = state.take(HIDDEN)?;
        let x = vision::add_deepstack(context, state, layer.checked_sub(1), x)?;
        let x =
            x.f_add(&self.attention(scope, context, &self.norm(scope, "input_layernorm", &x)?)?)?;
        let normed = self.norm(scope, "post_attention_layernorm", &x)?;
        Ok((x, normed))
    }

    /// Hands the patches to the tower: into the state, and what the tower needs to know into the context.
    fn embed_vision(
        &self,
        scope: &dyn Scope,
        batch: &Batch,
        context: &mut Context,
        state: State,
    ) -> Result<State> {
        for name in [ROWS, TAPS, TAP_WEIGHTS] {
            context.tensors.insert(name, batch.prepared.get(name)?.shallow_clone());
        }
        let segments = batch.prepared_on_host.get(SEGMENTS)?.shallow_clone();
        context.on_host.insert(SEGMENTS, segments);
        let coordinates = batch.prepared.get(COORDINATES)?;
        let (frequencies, axes) = (&self.vision_frequencies, &self.vision_axes);
        let (cos, sin) = rotary_tables(frequencies, axes, coordinates, 1.0, Kind::Float)?;
        context.tensors.insert(vision::COS, cos);
        context.tensors.insert(vision::SIN, sin);
        let media = [&batch.images, &batch.videos].into_iter().flatten();
        let patches: Vec<_> = media.map(|patches| &patches.pixels).collect();
        let patches = Tensor::f_cat(&patches, 0)?.f_to_kind(scope.compute_kind())?;
        Ok(state.with(VISION, patches))
    }
}

impl Model for Qwen3VlModel {
    fn dimensions(&self) -> ModelDimensions {
        ModelDimensions {
            hidden_size: self.config.hidden_size,
            vocab_size: self.config.vocab_size,
            num_hidden_layers: self.config.num_hidden_layers,
            num_experts: self.config.moe.as_ref().map_or(0, |moe| moe.num_experts),
            num_experts_per_tok: self.config.moe.as_ref().map_or(0, |moe| moe.num_experts_per_tok),
            max_position_embeddings: self.config.max_position_embeddings,
            initializer_range_ppm: (self.config.initializer_range * 1e6).round() as u32,
        }
    }

    fn weights(&self) -> Result<WeightTable> {
        Ok(weights::table(&self.config, &self.parts))
    }

    fn ignores(&self, checkpoint_name: &str) -> Result<bool> {
        Ok(weights::ignores(&self.config, checkpoint_name))
    }

    fn vision_format(&self) -> Result<Option<VisionFormat>> {
        Ok(Some(media::vision_format(&self.config)))
    }

    fn media_text(&self, media: &Media) -> Result<String> {
        media::text(&self.config, media)
    }

    fn prepare(&self, batch: &mut Batch) -> Result<()> {
        prepare::prepare(&self.config, batch)
    }

    fn embed(&self, scope: &dyn Scope, batch: &Batch) -> Result<(Context, State)> {
        let hidden = scope.embedding("embed_tokens", &batch.input_ids)?;
        let positions = match batch.has_vision() {
            true => batch.prepared.get(POSITIONS)?.shallow_clone(),
            // Text stands at the same place in time, height and width.
            false => text_positions(batch)?.f_unsqueeze(0)?.f_expand([3, -1, -1], false)?,
        };
        let (cos, sin) =
            rotary_tables(&self.inverse_frequencies, &self.axes, &positions, 1.0, hidden.kind())?;
        let mut context = Context {
            tensors: NamedTensors::new().with(COS, cos).with(SIN, sin),
            on_host: NamedTensors::new(),
            attention: AttentionPattern {
                causal: true,
                key_mask: batch.attention_mask.as_ref().map(Tensor::shallow_clone),
                segments: batch.segments.as_ref().map(Tensor::shallow_clone),
            },
        };
        let mut state = State::new().with(HIDDEN, hidden);
        if batch.has_vision() {
            state = self.embed_vision(scope, batch, &mut context, state)?;
        }
        Ok((context, state))
    }

    fn forward_block(
        &self,
        block: BlockIndex,
        scope: &dyn Scope,
        context: &Context,
        mut state: State,
    ) -> Result<State> {
        let tower = &self.config.vision;
        let part = self.parts.get(block.0).ok_or_else(|| {
            Error::usage(format!("block {block} is none of the {} streamed ones", self.parts.len()))
        })?;
        match (part, &self.config.moe) {
            (Part::VisionEmbed, _) => vision::embed(scope, context, state),
            (Part::VisionBlock { deepstack, .. }, _) => {
                vision::block(tower, scope, context, *deepstack, state)
            }
            (Part::VisionMerger, _) => vision::merge(tower, scope, context, state),
            (Part::Router { layer }, Some(experts)) => {
                let (x, normed) = self.attend(*layer, scope, context, &mut state)?;
                moe::route(scope, experts.num_experts_per_tok, normed, state.with(HIDDEN, x))
            }
            (Part::Experts { group, .. }, _) => {
                receive(scope, "mlp.experts", &moe::shape(&group.experts), group.is_last, state)
            }
            (Part::Dense { layer } | Part::Router { layer }, _) => {
                let (x, normed) = self.attend(*layer, scope, context, &mut state)?;
                let x = x.f_add(&self.mlp(scope, &normed)?)?;
                Ok(state.with(HIDDEN, x))
            }
        }
    }

    fn final_hidden(
        &self,
        scope: &dyn Scope,
        context: &Context,
        mut state: State,
    ) -> Result<Tensor> {
        let x = state.take(HIDDEN)?;
        let last = self.config.num_hidden_layers.checked_sub(1);
        let x = vision::add_deepstack(context, &mut state, last, x)?;
        self.norm(scope, "norm", &x)
    }

    fn logits(&self, scope: &dyn Scope, hidden: &Tensor) -> Result<Tensor> {
        let head = if self.config.tie_word_embeddings { "embed_tokens" } else { "lm_head" };
        scope.linear(head, hidden)
    }
}
