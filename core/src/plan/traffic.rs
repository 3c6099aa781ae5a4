//! How often each block is fetched, and what that moves.
//!
//! The engine keeps in its slots the blocks of the next visits, as many different ones as there are
//! slots. So a visit finds its block in a slot exactly when fewer than `num_slots` other blocks are
//! visited between the block's visit before and this one. Counting those gives the formulas below.

use std::collections::BTreeSet;
use std::ops::{Add, AddAssign, Mul};

use serde::Serialize;

use crate::block::{BlockIndex, BlockSpec};
use crate::source::BlockSource;

/// Bytes that one fetch of a block moves, or that many fetches move.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// From storage to the host.
    pub disk_bytes: u64,
    /// From the host to the device.
    pub link_bytes: u64,
}

impl Traffic {
    /// What one fetch of each block of `source` from its files moves. Where it is known what lies where in
    /// the files, gaps are neither read nor copied.
    pub fn of_fetches(source: &dyn BlockSource) -> Vec<Self> {
        let blocks = source.blocks().iter().enumerate();
        let fetch = |(index, spec): (usize, &BlockSpec)| match source.extents(BlockIndex(index)) {
            Some(extents) => {
                let num_bytes = extents.iter().map(|extent| extent.num_bytes as u64).sum();
                Self { disk_bytes: num_bytes, link_bytes: num_bytes }
            }
            _ => Self {
                disk_bytes: spec.payload_bytes() as u64,
                link_bytes: spec.image_bytes as u64,
            },
        };
        blocks.map(fetch).collect()
    }
}

impl Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            disk_bytes: self.disk_bytes + other.disk_bytes,
            link_bytes: self.link_bytes + other.link_bytes,
        }
    }
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Mul<usize> for Traffic {
    type Output = Self;

    fn mul(self, times: usize) -> Self {
        let times = times as u64;
        Self { disk_bytes: self.disk_bytes * times, link_bytes: self.link_bytes * times }
    }
}

/// What is run again and again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// An optimizer step: every block forward, then back down to the lowest trainable one; `None` when
    /// only the head is trained. Each step is announced while the one before runs.
    Training {
        /// The lowest trainable block.
        lowest: Option<BlockIndex>,
    },
    /// Every block forward, nothing announced.
    Inference,
}

/// Fetches of one block per pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fetches {
    /// In the first pass, which finds the slots empty.
    pub first: usize,
    /// In every later one.
    pub later: usize,
}

/// Which blocks pass through how many slots, and in which order.
#[derive(Debug, Clone, Copy)]
pub struct Itinerary<'a> {
    /// Streamed blocks of the model; they are the first in its list.
    pub num_streamed: usize,
    /// The first block of a pass: those before it are not visited.
    pub first_block: usize,
    /// A block that is visited once per pass, after the last streamed one.
    pub head: Option<BlockIndex>,
    /// Blocks that stay on the device and take no slot.
    pub kept: &'a BTreeSet<BlockIndex>,
    /// Slots.
    pub num_slots: usize,
    /// What is run.
    pub pass: Pass,
}

impl Itinerary<'_> {
    /// Every block that passes through the slots, in the order of a forward pass, with its fetches.
    pub fn fetches(&self) -> Vec<(BlockIndex, Fetches)> {
        let moving: Vec<BlockIndex> = (self.first_block..self.num_streamed)
            .map(BlockIndex)
            .filter(|block| !self.kept.contains(block))
            .chain(self.head)
            .collect();
        let count = |(position, block): (usize, &BlockIndex)| {
            let fetches = match self.pass {
                Pass::Inference => self.inference(position, moving.len()),
                Pass::Training { .. } if Some(*block) == self.head => self.visited_once(&moving),
                Pass::Training { lowest } => {
                    let lowest = lowest.map_or(moving.len(), |lowest| {
                        moving.iter().take_while(|block| **block < lowest).count()
                    });
                    self.training(position, lowest, &moving)
                }
            };
            (*block, fetches)
        };
        moving.iter().enumerate().map(count).collect()
    }

    /// The bytes of the first pass and of every later one. `bytes` says what one fetch moves.
    pub fn traffic(&self, bytes: impl Fn(BlockIndex) -> Traffic) -> (Traffic, Traffic) {
        let mut sums = (Traffic::default(), Traffic::default());
        for (block, fetches) in self.fetches() {
            sums.0 += bytes(block) * fetches.first;
            sums.1 += bytes(block) * fetches.later;
        }
        sums
    }

    /// A pass is scheduled when the one before has ended: of the last blocks, which are in the slots,
    /// those stay that are also among the first ones of the new pass.
    fn inference(&self, position: usize, num_moving: usize) -> Fetches {
        let reused = num_moving <= self.num_slots
            || (num_moving - self.num_slots..self.num_slots).contains(&position);
        Fetches { first: 1, later: usize::from(!reused) }
    }

    /// Every other block is visited between two visits of this one.
    fn visited_once(&self, moving: &[BlockIndex]) -> Fetches {
        Fetches { first: 1, later: usize::from(moving.len() > self.num_slots) }
    }

    /// `lowest` counts moving blocks, as `position` does.
    fn training(&self, position: usize, lowest: usize, moving: &[BlockIndex]) -> Fetches {
        if position < lowest {
            return self.visited_once(moving);
        }
        // Between forward and backward: the blocks above and the head.
        let backward = usize::from(moving.len() - 1 - position >= self.num_slots);
        // Between backward and the next forward: the blocks below.
        let forward = usize::from(position >= self.num_slots);
        Fetches { first: 1 + backward, later: forward + backward }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache that is told the future: whenever a slot holds something needed later than the next
    /// missing block, or never again, that block takes it at once. Counts fetches per pass and block.
    fn simulate(
        itinerary: &Itinerary<'_>,
        num_blocks: usize,
        num_passes: usize,
    ) -> Vec<Vec<usize>> {
        let forward: Vec<usize> = (itinerary.first_block..itinerary.num_streamed).collect();
        let mut visits = forward.clone();
        visits.extend(itinerary.head.map(|head| head.0));
        if let Pass::Training { lowest: Some(lowest) } = itinerary.pass {
            visits.extend(forward.iter().rev().filter(|block| **block >= lowest.0));
        }
        visits.retain(|block| !itinerary.kept.contains(&BlockIndex(*block)));
        let announced = itinerary.pass != Pass::Inference;
        let (mut slots, mut fetched) = (Vec::<usize>::new(), vec![vec![0; num_blocks]; num_passes]);
        for pass in 0..num_passes {
            for at in 0..visits.len() {
                // First nothing is in use, then the block of this visit is; it stays where it is.
                for in_use in [None, Some(visits[at])] {
                    let mut future = visits[at + usize::from(in_use.is_some())..].to_vec();
                    if announced && pass + 1 < num_passes {
                        future.extend(&visits);
                    }
                    let need =
                        |block: usize| future.iter().position(|next| *next == block).unwrap_or(999);
                    loop {
                        let missing = future.iter().find(|block| !slots.contains(*block)).copied();
                        let Some(missing) = missing else { break };
                        if slots.len() >= itinerary.num_slots {
                            let others = slots.iter().enumerate();
                            let victim = others
                                .filter(|(_, held)| Some(**held) != in_use)
                                .max_by_key(|(_, held)| need(**held))
                                .map(|(slot, held)| (slot, *held));
                            match victim {
                                Some((slot, held)) if need(held) > need(missing) => {
                                    slots.remove(slot);
                                }
                                _ => break,
                            }
                        }
                        slots.push(missing);
                        // What is fetched ahead belongs to the pass that needs it.
                        let late =
                            need(missing) >= visits.len() - at - usize::from(in_use.is_some());
                        fetched[pass + usize::from(late)][missing] += 1;
                    }
                    assert!(in_use.is_none_or(|block| slots.contains(&block)));
                }
            }
        }
        fetched
    }

    /// Kept sets that differ in kind: none, the top, the bottom, every other one, all.
    fn kept_sets(num_streamed: usize) -> Vec<BTreeSet<BlockIndex>> {
        let set = |wanted: &dyn Fn(usize) -> bool| {
            (0..num_streamed).filter(|block| wanted(*block)).map(BlockIndex).collect()
        };
        let mut sets = vec![set(&|block| block % 2 == 1), set(&|block| block % 3 != 1)];
        for number in 0..=num_streamed {
            sets.push(set(&|block| block >= num_streamed - number));
            sets.push(set(&|block| block < number));
        }
        sets
    }

    #[test]
    fn fetches_of_every_block_are_those_of_a_simulated_optimal_cache() {
        let mut num_cases = 0;
        for num_streamed in 0..=7 {
            let mut passes = vec![Pass::Inference, Pass::Training { lowest: None }];
            let lowest = (0..num_streamed).map(|block| Some(BlockIndex(block)));
            passes.extend(lowest.map(|lowest| Pass::Training { lowest }));
            for kept in &kept_sets(num_streamed) {
                for (&pass, head, num_slots) in passes.iter().flat_map(|pass| {
                    let heads = [None, Some(BlockIndex(num_streamed + 1))];
                    heads.into_iter().flat_map(move |head| (1..=8).map(move |n| (pass, head, n)))
                }) {
                    // A block that is not visited is trained in no pass.
                    let first_block = match pass {
                        Pass::Training { lowest: Some(lowest) } => num_slots % 3 * lowest.0 / 2,
                        _ => num_slots % (num_streamed + 1),
                    };
                    let itinerary =
                        Itinerary { num_streamed, first_block, head, kept, num_slots, pass };
                    let simulated = simulate(&itinerary, num_streamed + 2, 5);
                    for (block, fetches) in itinerary.fetches() {
                        let found: Vec<_> = simulated.iter().map(|pass| pass[block.0]).collect();
                        let (first, later) = (fetches.first, fetches.later);
                        assert_eq!(
                            found,
                            [first, later, later, later, later],
                            "{block}: {itinerary:?}"
                        );
                        num_cases += 1;
                    }
                    let moved: usize = simulated.iter().flatten().sum();
                    let counted = itinerary.fetches();
                    let counted = counted.iter().map(|(_, one)| one.first + 4 * one.later);
                    assert_eq!(moved, counted.sum::<usize>(), "{itinerary:?}");
                }
            }
        }
        assert!(num_cases > 10_000, "{num_cases}");
    }

    #[test]
    fn bytes_are_the_sum_over_uneven_blocks() {
        let kept = BTreeSet::from([BlockIndex(1)]);
        let itinerary = Itinerary {
            num_streamed: 5,
            first_block: 0,
            head: Some(BlockIndex(6)),
            kept: &kept,
            num_slots: 2,
            pass: Pass::Training { lowest: Some(BlockIndex(2)) },
        };
        // Block 3 only crosses the link; the others come from the disk, each of another size.
        let bytes = |block: BlockIndex| Traffic {
            disk_bytes: if block.0 == 3 { 0 } else { 10_u64.pow(block.0 as u32) },
            link_bytes: 2 * 10_u64.pow(block.0 as u32),
        };
        // Forward 0 2 3 4, head 6, back 4 3 2: block 4 is still there; block 2 is again at the boundary.
        let (first, later) = itinerary.traffic(bytes);
        assert_eq!((first.disk_bytes, first.link_bytes), (1_010_201, 2_024_402));
        assert_eq!((later.disk_bytes, later.link_bytes), (1_010_101, 2_024_202));
    }
}
