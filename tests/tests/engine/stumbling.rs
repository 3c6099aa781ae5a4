//! A model that fails in a chosen call, and that looks at the weights it is given.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use blockstreamer_core::batch::Batch;
use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::context::Context;
use blockstreamer_core::family::{Model, ModelDimensions};
use blockstreamer_core::scope::Scope;
use blockstreamer_core::state::State;
use blockstreamer_core::weights::WeightTable;
use blockstreamer_core::{Error, Result};
use blockstreamer_tests::ToyModel;
use tch::Tensor;

#[derive(Debug)]
pub(crate) struct Stumbling {
    pub(crate) inner: ToyModel,
    pub(crate) num_calls: Arc<AtomicUsize>,
    pub(crate) fails_at: Arc<AtomicUsize>,
    /// The frozen tensors of every call, as they lie in slots and among the residents.
    pub(crate) frozen: Arc<Mutex<Vec<Tensor>>>,
}

impl Default for Stumbling {
    fn default() -> Self {
        Self {
            inner: ToyModel::mixed(),
            num_calls: Arc::default(),
            fails_at: Arc::new(usize::MAX.into()),
            frozen: Arc::default(),
        }
    }
}

impl Stumbling {
    fn called(&self, scope: &dyn Scope) -> Result<()> {
        let names = [
            "embed.weight",
            "head.weight",
            "final_norm",
            "up.weight",
            "a.weight",
            "gate.weight",
            "norm",
        ];
        let frozen = names.iter().filter_map(|name| scope.stored_tensor(name).ok());
        self.frozen.lock().unwrap().extend(frozen);
        match self.num_calls.fetch_add(1, Ordering::SeqCst) == self.fails_at.load(Ordering::SeqCst)
        {
            true => Err(Error::usage("the model stumbled")),
            false => Ok(()),
        }
    }
}

impl Model for Stumbling {
    fn dimensions(&self) -> ModelDimensions {
        self.inner.dimensions()
    }

    fn weights(&self) -> Result<WeightTable> {
        self.inner.weights()
    }

    fn ignores(&self, name: &str) -> Result<bool> {
        self.inner.ignores(name)
    }

    fn embed(&self, scope: &dyn Scope, batch: &Batch) -> Result<(Context, State)> {
        self.called(scope)?;
        self.inner.embed(scope, batch)
    }

    fn forward_block(
        &self,
        block: BlockIndex,
        scope: &dyn Scope,
        context: &Context,
        state: State,
    ) -> Result<State> {
        let next = self.inner.forward_block(block, scope, context, state)?;
        self.called(scope)?;
        Ok(next)
    }

    fn final_hidden(&self, scope: &dyn Scope, context: &Context, state: State) -> Result<Tensor> {
        self.called(scope)?;
        self.inner.final_hidden(scope, context, state)
    }

    fn logits(&self, scope: &dyn Scope, hidden: &Tensor) -> Result<Tensor> {
        self.called(scope)?;
        self.inner.logits(scope, hidden)
    }
}
