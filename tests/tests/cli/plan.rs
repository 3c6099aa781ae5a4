//! `plan`, `--vram`, `--ram`: what is where, and that it changes no bit.

use serde_json::Value;

use super::{Folder, adapter_bytes, blockstreamer, metrics, model, words};

fn plan(extra: &[&str]) -> Value {
    plan_of(model(), extra)
}

fn plan_of(model: &str, extra: &[&str]) -> Value {
    blockstreamer(&[&["plan", model, "--json"], extra].concat()).ok().json()
}

fn tiers(report: &Value) -> Vec<String> {
    used_blocks(report).map(|block| block["tier"].as_str().unwrap().to_owned()).collect()
}

/// The blocks that a run of text visits: not the vision tower.
fn used_blocks(report: &Value) -> impl Iterator<Item = &Value> {
    let blocks = report["plan"]["blocks"].as_array().unwrap();
    blocks.iter().filter(|block| block["is_used"] == true)
}

/// What a plan uses of the device's memory.
fn used_bytes(report: &Value) -> u64 {
    let device = report["plan"]["device"].as_object().unwrap();
    let used = device.iter().filter(|(name, _)| *name != "budget_bytes");
    used.map(|(_, bytes)| bytes.as_u64().unwrap()).sum()
}

#[test]
fn a_plan_is_printed_for_people_and_with_json_for_programs() {
    let text = blockstreamer(&["plan", model()]).ok().stdout;
    for word in ["blocks ", "layers.0", "device memory", "host memory", "every step", "rates"] {
        assert!(text.contains(word), "no '{word}' in {text}");
    }
    let report = plan(&[]);
    assert_eq!(report["tokens"], 2048);
    let seconds = report["plan"]["prediction"]["seconds"].as_f64().unwrap();
    assert!(seconds >= 0.0, "{report}");
    let is_cuda = report["rates"]["link_gb_per_s"].is_number();
    assert_eq!(report["rates"]["launch_us"].is_number(), is_cuda, "{report}");
    assert_eq!(report["plan"]["prediction"]["launch_seconds"].is_number(), is_cuda, "{report}");
    assert_eq!(text.contains("queueing kernels ("), is_cuda, "{text}");
}

#[test]
fn without_a_gpu_a_plan_for_one_is_made_from_its_memory() {
    let one = ["--vram", "1.2GiB", "--ram", "200MiB"];
    let job = ["--tokens", "16", "--top-fraction", "0.5"];
    let fits = plan(&[&one[..], &job].concat());
    assert_eq!(fits["rates_are_assumed"], true);
    assert!(tiers(&fits).iter().all(|tier| tier == "device"), "{fits}");
    assert_eq!(fits["plan"]["later"]["link_bytes"], 0);
    // The host queues kernels there; the CPU of this machine queues nothing.
    assert_eq!(fits["rates"]["launch_us"], 5.0);
    assert_eq!(fits["plan"]["prediction"]["bound"], "host", "{fits}");
    assert!(fits["plan"]["prediction"]["launch_seconds"].as_f64().unwrap() > 0.0, "{fits}");
    let text = blockstreamer(&[&["plan", model()], &one[..], &job].concat()).ok().stdout;
    for said in ["queueing kernels (", "as long as queueing kernels takes", "5.0 us per kernel"] {
        assert!(text.contains(said), "no '{said}' in {text}");
    }

    // Just what it takes without graphs, less one byte: something has to go.
    let weights = fits["plan"]["device"]["kept_bytes"].as_u64().unwrap();
    let graphs = fits["plan"]["device"]["graph_bytes"].as_u64().unwrap();
    assert!(weights > 0 && graphs > 0, "{fits}");
    let vram = (used_bytes(&fits) - graphs - 1).to_string();
    let short = plan(&[&["--vram", &vram, "--ram", "200MiB"][..], &job].concat());
    assert!(used_bytes(&short) < vram.parse().unwrap(), "{short}");
    assert!(tiers(&short).iter().any(|tier| tier != "device"), "{short}");
}

#[test]
fn budgets_that_are_too_small_say_what_would_do() {
    let failed = |words: &[&str], said: &[&str]| {
        blockstreamer(&[&["plan", model()], words].concat()).failed(said);
    };
    failed(
        &["--vram", "64MiB"],
        &["64.00 MiB of device memory", "the least that works is", "--vram"],
    );
    failed(
        &["--vram", "4GiB", "--ram", "1MiB"],
        &["1.00 MiB of host memory", "MiB for reads", "--ram"],
    );
    let chunks = ["--set", "stream.num_chunks=1000000", "--ram", "1GiB"];
    Folder::new().train("run", &chunks).failed(&[
        "1.00 GiB of memory",
        "--ram",
        "stream.num_chunks",
    ]);
    failed(&["--mode", "full"], &["--mode full", "not there yet", "--mode lora"]);
    failed(&["--tokens", "0"], &["--tokens"]);
    failed(&["--top-fraction", "1.5"], &["1.5"]);
    let train = Folder::new().train("run", &["--vram", "1MB", "--set", "stream.tier=auto"]);
    train.failed(&["976.56 KiB of memory", "the least that works is", "--vram"]);
}

/// What a refused plan says would do, in bytes as far as it is printed.
#[track_caller]
fn least_that_works(words: &[&str]) -> f64 {
    let refused = blockstreamer(words).failed(&["the least that works is"]).stderr;
    let (_, least) = refused.split_once("the least that works is ").unwrap();
    let mut words = least.split(' ');
    let (number, unit) = (words.next().unwrap(), words.next().unwrap());
    let shift = ["B", "KiB", "MiB", "GiB"].iter().position(|name| *name == unit).unwrap();
    number.parse::<f64>().unwrap() * f64::from(1 << (10 * shift))
}

#[test]
fn the_least_that_works_is_that_of_the_cut_which_needs_the_least() {
    let folder = Folder::new();
    let model = folder.path("model");
    blockstreamer(&["synth", "gpt-oss:tiny", "--out", &model]).ok();
    let all_groups = ["1", "2", "4", "8"];
    let mut best = Vec::new();
    // With few tokens small blocks need the least, with many few of them: each keeps a sum.
    for tokens in ["1", "100000"] {
        let plan = ["plan", &model, "--ram", "1MiB", "--tokens", tokens];
        let of_cut = |groups| least_that_works(&[&plan[..], &["--expert-groups", groups]].concat());
        let least = all_groups.map(of_cut);
        let fewest = least.iter().copied().fold(f64::INFINITY, f64::min);
        assert_eq!(least_that_works(&plan), fewest, "{tokens}: {least:?}");
        best.push(least.iter().position(|bytes| *bytes == fewest).unwrap());
    }
    assert!(best[0] > best[1], "{best:?}");
}

#[test]
fn a_finer_cut_is_taken_where_what_its_slots_leave_saves_reads() {
    let folder = Folder::new();
    let model = folder.path("model");
    blockstreamer(&["synth", "gpt-oss:tiny", "--layers", "24", "--out", &model]).ok();
    let plan = |memory: &str, extra: &[&str]| {
        let plan = plan_of(&model, &[&["--ram", memory, "--tokens", "8"], extra].concat());
        (plan["expert_groups"].clone(), plan["plan"]["later"]["disk_bytes"].as_u64().unwrap())
    };
    let (groups, chosen) = plan("48400KiB", &[]);
    let [coarse, same, finer] = ["1", "2", "4"].map(|groups| {
        let (_, disk_bytes) = plan("48400KiB", &["--expert-groups", groups]);
        disk_bytes
    });
    // One block holds all experts and has room for all slots, but two read less, and four no less than two.
    assert!(coarse > 2 * same && same > 0 && finer > same, "{coarse} {same} {finer}");
    assert_eq!((groups, chosen), (2.into(), same));
    // Where nothing is read there is nothing to save.
    assert_eq!(plan("4GiB", &[]), (1.into(), 0));
}

#[test]
fn training_by_a_plan_moves_what_was_planned_and_gives_the_bits_of_training_from_disk() {
    let folder = Folder::new();
    // Rows of one length, so that the plan knows how many tokens a step has.
    let row = r#"{"text": "one two three four five six seven eight nine ten"}"#;
    let data = folder.write("rows.jsonl", &format!("{row}\n").repeat(4));
    let model = folder.path("model");
    blockstreamer(&["synth", "qwen3-vl:tiny", "--layers", "8", "--out", &model]).ok();
    let train = |out: &str, extra: &[&str]| {
        let out = folder.path(out);
        let settings = ["--set", "steps=3", "--set", "lora.top_fraction=0.5"];
        blockstreamer(&words(&model, &data, &out, &[&settings[..], extra].concat())).ok()
    };
    train("disk", &[]);
    let wanted = adapter_bytes(&folder.path("disk"));
    train("device", &["--set", "stream.tier=device"]);
    assert_eq!(adapter_bytes(&folder.path("device")), wanted);
    for line in &metrics(&folder.path("device")) {
        assert_eq!((&line["read_bytes"], &line["h2d_bytes"]), (&0.into(), &0.into()), "{line}");
    }

    let tokens = metrics(&folder.path("disk"))[0]["tokens"].to_string();
    let planned = |memory: &str| {
        plan_of(&model, &["--ram", memory, "--tokens", &tokens, "--top-fraction", "0.5"])
    };
    let all = planned("4GiB");
    let device = &all["plan"]["device"];
    let bytes = |name: &str| device[name].as_u64().unwrap();
    assert!(tiers(&all).iter().all(|tier| tier == "device"), "{all}");
    let block = used_blocks(&all).next().unwrap()["image_bytes"].as_u64().unwrap();
    let others = bytes("resident_bytes") + bytes("working_set_bytes") + bytes("staging_bytes");
    let mut num_kept = Vec::new();
    // One slot; three slots; three slots and two blocks that stay; all but the graphs.
    for (name, num_blocks) in [("one", 1), ("three", 3), ("five", 5), ("all", 100)] {
        let memory = (others + (num_blocks * block).min(bytes("kept_bytes"))).to_string();
        let report = planned(&memory);
        let run = train(name, &["--ram", &memory, "--set", "stream.tier=auto"]);
        for said in ["device memory", "s per step, as long as"] {
            assert!(run.stderr.contains(said), "{name}, {said}: {}", run.stderr);
        }
        assert_eq!(adapter_bytes(&folder.path(name)), wanted, "{name}");
        // What is read ahead for the next step counts in the step during which it arrives.
        let lines = metrics(&folder.path(name));
        for (key, of_run) in [("disk_bytes", "read_bytes"), ("link_bytes", "h2d_bytes")] {
            let planned = |pass: &str| report["plan"][pass][key].as_u64().unwrap();
            let moved: u64 = lines.iter().map(|line| line[of_run].as_u64().unwrap()).sum();
            assert_eq!(moved, planned("first") + 2 * planned("later"), "{name} {key}: {report}");
        }
        num_kept.push(report["plan"]["device"]["kept_bytes"].as_u64().unwrap() / block);
    }
    assert_eq!(num_kept, [0, 0, 2, 8], "of eight blocks");
}
