//! The host binary and the plugins, built as the running test was.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The folder of binaries and plugins (`target/<profile>`), everything in it up to date.
///
/// `cargo test` promises neither plugins nor host binary to a crate that does not declare them. It has
/// let go of the target folder by the time tests run, so that a cargo within it does not wait.
/// The whole workspace is built: with one `-p`, features would be unified differently, and half of the
/// dependencies compiled once more.
pub fn profile_folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let test = std::env::current_exe().expect("the test's own path");
        let folder = test.ancestors().nth(2).expect("target/<profile>/deps/<test>").to_owned();
        let profile = folder.file_name().and_then(|name| name.to_str()).expect("a profile's name");
        let profile = if profile == "debug" { "dev" } else { profile };
        let output = Command::new(env!("CARGO"))
            .args(["build", "--workspace", "--lib", "--bins", "--examples", "--quiet"])
            .args(["--profile", profile, "--target-dir"])
            .arg(folder.parent().expect("the target folder"))
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .expect("cargo runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        folder
    })
}

/// The `blockstreamer` binary.
pub fn host_binary() -> PathBuf {
    profile_folder().join("blockstreamer")
}

/// The plugin that misbehaves on request.
pub fn misbehave() -> PathBuf {
    profile_folder().join("libmisbehave.so")
}

/// The plugin that does not.
pub fn well_behaved() -> PathBuf {
    profile_folder().join("examples").join("libwell_behaved.so")
}
