//! Writes down everything that must be equal in a host and its plugins for Rust types to cross between
//! them: `fingerprint.txt` in `OUT_DIR`, one `key=value` a line.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Crates whose types cross the boundary, or whose statics both sides fill.
const BOUNDARY_CRATES: [&str; 5] = ["inventory", "tch", "torch-sys", "tracing", "tracing-core"];

/// Writes the file and tells cargo when to do it again.
pub(crate) fn emit() -> Result<(), String> {
    let out_dir = PathBuf::from(variable("OUT_DIR")?);
    let manifest_dir = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
    let lock = find_lock(&[&out_dir, &manifest_dir])?;
    let source = manifest_dir.join("src");
    for input in [&lock, &source, &manifest_dir.join("build"), &manifest_dir.join("build.rs")] {
        println!("cargo::rerun-if-changed={}", input.display());
    }

    let mut lines = vec![
        ("core", variable("CARGO_PKG_VERSION")?),
        ("core_source", source_hash(&source)?),
        ("core_features", features(env::vars().map(|(name, _)| name))),
        ("rustc", rustc_version()?),
        ("target", variable("TARGET")?),
        ("panic", variable("CARGO_CFG_PANIC")?),
        ("libtorch", libtorch_version()),
    ];
    lines.extend(locked_versions(&read(&lock)?).map_err(|name| {
        format!("{} has no entry for {name}; run `cargo generate-lockfile`", lock.display())
    })?);
    let text: String = lines.iter().map(|(key, value)| format!("{key}={value}\n")).collect();
    let path = out_dir.join("fingerprint.txt");
    fs::write(&path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

/// Version and checksum of each boundary crate, from the text of a `Cargo.lock`.
/// The error is the name of the crate that is not in it.
pub(crate) fn locked_versions(lock: &str) -> Result<Vec<(&'static str, String)>, &'static str> {
    let mut found: BTreeMap<&'static str, Vec<String>> = BTreeMap::new();
    for package in lock.split("[[package]]").skip(1) {
        let field = |key: &str| {
            let mut lines = package.lines();
            lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(" = \"")?.strip_suffix('"'))
        };
        let Some(name) = BOUNDARY_CRATES.into_iter().find(|name| field("name") == Some(name))
        else {
            continue;
        };
        // A crate from a path has no checksum, one from git has its commit in the source.
        let origin = field("checksum").or_else(|| field("source")).unwrap_or("path");
        let version = field("version").unwrap_or_default();
        found.entry(name).or_default().push(format!("{version} {origin}"));
    }
    let line = |name| Ok((name, found.get(name).ok_or(name)?.join(", ")));
    BOUNDARY_CRATES.into_iter().map(line).collect()
}

/// Cargo's features of this crate among the names of the environment's variables.
pub(crate) fn features(variables: impl Iterator<Item = String>) -> String {
    let mut features: Vec<_> = variables
        .filter_map(|name| Some(name.strip_prefix("CARGO_FEATURE_")?.to_lowercase()))
        .collect();
    features.sort();
    features.join(",")
}

/// The lock file that this build obeys: that of the workspace whose target folder holds `OUT_DIR`,
/// or of the one that holds this crate.
fn find_lock(starts: &[&Path]) -> Result<PathBuf, String> {
    let mut folders = starts.iter().flat_map(|start| start.ancestors());
    folders.find_map(|folder| Some(folder.join("Cargo.lock")).filter(|lock| lock.is_file())).ok_or(
        "no Cargo.lock above the target folder or above blockstreamer-core: the plugin boundary \
         needs the locked versions; build with the target folder inside the workspace"
            .to_owned(),
    )
}

/// Hash of this crate's source: layouts may change without a new version number.
fn source_hash(folder: &Path) -> Result<String, String> {
    // The hash only has to be equal under one rustc, which is part of the fingerprint.
    let mut hasher = DefaultHasher::new();
    let mut folders = vec![folder.to_owned()];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        let entries =
            fs::read_dir(&folder).and_then(|entries| entries.collect::<Result<Vec<_>, _>>());
        for entry in
            entries.map_err(|error| format!("cannot list {}: {error}", folder.display()))?
        {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    for file in &files {
        let name = file.strip_prefix(folder).unwrap_or(file).to_string_lossy();
        for part in [name.as_ref(), &read(file)?] {
            hasher.write_usize(part.len());
            hasher.write(part.as_bytes());
        }
    }
    Ok(format!("{:016x}", hasher.finish()))
}

fn rustc_version() -> Result<String, String> {
    let rustc = variable("RUSTC")?;
    let output = Command::new(&rustc).arg("-vV").output();
    let output = output.map_err(|error| format!("cannot run {rustc} -vV: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let field = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
    let (Some(release), Some(commit)) = (field("release: "), field("commit-hash: ")) else {
        return Err(format!("{rustc} -vV does not name a release and a commit: {text}"));
    };
    Ok(format!("{release} {commit}"))
}

/// What the libtorch folder says of itself: a Python wheel in `version.py`, a C++ archive in
/// `build-version`. Otherwise tch's own pairing decides, and tch is a line of its own.
fn libtorch_version() -> String {
    // torch-sys tells its dependents which `lib` folder it links against.
    println!("cargo::rerun-if-env-changed=DEP_TCH_LIBTORCH_LIB");
    let lib = env::var("DEP_TCH_LIBTORCH_LIB").unwrap_or_default();
    let root = Path::new(&lib).parent().unwrap_or(Path::new(""));
    let version = |file: &str| {
        let text = fs::read_to_string(root.join(file)).ok()?;
        println!("cargo::rerun-if-changed={}", root.join(file).display());
        match file {
            "build-version" => Some(text.trim().to_owned()),
            _ => text.lines().find_map(|line| {
                Some(line.strip_prefix("__version__ = '")?.strip_suffix('\'')?.to_owned())
            }),
        }
    };
    version("version.py")
        .or_else(|| version("build-version"))
        .unwrap_or_else(|| "as tch requires".to_owned())
}

fn variable(name: &str) -> Result<String, String> {
    env::var(name).map_err(|_| format!("cargo did not set {name}"))
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}
