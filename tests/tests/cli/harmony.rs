//! gpt-oss on conversations: a synthesized model, its template, and one as published beside it.

use std::fs;

use serde_json::{Value, json};

use super::{Finished, Folder, blockstreamer, metrics, words};

/// A model of three layers and a row of two turns with reasoning.
fn model_and_rows(folder: &Folder) -> (String, String) {
    let model = folder.path("model");
    blockstreamer(&["synth", "gpt-oss:tiny", "--layers", "3", "--out", &model]).ok();
    let row = json!({"messages": [
        {"role": "user", "content": "Why is there a tide?"},
        {"role": "assistant", "thinking": "The moon.", "content": "The moon pulls."},
        {"role": "user", "content": "How often?"},
        {"role": "assistant", "thinking": "Count.", "content": "Twice a day."},
    ]});
    (model, folder.write("rows.jsonl", &format!("{row}\n")))
}

fn train(folder: &Folder, model: &str, rows: &str, out: &str) -> Finished {
    let extra = ["--set", "steps=4", "--set", "batch_size=1", "--set", "sequence_length=1024"];
    blockstreamer(&words(model, rows, &folder.path(out), &extra))
}

#[test]
fn a_synthesized_gpt_oss_of_fewer_layers_learns_a_conversation() {
    let folder = Folder::new();
    let (model, rows) = model_and_rows(&folder);
    let config = fs::read_to_string(format!("{model}/config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    let types = ["sliding_attention", "full_attention", "sliding_attention"];
    assert_eq!((&config["layer_types"], &config["num_hidden_layers"]), (&json!(types), &json!(3)));
    train(&folder, &model, &rows, "run").ok();
    let lines = metrics(&folder.path("run"));
    let loss = |index: usize| lines[index]["loss"].as_f64().unwrap();
    assert!(loss(3) < loss(0), "{} -> {}", loss(0), loss(3));
}

#[test]
fn a_template_without_marks_trains_on_the_same_tokens_as_long_as_it_prints_the_same() {
    let folder = Folder::new();
    let (model, rows) = model_and_rows(&folder);
    train(&folder, &model, &rows, "marked").ok();
    let path = format!("{model}/chat_template.jinja");
    let template = fs::read_to_string(&path).unwrap();
    let unmarked = template.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "");
    assert_ne!(template, unmarked);
    fs::write(&path, &unmarked).unwrap();
    train(&folder, &model, &rows, "unmarked").ok();
    let learned = |run: &str| {
        let lines = metrics(&folder.path(run)).into_iter();
        lines.map(|line| (line["tokens"].clone(), line["loss"].clone())).collect::<Vec<_>>()
    };
    assert_eq!(learned("marked"), learned("unmarked"));

    fs::write(&path, unmarked.replace("Reasoning: ", "Effort: ")).unwrap();
    train(&folder, &model, &rows, "other").failed(&["rows.jsonl, line 1", "{% generation %}"]);
}
