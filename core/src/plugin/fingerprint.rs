//! What must be equal on both sides of the boundary.
//!
//! One `key=value` a line: version, features and source hash of this crate, release and commit of
//! rustc, target, panic strategy, libtorch, and for each crate whose types cross its locked version
//! with checksum.

use std::ffi::CStr;

const TEXT: &str = concat!(include_str!(concat!(env!("OUT_DIR"), "/fingerprint.txt")), "\0");

/// The fingerprint that was compiled into this copy of the crate.
pub fn as_c_str() -> &'static CStr {
    CStr::from_bytes_until_nul(TEXT.as_bytes()).unwrap_or_default()
}

/// The fingerprint that was compiled into this copy of the crate.
pub fn as_str() -> &'static str {
    TEXT.trim_end_matches('\0')
}

/// The keys in which a host and a plugin differ, with both values side by side; `None` if they are
/// equal.
pub fn difference(host: &str, plugin: &str) -> Option<String> {
    if host == plugin {
        return None;
    }
    let pairs = |text: &'_ str| -> Vec<(String, String)> {
        let split = |line: &str| {
            let (key, value) = line.split_once('=').unwrap_or((line, ""));
            (key.to_owned(), format!("'{value}'"))
        };
        text.lines().map(split).collect()
    };
    let (host, plugin) = (pairs(host), pairs(plugin));
    let absent = "(absent)".to_owned();
    let find = |all: &[(String, String)], key: &str| {
        all.iter().find(|pair| pair.0 == key).map_or(absent.clone(), |pair| pair.1.clone())
    };
    let only_plugin = plugin.iter().filter(|pair| find(&host, &pair.0) == absent);
    let differing: Vec<_> = host
        .iter()
        .chain(only_plugin)
        .map(|(key, _)| (key, find(&host, key), find(&plugin, key)))
        .filter(|(_, host, plugin)| host != plugin)
        .map(|(key, host, plugin)| format!("{key}: host {host}, plugin {plugin}"))
        .collect();
    Some(differing.join("; "))
}

// The build script's module, to test it.
#[cfg(test)]
#[allow(dead_code)]
#[path = "../../build/fingerprint.rs"]
mod build;

#[cfg(test)]
mod tests {
    use super::*;

    const LOCK: &str = r#"
version = 4

[[package]]
name = "inventory"
version = "0.3.25"
source = "registry+x"
checksum = "aa"
dependencies = [
 "tch",
]

[[package]]
name = "tch"
version = "0.24.0"
source = "registry+x"
checksum = "bb"

[[package]]
name = "torch-sys"
version = "0.24.0"
source = "git+x#0123"

[[package]]
name = "tracing"
version = "0.1.44"

[[package]]
name = "tracing-core"
version = "0.1.36"
checksum = "cc"
"#;

    #[test]
    fn the_fingerprint_names_everything_that_decides_a_layout() {
        let text = as_str();
        assert_eq!(as_c_str().to_str(), Ok(text));
        for key in [
            "core",
            "core_source",
            "core_features",
            "rustc",
            "target",
            "panic",
            "libtorch",
            "tch",
            "torch-sys",
            "tracing",
            "tracing-core",
            "inventory",
        ] {
            let lines = text.lines().filter(|line| line.starts_with(&format!("{key}=")));
            assert_eq!(lines.count(), 1, "{key} in {text}");
        }
        assert!(text.contains(&format!("core={}\n", env!("CARGO_PKG_VERSION"))), "{text}");
        assert!(text.contains("panic=unwind\n"), "{text}");
        let libtorch = text.lines().find_map(|line| line.strip_prefix("libtorch=")).unwrap();
        assert!(libtorch.starts_with("2.11.0"), "{libtorch}");
    }

    #[test]
    fn a_locked_version_a_checksum_or_a_commit_that_changes_shows_under_its_crate() {
        let lines = build::locked_versions(LOCK).unwrap();
        let expected = [
            ("inventory", "0.3.25 aa"),
            ("tch", "0.24.0 bb"),
            ("torch-sys", "0.24.0 git+x#0123"),
            ("tracing", "0.1.44 path"),
            ("tracing-core", "0.1.36 cc"),
        ];
        assert_eq!(lines, expected.map(|(name, value)| (name, value.to_owned())));

        let updated = build::locked_versions(&LOCK.replace("\"bb\"", "\"bc\"")).unwrap();
        assert_eq!(updated[1], ("tch", "0.24.0 bc".to_owned()));
        assert_eq!(build::locked_versions("version = 4"), Err("inventory"));
    }

    #[test]
    fn features_are_listed_in_one_order() {
        let names = ["CARGO_FEATURE_URING", "PATH", "CARGO_FEATURE_CUDA"].map(str::to_owned);
        assert_eq!(build::features(names.into_iter()), "cuda,uring");
    }

    #[test]
    fn a_difference_names_only_the_keys_that_differ_with_both_values() {
        assert_eq!(difference("a=1\nb=2\n", "a=1\nb=2\n"), None);
        let both = difference("a=1\nb=2\nc=3\n", "a=1\nb=9\nd=4\n").unwrap();
        assert_eq!(
            both,
            "b: host '2', plugin '9'; c: host '3', plugin (absent); d: host (absent), plugin '4'"
        );
    }
}
