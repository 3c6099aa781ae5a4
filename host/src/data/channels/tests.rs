use std::collections::BTreeMap;

use serde_json::json;

use super::*;

const HARMONY: &str = include_str!("../../../../plugins/gpt-oss/src/chat_template.jinja");

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, &BTreeMap::new()).unwrap()
}

/// A conversation that a question begins.
fn chat(turns: &Value) -> Conversation {
    let mut messages = vec![json!({"role": "user", "content": "Why?"})];
    messages.extend(turns.as_array().unwrap().iter().cloned());
    Conversation { messages, tools: None }
}

fn folded(turns: &Value) -> Result<Conversation, String> {
    let mut chat = chat(turns);
    fold(&template(HARMONY), &mut chat).map(|()| chat)
}

#[track_caller]
fn refused(turns: &Value, needles: &[&str]) {
    let error = folded(turns).unwrap_err();
    for needle in needles {
        assert!(error.contains(needle), "{turns}: no '{needle}' in: {error}");
    }
}

fn said(channel: &str, content: &str) -> Value {
    json!({"role": "assistant", "channel": channel, "content": content})
}

fn calls() -> Value {
    json!([{"function": {"name": "tide", "arguments": {}}}])
}

#[test]
fn reasoning_in_a_message_of_its_own_is_that_of_the_answer_or_call_after_it() {
    let native = json!([
        said("analysis", "ask"),
        {"role": "assistant", "channel": "commentary", "recipient": "functions.tide", "tool_calls": calls()},
        {"role": "tool", "channel": "commentary", "content": "4"},
        {"role": "assistant", "channel": "analysis", "content": [{"type": "text", "text": "it "}, {"type": "text", "text": "said"}]},
        {"role": "assistant", "channel": "final", "recipient": "all", "content": "Four.", "thinking": null},
        {"role": "user", "content": "Sure?"},
        said("analysis", "yes"),
        {"role": "assistant", "channel": null, "content": "Yes."},
    ]);
    let by_keys = json!([
        {"role": "assistant", "tool_calls": calls(), "thinking": "ask"},
        {"role": "tool", "channel": "commentary", "content": "4"},
        {"role": "assistant", "content": "Four.", "thinking": "it said"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes.", "thinking": "yes"},
    ]);
    assert_eq!(folded(&native).unwrap(), chat(&by_keys));
    assert_eq!(folded(&by_keys).unwrap(), chat(&by_keys));
}

#[test]
fn reasoning_that_leads_to_nothing_is_refused() {
    let nowhere = ["messages[1]", "'analysis'", "\"thinking\""];
    refused(&json!([said("analysis", "hm")]), &nowhere);
    refused(&json!([said("analysis", "a"), said("analysis", "b"), said("final", "c")]), &nowhere);
    let question = json!({"role": "user", "content": "?"});
    refused(&json!([said("analysis", "hm"), question, said("final", "x")]), &nowhere);
    let both =
        json!([said("analysis", "a"), {"role": "assistant", "content": "c", "reasoning": "b"}]);
    refused(&both, &["messages[1]", "reasoning of its own"]);
    let twice =
        json!({"role": "assistant", "channel": "analysis", "content": "a", "thinking": "b"});
    refused(&json!([twice, said("final", "c")]), &["messages[1]", "'thinking'", "one of them"]);
    let picture =
        json!({"role": "assistant", "channel": "analysis", "content": [{"type": "image"}]});
    refused(&json!([picture, said("final", "c")]), &["messages[1]", "not only text"]);
}

#[test]
fn a_channel_that_would_be_printed_as_another_is_refused() {
    let answer = said("final", "x");
    refused(
        &json!([said("commentary", "Let me look."), answer]),
        &["messages[1]", "'commentary'", "\"tool_calls\""],
    );
    refused(
        &json!([answer, said("thoughts", "x")]),
        &["messages[2]", "'thoughts'", "analysis, commentary, final"],
    );
    refused(
        &json!([{"role": "assistant", "channel": 1, "content": "x"}]),
        &["must be a string", "a number"],
    );
    let call = |channel: &str| json!([{"role": "assistant", "channel": channel, "tool_calls": calls()}, {"role": "tool", "content": "4"}, answer]);
    refused(&call("final"), &["messages[1]", "'final'", "'commentary'"]);
    refused(&call("analysis"), &["messages[1]", "'analysis'", "'commentary'"]);
    let native_call =
        json!([{"role": "assistant", "recipient": "functions.tide", "content": "{}"}, answer]);
    refused(&native_call, &["messages[1]", "functions.tide", "\"tool_calls\""]);
}

#[test]
fn a_template_that_prints_channels_gets_them_as_they_are() {
    let source = "{% for m in messages %}[{{ m.channel }}]{{ m.content }}{% endfor %}";
    let turns = chat(&json!([said("analysis", "a"), said("commentary", "b"), said("news", "c")]));
    let mut same = turns.clone();
    fold(&template(source), &mut same).unwrap();
    assert_eq!(same, turns);
    // One that takes no other than its own.
    let strict = "{% for m in messages if m.role == 'assistant' %}{{ m.content if m.channel == 'news' else \
                  raise_exception('no news') }}{% endfor %}";
    let turns = chat(&json!([said("news", "c")]));
    let mut same = turns.clone();
    fold(&template(strict), &mut same).unwrap();
    assert_eq!(same, turns);
}

#[test]
fn words_beside_a_call_are_no_commentary_that_the_template_could_print() {
    let call = json!({"role": "assistant", "channel": "commentary", "content": "Let me look.", "tool_calls": calls()});
    refused(&json!([call]), &["messages[1]", "'commentary'", "\"tool_calls\"", "\"thinking\""]);
    let silent = json!({"role": "assistant", "channel": "commentary", "content": " ", "tool_calls": calls()});
    assert!(folded(&json!([silent])).is_ok());
}

#[test]
fn blank_reasoning_is_none() {
    let native = json!([
        {"role": "assistant", "channel": "analysis", "content": "hm", "thinking": ""},
        {"role": "assistant", "channel": "final", "content": "b", "reasoning_content": " "},
    ]);
    let by_keys = json!([{"role": "assistant", "content": "b", "thinking": "hm"}]);
    assert_eq!(folded(&native).unwrap(), chat(&by_keys));
}

#[test]
fn to_templates_of_other_formats_a_channel_means_nothing() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    let rows = json!([
        {"role": "assistant", "channel": "slack", "recipient": "Bob", "content": "a"},
        {"role": "assistant", "channel": "commentary", "content": "b"},
    ]);
    let mut found = chat(&rows);
    fold(&template(source), &mut found).unwrap();
    assert_eq!(found, chat(&rows));
}
