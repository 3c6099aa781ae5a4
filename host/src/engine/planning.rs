//! From settings, machine and model to a residency plan.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use blockstreamer_core::Error;
use blockstreamer_core::adapter::Adapter;
use blockstreamer_core::block::{BlockIndex, BlockSpec};
use blockstreamer_core::execute::ExecutorOptions;
use blockstreamer_core::family::Model;
use blockstreamer_core::plan::{
    Demand, Pass, Plan, PlanRequest, Rates, Tier, Traffic, Workload, device_budget_bytes,
    host_budget_bytes,
};
use blockstreamer_core::read::DriveSetting;
use blockstreamer_core::source::BlockSource;
use tch::{Device, Kind};

use super::StreamConfig;
use super::rates::{ASSUMED, measure};
use crate::size::Size;

/// More than any machine has, and little enough to be added up.
const MOST_STAGING_BYTES: u64 = 1 << 46;

/// What is going to be run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Job {
    /// Whether it goes back, too.
    pub trains: bool,
    /// Most tokens of a micro-batch, padding included.
    pub tokens: usize,
    /// Most micro-batches of one visit.
    pub num_micro_batches: usize,
    /// Most patches of the pictures of one micro-batch; 0 when there are no pictures.
    pub patches: usize,
}

/// What an adapter trains.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trained {
    /// Values in all of its tensors.
    pub num_values: usize,
    /// Its tensors, each as often as there are blocks that it touches.
    pub num_attached: usize,
    /// Names of the blocks that it touches, which mean the same however layers are cut.
    pub blocks: BTreeSet<String>,
}

impl Trained {
    /// What `adapter` trains of a model with these blocks.
    pub fn of(adapter: Option<&dyn Adapter>, blocks: &[BlockSpec]) -> Self {
        let trainables = adapter.map_or(&[][..], |adapter| adapter.trainables());
        let touched = trainables.iter().flat_map(|trainable| &trainable.blocks);
        Self {
            num_values: trainables.iter().map(|trainable| trainable.tensor.numel()).sum(),
            num_attached: trainables.iter().map(|trainable| trainable.blocks.len()).sum(),
            blocks: touched.filter_map(|it| Some(blocks.get(it.0)?.name.clone())).collect(),
        }
    }

    /// The lowest of `blocks` that it touches.
    fn lowest(&self, blocks: &[BlockSpec]) -> Option<BlockIndex> {
        blocks.iter().position(|block| self.blocks.contains(&block.name)).map(BlockIndex)
    }
}

/// Memory that a run may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Of the device.
    pub device_bytes: u64,
    /// Of the host, beside the device's. 0 on the CPU: its memory is the device's, and a block that is
    /// kept there is kept once.
    pub host_bytes: u64,
    /// Whether a number was asked for. Else both are what is free.
    pub is_asked: bool,
}

impl Memory {
    /// What was asked for, and what is free where nothing was.
    ///
    /// # Errors
    /// When the system does not say what is free.
    pub fn of(config: &StreamConfig, device: Device) -> Result<Self> {
        let advice = || "cannot find out how much memory is free; say --vram and --ram";
        let asked = |size: Option<Size>| size.map(|size| size.num_bytes);
        let (vram, ram) = (asked(config.vram), asked(config.ram));
        let is_asked = vram.is_some() || ram.is_some();
        if !device.is_cuda() {
            // One memory: whatever is less.
            let device_bytes = match [vram, ram].into_iter().flatten().min() {
                Some(asked) => asked,
                None => host_budget_bytes().with_context(advice)?,
            };
            let is_copied = config.tier.only() == Some(Tier::Ram);
            let host_bytes = if is_copied { ram.unwrap_or(device_bytes) } else { 0 };
            return Ok(Self { device_bytes, host_bytes, is_asked });
        }
        let free = device_budget_bytes(device).with_context(advice)?;
        let device_bytes = vram.unwrap_or(free);
        if device_bytes > free {
            tracing::warn!(
                "{} of device memory may be used, but only {} are free",
                Size { num_bytes: device_bytes },
                Size { num_bytes: free }
            );
        }
        let host_bytes = match ram {
            Some(ram) => ram,
            None => host_budget_bytes().with_context(advice)?,
        };
        Ok(Self { device_bytes: device_bytes.min(free), host_bytes, is_asked })
    }
}

/// Makes plans for one model and job on one device.
#[derive(Debug)]
pub struct Planner<'a> {
    config: &'a StreamConfig,
    source: Arc<dyn BlockSource>,
    fetch_from_disk: Vec<Traffic>,
    pass: Pass,
    first_block: usize,
    demand: Demand,
    staging_bytes: u64,
    has_one_memory: bool,
    num_slots: usize,
    rates: Rates,
    drive: Option<DriveSetting>,
}

impl<'a> Planner<'a> {
    /// `is_cuda` instead of a device, so that a plan for a GPU can be made where there is none.
    ///
    /// # Errors
    /// When a size in the settings does not fit this machine.
    pub fn new(
        config: &'a StreamConfig,
        source: Arc<dyn BlockSource>,
        model: &dyn Model,
        trained: &Trained,
        job: Job,
        is_cuda: bool,
        kind: Kind,
    ) -> Result<Self> {
        let blocks = source.blocks();
        let num_streamed = blocks.iter().filter(|block| block.placement.is_streamed()).count();
        let num_vision_blocks = model.weights()?.num_vision_blocks();
        let first_block = if job.patches > 0 { 0 } else { num_vision_blocks };
        let pass = match job.trains {
            true => Pass::Training {
                lowest: trained
                    .lowest(&blocks[first_block..num_streamed])
                    .map(|block| BlockIndex(first_block + block.0)),
            },
            false => Pass::Inference,
        };
        let dimensions = model.dimensions();
        let workload = Workload {
            num_vision_blocks,
            patches: job.patches,
            num_experts: dimensions.num_experts,
            top_k: dimensions.num_experts_per_tok,
            tokens: job.tokens,
            num_micro_batches: job.num_micro_batches,
            hidden_size: dimensions.hidden_size,
            vocab_size: dimensions.vocab_size,
            compute_kind: kind,
            loss_chunk_bytes: ExecutorOptions::new(Device::Cpu, kind).loss_chunk_bytes,
            num_trainable: trained.num_values,
            num_attached: trained.num_attached,
            is_cuda,
        };
        let demand = workload.demand(blocks, pass);
        let options = config.options()?;
        let fetch_from_disk = Traffic::of_fetches(&*source);
        let largest = blocks.iter().map(|block| block.image_bytes).max().unwrap_or(0);
        let chunk_bytes = options.chunk_bytes_for(&*source, largest);
        let staging_bytes = chunk_bytes.saturating_mul(options.num_chunks) as u64;
        if staging_bytes > MOST_STAGING_BYTES {
            bail!(
                "stream.num_chunks ({}) chunks of stream.chunk ({}, at most a block) are {} between drive \
                 and device: ask for fewer or smaller ones",
                options.num_chunks,
                config.chunk,
                Size { num_bytes: staging_bytes }
            );
        }
        Ok(Self {
            config,
            source,
            fetch_from_disk,
            pass,
            first_block,
            demand,
            staging_bytes,
            has_one_memory: !is_cuda,
            num_slots: options.prefetch_ahead.saturating_add(1),
            rates: Rates::default(),
            drive: None,
        })
    }

    /// How the drive is read best with little memory, when it was measured.
    pub fn drive(&self) -> Option<DriveSetting> {
        self.drive
    }

    /// The rates known so far.
    pub fn rates(&self) -> Rates {
        self.rates
    }

    /// A plan within `memory`, by the rates known so far.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn plan(&self, memory: Memory) -> Result<Plan, Error> {
        self.plan_in(memory, self.config.tier.only())
    }

    fn plan_in(&self, memory: Memory, only: Option<Tier>) -> Result<Plan, Error> {
        Plan::new(&PlanRequest {
            blocks: self.source.blocks(),
            first_block: self.first_block,
            fetch_from_disk: &self.fetch_from_disk,
            pass: self.pass,
            num_slots: self.num_slots,
            slot_budget_bytes: self.config.slot_budget.map(|size| size.num_bytes),
            device_bytes: memory.device_bytes,
            host_bytes: memory.host_bytes,
            staging_bytes: self.staging_bytes,
            has_one_memory: self.has_one_memory,
            demand: &self.demand,
            rates: self.rates,
            only,
        })
    }

    /// The first plan of a run, for which rates are measured: of the drive only when the plan reads.
    ///
    /// Memory that was asked for is kept to. Where less is free than any plan needs, the estimates may be
    /// too careful: the run is tried all the same, with a warning, from the files or as it was told.
    ///
    /// # Errors
    /// As [`Planner::plan`], for memory that was asked for.
    pub fn first_plan(&mut self, memory: Memory, device: Device, kind: Kind) -> Result<Plan> {
        let (memory, only, plan) = match self.plan(memory) {
            Ok(plan) => (memory, self.config.tier.only(), plan),
            Err(error) if memory.is_asked => return Err(error.into()),
            Err(error) => {
                tracing::warn!("little memory is free, the run may not fit: {error}");
                let unlimited = Memory { device_bytes: u64::MAX, host_bytes: u64::MAX, ..memory };
                let only = Some(self.config.tier.only().unwrap_or(Tier::Disk));
                (unlimited, only, self.plan_in(unlimited, only)?)
            }
        };
        let reads = plan.later.disk_bytes > 0;
        (self.rates, self.drive) = measure(device, kind, &*self.source, reads);
        Ok(self.plan_in(memory, only)?)
    }

    /// Measures all rates, for predictions of plans to come.
    pub fn measure(&mut self, device: Device, kind: Kind) {
        (self.rates, self.drive) = measure(device, kind, &*self.source, true);
    }

    /// A plan for a GPU of `memory` that this machine does not have.
    ///
    /// # Errors
    /// As [`Planner::plan`].
    pub fn assumed_plan(&mut self, memory: Memory) -> Result<Plan, Error> {
        self.rates = ASSUMED;
        self.plan(memory)
    }
}
