//! A small tokenizer of a synthetic checkpoint, trained on bundled text.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use blockstreamer_core::family::ChatFormat;
use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{TokenizerBuilder, TokenizerImpl};

use super::error::{DataError, Result};

/// How Qwen2 and its successors cut text into words (`PRETOKENIZE_REGEX` of `Qwen2Tokenizer`).
const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Trains a byte-level BPE tokenizer on `texts` and writes it into `folder`: `tokenizer.json`,
/// `tokenizer_config.json`, `chat_template.jinja` and `generation_config.json`.
///
/// The special tokens of `format` get exactly the ids it gives them; the 256 bytes and the merges fill
/// the lowest ids that are left below `vocab_size`. Ids may stay unused. The same arguments give the same
/// bytes, and each file appears whole or not at all.
///
/// # Errors
/// [`DataError::Setting`] when the ids clash or `vocab_size` has no room for them and the 256 bytes;
/// [`DataError::Io`] when a file cannot be written.
pub fn write_tokenizer(
    folder: &Path,
    texts: &[&str],
    vocab_size: usize,
    format: &ChatFormat,
) -> Result<()> {
    check(vocab_size, format)?;
    let tokenizer = tokenizer_json(texts, vocab_size, format)?;
    let added: BTreeMap<String, Value> =
        added_tokens(format).into_iter().map(|(id, token)| (id.to_string(), token)).collect();
    let settings = json!({
        "add_bos_token": false,
        "add_prefix_space": false,
        "added_tokens_decoder": added,
        "bos_token": null,
        "chat_template": format.chat_template,
        "clean_up_tokenization_spaces": false,
        "eos_token": format.eos_token,
        "pad_token": format.pad_token,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": null,
    });
    let (eos, pad) = (id_of(format, &format.eos_token)?, id_of(format, &format.pad_token)?);
    let mut stops = vec![eos, pad];
    stops.dedup();
    let generation = json!({"eos_token_id": stops, "pad_token_id": pad});

    let pretty = |value: &Value| format!("{value:#}\n");
    write(&folder.join("tokenizer.json"), &pretty(&tokenizer))?;
    write(&folder.join("tokenizer_config.json"), &pretty(&settings))?;
    write(&folder.join("chat_template.jinja"), &format.chat_template)?;
    write(&folder.join("generation_config.json"), &pretty(&generation))
}

fn check(vocab_size: usize, format: &ChatFormat) -> Result<()> {
    let setting = |message: String| Err(DataError::Setting { message });
    let mut seen = BTreeMap::new();
    for (token, id) in &format.special_tokens {
        if *id as usize >= vocab_size {
            return setting(format!(
                "special token '{token}' has id {id} but vocab_size is {vocab_size}"
            ));
        }
        if let Some(other) = seen.insert(id, token) {
            return setting(format!("special tokens '{other}' and '{token}' both have id {id}"));
        }
    }
    let needed = ByteLevel::alphabet().len() + format.special_tokens.len();
    if vocab_size < needed {
        return setting(format!(
            "vocab_size is {vocab_size} but the bytes and the special tokens need {needed}"
        ));
    }
    Ok(())
}

fn id_of(format: &ChatFormat, token: &str) -> Result<u32> {
    let found = format.special_tokens.iter().find(|(name, _)| name == token);
    found.map(|(_, id)| *id).ok_or_else(|| {
        let message =
            format!("'{token}' ends turns or pads rows but is not among the special tokens");
        DataError::Setting { message }
    })
}

/// Special tokens as `added_tokens` of `tokenizer.json`, by id.
///
/// Those written like XML tags (`<tool_call>`, `</think>`) are text that a reader wants to see; the
/// others vanish when special tokens are skipped in decoding. Published checkpoints do the same.
fn added_tokens(format: &ChatFormat) -> BTreeMap<u32, Value> {
    let entry = |(token, id): &(String, u32)| {
        let like_a_tag = token.starts_with('<') && !token.starts_with("<|");
        let ends_or_pads = *token == format.eos_token || *token == format.pad_token;
        let token = json!({
            "content": token, "lstrip": false, "normalized": false, "rstrip": false,
            "single_word": false, "special": !like_a_tag || ends_or_pads,
        });
        (*id, token)
    };
    format.special_tokens.iter().map(entry).collect()
}

fn tokenizer_json(texts: &[&str], vocab_size: usize, format: &ChatFormat) -> Result<Value> {
    let split =
        Split::new(SplitPattern::Regex(WORDS.into()), SplitDelimiterBehavior::Isolated, false)
            .map_err(DataError::tokenizer)?;
    let bytes = ByteLevel::new(false, false, false);
    let words = Sequence::new(vec![
        PreTokenizerWrapper::Split(split),
        PreTokenizerWrapper::ByteLevel(bytes),
    ]);
    let mut tokenizer: TokenizerImpl<BPE, NFC, Sequence, ByteLevel, ByteLevel> =
        TokenizerBuilder::new()
            .with_model(BPE::default())
            .with_normalizer(Some(NFC))
            .with_pre_tokenizer(Some(words))
            .with_post_processor(Some(bytes))
            .with_decoder(Some(bytes))
            .build()
            .map_err(DataError::tokenizer)?;
    let mut trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(vocab_size - format.special_tokens.len())
        .min_frequency(2)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    tokenizer.train(&mut trainer, texts.iter()).map_err(DataError::tokenizer)?;

    let mut trained: Value = serde_json::to_value(&tokenizer).map_err(DataError::tokenizer)?;
    place_special_tokens(&mut trained, format)?;
    Ok(trained)
}

/// Moves the trained ids out of the way of the special tokens and enters these, in the vocabulary and in
/// `added_tokens`: a loader gives an added token the id that the vocabulary has for it.
fn place_special_tokens(trained: &mut Value, format: &ChatFormat) -> Result<()> {
    let special: BTreeMap<u32, &str> =
        format.special_tokens.iter().map(|(token, id)| (*id, token.as_str())).collect();
    let vocab = trained["model"]["vocab"].as_object().ok_or_else(|| {
        DataError::tokenizer("the trained model was not written with a vocabulary")
    })?;
    let mut tokens: Vec<(u64, &String)> =
        vocab.iter().filter_map(|(token, id)| Some((id.as_u64()?, token))).collect();
    tokens.sort_unstable();
    let free = (0u32..).filter(|id| !special.contains_key(id));
    let mut placed: BTreeMap<u32, &str> =
        free.zip(tokens.iter().map(|(_, token)| token.as_str())).collect();
    placed.extend(&special);
    let placed: serde_json::Map<String, Value> =
        placed.into_iter().map(|(id, token)| (token.to_owned(), json!(id))).collect();
    trained["model"]["vocab"] = Value::Object(placed);

    let added = added_tokens(format).into_iter().map(|(id, mut token)| {
        token["id"] = json!(id);
        token
    });
    trained["added_tokens"] = Value::Array(added.collect());
    Ok(())
}

/// Writes beside the target and renames, so that a full disk leaves nothing half-written.
fn write(path: &Path, text: &str) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    // The system's mask narrows this, as for any new file; temporary files are private otherwise.
    let mut file = tempfile::Builder::new()
        .permissions(std::fs::Permissions::from_mode(0o666))
        .tempfile_in(folder)
        .map_err(DataError::io("create a file in", folder))?;
    file.write_all(text.as_bytes()).map_err(DataError::io("write", path))?;
    file.as_file().sync_all().map_err(DataError::io("write", path))?;
    file.persist(path).map(drop).map_err(|error| DataError::io("write", path)(error.error))
}

#[cfg(test)]
mod tests;
