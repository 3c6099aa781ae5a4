//! The command line as a user types it: the built binary, real files, exit codes and messages.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

mod bad_disk;
mod bad_model;
mod bad_run;
mod bench;
mod conformance;
mod harmony;
mod images;
mod merge;
mod plan;
mod resume;
mod shards;
mod sources;
mod train;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use blockstreamer_host::cli::Cli;
use blockstreamer_host::commands;
use blockstreamer_tests::built;
use clap::Parser;
use serde_json::Value;
use tempfile::TempDir;

/// What a finished command left behind.
struct Finished {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Finished {
    /// It did its work.
    #[track_caller]
    fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{}{}", self.stdout, self.stderr);
        self
    }

    /// Its work failed, and the message holds every one of `words`.
    #[track_caller]
    fn failed(self, words: &[&str]) -> Self {
        assert_eq!(self.code, 1, "{}{}", self.stdout, self.stderr);
        for word in words {
            assert!(self.stderr.contains(word), "no '{word}' in: {}", self.stderr);
        }
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        self
    }

    /// The one JSON document on stdout.
    #[track_caller]
    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", self.stdout))
    }
}

/// The program with these words, not started yet.
fn command(words: &[&str]) -> Command {
    let mut command = Command::new(built::host_binary());
    // libtorch's threads wait for each other by spinning, which on a busy machine takes longer than
    // any of this work.
    command.args(words).env("OMP_NUM_THREADS", "1").env_remove("BLOCKSTREAMER_PLUGIN_PATH");
    command
}

fn finish(mut command: Command) -> Finished {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Finished {
        code: output.status.code().unwrap_or(-1),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

fn blockstreamer(words: &[&str]) -> Finished {
    finish(command(words))
}

/// What the program would do with these words, without the half second that it takes to start it.
fn in_process(words: &[&str]) -> Finished {
    static PLUGINS: OnceLock<PathBuf> = OnceLock::new();
    let plugins = PLUGINS.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cli-plugins");
        fs::create_dir_all(&folder).unwrap();
        let name = "libblockstreamer_qwen3_vl.so";
        fs::copy(built::profile_folder().join(name), folder.join(name)).unwrap();
        folder
    });
    let before = ["blockstreamer", "--plugin-dir", plugins.to_str().unwrap()];
    let cli = Cli::try_parse_from(before.iter().chain(words)).unwrap();
    let (code, stderr) = match commands::run(cli) {
        Ok(true) => (0, String::new()),
        Ok(false) => (1, String::new()),
        Err(error) => (1, format!("{error:#}")),
    };
    Finished { code, stdout: String::new(), stderr }
}

/// A temporary folder whose paths are text, as on a command line.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn write(&self, name: &str, content: &str) -> String {
        fs::write(self.path(name), content).unwrap();
        self.path(name)
    }

    /// A copy of the tiny model that may be damaged.
    fn model(&self) -> String {
        copy_folder(Path::new(model()), Path::new(&self.path("model")));
        self.path("model")
    }

    /// `train` on the tiny model into the folder `out` of this one.
    fn train(&self, out: &str, extra: &[&str]) -> Finished {
        blockstreamer(&words(model(), &rows(), &self.path(out), extra))
    }
}

/// The words of a short training run whose blocks are read every time: the tiny model would stay on the
/// device.
fn words<'a>(model: &'a str, data: &'a str, out: &'a str, extra: &[&'a str]) -> Vec<&'a str> {
    let mut words = vec!["train", "--model", model, "--data", data, "--out", out];
    let settings = [
        "device=cpu",
        "batch_size=2",
        "sequence_length=256",
        "learning_rate=0.01",
        "stream.tier=disk",
    ];
    for setting in settings {
        words.extend(["--set", setting]);
    }
    words.extend(extra);
    words
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_folder(&path, &target);
        } else {
            fs::copy(&path, &target).unwrap();
        }
    }
}

/// The tiny model, written once.
fn model() -> &'static str {
    static MODEL: OnceLock<String> = OnceLock::new();
    MODEL.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cli-model");
        let folder = folder.to_str().unwrap().to_owned();
        blockstreamer(&["synth", "qwen3-vl:tiny", "--out", &folder]).ok();
        folder
    })
}

/// The bundled demo rows.
fn rows() -> String {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../host/assets/demo.jsonl").to_owned()
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/qwen3_vl_text")
}

/// The lines of a run's `metrics.jsonl`.
#[track_caller]
fn metrics(run: &str) -> Vec<Value> {
    let text = fs::read_to_string(Path::new(run).join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The losses of a run, as they are written.
#[track_caller]
fn losses(run: &str) -> Vec<String> {
    metrics(run).iter().map(|line| line["loss"].to_string()).collect()
}

fn adapter_bytes(run: &str) -> Vec<u8> {
    fs::read(Path::new(run).join("adapter/adapter_model.safetensors")).unwrap()
}

/// The names in a folder, hidden ones included, sorted.
fn names(folder: impl AsRef<Path>) -> Vec<String> {
    let name = |entry: fs::DirEntry| entry.file_name().into_string().unwrap();
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| name(entry.unwrap())).collect();
    names.sort();
    names
}
