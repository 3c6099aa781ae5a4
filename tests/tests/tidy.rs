//! Rules of the repository that no compiler checks.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use blockstreamer_host::cli::Cli;
use clap::CommandFactory;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// The files under version control, or new, relative to the root.
fn files() -> Vec<String> {
    let list = ["ls-files", "--cached", "--others", "--exclude-standard"];
    let output = Command::new("git").args(list).current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter(|file| root().join(file).exists()).map(str::to_owned).collect()
}

#[test]
fn no_source_file_is_longer_than_800_lines() {
    let sources: Vec<_> = files()
        .into_iter()
        .filter(|file| [".rs", ".py", ".cpp"].iter().any(|end| file.ends_with(end)))
        .collect();
    assert!(sources.len() > 100, "{}", sources.len());
    for file in sources {
        let num_lines = fs::read_to_string(root().join(&file)).unwrap().lines().count();
        assert!(num_lines <= 800, "{file} has {num_lines} lines");
    }
}

#[test]
fn plugins_bring_nothing_that_has_process_wide_state() {
    for folder in fs::read_dir(root().join("plugins")).unwrap() {
        let manifest = folder.unwrap().path().join("Cargo.toml");
        let output = Command::new(env!("CARGO"))
            .args(["tree", "--edges", "normal", "--prefix", "none", "--offline", "--manifest-path"])
            .arg(&manifest)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let tree = String::from_utf8(output.stdout).unwrap();
        let crates: BTreeSet<_> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
        assert!(crates.contains("blockstreamer-core"), "{crates:?}");
        for forbidden in ["rayon", "tokio", "tracing-subscriber", "indicatif", "tokenizers"] {
            assert!(!crates.contains(forbidden), "{} brings {forbidden}", manifest.display());
        }
    }
}

#[test]
fn the_code_map_names_what_exists_and_all_that_matters() {
    let Ok(text) = fs::read_to_string(root().join("ARCHITECTURE.md")) else { return };
    let files = files();
    // Every other part between backticks is quoted.
    for quoted in text.split('`').skip(1).step_by(2) {
        let exists = match (quoted.ends_with('/') || quoted.ends_with(".rs"), quoted.contains('/'))
        {
            (false, _) => true,
            (true, true) => root().join(quoted).exists(),
            // A bare name stands for a file that several folders have.
            (true, false) => files.iter().any(|file| file.ends_with(&format!("/{quoted}"))),
        };
        assert!(exists, "ARCHITECTURE.md names `{quoted}`, which does not exist");
    }
    let crates = files.iter().filter_map(|file| file.strip_suffix("Cargo.toml"));
    let folders: BTreeSet<_> = files
        .iter()
        .filter_map(|file| file.strip_prefix("core/src/")?.split_once('/'))
        .map(|(folder, _)| format!("core/src/{folder}/"))
        .collect();
    assert!(folders.len() > 5, "{folders:?}");
    for folder in crates.map(str::to_owned).chain(folders) {
        assert!(
            text.contains(&format!("`{folder}`")) || folder.is_empty(),
            "ARCHITECTURE.md lacks `{folder}`"
        );
    }
}

/// The command line is a contract: a word that is added or taken away is written here too.
#[test]
fn the_command_line_is_the_one_agreed_on() {
    let mut command = Cli::command();
    command.build();
    let mut found = Vec::new();
    let listed = |command: &clap::Command| -> Vec<clap::Command> {
        let subs = command.get_subcommands().filter(|sub| sub.get_name() != "help");
        subs.cloned().collect()
    };
    let subs = listed(&command).into_iter().flat_map(|sub| match &*listed(&sub) {
        [] => vec![(sub.get_name().to_owned(), sub)],
        inner => (inner.iter())
            .map(|inner| (format!("{} {}", sub.get_name(), inner.get_name()), inner.clone()))
            .collect(),
    });
    for (name, sub) in subs {
        let mut words: Vec<_> = sub
            .get_arguments()
            .map(|argument| match argument.get_long() {
                Some(long) => format!("--{long}"),
                None => argument.get_id().as_str().to_uppercase(),
            })
            .filter(|word| !["--help", "--version", "--plugin-dir"].contains(&word.as_str()))
            .collect();
        words.sort();
        found.push(format!("{name} {}", words.join(" ")));
    }
    assert_eq!(
        found,
        [
            "families --json",
            "synth --layers --max-file --out --seed MODEL",
            "plan --expert-groups --expert-layout --json --mode --patches --ram --tokens --top-fraction \
             --vram MODEL",
            "shard --expert-groups --expert-layout --out --verify MODEL",
            "train --data --expert-groups --expert-layout --model --out --ram --resume --set --trace \
             --vram CONFIG",
            "eval --adapter --batch-size --data --date --device --dtype --expert-groups --expert-layout --json \
             --max-pixels --min-pixels --prefetch-ahead --ram --sequence-length --tier --vram MODEL",
            "merge --adapter --device --expert-layout --experts --json --max-file --out MODEL",
            "bench stream --block-size --blocks --chunk --device --dir --json --num-chunks --passes \
             --prefetch-ahead --queue-depth --read --tier",
            "bench step --cold --device --dtype --expert-groups --expert-layout --json --layers --prefetch-ahead --ram --rank --steps \
             --target-modules --tier --tokens --top-fraction --trace --vram --warmup --work-dir MODEL",
            "conformance --device --dtype --golden --json FAMILY",
            "doctor --json --path",
        ]
    );
    let global = command.get_arguments().filter(|argument| argument.is_global_set());
    let global: Vec<_> = global.filter_map(|argument| argument.get_long()).collect();
    assert!(global.contains(&"plugin-dir"), "{global:?}");
}

/// The names of the methods in the block that `opening` begins.
fn methods(file: &str, opening: &str) -> BTreeSet<String> {
    let text = fs::read_to_string(root().join(file)).unwrap();
    let start = text.find(opening).unwrap_or_else(|| panic!("{file} lacks '{opening}'"));
    let block = &text[start..start + text[start..].find("\n}").unwrap()];
    let names = block.lines().filter_map(|line| line.strip_prefix("    fn ")?.split('(').next());
    names.map(str::to_owned).collect()
}

/// A method with a default that a guard forgets to hand on is never called across the boundary.
#[test]
fn the_guards_of_the_plugin_boundary_hand_every_method_on() {
    let (family, scope) = ("core/src/family.rs", "core/src/scope.rs");
    let (guard, host_guard) = ("core/src/plugin/guard.rs", "core/src/plugin/host_guard.rs");
    for (file, wanted, guard, found) in [
        (family, "pub trait ModelFamily", guard, "impl ModelFamily for GuardedFamily"),
        (family, "pub trait ModelFamily", host_guard, "impl ModelFamily for HostFamily"),
        (family, "pub trait Model:", guard, "impl Model for GuardedModel"),
        (family, "pub trait Model:", host_guard, "impl Model for HostModel"),
        (scope, "pub trait Scope", host_guard, "impl Scope for GuardedScope"),
    ] {
        let wanted = methods(file, wanted);
        assert!(wanted.len() > 5, "{wanted:?}");
        assert_eq!(methods(guard, found), wanted, "{found}");
    }
}
