//! The plugin boundary: what is refused, with which words, and that nothing else suffers.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

use std::fs;
use std::path::Path;
use std::process::Command;

use blockstreamer_core::family::ModelOptions;
use blockstreamer_host::plugins::Registry;
use blockstreamer_tests::built;
use serde_json::Value;
use tempfile::TempDir;

const MISBEHAVE: &str = "libmisbehave.so";
const WELL_BEHAVED: &str = "libwell_behaved.so";

/// A folder with both plugins. Copies: a library is opened once per file and process.
fn plugin_folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(built::misbehave(), folder.path().join(MISBEHAVE)).unwrap();
    fs::copy(built::well_behaved(), folder.path().join(WELL_BEHAVED)).unwrap();
    folder
}

/// `blockstreamer families --json` over `folder`, with the misbehaviour; and what went to stderr.
fn families(folder: &Path, misbehaviour: &str) -> (Value, String) {
    let output = Command::new(built::host_binary())
        .args(["families", "--json", "--plugin-dir"])
        .arg(folder)
        .env("BLOCKSTREAMER_MISBEHAVE", misbehaviour)
        .env_remove("BLOCKSTREAMER_PLUGIN_PATH")
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}: {stderr}", output.status);
    (serde_json::from_slice(&output.stdout).unwrap(), stderr)
}

/// The names of the families from `folder`.
fn names(listing: &Value, folder: &Path) -> Vec<String> {
    let ours = |family: &&Value| is_from(family, folder);
    let families = listing["families"].as_array().unwrap().iter().filter(ours);
    families.map(|family| family["name"].as_str().unwrap().to_owned()).collect()
}

fn is_from(entry: &Value, folder: &Path) -> bool {
    let folder = folder.canonicalize().unwrap();
    entry["path"].as_str().is_some_and(|path| Path::new(path).starts_with(&folder))
}

/// The reason why `file` was refused.
fn reason(listing: &Value, folder: &Path, file: &str) -> String {
    let of_file = |entry: &&Value| {
        is_from(entry, folder) && Path::new(entry["path"].as_str().unwrap()).ends_with(file)
    };
    let entries: Vec<_> = listing["refused"].as_array().unwrap().iter().filter(of_file).collect();
    assert_eq!(entries.len(), 1, "refusals of {file} in {listing:#}");
    entries[0]["reason"].as_str().unwrap().to_owned()
}

/// The misbehaving plugin is refused with all of `words`, and the good one is found.
fn assert_refused_with(misbehaviour: &str, words: &[&str]) {
    let folder = plugin_folder();
    let (listing, _) = families(folder.path(), misbehaviour);
    assert_eq!(names(&listing, folder.path()), ["well-behaved"]);
    let reason = reason(&listing, folder.path(), MISBEHAVE);
    for word in words {
        assert!(reason.contains(word), "'{word}' is not in: {reason}");
    }
}

#[test]
fn two_good_plugins_are_found_with_their_sizes_and_files() {
    let folder = plugin_folder();
    let (listing, stderr) = families(folder.path(), "");
    assert_eq!(names(&listing, folder.path()), ["misbehave", "well-behaved"]);
    let all = listing["families"].as_array().unwrap();
    let family = all.iter().find(|family| family["name"] == "misbehave").unwrap();
    assert_eq!(family["sizes"], serde_json::json!(["tiny"]));
    assert_eq!(family["linked"], false);
    assert!(!listing["refused"].as_array().unwrap().iter().any(|r| is_from(r, folder.path())));
    assert_eq!(stderr, "");
}

#[test]
fn the_path_variable_is_searched_after_the_given_folders() {
    let (first, second) = (plugin_folder(), plugin_folder());
    fs::remove_file(first.path().join(WELL_BEHAVED)).unwrap();
    let output = Command::new(built::host_binary())
        .args(["families", "--json", "--plugin-dir"])
        .arg(first.path())
        .env("BLOCKSTREAMER_PLUGIN_PATH", second.path())
        .output()
        .unwrap();
    let listing: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(names(&listing, first.path()), ["misbehave"]);
    assert_eq!(names(&listing, second.path()), ["well-behaved"]);
    let kept = first.path().join(MISBEHAVE).canonicalize().unwrap();
    let reason = reason(&listing, second.path(), MISBEHAVE);
    assert!(reason.contains(kept.to_str().unwrap()), "{reason}");
}

#[test]
fn another_abi_is_refused_with_both_numbers() {
    assert_refused_with("wrong_abi", &["has ABI 2", "this host has ABI 1"]);
}

#[test]
fn another_fingerprint_is_refused_naming_the_key_with_both_values() {
    let words = ["built differently", "panic: host 'unwind', plugin 'abort'"];
    assert_refused_with("wrong_fingerprint", &words);
}

#[test]
fn a_panic_in_register_is_refused_with_its_words() {
    let words = ["panicked in register", "asked to panic in register"];
    assert_refused_with("panic_in_register", &words);
}

#[test]
fn a_panic_in_a_method_that_registration_calls_is_refused_naming_the_method() {
    for method in ["name", "model_types", "sizes"] {
        let words = [&*format!("panicked in {method}"), &format!("asked to panic in {method}")];
        assert_refused_with(&format!("panic_in_{method}"), &words);
    }
}

#[test]
fn a_null_table_no_table_and_a_bare_failure_are_told_apart() {
    assert_refused_with("null_family", &["registered a null family table"]);
    assert_refused_with("no_family", &["registered no family"]);
    assert_refused_with("silent_failure", &["status 7", "gave no reason"]);
}

#[test]
fn a_duplicate_name_is_refused_naming_both_files_and_the_first_is_kept() {
    let folder = plugin_folder();
    let (listing, _) = families(folder.path(), "duplicate");
    assert_eq!(names(&listing, folder.path()), ["well-behaved"]);
    let reason = reason(&listing, folder.path(), WELL_BEHAVED);
    let kept = folder.path().join(MISBEHAVE).canonicalize().unwrap();
    for word in ["'well-behaved'", kept.to_str().unwrap(), "first one is kept"] {
        assert!(reason.contains(word), "'{word}' is not in: {reason}");
    }
}

#[test]
fn a_library_without_our_symbols_is_refused_as_no_plugin() {
    let folder = plugin_folder();
    let source = folder.path().join("foreign.c");
    fs::write(&source, "int answer(void) { return 42; }\n").unwrap();
    let library = folder.path().join("libforeign.so");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source);
    assert!(compiler.status().unwrap().success());
    let (listing, _) = families(folder.path(), "");
    let reason = reason(&listing, folder.path(), "libforeign.so");
    assert!(reason.contains("not a BlockStreamer plugin"), "{reason}");
    assert!(reason.contains("blockstreamer_abi"), "{reason}");
    assert_eq!(names(&listing, folder.path()), ["misbehave", "well-behaved"]);
}

#[test]
fn files_that_are_no_whole_libraries_are_refused_one_by_one() {
    let folder = plugin_folder();
    let whole = fs::read(built::well_behaved()).unwrap();
    // Without the check this one is mapped and kills the host.
    fs::write(folder.path().join("cut.so"), &whole[..64 << 10]).unwrap();
    fs::write(folder.path().join("empty.so"), "").unwrap();
    fs::write(folder.path().join("text.so"), "model = \"none\"\n".repeat(100)).unwrap();
    fs::create_dir(folder.path().join("folder.so")).unwrap();
    let (listing, _) = families(folder.path(), "");
    for (file, words) in [
        ("cut.so", "is cut off"),
        ("empty.so", "cannot be loaded as a shared library"),
        ("text.so", "cannot be loaded as a shared library"),
        ("folder.so", "cannot be read"),
    ] {
        let reason = reason(&listing, folder.path(), file);
        assert!(reason.contains(words), "{file}: {reason}");
    }
    assert_eq!(names(&listing, folder.path()), ["misbehave", "well-behaved"]);
}

#[test]
fn a_panic_is_logged_with_its_place_and_does_not_reach_stderr_by_itself() {
    let folder = plugin_folder();
    let (_, stderr) = families(folder.path(), "panic_in_name");
    assert!(!stderr.contains("thread '"), "the default hook wrote: {stderr}");
    assert!(stderr.contains("ERROR") && stderr.contains("src/lib.rs:"), "{stderr}");
}

#[test]
fn an_unknown_family_or_model_type_lists_those_found() {
    let folder = plugin_folder();
    let mut registry = Registry::default();
    registry.load(&folder.path().join(WELL_BEHAVED));
    assert_eq!(registry.family("well-behaved").unwrap().model_types, ["well_behaved"]);
    let by_name = registry.family("gone").unwrap_err().to_string();
    assert!(by_name.contains("'gone'") && by_name.contains("well-behaved"), "{by_name}");
    let options = ModelOptions::default();
    let by_type =
        registry.open_model(r#"{"model_type": "gone"}"#, &options).unwrap_err().to_string();
    assert!(by_type.contains("'gone'") && by_type.contains("(well_behaved)"), "{by_type}");
    let no_type = registry.open_model("{}", &options).unwrap_err().to_string();
    assert!(no_type.contains("config.json") && no_type.contains("model_type"), "{no_type}");
    let none = Registry::default().open_model(r#"{"model_type": "gone"}"#, &options).unwrap_err();
    assert!(none.to_string().contains("families found: none"), "{none}");
}
