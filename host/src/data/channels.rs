//! Channels of the assistant's messages, told to templates that do not ask for them.
//!
//! Rows in harmony's own form say in `channel` what a message is: `analysis` (reasoning), `commentary` (a call, or
//! words before one), `final` (the answer). The published chat template of that format looks for reasoning in
//! `thinking` and for calls in `tool_calls`, and would print every other `content` as an answer. To templates of
//! other formats a channel means nothing, and nothing is done about it.

use std::mem;

use serde_json::{Map, Value};

use super::json::kind;
use super::parts::joined_text;
use super::row::Conversation;
use super::template::{ChatTemplate, REASONING_KEYS};

const KEYS: [&str; 2] = ["channel", "recipient"];
/// What templates of the format print before a channel's name.
const CHANNEL_TOKEN: &str = "<|channel|>";

/// Moves reasoning in a message of its own into the `thinking` of the message that it led to, and takes away the
/// channels that the keys of a message say as well. A template that prints channels itself gets them as they are.
///
/// # Errors
/// Names the message whose channel the template would print as another.
pub(super) fn fold(template: &ChatTemplate, chat: &mut Conversation) -> Result<(), String> {
    if !template.mentions(CHANNEL_TOKEN) {
        return Ok(());
    }
    let mut without = chat.clone();
    for message in without.messages.iter_mut().filter_map(as_assistant) {
        message.retain(|key, _| !KEYS.contains(&key.as_str()));
    }
    if without == *chat || is_printed(template, chat, &without) {
        return Ok(());
    }
    let mut reasoning: Option<(usize, String)> = None;
    for (index, mut message) in mem::take(&mut chat.messages).into_iter().enumerate() {
        let fields = as_assistant(&mut message);
        let kept = fields.map(|fields| Turn::take(fields).map(|turn| (turn, fields))).transpose();
        let kept = kept.map_err(|error| format!("messages[{index}]: {error}"))?;
        match (kept, reasoning.take()) {
            (Some((Turn::Said, fields)), Some((at, text))) => {
                if reasoning_key(fields).is_some() {
                    return Err(format!(
                        "messages[{at}]: its 'channel' is 'analysis', but the message after it has reasoning of its \
                         own; join the two in its \"thinking\""
                    ));
                }
                // A blank one would win over it.
                fields.retain(|key, _| !REASONING_KEYS.contains(&key.as_str()));
                fields.insert("thinking".to_owned(), Value::String(text));
            }
            (Some((Turn::Reasoned(text), _)), None) => {
                reasoning = Some((index, text));
                continue;
            }
            (_, Some((at, _))) => return Err(leads_nowhere(at)),
            (_, None) => {}
        }
        chat.messages.push(message);
    }
    match reasoning {
        Some((at, _)) => Err(leads_nowhere(at)),
        None => Ok(()),
    }
}

/// Whether channels change anything in the rendering.
fn is_printed(template: &ChatTemplate, chat: &Conversation, without: &Conversation) -> bool {
    match (template.render(chat, false), template.render(without, false)) {
        (Ok(with), Ok(without)) => with.text != without.text,
        (with, _) => with.is_ok(),
    }
}

fn leads_nowhere(at: usize) -> String {
    format!(
        "messages[{at}]: its 'channel' is 'analysis', but no answer or call of the assistant comes right after it; \
         put reasoning into the \"thinking\" of the message that it leads to"
    )
}

fn as_assistant(message: &mut Value) -> Option<&mut Map<String, Value>> {
    let fields = message.as_object_mut()?;
    (fields.get("role")? == "assistant").then_some(fields)
}

/// Nothing, or only white space.
fn is_blank(value: &Value) -> bool {
    value.is_null() || joined_text(value).is_some_and(|text| text.trim().is_empty())
}

/// The key under which a message has reasoning.
fn reasoning_key(fields: &Map<String, Value>) -> Option<&'static str> {
    REASONING_KEYS.into_iter().find(|key| fields.get(*key).is_some_and(|it| !is_blank(it)))
}

/// What a message of the assistant is by its channel.
enum Turn {
    /// An answer or a call.
    Said,
    /// Reasoning and nothing else.
    Reasoned(String),
}

impl Turn {
    /// Takes channel and recipient out of a message.
    fn take(fields: &mut Map<String, Value>) -> Result<Self, String> {
        const CALLS: &str = "the chat template looks for calls in \"tool_calls\", as \
                             [{\"function\": {\"name\": …, \"arguments\": …}}]";
        let [channel, recipient] = KEYS.map(|key| fields.remove(key).unwrap_or_default());
        let calls = fields.get("tool_calls").is_some_and(|calls| !calls.is_null());
        if !(calls || recipient.is_null() || recipient == "all") {
            return Err(format!("has the 'recipient' {recipient}, but {CALLS}"));
        }
        match (channel.as_str(), calls) {
            (Some("commentary"), true) if fields.get("content").is_some_and(|it| !is_blank(it)) => Err(
                "its 'channel' is 'commentary' and it has both \"tool_calls\" and content, which the chat template \
                 prints as reasoning; put reasoning into \"thinking\", or take the content out"
                    .to_owned(),
            ),
            (Some("commentary"), true) | (Some("final"), false) => Ok(Self::Said),
            (None, _) if channel.is_null() => Ok(Self::Said),
            (Some("analysis"), false) => {
                if let Some(key) = reasoning_key(fields) {
                    return Err(format!(
                        "its 'channel' is 'analysis' and it has '{key}'; its reasoning must be in one of them"
                    ));
                }
                let text = fields.get("content").and_then(joined_text);
                text.map(Self::Reasoned).ok_or_else(|| {
                    "its 'channel' is 'analysis', but its content is not only text".to_owned()
                })
            }
            (Some("commentary"), false) => Err(format!(
                "its 'channel' is 'commentary' and it calls nothing: {CALLS}, and prints no other commentary; put it \
                 there, or take the message out"
            )),
            (Some(name @ ("analysis" | "final")), true) => Err(format!(
                "its 'channel' is '{name}', but its \"tool_calls\" are printed as 'commentary'; split the message"
            )),
            (Some(other), _) => Err(format!(
                "the channel '{other}' is not known; channels are analysis, commentary, final"
            )),
            (None, _) => Err(format!("'channel' must be a string, but it is {}", kind(&channel))),
        }
    }
}

#[cfg(test)]
mod tests;
