//! How many blocks the experts of a layer are dealt over: as few as the device has room for, or more, where
//! smaller slots leave room for blocks that would be read from the drive every time.

use std::cmp::Reverse;
use std::sync::Arc;

use anyhow::{Context, Result};
use blockstreamer_core::Error;
use blockstreamer_core::family::ModelOptions;
use blockstreamer_core::plan::{Plan, Tier};
use blockstreamer_core::source::BlockSource;
use tch::Kind;

use super::planning::Trained;
use super::{Job, Memory, OpenModel, Planner, StreamConfig};
use crate::plugins::Registry;

/// Share of a pass's reads that a finer cut must save, to be worth more blocks to queue.
const LEAST_SAVED: f64 = 0.03;

/// What a model is cut for.
#[derive(Debug, Clone, Copy)]
pub struct Cut<'a> {
    /// Families, to open the model anew.
    pub registry: &'a Registry,
    /// The model.
    pub open: &'a OpenModel,
    /// Where blocks are.
    pub stream: &'a StreamConfig,
    /// What is going to be run.
    pub job: Job,
    /// Whether that is on a GPU.
    pub is_cuda: bool,
    /// Compute dtype.
    pub kind: Kind,
}

/// A model that was cut, and who plans for it.
#[derive(Debug)]
pub struct Fitted<'a> {
    /// The model, when it had to be opened anew.
    pub reopened: Option<OpenModel>,
    /// Its blocks.
    pub source: Arc<dyn BlockSource>,
    /// Plans for them.
    pub planner: Planner<'a>,
}

/// How good a cut is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Merit {
    /// Slots, and what is missing where there is no room for any.
    room: (usize, Reverse<u64>),
    /// Whether that is all slots.
    is_enough: bool,
    /// Read from the drive in every pass.
    disk_bytes: u64,
}

impl Merit {
    /// Whether a finer cut that is this good is to be taken.
    fn beats(&self, coarser: &Self) -> bool {
        if coarser.is_enough {
            // Savings shrink from cut to cut, as slots do: the first that is not worth it ends the search.
            let saved = coarser.disk_bytes.saturating_sub(self.disk_bytes);
            return self.is_enough
                && saved > 0
                && saved as f64 >= LEAST_SAVED * coarser.disk_bytes as f64;
        }
        self.is_enough || self.room > coarser.room
    }
}

impl<'a> Cut<'a> {
    /// The cut with the fewest groups, but at least `least`, that leaves room for all slots, or finer ones as
    /// long as each reads markedly less than the one before; if none has room, the one with the most slots; if
    /// none leaves room for any, the one that lacks the least. Shards and `stream.expert_groups` leave no choice.
    ///
    /// # Errors
    /// When the files cannot be opened, shards belong to another checkpoint, or there is nothing to plan.
    pub fn fit(&self, trained: &Trained, memory: Memory, least: usize) -> Result<Fitted<'a>> {
        let mut best: Option<(Merit, Fitted<'a>)> = None;
        let mut refusal = None;
        for num_groups in self.candidates().into_iter().filter(|groups| *groups >= least) {
            let coarser = best.as_ref().map(|(merit, _)| *merit);
            let has_enough = coarser.is_some_and(|it| it.is_enough);
            if has_enough && coarser.is_some_and(|it| it.disk_bytes == 0) {
                break;
            }
            let fitted = match self.cut(num_groups, trained) {
                Ok(fitted) => fitted,
                // Shards are cut in one way.
                Err(_) if has_enough => break,
                Err(error) => {
                    refusal.get_or_insert(error);
                    continue;
                }
            };
            // Finer cuts have smaller blocks, but more of them keep a sum for backward.
            let merit = match fitted.planner.plan(memory) {
                Ok(plan) => Merit {
                    room: (plan.num_slots, Reverse(0)),
                    is_enough: self.has_all_slots(&plan),
                    disk_bytes: plan.later.disk_bytes,
                },
                Err(Error::Budget { missing_bytes, .. }) => {
                    Merit { room: (0, Reverse(missing_bytes)), is_enough: false, disk_bytes: 0 }
                }
                // A good cut is at hand.
                Err(_) if has_enough => break,
                Err(error) => return Err(error.into()),
            };
            if coarser.is_none_or(|coarser| merit.beats(&coarser)) {
                best = Some((merit, fitted));
            } else if has_enough {
                break;
            }
        }
        let (_, fitted) = match (best, refusal) {
            (Some(best), _) => best,
            (None, Some(refusal)) => return Err(refusal),
            (None, None) => return Err(anyhow::anyhow!("the model cannot be cut into blocks")),
        };
        let num_groups = fitted.reopened.as_ref().map(|open| open.options.num_expert_groups);
        if let Some(num_groups) = num_groups {
            tracing::info!("the experts of a layer are dealt over {num_groups} blocks");
        }
        Ok(fitted)
    }

    fn has_all_slots(&self, plan: &Plan) -> bool {
        let moves = |block: &&blockstreamer_core::plan::PlannedBlock| {
            block.is_used && block.placement.is_streamed() && block.tier != Tier::Device
        };
        let moving: Vec<_> = plan.blocks.iter().filter(moves).collect();
        let budget_bytes = self.stream.slot_budget.map_or(u64::MAX, |budget| budget.num_bytes);
        if moving.iter().any(|block| block.image_bytes > budget_bytes) {
            return false;
        }
        plan.num_slots >= self.stream.prefetch_ahead.saturating_add(1).min(moving.len())
    }

    /// Numbers of groups that deal the experts evenly.
    pub fn candidates(&self) -> Vec<usize> {
        let num_experts = self.open.model.dimensions().num_experts;
        match self.stream.expert_groups {
            Some(asked) => vec![asked],
            None if num_experts == 0 => vec![self.open.options.num_expert_groups],
            None => {
                (1..=num_experts).filter(|groups| num_experts.is_multiple_of(*groups)).collect()
            }
        }
    }

    fn cut(&self, num_expert_groups: usize, trained: &Trained) -> Result<Fitted<'a>> {
        let reopened = match num_expert_groups == self.open.options.num_expert_groups {
            true => None,
            false => Some(self.open.regroup(self.registry, num_expert_groups)?),
        };
        let open = reopened.as_ref().unwrap_or(self.open);
        let source = open.source(self.stream)?;
        let planner = Planner::new(
            self.stream,
            Arc::clone(&source),
            &*open.model,
            trained,
            self.job,
            self.is_cuda,
            self.kind,
        )?;
        Ok(Fitted { reopened, source, planner })
    }
}

impl OpenModel {
    /// The same model with its experts dealt over another number of blocks.
    fn regroup(&self, registry: &Registry, num_expert_groups: usize) -> Result<Self> {
        let options = ModelOptions { num_expert_groups, ..self.options };
        Self::open(registry, &self.directory, options)
            .with_context(|| format!("cannot deal the experts over {num_expert_groups} blocks"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merit(num_slots: usize, is_enough: bool, disk_bytes: u64) -> Merit {
        Merit { room: (num_slots, Reverse(0)), is_enough, disk_bytes }
    }

    #[test]
    fn slots_come_before_reads_and_a_saving_must_be_worth_more_blocks() {
        let lacking =
            |missing_bytes| Merit { room: (0, Reverse(missing_bytes)), ..merit(0, false, 0) };
        assert!(lacking(7).beats(&lacking(8)) && !lacking(8).beats(&lacking(7)));
        assert!(merit(1, false, 900).beats(&lacking(1)));
        assert!(merit(2, true, 900).beats(&merit(3, false, 100)), "all slots that blocks need");
        assert!(!merit(2, false, 100).beats(&merit(2, false, 900)), "no more slots");
        assert!(merit(3, true, 970).beats(&merit(3, true, 1000)));
        assert!(!merit(3, true, 971).beats(&merit(3, true, 1000)));
        assert!(!merit(2, false, 0).beats(&merit(3, true, 1000)));
        assert!(!merit(3, true, 1200).beats(&merit(3, true, 1000)));
    }
}
