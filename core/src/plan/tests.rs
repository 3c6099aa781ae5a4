//! The choice, on models whose best plan is known.

use std::collections::BTreeSet;

use super::*;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::size::size;

const KIB: u64 = 1024;

/// A block of one matrix.
fn block(name: &str, placement: Placement, kib: u64) -> BlockSpec {
    let tensor = ("weight".to_owned(), Dtype::U8, vec![kib as usize, 1024]);
    BlockSpec::pack(name, placement, [tensor]).unwrap()
}

/// Streamed blocks of these sizes, a resident of 1 KiB, and embedding and head of these sizes if any.
fn model(streamed: &[u64], embedding: u64, head: u64) -> Vec<BlockSpec> {
    let names = (0..streamed.len()).map(|index| format!("layers.{index}"));
    let mut blocks: Vec<_> =
        names.zip(streamed).map(|(name, kib)| block(&name, Placement::Streamed, *kib)).collect();
    blocks.push(block("norm", Placement::Resident, 1));
    if embedding > 0 {
        blocks.push(block("embedding", Placement::Gathered, embedding));
    }
    if head > 0 {
        blocks.push(block("head", Placement::Head, head));
    }
    blocks
}

/// A machine and a pass; memory in KiB. One KiB of working set, graphs of 2 KiB.
#[derive(Debug, Clone, Copy)]
struct Case {
    device: u64,
    host: u64,
    staging: u64,
    has_one_memory: bool,
    num_slots: usize,
    pass: Pass,
    only: Option<Tier>,
    slot_budget: Option<u64>,
    first_block: usize,
}

const TRAINS: Case = Case {
    device: 1000,
    host: 0,
    staging: 0,
    has_one_memory: false,
    num_slots: 2,
    pass: Pass::Training { lowest: Some(BlockIndex(4)) },
    only: None,
    slot_budget: None,
    first_block: 0,
};

#[test]
fn blocks_that_no_pass_visits_are_neither_kept_nor_moved_nor_waited_for() {
    let blocks = model(&[10, 10, 10, 10, 10, 10], 0, 0);
    for device in [22, 42, 62, 200] {
        let case = Case { device, host: 20, ..TRAINS };
        let from_third = plan(&blocks, Case { first_block: 2, ..case }).unwrap();
        let short = Case { pass: Pass::Training { lowest: Some(BlockIndex(2)) }, ..case };
        let without = plan(&blocks[2..], short).unwrap();
        assert_eq!(from_third.later, without.later, "{device}");
        assert_eq!(from_third.device, without.device, "{device}");
        assert_eq!(tiers(&from_third)[2..], tiers(&without), "{device}");
        assert!(from_third.to_string().contains("layers.0 … layers.1: not used"));
        assert!(from_third.residency().kept.iter().all(|block| block.0 >= 2));
        assert!(from_third.prediction.seconds <= plan(&blocks, case).unwrap().prediction.seconds);
    }
    assert!(plan(&blocks, Case { first_block: 7, ..TRAINS }).is_err());
}

fn plan(blocks: &[BlockSpec], case: Case) -> Result<Plan> {
    plan_with(blocks, case, None)
}

/// With this time of the host for a kernel.
fn plan_with(blocks: &[BlockSpec], case: Case, launch_us: Option<f64>) -> Result<Plan> {
    let demand = Demand {
        working_set_bytes: KIB,
        graph_bytes: vec![2 * KIB; blocks.len()],
        forward_flops: vec![1e9; blocks.len()],
        forward_launches: vec![50.0; blocks.len()],
        other_launches: 100.0,
        gathered_bytes: 64,
    };
    // Gaps are not read, so that disk and link differ.
    let fetch = |block: &BlockSpec| Traffic {
        disk_bytes: block.image_bytes as u64 - 10,
        link_bytes: block.image_bytes as u64 - 5,
    };
    Plan::new(&PlanRequest {
        first_block: case.first_block,
        blocks,
        fetch_from_disk: &blocks.iter().map(fetch).collect::<Vec<_>>(),
        pass: case.pass,
        num_slots: case.num_slots,
        slot_budget_bytes: case.slot_budget.map(|budget| budget * KIB),
        device_bytes: case.device * KIB,
        host_bytes: case.host * KIB,
        staging_bytes: case.staging * KIB,
        has_one_memory: case.has_one_memory,
        demand: &demand,
        rates: Rates {
            disk_gb_per_s: Some(1.0),
            link_gb_per_s: Some(5.0),
            tflops: Some(1e5),
            launch_us,
            ..Rates::default()
        },
        only: case.only,
    })
}

/// One letter per block: kept, graph held, ram, disk.
fn tiers(plan: &Plan) -> String {
    let letter = |block: &PlannedBlock| match (block.tier, block.holds_graph) {
        (Tier::Device, true) => 'g',
        (Tier::Device, false) => 'k',
        (Tier::Ram, _) => 'r',
        (Tier::Disk, _) => 'd',
    };
    plan.blocks.iter().map(letter).collect()
}

#[test]
fn a_model_that_fits_stays_and_what_is_left_holds_graphs_from_the_top() {
    let blocks = model(&[10; 8], 20, 20);
    // 80 of blocks, 41 of others, 1 to compute with.
    let exact = plan(&blocks, Case { device: 122, ..TRAINS }).unwrap();
    assert_eq!(tiers(&exact), "kkkkkkkkkkk");
    assert_eq!(
        (exact.num_slots, exact.later, exact.first),
        (0, Traffic::default(), Traffic::default())
    );
    assert_eq!(exact.device.used_bytes(), 122 * KIB);
    let more = plan(&blocks, Case { device: 127, ..TRAINS }).unwrap();
    assert_eq!(tiers(&more), "kkkkkkggkkk");
    let most = plan(&blocks, TRAINS).unwrap();
    assert_eq!(tiers(&most), "kkkkggggkkk", "below the lowest trainable block there is no graph");
    assert_eq!(most.residency().graphs.len(), 4);
    let inference = plan(&blocks, Case { pass: Pass::Inference, ..TRAINS }).unwrap();
    assert_eq!(tiers(&inference), "kkkkkkkkkkk");
}

#[test]
fn a_model_that_fits_moves_nothing_though_a_plan_that_moves_something_would_be_faster() {
    // With the embedding in host memory, or the head in a slot, more graphs could be held.
    let blocks = model(&[10; 8], 20, 20);
    let held = plan(&blocks, Case { device: 122, host: 40, ..TRAINS }).unwrap();
    let moves = (held.later, held.gathered_bytes, held.gather_from_host, held.stream_head);
    assert_eq!(moves, (Traffic::default(), 0, false, false));
    let without = Case { device: 121, host: 40, ..TRAINS };
    assert!(plan(&blocks, without).unwrap().prediction.seconds < held.prediction.seconds);
}

#[test]
fn staging_is_in_the_memory_that_it_takes_and_is_named_where_it_does_not_fit() {
    let blocks = model(&[10; 8], 0, 0);
    let apart = Case { device: 62, host: 5, staging: 5, ..TRAINS };
    let one = Case { device: 67, host: 0, has_one_memory: true, ..apart };
    let (apart, one) = (plan(&blocks, apart).unwrap(), plan(&blocks, one).unwrap());
    assert_eq!((apart.device.staging_bytes, apart.host.staging_bytes), (0, 5 * KIB));
    assert_eq!((one.device.staging_bytes, one.host.staging_bytes), (5 * KIB, 0));
    assert_eq!(tiers(&apart), tiers(&one));
    for plan in [&apart, &one] {
        assert_eq!(plan.to_string().matches("staging 5.00 KiB").count(), 1, "{plan}");
    }
    let little = Case { device: 1000, host: 4, staging: 5, ..TRAINS };
    for case in [little, Case { device: 16, host: 0, has_one_memory: true, ..little }] {
        let error = plan(&blocks, case).unwrap_err().to_string();
        for word in ["5.00 KiB for reads", "stream.num_chunks", "stream.chunk"] {
            assert!(error.contains(word), "{error}");
        }
    }
}

#[test]
fn short_of_memory_the_top_stays_and_the_embedding_goes_first() {
    let blocks = model(&[10; 8], 20, 20);
    // Everything but the embedding: 102.
    let one = plan(&blocks, Case { device: 103, host: 20, ..TRAINS }).unwrap();
    assert_eq!((tiers(&one).as_str(), one.gather_from_host), ("kkkkkkkkkrk", true));
    assert_eq!(one.gathered_bytes, 64);
    // Two slots, and room for three blocks more without the embedding.
    let two = plan(&blocks, Case { device: 79, host: 20, ..TRAINS }).unwrap();
    assert_eq!(tiers(&two), "dddddkkkkrk");
    let residency = two.residency();
    assert_eq!(residency.kept, BTreeSet::from([5, 6, 7].map(BlockIndex)));
    assert!(residency.gather_from_host && !residency.stream_head);
    // Forward 0-4, back 4: block 4 is still in a slot, and two slots carry nothing to the next step.
    assert_eq!(two.later.disk_bytes, 5 * (10 * KIB - 10));
    assert_eq!(two.first.disk_bytes, two.later.disk_bytes);
    // Without host memory the embedding stays and displaces two blocks.
    let three = plan(&blocks, Case { device: 79, ..TRAINS }).unwrap();
    assert_eq!(tiers(&three), "dddddddkkkk");
}

#[test]
fn the_head_is_streamed_when_that_saves_memory_and_pays() {
    // Slots of 10 hold a head of 10: 10 saved, nothing lost but its own fetch.
    let blocks = model(&[10; 8], 0, 10);
    let needs = Case { device: 22, num_slots: 1, ..TRAINS };
    assert!(!plan(&blocks, needs).unwrap().stream_head);
    let tight = plan(&blocks, Case { device: 12, ..needs }).unwrap();
    assert_eq!((tight.stream_head, tiers(&tight).as_str()), (true, "ddddddddkd"));
    assert_eq!(tight.blocks[9].fetches, 1);
    let larger = model(&[8; 8], 0, 10);
    let tight = Case { device: 12, ..needs };
    assert!(plan(&larger, tight).unwrap().stream_head);
    let bounded = Case { slot_budget: Some(9), ..tight };
    assert!(plan(&larger, bounded).is_err(), "no slot may hold the head");
    // A head of 30 would make three slots grow by 60.
    let blocks = model(&[10; 8], 0, 30);
    let three = Case { device: 62, num_slots: 3, ..TRAINS };
    assert!(!plan(&blocks, three).unwrap().stream_head);
    // Short even for that, fewer slots come before a streamed head.
    let fewer = plan(&blocks, Case { device: 61, ..three }).unwrap();
    assert_eq!((fewer.num_slots, fewer.stream_head), (2, false));
}

#[test]
fn pinned_memory_goes_to_what_would_be_read_most_often() {
    let blocks = model(&[10; 8], 0, 0);
    let device = 2 + 20;
    let pass = Pass::Training { lowest: Some(BlockIndex(2)) };
    let ram = |host| {
        let case = Case { device, host, pass, staging: 3, ..TRAINS };
        plan(&blocks, case).unwrap()
    };
    // Two slots serve 6 and 7 at the turn-around; nothing at the step boundary. 2-5 are read twice.
    assert_eq!(tiers(&ram(12)), "ddddddddk");
    assert_eq!(tiers(&ram(13)), "dddddrddk");
    assert_eq!(tiers(&ram(43)), "ddrrrrddk");
    assert_eq!(tiers(&ram(63)), "drrrrrdrk");
    assert_eq!(tiers(&ram(83)), "rrrrrrrrk");
    assert_eq!(ram(43).later.disk_bytes, 4 * (10 * KIB - 10));
    assert_eq!(ram(43).later.link_bytes, 4 * (10 * KIB - 5) + 8 * 10 * KIB);
    assert_eq!(
        ram(63).in_ram[..2],
        [BlockIndex(5), BlockIndex(3)],
        "the most useful first, spread"
    );
}

#[test]
fn kept_blocks_are_spread_over_the_adapted_ones_when_that_costs_no_byte() {
    let blocks = model(&[10; 9], 0, 0);
    let pass = Pass::Training { lowest: Some(BlockIndex(3)) };
    let kept = |device| plan(&blocks, Case { device, pass, ..TRAINS }).unwrap();
    // Two slots and what computing takes leave room for some of the six adapted blocks.
    assert_eq!(tiers(&kept(2 + 20 + 20)), "dddddkddkk");
    assert_eq!(tiers(&kept(2 + 20 + 30)), "ddddkdkdkk");
    assert_eq!(tiers(&kept(2 + 20 + 60)), "dddkkkkkkk");
    let mut seen: Vec<usize> = super::decide::spread_order(6).collect();
    assert_eq!(seen, [0, 4, 2, 1, 5, 3]);
    seen.sort_unstable();
    assert_eq!(seen, [0, 1, 2, 3, 4, 5]);
    assert_eq!(super::decide::spread_order(0).count(), 0);
    assert_eq!(super::decide::spread_order(1).collect::<Vec<_>>(), [0]);
}

#[test]
fn more_slots_than_blocks_are_no_more_than_blocks() {
    let blocks = model(&[10; 8], 0, 10);
    let only = Some(Tier::Disk);
    let most = Case { num_slots: usize::MAX, only, ..TRAINS };
    let plan = |case| plan(&blocks, case);
    assert_eq!(plan(most).unwrap().num_slots, 8);
    assert!(plan(Case { device: 5, ..most }).is_err());
}

#[test]
fn a_tier_that_is_asked_for_is_kept_to() {
    let blocks = model(&[10; 8], 20, 20);
    let only = |tier, host| plan(&blocks, Case { only: Some(tier), host, ..TRAINS });
    assert_eq!(tiers(&only(Tier::Disk, 1000).unwrap()), "ddddddddkkk");
    assert_eq!(tiers(&only(Tier::Ram, 80).unwrap()), "rrrrrrrrkkk");
    assert!(only(Tier::Device, 0).unwrap().residency().kept.len() == 8);
    let error = only(Tier::Ram, 79).unwrap_err().to_string();
    for word in ["79.00 KiB of host memory", "80.00 KiB", "--ram"] {
        assert!(error.contains(word), "{error}");
    }
    let little = Case { only: Some(Tier::Device), device: 121, ..TRAINS };
    let error = plan(&blocks, little).unwrap_err().to_string();
    for word in ["121.00 KiB of device memory", "122.00 KiB", "--vram"] {
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn no_plan_exceeds_its_budgets_and_the_least_that_is_named_is_the_least() {
    for streamed in [[10; 8], [3, 14, 1, 5, 9, 2, 6, 5]] {
        for (embedding, head) in [(0, 0), (7, 0), (0, 9), (12, 30)] {
            let blocks = model(&streamed, embedding, head);
            for host in [0, 5, 20, 60] {
                let mut least = None;
                for device in 0..150 {
                    let case = Case { device, host, staging: host.min(2), ..TRAINS };
                    match plan(&blocks, case) {
                        Ok(plan) => {
                            least.get_or_insert(device);
                            assert!(plan.device.used_bytes() <= device * KIB, "{case:?}");
                            assert!(plan.host.used_bytes() <= host * KIB, "{case:?}");
                        }
                        Err(_) => assert_eq!(least, None, "{case:?}: less was enough"),
                    }
                }
                let least = least.unwrap();
                let case = Case { device: least - 1, host, staging: host.min(2), ..TRAINS };
                let error = plan(&blocks, case).unwrap_err().to_string();
                assert!(error.contains(&size(least * KIB)), "{least} of {case:?}: {error}");
            }
        }
    }
}

#[test]
fn more_memory_never_moves_more_bytes_of_equal_blocks() {
    let blocks = model(&[10; 8], 20, 20);
    for lowest in 0..8 {
        let pass = Pass::Training { lowest: Some(BlockIndex(lowest)) };
        let mut before = (u64::MAX, u64::MAX);
        for device in (62..130).step_by(4) {
            let at = |host| plan(&blocks, Case { device, host, pass, ..TRAINS }).unwrap().later;
            let moved = (at(20).disk_bytes, at(20).link_bytes);
            assert!(moved.0 <= before.0 && moved.1 <= before.1, "{lowest} {device}");
            let disk: Vec<_> = (20..120).step_by(10).map(|host| at(host).disk_bytes).collect();
            assert!(disk.is_sorted_by(|less, more| less >= more), "{disk:?}");
            assert_eq!(*disk.last().unwrap(), 0);
            before = moved;
        }
    }
}

#[test]
fn a_plan_is_lines_for_people_and_a_document_for_programs() {
    let blocks = model(&[10; 8], 20, 20);
    let plan = plan(&blocks, Case { device: 79, host: 40, ..TRAINS }).unwrap();
    let text = plan.to_string();
    for word in [
        "2 of layers.0 … layers.4: host memory; layers.1 … layers.3: disk; layers.5 … layers.7: device; norm: device",
        "72.00 KiB of 79.00 KiB",
        "2 slots",
        "as long as the disk takes",
    ] {
        assert!(text.contains(word), "no '{word}' in\n{text}");
    }
    let json: serde_json::Value =
        serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
    assert_eq!(json["blocks"].as_array().unwrap().len(), 11);
    assert_eq!(json["blocks"][7]["tier"], "device");
    assert_eq!(json["later"]["disk_bytes"], plan.later.disk_bytes);
    assert_eq!(json["prediction"]["bound"], "disk");
}

/// A published size of a dense model on a laptop with 8 GB of device memory, 7 GiB of host memory for
/// blocks, a drive of 5 GB/s and a link of 6.2 GB/s: LoRA on the upper half of the layers, 128 tokens.
fn laptop(num_layers: usize, hidden: usize, inner: usize, query: usize) -> Plan {
    let key = 1024;
    let linears = [
        ("q", vec![query, hidden]),
        ("k", vec![key, hidden]),
        ("v", vec![key, hidden]),
        ("o", vec![hidden, query]),
        ("gate", vec![inner, hidden]),
        ("up", vec![inner, hidden]),
        ("down", vec![hidden, inner]),
        ("norm", vec![hidden]),
        ("post_norm", vec![hidden]),
    ];
    let layer = linears.map(|(name, shape)| (name.to_owned(), Dtype::BF16, shape));
    let table = [("weight".to_owned(), Dtype::BF16, vec![151_936, hidden])];
    let pack =
        |placement, tensors: &[_]| BlockSpec::pack("b", placement, tensors.to_vec()).unwrap();
    let mut blocks = vec![pack(Placement::Streamed, &layer); num_layers];
    blocks.push(pack(Placement::Gathered, &table));
    blocks.push(pack(Placement::Head, &table));
    let pass = Pass::Training { lowest: Some(BlockIndex(num_layers / 2)) };
    let workload = Workload {
        num_vision_blocks: 0,
        patches: 0,
        num_experts: 0,
        top_k: 0,
        tokens: 128,
        num_micro_batches: 1,
        hidden_size: hidden,
        vocab_size: 151_936,
        compute_kind: tch::Kind::BFloat16,
        loss_chunk_bytes: 128 << 20,
        num_trainable: num_layers / 2 * 8 * (3 * hidden + 2 * query + 2 * key + hidden),
        num_attached: num_layers / 2 * 4 * 2,
        is_cuda: true,
    };
    let fetch = |block: &BlockSpec| {
        let num_bytes = block.payload_bytes() as u64;
        Traffic { disk_bytes: num_bytes, link_bytes: num_bytes }
    };
    let staging_bytes = 128 << 20;
    Plan::new(&PlanRequest {
        first_block: 0,
        blocks: &blocks,
        fetch_from_disk: &blocks.iter().map(fetch).collect::<Vec<_>>(),
        pass,
        num_slots: 3,
        slot_budget_bytes: None,
        device_bytes: (7.7 * f64::from(1 << 30)) as u64,
        host_bytes: (7 << 30) + staging_bytes + blocks[num_layers].image_bytes as u64,
        staging_bytes,
        has_one_memory: false,
        demand: &workload.demand(&blocks, pass),
        rates: Rates {
            disk_gb_per_s: Some(5.0),
            link_gb_per_s: Some(6.2),
            memory_gb_per_s: Some(384.0),
            tflops: Some(21.0),
            launch_us: Some(5.0),
        },
        only: None,
    })
    .unwrap()
}

#[test]
fn models_far_larger_than_a_laptop_take_the_seconds_that_the_limits_of_its_wires_allow() {
    // An analysis by hand, with slots half as large: 1.77 s bound by the link, 13.7 s by the drive.
    let smaller = laptop(36, 4096, 12_288, 4096);
    let larger = laptop(64, 5120, 25_600, 8192);
    for (plan, bound, by_hand) in [(&smaller, Bound::Link, 1.77), (&larger, Bound::Disk, 13.7)] {
        assert!(plan.gather_from_host && !plan.stream_head, "{plan}");
        assert_eq!(plan.prediction.bound, Some(bound), "{plan}");
        let ratio = plan.prediction.seconds / by_hand;
        assert!((0.9..1.12).contains(&ratio), "{ratio}: {plan}");
        assert!(plan.device.kept_bytes > 0 && !plan.in_ram.is_empty(), "{plan}");
    }
}

#[test]
fn what_is_chosen_does_not_depend_on_how_fast_the_host_queues() {
    let blocks = model(&[10; 8], 20, 20);
    for device in (62..130).step_by(3) {
        let case = Case { device, host: 45, ..TRAINS };
        let [without, slow] = [None, Some(1e9)].map(|us| plan_with(&blocks, case, us).unwrap());
        assert_eq!(slow.prediction.bound, Some(Bound::Host));
        assert!(slow.prediction.seconds > without.prediction.seconds, "{slow}");
        assert_eq!((&slow.blocks, slow.later), (&without.blocks, without.later), "{device}");
    }
}
