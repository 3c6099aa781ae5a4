use std::fs;

use super::*;
use crate::data::{CORPUS, Tokenizer};

fn format(special: &[(&str, u32)]) -> ChatFormat {
    ChatFormat {
        chat_template: "{{ messages }}".into(),
        special_tokens: special.iter().map(|(token, id)| ((*token).to_owned(), *id)).collect(),
        eos_token: "<|end|>".into(),
        pad_token: "<|pad|>".into(),
    }
}

fn written(vocab_size: usize, format: &ChatFormat) -> Result<(tempfile::TempDir, Tokenizer)> {
    let folder = tempfile::tempdir().unwrap();
    write_tokenizer(folder.path(), &[CORPUS], vocab_size, format)?;
    let tokenizer = Tokenizer::load(folder.path())?;
    Ok((folder, tokenizer))
}

const HARD: &str = "Twice a day\n\n the tide's in: 3.14 ½ é 🚢 \u{0} <|end|><think>";

#[test]
fn special_tokens_get_the_ids_of_a_tiny_and_of_a_published_vocabulary() {
    for (vocab_size, first) in [(512, 500), (151_936, 151_643)] {
        let format = format(&[("<|pad|>", first), ("<|end|>", first + 2), ("<think>", first + 3)]);
        let (_folder, tokenizer) = written(vocab_size, &format).unwrap();
        for (token, id) in &format.special_tokens {
            assert_eq!(tokenizer.token_id(token), Some(*id));
        }
        assert!(tokenizer.num_ids() <= vocab_size);
        assert_eq!((tokenizer.eos_id(), tokenizer.pad_id()), (Some(first + 2), first));
        assert_eq!(tokenizer.stop_ids(), [first + 2, first]);
        let ids = tokenizer.encode(HARD, true).unwrap().ids;
        assert_eq!(ids[ids.len() - 2..], [first + 2, first + 3]);
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), HARD);
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), HARD.replace("<|end|>", ""));
    }
}

#[test]
fn special_ids_in_the_middle_are_left_free_by_the_merges() {
    let format = format(&[("<|pad|>", 0), ("<|end|>", 300)]);
    let (folder, tokenizer) = written(400, &format).unwrap();
    let ids = tokenizer.encode("<|pad|>the river<|end|>", false).unwrap().ids;
    assert_eq!((ids.first(), ids.last()), (Some(&0), Some(&300)));
    let json = fs::read_to_string(folder.path().join("tokenizer.json")).unwrap();
    let json: Value = serde_json::from_str(&json).unwrap();
    let vocab = json["model"]["vocab"].as_object().unwrap();
    let ids: std::collections::BTreeSet<u64> =
        vocab.values().map(|id| id.as_u64().unwrap()).collect();
    assert_eq!(ids, (0..400).collect());
}

#[test]
fn the_same_arguments_give_the_same_bytes() {
    let format = format(&[("<|pad|>", 500), ("<|end|>", 501)]);
    let read = |folder: &tempfile::TempDir| fs::read(folder.path().join("tokenizer.json")).unwrap();
    let (first, second) = (written(512, &format).unwrap().0, written(512, &format).unwrap().0);
    assert_eq!(read(&first), read(&second));
}

#[test]
fn impossible_vocabularies_are_refused_and_nothing_is_written() {
    let cases = [
        (512, format(&[("<|pad|>", 512), ("<|end|>", 1)]), "id 512 but vocab_size is 512"),
        (512, format(&[("<|pad|>", 1), ("<|end|>", 1)]), "both have id 1"),
        (257, format(&[("<|pad|>", 0), ("<|end|>", 1)]), "need 258"),
        (512, format(&[("<|pad|>", 0)]), "'<|end|>' ends turns"),
        (512, format(&[("<|end|>", 0)]), "'<|pad|>' ends turns"),
    ];
    for (vocab_size, format, needle) in cases {
        let folder = tempfile::tempdir().unwrap();
        let error = write_tokenizer(folder.path(), &[CORPUS], vocab_size, &format).unwrap_err();
        assert!(error.to_string().contains(needle), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_folder_that_does_not_exist_is_named() {
    let format = format(&[("<|pad|>", 500), ("<|end|>", 501)]);
    let folder = tempfile::tempdir().unwrap();
    let error = write_tokenizer(&folder.path().join("gone"), &[CORPUS], 512, &format).unwrap_err();
    assert!(error.to_string().contains("gone"), "{error}");
}
