//! Headers and folders.

use blockstreamer_core::Error;
use blockstreamer_core::checkpoint::{Checkpoint, read_header};
use blockstreamer_core::dtype::Dtype;

use crate::{Made, Numbers, assert_says, file_bytes, folder, index_of, made, raw_file};

fn two_tensors() -> Vec<Made> {
    let numbers = &mut Numbers(1);
    vec![made("first", Dtype::BF16, &[3, 5], numbers), made("second", Dtype::U8, &[7], numbers)]
}

/// The error of a file with these bytes.
#[track_caller]
fn assert_refused(bytes: &[u8], parts: &[&str]) {
    let directory = folder(&[("model.safetensors", bytes.to_vec())]);
    let result = Checkpoint::open(directory.path());
    assert_says(result, &[&["model.safetensors"], parts].concat());
}

fn entry(dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
}

#[test]
fn a_header_gives_dtype_shape_and_place_of_every_tensor() {
    let bytes = file_bytes(&two_tensors(), 3);
    let directory = folder(&[("model.safetensors", bytes.clone())]);
    let header = read_header(&directory.path().join("model.safetensors")).unwrap();
    assert_eq!(header.file_bytes, bytes.len() as u64);
    for (found, expected) in header.tensors.iter().zip(two_tensors()) {
        assert_eq!(
            (&found.name, found.dtype, &found.shape),
            (&expected.name, expected.dtype, &expected.shape)
        );
        let start = found.offset_bytes as usize;
        assert_eq!(bytes[start..start + found.num_bytes], expected.bytes);
    }
    assert_eq!(header.tensors.len(), 2);
}

#[test]
fn a_truncated_file_is_refused_naming_tensor_and_file() {
    let bytes = file_bytes(&two_tensors(), 0);
    assert_refused(&bytes[..bytes.len() - 1], &["'second'", "cut short", "fetch it again"]);
    // In the middle of the header, and inside its length.
    assert_refused(&bytes[..40], &["claims a header", "incomplete"]);
    assert_refused(&bytes[..5], &["only 5 bytes", "incomplete"]);
    assert_refused(&[], &["only 0 bytes"]);
}

#[test]
fn a_header_length_that_lies_is_refused_before_memory_is_taken() {
    let mut bytes = file_bytes(&two_tensors(), 0);
    bytes[..8].copy_from_slice(&99_000_000_u64.to_le_bytes());
    assert_refused(&bytes, &["99000000", "incomplete"]);
    bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert_refused(&bytes, &["over the format's limit"]);
}

#[test]
fn a_git_lfs_pointer_is_recognised() {
    assert_refused(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        &["git lfs pull"],
    );
}

#[test]
fn a_header_that_is_not_json_is_refused() {
    assert_refused(&raw_file(b"{\"a\": ", b""), &["not JSON"]);
    assert_refused(&raw_file(b"[1, 2]", b""), &["not JSON"]);
    assert_refused(&raw_file(br#"{"a": 3}"#, b""), &["'a'", "malformed"]);
    let negative = format!(r#"{{"a":{}}}"#, entry("U8", "[-1]", "[0,1]"));
    assert_refused(&raw_file(negative.as_bytes(), b"x"), &["'a'", "malformed"]);
}

#[test]
fn offsets_that_contradict_shape_or_file_are_refused_naming_the_tensor() {
    for (tensors, part) in [
        (vec![("a", "F32", "[2]", "[0,4]")], "takes 8 bytes"),
        (vec![("a", "F32", "[2]", "[8,0]")], "takes 8 bytes"),
        (vec![("a", "F32", "[4]", "[0,16]")], "cut short"),
        (vec![("a", "U8", "[8]", "[18446744073709551608,18446744073709551615]")], "data_offsets"),
        (vec![("a", "F32", "[9223372036854775807,9]", "[0,8]")], "too large"),
        (vec![("b", "U8", "[5]", "[0,5]"), ("a", "U8", "[4]", "[4,8]")], "overlap"),
        (vec![("b", "U8", "[3]", "[0,3]"), ("a", "U8", "[4]", "[4,8]")], "hole"),
        (vec![("a", "U8", "[7]", "[1,8]")], "hole"),
    ] {
        let entries: Vec<_> = (tensors.iter())
            .map(|(name, dtype, shape, offsets)| {
                format!("\"{name}\":{}", entry(dtype, shape, offsets))
            })
            .collect();
        let header = format!("{{{}}}", entries.join(","));
        assert_refused(&raw_file(header.as_bytes(), &[0; 8]), &["'a'", part]);
    }
    let short = format!(r#"{{"a":{}}}"#, entry("U8", "[7]", "[0,7]"));
    assert_refused(&raw_file(short.as_bytes(), &[0; 8]), &["1 bytes after its last tensor"]);
}

#[test]
fn an_unknown_dtype_is_refused_listing_the_known_ones() {
    let header = format!(r#"{{"a":{}}}"#, entry("F4", "[8]", "[0,8]"));
    assert_refused(&raw_file(header.as_bytes(), &[0; 8]), &["'a'", "F4", "BF16"]);
}

#[test]
fn a_folder_without_its_parts_says_what_to_download() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    assert_says(Checkpoint::open(&path.join("absent")), &["absent", "not a folder"]);
    assert_says(Checkpoint::open(path), &["no config.json"]);
    std::fs::write(path.join("config.json"), "{\"a\": 1").unwrap();
    assert_says(Checkpoint::open(path), &["config.json", "not a JSON object"]);
    std::fs::write(path.join("config.json"), "{\"a\": 1}").unwrap();
    assert_says(Checkpoint::open(path), &["no *.safetensors file"]);
}

#[test]
fn an_index_is_followed_and_its_broken_promises_are_named() {
    let [first, second] = &two_tensors()[..] else { unreachable!() };
    let one = file_bytes(std::slice::from_ref(first), 0);
    let two = file_bytes(&[second.clone(), first.clone()], 1);
    let index = "model.safetensors.index.json";
    // A second copy of 'first' is not the one that the index names.
    let promised = index_of(&[("first", "one.safetensors"), ("second", "two.safetensors")]);
    let directory = folder(&[
        ("one.safetensors", one.clone()),
        ("two.safetensors", two),
        ("unnamed.safetensors", b"never opened".to_vec()),
        (index, promised.clone()),
    ]);
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    assert_eq!(checkpoint.files.len(), 2);
    let place = &checkpoint.tensors["first"];
    assert_eq!(checkpoint.files[place.file].path, directory.path().join("one.safetensors"));

    std::fs::remove_file(directory.path().join("two.safetensors")).unwrap();
    assert_says(
        Checkpoint::open(directory.path()),
        &["two.safetensors", "does not exist", "incomplete"],
    );
    std::fs::write(directory.path().join("two.safetensors"), one).unwrap();
    let result = Checkpoint::open(directory.path());
    assert!(matches!(&result, Err(Error::MissingTensor { tensor, .. }) if tensor == "second"));
    assert_says(result, &["two.safetensors", "index.json"]);

    for (text, part) in [
        (index_of(&[("first", "../one.safetensors")]), "not a file name"),
        (index_of(&[]), "names no tensor"),
        (b"{}".to_vec(), "not an index"),
        (promised[..9].to_vec(), "not an index"),
    ] {
        std::fs::write(directory.path().join(index), text).unwrap();
        assert_says(Checkpoint::open(directory.path()), &[index, part]);
    }
}

#[test]
fn without_an_index_every_file_counts_and_no_name_may_occur_twice() {
    let [first, second] = &two_tensors()[..] else { unreachable!() };
    let one = file_bytes(std::slice::from_ref(first), 0);
    let directory = folder(&[
        ("b.safetensors", one.clone()),
        ("a.safetensors", file_bytes(std::slice::from_ref(second), 0)),
    ]);
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    assert!(checkpoint.files[0].path.ends_with("a.safetensors"));
    assert_eq!(checkpoint.tensors.keys().collect::<Vec<_>>(), ["first", "second"]);
    std::fs::write(directory.path().join("c.safetensors"), one).unwrap();
    assert_says(Checkpoint::open(directory.path()), &["c.safetensors", "'first'", "another file"]);
}
