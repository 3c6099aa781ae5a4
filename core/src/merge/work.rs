//! Reading, changing and writing the tensors: many parts, each by itself, on several threads.

use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use tch::{Device, Kind, Tensor};

use super::plan::{Change, Job, Output, Packed, Plan, Work, matrix_name};
use super::{MergeOptions, PackingLoss};
use crate::checkpoint::{
    Checkpoint, StoredTensor, WeightFiles, open, read_exact_at, tensor_bytes, tensor_from_bytes,
};
use crate::error::{Error, Result};
use crate::numerics::Mxfp4;

/// Carries out `plan`. `done` hears the tensor at hand and the bytes written so far.
pub(super) fn run(
    plan: &Plan<'_>,
    checkpoint: &Checkpoint,
    options: &MergeOptions,
    files: &WeightFiles,
    done: &mut dyn FnMut(&str, u64),
) -> Result<Vec<PackingLoss>> {
    let sources: Vec<File> =
        checkpoint.files.iter().map(|file| open(&file.path)).collect::<Result<_>>()?;
    let of_job = |(job, it): (usize, &Job<'_>)| {
        parts(&it.work, options).into_iter().map(move |part| (job, part))
    };
    let parts: Vec<(usize, Part)> = plan.jobs.iter().enumerate().flat_map(of_job).collect();
    let num_threads = match options.device {
        Device::Cpu => std::thread::available_parallelism().map_or(1, usize::from),
        _ => 1,
    };
    let (next, outputs) = (AtomicUsize::new(0), &plan.outputs[..]);
    let (report, reports) = channel();
    let threads_before = tch::get_num_threads();
    let found = std::thread::scope(|scope| {
        let start = |_| {
            let jobs = plan.jobs.iter().map(Job::share).collect();
            let report = report.clone();
            let worker =
                Worker { jobs, outputs, checkpoint, sources: &sources, options, files, report };
            let (next, parts) = (&next, &parts);
            scope.spawn(move || {
                if num_threads > 1 {
                    // As many threads as cores are at work already. It holds for this thread.
                    tch::set_num_threads(1);
                }
                worker.run(next, parts)
            })
        };
        let threads: Vec<_> = (0..num_threads.min(parts.len())).map(start).collect();
        drop(report);
        let mut done_bytes = 0;
        if let Some(first) = outputs.first() {
            done(&first.name, done_bytes);
        }
        for (output, num_bytes) in reports {
            done_bytes += num_bytes;
            done(&outputs[output].name, done_bytes);
        }
        let panicked = |_| Err(Error::usage("a thread that merges weights panicked"));
        let joined = threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked));
        joined.collect::<Result<Vec<_>>>()
    });
    tch::set_num_threads(threads_before);
    let mut found: Vec<_> = found?.into_iter().flatten().collect();
    // Sums do not depend on which thread came first.
    found.sort_by_key(|(part, _)| *part);
    let mut losses: Vec<PackingLoss> = Vec::new();
    for (_, loss) in found {
        match losses.last_mut().filter(|last| last.tensor == loss.tensor) {
            Some(last) => last.add_sums(&loss),
            None => losses.push(loss),
        }
    }
    Ok(losses)
}

/// What one thread does at a time.
enum Part {
    /// These bytes are copied.
    Bytes(Range<usize>),
    /// Rows of a matrix, as it is stored: the number of the matrix in its stack.
    Rows(usize, Range<usize>),
    /// A packed expert.
    Expert(usize),
}

fn parts(work: &Work<'_>, options: &MergeOptions) -> Vec<Part> {
    match work {
        Work::Copy(stored) => {
            let ranges = ranges(stored.num_bytes, options.piece_bytes.max(1));
            ranges.map(Part::Bytes).collect()
        }
        Work::Add(stored, change) => {
            let [matrices, rows, columns] = extents(stored, change);
            let of_matrix =
                |matrix| tiles(rows, columns, options).map(move |rows| Part::Rows(matrix, rows));
            (0..matrices).flat_map(of_matrix).collect()
        }
        Work::Unpack(packed, _) | Work::Repack(packed, ..) => {
            (0..packed.blocks.shape[0]).map(Part::Expert).collect()
        }
    }
}

/// `0..count` in ranges of `len`.
fn ranges(count: usize, len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).step_by(len).map(move |start| start..count.min(start + len))
}

/// Rows of so many elements, as many at a time as make a piece in fp32, and at least one.
fn tiles(
    num_rows: usize,
    columns: usize,
    options: &MergeOptions,
) -> impl Iterator<Item = Range<usize>> + use<> {
    ranges(num_rows, (options.piece_bytes / size_of::<f32>() / columns.max(1)).max(1))
}

/// Matrices, rows and columns as they are stored.
fn extents(stored: &StoredTensor, change: &Change) -> [usize; 3] {
    match stored.shape[..] {
        [matrices, rows, columns] if change.is_stack => [matrices, rows, columns],
        _ => [1, stored.shape[0], stored.shape[1..].iter().product()],
    }
}

/// One thread.
struct Worker<'a> {
    jobs: Vec<Job<'a>>,
    outputs: &'a [Output],
    checkpoint: &'a Checkpoint,
    /// The checkpoint's files.
    sources: &'a [File],
    options: &'a MergeOptions,
    files: &'a WeightFiles,
    /// Hears of the output that was written to, and how many bytes.
    report: Sender<(usize, u64)>,
}

impl Worker<'_> {
    /// Takes one part after another. Returns what packing cost, with the part's number.
    fn run(
        &self,
        next: &AtomicUsize,
        parts: &[(usize, Part)],
    ) -> Result<Vec<(usize, PackingLoss)>> {
        let _no_graph = tch::no_grad_guard();
        let mut losses = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some((job, part)) = parts.get(number) else { return Ok(losses) };
            let loss = self.work(&self.jobs[*job], part).inspect_err(|_| {
                // The others need not go on.
                next.store(parts.len(), Ordering::Relaxed);
            })?;
            losses.extend(loss.map(|loss| (number, loss)));
        }
    }

    fn work(&self, job: &Job<'_>, part: &Part) -> Result<Option<PackingLoss>> {
        let output = job.output;
        match (&job.work, part) {
            (Work::Copy(stored), Part::Bytes(range)) => {
                let bytes = self.read_bytes(stored, range.clone())?;
                self.write(output, range.start, &bytes)?;
            }
            (Work::Add(stored, change), Part::Rows(matrix, rows)) => {
                self.add(output, stored, change, *matrix, rows)?;
            }
            (Work::Unpack(packed, change), Part::Expert(expert)) => {
                self.unpack(output, packed, change.as_ref(), *expert)?;
            }
            (Work::Repack(packed, change, scales), Part::Expert(expert)) => {
                return self.repack([output, *scales], packed, change, *expert).map(Some);
            }
            _ => return Err(Error::usage("a part of another kind of work")),
        }
        Ok(None)
    }

    fn add(
        &self,
        output: usize,
        stored: &StoredTensor,
        change: &Change,
        matrix: usize,
        rows: &Range<usize>,
    ) -> Result<()> {
        let [_, num_rows, columns] = extents(stored, change);
        let row_bytes = columns * stored.dtype.size_bytes();
        let start_bytes = (matrix * num_rows + rows.start) * row_bytes;
        let bytes = self.read_bytes(stored, start_bytes..start_bytes + rows.len() * row_bytes)?;
        let weight = tensor_from_bytes(stored.dtype, &[rows.len(), columns], &bytes)?;
        let weight = weight.f_to_device(self.options.device)?;
        let kind = weight.f_kind()?;
        let mut merged = change.rows(matrix, rows)?;
        if kind == Kind::Double {
            merged = merged.f_to_kind(kind)?;
        }
        let _ = merged.f_add_(&weight.f_to_kind(merged.f_kind()?)?)?;
        let rounded = merged.f_to_kind(kind)?;
        self.check_finite(output, &rounded)?;
        self.write(output, start_bytes, &bytes_of(&rounded)?)
    }

    fn unpack(
        &self,
        output: usize,
        packed: &Packed<'_>,
        change: Option<&Change>,
        expert: usize,
    ) -> Result<()> {
        let matrix = self.read_packed(packed, expert)?;
        let (rows, columns) = extents_of(&matrix);
        let whole =
            Tensor::f_empty([columns as i64, rows as i64], (Kind::BFloat16, self.options.device))?;
        for tile in tiles(rows, columns, self.options) {
            let (start, len) = (tile.start as i64, tile.len() as i64);
            let mut weight = matrix.narrow(start, len)?.unpack(Kind::Float)?;
            if let Some(change) = change {
                let _ = weight.f_add_(&change.rows(expert, &tile)?)?;
            }
            let rounded = weight.f_to_kind(Kind::BFloat16)?;
            self.check_finite(output, &rounded)?;
            whole.f_narrow(1, start, len)?.f_copy_(&rounded.f_transpose(0, 1)?)?;
        }
        let bytes = bytes_of(&whole)?;
        self.write(output, expert * bytes.len(), &bytes)
    }

    fn repack(
        &self,
        [output, output_of_scales]: [usize; 2],
        packed: &Packed<'_>,
        change: &Change,
        expert: usize,
    ) -> Result<PackingLoss> {
        let mut loss = PackingLoss::new(matrix_name(&self.outputs[output].name)?.to_owned());
        let matrix = self.read_packed(packed, expert)?;
        let (rows, columns) = extents_of(&matrix);
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for tile in tiles(rows, columns, self.options) {
            let before =
                matrix.narrow(tile.start as i64, tile.len() as i64)?.unpack(Kind::Float)?;
            let change = change.rows(expert, &tile)?;
            let merged = before.f_add(&change)?;
            self.check_finite(output, &merged)?;
            let packed = Mxfp4::pack(&merged)?;
            loss.add(&before, &change, &packed.unpack(Kind::Float)?)?;
            codes.extend(bytes_of(packed.blocks())?);
            scales.extend(bytes_of(packed.scales())?);
        }
        self.write(output, expert * codes.len(), &codes)?;
        self.write(output_of_scales, expert * scales.len(), &scales)?;
        Ok(loss)
    }

    /// The matrix of one expert, on the device.
    fn read_packed(&self, packed: &Packed<'_>, expert: usize) -> Result<Mxfp4> {
        let part = |stored: &StoredTensor| -> Result<Tensor> {
            let shape = &stored.shape[1..];
            let num_bytes = stored.num_bytes / stored.shape[0];
            let bytes = self.read_bytes(stored, expert * num_bytes..(expert + 1) * num_bytes)?;
            let tensor = tensor_from_bytes(stored.dtype, shape, &bytes)?;
            Ok(tensor.f_to_device(self.options.device)?)
        };
        Mxfp4::new(part(packed.blocks)?, part(packed.scales)?)
    }

    fn read_bytes(&self, stored: &StoredTensor, range: Range<usize>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; range.len()];
        let path = &self.checkpoint.files[stored.file].path;
        let start = stored.offset_bytes + range.start as u64;
        read_exact_at(&self.sources[stored.file], path, start, &mut bytes)?;
        Ok(bytes)
    }

    fn check_finite(&self, output: usize, values: &Tensor) -> Result<()> {
        // What is not finite stays so in a sum, which takes no memory; a sum alone may be too large.
        if values.f_sum(Kind::Float)?.f_double_value(&[])?.is_finite()
            || values.f_isfinite()?.f_all()?.f_int64_value(&[])? == 1
        {
            return Ok(());
        }
        let message = format!(
            "is not finite after merging, in {:?}; the adapter or the checkpoint holds values that are no \
             numbers, or the sum is too large for this dtype",
            values.f_kind()?
        );
        Err(Error::tensor(&self.outputs[output].name, message))
    }

    fn write(&self, output: usize, start_bytes: usize, bytes: &[u8]) -> Result<()> {
        self.files.write(output, start_bytes, bytes)?;
        // Nobody may listen any more when another thread failed.
        let _ = self.report.send((output, bytes.len() as u64));
        Ok(())
    }
}

/// Rows and columns of one packed matrix.
fn extents_of(matrix: &Mxfp4) -> (usize, usize) {
    match matrix.size()[..] {
        [rows, columns] => (rows as usize, columns as usize),
        _ => (0, 0),
    }
}

fn bytes_of(tensor: &Tensor) -> Result<Vec<u8>> {
    tensor_bytes(&tensor.f_to_device(Device::Cpu)?)
}

impl Change {
    /// What is added to rows of a matrix as they are stored, in fp32.
    fn rows(&self, matrix: usize, rows: &Range<usize>) -> Result<Tensor> {
        let part = |factors: &Tensor| factors.f_select(0, matrix as i64);
        let (a, b) = (part(&self.factors.a)?, part(&self.factors.b)?);
        let (start, len) = (rows.start as i64, rows.len() as i64);
        let mut product = match self.is_stack && self.is_transposed {
            false => b.f_narrow(0, start, len)?.f_mm(&a)?,
            true => a.f_narrow(1, start, len)?.f_transpose(0, 1)?.f_mm(&b.f_transpose(0, 1)?)?,
        };
        // The product first, then the scaling, as in PEFT.
        Ok(product.f_mul_scalar_(self.factors.scaling)?)
    }
}
