//! The residency plan: what stays on the device, what in pinned host memory, and what is read every time.
//!
//! For an itinerary that goes up and comes back, a fixed choice is as good as the best cache: blocks at
//! the top of the adapted region are used twice per step and save the most, then those below. So the plan
//! is made once, before the run, and the bytes of every pass follow from it exactly.

mod decide;
mod demand;
mod launches;
mod memory;
mod predict;
mod table;
#[cfg(test)]
mod tests;
mod traffic;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::block::{BlockIndex, BlockSpec, Placement};
use crate::execute::Residency;

pub use demand::{Demand, Workload};
pub use memory::{device_budget_bytes, host_budget_bytes, host_limit_bytes};
pub use predict::{Bound, Prediction, Rates};
pub use traffic::{Fetches, Itinerary, Pass, Traffic};

/// Where a block's bytes are while it is not in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// On the device.
    Device,
    /// In pinned host memory.
    Ram,
    /// In files.
    Disk,
}

/// What a plan is made from.
#[derive(Debug, Clone, Copy)]
pub struct PlanRequest<'a> {
    /// The blocks of the source, streamed ones first.
    pub blocks: &'a [BlockSpec],
    /// The first block of a pass: streamed ones before it are not visited.
    pub first_block: usize,
    /// What one fetch of each block from its files moves. From pinned memory the image crosses the link.
    pub fetch_from_disk: &'a [Traffic],
    /// What is run.
    pub pass: Pass,
    /// Most slots; fewer are planned when not even one kept block fits beside them.
    pub num_slots: usize,
    /// Largest image that a slot may hold. `None`: whatever the largest block needs.
    pub slot_budget_bytes: Option<u64>,
    /// Device memory that may be used.
    pub device_bytes: u64,
    /// Host memory that may be used. On the CPU, whose memory is the device's, 0.
    pub host_bytes: u64,
    /// Memory between drive and device.
    pub staging_bytes: u64,
    /// Whether device and host have one memory, as on the CPU. Staging then comes out of `device_bytes`.
    pub has_one_memory: bool,
    /// What computing takes.
    pub demand: &'a Demand,
    /// What the machine can do.
    pub rates: Rates,
    /// Where all streamed blocks have to be. `None`: the plan decides.
    pub only: Option<Tier>,
}

/// A block in a [`Plan`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlannedBlock {
    /// Name of the block.
    pub name: String,
    /// What kind of block it is.
    pub placement: Placement,
    /// Where its bytes are.
    pub tier: Tier,
    /// Size of its image.
    pub image_bytes: u64,
    /// Fetches to the device in every pass but the first.
    pub fetches: usize,
    /// Whether its graph is held from forward to backward.
    pub holds_graph: bool,
    /// Whether the run has any use for it.
    pub is_used: bool,
}

/// Device memory of a [`Plan`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct DeviceMemory {
    /// What may be used.
    pub budget_bytes: u64,
    /// Resident blocks, with embedding and head where they stay.
    pub resident_bytes: u64,
    /// Streamed blocks that stay.
    pub kept_bytes: u64,
    /// All slots.
    pub slot_bytes: u64,
    /// Graphs that are held.
    pub graph_bytes: u64,
    /// Activations, logits, gradients, optimizer, and what libraries take: an estimate.
    pub working_set_bytes: u64,
    /// Chunks between drive and device, where both have one memory; else 0.
    pub staging_bytes: u64,
}

impl DeviceMemory {
    /// All that is used.
    pub fn used_bytes(&self) -> u64 {
        self.resident_bytes
            + self.kept_bytes
            + self.slot_bytes
            + self.graph_bytes
            + self.working_set_bytes
            + self.staging_bytes
    }
}

/// Pinned host memory of a [`Plan`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PinnedMemory {
    /// What may be used.
    pub budget_bytes: u64,
    /// Chunks between drive and device; 0 where both have one memory.
    pub staging_bytes: u64,
    /// Tables whose rows are gathered from here.
    pub gathered_bytes: u64,
    /// Images of blocks.
    pub block_bytes: u64,
}

impl PinnedMemory {
    /// All that is used.
    pub fn used_bytes(&self) -> u64 {
        self.staging_bytes + self.gathered_bytes + self.block_bytes
    }
}

/// What is where during a run, and what that costs. Shown as lines for people; JSON for programs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// The blocks of the source in order.
    pub blocks: Vec<PlannedBlock>,
    /// Slots that streamed blocks pass through.
    pub num_slots: usize,
    /// Whether the embedding stays in host memory.
    pub gather_from_host: bool,
    /// Whether the head is visited like a streamed block.
    pub stream_head: bool,
    /// Device memory.
    pub device: DeviceMemory,
    /// Pinned host memory.
    pub host: PinnedMemory,
    /// Bytes of the first pass.
    pub first: Traffic,
    /// Bytes of every later pass.
    pub later: Traffic,
    /// Rows of the embedding that cross the link besides, in every pass.
    pub gathered_bytes: u64,
    /// How long a later pass takes.
    pub prediction: Prediction,
    /// Blocks in pinned memory, the most useful first.
    #[serde(skip)]
    pub in_ram: Vec<BlockIndex>,
}

impl Plan {
    /// What the executor has to keep.
    pub fn residency(&self) -> Residency {
        let chosen = |wanted: &dyn Fn(&PlannedBlock) -> bool| -> BTreeSet<BlockIndex> {
            let blocks = self.blocks.iter().enumerate();
            blocks.filter(|(_, block)| wanted(block)).map(|(index, _)| BlockIndex(index)).collect()
        };
        Residency {
            kept: chosen(&|block| {
                block.placement.is_streamed() && block.is_used && block.tier == Tier::Device
            }),
            graphs: chosen(&|block| block.holds_graph),
            unused: chosen(&|block| block.placement.is_streamed() && !block.is_used),
            gather_from_host: self.gather_from_host,
            stream_head: self.stream_head,
        }
    }
}
