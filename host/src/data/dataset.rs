//! A JSONL file as token rows.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::{DataError, Result};
use super::images::Processor;
use super::row::Row;
use super::sample::{Encoder, Measured, Sample, Vision};
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use super::unprinted::Unprinted;

/// What becomes of a row with more tokens than `sequence_length`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Overflow {
    /// Loading fails and names the row.
    #[default]
    Error,
    /// The row is left out and counted.
    Skip,
    /// The row loses its end. One that has no target left is left out and counted, and so is one that would lose a
    /// picture or a part of it: half a picture has no meaning, and what follows would be about what is not there.
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

/// The rows of a dataset, in the file's order.
#[derive(Debug, Clone)]
pub struct Dataset {
    /// At least one row, each with at least one target.
    pub samples: Vec<Sample>,
    /// Rows left out for their length.
    pub num_skipped: usize,
    /// Rows that lost their end.
    pub num_truncated: usize,
    /// What the chat template does not print of the rows.
    pub unprinted: Unprinted,
    /// The file, for messages about its rows.
    pub name: PathBuf,
    /// What prepares the rows' pictures; `None` when the model takes none.
    pub processor: Option<Arc<Processor>>,
}

impl Dataset {
    /// Reads a JSONL file of `{"text": …}` and `{"messages": […], "tools": […]}` rows; blank lines, a
    /// byte-order mark and Windows line ends are passed over.
    ///
    /// Every token of a text row is a target, and the end-of-sequence token is appended. Of a conversation, the
    /// assistant's tokens are, see [`super::assistant_spans`], but none that stands for a picture. `template` may be
    /// `None` as long as the file holds no conversation, and `vision` as long as it names no pictures.
    ///
    /// Content parts of conversations may name pictures: `{"type": "image", "image": "path"}`, or films:
    /// `{"type": "video", "video": ["path", …], "fps": 2}`. Paths are relative to the file's folder. Each picture's
    /// header is read, and whether its file is whole; its pixels are not decoded until they are needed.
    ///
    /// # Errors
    /// Names the file, the line, what is wrong there and what to do: malformed JSON, missing keys, wrong types, an
    /// unknown role, nothing to learn, too many tokens, a picture that is missing or of no use, or a file without rows.
    pub fn load(
        path: &Path,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        vision: Option<Vision<'_>>,
        options: DatasetOptions,
    ) -> Result<Self> {
        let file = File::open(path).map_err(DataError::io("open", path))?;
        Self::read(BufReader::new(file), path, tokenizer, template, vision, options)
    }

    /// As [`Dataset::load`], from any reader; `name` stands for the file.
    ///
    /// # Errors
    /// As [`Dataset::load`].
    pub fn read(
        mut reader: impl BufRead,
        name: &Path,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        vision: Option<Vision<'_>>,
        options: DatasetOptions,
    ) -> Result<Self> {
        if options.sequence_length < 2 {
            let message =
                "sequence_length must be at least 2: the first token of a row is never a target";
            return Err(DataError::Setting { message: message.to_owned() });
        }
        let mut dataset = Self {
            samples: Vec::new(),
            num_skipped: 0,
            num_truncated: 0,
            unprinted: Unprinted::default(),
            name: name.to_owned(),
            processor: vision.as_ref().map(|vision| Arc::clone(&vision.processor)),
        };
        let folder = name.parent().unwrap_or(Path::new(""));
        let encoder = Encoder::new(tokenizer, template, vision, folder);
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
                let row = Row::parse(text.trim_end()).and_then(|row| encoder.sample(row, line));
                row.and_then(|row| dataset.push_row(row, options)).map_err(in_row)?;
            }
        }
        if dataset.samples.is_empty() {
            let message = match dataset.num_skipped {
                0 => "the dataset is empty; it needs at least one row".to_owned(),
                count => {
                    let truncate = match options.overflow {
                        Overflow::Truncate => "nothing to learn is left of them",
                        _ => "or set overflow = \"truncate\"",
                    };
                    let length = options.sequence_length;
                    format!(
                        "none of the {count} rows fits sequence_length = {length}; raise it, {truncate}"
                    )
                }
            };
            return Err(DataError::file(name, message));
        }
        Ok(dataset)
    }

    fn push_row(&mut self, row: Measured, options: DatasetOptions) -> Result<(), String> {
        let Measured { mut sample, num_picture_tokens, pictures_end, unprinted } = row;
        if sample.num_targets() == 0 {
            return Err(
                "there is nothing to learn: the row has no target after its first token".to_owned()
            );
        }
        let (length, limit) = (sample.ids.len(), options.sequence_length);
        if length > limit {
            if options.overflow == Overflow::Error {
                let (of_pictures, lower) = match num_picture_tokens {
                    0 => (String::new(), ""),
                    count => (
                        format!(", {count} of them for its pictures,"),
                        "lower max_pixels in [data] for smaller pictures, ",
                    ),
                };
                return Err(format!(
                    "the row has {length} tokens{of_pictures} but sequence_length is {limit}; raise \
                     sequence_length, {lower}shorten the row, or set overflow = \"skip\" or \"truncate\""
                ));
            }
            if options.overflow == Overflow::Truncate {
                sample.ids.truncate(limit);
                sample.targets.truncate(limit);
            }
            if options.overflow == Overflow::Skip
                || pictures_end > limit
                || sample.num_targets() == 0
            {
                self.num_skipped += 1;
                return Ok(());
            }
            self.num_truncated += 1;
        }
        self.unprinted.add(sample.line, &unprinted);
        self.samples.push(sample);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
