//! Tokenizer, chat template and loss mask against what transformers made of the same conversations
//! (`data/make_chat_goldens.py`).

// Helpers of an integration test are not seen as tests by clippy.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use blockstreamer_core::family::ChatFormat;
use blockstreamer_host::data::{
    CORPUS, ChatTemplate, Conversation, Tokenizer, assistant_spans, target_tokens, write_tokenizer,
};
use serde_json::Value;

const QWEN: &str = include_str!("../../plugins/qwen3-vl/src/chat_template.jinja");

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

fn tokenizer() -> Tokenizer {
    Tokenizer::load(&data().join("tokenizer")).unwrap()
}

/// Special tokens in a row from the id `first`, as Qwen's are.
fn qwen_format(first: u32) -> ChatFormat {
    let names = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
    ];
    ChatFormat {
        chat_template: QWEN.to_owned(),
        special_tokens: names.into_iter().map(str::to_owned).zip(first..).collect(),
        eos_token: "<|im_end|>".to_owned(),
        pad_token: "<|endoftext|>".to_owned(),
    }
}

struct Case {
    name: String,
    chat: Conversation,
    outputs: Value,
}

fn cases() -> Vec<Case> {
    let text = std::fs::read_to_string(data().join("chat_goldens.json")).unwrap();
    let goldens: Value = serde_json::from_str(&text).unwrap();
    let cases: Vec<Case> = goldens["cases"]
        .as_array()
        .unwrap()
        .iter()
        .map(|case| Case {
            name: case["name"].as_str().unwrap().to_owned(),
            chat: Conversation {
                messages: case["messages"].as_array().unwrap().clone(),
                tools: case["tools"].as_array().cloned(),
            },
            outputs: case["outputs"].clone(),
        })
        .collect();
    assert!(cases.len() >= 20, "only {} cases", cases.len());
    cases
}

fn templates(tokenizer: &Tokenizer) -> Vec<(&'static str, ChatTemplate)> {
    ["qwen3_vl", "qwen3_vl_generation", "spaced"]
        .map(|name| {
            let source = match name {
                "qwen3_vl" => QWEN.to_owned(),
                _ => std::fs::read_to_string(data().join(format!("{name}.jinja"))).unwrap(),
            };
            (name, ChatTemplate::new(&source, tokenizer.special_tokens()).unwrap())
        })
        .into()
}

fn bits(mask: &[bool]) -> String {
    mask.iter().map(|target| if *target { '1' } else { '0' }).collect()
}

#[test]
fn rendered_chats_equal_those_of_transformers_byte_for_byte() {
    let templates = templates(&tokenizer());
    for case in cases() {
        for (name, template) in &templates {
            let golden = &case.outputs[name];
            let text = template.render(&case.chat, false).unwrap().text;
            assert_eq!(text, golden["text"].as_str().unwrap(), "{}, {name}", case.name);
            let prompt = template.render(&case.chat, true).unwrap().text;
            assert_eq!(prompt, golden["prompt"].as_str().unwrap(), "{}, {name}, prompt", case.name);
        }
    }
}

#[test]
fn token_ids_and_decoded_text_equal_those_of_transformers() {
    let tokenizer = tokenizer();
    for case in cases() {
        for (name, golden) in case.outputs.as_object().unwrap() {
            let ids = tokenizer.encode(golden["text"].as_str().unwrap(), false).unwrap().ids;
            let expected: Vec<u32> = serde_json::from_value(golden["ids"].clone()).unwrap();
            assert_eq!(ids, expected, "{}, {name}", case.name);
            let decoded = tokenizer.decode(&ids, true).unwrap();
            assert_eq!(decoded, golden["decoded"].as_str().unwrap(), "{}, {name}", case.name);
        }
    }
}

#[test]
fn masks_of_generation_blocks_equal_those_of_transformers() {
    let tokenizer = tokenizer();
    for (name, template) in &templates(&tokenizer)[1..] {
        for case in cases() {
            assert!(template.marks_generation(&case.chat));
            let (text, spans) = assistant_spans(template, &case.chat).unwrap();
            let mask = target_tokens(&tokenizer.encode(&text, false).unwrap().offsets, &spans);
            let expected = case.outputs[name]["mask"].as_str().unwrap();
            assert_eq!(bits(&mask), expected, "{}, {name}", case.name);
        }
    }
}

#[test]
fn masks_from_prefixes_equal_those_that_generation_blocks_give() {
    let tokenizer = tokenizer();
    let (_, plain) = &templates(&tokenizer)[0];
    for case in cases() {
        assert!(!plain.marks_generation(&case.chat));
        let (text, spans) = assistant_spans(plain, &case.chat).unwrap();
        let mask = target_tokens(&tokenizer.encode(&text, false).unwrap().offsets, &spans);
        let expected = case.outputs["qwen3_vl_generation"]["mask"].as_str().unwrap();
        assert_eq!(bits(&mask), expected, "{}", case.name);
    }
}

#[test]
fn the_bundled_tokenizer_is_the_committed_one() {
    let fresh = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tokenizer");
    std::fs::create_dir_all(&fresh).unwrap();
    write_tokenizer(&fresh, &[CORPUS], 512, &qwen_format(500)).unwrap();
    for name in
        ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
    {
        let [new, old] =
            [&fresh, &data().join("tokenizer")].map(|folder| std::fs::read(folder.join(name)).ok());
        assert!(
            new.is_some() && new == old,
            "{name} differs; if the corpus or the template was changed on purpose, copy {} to tests/data and run \
             make_chat_goldens.py",
            fresh.display()
        );
    }
}
