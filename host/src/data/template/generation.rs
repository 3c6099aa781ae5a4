//! `{% generation %}` blocks, which mark the assistant's text in a template.
//!
//! The template engine has no such tag. Each block becomes a scope that prints a mark at either end;
//! the marks are private-use characters that occur nowhere else, and are cut out of the rendered text.

use serde_json::{Map, Value, json};

use super::super::error::{DataError, Result};
use super::Rendered;

const START: &str = "generation_start_mark";
const END: &str = "generation_end_mark";

/// The template with its blocks rewritten; `None` when it has none.
pub(super) fn rewrite(source: &str) -> Result<Option<String>> {
    let mut out = String::with_capacity(source.len());
    let mut depth = 0usize;
    let mut found = false;
    let mut rest = source;
    while let Some(at) = rest.find("{%").into_iter().chain(rest.find("{#")).min() {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let tag = Tag::parse(rest);
        let length = match &tag {
            Some(tag) => tag.num_bytes,
            // A comment may mention the tag: it is passed over whole.
            None if rest.starts_with("{#") => rest.find("#}").unwrap_or(rest.len()),
            None => 2,
        };
        match tag {
            // The whitespace rules of the tag stay on its outer and on its inner side. `with` opens the
            // scope that the block has in Jinja; the empty `if` only carries the inner rule.
            Some(Tag { opens: true, outer, inner, .. }) => {
                found = true;
                depth += 1;
                out.push_str(&format!(
                    "{{%{outer} with %}}{{{{ {START} }}}}{{% if true {inner}%}}"
                ));
            }
            Some(Tag { opens: false, outer, inner, .. }) => {
                depth = depth.checked_sub(1).ok_or_else(|| {
                    DataError::template("{% endgeneration %} without a {% generation %} before it")
                })?;
                out.push_str(&format!("{{%{outer} endif %}}{{{{ {END} }}}}{{% endwith {inner}%}}"));
            }
            None => out.push_str(&rest[..length]),
        }
        rest = &rest[length..];
    }
    out.push_str(rest);
    if depth > 0 {
        return Err(DataError::template(
            "{% generation %} without an {% endgeneration %} after it",
        ));
    }
    Ok(found.then_some(out))
}

/// A `generation` or `endgeneration` tag at the start of a text.
struct Tag<'a> {
    opens: bool,
    /// `-`, `+` or nothing, before the name.
    outer: &'a str,
    /// The same, after the name.
    inner: &'a str,
    num_bytes: usize,
}

impl<'a> Tag<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let body = text.strip_prefix("{%")?;
        let end = body.find("%}")?;
        let content = &body[..end];
        let (outer, content) = split_sign(content, 0);
        let (inner, content) = split_sign(content, content.len().saturating_sub(1));
        let opens = match content.trim() {
            "generation" => true,
            "endgeneration" => false,
            _ => return None,
        };
        Some(Self { opens, outer, inner, num_bytes: end + 4 })
    }
}

/// A whitespace sign at byte `at` of a tag's content, and the content without it.
fn split_sign(content: &str, at: usize) -> (&str, &str) {
    match content.as_bytes().get(at) {
        Some(b'-' | b'+') if at == 0 => content.split_at(1),
        Some(b'-' | b'+') => {
            let (content, sign) = content.split_at(at);
            (sign, content)
        }
        _ => ("", content),
    }
}

/// The two characters that stand for the ends of a block in one rendering.
pub(super) struct Marks {
    start: char,
    end: char,
}

impl Marks {
    /// Two private-use characters that none of `texts` holds.
    pub(super) fn absent_from(texts: &[&str]) -> Result<Self> {
        let mut free =
            ('\u{e000}'..='\u{f8ff}').filter(|mark| !texts.iter().any(|text| text.contains(*mark)));
        match (free.next(), free.next()) {
            (Some(start), Some(end)) => Ok(Self { start, end }),
            _ => Err(DataError::template("the conversation uses every private-use character")),
        }
    }

    pub(super) fn insert_into(&self, context: &mut Map<String, Value>) {
        context.insert(START.into(), json!(self.start));
        context.insert(END.into(), json!(self.end));
    }

    /// The text without the marks, and the ranges between them.
    pub(super) fn cut_from(&self, text: &str) -> Rendered {
        let mut clean = String::with_capacity(text.len());
        let mut generated = Vec::new();
        let mut open = Vec::new();
        for character in text.chars() {
            if character == self.start {
                open.push(clean.len());
            } else if character == self.end {
                generated.extend(open.pop().map(|start| start..clean.len()));
            } else {
                clean.push(character);
            }
        }
        Rendered { text: clean, generated }
    }
}
