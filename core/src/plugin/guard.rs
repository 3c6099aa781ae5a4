//! Wraps a plugin's trait objects so that no panic leaves the library that raised it.
//!
//! A panic that reaches another copy of `std` ends the process. The wrappers are therefore made by
//! [`register`](super::register), in the plugin. What returns no `Result` is asked once, where a
//! panic can still be reported, and remembered.

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::Tensor;

use crate::batch::Batch;
use crate::block::BlockIndex;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::family::{ChatFormat, FamilySize, Model, ModelDimensions, ModelFamily, ModelOptions};
use crate::scope::Scope;
use crate::site::Site;
use crate::state::State;
use crate::vision::{Media, VisionFormat};
use crate::weights::WeightTable;

/// Runs `call` and turns a panic into [`Error::PluginPanic`].
pub(super) fn guarded<T>(
    plugin: &str,
    method: &'static str,
    call: impl FnOnce() -> Result<T>,
) -> Result<T> {
    // Whatever a panicking call leaves half-done stays inside the plugin's own types, which promise
    // to hold no state (`ModelFamily`) or to be pure functions (`Model`).
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|payload| {
        let message = panic_message(payload);
        Err(Error::PluginPanic { plugin: plugin.to_owned(), method, message })
    })
}

/// The text of a panic. Consumes the payload without running foreign destructors.
fn panic_message(payload: Box<dyn Any + Send>) -> String {
    let payload = match payload.downcast::<String>() {
        Ok(text) => return *text,
        Err(payload) => payload,
    };
    match payload.downcast::<&'static str>() {
        Ok(text) => (*text).to_owned(),
        Err(payload) => {
            // Its destructor may panic again, outside any guard.
            std::mem::forget(payload);
            "(a panic without a text)".to_owned()
        }
    }
}

/// A family whose panics come back as errors.
pub(super) struct GuardedFamily {
    name: String,
    model_types: Vec<String>,
    inner: Guarded<dyn ModelFamily>,
}

impl GuardedFamily {
    /// Guards what `make` returns. `package` names the plugin for as long as the family cannot.
    pub(super) fn new(package: &str, make: fn() -> Box<dyn ModelFamily>) -> Result<Self> {
        let inner = Guarded::new(package, guarded(package, "register", || Ok(make()))?);
        let name = guarded(package, "name", || Ok(inner.name()))?;
        let model_types = guarded(&name, "model_types", || Ok(inner.model_types()))?;
        Ok(Self { name, model_types, inner })
    }
}

impl ModelFamily for GuardedFamily {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn model_types(&self) -> Vec<String> {
        self.model_types.clone()
    }

    fn sizes(&self) -> Result<Vec<FamilySize>> {
        guarded(&self.name, "sizes", || self.inner.sizes())
    }

    fn open(&self, config_json: &str, options: &ModelOptions) -> Result<Box<dyn Model>> {
        let model = guarded(&self.name, "open", || self.inner.open(config_json, options))?;
        let inner = Guarded::new(&self.name, model);
        let dimensions = guarded(&self.name, "dimensions", || Ok(inner.dimensions()))?;
        Ok(Box::new(GuardedModel { dimensions, inner }))
    }

    fn with_layers(&self, config_json: &str, num_hidden_layers: usize) -> Result<String> {
        guarded(&self.name, "with_layers", || {
            self.inner.with_layers(config_json, num_hidden_layers)
        })
    }

    fn chat_format(&self, config_json: &str) -> Result<ChatFormat> {
        guarded(&self.name, "chat_format", || self.inner.chat_format(config_json))
    }

    fn processor_files(&self, config_json: &str) -> Result<Vec<(String, Vec<u8>)>> {
        guarded(&self.name, "processor_files", || self.inner.processor_files(config_json))
    }
}

/// A model whose panics come back as errors.
struct GuardedModel {
    dimensions: ModelDimensions,
    inner: Guarded<dyn Model>,
}

impl GuardedModel {
    fn call<T>(
        &self,
        method: &'static str,
        call: impl FnOnce(&dyn Model) -> Result<T>,
    ) -> Result<T> {
        guarded(&self.inner.plugin, method, || call(&*self.inner))
    }
}

impl Model for GuardedModel {
    fn dimensions(&self) -> ModelDimensions {
        self.dimensions
    }

    fn weights(&self) -> Result<WeightTable> {
        self.call("weights", |model| model.weights())
    }

    fn ignores(&self, checkpoint_name: &str) -> Result<bool> {
        self.call("ignores", |model| model.ignores(checkpoint_name))
    }

    fn sites(&self) -> Result<Vec<Site>> {
        self.call("sites", |model| model.sites())
    }

    fn vision_format(&self) -> Result<Option<VisionFormat>> {
        self.call("vision_format", |model| model.vision_format())
    }

    fn media_text(&self, media: &Media) -> Result<String> {
        self.call("media_text", |model| model.media_text(media))
    }

    fn prepare(&self, batch: &mut Batch) -> Result<()> {
        self.call("prepare", |model| model.prepare(batch))
    }

    fn embed(&self, scope: &dyn Scope, batch: &Batch) -> Result<(Context, State)> {
        self.call("embed", |model| model.embed(scope, batch))
    }

    fn forward_block(
        &self,
        block: BlockIndex,
        scope: &dyn Scope,
        context: &Context,
        state: State,
    ) -> Result<State> {
        self.call("forward_block", |model| model.forward_block(block, scope, context, state))
    }

    fn final_hidden(&self, scope: &dyn Scope, context: &Context, state: State) -> Result<Tensor> {
        self.call("final_hidden", |model| model.final_hidden(scope, context, state))
    }

    fn logits(&self, scope: &dyn Scope, hidden: &Tensor) -> Result<Tensor> {
        self.call("logits", |model| model.logits(scope, hidden))
    }
}

impl fmt::Debug for GuardedModel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // An `Err` would make the caller's `format!` panic, so a panic becomes text.
        match self.call("fmt", |model| Ok(format!("{model:?}"))) {
            Ok(text) => formatter.write_str(&text),
            Err(error) => write!(formatter, "({error})"),
        }
    }
}

/// A plugin's object whose destructor may panic.
struct Guarded<T: ?Sized> {
    plugin: String,
    inner: ManuallyDrop<Box<T>>,
}

impl<T: ?Sized> Guarded<T> {
    fn new(plugin: &str, inner: Box<T>) -> Self {
        Self { plugin: plugin.to_owned(), inner: ManuallyDrop::new(inner) }
    }
}

impl<T: ?Sized> Deref for Guarded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: ?Sized> Drop for Guarded<T> {
    fn drop(&mut self) {
        let result = guarded(&self.plugin, "drop", || {
            // SAFETY: `inner` is dropped nowhere else, and not used after its owner's `drop`.
            unsafe { ManuallyDrop::drop(&mut self.inner) };
            Ok(())
        });
        if let Err(error) = result {
            tracing::error!("{error}");
        }
    }
}
