//! The arithmetic that streaming must not change: everything in memory, one graph through all blocks.

use blockstreamer_core::Result;
use blockstreamer_core::adapter::Adapter;
use blockstreamer_core::batch::{Batch, IGNORE_LABEL};
use blockstreamer_core::block::{BlockIndex, Placement};
use blockstreamer_core::execute::{BlockScope, PassInput, Residents};
use blockstreamer_core::family::Model;
use blockstreamer_core::numerics::{AttentionKernel, ExpertKernel};
use blockstreamer_core::state::{NamedTensors, State};
use blockstreamer_core::vision::Patches;
use tch::{Device, Kind, Reduction, Tensor};

use crate::toy::{ToyModel, blocks_of};

/// Dropout seed of a block (the number of streamed blocks: the head) and a micro-batch.
pub type Seeds<'a> = dyn Fn(usize, usize) -> u64 + 'a;

/// A toy model whose blocks are all on the device.
#[derive(Debug)]
pub struct AllResident<'a> {
    model: &'a ToyModel,
    adapter: Option<&'a dyn Adapter>,
    blocks: Vec<NamedTensors>,
    residents: Residents,
    kind: Kind,
    device: Device,
}

impl<'a> AllResident<'a> {
    /// Brings all of `model` to `device`, to compute in `kind`.
    pub fn new(
        model: &'a ToyModel,
        adapter: Option<&'a dyn Adapter>,
        kind: Kind,
        device: Device,
    ) -> Self {
        let (mut blocks, mut residents) = (Vec::new(), Residents::default());
        for (index, (_, placement, tensors)) in blocks_of(model).into_iter().enumerate() {
            let tensors: NamedTensors = tensors
                .into_iter()
                .map(|(name, tensor)| (name.to_owned(), tensor.to_device(device)))
                .collect();
            match placement {
                Placement::Streamed => blocks.push(tensors),
                Placement::Resident | Placement::Gathered | Placement::Head => {
                    for (name, tensor) in tensors.iter() {
                        residents.tensors.insert(name, tensor.shallow_clone());
                        residents.blocks.insert(name.to_owned(), BlockIndex(index));
                    }
                }
            }
        }
        Self { model, adapter, blocks, residents, kind, device }
    }

    fn scope<'s>(
        &'s self,
        block: Option<usize>,
        tensors: &'s NamedTensors,
        dropout_seed: Option<u64>,
    ) -> BlockScope<'s> {
        BlockScope {
            block: block.map(BlockIndex),
            block_name: "a resident block",
            tensors,
            residents: &self.residents,
            adapter: self.adapter,
            dropout_seed,
            compute_kind: self.kind,
            device: self.device,
            attention: AttentionKernel::Eager,
            experts: ExpertKernel::Loop,
        }
    }

    /// What a batch brings into the first block.
    pub fn embed(&self, batch: &Batch) -> Result<PassInput> {
        let has_vision = batch.has_vision();
        let images = batch.images.clone().map(|images| {
            Ok::<_, blockstreamer_core::Error>(Patches {
                pixels: images.pixels.f_to_device(self.device)?,
                ..images
            })
        });
        let input_ids = batch.input_ids.f_to_device(self.device)?;
        let batch = Batch { images: images.transpose()?, ..Batch::new(input_ids) };
        let empty = NamedTensors::new();
        let embed = || self.model.embed(&self.scope(None, &empty, None), &batch);
        let (context, state) = tch::no_grad(embed)?;
        Ok(PassInput { context, state, has_vision })
    }

    /// The states after each block, for one micro-batch.
    pub fn states(
        &self,
        input: &PassInput,
        micro_batch: usize,
        seeds: Option<&Seeds<'_>>,
    ) -> Result<Vec<State>> {
        let mut states: Vec<State> = Vec::new();
        for (block, tensors) in self.blocks.iter().enumerate() {
            let seed = seeds.map(|seeds| seeds(block, micro_batch));
            let scope = self.scope(Some(block), tensors, seed);
            let state = states.last().unwrap_or(&input.state).clone();
            if self.model.is_for_vision(block) && !input.has_vision {
                states.push(state);
                continue;
            }
            let next =
                self.model.forward_block(BlockIndex(block), &scope, &input.context, state)?;
            states.push(next);
        }
        Ok(states)
    }

    /// The head on the state after the last block: `[batch, sequence, vocab_size]`.
    pub fn head(&self, input: &PassInput, last: State, seed: Option<u64>) -> Result<Tensor> {
        let empty = NamedTensors::new();
        let scope = self.scope(None, &empty, seed);
        let hidden = self.model.final_hidden(&scope, &input.context, last)?;
        self.model.logits(&scope, &hidden)
    }

    /// torch's own cross entropy over all micro-batches at once, with its graph.
    pub fn loss(&self, batches: &[Batch], seeds: Option<&Seeds<'_>>) -> Result<Tensor> {
        let (mut rows, mut targets) = (Vec::new(), Vec::new());
        for (micro_batch, batch) in batches.iter().enumerate() {
            let input = self.embed(batch)?;
            let last = self.states(&input, micro_batch, seeds)?.pop().unwrap_or_default();
            let seed = seeds.map(|seeds| seeds(self.blocks.len(), micro_batch));
            let logits = self.head(&input, last, seed)?;
            let length = logits.size()[1] - 1;
            rows.push(logits.f_narrow(1, 0, length)?.f_flatten(0, 1)?.f_to_kind(Kind::Float)?);
            let labels = batch.labels.as_ref().expect("a batch with labels");
            let shifted = labels.f_narrow(1, 1, length)?.f_reshape([-1])?;
            targets.push(shifted.f_to_device(self.device)?);
        }
        let (rows, targets) = (Tensor::f_cat(&rows, 0)?, Tensor::f_cat(&targets, 0)?);
        Ok(rows.f_cross_entropy_loss::<Tensor>(
            &targets,
            None,
            Reduction::Mean,
            IGNORE_LABEL,
            0.0,
        )?)
    }
}
