//! What rows hold and their template does not print, so that nobody learns from it.

use std::collections::BTreeMap;

use serde_json::Value;

use super::row::Conversation;
use super::template::{ChatTemplate, REASONING_KEYS};

/// Lines of a file that a warning names.
const MAX_LINES: usize = 5;

/// What a message may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Piece {
    /// Its text.
    Content,
    /// The reasoning before it.
    Reasoning,
    /// One of several calls of tools.
    ToolCall,
}

/// Pieces of a file's rows that the chat template does not print.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unprinted {
    /// The line of each such piece, in the file's order.
    lines: BTreeMap<Piece, Vec<usize>>,
}

impl Unprinted {
    pub(super) fn add(&mut self, line: usize, pieces: &[Piece]) {
        for piece in pieces {
            self.lines.entry(*piece).or_default().push(line);
        }
    }

    /// One for each kind of piece: how many, in which lines, and what to do.
    pub fn warnings(&self) -> impl Iterator<Item = String> {
        self.lines.iter().map(|(piece, lines)| {
            let (what, advice) = match piece {
                Piece::Content => (
                    "texts of messages",
                    "templates may take one system or developer message, at the start, and not every role; join such \
                     messages or change their roles",
                ),
                Piece::Reasoning => (
                    "texts of reasoning",
                    "templates may print none, or only that of the last answer; to learn it, end a row at its answer",
                ),
                Piece::ToolCall => (
                    "calls of tools",
                    "templates may print none, or only the first one of a message; give each a message of its own, \
                     with its result after it",
                ),
            };
            let count = lines.len();
            let mut lines = lines.clone();
            lines.dedup();
            let named: Vec<_> = lines.iter().take(MAX_LINES).map(usize::to_string).collect();
            let more = if lines.len() > MAX_LINES { ", …" } else { "" };
            format!(
                "the chat template does not print some {what} ({count}; {} {}{more}): {advice}",
                if lines.len() == 1 { "line" } else { "lines" },
                named.join(", ")
            )
        })
    }
}

/// The pieces of `chat` without which the template prints the same. `whole` is its rendering.
///
/// One more rendering, with a mark in every text, tells which ones are printed; the others are tried one by one.
pub(super) fn find(template: &ChatTemplate, chat: &Conversation, whole: &str) -> Vec<Piece> {
    let mut marked = chat.clone();
    for (index, message) in marked.messages.iter_mut().enumerate() {
        for text in [Piece::Content, Piece::Reasoning] {
            insert(mark(index, text), texts(message, text));
        }
    }
    let probe = template.render(&marked, false).map_or_else(|_| String::new(), |it| it.text);
    let changes_nothing = |change: &dyn Fn(&mut [Value])| {
        let mut changed = chat.clone();
        change(&mut changed.messages);
        template.render(&changed, false).is_ok_and(|rendered| rendered.text == whole)
    };
    let mut unprinted = Vec::new();
    for (index, message) in marked.messages.iter_mut().enumerate() {
        let num_calls = message.get("tool_calls").and_then(Value::as_array).map_or(0, Vec::len);
        for text in [Piece::Content, Piece::Reasoning] {
            let seen = |mark| probe.contains(mark) && !whole.contains(mark);
            if texts(message, text).is_empty() || mark(index, text).is_some_and(seen) {
                continue;
            }
            let blank = |messages: &mut [Value]| {
                texts(&mut messages[index], text).into_iter().for_each(String::clear);
            };
            if changes_nothing(&blank) {
                // What is said before a call is the reasoning for it.
                unprinted.push(if num_calls > 0 { Piece::Reasoning } else { text });
            }
        }
        let remove_all = |messages: &mut [Value]| {
            messages[index].as_object_mut().and_then(|fields| fields.remove("tool_calls"));
        };
        if num_calls > 0 && changes_nothing(&remove_all) {
            unprinted.extend(std::iter::repeat_n(Piece::ToolCall, num_calls));
            continue;
        }
        for call in 1..num_calls {
            let remove = |messages: &mut [Value]| {
                let calls = messages[index].get_mut("tool_calls").and_then(Value::as_array_mut);
                calls.map(|calls| calls.remove(call));
            };
            if changes_nothing(&remove) {
                unprinted.push(Piece::ToolCall);
            }
        }
    }
    unprinted
}

/// The texts of a message that are not blank.
fn texts(message: &mut Value, piece: Piece) -> Vec<&mut String> {
    let keys = if piece == Piece::Content { &["content"][..] } else { &REASONING_KEYS };
    let fields = message.as_object_mut().into_iter().flatten();
    let values = fields.filter(|(key, _)| keys.contains(&key.as_str())).map(|(_, value)| value);
    let texts = values.flat_map(|value| match value {
        Value::Array(parts) => parts.iter_mut().filter_map(|part| part.get_mut("text")).collect(),
        value => vec![value],
    });
    let texts = texts.filter_map(|text| match text {
        Value::String(text) => Some(text),
        _ => None,
    });
    texts.filter(|text| !text.trim().is_empty()).collect()
}

/// A private-use character for a text, of those that `{% generation %}` is not marked with.
fn mark(index: usize, text: Piece) -> Option<char> {
    let number = 2 * u32::try_from(index).ok()? + u32::from(text == Piece::Reasoning);
    char::from_u32(number.checked_add(0xF_0000)?)
}

/// Puts `mark` into the middle of each text: templates may look at its ends.
fn insert(mark: Option<char>, texts: Vec<&mut String>) {
    let Some(mark) = mark else { return };
    for text in texts {
        let half = text.chars().count() / 2;
        let middle = text.char_indices().nth(half).map_or(0, |(at, _)| at);
        text.insert(middle, mark);
    }
}

#[cfg(test)]
mod tests;
