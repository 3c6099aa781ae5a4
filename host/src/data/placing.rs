//! The text of pictures and films, in place of what a chat template prints for them.

use std::ops::Range;

use blockstreamer_core::vision::VisionFormat;
use serde_json::Value;

use super::row::Conversation;
use super::tokenizer::Tokenizer;

/// A rendered conversation with all its pictures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Placed {
    pub(super) text: String,
    /// The assistant's text, pictures left out, as byte ranges in order.
    pub(super) spans: Vec<Range<usize>>,
    /// Where the pictures are, as byte ranges in order.
    pub(super) media: Vec<Range<usize>>,
}

/// What is to be put in place of a placeholder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Insert {
    pub(super) is_film: bool,
    pub(super) text: String,
}

/// Puts `inserts` in place of the placeholders of `text`: the k-th picture for the k-th of a picture, the k-th film
/// for the k-th of a film. `spans` are the assistant's text before.
///
/// # Errors
/// A message when the template printed more or fewer placeholders than there are pictures.
pub(super) fn place(
    text: &str,
    spans: &[Range<usize>],
    inserts: &[Insert],
    format: &VisionFormat,
) -> Result<Placed, String> {
    let mut found: Vec<(usize, &str, &str)> = Vec::new();
    for (is_film, name, placeholder) in
        [(false, "pictures", &format.image_placeholder), (true, "films", &format.video_placeholder)]
    {
        let wanted: Vec<&Insert> =
            inserts.iter().filter(|insert| insert.is_film == is_film).collect();
        let printed: Vec<usize> = text.match_indices(placeholder).map(|(at, _)| at).collect();
        if printed.len() != wanted.len() {
            return Err(format!(
                "the row has {} {name} but the chat template prints '{placeholder}' {} times; use a template that \
                 prints it once for each",
                wanted.len(),
                printed.len()
            ));
        }
        let pairs = printed.into_iter().zip(wanted);
        found.extend(pairs.map(|(at, insert)| (at, placeholder.as_str(), insert.text.as_str())));
    }
    found.sort_unstable();
    let mut placed = Placed { text: String::new(), spans: Vec::new(), media: Vec::new() };
    let mut copied = 0;
    let mut spans = spans.iter().cloned().peekable();
    // Text up to `end` is copied, and the spans in it go along; one that goes on is cut in two.
    let mut copy = |placed: &mut Placed, copied: usize, end: usize| {
        let shifted = |at: usize| placed.text.len() + at - copied;
        while let Some(span) = spans.peek_mut().filter(|span| span.start < end) {
            let piece = span.start.max(copied)..span.end.min(end);
            if !piece.is_empty() {
                placed.spans.push(shifted(piece.start)..shifted(piece.end));
            }
            if span.end > end {
                break;
            }
            spans.next();
        }
        placed.text.push_str(&text[copied..end]);
    };
    for (at, placeholder, insert) in found {
        copy(&mut placed, copied, at);
        placed.media.push(placed.text.len()..placed.text.len() + insert.len());
        placed.text.push_str(insert);
        copied = at + placeholder.len();
    }
    copy(&mut placed, copied, text.len());
    Ok(placed)
}

/// The tokens that stand for pictures and films. In a row's text they would name pictures that are not there.
#[derive(Debug)]
pub(super) struct VisionTokens {
    ids: Vec<u32>,
    texts: Vec<String>,
}

impl VisionTokens {
    /// The vision tokens of `format` that the tokenizer knows.
    pub(super) fn new(format: &VisionFormat, tokenizer: &Tokenizer) -> Self {
        let ids: Vec<u32> =
            format.vision_token_ids.iter().filter_map(|id| u32::try_from(*id).ok()).collect();
        let texts = ids.iter().filter_map(|id| tokenizer.decode(&[*id], false).ok());
        Self { texts: texts.filter(|text| !text.is_empty()).collect(), ids }
    }

    /// Whether `id` is one of them.
    pub(super) fn contains(&self, id: u32) -> bool {
        self.ids.contains(&id)
    }

    /// Refuses a text that holds one of them.
    pub(super) fn check_text(&self, text: &str) -> Result<(), String> {
        match self.texts.iter().find(|token| text.contains(token.as_str())) {
            Some(token) => Err(format!(
                "the text holds '{token}', which stands for a picture in this model; take it out, and name pictures \
                 as {{\"type\": \"image\", \"image\": \"path\"}} parts"
            )),
            None => Ok(()),
        }
    }

    /// Refuses a conversation with one of them in any of its texts.
    pub(super) fn check_chat(&self, chat: &Conversation) -> Result<(), String> {
        for (index, message) in chat.messages.iter().enumerate() {
            self.check_value(message).map_err(|error| format!("messages[{index}]: {error}"))?;
        }
        let mut tools = chat.tools.iter().flatten();
        tools.try_for_each(|tool| self.check_value(tool)).map_err(|error| format!("tools: {error}"))
    }

    fn check_value(&self, value: &Value) -> Result<(), String> {
        match value {
            Value::String(text) => self.check_text(text),
            Value::Array(items) => items.iter().try_for_each(|item| self.check_value(item)),
            Value::Object(fields) => fields.iter().try_for_each(|(key, value)| {
                self.check_text(key)?;
                self.check_value(value)
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
