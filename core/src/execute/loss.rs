//! The head and the loss, in chunks of rows, over the rows that have a target.

use tch::{Device, Kind, Reduction, Tensor};

use super::forward::{Pass, outlive};
use super::gradients::GradientSink;
use super::{BlockScope, Executor};
use crate::adapter::Trainable;
use crate::batch::{Batch, IGNORE_LABEL};
use crate::block::BlockIndex;
use crate::device::{grad, upload};
use crate::error::{Error, Result};
use crate::state::{NamedTensors, State};
use crate::stream::Lease;

/// The rows of a batch that have a target, and the targets.
#[derive(Debug)]
pub(super) struct Targets {
    /// Positions in the flattened batch, `[num_targets]`, Int64, on the device.
    rows: Tensor,
    /// The token to be predicted at each, `[num_targets]`, Int64, on the device.
    ids: Tensor,
    num_targets: usize,
}

impl Targets {
    /// Shifts the labels by one: position `t` predicts the label of `t + 1`.
    pub(super) fn of(batch: &Batch, device: Device) -> Result<Self> {
        let labels = batch
            .labels
            .as_ref()
            .ok_or_else(|| Error::usage("a batch without labels has no loss"))?;
        if labels.size() != batch.input_ids.size() || labels.dim() != 2 {
            return Err(Error::usage(format!(
                "labels {:?} and input_ids {:?} must both be [batch, sequence]",
                labels.size(),
                batch.input_ids.size()
            )));
        }
        let (_, sequence) = labels.size2()?;
        let last = labels.f_new_full(
            [labels.size()[0], 1],
            IGNORE_LABEL,
            (Kind::Int64, labels.device()),
        )?;
        let shifted = match sequence {
            0 => labels.shallow_clone(),
            _ => Tensor::f_cat(&[&labels.f_narrow(1, 1, sequence - 1)?, &last], 1)?,
        };
        let shifted = match &batch.segments {
            // The last token of a packed sample does not predict the first of the next.
            Some(segments) if sequence > 0 => {
                let next = Tensor::f_cat(&[&segments.f_narrow(1, 1, sequence - 1)?, &last], 1)?;
                shifted.f_masked_fill(&segments.f_ne_tensor(&next)?, IGNORE_LABEL)?
            }
            _ => shifted,
        };
        let flat = shifted.f_reshape([-1])?;
        let rows = flat.f_ne(IGNORE_LABEL)?.f_nonzero()?.f_reshape([-1])?;
        let ids = flat.f_index_select(0, &rows)?;
        let num_targets = rows.numel();
        Ok(Self { rows: upload(&rows, device)?, ids: upload(&ids, device)?, num_targets })
    }

    pub(super) fn len(&self) -> usize {
        self.num_targets
    }
}

impl Executor {
    /// The use of the head for all micro-batches of a pass: a visit when the head is streamed.
    pub(super) fn visit_head<'a>(&'a self, pass: &'a Pass) -> Result<HeadVisit<'a>> {
        let lease = self.streamed_head.map(|block| self.lease(block)).transpose()?;
        Ok(HeadVisit { executor: self, pass, lease, no_tensors: NamedTensors::new() })
    }

    /// The trainables that the head uses, with their positions.
    fn head_trainables(&self) -> Vec<(usize, &Tensor)> {
        let of_head = |trainable: &Trainable| {
            trainable.blocks.iter().any(|block| block.0 >= self.num_streamed)
        };
        let all = self.trainables().iter().enumerate();
        all.filter(|entry| of_head(entry.1)).map(|(index, it)| (index, &it.tensor)).collect()
    }

    /// Start and length of each chunk of rows whose fp32 logits fit the budget.
    fn chunks(&self, num_rows: usize) -> impl Iterator<Item = (i64, i64)> {
        let row_bytes = self.model.dimensions().vocab_size.max(1) * size_of::<f32>();
        let length = chunk_rows(self.options.loss_chunk_bytes / row_bytes);
        (0..num_rows)
            .step_by(length)
            .map(move |start| (start as i64, length.min(num_rows - start) as i64))
    }
}

/// The head while it may be used. Nothing that it returns lies in a slot.
#[derive(Debug)]
pub(super) struct HeadVisit<'a> {
    executor: &'a Executor,
    pass: &'a Pass,
    /// `None`: the head is a resident.
    lease: Option<Lease<'a>>,
    no_tensors: NamedTensors,
}

impl HeadVisit<'_> {
    fn scope(&self, dropout_seed: Option<u64>) -> BlockScope<'_> {
        let block = self.lease.as_ref().map(Lease::block);
        let tensors = self.lease.as_ref().map_or(&self.no_tensors, Lease::tensors);
        self.executor.scope(block, tensors, dropout_seed)
    }

    fn final_hidden(&self, micro_batch: usize) -> Result<Tensor> {
        let state = self.pass.outputs[micro_batch].clone();
        let context = &self.pass.inputs[micro_batch].context;
        self.executor.model.final_hidden(&self.scope(None), context, state)
    }

    /// All logits of one micro-batch.
    pub(super) fn logits(&self, micro_batch: usize) -> Result<Tensor> {
        let _no_graph = tch::no_grad_guard();
        let hidden = self.final_hidden(micro_batch)?;
        let logits = self.executor.model.logits(&self.scope(None), &hidden)?;
        match &self.lease {
            Some(lease) => outlive(lease, &logits),
            None => Ok(logits),
        }
    }

    /// This micro-batch's share of the step's mean loss.
    pub(super) fn loss(
        &self,
        micro_batch: usize,
        targets: &Targets,
        num_targets: usize,
    ) -> Result<Tensor> {
        let _no_graph = tch::no_grad_guard();
        let rows = select_rows(&self.final_hidden(micro_batch)?, targets)?;
        let mut total = Tensor::f_zeros([], (Kind::Float, self.executor.options.device))?;
        for (start, length) in self.executor.chunks(targets.num_targets) {
            let chunk = rows.f_narrow(0, start, length)?;
            let logits = self.executor.model.logits(&self.scope(None), &chunk)?;
            total = total.f_add(&share(&logits, targets, start, length, num_targets)?)?;
        }
        Ok(total)
    }

    /// As [`HeadVisit::loss`], with the gradients of the state after the last block.
    /// Trainables of the head go to the sink.
    pub(super) fn loss_and_grad(
        &self,
        micro_batch: usize,
        targets: &Targets,
        num_targets: usize,
        step: u64,
        sink: &mut dyn GradientSink,
    ) -> Result<(Tensor, NamedTensors)> {
        let &Self { executor, pass, .. } = self;
        let model = &executor.model;
        let mut total = Tensor::f_zeros([], (Kind::Float, executor.options.device))?;
        if targets.num_targets == 0 {
            return Ok((total, NamedTensors::new()));
        }
        // The same seed whether the head is streamed or not, and wherever its block is in the list.
        let seed = executor.visit_seed(step, BlockIndex(executor.num_streamed), micro_batch);
        let trainables = executor.head_trainables();

        let mut leaf_state = State::new();
        let mut leaves: Vec<(&str, Tensor)> = Vec::new();
        for (name, tensor) in pass.outputs[micro_batch].iter() {
            let leaf = tensor.f_detach()?;
            if pass.lowest.is_some() && tensor.is_floating_point() {
                leaves.push((name, leaf.f_set_requires_grad(true)?));
            }
            leaf_state.insert(name, leaf);
        }
        let rows = tch::with_grad(|| {
            let context = &pass.inputs[micro_batch].context;
            let hidden = model.final_hidden(&self.scope(Some(seed)), context, leaf_state)?;
            select_rows(&hidden, targets)
        })?;

        let mut grad_rows = Vec::new();
        for (start, length) in executor.chunks(targets.num_targets) {
            let chunk = rows.f_detach()?.f_narrow(0, start, length)?.f_set_requires_grad(true)?;
            // Rows of different chunks must not share one dropout mask.
            let scope = self.scope(Some(seed.wrapping_add(start as u64)));
            let loss = tch::with_grad(|| {
                share(&model.logits(&scope, &chunk)?, targets, start, length, num_targets)
            })?;
            let mut inputs = vec![&chunk];
            inputs.extend(trainables.iter().map(|(_, tensor)| *tensor));
            let mut gradients = grad(&[&loss], &[&loss.f_ones_like()?], &inputs)?.into_iter();
            grad_rows.push(gradients.next().flatten().ok_or_else(|| {
                Error::usage("the model's logits do not depend on the hidden states it was given")
            })?);
            hand_in(&trainables, gradients, sink)?;
            total = total.f_add(&loss.f_detach()?)?;
        }
        if !rows.requires_grad() {
            return Ok((total, NamedTensors::new()));
        }
        let grad_rows = Tensor::f_cat(&grad_rows, 0)?;
        let mut inputs: Vec<&Tensor> = leaves.iter().map(|(_, leaf)| leaf).collect();
        inputs.extend(trainables.iter().map(|(_, tensor)| *tensor));
        let mut gradients = grad(&[&rows], &[&grad_rows], &inputs)?;
        hand_in(&trainables, gradients.split_off(leaves.len()), sink)?;
        let named = leaves.iter().zip(gradients);
        let named = named.filter_map(|((name, _), gradient)| Some(((*name).to_owned(), gradient?)));
        Ok((total, named.collect()))
    }
}

/// Hands the gradients there are to the sink.
fn hand_in(
    trainables: &[(usize, &Tensor)],
    gradients: impl IntoIterator<Item = Option<Tensor>>,
    sink: &mut dyn GradientSink,
) -> Result<()> {
    for ((index, _), gradient) in trainables.iter().zip(gradients) {
        if let Some(gradient) = gradient {
            sink.accept(*index, gradient)?;
        }
    }
    Ok(())
}

/// As many of `num_rows` as fill the tiles of a matrix product: the products of 220 rows take as long as
/// those of 256.
fn chunk_rows(num_rows: usize) -> usize {
    const TILES: [usize; 2] = [256, 64];
    let tile = TILES.into_iter().find(|tile| *tile <= num_rows);
    tile.map_or(num_rows.max(1), |tile| num_rows - num_rows % tile)
}

/// `[num_targets, hidden_size]` of `[batch, sequence, hidden_size]`.
fn select_rows(hidden: &Tensor, targets: &Targets) -> Result<Tensor> {
    Ok(hidden.f_flatten(0, 1)?.f_index_select(0, &targets.rows)?)
}

/// The share of some rows in the mean over all targets of the step, in fp32.
fn share(
    logits: &Tensor,
    targets: &Targets,
    start: i64,
    length: i64,
    num_targets: usize,
) -> Result<Tensor> {
    let ids = targets.ids.f_narrow(0, start, length)?;
    // One kernel converts and normalises where libtorch has it: the fp32 logits are written once, not twice.
    let logs = logits.f_log_softmax(-1, Kind::Float)?;
    let sum = logs.f_nll_loss::<Tensor>(&ids, None, Reduction::Sum, IGNORE_LABEL)?;
    Ok(sum.f_div_scalar(num_targets as f64)?)
}
