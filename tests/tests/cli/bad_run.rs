//! Rows and settings that are wrong: line or key and remedy are named, and no run folder is left.

use std::fs;

use super::{Finished, Folder, blockstreamer, in_process, model, rows, words};

/// One step with these rows and settings; it must not leave a run behind.
fn train(folder: &Folder, data: &str, extra: &[&str]) -> Finished {
    let run = folder.path("run");
    let extra = [&["--set", "steps=1"], extra].concat();
    let finished = in_process(&words(model(), data, &run, &extra));
    assert!(!fs::exists(&run).unwrap(), "a run that never started left a folder");
    finished
}

#[test]
fn wrong_rows_are_named_by_their_line() {
    let folder = Folder::new();
    for (rows, expected) in [
        ("", &["the dataset is empty"][..]),
        ("\n\n", &["the dataset is empty"]),
        ("{\"text\": \"a b\"}\n\n{\"text\": \n", &["line 3", "not valid JSON"]),
        ("{\"text\": \"a b\"}\n{\"txt\": \"c\"}\n", &["line 2", "txt", "'text' nor 'messages'"]),
        ("{\"messages\": [{\"role\": \"user\"}]}", &["line 1", "content"]),
    ] {
        let data = folder.write("rows.jsonl", rows);
        train(&folder, &data, &[]).failed(expected).failed(&[&data]);
    }
    let missing = folder.path("none.jsonl");
    train(&folder, &missing, &[]).failed(&[&missing, "No such file"]);
}

#[test]
fn a_row_longer_than_the_limit_names_line_lengths_and_ways_out() {
    let folder = Folder::new();
    let short = ["--set", "sequence_length=8"];
    let data = rows();
    train(&folder, &data, &short)
        .failed(&["line 1", "sequence_length is 8", "raise sequence_length", "truncate"])
        .failed(&[&data]);
    let run = folder.path("truncated");
    let truncate =
        ["--set", "steps=1", "--set", "sequence_length=64", "--set", "data.overflow=truncate"];
    blockstreamer(&words(model(), &data, &run, &truncate)).ok();
}

#[test]
fn wrong_settings_are_named_with_what_is_possible() {
    let folder = Folder::new();
    let data = rows();
    for (setting, expected) in [
        ("lora.rnak=3", &["rnak", "rank"][..]),
        ("stepss=3", &["stepss", "steps"]),
        ("steps", &["key=value", "'steps'"]),
        ("steps=0", &["steps", "at least 1"]),
        ("lora.rank=0", &["rank", "at least 1"]),
        ("lora.rank=many", &["lora.rank", "many"]),
        ("lora.target_modules=[\"qq_proj\"]", &["'qq_proj'", "q_proj", "down_proj", "lm_head"]),
        ("lora.target_parameters=[\"experts.w1\"]", &["'experts.w1'", "q_proj.weight"]),
        ("lora.layers=[17]", &["17"]),
        ("lora.top_fraction=1.5", &["fraction", "1.5"]),
        ("lora.dropout=1.0", &["dropout"]),
        ("optimizer.name=lion", &["lion", "adamw"]),
        ("optimizer.schedule=zigzag", &["zigzag", "cosine"]),
        ("batch_size=0", &["batch_size"]),
        ("micro_batches=0", &["micro_batches"]),
        ("device=tpu", &["tpu", "cuda"]),
        ("dtype=fp12", &["fp12", "bf16"]),
        ("sequence_length=100000", &["100000", "4096"]),
        ("stream.slot_budget=100", &["layers.0", "100", "slot budget"]),
        ("stream.chunk=0", &["chunk"]),
        ("stream.num_chunks=0", &["chunk"]),
        (
            "stream.num_chunks=99999999999",
            &["stream.num_chunks (99999999999)", "stream.chunk", "fewer"],
        ),
        ("stream.queue_depth=0", &["stream.queue_depth", "at least 1"]),
        ("stream.tier=tape", &["tape", "disk"]),
        ("stream.shards=/nonexistent", &["/nonexistent"]),
    ] {
        // A plan that streams nothing has no use for chunks and slots.
        let words = ["--set", "stream.tier=disk", "--set", setting];
        train(&folder, &data, &words).failed(expected);
    }
}

#[test]
fn a_wrong_run_file_is_named_with_its_key() {
    let folder = Folder::new();
    for (text, expected) in [
        ("stepz = 3", &["run.toml", "stepz", "steps"][..]),
        ("[lora]\nrnak = 3", &["run.toml", "rnak", "rank"]),
        ("steps = ", &["run.toml", "not TOML", "line 1"]),
        ("steps = 3", &["--model"]),
        ("model = 'm'\ndata = 'd'", &["--out"]),
    ] {
        let file = folder.write("run.toml", text);
        in_process(&["train", &file]).failed(expected);
    }
    let missing = folder.path("none.toml");
    in_process(&["train", &missing]).failed(&[&missing]);
}

#[test]
fn wrong_models_sizes_and_adapters_of_other_commands_are_named() {
    let folder = Folder::new();
    let out = folder.path("out");
    in_process(&["synth", "qwen3-vl:enormous", "--out", &out])
        .failed(&["'enormous'", "tiny, tiny-moe, 2b"]);
    in_process(&["synth", "yeti:tiny", "--out", &out]).failed(&["'yeti'", "qwen3-vl"]);
    in_process(&["synth", "qwen3-vl", "--out", &out]).failed(&["qwen3-vl:tiny"]);
    in_process(&["synth", "qwen3-vl:tiny", "--layers", "0", "--out", &out]).failed(&["layer"]);
    assert!(!fs::exists(&out).unwrap());
    let data = rows();
    in_process(&["eval", model(), "--data", &data, "--adapter", &out])
        .failed(&[&out, "adapter_config.json"]);
    in_process(&["eval", model(), "--data", &data, "--batch-size", "0"]).failed(&["batch"]);
    in_process(&["shard", &out, "--out", &out]).failed(&[&out, "is not a folder"]);
    // A folder of plugins that is not there is told, and the others are used all the same.
    let families = blockstreamer(&["--plugin-dir", &out, "families", "--json"]).ok().json();
    assert_eq!(families["families"][0]["name"], "gpt-oss");
    assert_eq!(families["refused"][0]["path"], out);
}
