//! The chat format, harmony: template and special tokens.

use blockstreamer_core::Result;
use blockstreamer_core::config::ConfigSection;
use blockstreamer_core::family::{ChatFormat, special_token_ids};

use crate::config::{Config, FAMILY};

const BOS: &str = "<|startoftext|>";
const PAD: &str = "<|endoftext|>";
/// Ends what the assistant says at last; `<|call|>` ends a call, `<|end|>` any other message.
const RETURN: &str = "<|return|>";

/// The tokens that template and configuration use, with their ids in the published tokenizer.
const SPECIAL_TOKENS: [(&str, u32); 10] = [
    (BOS, 199_998),
    (PAD, 199_999),
    (RETURN, 200_002),
    ("<|constrain|>", 200_003),
    ("<|channel|>", 200_005),
    ("<|start|>", 200_006),
    ("<|end|>", 200_007),
    ("<|message|>", 200_008),
    ("<|call|>", 200_012),
    ("<|endofprompt|>", 200_018),
];

pub(crate) fn format(config_json: &str) -> Result<ChatFormat> {
    Ok(ChatFormat {
        chat_template: include_str!("chat_template.jinja").into(),
        special_tokens: special_tokens(config_json)?,
        eos_token: RETURN.into(),
        pad_token: PAD.into(),
    })
}

fn special_tokens(config_json: &str) -> Result<Vec<(String, u32)>> {
    let config = Config::parse(config_json)?;
    let named = |token: &str| match token {
        BOS => config.special_ids.bos,
        PAD => config.special_ids.pad,
        RETURN => config.special_ids.eos,
        _ => None,
    };
    special_token_ids(&ConfigSection::parse(FAMILY, config_json)?, &SPECIAL_TOKENS, named)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::sizes;

    #[test]
    fn published_sizes_have_the_published_ids() {
        for size in ["20b", "120b"] {
            let format = format(&sizes::config_json(size).unwrap()).unwrap();
            let wanted = SPECIAL_TOKENS.map(|(token, id)| (token.to_owned(), id));
            assert_eq!(format.special_tokens, wanted, "{size}");
        }
    }

    #[test]
    fn tiny_has_the_ids_that_it_names_and_the_last_free_ones() {
        let config = sizes::config_json("tiny").unwrap();
        let format = format(&config).unwrap();
        let id = |token: &str| format.special_tokens.iter().find(|it| it.0 == token).unwrap().1;
        assert_eq!((id(BOS), id(&format.pad_token), id(&format.eos_token)), (500, 501, 502));
        let ids: BTreeSet<u32> = format.special_tokens.iter().map(|token| token.1).collect();
        assert_eq!(ids.len(), SPECIAL_TOKENS.len());
        assert!(ids.iter().all(|id| (500..512).contains(id)));
        let small = config.replace("\"vocab_size\": 512", "\"vocab_size\": 9");
        let error = super::format(&small).unwrap_err().to_string();
        assert!(error.contains("vocab_size is 9, too small"), "{error}");
    }
}
