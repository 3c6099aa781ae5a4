//! gpt-oss on conversations: a synthesized model, its template, and one as published beside it.

use std::fs;

use blockstreamer_core::checkpoint::{read_safetensors, write_safetensors};
use blockstreamer_core::state::NamedTensors;
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

fn tiny(folder: &Folder) -> String {
    let model = folder.path("model");
    blockstreamer(&["synth", "gpt-oss:tiny", "--layers", "2", "--out", &model]).ok();
    model
}

/// `eval` of one row.
fn eval(folder: &Folder, model: &str, messages: &Value) -> Finished {
    let rows = folder.write("row.jsonl", &format!("{}\n", json!({ "messages": messages })));
    let words = ["--device", "cpu", "--date", "2025-08-05", "--sequence-length", "1024", "--json"];
    blockstreamer(&[&["eval", model, "--data", &rows], &words[..]].concat())
}

#[test]
fn rows_in_harmonys_own_form_are_learnt_as_what_they_are() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let question = json!({"role": "user", "content": "Why is there a tide?"});
    let loss = |turns: &[Value]| {
        let messages = [std::slice::from_ref(&question), turns].concat();
        eval(&folder, &model, &messages.into()).ok().json()["loss"].clone()
    };
    let said = |channel: &str, content: Value| json!({"role": "assistant", "channel": channel, "content": content});
    let by_keys =
        loss(&[json!({"role": "assistant", "thinking": "The moon.", "content": "It pulls."})]);
    let parts = json!([{"type": "text", "text": "The "}, {"type": "text", "text": "moon."}]);
    assert_eq!(loss(&[said("analysis", parts), said("final", "It pulls.".into())]), by_keys);
    assert_ne!(loss(&[said("final", "It pulls.".into())]), by_keys);

    let preamble =
        json!([question, said("commentary", "Let me see.".into()), said("final", "x".into())]);
    eval(&folder, &model, &preamble).failed(&["row.jsonl, line 1: messages[1]", "'commentary'"]);
    let alone = json!([question, said("analysis", "hm".into())]);
    eval(&folder, &model, &alone).failed(&["row.jsonl, line 1: messages[1]", "\"thinking\""]);
}

#[test]
fn what_the_template_does_not_print_is_told_once() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let call = json!({"function": {"name": "tide", "arguments": {}}});
    let row = json!([
        {"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be rude."},
        {"role": "user", "content": "How high?"}, {"role": "observation", "content": "It rains."},
        {"role": "assistant", "tool_calls": [call, call]}, {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Four."},
    ]);
    let told = eval(&folder, &model, &row).ok().stderr;
    for needle in [
        "row.jsonl: the chat template does not print some texts of messages (2; line 1): ",
        "some calls of tools (1; line 1): ",
    ] {
        assert_eq!(told.matches(needle).count(), 1, "no '{needle}' in: {told}");
    }
}

#[test]
fn a_loss_that_is_not_a_number_fails_an_evaluation() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let path = std::path::Path::new(&model).join("model.safetensors");
    let tensors = read_safetensors(&path).unwrap();
    let broken: NamedTensors = tensors
        .iter()
        .map(|(name, tensor)| {
            let copy = tensor.copy();
            if name.ends_with("gate_up_proj_scales") {
                // The exponent that stands for NaN.
                let _ = copy.get(0).fill_(255);
            }
            (name.to_owned(), copy)
        })
        .collect();
    write_safetensors(&path, &broken, &[("format", "pt")]).unwrap();
    let row = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    let finished = eval(&folder, &model, &row).failed(&["loss", "NaN", "stream.check_finite=true"]);
    assert_eq!(finished.stdout, "");
}
