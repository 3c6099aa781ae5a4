//! From a folder to an executor, as the host does it.

use std::path::Path;
use std::sync::Arc;

use blockstreamer_core::adapter::{Adapter, Lora};
use blockstreamer_core::checkpoint::{Checkpoint, Layout};
use blockstreamer_core::execute::{Executor, ExecutorOptions, Residency};
use blockstreamer_core::family::{Model, ModelFamily, ModelOptions};
use blockstreamer_core::numerics::{AttentionKernel, ExpertKernel};
use blockstreamer_core::source::{BlockSource, SafetensorsSource};
use blockstreamer_core::stream::StreamOptions;

use crate::{Options, Result};

/// A checkpoint that a family has opened.
pub(crate) struct Opened<'a> {
    family: &'a dyn ModelFamily,
    pub(crate) checkpoint: Checkpoint,
    pub(crate) layout: Layout,
    model_options: ModelOptions,
}

impl<'a> Opened<'a> {
    pub(crate) fn new(family: &'a dyn ModelFamily, directory: &Path) -> Result<Self> {
        Self::with_options(family, directory, ModelOptions::default())
    }

    pub(crate) fn with_options(
        family: &'a dyn ModelFamily,
        directory: &Path,
        model_options: ModelOptions,
    ) -> Result<Self> {
        let checkpoint = Checkpoint::open(directory)?;
        let model = family.open(&checkpoint.config_json, &model_options)?;
        let layout = Layout::of(&checkpoint, &*model, &model_options)?;
        Ok(Self { family, checkpoint, layout, model_options })
    }

    pub(crate) fn model(&self) -> Result<Box<dyn Model>> {
        self.family.open(&self.checkpoint.config_json, &self.model_options)
    }

    pub(crate) fn files(&self) -> Result<Arc<dyn BlockSource>> {
        Ok(Arc::new(SafetensorsSource::open(self.layout.clone())?))
    }

    /// An executor over `source`, in eager attention, with the adapter in a folder if one is given.
    pub(crate) fn executor(
        &self,
        source: Arc<dyn BlockSource>,
        adapter: Option<Box<dyn Adapter>>,
        prefetch_ahead: usize,
        options: &Options,
    ) -> Result<Executor> {
        self.placed_executor(source, adapter, prefetch_ahead, Residency::default(), options)
    }

    /// As [`Opened::executor`], with other placements.
    pub(crate) fn placed_executor(
        &self,
        source: Arc<dyn BlockSource>,
        adapter: Option<Box<dyn Adapter>>,
        prefetch_ahead: usize,
        residency: Residency,
        options: &Options,
    ) -> Result<Executor> {
        let options = ExecutorOptions {
            attention: AttentionKernel::Eager,
            experts: ExpertKernel::Loop,
            stream: StreamOptions { prefetch_ahead, ..StreamOptions::default() },
            residency,
            ..ExecutorOptions::new(options.device, options.compute_kind)
        };
        Executor::new(self.model()?, source, adapter, options)
    }

    /// An executor with the kernels that training uses, over the files, with the adapter in a folder. The
    /// experts of each layer are in two blocks where they can be.
    pub(crate) fn training_executor(&self, adapter: &Path, options: &Options) -> Result<Executor> {
        let num_experts = self.model()?.dimensions().num_experts;
        let num_expert_groups =
            if num_experts > 0 && num_experts.is_multiple_of(2) { 2 } else { 1 };
        let cut = Self::with_options(
            self.family,
            &self.checkpoint.directory,
            ModelOptions { num_expert_groups, ..self.model_options },
        )?;
        let adapter = cut.import(adapter, options)?;
        let options = ExecutorOptions::new(options.device, options.compute_kind);
        Executor::new(cut.model()?, cut.files()?, Some(adapter), options)
    }

    pub(crate) fn import(&self, directory: &Path, options: &Options) -> Result<Box<dyn Adapter>> {
        Ok(Box::new(Lora::import(directory, &self.model()?.sites()?, options.device)?))
    }
}
