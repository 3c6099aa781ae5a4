//! What a plugin implements: a model family, and a model of that family.

use std::fmt;

use tch::Tensor;

use crate::batch::Batch;
use crate::block::BlockIndex;
use crate::config::ConfigSection;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::scope::Scope;
use crate::site::Site;
use crate::state::State;
use crate::vision::{Media, VisionFormat};
use crate::weights::{ExpertLayout, WeightTable};

/// One size that a family can describe: a published checkpoint, or `tiny`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FamilySize {
    /// As typed on the command line: `8b`, `tiny`.
    pub name: String,
    /// The complete `config.json` text of that size.
    pub config_json: String,
}

/// Chat template and special tokens of a family, for the checkpoints that `synth` writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatFormat {
    /// Jinja chat template in the published form.
    pub chat_template: String,
    /// Special tokens that the template and the configuration use, with the id each must have in the
    /// vocabulary of the given configuration.
    pub special_tokens: Vec<(String, u32)>,
    /// Token that ends a turn; generation stops there.
    pub eos_token: String,
    /// Token that fills short rows.
    pub pad_token: String,
}

/// The id of every special token in the vocabulary of a configuration: the one that the configuration names,
/// else the published one, else, where the vocabulary is too small for the published ones, one of the last
/// that are free, in order.
///
/// `section` is the part of `config.json` with `vocab_size`.
///
/// # Errors
/// [`Error::Config`] when the vocabulary has no room for them.
pub fn special_token_ids(
    section: &ConfigSection,
    published: &[(&str, u32)],
    named: impl Fn(&str) -> Option<u32>,
) -> Result<Vec<(String, u32)>> {
    const KEY: &str = "vocab_size";
    let vocab_size: usize = section.required(KEY)?;
    let fits = |id: u32| (id as usize) < vocab_size;
    let count = published.len();
    if vocab_size < count {
        let message = format!("is {vocab_size}, too small for {count} special tokens");
        return Err(section.error(KEY, message));
    }
    let taken: Vec<u32> = published.iter().filter_map(|(token, _)| named(token)).collect();
    if let Some(id) = taken.iter().find(|id| !fits(**id)) {
        let message = format!("is {vocab_size}, but a special token has the id {id}");
        return Err(section.error(KEY, message));
    }
    let as_published = published.iter().all(|(_, id)| fits(*id));
    let last = (vocab_size - count) as u32..vocab_size as u32;
    let mut free = last.filter(|id| !taken.contains(id));
    let assign = |(token, id): &(&str, u32)| {
        let other = || if as_published { Some(*id) } else { free.next() };
        Some((String::from(*token), named(token).or_else(other)?))
    };
    Ok(published.iter().filter_map(assign).collect())
}

/// What is decided about a model beside its `config.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelOptions {
    /// Blocks that the experts of one layer are dealt over, in order: 1, or a number that divides them. A
    /// family without experts ignores it.
    pub num_expert_groups: usize,
    /// How experts lie in the files, where their shapes cannot tell. `None`: the shapes tell.
    pub expert_layout: Option<ExpertLayout>,
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self { num_expert_groups: 1, expert_layout: None }
    }
}

/// A family of models: recognises a `config.json` and opens it.
///
/// Implementations hold no state. Every method may be called from any thread, in any order.
/// A panic in a method is caught inside the plugin and reaches the host as
/// [`Error::PluginPanic`](crate::Error::PluginPanic).
pub trait ModelFamily: Send + Sync {
    /// Name as typed on the command line: lower case, digits and dashes, for example `qwen3-vl`.
    fn name(&self) -> String;

    /// The values of `model_type` in `config.json` that this family opens.
    fn model_types(&self) -> Vec<String>;

    /// The sizes that [`ModelFamily::open`] was written for, `tiny` among them.
    ///
    /// # Errors
    /// None of its own; a panic is reported as one.
    fn sizes(&self) -> Result<Vec<FamilySize>>;

    /// A model from the text of its `config.json`.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) names the key that is missing or unusable.
    fn open(&self, config_json: &str, options: &ModelOptions) -> Result<Box<dyn Model>>;

    /// The same configuration with another number of decoder layers, for smaller synthetic
    /// checkpoints. The default sets `num_hidden_layers`, in `text_config` where there is one.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) when the key is not where it should be.
    fn with_layers(&self, config_json: &str, num_hidden_layers: usize) -> Result<String> {
        set_num_hidden_layers(&self.name(), config_json, num_hidden_layers)
    }

    /// Chat template and special tokens for a checkpoint with this `config.json`.
    ///
    /// # Errors
    /// As [`ModelFamily::open`].
    fn chat_format(&self, config_json: &str) -> Result<ChatFormat>;

    /// Files, as name and content, that tell other programs how to prepare pictures for a checkpoint with
    /// this `config.json`. The default has none.
    ///
    /// # Errors
    /// As [`ModelFamily::open`].
    fn processor_files(&self, _config_json: &str) -> Result<Vec<(String, Vec<u8>)>> {
        Ok(Vec::new())
    }
}

fn set_num_hidden_layers(family: &str, config_json: &str, layers: usize) -> Result<String> {
    let refuse = |message: String| Error::Config { family: family.to_owned(), message };
    let mut config: serde_json::Value =
        serde_json::from_str(config_json).map_err(|error| refuse(error.to_string()))?;
    let nested = config.get("text_config").is_some();
    let section = if nested { config.get_mut("text_config") } else { Some(&mut config) };
    let value = section
        .and_then(|section| section.get_mut("num_hidden_layers"))
        .ok_or_else(|| refuse("has no num_hidden_layers to change".into()))?;
    *value = layers.into();
    serde_json::to_string_pretty(&config).map_err(|error| refuse(error.to_string()))
}

/// Sizes that the host needs to know of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct ModelDimensions {
    pub hidden_size: usize,
    pub vocab_size: usize,
    pub num_hidden_layers: usize,
    pub max_position_embeddings: usize,
    /// Experts of a layer that has any; 0 for a dense model.
    pub num_experts: usize,
    /// Experts that each token goes to; 0 for a dense model.
    pub num_experts_per_tok: usize,
    /// Standard deviation of the weights that `synth` draws, in millionths (an integer crosses every
    /// boundary unchanged).
    pub initializer_range_ppm: u32,
}

/// One model: its weight table and its arithmetic.
///
/// The forward is the model card in code: it never sees a file, a format, an adapter or a device
/// transfer. It must be a pure function of its arguments and of what the scope returns, because the
/// backward pass runs it again.
pub trait Model: Send + Sync + fmt::Debug {
    /// The sizes.
    fn dimensions(&self) -> ModelDimensions;

    /// Every tensor of the published checkpoint that this model uses, in its block.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) when the configuration describes no possible table.
    fn weights(&self) -> Result<WeightTable>;

    /// Whether a checkpoint tensor that is not in the table may be left aside.
    /// Anything else left over is an error.
    ///
    /// # Errors
    /// None of its own; a panic is reported as one.
    fn ignores(&self, checkpoint_name: &str) -> Result<bool>;

    /// Where adapters may attach. All linears of the table unless a family knows better.
    ///
    /// # Errors
    /// As [`Model::weights`].
    fn sites(&self) -> Result<Vec<Site>> {
        Ok(self.weights()?.sites())
    }

    /// How this model wants pictures; `None` when it takes none.
    ///
    /// # Errors
    /// None of its own; a panic is reported as one.
    fn vision_format(&self) -> Result<Option<VisionFormat>> {
        Ok(None)
    }

    /// The text that stands for `media` in a conversation, in place of the placeholder that the chat
    /// template prints: as many placeholder tokens as the decoder gets positions.
    ///
    /// # Errors
    /// [`Error::NotSupported`](crate::Error::NotSupported) when the model takes no such media.
    fn media_text(&self, media: &Media) -> Result<String> {
        let operation = if media.frame_seconds.is_some() { "films" } else { "pictures" };
        Err(Error::NotSupported { operation, implementer: format!("{self:?}") })
    }

    /// Works out on the host what depends on the values of ids, mask and grids: positions, index lists,
    /// lengths. The executor calls it once per micro-batch, before the tensors go to the device, where
    /// looking at values would make the host wait. The results go into [`Batch::prepared`] and
    /// [`Batch::prepared_on_host`].
    ///
    /// # Errors
    /// [`Error::Usage`](crate::Error::Usage) when ids and pictures do not fit together.
    fn prepare(&self, _batch: &mut Batch) -> Result<()> {
        Ok(())
    }

    /// Turns token ids into the first state and into what all blocks share.
    ///
    /// `batch` is on the device of `scope`. The state must hold
    /// [`HIDDEN`](crate::state::HIDDEN), `[batch, sequence, hidden_size]` in the compute dtype.
    ///
    /// # Errors
    /// Whatever the scope returns.
    fn embed(&self, scope: &dyn Scope, batch: &Batch) -> Result<(Context, State)>;

    /// Runs one streamed block. Tensors that the block does not change are handed on as they are.
    ///
    /// A block that is marked [`only_with_vision`](crate::weights::BlockPlan::only_with_vision) runs for
    /// micro-batches with pictures alone. One that is marked
    /// [`is_tokenwise`](crate::weights::BlockPlan::is_tokenwise) sees the tokens of all micro-batches as
    /// one row, and an empty context.
    ///
    /// # Errors
    /// Whatever the scope returns.
    fn forward_block(
        &self,
        block: BlockIndex,
        scope: &dyn Scope,
        context: &Context,
        state: State,
    ) -> Result<State>;

    /// What the head multiplies: the final norm's output, `[batch, sequence, hidden_size]`.
    ///
    /// # Errors
    /// Whatever the scope returns.
    fn final_hidden(&self, scope: &dyn Scope, context: &Context, state: State) -> Result<Tensor>;

    /// Logits of some rows: `[.., hidden_size]` to `[.., vocab_size]`. The host calls it for as many
    /// rows at a time as memory allows.
    ///
    /// # Errors
    /// Whatever the scope returns.
    fn logits(&self, scope: &dyn Scope, hidden: &Tensor) -> Result<Tensor>;
}
