//! Chat template and special tokens.

use blockstreamer_core::Result;
use blockstreamer_core::config::ConfigSection;
use blockstreamer_core::family::{ChatFormat, special_token_ids};

use crate::config::{Config, FAMILY};

const PAD: &str = "<|endoftext|>";
const END_OF_TURN: &str = "<|im_end|>";
pub(crate) const VISION_START: &str = "<|vision_start|>";
pub(crate) const VISION_END: &str = "<|vision_end|>";
pub(crate) const IMAGE_PAD: &str = "<|image_pad|>";
pub(crate) const VIDEO_PAD: &str = "<|video_pad|>";

/// The tokens that template and configuration use, with their ids in the published tokenizer.
const SPECIAL_TOKENS: [(&str, u32); 12] = [
    (PAD, 151_643),
    ("<|im_start|>", 151_644),
    (END_OF_TURN, 151_645),
    (VISION_START, 151_652),
    (VISION_END, 151_653),
    ("<|vision_pad|>", 151_654),
    (IMAGE_PAD, 151_655),
    (VIDEO_PAD, 151_656),
    ("<tool_call>", 151_657),
    ("</tool_call>", 151_658),
    ("<tool_response>", 151_665),
    ("</tool_response>", 151_666),
];

pub(crate) fn format(config_json: &str) -> Result<ChatFormat> {
    Ok(ChatFormat {
        chat_template: include_str!("chat_template.jinja").into(),
        special_tokens: special_tokens(config_json)?,
        eos_token: END_OF_TURN.into(),
        pad_token: PAD.into(),
    })
}

/// A vocabulary of the published size has the published ids. A smaller one has the ids that its
/// configuration names, and the last free ones of the vocabulary for the other tokens.
fn special_tokens(config_json: &str) -> Result<Vec<(String, u32)>> {
    let config = Config::parse(config_json)?;
    let ids = config.special_ids;
    let named = |token: &str| match token {
        PAD => ids.bos,
        END_OF_TURN => ids.eos,
        VISION_START => Some(ids.vision_start),
        VISION_END => Some(ids.vision_end),
        IMAGE_PAD => Some(ids.image),
        VIDEO_PAD => Some(ids.video),
        _ => None,
    };
    let root = ConfigSection::parse(FAMILY, config_json)?;
    let text = root.section("text_config")?.unwrap_or(root);
    special_token_ids(&text, &SPECIAL_TOKENS, named)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::{Value, json};

    use super::*;
    use crate::sizes;

    #[test]
    fn published_sizes_have_the_published_ids() {
        for size in sizes::names().filter(|size| !size.starts_with("tiny")) {
            let format = format(&sizes::config_json(size).unwrap()).unwrap();
            let wanted = SPECIAL_TOKENS.map(|(token, id)| (token.to_owned(), id));
            assert_eq!(format.special_tokens, wanted, "{size}");
        }
    }

    #[test]
    fn tiny_has_the_last_ids_of_its_vocabulary_in_the_same_order() {
        let format = format(&sizes::config_json("tiny").unwrap()).unwrap();
        let ids: Vec<u32> = format.special_tokens.iter().map(|token| token.1).collect();
        assert_eq!(ids, (500..512).collect::<Vec<_>>());
        assert!(format.special_tokens.iter().any(|token| token.0 == format.eos_token));
        assert!(format.special_tokens.iter().any(|token| token.0 == format.pad_token));
    }

    #[test]
    fn ids_that_the_config_names_are_kept_and_the_others_avoid_them() {
        let mut config: Value = serde_json::from_str(&sizes::config_json("tiny").unwrap()).unwrap();
        config["image_token_id"] = json!(511);
        config["video_token_id"] = json!(3);
        let tokens = special_tokens(&config.to_string()).unwrap();
        let id = |name: &str| tokens.iter().find(|token| token.0 == name).unwrap().1;
        assert_eq!((id("<|image_pad|>"), id("<|video_pad|>")), (511, 3));
        assert_eq!(tokens.iter().map(|token| token.1).collect::<BTreeSet<_>>().len(), 12);
        config["video_token_id"] = json!(512);
        let error = special_tokens(&config.to_string()).unwrap_err().to_string();
        assert!(error.contains("text_config.vocab_size is 512"), "{error}");
    }
}
