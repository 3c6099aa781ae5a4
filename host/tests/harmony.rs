//! gpt-oss's chat template and loss mask against what transformers made of the published template
//! (`plugins/gpt-oss/tests/make_harmony.py`).

// Helpers of an integration test are not seen as tests by clippy.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use blockstreamer_host::data::{ChatTemplate, Conversation, assistant_spans};
use serde_json::Value;

const OURS: &str = include_str!("../../plugins/gpt-oss/src/chat_template.jinja");
const GOLDENS: &str = include_str!("../../plugins/gpt-oss/tests/harmony.json");

/// On the day on which the goldens were made.
fn template(source: &str) -> ChatTemplate {
    let goldens: Value = serde_json::from_str(GOLDENS).unwrap();
    let day = goldens["date"].as_str().unwrap().parse().unwrap();
    ChatTemplate::new(source, &BTreeMap::new()).unwrap().on(day)
}

/// The conversations with what became of them.
fn cases() -> Vec<(Value, Conversation)> {
    let goldens: Value = serde_json::from_str(GOLDENS).unwrap();
    let cases = goldens["cases"].as_array().unwrap().iter().map(|case| {
        let chat = Conversation {
            messages: case["messages"].as_array().unwrap().clone(),
            tools: case["tools"].as_array().cloned(),
        };
        (case.clone(), chat)
    });
    let cases: Vec<_> = cases.collect();
    assert!(cases.len() > 30);
    cases
}

fn renders_as_transformers(source: &str) {
    let template = template(source);
    for (case, chat) in cases() {
        let name = &case["name"];
        for (prompt, wanted) in [(false, &case["text"]), (true, &case["prompt"])] {
            let rendered = template.render(&chat, prompt);
            match wanted.as_str() {
                Some(wanted) => assert_eq!(rendered.unwrap().text, *wanted, "{name}"),
                None => assert!(rendered.is_err(), "{name}"),
            }
        }
    }
}

#[test]
fn conversations_render_as_transformers_renders_them_with_the_published_template() {
    renders_as_transformers(OURS);
}

#[test]
fn what_is_trained_on_is_what_transformers_finds_generated() {
    let template = template(OURS);
    for (case, chat) in cases().iter().filter(|(case, _)| case["text"].is_string()) {
        let (text, spans) = assistant_spans(&template, chat).unwrap();
        let found: Vec<_> = spans.into_iter().map(|span| &text[span]).collect();
        let wanted: Vec<_> = case["generated"].as_array().unwrap().iter().collect();
        assert_eq!(found, wanted, "{}", case["name"]);
    }
}

/// A template that prints the same and marks nothing, as the published one does.
fn unmarked() -> String {
    OURS.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
}

#[test]
fn a_template_without_marks_is_helped_by_the_familys_where_both_print_the_same() {
    let alone = template(&unmarked());
    let helped = template(&unmarked()).with_marked_twin(OURS).unwrap();
    let mut num_helped = 0;
    for (case, chat) in cases().iter().filter(|(case, _)| case["text"].is_string()) {
        assert!(!helped.marks_generation(chat));
        num_helped += usize::from(assistant_spans(&alone, chat).is_err());
        let (text, spans) = assistant_spans(&helped, chat).unwrap();
        let found: Vec<_> = spans.into_iter().map(|span| &text[span]).collect();
        let wanted: Vec<_> = case["generated"].as_array().unwrap().iter().collect();
        assert_eq!(found, wanted, "{}", case["name"]);
    }
    assert!(num_helped >= 5, "{num_helped}");
}

#[test]
fn a_template_that_prints_something_else_is_not_helped() {
    let changed = unmarked().replace("Knowledge cutoff: 2024-06", "Knowledge cutoff: 2025-06");
    let template = template(&changed).with_marked_twin(OURS).unwrap();
    let (_, chat) = cases().into_iter().find(|(case, _)| case["name"] == "three turns").unwrap();
    let error = assistant_spans(&template, &chat).unwrap_err().to_string();
    assert!(error.contains("messages[1]") && error.contains("{% generation %}"), "{error}");
}
