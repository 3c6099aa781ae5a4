use std::collections::BTreeMap;

use serde_json::json;

use super::*;

const HARMONY: &str = include_str!("../../../../plugins/gpt-oss/src/chat_template.jinja");
const QWEN: &str = include_str!("../../../../plugins/qwen3-vl/src/chat_template.jinja");

fn found(source: &str, messages: Value) -> Vec<Piece> {
    let template = ChatTemplate::new(source, &BTreeMap::new()).unwrap();
    let template = template.on(jiff::civil::date(2025, 8, 5));
    let chat = Conversation { messages: messages.as_array().unwrap().clone(), tools: None };
    let whole = template.render(&chat, false).unwrap().text;
    find(&template, &chat, &whole)
}

fn said(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn call(name: &str) -> Value {
    json!({"function": {"name": name, "arguments": {}}})
}

#[test]
fn texts_of_roles_and_places_that_are_not_printed_are_found() {
    let row = json!([
        said("system", "Be brief."),
        said("developer", "Be rude."),
        said("user", "Same?"),
        said("observation", "It rains."),
        said("system", "Same?"),
        said("assistant", "Yes."),
    ]);
    assert_eq!(found(HARMONY, row.clone()), [Piece::Content; 3]);
    assert_eq!(found(QWEN, row), []);
}

#[test]
fn reasoning_of_earlier_turns_and_before_calls_that_were_answered_is_found() {
    let thought =
        |content: &str| json!({"role": "assistant", "content": content, "thinking": "hm"});
    let once = json!([said("user", "a"), thought("b")]);
    assert_eq!(found(HARMONY, once.clone()), []);
    assert_eq!(found(QWEN, once), [Piece::Reasoning]);
    assert_eq!(
        found(HARMONY, json!([said("user", "a"), thought("b"), said("user", "c"), thought("d")])),
        [Piece::Reasoning]
    );
    let calling = json!({"role": "assistant", "content": "ask", "tool_calls": [call("tide")]});
    let open = json!([said("user", "a"), calling, said("tool", "4")]);
    assert_eq!(found(HARMONY, open), []);
    let answered =
        json!([said("user", "a"), calling, said("tool", "4"), said("assistant", "Four.")]);
    assert_eq!(found(HARMONY, answered.clone()), [Piece::Reasoning]);
    assert_eq!(found(QWEN, answered), []);
}

#[test]
fn calls_after_the_first_of_a_message_are_found_where_they_are_not_printed() {
    let calling = json!({"role": "assistant", "content": "", "tool_calls": [call("tide"), call("wind"), call("tide")]});
    let row = json!([said("user", "a"), calling, said("tool", "4"), said("assistant", "Four.")]);
    assert_eq!(found(HARMONY, row.clone()), [Piece::ToolCall; 2]);
    assert_eq!(found(QWEN, row.clone()), []);
    // Plain ChatML prints no call at all.
    let plain =
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}";
    assert_eq!(found(plain, row), [Piece::ToolCall; 3]);
}

#[test]
fn a_text_is_printed_however_its_template_changes_it() {
    let source = "{% for m in messages %}{{ m.content | tojson(ensure_ascii=true) }}{{ m.content | upper | trim }}\
                  {% endfor %}";
    let row = json!([
        said("user", " é "),
        said("assistant", "x"),
        said("tool", " \n"),
        said("tool", "\u{f0002}")
    ]);
    assert_eq!(found(source, row), []);
    // Escapes everything, so that a mark is not seen as it is.
    let escaped = "{% for m in messages %}{{ m.content | tojson(ensure_ascii=true) if m.role != 'tool' }}{% endfor %}";
    assert_eq!(
        found(escaped, json!([said("user", "é"), said("tool", "x"), said("assistant", "y")])),
        [Piece::Content]
    );
    // Refuses texts that are not as it knows them.
    let strict = "{% for m in messages %}{{ m.content if m.content in ['a', 'b'] else raise_exception('?') }}\
                  {% endfor %}";
    assert_eq!(found(strict, json!([said("user", "a"), said("assistant", "b")])), []);
}

#[test]
fn a_warning_names_the_first_lines_and_how_many_there_are() {
    let mut unprinted = Unprinted::default();
    assert_eq!(unprinted.warnings().count(), 0);
    for line in [2, 3, 5, 7, 11, 13] {
        unprinted.add(line, &[Piece::ToolCall, Piece::ToolCall]);
    }
    unprinted.add(3, &[Piece::Content]);
    let warnings: Vec<_> = unprinted.warnings().collect();
    let [content, calls] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(content.contains("some texts of messages (1; line 3): "), "{content}");
    assert!(calls.contains("some calls of tools (12; lines 2, 3, 5, 7, 11, …): "), "{calls}");
}
