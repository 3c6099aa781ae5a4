//! `doctor`: what this machine offers, as measured.
//!
//! A device, a disk or a plugin that cannot be used is what it was asked to find out, and part of the report:
//! the command has done its work then, too.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use blockstreamer_core::device::{cuda_info, host_to_device_gb_per_s, load_cuda};
use blockstreamer_core::plan::{host_budget_bytes, host_limit_bytes};
use blockstreamer_core::plugin::fingerprint;
use blockstreamer_core::read::{ReadOffer, drive_gb_per_s};
use serde_json::{Value, json};
use tch::Device;

use super::{print, print_json};
use crate::plugins::Registry;
use crate::size::Size;

/// Bytes that are copied to the device to measure the link.
const LINK_SAMPLE_BYTES: usize = 256 << 20;
/// Bytes that are written and read to measure the disk, if there is room for them.
const DISK_SAMPLE_BYTES: u64 = 1 << 30;

pub(super) fn run(registry: &Registry, json: bool, path: &Path) -> Result<()> {
    let report = json!({
        "cuda": cuda(),
        "built_with": fingerprint::as_str().lines().collect::<Vec<_>>(),
        "memory": memory(),
        "disk": disk(path),
        "plugins": {
            "families": registry.families().iter().map(|found| &found.name).collect::<Vec<_>>(),
            "refused": registry.refused().iter().map(|refused| json!({
                "path": refused.path,
                "reason": refused.reason,
            })).collect::<Vec<_>>(),
        },
    });
    if json {
        return print_json(&report);
    }
    print(&lines(&report, 0))
}

/// Indented `key: value` lines.
fn lines(value: &Value, depth: usize) -> String {
    let Value::Object(entries) = value else { return value.to_string() };
    let line = |(key, value): (&String, &Value)| {
        let indent = "  ".repeat(depth);
        match value {
            Value::Object(_) => format!("{indent}{key}\n{}", lines(value, depth + 1)),
            Value::String(text) => format!("{indent}{key}: {text}"),
            Value::Array(items) => {
                let items =
                    items.iter().map(|item| item.as_str().map_or(item.to_string(), str::to_owned));
                format!("{indent}{key}: {}", items.collect::<Vec<_>>().join(", "))
            }
            Value::Number(number) if key.ends_with("_bytes") => {
                let size = Size { num_bytes: number.as_u64().unwrap_or_default() };
                format!("{indent}{}: {size}", key.trim_end_matches("_bytes"))
            }
            _ => format!("{indent}{key}: {value}"),
        }
    };
    entries.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn cuda() -> Value {
    if let Err(reason) = load_cuda() {
        return json!({ "available": false, "reason": reason.to_string() });
    }
    match (cuda_info(0), host_to_device_gb_per_s(Device::Cuda(0), LINK_SAMPLE_BYTES)) {
        (Ok(info), Ok(rate)) => json!({
            "available": true,
            "name": info.name,
            "total_bytes": info.total_bytes,
            "free_bytes": info.free_bytes,
            "host_to_device_gb_per_s": round(rate),
        }),
        (Err(error), _) => json!({ "available": false, "reason": error.to_string() }),
        (_, Err(error)) => json!({ "available": false, "reason": error.to_string() }),
    }
}

fn memory() -> Value {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let line = meminfo.lines().find(|line| line.starts_with(name))?;
        let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(kib << 10)
    };
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let memlock = limits.lines().find(|line| line.starts_with("Max locked memory"));
    json!({
        "total_bytes": field("MemTotal:"),
        "available_bytes": field("MemAvailable:"),
        "cgroup_limit_bytes": host_limit_bytes(),
        "a_run_may_take_bytes": host_budget_bytes().ok(),
        // "unlimited" is no number.
        "locked_memory_limit_bytes": memlock
            .and_then(|line| line.split_whitespace().nth(3))
            .map(|limit| limit.parse::<u64>().map_or_else(|_| json!(limit), |bytes| json!(bytes))),
    })
}

fn disk(path: &Path) -> Value {
    measure_disk(path)
        .unwrap_or_else(|error| json!({ "path": path, "error": format!("{error:#}") }))
}

/// How files in `folder` are read, and how fast: a file that was just written, past the page cache in
/// the best way, and through it as other programs do, with its pages dropped.
fn measure_disk(folder: &Path) -> Result<Value> {
    let room = rustix::fs::statvfs(folder)
        .with_context(|| format!("cannot inspect {}", folder.display()))?;
    // Never more than a quarter of what is left.
    let sample_bytes = DISK_SAMPLE_BYTES.min(room.f_bavail.saturating_mul(room.f_frsize) / 4);
    let mut file = tempfile::NamedTempFile::new_in(folder)
        .with_context(|| format!("cannot write into {}", folder.display()))?;
    // Not all zeros: some file systems store those without writing them.
    let chunk: Vec<u8> =
        (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for _ in 0..(sample_bytes / chunk.len() as u64).max(1) {
        file.write_all(&chunk)
            .with_context(|| format!("cannot write into {}", folder.display()))?;
    }
    file.as_file().sync_all()?;
    let offer = ReadOffer::of(file.path())?;
    let rate = drive_gb_per_s(&[file.path()], u64::MAX)?;
    Ok(json!({
        "path": folder,
        "reader": offer.choice(),
        "io_uring": offer.io_uring.map_or_else(|reason| json!(reason), |()| json!(true)),
        "direct_alignment_bytes": offer.direct.map_or_else(|reason| json!(reason), |bytes| json!(bytes)),
        "read_gb_per_s": round(rate.gb_per_s),
        "read_with": rate.how,
        "buffered_gb_per_s": buffered_gb_per_s(file.path())?,
    }))
}

/// Rate of plain reads, one after another.
fn buffered_gb_per_s(path: &Path) -> Result<f64> {
    let mut reader = File::open(path)?;
    rustix::fs::fadvise(&reader, 0, None, rustix::fs::Advice::DontNeed)?;
    let mut buffer = vec![0; 4 << 20];
    let mut read_bytes = 0;
    let start = Instant::now();
    loop {
        match reader.read(&mut buffer)? {
            0 => break,
            num_bytes => read_bytes += num_bytes,
        }
    }
    Ok(round(read_bytes as f64 / start.elapsed().as_secs_f64() / 1e9))
}

fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}
