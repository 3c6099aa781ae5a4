//! A timeline of reads, copies and visits in the format of Chrome's tracing, which Perfetto opens.
//!
//! One track for each kind of work. Where pieces of work of one kind overlap, as reads do, they are
//! dealt to as many tracks as it takes, because a track shows nested work only.

use std::path::Path;

use anyhow::{Context, Result, bail};
use blockstreamer_core::block::BlockSpec;
use blockstreamer_core::checkpoint::atomic::{AtomicFile, write_file};
use blockstreamer_core::stream::{BlockStream, Lane, Span};
use serde_json::{Value, json};

/// Steps that a trace shows: enough to see the boundary of two steps twice, and a file of some megabytes
/// at most. They are the ones after the first, which is no step like the others, unless it is the only one.
pub(crate) const TRACED_STEPS: u64 = 3;

/// Neighbours that overlap by less were measured by clocks of this resolution and do not overlap.
const RESOLUTION_US: f64 = 2.0;
/// Tracks that one kind of work may take: its numbers are apart by this.
const TRACKS_PER_LANE: usize = 1000;

/// Refuses a file that could not be written when the time comes: tries it, and leaves nothing.
///
/// # Errors
/// When the folder of `path` is none or nothing can be written there, or `path` is a folder.
pub fn check_path(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if path.is_dir() || !folder.unwrap_or(Path::new(".")).is_dir() {
        bail!("--trace {}: name a file in a folder that exists", path.display());
    }
    let tried = AtomicFile::create(path).and_then(|mut file| file.write(b"{}"));
    tried.with_context(|| {
        format!("--trace {}: name a file in a folder that can be written", path.display())
    })
}

/// Ends the trace of `stream` and writes it to `path`. Returns whether it is there: a file that cannot be
/// written after all costs the trace, with a warning, and not the run.
///
/// # Errors
/// When the device cannot be asked what happened.
pub(crate) fn finish(path: &Path, stream: &BlockStream) -> Result<bool> {
    let written = write(path, &stream.take_trace()?, stream.blocks());
    if let Err(error) = &written {
        tracing::warn!("{error:#}");
    }
    Ok(written.is_ok())
}

/// Writes `spans` as the file `path`, whole or not at all. `blocks` gives their names.
///
/// # Errors
/// When the file cannot be written.
fn write(path: &Path, spans: &[Span], blocks: &[BlockSpec]) -> Result<()> {
    let text = serde_json::to_string(&document(spans, blocks))?;
    write_file(path, text.as_bytes())
        .with_context(|| format!("the trace {} was not written", path.display()))
}

fn document(spans: &[Span], blocks: &[BlockSpec]) -> Value {
    let mut events = vec![metadata("process_name", 0, json!({ "name": "blockstreamer" }))];
    for (order, (lane, name)) in
        [(Lane::Read, "reads"), (Lane::Copy, "copies"), (Lane::Compute, "compute")]
            .into_iter()
            .enumerate()
    {
        let of_lane = spans.iter().filter(|span| span.lane == lane);
        let tracks = deal(of_lane.collect());
        for (number, track) in tracks.iter().enumerate() {
            let thread = (order + 1) * TRACKS_PER_LANE + number;
            let name = if number == 0 { name.into() } else { format!("{name} ({})", number + 1) };
            events.push(metadata("thread_name", thread, json!({ "name": name })));
            events.push(metadata("thread_sort_index", thread, json!({ "sort_index": thread })));
            events.extend(track.iter().map(|(start_us, span)| {
                json!({
                    "ph": "X",
                    "name": blocks.get(span.block.0).map_or("?", |block| &block.name),
                    "cat": name,
                    "pid": 1,
                    "tid": thread,
                    "ts": start_us,
                    "dur": (span.end_ms * 1e3 - start_us).max(0.0),
                    "args": { "block": span.block.0, "bytes": span.num_bytes },
                })
            }));
        }
    }
    json!({ "displayTimeUnit": "ms", "traceEvents": events })
}

fn metadata(name: &str, thread: usize, args: Value) -> Value {
    json!({ "ph": "M", "name": name, "pid": 1, "tid": thread, "args": args })
}

/// The spans by start, on as few tracks as keep those of one track apart, with their starts in
/// microseconds. At least one track, so that a kind of work that did not happen has its row, too.
fn deal(mut spans: Vec<&Span>) -> Vec<Vec<(f64, &Span)>> {
    spans.sort_by(|left, right| left.start_ms.total_cmp(&right.start_ms));
    let mut tracks: Vec<(f64, Vec<(f64, &Span)>)> = vec![(f64::NEG_INFINITY, Vec::new())];
    for span in spans {
        let (start_us, end_us) = (span.start_ms * 1e3, span.end_ms * 1e3);
        let free = tracks.iter_mut().find(|(until_us, _)| *until_us <= start_us + RESOLUTION_US);
        match free {
            Some((until_us, track)) => {
                let start_us = start_us.max(*until_us);
                track.push((start_us, span));
                *until_us = end_us.max(start_us);
            }
            None => tracks.push((end_us, vec![(start_us, span)])),
        }
    }
    tracks.into_iter().map(|(_, track)| track).collect()
}

#[cfg(test)]
mod tests {
    use blockstreamer_core::block::{BlockIndex, Placement};

    use super::*;

    fn span(lane: Lane, block: usize, start_ms: f64, end_ms: f64) -> Span {
        Span { lane, block: BlockIndex(block), start_ms, end_ms, num_bytes: 7 }
    }

    fn blocks() -> Vec<BlockSpec> {
        let spec = |name| BlockSpec::pack(name, Placement::Streamed, []).unwrap();
        vec![spec("layers.0"), spec("layers.1")]
    }

    fn of_phase<'a>(document: &'a Value, phase: &str) -> Vec<&'a Value> {
        let events = document["traceEvents"].as_array().unwrap();
        events.iter().filter(|event| event["ph"] == phase).collect()
    }

    #[test]
    fn a_file_holds_each_span_in_microseconds_on_the_named_track_of_its_kind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let spans = [
            span(Lane::Compute, 1, 4.5, 5.0),
            span(Lane::Copy, 1, 2.0, 4.5),
            span(Lane::Read, 0, 0.25, 2.0),
        ];
        write(&path, &spans, &blocks()).unwrap();
        let document: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let found: Vec<_> = of_phase(&document, "X")
            .iter()
            .map(|event| {
                assert_eq!(event["args"]["bytes"], 7);
                let number = |key: &str| event[key].as_f64().unwrap();
                (event["name"].as_str().unwrap(), event["tid"].clone(), number("ts"), number("dur"))
            })
            .collect();
        assert_eq!(
            found,
            [
                ("layers.0", json!(1000), 250.0, 1750.0),
                ("layers.1", json!(2000), 2000.0, 2500.0),
                ("layers.1", json!(3000), 4500.0, 500.0)
            ]
        );
        let named: Vec<_> = of_phase(&document, "M")
            .into_iter()
            .filter(|event| event["name"] == "thread_name")
            .map(|event| (event["tid"].clone(), event["args"]["name"].as_str().unwrap()))
            .collect();
        assert_eq!(
            named,
            [(json!(1000), "reads"), (json!(2000), "copies"), (json!(3000), "compute")]
        );
    }

    #[test]
    fn spans_of_a_track_are_in_order_and_never_overlap() {
        // Two reads at a time, given out of order, and a copy that ends when the next begins, or nearly.
        let spans = [
            span(Lane::Read, 0, 3.0, 5.0),
            span(Lane::Read, 1, 0.0, 2.0),
            span(Lane::Read, 0, 1.0, 3.0),
            span(Lane::Copy, 0, 0.0, 1.0),
            span(Lane::Copy, 1, 0.9995, 2.0),
        ];
        let document = document(&spans, &blocks());
        let mut until = std::collections::BTreeMap::new();
        for event in of_phase(&document, "X") {
            let (start, duration) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
            let until = until.entry(event["tid"].as_u64().unwrap()).or_insert(0.0);
            assert!(start >= *until && duration >= 0.0, "{document:#}");
            *until = start + duration;
        }
        assert_eq!(until.into_keys().collect::<Vec<_>>(), [1000, 1001, 2000]);
    }

    #[test]
    fn a_path_that_cannot_become_a_file_is_refused_before_the_work() {
        let folder = tempfile::tempdir().unwrap();
        check_path(&folder.path().join("trace.json")).unwrap();
        check_path(Path::new("trace.json")).unwrap();
        for path in [folder.path().to_owned(), folder.path().join("none/trace.json")] {
            let error = check_path(&path).unwrap_err().to_string();
            assert!(error.contains("a folder that exists"), "{error}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "something was left");
        // A folder in which nobody may make a file, whoever asks.
        let error = format!("{:#}", check_path(Path::new("/proc/trace.json")).unwrap_err());
        assert!(error.contains("/proc/trace.json: name a file"), "{error}");
    }
}
