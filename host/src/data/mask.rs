//! Which tokens of a conversation are targets: those that the assistant has to produce.

use std::ops::Range;

use super::error::{DataError, Result};
use super::row::Conversation;
use super::template::ChatTemplate;

/// Renders a conversation and finds the assistant's text in it, as byte ranges in order.
///
/// A template with `{% generation %}` blocks says itself what is the assistant's. With any other, the
/// conversation up to an assistant message, rendered with the generation prompt, is what the model will
/// be given; the rest of the rendering up to and including that message is what it has to produce,
/// the end-of-turn token and what follows it in the turn (a newline, mostly) included. Where the
/// generation prompt holds more than the turn begins with (an opened `<think>`, for instance), the turn's
/// text starts where the two part.
///
/// A template whose rendering of a conversation's beginning is not the beginning of its rendering (one that
/// drops the reasoning of earlier turns, for instance) says nothing that way. Then its
/// [marked twin](ChatTemplate::with_marked_twin) does, if both render the conversation alike.
///
/// # Errors
/// A template of which none of this is true is refused rather than guessed at.
pub fn assistant_spans(
    template: &ChatTemplate,
    chat: &Conversation,
) -> Result<(String, Vec<Range<usize>>)> {
    let whole = template.render(chat, false)?;
    if template.marks_generation(chat) {
        return Ok((whole.text, whole.generated));
    }
    let spans = match (spans_by_prefixes(template, chat, &whole.text), template.marked_twin()) {
        (Ok(spans), _) => spans,
        (Err(refusal), None) => return Err(refusal),
        (Err(refusal), Some(twin)) => {
            let marked = twin.render(chat, false).ok();
            let marked = marked.filter(|marked| marked.text == whole.text);
            marked.ok_or(refusal)?.generated
        }
    };
    Ok((whole.text, spans))
}

fn spans_by_prefixes(
    template: &ChatTemplate,
    chat: &Conversation,
    whole: &str,
) -> Result<Vec<Range<usize>>> {
    let mut spans = Vec::new();
    for (index, message) in chat.messages.iter().enumerate() {
        if message.get("role").and_then(|role| role.as_str()) != Some("assistant") {
            continue;
        }
        let refuse = |why: String| {
            DataError::template(format!(
                "cannot find the text of messages[{index}]: {why}. {REMEDY}"
            ))
        };
        let render = |count: usize, prompt: bool| {
            let rendered = template.render_messages(chat, &chat.messages[..count], prompt);
            rendered.map(|rendered| rendered.text).map_err(|error| {
                refuse(format!("the conversation up to it does not render alone, {error}"))
            })
        };
        let (given, prompt, turn) =
            (render(index, false)?, render(index, true)?, render(index + 1, false)?);
        let start = common_prefix(&prompt, &turn);
        if start < given.len() || !whole.starts_with(&turn) {
            return Err(refuse(
                "the conversation up to it renders differently alone and as a part of the whole"
                    .into(),
            ));
        }
        spans.push(start..turn.len());
    }
    Ok(spans)
}

/// Bytes that two texts begin with alike, in whole characters.
fn common_prefix(left: &str, right: &str) -> usize {
    let pairs = left.chars().zip(right.chars());
    pairs.take_while(|(left, right)| left == right).map(|(character, _)| character.len_utf8()).sum()
}

const REMEDY: &str = "Put {% generation %} … {% endgeneration %} around the assistant's text in the \
                      template, or end each row at one assistant turn";

/// Marks every token that overlaps a span.
///
/// `offsets` are the tokens' byte ranges and `spans` those of [`assistant_spans`], both in order.
pub fn target_tokens(offsets: &[(usize, usize)], spans: &[Range<usize>]) -> Vec<bool> {
    let mut spans = spans.iter().peekable();
    let mut is_target = |&(start, end): &(usize, usize)| {
        while spans.next_if(|span| start >= span.end).is_some() {}
        spans.peek().is_some_and(|span| end > span.start)
    };
    offsets.iter().map(&mut is_target).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_that_overlaps_a_span_by_one_byte_is_a_target_and_its_neighbours_are_not() {
        let offsets = [(0, 3), (3, 6), (6, 6), (6, 9), (9, 12), (12, 13)];
        let targets = |spans: &[Range<usize>]| target_tokens(&offsets, spans);
        let at =
            |indices: &[usize]| (0..6).map(|index| indices.contains(&index)).collect::<Vec<_>>();
        assert_eq!(targets(&[]), at(&[]));
        assert_eq!(targets(std::slice::from_ref(&(3..6))), at(&[1]));
        assert_eq!(targets(std::slice::from_ref(&(5..7))), at(&[1, 2, 3]));
        assert_eq!(targets(&[0..1, 11..13]), at(&[0, 4, 5]));
        assert_eq!(targets(&[0..3, 3..3, 9..12]), at(&[0, 4]));
    }
}
