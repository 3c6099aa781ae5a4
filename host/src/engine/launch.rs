//! From a plan to an executor, with less when memory runs out on the way.

use std::sync::Arc;

use anyhow::{Context, Result};
use blockstreamer_core::Error;
use blockstreamer_core::adapter::Adapter;
use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::device::HostBuffer;
use blockstreamer_core::execute::{Executor, ExecutorOptions};
use blockstreamer_core::plan::Plan;
use blockstreamer_core::read::DriveSetting;
use blockstreamer_core::site::Site;
use blockstreamer_core::source::{BlockSource, TieredSource};
use blockstreamer_core::stream::StreamOptions;
use tch::Device;

use super::{Cut, Fitted, Job, Memory, OpenModel, Planner, Precision, StreamConfig, Trained};
use crate::plugins::Registry;
use crate::size::Size;

/// Plans that are tried when memory runs out: the last has 0.85^4, about half, of the first one's.
const NUM_ATTEMPTS: usize = 5;

/// Makes an adapter for a model's sites, or none.
pub type MakeAdapter<'a> = dyn Fn(&[Site]) -> Result<Option<Box<dyn Adapter>>> + 'a;

/// How to execute a model.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// Families, for a model of its own for each attempt.
    pub registry: &'a Registry,
    /// The model.
    pub open: &'a OpenModel,
    /// Where blocks are.
    pub stream: &'a StreamConfig,
    /// Where to compute.
    pub device: Device,
    /// Compute dtype.
    pub dtype: Precision,
    /// What is going to be run.
    pub job: Job,
    /// Seed of the run.
    pub seed: u64,
}

/// A model that is ready to run.
#[derive(Debug)]
pub struct Launched {
    /// Executes it.
    pub executor: Executor,
    /// What is where.
    pub plan: Plan,
    /// Where its blocks come from.
    pub source: Arc<dyn BlockSource>,
    /// Blocks that the experts of a layer are dealt over.
    pub num_expert_groups: usize,
}

impl Launch<'_> {
    /// Plans, loads what stays, and reports the plan. `adapter` makes the adapter for the model's sites, for
    /// each attempt anew.
    ///
    /// When memory runs out, it is tried again with less, and a warning says what was given up.
    ///
    /// # Errors
    /// Whatever is wrong with settings, files or adapter; what ran out when no smaller plan is left.
    pub fn start(&self, adapter: &MakeAdapter<'_>) -> Result<Launched> {
        let kind = self.dtype.kind(self.device);
        let first = adapter(&self.open.model.sites()?)?;
        let memory = Memory::of(self.stream, self.device)?;
        let cut = Cut {
            registry: self.registry,
            open: self.open,
            stream: self.stream,
            job: self.job,
            is_cuda: self.device.is_cuda(),
            kind,
        };
        let trained = Trained::of(first.as_deref(), &self.open.layout.blocks);
        let mut fitted = cut.fit(&trained, memory, 1)?;
        // An adapter names blocks, which are others when layers are cut otherwise.
        let mut first = fitted.reopened.is_none().then_some(first);
        loop {
            let Fitted { reopened, source, planner } = fitted;
            let open = reopened.as_ref().unwrap_or(self.open);
            if self.stream.check_finite {
                open.layout.check_finite(&*source)?;
            }
            let error = match self.load(open, &source, planner, memory, first.take(), adapter) {
                Ok(launched) => return Ok(launched),
                Err(error) => error,
            };
            let num_groups = open.options.num_expert_groups;
            let finer = cut.candidates().into_iter().find(|groups| *groups > num_groups);
            let (Some(finer), Some(Exhausted::Device)) = (finer, exhausted(&error)) else {
                return Err(error);
            };
            tracing::warn!("memory ran out ({error:#}): dealing the experts over more blocks");
            fitted = cut.fit(&trained, memory, finer)?;
        }
    }

    /// Plans and loads a model that is cut already. `first` is the adapter, if it was made for this cut.
    fn load(
        &self,
        open: &OpenModel,
        files: &Arc<dyn BlockSource>,
        mut planner: Planner<'_>,
        memory: Memory,
        mut first: Option<Option<Box<dyn Adapter>>>,
        adapter: &MakeAdapter<'_>,
    ) -> Result<Launched> {
        let kind = self.dtype.kind(self.device);
        let sites = open.model.sites()?;
        let plan = planner.first_plan(memory, self.device, kind)?;
        let drive = planner.drive();
        let staging_bytes = plan.host.staging_bytes + plan.device.staging_bytes;
        let mut loaded: Option<(Vec<BlockIndex>, Arc<dyn BlockSource>)> = None;
        let (plan, (executor, source)) = degrade(
            plan,
            memory,
            |memory| planner.plan(memory),
            |plan| {
                tracing::info!("the plan\n{plan}");
                let adapter = match first.take() {
                    Some(adapter) => adapter,
                    None => adapter(&sites)?,
                };
                // Less of the device may leave what is in host memory as it was.
                let source = match loaded.take() {
                    Some((in_ram, source)) if in_ram == plan.in_ram => source,
                    _ => self.tiered(files, plan)?,
                };
                loaded = Some((plan.in_ram.clone(), Arc::clone(&source)));
                let model = open.reopen(self.registry)?;
                let executor =
                    Executor::new(model, Arc::clone(&source), adapter, self.options(plan, drive)?)?;
                Ok((executor, source))
            },
        )
        .map_err(|error| match exhausted(&error) {
            Some(Exhausted::Host) => error.context(format!(
                "staging takes {} of host memory, stream.num_chunks ({}) chunks of stream.chunk ({}): \
                 ask for fewer or smaller ones, or give less to blocks (--ram)",
                Size { num_bytes: staging_bytes },
                self.stream.num_chunks,
                self.stream.chunk
            )),
            _ => error,
        })?;
        let num_expert_groups = open.options.num_expert_groups;
        Ok(Launched { executor, plan, source, num_expert_groups })
    }

    /// The source with the plan's blocks in host memory.
    fn tiered(&self, files: &Arc<dyn BlockSource>, plan: &Plan) -> Result<Arc<dyn BlockSource>> {
        if plan.in_ram.is_empty() {
            return Ok(Arc::clone(files));
        }
        let reserve = |num_bytes| HostBuffer::for_device(num_bytes, self.device);
        let tiered = TieredSource::load(
            Arc::clone(files),
            &plan.in_ram,
            self.stream.options()?.read,
            reserve,
        )?;
        if let Some(refusal) = tiered.refusal() {
            tracing::warn!(
                "host memory ran out: {} of {} blocks ({}) are held there, the others are read from \
                 storage every time: {refusal}",
                tiered.num_held(),
                plan.in_ram.len(),
                Size { num_bytes: tiered.held_bytes() as u64 }
            );
        }
        Ok(Arc::new(tiered))
    }

    fn options(&self, plan: &Plan, drive: Option<DriveSetting>) -> Result<ExecutorOptions> {
        let mut stream = self.stream.options()?;
        if let (None, Some(drive)) = (self.stream.queue_depth, drive) {
            stream.queue_depth = drive.queue_depth();
        }
        Ok(ExecutorOptions {
            stream: StreamOptions {
                prefetch_ahead: stream.prefetch_ahead.min(plan.num_slots.saturating_sub(1)),
                ..stream
            },
            residency: plan.residency(),
            seed: self.seed,
            ..ExecutorOptions::new(self.device, self.dtype.kind(self.device))
        })
    }
}

/// Tries a plan, and when memory runs out, plans that use 15 % less each time.
///
/// The first plan may have used less than it was allowed: it is that use which has to shrink.
fn degrade<T>(
    mut plan: Plan,
    mut memory: Memory,
    replan: impl Fn(Memory) -> Result<Plan, Error>,
    mut attempt: impl FnMut(&Plan) -> Result<T>,
) -> Result<(Plan, T)> {
    for _ in 1..NUM_ATTEMPTS {
        let error = match attempt(&plan) {
            Ok(done) => return Ok((plan, done)),
            Err(error) => error,
        };
        let Some(which) = exhausted(&error) else { return Err(error) };
        let less = |used_bytes: u64| used_bytes / 100 * 85;
        match which {
            Exhausted::Device => memory.device_bytes = less(plan.device.used_bytes()),
            Exhausted::Host => memory.host_bytes = less(plan.host.used_bytes()),
        }
        let next = match replan(memory) {
            Ok(next) if next != plan => next,
            _ => return Err(error).context("memory ran out, and no smaller plan is possible"),
        };
        tracing::warn!(
            "memory ran out ({error:#}): planning again for {} of device memory and {} of host memory, \
             with {} instead of {} of blocks kept on the device",
            Size { num_bytes: memory.device_bytes },
            Size { num_bytes: memory.host_bytes },
            Size { num_bytes: next.device.kept_bytes },
            Size { num_bytes: plan.device.kept_bytes },
        );
        plan = next;
    }
    let done = attempt(&plan).context("memory ran out again and again")?;
    Ok((plan, done))
}

/// Which memory ran out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Exhausted {
    Device,
    Host,
}

/// `None` for any other error.
fn exhausted(error: &anyhow::Error) -> Option<Exhausted> {
    let mut error = error.downcast_ref::<Error>()?;
    while let Error::Block { source, .. } = error {
        error = source;
    }
    match error {
        Error::OutOfMemory { .. } => Some(Exhausted::Device),
        // Staging or a table that could not be reserved or page-locked.
        Error::Cuda { action: "page-lock host memory", .. }
        | Error::Io { action: "reserve host memory for", .. } => Some(Exhausted::Host),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use blockstreamer_core::block::{BlockSpec, Placement};
    use blockstreamer_core::dtype::Dtype;
    use blockstreamer_core::plan::{Demand, Pass, PlanRequest, Rates, Traffic};

    use super::*;

    /// A plan for ten blocks of 1 MiB on a device, and in host memory what does not fit there.
    fn plan(memory: Memory) -> Result<Plan, Error> {
        let block = |_| {
            let weight = ("weight".to_owned(), Dtype::U8, vec![1024, 1024]);
            BlockSpec::pack("block", Placement::Streamed, [weight]).unwrap()
        };
        let blocks: Vec<BlockSpec> = (0..10).map(block).collect();
        let demand = Demand {
            graph_bytes: vec![0; 10],
            forward_flops: vec![0.0; 10],
            forward_launches: vec![0.0; 10],
            ..Demand::default()
        };
        Plan::new(&PlanRequest {
            first_block: 0,
            blocks: &blocks,
            fetch_from_disk: &[Traffic { disk_bytes: 1 << 20, link_bytes: 1 << 20 }; 10],
            pass: Pass::Inference,
            num_slots: 1,
            slot_budget_bytes: None,
            device_bytes: memory.device_bytes,
            host_bytes: memory.host_bytes,
            staging_bytes: 0,
            has_one_memory: false,
            demand: &demand,
            rates: Rates::default(),
            only: None,
        })
    }

    fn memory(device_mib: u64) -> Memory {
        Memory { device_bytes: device_mib << 20, host_bytes: 1 << 30, is_asked: false }
    }

    fn ran_out() -> Error {
        let error = Error::OutOfMemory { action: "loading".into(), message: "none left".into() };
        error.in_block("block")
    }

    /// Tries plans on a device that has room for `num_kept` blocks; returns how many each one kept.
    fn tried(num_kept: usize, first: u64, error: fn() -> Error) -> (Result<usize>, Vec<usize>) {
        let tries = RefCell::new(Vec::new());
        let attempt = |plan: &Plan| {
            let kept = plan.residency().kept.len();
            tries.borrow_mut().push(kept);
            if kept > num_kept { Err(error().into()) } else { Ok(kept) }
        };
        let outcome = degrade(plan(memory(first)).unwrap(), memory(first), plan, attempt);
        (outcome.map(|(_, kept)| kept), tries.into_inner())
    }

    #[test]
    fn running_out_of_device_memory_keeps_fewer_blocks_until_it_fits() {
        // The budget was far larger than what was used: that is no reason to try the same again.
        let (outcome, tries) = tried(6, 500, ran_out);
        assert_eq!((outcome.unwrap(), tries), (5, vec![10, 7, 5]));
    }

    #[test]
    fn what_fits_at_once_is_tried_once() {
        let (outcome, tries) = tried(10, 500, ran_out);
        assert_eq!((outcome.unwrap(), tries), (10, vec![10]));
    }

    #[test]
    fn a_device_that_never_has_room_is_an_error_that_says_what_ran_out() {
        let (outcome, tries) = tried(0, 500, ran_out);
        let error = format!("{:#}", outcome.unwrap_err());
        assert!(error.contains("none left") && error.contains("memory ran out"), "{error}");
        assert_eq!(tries.len(), NUM_ATTEMPTS);
        assert!(tries.is_sorted_by(|more, fewer| more >= fewer), "{tries:?}");
        let nothing_smaller = || plan(memory(1)).unwrap();
        let refused = degrade(nothing_smaller(), memory(1), plan, |_| -> Result<()> {
            Err(ran_out().into())
        });
        let error = format!("{:#}", refused.unwrap_err());
        assert!(error.contains("no smaller plan is possible"), "{error}");
    }

    #[test]
    fn any_other_error_is_not_tried_again() {
        let (outcome, tries) = tried(0, 500, || Error::usage("the disk is on fire"));
        assert!(outcome.unwrap_err().to_string().contains("on fire"));
        assert_eq!(tries, [10]);
    }

    #[test]
    fn host_memory_that_cannot_be_locked_shrinks_the_host_budget() {
        let refused = || Error::Cuda { action: "page-lock host memory", message: "no".into() };
        let tries = RefCell::new(Vec::new());
        let (plan, ()) = degrade(plan(memory(3)).unwrap(), memory(3), plan, |plan| {
            tries.borrow_mut().push(plan.in_ram.len());
            if plan.in_ram.len() > 6 { Err(refused().into()) } else { Ok(()) }
        })
        .unwrap();
        assert_eq!(tries.into_inner(), [8, 6]);
        assert_eq!(plan.residency().kept.len(), 2, "the device had enough");
    }
}
