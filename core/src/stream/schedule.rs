//! Which block goes into which slot, and when.
//!
//! The itinerary is known, so the choice is the optimal one (Belady): a block that is needed takes the
//! slot whose content is needed last, and only if that is later than its own use.
//! The decisions depend on the itinerary alone, never on timing.

use std::collections::{BTreeSet, VecDeque};

use crate::block::BlockIndex;

/// A block to be brought into a slot, and the block that leaves it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fetch {
    pub(super) block: BlockIndex,
    pub(super) slot: usize,
    pub(super) evicted: Option<BlockIndex>,
}

/// Slots and the visits still to come.
#[derive(Debug, Clone)]
pub(super) struct Schedule {
    upcoming: VecDeque<BlockIndex>,
    slots: Vec<Option<BlockIndex>>,
    /// Blocks that stay on the device and need no slot.
    kept: BTreeSet<BlockIndex>,
    leased: Option<Leased>,
}

/// What is in use: the content of a slot, or a kept block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leased {
    Slot(usize),
    Kept,
}

impl Schedule {
    pub(super) fn new(num_slots: usize, kept: BTreeSet<BlockIndex>) -> Self {
        Self { upcoming: VecDeque::new(), slots: vec![None; num_slots], kept, leased: None }
    }

    /// Appends visits to the itinerary.
    pub(super) fn extend(&mut self, visits: impl IntoIterator<Item = BlockIndex>) {
        self.upcoming.extend(visits);
    }

    /// The visits still to come, the next one first.
    pub(super) fn upcoming(&self) -> &VecDeque<BlockIndex> {
        &self.upcoming
    }

    /// The next fetch that can start now, in the order of need; the slot is taken for it.
    pub(super) fn next_fetch(&mut self) -> Option<Fetch> {
        let fetch = self.choose()?;
        self.slots[fetch.slot] = Some(fetch.block);
        Some(fetch)
    }

    fn choose(&self) -> Option<Fetch> {
        let position = self
            .upcoming
            .iter()
            .position(|block| !self.kept.contains(block) && !self.slots.contains(&Some(*block)))?;
        let block = self.upcoming[position];
        let next_use = |held: BlockIndex| self.upcoming.iter().position(|block| *block == held);
        // An empty slot counts as content that is never needed, and so does a block without a next use.
        let candidates = self
            .slots
            .iter()
            .enumerate()
            .filter(|(slot, _)| self.leased != Some(Leased::Slot(*slot)));
        let (slot, evicted, use_position) = candidates
            .map(|(slot, held)| match held {
                None => (slot, None, usize::MAX),
                Some(held) => (slot, Some(*held), next_use(*held).unwrap_or(usize::MAX - 1)),
            })
            .max_by_key(|(slot, _, use_position)| (*use_position, std::cmp::Reverse(*slot)))?;
        (use_position > position).then_some(Fetch { block, slot, evicted })
    }

    /// The blocks of the fetches to come, in order, until `enough` of them are found or no more are known.
    pub(super) fn coming_fetches(
        &self,
        mut enough: impl FnMut(BlockIndex) -> bool,
    ) -> Vec<BlockIndex> {
        let (mut ahead, mut blocks) = (self.clone(), Vec::new());
        loop {
            while let Some(fetch) = ahead.next_fetch() {
                blocks.push(fetch.block);
                if enough(fetch.block) {
                    return blocks;
                }
            }
            match ahead.is_leased() {
                true => ahead.release(),
                false if ahead.lease().is_none() => return blocks,
                false => {}
            }
        }
    }

    /// The next visit: its block and the slot it is in, none for a kept block. Its fetch was planned
    /// before.
    pub(super) fn lease(&mut self) -> Option<(BlockIndex, Option<usize>)> {
        let block = *self.upcoming.front()?;
        let slot = match self.kept.contains(&block) {
            true => None,
            false => Some(self.slots.iter().position(|held| *held == Some(block))?),
        };
        self.upcoming.pop_front();
        self.leased = Some(slot.map_or(Leased::Kept, Leased::Slot));
        Some((block, slot))
    }

    pub(super) fn is_leased(&self) -> bool {
        self.leased.is_some()
    }

    /// Ends the visit.
    pub(super) fn release(&mut self) {
        self.leased = None;
    }

    /// Forgets the visits to come.
    pub(super) fn clear(&mut self) {
        self.upcoming.clear();
    }

    /// Forgets what a slot holds, because it could not be filled.
    pub(super) fn forget(&mut self, slot: usize) -> Option<BlockIndex> {
        self.slots[slot].take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn visits(forward: usize, lowest: usize) -> Vec<BlockIndex> {
        (0..forward).chain((lowest..forward).rev()).map(BlockIndex).collect()
    }

    fn plan(schedule: &mut Schedule) -> Vec<Fetch> {
        std::iter::from_fn(|| schedule.next_fetch()).collect()
    }

    /// Walks the itinerary of `num_steps` steps, each scheduled one step ahead; returns the fetches.
    fn walk(num_slots: usize, num_blocks: usize, lowest: usize, num_steps: usize) -> usize {
        let mut schedule = Schedule::new(num_slots, BTreeSet::new());
        let mut num_fetches = 0;
        let step = visits(num_blocks, lowest);
        schedule.extend(step.clone());
        for number in 0..num_steps {
            if number + 1 < num_steps {
                schedule.extend(step.clone());
            }
            num_fetches += plan(&mut schedule).len();
            for expected in &step {
                let (block, _) =
                    schedule.lease().expect("the block of the next visit is in a slot");
                assert_eq!(block, *expected);
                num_fetches += plan(&mut schedule).len();
                schedule.release();
                num_fetches += plan(&mut schedule).len();
            }
        }
        num_fetches
    }

    #[test]
    fn one_step_reads_every_visit_but_those_still_in_a_slot_at_the_turn_around() {
        for num_slots in 1..=6 {
            for num_blocks in 1..=9 {
                for lowest in 0..=num_blocks {
                    let passes = num_blocks + (num_blocks - lowest);
                    let reused = num_slots.min(num_blocks - lowest);
                    assert_eq!(
                        walk(num_slots, num_blocks, lowest, 1),
                        passes - reused,
                        "{num_slots} slots, {num_blocks} blocks, lowest {lowest}"
                    );
                }
            }
        }
    }

    #[test]
    fn steps_that_train_every_block_also_reuse_the_slots_at_the_step_boundary() {
        for num_slots in 1..=4 {
            for num_blocks in num_slots..=9 {
                let first = 2 * num_blocks - num_slots;
                let later = 2 * num_blocks - 2 * num_slots;
                assert_eq!(walk(num_slots, num_blocks, 0, 3), first + 2 * later);
            }
        }
    }

    #[test]
    fn the_fetches_to_come_are_foretold_at_every_point() {
        for (num_slots, num_blocks, lowest, kept) in
            [(1, 5, 0, vec![]), (3, 7, 2, vec![6]), (2, 6, 3, vec![0, 4]), (3, 3, 0, vec![1])]
        {
            let kept = kept.into_iter().map(BlockIndex).collect();
            let mut schedule = Schedule::new(num_slots, kept);
            schedule
                .extend(visits(num_blocks, lowest).into_iter().chain(visits(num_blocks, lowest)));
            let mut foretold = schedule.coming_fetches(|_| false);
            let mut one = true;
            assert_eq!(schedule.coming_fetches(|_| std::mem::take(&mut one)), foretold[..1]);
            loop {
                for fetch in plan(&mut schedule) {
                    assert_eq!(foretold.remove(0), fetch.block);
                }
                assert_eq!(schedule.coming_fetches(|_| false), foretold);
                match schedule.is_leased() {
                    true => schedule.release(),
                    false if schedule.lease().is_none() => break,
                    false => {}
                }
            }
            assert!(foretold.is_empty());
        }
    }

    #[test]
    fn kept_blocks_are_visited_without_a_slot_and_leave_the_window_to_the_others() {
        let kept = BTreeSet::from([BlockIndex(1), BlockIndex(3)]);
        let mut schedule = Schedule::new(2, kept);
        schedule.extend(visits(4, 0));
        let (mut fetched, mut leased) = (Vec::new(), Vec::new());
        loop {
            fetched.extend(plan(&mut schedule).iter().map(|fetch| fetch.block.0));
            let Some((block, slot)) = schedule.lease() else { break };
            leased.push((block.0, slot.is_some()));
            schedule.release();
        }
        assert_eq!(fetched, [0, 2], "both stay in their slots");
        let visit = |block| (block, block % 2 == 0);
        assert_eq!(leased, [0, 1, 2, 3, 3, 2, 1, 0].map(visit));
    }

    #[test]
    fn a_leased_slot_is_never_given_away() {
        let mut schedule = Schedule::new(1, BTreeSet::new());
        schedule.extend([BlockIndex(0), BlockIndex(1)]);
        assert_eq!(plan(&mut schedule).len(), 1);
        schedule.lease().unwrap();
        assert!(plan(&mut schedule).is_empty());
        schedule.release();
        assert_eq!(plan(&mut schedule)[0].evicted, Some(BlockIndex(0)));
    }
}
