//! JSON as files hold it, and as Python's `json.dumps` writes it.

use std::fmt::Write as _;
use std::path::Path;

use serde_json::Value;

use super::error::{DataError, Result};

/// The JSON in a file; `None` when there is no such file.
pub(super) fn read_optional(path: &Path) -> Result<Option<Value>> {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| DataError::file(path, format!("not valid JSON: {error}"))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(DataError::io("read", path)(error)),
    }
}

/// What kind of JSON a value is, for error messages.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The options of `json.dumps` that chat templates use.
#[derive(Debug, Clone)]
pub(super) struct Style {
    /// Escape everything outside ASCII.
    pub(super) ensure_ascii: bool,
    /// One level of indentation; `None` writes one line.
    pub(super) indent: Option<String>,
    /// Between items, and between key and value.
    pub(super) separators: (String, String),
    /// Order keys by code point.
    pub(super) sort_keys: bool,
}

impl Style {
    /// Python's defaults for a given indentation.
    pub(super) fn new(indent: Option<String>) -> Self {
        let item = if indent.is_some() { "," } else { ", " };
        let separators = (item.to_owned(), ": ".to_owned());
        Self { ensure_ascii: false, indent, separators, sort_keys: false }
    }

    /// `value` as `json.dumps` writes it.
    pub(super) fn dump(&self, value: &Value) -> String {
        let mut out = String::new();
        self.write(value, 0, &mut out);
        out
    }

    fn write(&self, value: &Value, depth: usize, out: &mut String) {
        match value {
            Value::Null => out.push_str("null"),
            Value::Bool(flag) => out.push_str(if *flag { "true" } else { "false" }),
            Value::Number(number) => match number.as_f64() {
                Some(float) if number.is_f64() => out.push_str(&python_float(float)),
                _ => out.push_str(&number.to_string()),
            },
            Value::String(text) => self.write_string(text, out),
            Value::Array(items) => self.write_items('[', ']', items.iter(), depth, out, {
                |item, out| self.write(item, depth + 1, out)
            }),
            Value::Object(map) => {
                let mut entries: Vec<_> = map.iter().collect();
                if self.sort_keys {
                    entries.sort_by_key(|(key, _)| *key);
                }
                self.write_items('{', '}', entries.into_iter(), depth, out, |(key, item), out| {
                    self.write_string(key, out);
                    out.push_str(&self.separators.1);
                    self.write(item, depth + 1, out);
                });
            }
        }
    }

    fn write_items<T>(
        &self,
        open: char,
        close: char,
        items: impl ExactSizeIterator<Item = T>,
        depth: usize,
        out: &mut String,
        write_item: impl Fn(T, &mut String),
    ) {
        let empty = items.len() == 0;
        let new_line = |depth: usize, out: &mut String| {
            if let Some(indent) = self.indent.as_ref().filter(|_| !empty) {
                out.push('\n');
                out.push_str(&indent.repeat(depth));
            }
        };
        out.push(open);
        for (index, item) in items.enumerate() {
            if index > 0 {
                out.push_str(&self.separators.0);
            }
            new_line(depth + 1, out);
            write_item(item, out);
        }
        new_line(depth, out);
        out.push(close);
    }

    fn write_string(&self, text: &str, out: &mut String) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                other if other < ' ' || (self.ensure_ascii && other > '~') => {
                    for unit in other.encode_utf16(&mut [0; 2]) {
                        // Writing to a String cannot fail.
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                other => out.push(other),
            }
        }
        out.push('"');
    }
}

/// `repr(float)`: the shortest digits, scientific below 1e-4 and from 1e16.
pub(super) fn python_float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(exponent @ (..-4 | 16..)) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{value:?}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    // The expected strings are what `json.dumps` of CPython 3.11 printed.
    #[test]
    fn values_are_written_as_python_writes_them() {
        let value = json!({
            "b": [1, 2.0, 1e-5, 1e16, 0.0001, -3, true, null], "a": {}, "c": [], "t": "é\u{7f}🚢\"\\\n\u{1}",
        });
        assert_eq!(
            Style::new(None).dump(&value),
            "{\"b\": [1, 2.0, 1e-05, 1e+16, 0.0001, -3, true, null], \"a\": {}, \"c\": [], \
             \"t\": \"é\u{7f}🚢\\\"\\\\\\n\\u0001\"}"
        );
        let ascii = Style { ensure_ascii: true, sort_keys: true, ..Style::new(None) };
        assert_eq!(
            ascii.dump(&value),
            "{\"a\": {}, \"b\": [1, 2.0, 1e-05, 1e+16, 0.0001, -3, true, null], \"c\": [], \
             \"t\": \"\\u00e9\\u007f\\ud83d\\udea2\\\"\\\\\\n\\u0001\"}"
        );
        assert_eq!(
            Style::new(Some("  ".into())).dump(&json!({"a": [1, {"b": []}], "c": {}})),
            "{\n  \"a\": [\n    1,\n    {\n      \"b\": []\n    }\n  ],\n  \"c\": {}\n}"
        );
    }
}
