//! The choice itself.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::predict::{Prediction, computed};
use super::{
    DeviceMemory, Itinerary, Pass, PinnedMemory, Plan, PlanRequest, PlannedBlock, Tier, Traffic,
};
use crate::block::{BlockIndex, Placement};
use crate::error::{Error, Result};
use crate::size::size;

/// What is decided before blocks are chosen.
#[derive(Debug, Clone, Copy)]
struct Shape {
    num_slots: usize,
    gather_from_host: bool,
    stream_head: bool,
}

/// Why a shape is no plan.
#[derive(Debug, Clone, Copy)]
enum Shortage {
    Device(DeviceMemory),
    Host(PinnedMemory),
}

impl Plan {
    /// A plan whose passes move nothing, where memory suffices for one. Else the plan whose passes take the
    /// least time by the request's rates, and move the fewest bytes among equals.
    ///
    /// Kept blocks are chosen from the adapted region first, pinned ones by how often they would be read,
    /// both spread over the others of their kind. Embedding and head leave the device when that is worth it or when nothing else fits.
    ///
    /// # Errors
    /// [`Error::Budget`] when memory does not suffice for any plan, with the least that would.
    pub fn new(request: &PlanRequest<'_>) -> Result<Self> {
        let num_blocks = request.blocks.len();
        if request.fetch_from_disk.len() != num_blocks
            || request.demand.graph_bytes.len() != num_blocks
            || request.demand.forward_flops.len() != num_blocks
            || request.demand.forward_launches.len() != num_blocks
        {
            return Err(Error::usage("a plan needs the bytes and the work of every block"));
        }
        if request.first_block > request.num_streamed() {
            return Err(Error::usage("a pass begins at a streamed block"));
        }
        let planner = Planner { request, num_streamed: request.num_streamed() };
        let mut shortages = Vec::new();
        // Every streamed block and the head have one then.
        let most_slots = request.num_slots.clamp(1, planner.num_streamed + 1);
        for num_slots in (1..=most_slots).rev() {
            let mut best: Option<Self> = None;
            for shape in planner.shapes(num_slots) {
                match planner.fill(shape) {
                    Ok(plan) if best.as_ref().is_none_or(|best| plan.cost() < best.cost()) => {
                        best = Some(plan);
                    }
                    Ok(_) => {}
                    Err(shortage) => shortages.push(shortage),
                }
            }
            if let Some(plan) = best {
                return Ok(plan);
            }
        }
        Err(too_little(&shortages, request.has_one_memory))
    }

    /// What decides between plans, the most important first.
    fn cost(&self) -> (bool, f64, u64, u64) {
        let seconds = self.prediction.seconds_but_for_the_host();
        let Traffic { disk_bytes, link_bytes } = self.later;
        let link_bytes = link_bytes + self.gathered_bytes;
        (disk_bytes + link_bytes > 0, seconds, disk_bytes, link_bytes)
    }
}

impl PlanRequest<'_> {
    fn num_streamed(&self) -> usize {
        self.blocks.iter().filter(|block| block.placement.is_streamed()).count()
    }

    fn image_bytes(&self, block: BlockIndex) -> u64 {
        self.blocks[block.0].image_bytes as u64
    }

    fn of_placement(&self, placement: Placement) -> impl Iterator<Item = BlockIndex> {
        let blocks = self.blocks.iter().enumerate();
        blocks
            .filter(move |(_, block)| block.placement == placement)
            .map(|(index, _)| BlockIndex(index))
    }

    fn placed_bytes(&self, placement: Placement) -> u64 {
        self.of_placement(placement).map(|block| self.image_bytes(block)).sum()
    }
}

struct Planner<'a> {
    request: &'a PlanRequest<'a>,
    num_streamed: usize,
}

impl Planner<'_> {
    /// The plainest first: it wins among equals.
    fn shapes(&self, num_slots: usize) -> Vec<Shape> {
        let mut shapes = vec![Shape { num_slots, gather_from_host: false, stream_head: false }];
        if self.request.placed_bytes(Placement::Gathered) > 0 && self.request.host_bytes > 0 {
            shapes.push(Shape { gather_from_host: true, ..shapes[0] });
        }
        let head_bytes = self.request.placed_bytes(Placement::Head);
        let slot_budget_bytes = self.request.slot_budget_bytes.unwrap_or(u64::MAX);
        if head_bytes > 0 && head_bytes <= slot_budget_bytes {
            // No slot grows by more than this saves, or the shape would need more memory, not less.
            let streamed = shapes.clone();
            let saves = |shape: &Shape| {
                let nothing = BTreeSet::new();
                let with_head = Shape { stream_head: true, ..*shape };
                self.device(with_head, &nothing).used_bytes()
                    < self.device(*shape, &nothing).used_bytes()
            };
            let streamed = streamed.into_iter().filter(saves);
            shapes.extend(
                streamed.map(|shape| Shape { stream_head: true, ..shape }).collect::<Vec<_>>(),
            );
        }
        shapes
    }

    fn itinerary<'a>(&self, shape: Shape, kept: &'a BTreeSet<BlockIndex>) -> Itinerary<'a> {
        Itinerary {
            num_streamed: self.num_streamed,
            first_block: self.request.first_block,
            head: self.request.of_placement(Placement::Head).next().filter(|_| shape.stream_head),
            kept,
            num_slots: shape.num_slots,
            pass: self.request.pass,
        }
    }

    /// Device memory before any graph is held.
    fn device(&self, shape: Shape, kept: &BTreeSet<BlockIndex>) -> DeviceMemory {
        let request = self.request;
        let moving = self.itinerary(shape, kept).fetches();
        let largest =
            moving.iter().map(|(block, _)| request.image_bytes(*block)).max().unwrap_or(0);
        let stays = |placement: Placement, leaves: bool| match leaves {
            true => 0,
            false => request.placed_bytes(placement),
        };
        DeviceMemory {
            budget_bytes: request.device_bytes,
            resident_bytes: request.placed_bytes(Placement::Resident)
                + stays(Placement::Gathered, shape.gather_from_host)
                + stays(Placement::Head, shape.stream_head),
            kept_bytes: kept.iter().map(|block| request.image_bytes(*block)).sum(),
            slot_bytes: largest * shape.num_slots.min(moving.len()) as u64,
            graph_bytes: 0,
            working_set_bytes: request.demand.working_set_bytes,
            staging_bytes: if request.has_one_memory { request.staging_bytes } else { 0 },
        }
    }

    /// The best plan of a shape.
    fn fill(&self, shape: Shape) -> Result<Plan, Shortage> {
        let kept = self.kept(shape)?;
        let mut device = self.device(shape, &kept);
        let (in_ram, host) = self.in_ram(shape, &kept)?;
        let graphs = self.graphs(&kept, &mut device);
        let ram: BTreeSet<BlockIndex> = in_ram.iter().copied().collect();
        let fetch = |block: BlockIndex| match ram.contains(&block) {
            true => Traffic { disk_bytes: 0, link_bytes: self.request.image_bytes(block) },
            false => self.request.fetch_from_disk[block.0],
        };
        let itinerary = self.itinerary(shape, &kept);
        let (first, later) = itinerary.traffic(fetch);
        let gathered_bytes =
            if shape.gather_from_host { self.request.demand.gathered_bytes } else { 0 };
        let moved = later + Traffic { disk_bytes: 0, link_bytes: gathered_bytes };
        let computed = computed(self.request, |block| graphs.contains(&block));
        let fetches = itinerary.fetches();
        let describe = |(index, spec): (usize, &crate::block::BlockSpec)| {
            let block = BlockIndex(index);
            let moving = fetches.iter().find(|(moving, _)| *moving == block);
            let gathered = spec.placement == Placement::Gathered && shape.gather_from_host;
            let is_used = index >= self.request.first_block || !spec.placement.is_streamed();
            PlannedBlock {
                name: spec.name.clone(),
                placement: spec.placement,
                tier: match moving {
                    _ if gathered || ram.contains(&block) => Tier::Ram,
                    None if is_used => Tier::Device,
                    _ => Tier::Disk,
                },
                image_bytes: spec.image_bytes as u64,
                fetches: moving.map_or(0, |(_, fetches)| fetches.later),
                holds_graph: graphs.contains(&block),
                is_used,
            }
        };
        Ok(Plan {
            blocks: self.request.blocks.iter().enumerate().map(describe).collect(),
            num_slots: shape.num_slots.min(fetches.len()),
            gather_from_host: shape.gather_from_host,
            stream_head: shape.stream_head,
            device,
            host,
            first,
            later,
            gathered_bytes,
            prediction: Prediction::new(moved, computed, &self.request.rates),
            in_ram,
        })
    }

    /// Streamed blocks that stay on the device.
    fn kept(&self, shape: Shape) -> Result<BTreeSet<BlockIndex>, Shortage> {
        let fits = |kept: &BTreeSet<BlockIndex>| {
            let device = self.device(shape, kept);
            match device.used_bytes() <= device.budget_bytes {
                true => Ok(()),
                false => Err(Shortage::Device(device)),
            }
        };
        let first = self.request.first_block;
        let all: BTreeSet<BlockIndex> = (first..self.num_streamed).map(BlockIndex).collect();
        let mut kept = BTreeSet::new();
        match self.request.only {
            Some(Tier::Device) => return fits(&all).map(|()| all),
            Some(Tier::Ram | Tier::Disk) => return fits(&kept).map(|()| kept),
            // Nothing needs a slot then.
            None if fits(&all).is_ok() => return Ok(all),
            None => fits(&kept)?,
        }
        // Blocks that are visited twice save twice their size, those below the lowest once.
        let lowest = match self.request.pass {
            Pass::Training { lowest } => lowest.map_or(self.num_streamed, |lowest| lowest.0),
            Pass::Inference => first,
        };
        let adapted = (lowest..self.num_streamed).rev();
        for block in adapted.chain((first..lowest).rev()).map(BlockIndex) {
            kept.insert(block);
            if fits(&kept).is_err() {
                kept.remove(&block);
            }
        }
        // The same number of bytes, but with kept blocks among the others: while they are computed with,
        // the link goes on for the next ones.
        let (adapted, frozen) = kept.iter().partition(|block| block.0 >= lowest);
        let (adapted, frozen): (Vec<BlockIndex>, Vec<BlockIndex>) = (adapted, frozen);
        let spread: BTreeSet<BlockIndex> = evenly(lowest..self.num_streamed, adapted.len())
            .chain(evenly(first..lowest, frozen.len()))
            .map(BlockIndex)
            .collect();
        let moved = |kept: &BTreeSet<BlockIndex>| {
            let itinerary = self.itinerary(shape, kept);
            let (_, later) = itinerary.traffic(|block| self.request.fetch_from_disk[block.0]);
            (later.disk_bytes, later.link_bytes)
        };
        match fits(&spread).is_ok() && moved(&spread) <= moved(&kept) {
            true => Ok(spread),
            false => Ok(kept),
        }
    }

    /// Blocks in pinned memory, the most useful first.
    fn in_ram(
        &self,
        shape: Shape,
        kept: &BTreeSet<BlockIndex>,
    ) -> Result<(Vec<BlockIndex>, PinnedMemory), Shortage> {
        let request = self.request;
        let mut host = PinnedMemory {
            budget_bytes: request.host_bytes,
            staging_bytes: if request.has_one_memory { 0 } else { request.staging_bytes },
            gathered_bytes: match shape.gather_from_host {
                true => request.placed_bytes(Placement::Gathered),
                false => 0,
            },
            block_bytes: 0,
        };
        let mut moving = self.itinerary(shape, kept).fetches();
        // Those that would be read most often; of equals first every other one, so that neither drive nor
        // link has a long rest, and the upper one.
        moving.sort_by_key(|(block, fetches)| Reverse((fetches.later, *block)));
        let moving: Vec<_> = moving
            .chunk_by(|(_, one), (_, other)| one.later == other.later)
            .flat_map(|equals| spread_order(equals.len()).map(|index| equals[index]))
            .collect();
        let mut chosen = Vec::new();
        for (block, fetches) in moving {
            let num_bytes = request.image_bytes(block);
            let wanted = match request.only {
                Some(Tier::Ram) => true,
                Some(_) => false,
                None => fetches.later > 0 && host.used_bytes() + num_bytes <= host.budget_bytes,
            };
            if wanted {
                host.block_bytes += num_bytes;
                chosen.push(block);
            }
        }
        match host.used_bytes() <= host.budget_bytes {
            true => Ok((chosen, host)),
            false => Err(Shortage::Host(host)),
        }
    }

    /// Graphs to hold with what is left when every block stays, from the top: backward begins there.
    fn graphs(
        &self,
        kept: &BTreeSet<BlockIndex>,
        device: &mut DeviceMemory,
    ) -> BTreeSet<BlockIndex> {
        let mut graphs = BTreeSet::new();
        let Pass::Training { lowest: Some(lowest) } = self.request.pass else { return graphs };
        if kept.len() < self.num_streamed - self.request.first_block {
            return graphs;
        }
        for block in (lowest.0..self.num_streamed).rev() {
            let num_bytes = self.request.demand.graph_bytes[block];
            if device.used_bytes() + num_bytes > device.budget_bytes {
                break;
            }
            device.graph_bytes += num_bytes;
            graphs.insert(BlockIndex(block));
        }
        graphs
    }
}

/// `count` of `range`, the last one among them, as evenly as whole numbers allow.
fn evenly(range: std::ops::Range<usize>, count: usize) -> impl Iterator<Item = usize> {
    let length = range.len();
    (0..count).map(move |number| range.end - 1 - number * length / count.max(1))
}

/// The numbers below `count` in an order of which every beginning is spread over all of them: by their bits
/// read backwards.
pub(super) fn spread_order(count: usize) -> impl Iterator<Item = usize> {
    let num_bits = usize::BITS - count.saturating_sub(1).leading_zeros();
    (0..1_usize << num_bits)
        .map(move |number| number.reverse_bits().checked_shr(usize::BITS - num_bits).unwrap_or(0))
        .filter(move |number| *number < count)
}

/// What makes staging smaller.
const FEWER_CHUNKS: &str = "fewer or smaller chunks (stream.num_chunks, stream.chunk)";

/// What is missing, by the shape that needs the least.
fn too_little(shortages: &[Shortage], has_one_memory: bool) -> Error {
    let device = shortages.iter().filter_map(|shortage| match shortage {
        Shortage::Device(device) => Some(device),
        Shortage::Host(_) => None,
    });
    let host = shortages.iter().filter_map(|shortage| match shortage {
        Shortage::Host(host) => Some(host),
        Shortage::Device(_) => None,
    });
    let device = device.min_by_key(|device| device.used_bytes());
    let host = host.min_by_key(|host| host.used_bytes());
    match (device, host) {
        // Host memory for the embedding is only one way out.
        (Some(device), host) if host.is_none_or(|host| host.gathered_bytes > 0) => {
            let instead = host.map_or_else(String::new, |host| {
                format!(
                    "; or {} of host memory (--ram), for the embedding",
                    size(host.used_bytes())
                )
            });
            let (memory, flags) = match has_one_memory {
                true => ("memory", "--vram and --ram, the smaller counts"),
                false => ("device memory", "--vram"),
            };
            let (staging, chunks) = match device.staging_bytes {
                0 => (String::new(), String::new()),
                num_bytes => {
                    (format!(", {} for reads", size(num_bytes)), format!(", or {FEWER_CHUNKS}"))
                }
            };
            let message = format!(
                "the budget of {} of {memory} is too small: the least that works is {} ({} for \
                 tensors that stay, {} for blocks that stay, {} for the block in use, {} to compute \
                 with{staging}); give more ({flags}){instead}, or fewer tokens at a time{chunks}",
                size(device.budget_bytes),
                size(device.used_bytes()),
                size(device.resident_bytes),
                size(device.kept_bytes),
                size(device.slot_bytes),
                size(device.working_set_bytes),
            );
            Error::Budget { missing_bytes: device.used_bytes() - device.budget_bytes, message }
        }
        (_, Some(host)) => {
            let message = format!(
                "the budget of {} of host memory is too small: the least that works is {} ({} for reads \
                 on their way to the device, {} for the embedding, {} for blocks); give more (--ram), or \
                 {FEWER_CHUNKS}",
                size(host.budget_bytes),
                size(host.used_bytes()),
                size(host.staging_bytes),
                size(host.gathered_bytes),
                size(host.block_bytes),
            );
            Error::Budget { missing_bytes: host.used_bytes() - host.budget_bytes, message }
        }
        _ => Error::usage("there is nothing to plan"),
    }
}
