//! Going on with a run: nothing tells it from one that was never interrupted.

use std::fs;
use std::time::{Duration, Instant};

use super::{
    Folder, adapter_bytes, blockstreamer, command, losses, metrics, model, names, rows, words,
};

/// Dropout on: its masks must follow from the step number alone.
const DROPOUT: [&str; 2] = ["--set", "lora.dropout=0.2"];

fn extra<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&DROPOUT[..], more].concat()
}

#[test]
fn three_steps_and_three_more_are_six() {
    let folder = Folder::new();
    let six = ["--set", "steps=6"];
    folder.train("straight", &extra(&six)).ok();
    folder.train("parts", &extra(&["--set", "steps=3"])).ok();
    folder.train("parts", &extra(&["--set", "steps=6", "--resume"])).ok();

    let (straight, parts) = (folder.path("straight"), folder.path("parts"));
    assert_eq!(losses(&straight), losses(&parts));
    assert!(adapter_bytes(&straight) == adapter_bytes(&parts), "the adapters differ");
    let steps: Vec<_> = metrics(&parts).iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 6]);
    assert_eq!(names(format!("{parts}/checkpoints")), ["step-00000003", "step-00000006"]);
    // Dropout did something, or this proves nothing about it.
    folder.train("dry", &six).ok();
    assert_ne!(losses(&folder.path("dry")), losses(&straight));

    folder.train("parts", &extra(&six)).failed(&["already holds a run", "--resume", "--out"]);
    folder
        .train("parts", &extra(&["--set", "steps=6", "--resume"]))
        .failed(&["has done all its 6 steps", "raise steps"]);
    folder
        .train("parts", &extra(&["--set", "steps=7", "--resume", "--set", "lora.rank=4"]))
        .failed(&["[lora] differs from", "config.toml"]);
    folder
        .train("parts", &extra(&["--set", "steps=7", "--resume", "--set", "optimizer.name=sgd"]))
        .failed(&["optimizer.name differs from", "config.toml"]);
    assert_eq!(losses(&parts).len(), 6, "a refused run changed metrics.jsonl");
}

#[test]
fn a_run_with_experts_goes_on_as_they_were_cut() {
    let folder = Folder::new();
    let (moe, out, data) = (folder.path("moe"), folder.path("run"), rows());
    blockstreamer(&["synth", "qwen3-vl:tiny-moe", "--out", &moe]).ok();
    let train = |extra: &[&str]| {
        let settings = ["--set", "data.overflow=truncate", "--set", "sequence_length=256"];
        blockstreamer(&words(&moe, &data, &out, &[&settings[..], extra].concat())).ok()
    };
    let cut = |number: usize| {
        let text = fs::read_to_string(format!("{out}/config.toml")).unwrap();
        assert!(text.contains(&format!("expert_groups = {number}\n")), "{text}");
    };
    train(&["--set", "steps=1", "--expert-groups", "2"]);
    cut(2);
    // By itself it would take one block: there is room enough.
    train(&["--set", "steps=2", "--resume"]);
    cut(2);
    train(&["--set", "steps=3", "--resume", "--expert-groups", "4"]);
    cut(4);
}

#[test]
fn a_run_keeps_the_date_that_its_template_prints() {
    let folder = Folder::new();
    let (dated, data) = (folder.path("dated"), rows());
    fs::create_dir(&dated).unwrap();
    for file in fs::read_dir(model()).unwrap().map(Result::unwrap) {
        fs::copy(file.path(), format!("{dated}/{}", file.file_name().to_str().unwrap())).unwrap();
    }
    let template = format!("{dated}/chat_template.jinja");
    let own = fs::read_to_string(&template).unwrap();
    fs::write(&template, format!("{{{{- strftime_now('%Y-%m-%d') -}}}}{own}")).unwrap();
    let train = |out: &str, extra: &[&str]| {
        let settings = ["--set", "data.overflow=truncate", "--set", "sequence_length=256"];
        let out = folder.path(out);
        blockstreamer(&words(&dated, &data, &out, &[&settings[..], extra].concat()))
    };
    let on = |day| ["--set", "steps=2", "--set", day];
    train("straight", &on("data.date=2020-01-01")).ok();
    train("parts", &["--set", "steps=1", "--set", "data.date=2020-01-01"]).ok();
    train("parts", &["--set", "steps=2", "--resume"]).ok();
    assert_eq!(losses(&folder.path("straight")), losses(&folder.path("parts")));
    // Another day is another run, and today's is kept without being asked for.
    train("parts", &["--resume", "--set", "steps=3", "--set", "data.date=2020-01-02"])
        .failed(&["data differs from", "config.toml"]);
    train("today", &["--set", "steps=2"]).ok();
    assert_ne!(losses(&folder.path("straight")), losses(&folder.path("today")));
    let text = fs::read_to_string(folder.path("today/config.toml")).unwrap();
    assert!(text.contains("date = \"20"), "{text}");
    // One that began before dates were kept goes on without.
    let undated: Vec<_> = text.lines().filter(|line| !line.starts_with("date = ")).collect();
    fs::write(folder.path("today/config.toml"), undated.join("\n")).unwrap();
    train("today", &["--set", "steps=3", "--resume"]).ok();
}

#[test]
fn a_killed_run_goes_on_where_it_was() {
    let folder = Folder::new();
    let run = folder.path("killed");
    let every = ["--set", "checkpoint_every=1", "--set", "keep_checkpoints=2"];
    let long = [&every[..], &["--set", "steps=10000"]].concat();
    let data = rows();
    let mut child = command(&words(model(), &data, &run, &extra(&long)))
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let started = Instant::now();
    let metrics_file = folder.path("killed/metrics.jsonl");
    while !fs::read_to_string(&metrics_file).is_ok_and(|text| text.lines().count() >= 3) {
        assert!(started.elapsed() < Duration::from_secs(120), "no three steps in two minutes");
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill().unwrap();
    child.wait().unwrap();

    let whole = |name: &String| name.starts_with("step-");
    let saved = names(format!("{run}/checkpoints")).into_iter().rfind(whole).unwrap();
    let done: u64 = saved.trim_start_matches("step-").parse().unwrap();
    let steps = format!("steps={}", done + 2);
    folder.train("killed", &extra(&[&every[..], &["--resume", "--set", &steps]].concat())).ok();
    folder.train("straight", &extra(&["--set", &steps])).ok();
    let straight = folder.path("straight");
    assert_eq!(losses(&run), losses(&straight));
    assert!(adapter_bytes(&run) == adapter_bytes(&straight), "the adapters differ");
    // Two are kept, and what the killed process was writing is gone.
    let kept = [format!("step-{:08}", done + 1), format!("step-{:08}", done + 2)];
    assert_eq!(names(format!("{run}/checkpoints")), kept);
}

#[test]
fn a_run_killed_after_its_last_checkpoint_gets_its_adapter() {
    let folder = Folder::new();
    folder.train("run", &["--set", "steps=1"]).ok();
    let run = folder.path("run");
    let adapter = adapter_bytes(&run);
    fs::remove_dir_all(folder.path("run/adapter")).unwrap();
    folder.train("run", &["--set", "steps=1", "--resume"]).failed(&["done all its 1 steps"]);
    assert!(adapter_bytes(&run) == adapter);
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_one_before_it_serves() {
    let folder = Folder::new();
    let every = ["--set", "checkpoint_every=1"];
    folder.train("run", &[&every[..], &["--set", "steps=2"]].concat()).ok();
    folder.write("run/checkpoints/step-00000002/state.json", "{\"version\": 1, ");
    let more = [&every[..], &["--set", "steps=3", "--resume"]].concat();
    folder.train("run", &more).failed(&["step-00000002/state.json", "go back one checkpoint"]);
    fs::remove_dir_all(folder.path("run/checkpoints/step-00000002")).unwrap();
    folder.train("run", &more).ok();
    folder.train("straight", &["--set", "steps=3"]).ok();
    assert_eq!(losses(&folder.path("run")), losses(&folder.path("straight")));
}
