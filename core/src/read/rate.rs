//! How fast a drive delivers bytes at best.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{Advice, fadvise};

use super::{ReadMethod, Reader, Request, open_files};
use crate::device::HostBuffer;
use crate::error::{Error, Result};

const MIB: usize = 1 << 20;
/// Request size and queue depth of what is tried, with io_uring and with threads each.
const TRIALS: [(usize, usize); 5] = [(MIB, 4), (MIB, 8), (MIB, 32), (4 * MIB, 8), (16 * MIB, 8)];
/// A trial of this share of the best rate is taken for nearly as fast: trials of one drive differ by as much.
const NEARLY: f64 = 0.85;
/// The largest of these sizes, which all divide.
const UNIT_BYTES: usize = 16 * MIB;
/// A trial ends after this, so that slow drives do not take minutes.
const TRIAL_TIME: Duration = Duration::from_millis(1500);

/// The best rate that was found, and with what.
#[derive(Debug, Clone, PartialEq)]
pub struct DriveRate {
    /// 10^9 bytes per second.
    pub gb_per_s: f64,
    /// With what.
    pub setting: DriveSetting,
    /// What takes the least memory in turn and is nearly as fast: memory that stays in the caches makes
    /// drives fast whose reads are copied by a CPU, and deep queues those that work in parallel.
    pub lean: DriveSetting,
    /// `setting`, for people.
    pub how: String,
}

/// How a drive is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DriveSetting {
    /// io_uring or threads.
    pub method: ReadMethod,
    /// Size of a request.
    pub request_bytes: usize,
    /// Requests under way at a time.
    pub depth: usize,
}

/// The best rate at which the files `paths` can be read past the page cache, by requests of several
/// sizes and depths with io_uring and with threads. Every trial reads another part of the files, at most
/// `max_bytes` over all of them; files of many GB on all drives of interest give the truest answer.
///
/// # Errors
/// [`Error::Usage`] when there is nothing to read; [`Error::Io`] when a file cannot be read.
pub fn drive_gb_per_s(paths: &[&Path], max_bytes: u64) -> Result<DriveRate> {
    let (sizes, wanted_bytes) = sizes(paths, max_bytes)?;
    let methods = [ReadMethod::Uring, ReadMethod::Threads];
    let share_bytes = wanted_bytes / (TRIALS.len() * methods.len()) as u64;
    // A trial must be able to fill its queue, else it measures only how it begins and ends.
    let fits = |(size, depth): &(usize, usize)| (size * depth) as u64 <= share_bytes;
    let mut trials: Vec<_> = TRIALS.into_iter().filter(fits).collect();
    if trials.is_empty() {
        trials.push(TRIALS[0]);
    }
    let units = units(&sizes, wanted_bytes);
    let num_trials = trials.len() * methods.len();
    let memory_bytes = trials.iter().map(|(size, depth)| size * depth).max().unwrap_or(MIB);
    let mut memory = HostBuffer::new(memory_bytes)?;
    // Pages that the system has yet to provide would be part of the measurement.
    memory.bytes_mut().fill(1);

    let mut best: Option<DriveRate> = None;
    let mut tried = Vec::new();
    for (number, method) in methods.into_iter().enumerate() {
        for (position, (request_bytes, depth)) in trials.iter().copied().enumerate() {
            let setting = DriveSetting { method, request_bytes, depth };
            let mut reader = match setting.open(paths) {
                Err(Error::Usage { message }) if method == ReadMethod::Uring => {
                    tracing::debug!("{message}");
                    break;
                }
                reader => reader?,
            };
            forget_cached(paths, &*reader);
            let trial = number * trials.len() + position;
            let share = trial * units.len() / num_trials..(trial + 1) * units.len() / num_trials;
            let spans = spans(&units[share], paths.len(), request_bytes);
            if spans.is_empty() {
                continue;
            }
            let how = setting.describe(&*reader);
            let (read_bytes, seconds) =
                run(&mut *reader, &spans, request_bytes, &mut memory, depth, TRIAL_TIME)?;
            let gb_per_s = read_bytes as f64 / seconds / 1e9;
            tracing::debug!("{gb_per_s:.2} GB/s: {how}");
            tried.push((gb_per_s, setting));
            if best.as_ref().is_none_or(|best| best.gb_per_s < gb_per_s) {
                best = Some(DriveRate { gb_per_s, setting, lean: setting, how });
            }
        }
    }
    let mut best = best
        .ok_or_else(|| Error::usage("nothing of the files could be read to measure their drive"))?;
    let nearly = tried.into_iter().filter(|(rate, _)| *rate >= NEARLY * best.gb_per_s);
    if let Some((_, lean)) = nearly.min_by_key(|(_, setting)| setting.memory_bytes()) {
        best.lean = lean;
    }
    Ok(best)
}

/// The rate of one pass over the files `paths` by `setting`, one file after another, however long it takes.
///
/// # Errors
/// As [`drive_gb_per_s`].
pub fn drive_pass_gb_per_s(paths: &[&Path], setting: DriveSetting) -> Result<f64> {
    let (sizes, total_bytes) = sizes(paths, u64::MAX)?;
    let DriveSetting { request_bytes, depth, .. } = setting;
    if request_bytes == 0 || depth == 0 || !UNIT_BYTES.is_multiple_of(request_bytes) {
        return Err(Error::usage(format!(
            "{depth} reads of {request_bytes} bytes: there must be at least one, of a size that divides 16 MiB"
        )));
    }
    let mut units = units(&sizes, total_bytes);
    units.sort_by_key(|unit| (unit.file, unit.offset_bytes));
    let spans = spans(&units, 1, request_bytes);
    let mut memory = HostBuffer::new(request_bytes * depth)?;
    memory.bytes_mut().fill(1);
    let mut reader = setting.open(paths)?;
    forget_cached(paths, &*reader);
    let (read_bytes, seconds) =
        run(&mut *reader, &spans, request_bytes, &mut memory, depth, Duration::MAX)?;
    Ok(read_bytes as f64 / seconds / 1e9)
}

impl DriveSetting {
    /// Memory in turn.
    pub fn memory_bytes(&self) -> usize {
        self.request_bytes * self.depth
    }

    /// As many bytes under way in reads of 1 MiB.
    pub fn queue_depth(&self) -> usize {
        self.memory_bytes().div_ceil(MIB)
    }

    fn open(&self, paths: &[&Path]) -> Result<Box<dyn Reader>> {
        // io_uring counts reads of 1 MiB.
        let pieces = if self.method == ReadMethod::Uring { self.request_bytes / MIB } else { 1 };
        open_files(paths, None, self.method, self.depth * pieces)
    }

    fn describe(&self, reader: &dyn Reader) -> String {
        format!("{}, {} reads of {} MiB", reader.describe(), self.depth, self.request_bytes / MIB)
    }
}

/// The sizes of the files, and how much of them is to be read.
fn sizes(paths: &[&Path], max_bytes: u64) -> Result<(Vec<u64>, u64)> {
    let size =
        |path: &&Path| Ok(std::fs::metadata(path).map_err(Error::io("inspect", *path))?.len());
    let sizes = paths.iter().map(size).collect::<Result<Vec<_>>>()?;
    match sizes.iter().sum::<u64>().min(max_bytes) {
        0 => Err(Error::usage("a drive's rate needs a file with something in it to read")),
        wanted_bytes => Ok((sizes, wanted_bytes)),
    }
}

/// Drops what the page cache holds of files that are read through it: its rate is not the drive's.
fn forget_cached(paths: &[&Path], reader: &dyn Reader) {
    for (file, path) in paths.iter().enumerate() {
        if reader.alignment_bytes(file) == 1
            && let Ok(file) = File::open(path)
        {
            let _ = fadvise(&file, 0, None, Advice::DontNeed);
        }
    }
}

/// A piece of a file, as large as the largest request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Unit {
    file: usize,
    offset_bytes: u64,
    num_bytes: usize,
}

/// The files in pieces, in turn, until `wanted_bytes` are together.
fn units(sizes: &[u64], wanted_bytes: u64) -> Vec<Unit> {
    let mut units = Vec::new();
    for (file, size) in sizes.iter().enumerate() {
        let starts = (0..*size).step_by(UNIT_BYTES);
        units.extend(starts.map(|offset_bytes| {
            let num_bytes = (size - offset_bytes).min(UNIT_BYTES as u64) as usize;
            Unit { file, offset_bytes, num_bytes }
        }));
    }
    units.sort_by_key(|unit| (unit.offset_bytes, unit.file));
    units.truncate((wanted_bytes / UNIT_BYTES as u64).max(1) as usize);
    units
}

/// The requests for `units` as file and offset: in order within a file, files in turn, so that several
/// drives work at once.
fn spans(units: &[Unit], num_files: usize, request_bytes: usize) -> Vec<(usize, u64)> {
    let mut spans = Vec::new();
    for round in units.chunks(num_files.max(1)) {
        for start in (0..UNIT_BYTES).step_by(request_bytes) {
            let there = round.iter().filter(|unit| start < unit.num_bytes);
            spans.extend(there.map(|unit| (unit.file, unit.offset_bytes + start as u64)));
        }
    }
    spans
}

/// Reads `spans` with `depth` requests in flight, for which `memory` has room. Returns bytes and seconds.
/// The reader is stopped at the end.
fn run(
    reader: &mut dyn Reader,
    spans: &[(usize, u64)],
    request_bytes: usize,
    memory: &mut HostBuffer,
    depth: usize,
    longest: Duration,
) -> Result<(usize, f64)> {
    let used = &mut memory.bytes_mut()[..request_bytes * depth];
    let outcome = read_spans(reader, spans, request_bytes, used, longest);
    if let Err(error) = reader.stop() {
        std::mem::forget(std::mem::take(memory));
        return Err(error);
    }
    outcome
}

fn read_spans(
    reader: &mut dyn Reader,
    spans: &[(usize, u64)],
    request_bytes: usize,
    memory: &mut [u8],
    longest: Duration,
) -> Result<(usize, f64)> {
    let start = Instant::now();
    let mut read_bytes = 0;
    let mut next = spans.iter();
    let mut free: Vec<_> = memory.chunks_exact_mut(request_bytes).collect();
    let mut begin = |reader: &mut dyn Reader, slot: usize, into: *mut u8| {
        let Some((file, offset_bytes)) = next.next().filter(|_| start.elapsed() < longest) else {
            return Ok(());
        };
        let request = Request::File {
            file: *file,
            offset_bytes: *offset_bytes,
            num_bytes: request_bytes,
            needed_bytes: 0,
        };
        // SAFETY: `into` is a part of `memory` that no other request in flight uses. The caller stops
        // the reader before the memory goes.
        unsafe { reader.submit(slot as u64, request, into) }
    };
    for (slot, part) in free.iter_mut().enumerate() {
        begin(reader, slot, part.as_mut_ptr())?;
    }
    while let Some(done) = reader.wait()? {
        read_bytes += done.outcome?;
        begin(reader, done.tag as usize, free[done.tag as usize].as_mut_ptr())?;
    }
    Ok((read_bytes, start.elapsed().as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trials_read_every_byte_that_is_wanted_once_and_all_files_in_turn() {
        let sizes = [100, 40 << 20, 0, 33 << 20];
        let units = units(&sizes, u64::MAX);
        for request_bytes in [MIB, 4 * MIB, 16 * MIB] {
            let spans = spans(&units, sizes.len(), request_bytes);
            for (file, size) in sizes.iter().enumerate() {
                let mut offsets: Vec<_> =
                    spans.iter().filter(|span| span.0 == file).map(|span| span.1).collect();
                offsets.sort_unstable();
                let expected: Vec<_> = (0..*size).step_by(request_bytes).collect();
                assert_eq!(offsets, expected, "file {file} in {request_bytes}");
            }
        }
        let files: Vec<_> = spans(&units[3..], 2, MIB).iter().map(|span| span.0).collect();
        assert_eq!(files[..6], [1, 3, 1, 3, 1, 3]);
        assert_eq!(super::units(&sizes, 35 << 20).len(), 2);
        assert_eq!(super::units(&sizes, 1).len(), 1);
    }
}
