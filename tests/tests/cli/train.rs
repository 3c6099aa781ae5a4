//! `synth`, `train`, `eval`: the main job.

use std::fs;
use std::path::Path;

use super::{Folder, blockstreamer, command, finish, losses, metrics, model, names, rows};

#[test]
fn the_main_job_learns_reports_every_step_and_its_settings_run_again_the_same() {
    let folder = Folder::new();
    let run = folder.path("run");
    let report = folder
        .train("run", &["--set", "steps=12", "--set", "batch_size=4", "--set", "stream.tier=disk"])
        .ok();
    for word in ["loss ", "in 12 steps", "read ", "at most ", &*format!("{run}/adapter")] {
        assert!(report.stdout.contains(word), "no '{word}' in {}", report.stdout);
    }
    assert_eq!(names(&run), ["adapter", "checkpoints", "config.toml", "metrics.jsonl"]);
    assert_eq!(names(format!("{run}/checkpoints")), ["step-00000012"]);

    let lines = metrics(&run);
    for (index, line) in lines.iter().enumerate() {
        assert_eq!(line["step"], index as u64 + 1);
        assert_eq!(line["learning_rate"], 0.01);
        for key in ["tokens", "read_bytes", "h2d_bytes"] {
            assert!(line[key].as_u64().unwrap() > 0, "{key}: {line}");
        }
        assert!(line["seconds"].as_f64().unwrap() > 0.0, "{line}");
    }
    let loss = |index: usize| lines[index]["loss"].as_f64().unwrap();
    assert_eq!(lines.len(), 12);
    assert!(loss(11) < 0.9 * loss(0), "{} -> {}", loss(0), loss(11));

    // Elsewhere, and from another folder: the file says all of it.
    let mut again = command(&["train", &format!("{run}/config.toml"), "--out", "again"]);
    again.current_dir(folder.path(""));
    finish(again).ok();
    assert_eq!(losses(&folder.path("again")), losses(&run));

    let eval = |extra: &[&str]| {
        let data = rows();
        let words =
            [&["eval", model(), "--data", &data, "--device", "cpu", "--json"], extra].concat();
        blockstreamer(&words).ok().json()
    };
    let (before, after) = (eval(&[]), eval(&["--adapter", &format!("{run}/adapter")]));
    for report in [&before, &after] {
        let loss = report["loss"].as_f64().unwrap();
        assert!((loss.exp() / report["perplexity"].as_f64().unwrap() - 1.0).abs() < 1e-9);
        assert_eq!(report["rows"], fs::read_to_string(rows()).unwrap().lines().count());
    }
    assert_eq!(before["targets"], after["targets"]);
    let (before, after) = (before["loss"].as_f64().unwrap(), after["loss"].as_f64().unwrap());
    assert!(after < 0.95 * before, "{before} -> {after}");
}

#[test]
fn relative_paths_of_the_command_line_survive_in_the_settings_of_the_run() {
    let folder = Folder::new();
    folder.model();
    fs::copy(rows(), folder.path("rows.jsonl")).unwrap();
    let words = ["train", "--model", "model", "--data", "rows.jsonl", "--out", "run"];
    let mut train = command(&[&words[..], &["--set", "steps=1", "--set", "device=cpu"]].concat());
    train.current_dir(folder.path(""));
    finish(train).ok();
    let config = folder.path("run/config.toml");
    blockstreamer(&["train", &config, "--out", &folder.path("again")]).ok();
    assert_eq!(losses(&folder.path("again")), losses(&folder.path("run")));
}

#[test]
fn the_same_seed_writes_the_same_model_and_another_seed_another() {
    let folder = Folder::new();
    let weights = |seed: &str| {
        let out = folder.path(seed);
        blockstreamer(&["synth", "qwen3-vl:tiny", "--layers", "2", "--seed", seed, "--out", &out])
            .ok();
        fs::read(Path::new(&out).join("model.safetensors")).unwrap()
    };
    let (first, second) = (weights("7"), weights("8"));
    assert_eq!(first, weights("7"));
    assert_ne!(first, second);
}

#[test]
fn wrong_usage_exits_with_2_and_says_what_may_be_typed() {
    for (words, expected) in [
        (&["train", "--no-such-flag"][..], "--no-such-flag"),
        (&["paint"], "paint"),
        (&["synth", "qwen3-vl:tiny"], "--out"),
        (&["eval", "m", "--data", "d", "--tier", "tape"], "disk, ram"),
        (&["synth", "qwen3-vl:tiny", "--out", "o", "--max-file", "5 gigs"], "8GiB"),
        (&[], "Usage"),
    ] {
        let finished = blockstreamer(words);
        assert_eq!(finished.code, 2, "{words:?}: {}", finished.stderr);
        assert!(finished.stderr.contains(expected), "{words:?}: {}", finished.stderr);
        assert_eq!(finished.stdout, "");
    }
}

#[test]
fn json_is_one_document_on_stdout_and_everything_else_is_on_stderr() {
    let found = blockstreamer(&["families", "--json"]).ok().json();
    let names: Vec<_> =
        found["families"].as_array().unwrap().iter().map(|it| &it["name"]).collect();
    assert_eq!(names, ["gpt-oss", "qwen3-vl"]);
    let family = &found["families"][1];
    assert!(family["sizes"].as_array().unwrap().contains(&"tiny".into()), "{family}");
    let doctor = blockstreamer(&["doctor", "--json"]).ok();
    let memory = &doctor.json()["memory"];
    let number = |key: &str| memory[key].as_u64();
    let may_take = number("a_run_may_take_bytes").unwrap();
    assert!(may_take > 0 && may_take < number("total_bytes").unwrap(), "{memory}");
    // Where a limit holds, it is a limit for runs, too.
    let limit = number("cgroup_limit_bytes");
    assert!(limit.is_none_or(|limit| may_take < limit), "{memory}");
    // Logs do not get between: a debug log is long, and the document is still alone.
    let mut noisy = command(&["families", "--json"]);
    noisy.env("BLOCKSTREAMER_LOG", "trace");
    let noisy = finish(noisy).ok();
    assert_eq!(noisy.json(), found);
}
