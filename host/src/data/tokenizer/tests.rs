use std::fs;

use super::*;
use crate::data::test_folder;

/// A copy of the test model with some files replaced.
fn load_with(files: &[(&str, &str)]) -> Result<Tokenizer> {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(test_folder().join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    for (name, content) in files {
        fs::write(folder.path().join(name), content).unwrap();
    }
    Tokenizer::load(folder.path())
}

#[test]
fn offsets_are_byte_ranges_of_the_text() {
    let tokenizer = Tokenizer::load(&test_folder()).unwrap();
    let text = "é the<|im_end|>";
    let encoded = tokenizer.encode(text, false).unwrap();
    assert_eq!(encoded.ids.len(), encoded.offsets.len());
    let (start, end) = encoded.offsets[encoded.offsets.len() - 1];
    assert_eq!(&text[start..end], "<|im_end|>");
    // Both byte tokens of the accented letter cover the whole letter.
    assert_eq!(encoded.offsets[..2], [(0, 2), (0, 2)]);
}

#[test]
fn special_tokens_come_from_the_first_file_that_names_them() {
    let settings = r#"{"eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>", "bos_token": null}"#;
    let generation = r#"{"eos_token_id": [500, 501], "pad_token_id": 505}"#;
    let all =
        load_with(&[("tokenizer_config.json", settings), ("generation_config.json", generation)])
            .unwrap();
    assert_eq!(
        (all.eos_id(), all.pad_id(), all.stop_ids()),
        (Some(502), 500, &[500, 501, 502][..])
    );
    assert_eq!(all.special_tokens().len(), 2);

    let only = load_with(&[("generation_config.json", generation)]).unwrap();
    assert_eq!((only.eos_id(), only.pad_id(), only.stop_ids()), (Some(500), 505, &[500, 501][..]));

    let config = r#"{"text_config": {"eos_token_id": 502}}"#;
    let nested = load_with(&[("config.json", config)]).unwrap();
    assert_eq!((nested.eos_id(), nested.pad_id()), (Some(502), 502));

    let none = load_with(&[]).unwrap();
    assert_eq!((none.eos_id(), none.pad_id(), none.stop_ids()), (None, 0, &[][..]));
}

#[test]
fn the_number_of_ids_counts_from_the_largest() {
    assert_eq!(Tokenizer::load(&test_folder()).unwrap().num_ids(), 512);
}

#[test]
fn a_missing_tokenizer_is_refused_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let error = Tokenizer::load(folder.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json") && error.contains("download"), "{error}");
}

#[test]
fn malformed_files_are_named() {
    let broken = load_with(&[("tokenizer.json", "{\"model\": ")]).unwrap_err().to_string();
    assert!(broken.contains("tokenizer.json: not a tokenizer"), "{broken}");
    let settings = load_with(&[("generation_config.json", "nope")]).unwrap_err().to_string();
    assert!(settings.contains("generation_config.json: not valid JSON"), "{settings}");
}

#[test]
fn a_special_token_that_the_vocabulary_lacks_is_refused() {
    let error = load_with(&[("tokenizer_config.json", r#"{"eos_token": "</s>"}"#)])
        .unwrap_err()
        .to_string();
    for needle in ["tokenizer_config.json", "eos_token is '</s>'", "different checkpoints"] {
        assert!(error.contains(needle), "{error}");
    }
}
