//! The tokenizer of a checkpoint folder, with its special tokens.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::error::{DataError, Result};
use super::json;

/// Token ids of a text, each with the part of the text it covers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// One id per token.
    pub ids: Vec<u32>,
    /// Byte range of each token in the text; empty for a token that the tokenizer added by itself.
    pub offsets: Vec<(usize, usize)>,
}

/// A checkpoint's `tokenizer.json` with the special tokens that the files beside it name.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    special_tokens: BTreeMap<String, String>,
    eos_id: Option<u32>,
    pad_id: u32,
    stop_ids: Vec<u32>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a checkpoint folder, and, where they exist, `tokenizer_config.json`,
    /// `generation_config.json` and `config.json` for the special tokens.
    ///
    /// The end-of-sequence token is the tokenizer configuration's, else the model's. Padding is the
    /// tokenizer configuration's, else the model's, else the end-of-sequence token, else id 0 (padded
    /// positions are masked, so that any id will do).
    ///
    /// # Errors
    /// Names the file that is missing or malformed, and a special token that the vocabulary lacks.
    pub fn load(folder: &Path) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        if !path.is_file() {
            let message = "there is no such file; download the checkpoint's tokenizer.json beside its weights \
                           (a checkpoint that only has vocab.json or a SentencePiece model must be saved \
                           with a fast tokenizer first)";
            return Err(DataError::file(path, message));
        }
        let bytes = std::fs::read(&path).map_err(DataError::io("read", &path))?;
        let inner = tokenizers::Tokenizer::from_bytes(&bytes)
            .map_err(|error| DataError::file(&path, format!("not a tokenizer: {error}")))?;
        let settings_path = folder.join("tokenizer_config.json");
        let settings = json::read_optional(&settings_path)?.unwrap_or(Value::Null);
        let generation = json::read_optional(&folder.join("generation_config.json"))?;
        let config = json::read_optional(&folder.join("config.json"))?;
        let special_tokens = special_tokens(&settings);

        let named = |key: &str| -> Result<Option<u32>> {
            let Some(token) = special_tokens.get(key) else { return Ok(None) };
            let id = inner.token_to_id(token).ok_or_else(|| {
                let message = format!(
                    "{key} is '{token}', which tokenizer.json does not have; the two files belong to \
                     different checkpoints"
                );
                DataError::file(&settings_path, message)
            })?;
            Ok(Some(id))
        };
        let model = |key: &str| -> Vec<u32> {
            let text = config.as_ref().and_then(|config| config.get("text_config"));
            let places = [generation.as_ref(), config.as_ref(), text];
            let found = places.into_iter().flatten().map(|place| ids(place.get(key)));
            found.into_iter().find(|ids| !ids.is_empty()).unwrap_or_default()
        };
        let mut stop_ids = model("eos_token_id");
        let eos_id = named("eos_token")?.or(stop_ids.first().copied());
        stop_ids.extend(eos_id.filter(|id| !stop_ids.contains(id)));
        let pad_id =
            named("pad_token")?.or(model("pad_token_id").first().copied()).or(eos_id).unwrap_or(0);
        Ok(Self { inner, special_tokens, eos_id, pad_id, stop_ids })
    }

    /// Tokens of `text`. `add_special_tokens`: also what the tokenizer puts around a plain text (a
    /// beginning token for most families that have one); a rendered chat already holds its own.
    ///
    /// # Errors
    /// [`DataError::Tokenizer`] with the library's words.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Encoded> {
        let encoding = self.inner.encode(text, add_special_tokens).map_err(DataError::tokenizer)?;
        Ok(Encoded { ids: encoding.get_ids().to_vec(), offsets: encoding.get_offsets().to_vec() })
    }

    /// Text of `ids`. `skip_special_tokens` leaves special tokens out of it.
    ///
    /// # Errors
    /// [`DataError::Tokenizer`] with the library's words.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        self.inner.decode(ids, skip_special_tokens).map_err(DataError::tokenizer)
    }

    /// Id of one token as it is written in the vocabulary.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// One more than the largest id that [`Tokenizer::encode`] can give: the least number of
    /// embedding rows that a model needs.
    pub fn num_ids(&self) -> usize {
        self.inner.get_vocab(true).values().max().map_or(0, |largest| *largest as usize + 1)
    }

    /// The token that ends a text or a turn, when the checkpoint names one.
    pub fn eos_id(&self) -> Option<u32> {
        self.eos_id
    }

    /// The token that fills short rows.
    pub fn pad_id(&self) -> u32 {
        self.pad_id
    }

    /// Tokens at which generation stops.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// `bos_token`, `eos_token`, `pad_token` and the others of `tokenizer_config.json`, for chat templates.
    pub fn special_tokens(&self) -> &BTreeMap<String, String> {
        &self.special_tokens
    }
}

/// Every `…_token` of a tokenizer configuration: plain strings, or objects that hold the string.
fn special_tokens(settings: &Value) -> BTreeMap<String, String> {
    let entries = settings.as_object().into_iter().flatten();
    entries
        .filter(|(key, _)| key.ends_with("_token"))
        .filter_map(|(key, value)| {
            let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
            Some((key.clone(), text.to_owned()))
        })
        .collect()
}

/// One id or a list of ids.
fn ids(value: Option<&Value>) -> Vec<u32> {
    let as_id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Some(Value::Array(items)) => items.iter().filter_map(as_id).collect(),
        Some(value) => as_id(value).into_iter().collect(),
        None => Vec::new(),
    }
}

#[cfg(test)]
mod tests;
