//! Chat templates, rendered as `transformers` renders them.
//!
//! The environment is the one of `transformers.utils.chat_template_utils` (5.24): blocks trimmed on
//! both sides, `break` and `continue`, Python's methods on strings, lists and dictionaries, `tojson`
//! without HTML escapes, `raise_exception`, `strftime_now`, and `{% generation %}` blocks.

mod generation;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use jiff::civil::{Date, DateTime};
use jiff::tz::TimeZone;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use serde_json::{Map, Value, json};

use super::error::{DataError, Result};
use super::json::{self as json_text, Style};
use super::row::Conversation;

const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";
/// Under these a message may have its reasoning; the first one that it has counts.
pub(super) const REASONING_KEYS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The whole text.
    pub text: String,
    /// Byte ranges of `text` that came from `{% generation %}` blocks, in order.
    pub generated: Vec<Range<usize>>,
}

/// The chat template of a checkpoint.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Templates with `{% generation %}` blocks.
    marked: Vec<String>,
    special_tokens: BTreeMap<String, String>,
    /// What it prints as the current date; `None`: today's.
    date: Option<Date>,
    marked_twin: Option<Box<ChatTemplate>>,
}

impl ChatTemplate {
    /// The same template on `date`: it is what `strftime_now` prints, with midnight for a time.
    pub fn on(mut self, date: Date) -> Self {
        let midnight = date.at(0, 0, 0, 0);
        add_clock(&mut self.environment, move || midnight);
        self.date = Some(date);
        self.marked_twin = self.marked_twin.map(|twin| Box::new(twin.on(date)));
        self
    }

    /// Finds the template of a checkpoint folder: `chat_template.jinja`, else the `chat_template` of
    /// `tokenizer_config.json` (one text or several named ones), else that of `chat_template.json`.
    /// `None` when there is none, as with base models.
    ///
    /// `special_tokens` become variables of the template, see [`super::Tokenizer::special_tokens`].
    ///
    /// # Errors
    /// Names the file that is damaged, and the line of a syntax error.
    pub fn find(folder: &Path, special_tokens: &BTreeMap<String, String>) -> Result<Option<Self>> {
        let path = folder.join("chat_template.jinja");
        match std::fs::read_to_string(&path) {
            Ok(source) => {
                return Self::new(&source, special_tokens)
                    .map(Some)
                    .map_err(|error| error.in_file(&path));
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(DataError::io("read", path)(error)),
        }
        for name in ["tokenizer_config.json", "chat_template.json"] {
            let path = folder.join(name);
            let found = json_text::read_optional(&path)?;
            let Some(template) = found.as_ref().and_then(|settings| settings.get("chat_template"))
            else {
                continue;
            };
            let sources = named_sources(template).ok_or_else(|| {
                let message = format!(
                    "chat_template is {}; it must be a text, or a list of objects with name and template",
                    json_text::kind(template)
                );
                DataError::file(&path, message)
            })?;
            return Self::from_named(&sources, special_tokens)
                .map(Some)
                .map_err(|error| error.in_file(&path));
        }
        Ok(None)
    }

    /// A template from its source.
    ///
    /// # Errors
    /// [`DataError::Template`] with the line of a syntax error.
    pub fn new(source: &str, special_tokens: &BTreeMap<String, String>) -> Result<Self> {
        Self::from_named(&[(DEFAULT, source)], special_tokens)
    }

    fn from_named(
        sources: &[(&str, &str)],
        special_tokens: &BTreeMap<String, String>,
    ) -> Result<Self> {
        let mut environment = environment().map_err(describe)?;
        let mut marked = Vec::new();
        for (name, source) in sources {
            // As Jinja does; a template saved with Windows line ends must not put them into the chat.
            let source = source.replace("\r\n", "\n").replace('\r', "\n");
            let rewritten = generation::rewrite(&source)?;
            if rewritten.is_some() {
                marked.push((*name).to_owned());
            }
            let source = rewritten.unwrap_or(source);
            environment.add_template_owned((*name).to_owned(), source).map_err(describe)?;
        }
        if environment.get_template(DEFAULT).is_err() {
            let names: Vec<_> = sources.iter().map(|(name, _)| *name).collect();
            let message = format!("none is named 'default'; found: {}", names.join(", "));
            return Err(DataError::template(message));
        }
        let special_tokens = special_tokens.clone();
        Ok(Self { environment, marked, special_tokens, date: None, marked_twin: None })
    }

    /// The same template with `source` beside it, a template of the same format with `{% generation %}`
    /// blocks, for [`assistant_spans`](super::assistant_spans). One without such blocks is of no use and left
    /// aside.
    ///
    /// # Errors
    /// As [`ChatTemplate::new`].
    pub fn with_marked_twin(self, source: &str) -> Result<Self> {
        let twin = Self::new(source, &self.special_tokens)?;
        let twin = match self.date {
            Some(date) => twin.on(date),
            None => twin,
        };
        let twin = Some(twin).filter(|twin| !twin.marked.is_empty());
        Ok(Self { marked_twin: twin.map(Box::new), ..self })
    }

    /// What [`ChatTemplate::with_marked_twin`] put beside it.
    pub(super) fn marked_twin(&self) -> Option<&Self> {
        self.marked_twin.as_deref()
    }

    /// Renders a conversation; `add_generation_prompt` appends the header of the assistant's turn.
    ///
    /// As in `transformers`, keys of a message that hold null count as absent, `reasoning` and
    /// `thinking` are also offered as `reasoning_content`, and a template named `tool_use` serves
    /// conversations with tools.
    ///
    /// # Errors
    /// [`DataError::Template`] with what the template raised, or with the line that failed.
    pub fn render(&self, chat: &Conversation, add_generation_prompt: bool) -> Result<Rendered> {
        self.render_messages(chat, &chat.messages, add_generation_prompt)
    }

    /// Renders some of the messages of `chat`.
    pub(super) fn render_messages(
        &self,
        chat: &Conversation,
        messages: &[Value],
        add_generation_prompt: bool,
    ) -> Result<Rendered> {
        let mut context = Map::new();
        for (name, token) in &self.special_tokens {
            context.insert(name.clone(), json!(token));
        }
        let messages: Vec<Value> = messages.iter().map(normalized).collect();
        context.insert("messages".into(), json!(messages));
        context.insert("tools".into(), json!(chat.tools));
        context.insert("documents".into(), Value::Null);
        context.insert("add_generation_prompt".into(), json!(add_generation_prompt));

        let name = self.name_for(chat);
        let template = self.environment.get_template(name).map_err(describe)?;
        let marks =
            generation::Marks::absent_from(&[template.source(), &json!(context).to_string()])?;
        marks.insert_into(&mut context);
        let text = template.render(minijinja::value::Serde(&context)).map_err(describe)?;
        Ok(marks.cut_from(&text))
    }

    /// Whether any of the templates holds `text`.
    pub(super) fn mentions(&self, text: &str) -> bool {
        self.environment.templates().any(|(_, template)| template.source().contains(text))
    }

    /// Whether the template that serves `chat` marks the assistant's text with `{% generation %}`.
    pub fn marks_generation(&self, chat: &Conversation) -> bool {
        self.marked.iter().any(|marked| marked == self.name_for(chat))
    }

    fn name_for(&self, chat: &Conversation) -> &'static str {
        let has_tool_use = || self.environment.get_template(TOOL_USE).is_ok();
        if chat.tools.is_some() && has_tool_use() { TOOL_USE } else { DEFAULT }
    }
}

fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|out, state, value| match python_number(value) {
        Some(number) => out.write_str(&number).map_err(Error::from),
        None => minijinja::escape_formatter(out, state, value),
    });
    environment.add_filter("string", |value: &minijinja::Value| {
        python_number(value).unwrap_or_else(|| value.to_string())
    });
    // The engine's own tests differ: it iterates over none, and takes only lists for sequences.
    environment.add_test("iterable", |value: &minijinja::Value| {
        !value.is_none() && value.try_iter().is_ok()
    });
    environment.add_test("sequence", |value: &minijinja::Value| {
        use ValueKind::{Map, Seq, String, Undefined};
        matches!(value.kind(), Seq | Map | String | Undefined)
    });
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    add_clock(&mut environment, now);
    Ok(environment)
}

/// `strftime_now` with the time that `now` tells.
fn add_clock(
    environment: &mut Environment<'static>,
    now: impl Fn() -> DateTime + Send + Sync + 'static,
) {
    environment.add_function("strftime_now", move |format: String| {
        jiff::fmt::strtime::format(&format, now()).map_err(|error| {
            Error::new(ErrorKind::InvalidOperation, format!("strftime_now('{format}'): {error}"))
        })
    });
}

/// The time in UTC. `transformers` takes local time; a template prints the date at most, and UTC is the same
/// on every machine.
fn now() -> DateTime {
    TimeZone::UTC.to_datetime(jiff::Timestamp::now())
}

/// The date on which templates are rendered that are not told another: today's, in UTC.
pub fn today() -> Date {
    now().date()
}

/// A float as Python prints it. Everything else the engine prints so by itself.
fn python_number(value: &minijinja::Value) -> Option<String> {
    let is_float = value.is_number() && !value.is_integer();
    is_float.then(|| f64::try_from(value.clone()).ok()).flatten().map(json_text::python_float)
}

/// The filter with the signature that `transformers` gives it.
fn tojson(
    value: minijinja::Value,
    ensure_ascii: Option<bool>,
    indent: Option<minijinja::Value>,
    options: Kwargs,
) -> Result<String, Error> {
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, "tojson of an undefined value"));
    }
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<minijinja::Value>>("indent")?,
    };
    let indent = match indent.filter(|indent| !indent.is_none()) {
        Some(indent) => match indent.as_str() {
            Some(text) => Some(text.to_owned()),
            None => Some(" ".repeat(usize::try_from(indent)?)),
        },
        None => None,
    };
    let mut style = Style::new(indent);
    let ensure_ascii = match ensure_ascii {
        Some(flag) => Some(flag),
        None => options.get("ensure_ascii")?,
    };
    style.ensure_ascii = ensure_ascii.unwrap_or(false);
    style.sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    if let Some(separators) = options.get::<Option<Vec<String>>>("separators")? {
        let [item, key] = <[String; 2]>::try_from(separators).map_err(|_| {
            Error::new(ErrorKind::InvalidOperation, "tojson: separators must be two texts")
        })?;
        style.separators = (item, key);
    }
    options.assert_all_used()?;
    let value = serde_json::to_value(&value).map_err(|error| {
        Error::new(ErrorKind::InvalidOperation, format!("cannot be written as JSON: {error}"))
    })?;
    Ok(style.dump(&value))
}

/// `chat_template` as it stands in a JSON file: a text, or a list of named texts.
fn named_sources(template: &Value) -> Option<Vec<(&str, &str)>> {
    if let Some(source) = template.as_str() {
        return Some(vec![(DEFAULT, source)]);
    }
    let entries = template.as_array()?.iter();
    entries
        .map(|entry| Some((entry.get("name")?.as_str()?, entry.get("template")?.as_str()?)))
        .collect()
}

/// A message without its null keys, and with its reasoning under every name that templates read.
fn normalized(message: &Value) -> Value {
    let Some(fields) = message.as_object() else { return message.clone() };
    let mut fields = fields.clone();
    fields.retain(|_, value| !value.is_null());
    if let Some(reasoning) = REASONING_KEYS.iter().find_map(|key| fields.get(*key)).cloned() {
        fields.entry("thinking").or_insert_with(|| reasoning.clone());
        fields.insert("reasoning_content".into(), reasoning);
    }
    Value::Object(fields)
}

/// The engine's error with its line and its causes, on one line.
fn describe(error: Error) -> DataError {
    let mut message = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(inner) = cause {
        message.push_str(&format!(": {inner}"));
        cause = inner.source();
    }
    DataError::template(message)
}

impl DataError {
    /// A template's error, saying which file the template came from.
    fn in_file(self, path: &Path) -> Self {
        match self {
            Self::Template { message } => Self::file(path, format!("chat template: {message}")),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests;
