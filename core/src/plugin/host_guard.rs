//! The guard of the other direction: a plugin calls the host's [`Scope`], and a panic there would end
//! the process in the plugin's copy of `std`. These wrappers are made in the host.

use tch::{Device, Kind, Tensor};

use crate::batch::Batch;
use crate::block::BlockIndex;
use crate::context::Context;
use crate::error::Result;
use crate::family::{ChatFormat, FamilySize, Model, ModelDimensions, ModelFamily, ModelOptions};
use crate::plugin::guard::guarded;
use crate::scope::{AttentionOptions, ExpertShape, Routing, Scope};
use crate::site::Site;
use crate::state::State;
use crate::vision::{Media, VisionFormat};
use crate::weights::WeightTable;

/// The same family, whose models see the caller's scopes through a panic guard: a panic in a scope
/// comes back as [`Error::PluginPanic`](crate::Error::PluginPanic) of the plugin `host`.
pub fn guard_scopes(family: Box<dyn ModelFamily>) -> Box<dyn ModelFamily> {
    Box::new(HostFamily(family))
}

struct HostFamily(Box<dyn ModelFamily>);

impl ModelFamily for HostFamily {
    fn name(&self) -> String {
        self.0.name()
    }

    fn model_types(&self) -> Vec<String> {
        self.0.model_types()
    }

    fn sizes(&self) -> Result<Vec<FamilySize>> {
        self.0.sizes()
    }

    fn open(&self, config_json: &str, options: &ModelOptions) -> Result<Box<dyn Model>> {
        Ok(Box::new(HostModel(self.0.open(config_json, options)?)))
    }

    fn with_layers(&self, config_json: &str, num_hidden_layers: usize) -> Result<String> {
        self.0.with_layers(config_json, num_hidden_layers)
    }

    fn chat_format(&self, config_json: &str) -> Result<ChatFormat> {
        self.0.chat_format(config_json)
    }

    fn processor_files(&self, config_json: &str) -> Result<Vec<(String, Vec<u8>)>> {
        self.0.processor_files(config_json)
    }
}

#[derive(Debug)]
struct HostModel(Box<dyn Model>);

impl Model for HostModel {
    fn dimensions(&self) -> ModelDimensions {
        self.0.dimensions()
    }

    fn weights(&self) -> Result<WeightTable> {
        self.0.weights()
    }

    fn ignores(&self, checkpoint_name: &str) -> Result<bool> {
        self.0.ignores(checkpoint_name)
    }

    fn sites(&self) -> Result<Vec<Site>> {
        self.0.sites()
    }

    fn vision_format(&self) -> Result<Option<VisionFormat>> {
        self.0.vision_format()
    }

    fn media_text(&self, media: &Media) -> Result<String> {
        self.0.media_text(media)
    }

    fn prepare(&self, batch: &mut Batch) -> Result<()> {
        self.0.prepare(batch)
    }

    fn embed(&self, scope: &dyn Scope, batch: &Batch) -> Result<(Context, State)> {
        self.0.embed(&GuardedScope::new(scope), batch)
    }

    fn forward_block(
        &self,
        block: BlockIndex,
        scope: &dyn Scope,
        context: &Context,
        state: State,
    ) -> Result<State> {
        self.0.forward_block(block, &GuardedScope::new(scope), context, state)
    }

    fn final_hidden(&self, scope: &dyn Scope, context: &Context, state: State) -> Result<Tensor> {
        self.0.final_hidden(&GuardedScope::new(scope), context, state)
    }

    fn logits(&self, scope: &dyn Scope, hidden: &Tensor) -> Result<Tensor> {
        self.0.logits(&GuardedScope::new(scope), hidden)
    }
}

struct GuardedScope<'a> {
    inner: &'a dyn Scope,
    // Asked once, before the plugin is entered: they have no way to report a panic.
    compute_kind: Kind,
    device: Device,
}

impl<'a> GuardedScope<'a> {
    fn new(inner: &'a dyn Scope) -> Self {
        Self { inner, compute_kind: inner.compute_kind(), device: inner.device() }
    }
}

impl Scope for GuardedScope<'_> {
    fn linear(&self, site: &str, x: &Tensor) -> Result<Tensor> {
        guarded("host", "Scope::linear", || self.inner.linear(site, x))
    }

    fn embedding(&self, site: &str, ids: &Tensor) -> Result<Tensor> {
        guarded("host", "Scope::embedding", || self.inner.embedding(site, ids))
    }

    fn tensor(&self, name: &str) -> Result<Tensor> {
        guarded("host", "Scope::tensor", || self.inner.tensor(name))
    }

    fn stored_tensor(&self, name: &str) -> Result<Tensor> {
        guarded("host", "Scope::stored_tensor", || self.inner.stored_tensor(name))
    }

    fn attention(
        &self,
        site: &str,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        context: &Context,
        options: &AttentionOptions<'_>,
    ) -> Result<Tensor> {
        guarded("host", "Scope::attention", || {
            self.inner.attention(site, query, key, value, context, options)
        })
    }

    fn experts(
        &self,
        site: &str,
        x: &Tensor,
        routing: &Routing,
        shape: &ExpertShape,
        sum: Option<&Tensor>,
    ) -> Result<Tensor> {
        guarded("host", "Scope::experts", || self.inner.experts(site, x, routing, shape, sum))
    }

    fn compute_kind(&self) -> Kind {
        self.compute_kind
    }

    fn device(&self) -> Device {
        self.device
    }
}
