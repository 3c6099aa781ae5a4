//! A JSONL file as token rows.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use super::error::{DataError, Result};
use super::mask::{assistant_spans, target_tokens};
use super::row::Row;
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;

/// What becomes of a row with more tokens than `sequence_length`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Overflow {
    /// Loading fails and names the row.
    #[default]
    Error,
    /// The row is left out and counted.
    Skip,
    /// The row loses its end. One that has no target left is left out and counted.
    Truncate,
}

/// How rows are taken from a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DatasetOptions {
    /// Most tokens a row may have, at least 2.
    pub sequence_length: usize,
    /// What becomes of longer rows.
    pub overflow: Overflow,
}

/// One row: its tokens, and which of them are targets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// Token ids.
    pub ids: Vec<u32>,
    /// For each token, whether the model is to learn to produce it.
    pub targets: Vec<bool>,
}

impl Sample {
    /// Tokens that contribute to the loss. The first token never does: nothing comes before it.
    pub fn num_targets(&self) -> usize {
        self.targets.iter().skip(1).filter(|target| **target).count()
    }
}

/// The rows of a dataset, in the file's order.
#[derive(Debug, Clone)]
pub struct Dataset {
    /// At least one row, each with at least one target.
    pub samples: Vec<Sample>,
    /// Rows left out for their length.
    pub num_skipped: usize,
    /// Rows that lost their end.
    pub num_truncated: usize,
}

impl Dataset {
    /// Reads a JSONL file of `{"text": …}` and `{"messages": […], "tools": […]}` rows; blank lines, a
    /// byte-order mark and Windows line ends are passed over.
    ///
    /// Every token of a text row is a target, and the end-of-sequence token is appended. Of a
    /// conversation, the assistant's tokens are, see [`assistant_spans`]. `template` may be `None` as long
    /// as the file holds no conversation.
    ///
    /// # Errors
    /// Names the file, the line, what is wrong there and what to do: malformed JSON, missing keys, wrong
    /// types, an unknown role, nothing to learn, too many tokens, or a file without rows.
    pub fn load(
        path: &Path,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        options: DatasetOptions,
    ) -> Result<Self> {
        let file = File::open(path).map_err(DataError::io("open", path))?;
        Self::read(BufReader::new(file), path, tokenizer, template, options)
    }

    /// As [`Dataset::load`], from any reader; `name` stands for the file in messages.
    ///
    /// # Errors
    /// As [`Dataset::load`].
    pub fn read(
        mut reader: impl BufRead,
        name: &Path,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        options: DatasetOptions,
    ) -> Result<Self> {
        if options.sequence_length < 2 {
            let message =
                "sequence_length must be at least 2: the first token of a row is never a target";
            return Err(DataError::Setting { message: message.to_owned() });
        }
        let mut dataset = Self { samples: Vec::new(), num_skipped: 0, num_truncated: 0 };
        let mut bytes = Vec::new();
        for line in 1.. {
            bytes.clear();
            if reader.read_until(b'\n', &mut bytes).map_err(DataError::io("read", name))? == 0 {
                break;
            }
            let in_row = |message: String| DataError::Row { path: name.to_owned(), line, message };
            let text = std::str::from_utf8(&bytes).map_err(|error| {
                let at = error.valid_up_to();
                in_row(format!("not valid UTF-8 at byte {at} of the line; save the file as UTF-8"))
            })?;
            let text = if line == 1 { text.strip_prefix('\u{feff}').unwrap_or(text) } else { text };
            if !text.trim().is_empty() {
                dataset.push_row(text, tokenizer, template, options).map_err(in_row)?;
            }
        }
        if dataset.samples.is_empty() {
            let message = match dataset.num_skipped {
                0 => "the dataset is empty; it needs at least one row".to_owned(),
                count => format!(
                    "none of the {count} rows fits sequence_length = {}; raise it, or set overflow = \"truncate\"",
                    options.sequence_length
                ),
            };
            return Err(DataError::file(name, message));
        }
        Ok(dataset)
    }

    fn push_row(
        &mut self,
        line: &str,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        options: DatasetOptions,
    ) -> Result<(), String> {
        let mut sample = sample(&Row::parse(line.trim_end())?, tokenizer, template)?;
        if sample.num_targets() == 0 {
            return Err(
                "there is nothing to learn: the row has no target after its first token".to_owned()
            );
        }
        let (length, limit) = (sample.ids.len(), options.sequence_length);
        if length > limit {
            match options.overflow {
                Overflow::Error => {
                    return Err(format!(
                        "the row has {length} tokens but sequence_length is {limit}; raise \
                         sequence_length, shorten the row, or set overflow = \"skip\" or \"truncate\""
                    ));
                }
                Overflow::Truncate => {
                    sample.ids.truncate(limit);
                    sample.targets.truncate(limit);
                }
                Overflow::Skip => {}
            }
            if options.overflow == Overflow::Skip || sample.num_targets() == 0 {
                self.num_skipped += 1;
                return Ok(());
            }
            self.num_truncated += 1;
        }
        self.samples.push(sample);
        Ok(())
    }
}

fn sample(
    row: &Row,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
) -> Result<Sample, String> {
    match row {
        Row::Text(text) => {
            let mut ids = tokenizer.encode(text, true).map_err(|error| error.to_string())?.ids;
            if let Some(eos) = tokenizer.eos_id().filter(|eos| ids.last() != Some(eos)) {
                ids.push(eos);
            }
            Ok(Sample { targets: vec![true; ids.len()], ids })
        }
        Row::Chat(chat) => {
            let template = template.ok_or(
                "the row is a conversation but the model's folder has no chat template; copy the \
                 chat_template.jinja of its chat version there, or use {\"text\": …} rows",
            )?;
            let (text, spans) =
                assistant_spans(template, chat).map_err(|error| error.to_string())?;
            let encoded = tokenizer.encode(&text, false).map_err(|error| error.to_string())?;
            let targets = target_tokens(&encoded.offsets, &spans);
            if !targets.contains(&true) {
                return Err(
                    "the chat template prints nothing of the assistant's turns, or marks none \
                            of it with {% generation %}"
                        .to_owned(),
                );
            }
            Ok(Sample { ids: encoded.ids, targets })
        }
    }
}

#[cfg(test)]
mod tests;
