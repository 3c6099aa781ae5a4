//! `bench` and `--trace`: what they report, and what they refuse.

use std::collections::BTreeMap;
use std::fs;

use serde_json::Value;

use super::bad_disk::limited;
use super::{Finished, Folder, blockstreamer, in_process, metrics, model, names, rows, words};

fn bench(words: &[&str]) -> Finished {
    blockstreamer(&[&["bench"], words, &["--device", "cpu"]].concat())
}

#[test]
fn streaming_files_moves_every_byte_once_per_pass_and_names_the_drive_beside_it() {
    let folder = Folder::new();
    let dir = folder.path("blocks");
    let blocks =
        ["stream", "--tier", "disk", "--blocks", "5", "--block-size", "1MiB", "--dir", &dir];
    let more = ["--chunk", "300kB", "--num-chunks", "3", "--passes", "2", "--prefetch-ahead", "1"];
    let words = [&blocks[..], &more].concat();
    let report = bench(&[&words[..], &["--json"]].concat()).ok().json();
    let passes = report["passes"].as_array().unwrap();
    assert_eq!(passes.len(), 2);
    for pass in passes {
        assert_eq!(pass["read_bytes"], 5 << 20);
        assert_eq!(pass["h2d_bytes"], 5 << 20);
        assert!(pass["seconds"].as_f64().unwrap() > 0.0);
    }
    assert_eq!((&report["tier"], &report["bare"]), (&"disk".into(), &"drive".into()));
    assert_eq!(report["bare_rates_gb_per_s"].as_array().unwrap().len(), passes.len() + 1);
    let number = |key: &str| report[key].as_f64().unwrap();
    let ratio = number("gb_per_s") / number("bare_gb_per_s");
    assert!((number("ratio") - ratio).abs() < 1e-9 && ratio > 0.0, "{report}");

    let table = bench(&words).ok().stdout;
    for word in ["ours", "bare drive", "ratio", "GB/s", "5 blocks"] {
        assert!(table.contains(word), "no '{word}' in {table}");
    }
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 5, "the files are not used again");
}

#[test]
fn blocks_of_any_size_stream_by_every_way_of_reading() {
    let folder = Folder::new();
    let dir = folder.path("blocks");
    for (read, size) in [("threads", "1000001"), ("buffered", "777")] {
        let words =
            ["stream", "--tier", "nvme", "--dir", &dir, "--block-size", size, "--blocks", "6"];
        let report = bench(&[&words[..], &["--passes", "1", "--read", read, "--json"]].concat());
        let report = report.ok().json();
        let wanted = 6 * size.parse::<u64>().unwrap();
        for key in ["h2d_bytes", "read_bytes"] {
            assert_eq!(report["passes"][0][key], wanted, "{report}");
        }
        assert!(!report["read"].as_str().unwrap().is_empty());
    }
}

#[test]
fn streaming_memory_alternates_with_bare_copies_of_the_same_images() {
    let words = ["stream", "--tier", "ram", "--blocks", "6", "--block-size", "1MiB", "--json"];
    let report = bench(&[&words[..], &["--passes", "3"]].concat()).ok().json();
    assert_eq!(report["num_images"], 6);
    assert_eq!(report["bare"], "link");
    assert_eq!(report["bare_rates_gb_per_s"].as_array().unwrap().len(), 4);
    for pass in report["passes"].as_array().unwrap() {
        assert_eq!((&pass["h2d_bytes"], &pass["read_bytes"]), (&(6 << 20).into(), &0.into()));
    }
}

#[test]
fn steps_of_a_family_and_size_are_timed_beside_their_floors() {
    let folder = Folder::new();
    let work = folder.path("work");
    let trace = folder.path("trace.json");
    let words = ["step", "qwen3-vl:tiny", "--tokens", "16,24", "--steps", "2", "--warmup", "1"];
    let more = ["--work-dir", &work, "--tier", "disk", "--prefetch-ahead", "0", "--cold"];
    let words = [&words[..], &more].concat();
    let report = bench(&[&words[..], &["--json", "--trace", &trace]].concat()).ok().json();
    let counts = report["counts"].as_array().unwrap();
    assert_eq!(counts.len(), 2);
    let streamed_bytes = report["streamed_bytes"].as_u64().unwrap();
    let num_blocks = report["num_blocks"].as_u64().unwrap();
    let num_fetches = num_blocks + num_blocks / 2 - 1;
    for (count, tokens) in counts.iter().zip([16, 24]) {
        assert_eq!(count["tokens"], tokens);
        assert_eq!(count["seconds"].as_array().unwrap().len(), 2);
        let number = |key: &str| count[key].as_f64().unwrap();
        for key in ["median_s", "mean_s", "floor_s", "ratio", "loss", "peak_host_bytes"] {
            assert!(number(key) > 0.0, "{key}: {count}");
        }
        assert!((number("ratio") - number("median_s") / number("floor_s")).abs() < 1e-9);
        for share in ["read", "copy", "compute", "host"] {
            let share = count["shares"][share].as_f64().unwrap();
            assert!((0.0..=1.0).contains(&share), "{count}");
        }
        // One slot, all blocks forward and the upper half back: what is there at the turn-around is used
        // again. That is the number of every run, whatever was under way when the timed steps began.
        for key in ["h2d_bytes", "read_bytes"] {
            let per_block = number(key) / num_fetches as f64;
            // But for what fills the gaps between tensors.
            let share = per_block * num_blocks as f64 / streamed_bytes as f64;
            assert!(per_block.fract() == 0.0 && (0.99..=1.0).contains(&share), "{key}: {count}");
        }
        assert_eq!(count["is_as_planned"], true, "{count}");
        let num_counted = number("counted_h2d_bytes") / streamed_bytes as f64 * num_blocks as f64;
        assert!((num_counted - num_fetches as f64).abs() <= 1.0, "{count}");
        let predicted = count["prediction"]["seconds"].as_f64().unwrap();
        assert!(predicted > 0.0 && count["prediction"]["bound"].is_string(), "{count}");
        assert!((number("predicted_ratio") - number("median_s") / predicted).abs() < 1e-9);
        let file = folder.path(&format!("trace-{tokens}.json"));
        assert_eq!(count["trace"], file);
        assert!(!events(&file).is_empty());
    }
    for rate in ["link_gb_per_s", "drive_gb_per_s"] {
        assert!(report[rate].as_f64().unwrap() > 0.0, "{report}");
    }
    // The model was written once, and may be named as a folder.
    let written = folder.path("work/qwen3-vl-tiny");
    let before = fs::metadata(format!("{written}/config.json")).unwrap().modified().unwrap();
    let table = bench(&words).ok().stdout;
    let after = fs::metadata(format!("{written}/config.json")).unwrap().modified().unwrap();
    assert_eq!(before, after);
    for word in ["bare link", "bare drive", "s/step", "predicted", "floor", "binds"] {
        assert!(table.contains(word), "no '{word}' in {table}");
    }
}

#[test]
fn what_cannot_be_measured_is_refused_with_a_reason() {
    let folder = Folder::new();
    let work = folder.path("work");
    let step = ["step", model()];
    let files = ["stream", "--tier", "disk", "--block-size", "1MiB", "--blocks", "6", "--dir"];
    let blocks = folder.path("blocks");
    let many_chunks = [&files[..], &[&blocks, "--num-chunks", "99999999999"]].concat();
    for (words, expected) in [
        (&["stream", "--tier", "ram", "--blocks", "5"][..], &["5 blocks", "--blocks 6"][..]),
        (&["stream", "--tier", "disk", "--dir", "/proc/none"], &["/proc/none"]),
        (&["stream", "--tier", "ram", "--block-size", "60TiB"], &["--block-size"]),
        (&many_chunks, &["--num-chunks 99999999999", "--chunk"]),
        (&[&step[..], &["--layers", "2"]].concat(), &["--layers", "there already"]),
        (&[&step[..], &["--tokens", "1"]].concat(), &["--tokens 1"]),
        (&[&step[..], &["--tokens", "10000000"]].concat(), &["--tokens 10000000"]),
        (&[&step[..], &["--target-modules", "no_such"]].concat(), &["no_such"]),
        (&[&step[..], &["--trace", "/proc/none/t.json"]].concat(), &["--trace", "exists"]),
        (&[&step[..], &["--trace", "/proc/t.json"]].concat(), &["--trace /proc/t.json", "written"]),
        (&["step", "no-such-model"], &["no folder", "qwen3-vl:8b"]),
        (&["step", "qwen3-vl:900b", "--work-dir", &work], &["900b", "tiny"]),
        (&["step", "yeti:tiny", "--work-dir", &work], &["'yeti'", "qwen3-vl"]),
    ] {
        in_process(&[&["bench"], words, &["--device", "cpu"]].concat()).failed(expected);
    }
    assert!(!fs::exists(&work).unwrap(), "a model that is not there left a folder");
    assert!(!fs::exists(&blocks).unwrap(), "files were written for what was refused");
    for (words, expected) in [
        (&["bench"][..], "stream"),
        (&["bench", "stream"], "--tier"),
        (&["bench", "stream", "--tier", "tape"], "disk"),
        (&["bench", "stream", "--tier", "disk", "--passes", "0"], "at least 1"),
        (&["bench", "stream", "--tier", "ram", "--blocks", "999999999999"], "1 and 10000"),
        (&["bench", "stream", "--tier", "ram", "--prefetch-ahead", "18446744073709551615"], "4999"),
        (&["bench", "stream", "--tier", "disk", "--block-size", "0"], "1 byte"),
        (&["bench", "stream", "--tier", "disk", "--read", "mmap"], "threads"),
        (&["bench", "step"], "MODEL"),
        (&["bench", "step", "m", "--tokens", "128,x"], "at least 1"),
        (&["bench", "step", "m", "--steps", "0"], "at least 1"),
    ] {
        let finished = blockstreamer(words);
        assert_eq!(finished.code, 2, "{words:?}: {}", finished.stderr);
        assert!(finished.stderr.contains(expected), "{words:?}: {}", finished.stderr);
    }
}

/// Track, name, start and end in microseconds, bytes.
type Event = (String, String, f64, f64, u64);

/// The complete events of a trace file.
fn events(path: &str) -> Vec<Event> {
    let document: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let of_phase = |phase: &'static str| {
        let events = document["traceEvents"].as_array().unwrap().iter();
        events.filter(move |event| event["ph"] == phase)
    };
    let tracks: BTreeMap<u64, String> = of_phase("M")
        .filter(|event| event["name"] == "thread_name")
        .map(|event| {
            (event["tid"].as_u64().unwrap(), event["args"]["name"].as_str().unwrap().into())
        })
        .collect();
    of_phase("X")
        .map(|event| {
            let track = &tracks[&event["tid"].as_u64().unwrap()];
            let kind = track.split(" (").next().unwrap().to_owned();
            let (start, duration) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
            let name = event["name"].as_str().unwrap().to_owned();
            (kind, name, start, start + duration, event["args"]["bytes"].as_u64().unwrap())
        })
        .collect()
}

#[test]
fn the_trace_of_a_run_shows_each_block_read_and_copied_before_it_is_computed_with() {
    let folder = Folder::new();
    let trace = folder.path("trace.json");
    // One slot and little staging: nearly nothing is fetched before it is wanted.
    let chunks = ["--set", "stream.chunk=4KiB", "--set", "stream.num_chunks=2"];
    let tier = ["--set", "stream.tier=disk", "--set", "stream.prefetch_ahead=0"];
    let run = [&tier[..], &["--set", "steps=4", "--trace", &trace]].concat();
    folder.train("run", &[&run[..], &chunks].concat()).ok();
    let events = events(&trace);
    let of = |kind: &str| events.iter().filter(move |event| event.0 == kind).collect::<Vec<_>>();
    let (reads, copies, visits) = (of("reads"), of("copies"), of("compute"));
    // The three steps after the first, but for what was on its way at their ends.
    let traced = &metrics(&folder.path("run"))[1..4];
    for (spans, key) in [(&reads, "read_bytes"), (&copies, "h2d_bytes")] {
        let bytes: u64 = spans.iter().map(|span| span.4).sum();
        let wanted: u64 = traced.iter().map(|line| line[key].as_u64().unwrap()).sum();
        let off = bytes.abs_diff(wanted);
        assert!(off < wanted / 10, "{key}: {bytes} of {wanted}");
    }
    let blocks = |spans: &[&Event]| {
        spans.iter().map(|span| span.1.clone()).collect::<std::collections::BTreeSet<_>>()
    };
    assert!(blocks(&visits).len() > 1, "{visits:?}");
    assert_eq!((blocks(&reads), blocks(&copies)), (blocks(&visits), blocks(&visits)));
    // With one slot every copy is for the next visit of its block, which begins after it.
    for copy in &copies {
        let next = visits.iter().find(|visit| visit.1 == copy.1 && visit.3 > copy.2);
        assert!(next.is_none_or(|visit| visit.2 >= copy.3 - 1.0), "{copy:?} {next:?}");
    }
    assert_eq!(names(folder.path("")), ["run", "trace.json"], "something partial was left");
}

/// How many events there are of a kind, and how many of them go on during a visit of another block.
fn num_overlapping(events: &[Event], kind: &str) -> (usize, usize) {
    let of = |kind: &str| events.iter().filter(|event| event.0 == kind).collect::<Vec<_>>();
    let (visits, of_kind) = (of("compute"), of(kind));
    let overlaps = |event: &&&Event| {
        let middle = f64::midpoint(event.2, event.3);
        visits.iter().any(|visit| visit.1 != event.1 && (visit.2..visit.3).contains(&middle))
    };
    (of_kind.len(), of_kind.iter().filter(overlaps).count())
}

#[test]
fn the_trace_of_a_run_shows_reads_and_copies_during_the_visits_of_other_blocks() {
    let folder = Folder::new();
    let model = folder.path("model");
    blockstreamer(&["synth", "qwen3-vl:tiny", "--layers", "8", "--out", &model]).ok();
    // In pieces so small that a block is not there at once, even from a cache.
    let pieces = ["--set", "stream.chunk=512", "--set", "stream.num_chunks=2"];
    let run = [&pieces[..], &["--set", "batch_size=4", "--set", "steps=4"]].concat();
    let data = rows();
    let traced = |num_ahead: usize| {
        let (out, trace) = (folder.path(&format!("run-{num_ahead}")), folder.path("trace.json"));
        let ahead = format!("stream.prefetch_ahead={num_ahead}");
        let more = ["--set", &ahead, "--trace", &trace];
        blockstreamer(&words(&model, &data, &out, &[&run[..], &more].concat())).ok();
        events(&trace)
    };
    // Two blocks ahead of the one in use.
    let ahead = traced(2);
    for kind in ["reads", "copies"] {
        let (num_events, overlapping) = num_overlapping(&ahead, kind);
        assert!(num_events > 100, "{num_events} {kind}");
        assert!(overlapping * 10 > num_events, "{overlapping} of {num_events} {kind}");
    }
    // With one slot a block comes when the visit of the one before is over: a file that showed an overlap
    // all the same would show nothing.
    let (num_events, overlapping) = num_overlapping(&traced(0), "copies");
    assert!(num_events > 100 && overlapping == 0, "{overlapping} of {num_events} copies");
}

#[test]
fn a_trace_that_cannot_be_written_after_all_costs_the_trace_and_not_the_run() {
    let folder = Folder::new();
    let (trace, run) = (folder.path("trace.json"), folder.path("run"));
    // Many small chunks: the trace is larger than any file of the run.
    let chunks = ["--set", "stream.chunk=512", "--set", "lora.rank=2", "--set", "steps=4"];
    let data = rows();
    let words = words(model(), &data, &run, &[&chunks[..], &["--trace", &trace]].concat());
    let finished = limited(&words, 400).ok();
    for said in ["trace.json was not written", "File too large"] {
        assert!(finished.stderr.contains(said), "{}", finished.stderr);
    }
    assert_eq!(names(&run), ["adapter", "checkpoints", "config.toml", "metrics.jsonl"]);
    assert_eq!(names(format!("{run}/checkpoints")), ["step-00000004"]);
    assert_eq!((metrics(&run).len(), names(folder.path(""))), (4, vec!["run".to_owned()]));
}

#[test]
fn metrics_say_who_was_busy_and_the_log_says_who_binds() {
    let folder = Folder::new();
    let report = folder.train("run", &["--set", "steps=2", "--set", "stream.tier=disk"]).ok();
    assert!(report.stderr.contains("binds)"), "{}", report.stderr);
    assert!(!report.stderr.contains("0.000 GB/s"), "{}", report.stderr);
    let lines = metrics(&folder.path("run"));
    // What is read ahead is read in an earlier step.
    for key in ["read_ms", "copy_ms", "compute_ms", "host_ms"] {
        assert!(lines.iter().any(|line| line[key].as_f64().unwrap() > 0.0), "{key}: {lines:?}");
    }
    assert!(lines.iter().all(|line| line["wait_ms"].as_f64().unwrap() >= 0.0), "{lines:?}");
}
