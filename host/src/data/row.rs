//! One line of a dataset.

use serde_json::{Map, Value};

use super::json::kind;
use super::parts::{Part, take_media};

const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "observation"];

/// A conversation in the messages form of chat templates.
#[derive(Debug, Clone, PartialEq)]
pub struct Conversation {
    /// Objects with `role` and `content`, oldest first.
    pub messages: Vec<Value>,
    /// JSON schemas of the functions that the assistant may call; `None` when there are none.
    pub tools: Option<Vec<Value>>,
}

/// What a line holds.
#[derive(Debug)]
pub(super) enum Row {
    /// Plain text: every token is a target.
    Text(String),
    /// A conversation: the assistant's tokens are targets. Pictures and films are taken out of it.
    Chat(Conversation, Vec<Part>),
}

impl Row {
    /// Parses one line. The error is a message that says what is wrong, without file or line.
    pub(super) fn parse(line: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(line).map_err(|error| {
            format!("not valid JSON, at column {}: {}", error.column(), words_of(&error))
        })?;
        let Value::Object(mut row) = value else {
            return Err(format!("a row must be a JSON object, but this is {}", kind(&value)));
        };
        let messages = row.get_mut("messages").map(Value::take);
        match (row.get("text"), messages) {
            (Some(_), Some(_)) => {
                Err("the row has both 'text' and 'messages'; keep the one to train on".to_owned())
            }
            (Some(Value::String(text)), None) => Ok(Self::Text(text.clone())),
            (Some(other), None) => {
                Err(format!("'text' must be a string, but it is {}", kind(other)))
            }
            (None, Some(Value::Array(mut messages))) => {
                let tools = tools(&row)?;
                let media = check_messages(&mut messages)?;
                Ok(Self::Chat(Conversation { messages, tools }, media))
            }
            (None, Some(other)) => {
                Err(format!("'messages' must be a list of objects, but it is {}", kind(&other)))
            }
            (None, None) => Err(format!(
                "the row has neither 'text' nor 'messages' (its keys: {}); a row is \
                 {{\"text\": …}} or {{\"messages\": [{{\"role\": …, \"content\": …}}, …]}}",
                keys(&row)
            )),
        }
    }
}

/// serde_json puts "at line 1 column 9" after its words; the line is one of this string, not of the file.
fn words_of(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or(&text).to_owned()
}

fn keys(row: &Map<String, Value>) -> String {
    let keys: Vec<_> = row.keys().map(String::as_str).collect();
    if keys.is_empty() { "none".to_owned() } else { keys.join(", ") }
}

fn tools(row: &Map<String, Value>) -> Result<Option<Vec<Value>>, String> {
    match row.get("tools") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(tools)) if tools.iter().all(Value::is_object) => {
            Ok(Some(tools.clone()).filter(|tools| !tools.is_empty()))
        }
        Some(other) => Err(format!(
            "'tools' must be a list of objects (JSON schemas of functions), but it is {}",
            if other.is_array() { "a list with something else in it" } else { kind(other) }
        )),
    }
}

/// Checks all messages and takes their pictures and films out of them.
fn check_messages(messages: &mut [Value]) -> Result<Vec<Part>, String> {
    let mut has_assistant = false;
    let mut media = Vec::new();
    for (index, message) in messages.iter_mut().enumerate() {
        let place = format!("messages[{index}]");
        has_assistant |= check_message(message, &place, &mut media)
            .map_err(|error| format!("{place}: {error}"))?;
    }
    if !has_assistant {
        let found = if messages.is_empty() {
            "'messages' is empty"
        } else {
            "no message is from the assistant"
        };
        return Err(format!(
            "{found}: there is nothing to learn; add an assistant turn or remove the row"
        ));
    }
    Ok(media)
}

/// Checks one message and tells whether it is the assistant's.
fn check_message(message: &mut Value, place: &str, media: &mut Vec<Part>) -> Result<bool, String> {
    let Value::Object(message) = message else {
        return Err(format!(
            "must be an object with 'role' and 'content', but it is {}",
            kind(message)
        ));
    };
    let role = match message.get("role") {
        Some(Value::String(role)) => role.as_str(),
        Some(other) => return Err(format!("'role' must be a string, but it is {}", kind(other))),
        None if message.contains_key("from") => {
            return Err("has 'from' and not 'role'; convert from/value to role/content \
                        (human is user, gpt is assistant)"
                .to_owned());
        }
        None => return Err(format!("has no 'role' (its keys: {})", keys(message))),
    };
    if !ROLES.contains(&role) {
        return Err(format!("the role '{role}' is not known; roles are {}", ROLES.join(", ")));
    }
    let is_assistant = role == "assistant";
    let calls_tools = match message.get("tool_calls") {
        None | Some(Value::Null) => false,
        Some(Value::Array(calls)) if calls.iter().all(Value::is_object) => !calls.is_empty(),
        Some(_) => {
            return Err("'tool_calls' must be a list of objects, as \
                        [{\"function\": {\"name\": …, \"arguments\": …}}]"
                .to_owned());
        }
    };
    if !calls_tools {
        // An empty list or null: templates only ask whether the key is there.
        message.remove("tool_calls");
    }
    match message.get_mut("content") {
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => take_media(parts, place, media)?,
        None | Some(Value::Null) if calls_tools => {}
        None => return Err("has no 'content'".to_owned()),
        Some(other) => {
            return Err(format!(
                "'content' must be a string or a list of parts, but it is {}",
                kind(other)
            ));
        }
    }
    Ok(is_assistant)
}
