//! What a plan says a run will move is what the engine moves, to the byte.

use std::collections::BTreeSet;
use std::sync::Arc;

use blockstreamer_core::block::{BlockIndex, Placement};
use blockstreamer_core::device::HostBuffer;
use blockstreamer_core::execute::{Executor, ExecutorOptions, Gradients, Residency, StepOptions};
use blockstreamer_core::plan::{Demand, Itinerary, Pass, Plan, PlanRequest, Rates, Tier, Traffic};
use blockstreamer_core::read::ReadMethod;
use blockstreamer_core::source::{BlockSource, TieredSource};
use blockstreamer_tests::ToyModel;

use crate::rig::{Disk, batch, device, executor, infer, probe, whole_blocks};

const NUM_STEPS: u64 = 3;

/// Every block from the disk moves its whole image: the disk of these tests counts gaps, too.
fn image(source: &dyn BlockSource, block: BlockIndex) -> Traffic {
    let num_bytes = source.blocks()[block.0].image_bytes as u64;
    Traffic { disk_bytes: num_bytes, link_bytes: num_bytes }
}

fn train(executor: &Executor) {
    for step in 0..NUM_STEPS {
        let options =
            StepOptions { step, another_follows: step + 1 < NUM_STEPS, ..StepOptions::default() };
        executor.train_step(&[batch(4, 0, 1)], options, &mut Gradients::new()).unwrap();
    }
}

fn moved(executor: &Executor) -> Traffic {
    let stats = executor.stats().unwrap();
    Traffic { disk_bytes: stats.read_bytes, link_bytes: stats.h2d_bytes }
}

fn trainer(
    model: &ToyModel,
    source: Arc<dyn BlockSource>,
    lowest: usize,
    num_slots: usize,
    residency: Residency,
) -> Executor {
    let trained: Vec<usize> = (lowest..model.parts.len()).collect();
    let options = ExecutorOptions { residency, ..whole_blocks(num_slots - 1) };
    executor(model, source, Some(Box::new(probe(&trained, 0.0))), options)
}

fn head(source: &dyn BlockSource) -> BlockIndex {
    let is_head = |block: &&BlockIndex| source.blocks()[block.0].placement == Placement::Head;
    (0..source.blocks().len()).map(BlockIndex).find(|block| is_head(&block)).unwrap()
}

#[test]
fn an_itinerary_counts_what_the_engine_moves_with_any_blocks_kept_and_the_head_streamed_or_not() {
    for model in [ToyModel::equal(6), ToyModel::mixed()] {
        let num_streamed = model.parts.len();
        let kept_sets = [
            BTreeSet::new(),
            (0..num_streamed).step_by(2).map(BlockIndex).collect(),
            (num_streamed / 2..num_streamed).map(BlockIndex).collect(),
            (0..num_streamed).map(BlockIndex).collect(),
        ];
        for lowest in [0, num_streamed / 2, num_streamed - 1] {
            for kept in &kept_sets {
                for (stream_head, num_slots) in [(false, 2), (true, 1), (true, 2), (true, 4)] {
                    let source = Disk::new(&model);
                    let itinerary = Itinerary {
                        num_streamed,
                        first_block: 0,
                        head: stream_head.then(|| head(&*source)),
                        kept,
                        num_slots,
                        pass: Pass::Training { lowest: Some(BlockIndex(lowest)) },
                    };
                    let (first, later) = itinerary.traffic(|block| image(&*source, block));
                    let residency =
                        Residency { kept: kept.clone(), stream_head, ..Residency::default() };
                    let executor = trainer(&model, source, lowest, num_slots, residency);
                    train(&executor);
                    let wanted = first + later * (NUM_STEPS as usize - 1);
                    assert_eq!(moved(&executor), wanted, "lowest {lowest}, {itinerary:?}");
                }
            }
        }
    }
}

#[test]
fn passes_without_gradients_move_what_the_itinerary_says() {
    let model = ToyModel::mixed();
    let num_streamed = model.parts.len();
    let kept = BTreeSet::from([3, 9].map(BlockIndex));
    for (stream_head, num_slots) in [(false, 1), (false, 5), (true, 6), (true, 9), (false, 8)] {
        let source = Disk::new(&model);
        let head = stream_head.then(|| head(&*source));
        let itinerary = Itinerary {
            num_streamed,
            first_block: 0,
            head,
            kept: &kept,
            num_slots,
            pass: Pass::Inference,
        };
        let (first, later) = itinerary.traffic(|block| image(&*source, block));
        let residency = Residency { kept: kept.clone(), stream_head, ..Residency::default() };
        let executor = trainer(&model, source, 0, num_slots, residency);
        infer(&executor).unwrap();
        assert_eq!(moved(&executor), first, "{itinerary:?}");
        infer(&executor).unwrap();
        infer(&executor).unwrap();
        assert_eq!(moved(&executor), first + later * 2, "{itinerary:?}");
    }
}

#[test]
fn a_run_by_a_plan_moves_what_the_plan_says_and_stays_within_its_device_memory() {
    let (mut num_runs, mut tiers) = (0, BTreeSet::new());
    for model in [ToyModel::equal(6), ToyModel::mixed()] {
        let num_streamed = model.parts.len();
        let disk = Disk::new(&model);
        let blocks = disk.blocks().to_vec();
        let bytes: Vec<u64> = blocks.iter().map(|block| block.image_bytes as u64).collect();
        let fetch: Vec<Traffic> =
            (0..blocks.len()).map(|block| image(&*disk, BlockIndex(block))).collect();
        let demand = Demand {
            graph_bytes: vec![0; blocks.len()],
            forward_flops: vec![0.0; blocks.len()],
            forward_launches: vec![0.0; blocks.len()],
            ..Demand::default()
        };
        let total: u64 = bytes.iter().sum();
        let largest = bytes.iter().max().unwrap();
        for top_share in [4, 2, 1] {
            let lowest = num_streamed - num_streamed.div_ceil(top_share);
            for (num_kept, num_in_ram, prefetch_ahead) in cases(num_streamed) {
                let kept_bytes: u64 = bytes[num_streamed - num_kept..num_streamed].iter().sum();
                let others: u64 = bytes[num_streamed..].iter().sum();
                let slots = largest * (prefetch_ahead as u64 + 1);
                let plan = Plan::new(&PlanRequest {
                    first_block: 0,
                    blocks: &blocks,
                    fetch_from_disk: &fetch,
                    pass: Pass::Training { lowest: Some(BlockIndex(lowest)) },
                    num_slots: prefetch_ahead + 1,
                    slot_budget_bytes: None,
                    device_bytes: total.min(others + kept_bytes + slots),
                    host_bytes: num_in_ram as u64 * largest,
                    staging_bytes: 0,
                    has_one_memory: false,
                    demand: &demand,
                    rates: Rates { disk_gb_per_s: Some(1.0), ..Rates::default() },
                    only: None,
                })
                .unwrap();
                let reserve = |num_bytes| HostBuffer::for_device(num_bytes, device());
                let disk: Arc<dyn BlockSource> = disk.clone();
                let source =
                    TieredSource::load(disk, &plan.in_ram, ReadMethod::Auto, reserve).unwrap();
                let num_slots = plan.num_slots.max(1);
                let executor =
                    trainer(&model, Arc::new(source), lowest, num_slots, plan.residency());
                train(&executor);
                let wanted = plan.first + plan.later * (NUM_STEPS as usize - 1);
                assert_eq!(moved(&executor), wanted, "lowest {lowest}, {plan:?}");
                let stream = executor.stream();
                let kept = plan.residency().kept.into_iter().map(|block| bytes[block.0]);
                assert_eq!(stream.kept_bytes() as u64, kept.sum::<u64>());
                assert_eq!(executor.resident_bytes() as u64, plan.device.resident_bytes);
                assert!(stream.stats().unwrap().peak_bytes <= plan.device.slot_bytes);
                let streamed = plan.blocks.iter().filter(|block| block.placement.is_streamed());
                tiers.insert(streamed.map(|block| block.tier as usize).collect::<BTreeSet<_>>());
                num_runs += 1;
            }
        }
    }
    let all: BTreeSet<usize> =
        [Tier::Device, Tier::Ram, Tier::Disk].map(|tier| tier as usize).into();
    assert!(tiers.contains(&all), "no run had blocks in all three places");
    assert!(num_runs > 200, "{num_runs}");
}

/// Kept blocks, blocks in host memory, and depth: each over all its values, not all combined.
fn cases(num_blocks: usize) -> Vec<(usize, usize, usize)> {
    let mut cases = Vec::new();
    for kept in 0..=num_blocks {
        for ahead in 0..=5 {
            cases.push((kept, (kept + ahead) % (num_blocks + 1), ahead));
            cases.push((kept, num_blocks - kept, ahead));
        }
        cases.extend((0..=num_blocks).map(|in_ram| (kept, in_ram, 1)));
    }
    cases
}
