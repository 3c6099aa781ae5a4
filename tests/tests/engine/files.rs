//! The engine over real files: every way of reading them, under stress, and files that are damaged under it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use blockstreamer_core::Error;
use blockstreamer_core::block::{BlockIndex, Placement, TENSOR_ALIGNMENT_BYTES};
use blockstreamer_core::checkpoint::{
    CheckpointFile, Layout, RawTensor, TensorSource, read_header, tensor_bytes,
    write_raw_safetensors,
};
use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::execute::ExecutorOptions;
use blockstreamer_core::read::{ReadMethod, ReadOffer};
use blockstreamer_core::source::shards::{ShardSource, write_shards};
use blockstreamer_core::source::{BlockSource, SafetensorsSource};
use blockstreamer_core::stream::Transition;
use blockstreamer_tests::toy::Part;
use blockstreamer_tests::{ToyModel, blocks_of};
use tch::{Kind, Tensor};

use crate::links::starved;
use crate::rig::{assert_same_bits, options, ram};
use crate::stress::{calm, plain, step, survives, trainer};

/// A folder on a disk; `/tmp` may be in memory.
const HERE: &str = env!("CARGO_TARGET_TMPDIR");

/// A folder there. The tests may run on a machine that did not build them.
fn folder() -> tempfile::TempDir {
    std::fs::create_dir_all(HERE).unwrap();
    tempfile::tempdir_in(HERE).unwrap()
}

/// As [`ToyModel::mixed`], with blocks of many chunks.
fn model() -> ToyModel {
    let mut model = ToyModel::mixed();
    model.parts[0] = Part::Mlp(300);
    model.parts[9] = Part::Mlp(700);
    model
}

/// The blocks of the model in two safetensors files. Tensors lie in them in another order than in blocks.
fn safetensors(folder: &Path) -> Arc<dyn BlockSource> {
    let blocks = blocks_of(&model());
    let named: Vec<_> = blocks
        .iter()
        .flat_map(|(block, _, tensors)| {
            tensors.iter().map(move |(name, tensor)| (format!("{block}/{name}"), tensor))
        })
        .map(|(name, tensor)| (name, tensor.kind(), tensor.size(), tensor_bytes(tensor).unwrap()))
        .collect();
    let paths = ["even", "odd"].map(|name| folder.join(name).with_extension("safetensors"));
    for (parity, path) in paths.iter().enumerate() {
        let tensors: Vec<_> = (named.iter().rev().skip(parity).step_by(2))
            .map(|(name, kind, size, bytes)| RawTensor {
                name,
                dtype: Dtype::from_kind(*kind).unwrap(),
                shape: size.iter().map(|extent| *extent as usize).collect(),
                bytes,
            })
            .collect();
        write_raw_safetensors(path, &tensors, &[]).unwrap();
    }
    let headers = paths.each_ref().map(|path| read_header(path).unwrap());
    let find = |name: String| {
        let in_file = |(file, header): (usize, &blockstreamer_core::checkpoint::Header)| {
            let tensor = header.tensors.iter().find(|tensor| tensor.name == name)?;
            let offset_bytes = tensor.offset_bytes;
            Some(TensorSource { checkpoint: name.clone(), file, offset_bytes })
        };
        headers.iter().enumerate().find_map(in_file).unwrap()
    };
    let layout = Layout {
        blocks: ram(&model()).blocks().to_vec(),
        sources: (blocks.iter())
            .map(|(block, _, tensors)| {
                tensors.iter().map(|(name, _)| find(format!("{block}/{name}"))).collect()
            })
            .collect(),
        files: (paths.into_iter().zip(&headers))
            .map(|(path, header)| CheckpointFile { path, num_bytes: header.file_bytes })
            .collect(),
    };
    Arc::new(SafetensorsSource::open(layout).unwrap())
}

/// The same as shards over two folders.
fn shards(folder: &Path, verify: bool) -> Arc<dyn BlockSource> {
    let folders = ["a", "b"].map(|name| folder.join(name));
    write_shards(&*ram(&model()), "a toy", &folders, &mut |_| {}).unwrap();
    Arc::new(ShardSource::open(&folders[0], Some("a toy")).unwrap().with_verify(verify))
}

/// Chunks as small as direct reads allow.
fn reading(method: ReadMethod, prefetch_ahead: usize, queue_depth: usize) -> ExecutorOptions {
    let mut options = options(Kind::Float, prefetch_ahead);
    options.stream.num_chunks = 4;
    options.stream.read = method;
    options.stream.queue_depth = queue_depth;
    options
}

/// Whether files can be read so; says why where not.
fn can(method: ReadMethod) -> bool {
    match ReadOffer::of(Path::new("/proc/self/exe")).unwrap().io_uring {
        Err(reason) if method == ReadMethod::Uring => {
            println!("skipped: this machine refuses io_uring: {reason}");
            false
        }
        _ => true,
    }
}

fn survives_reading(method: ReadMethod, is_sharded: bool) {
    if !can(method) {
        return;
    }
    let folder = folder();
    let source = match is_sharded {
        true => shards(folder.path(), false),
        false => safetensors(folder.path()),
    };
    let model = model();
    let streamed = source.blocks().iter().filter(|spec| spec.placement == Placement::Streamed);
    let largest_bytes = streamed.map(|spec| spec.image_bytes).max().unwrap();
    // One read at a time, and as many as there are chunks, over a link that is in the way and one that is not.
    for (depth, queue_depth, num_steps) in [(1, 1, 25), (2, 8, 75)] {
        let link = if queue_depth == 1 { plain() } else { Arc::new(starved()) };
        let executor =
            trainer(&model, Arc::clone(&source), link, reading(method, depth, queue_depth));
        survives(&model, &executor, depth, num_steps);
        let stats = executor.stats().unwrap();
        assert!(stats.read_bytes > 0 && stats.read_busy_ms > 0.0, "{stats:?}");
        assert!(stats.staging_bytes < largest_bytes as u64, "a block takes many chunks");
    }
}

#[test]
fn a_hundred_steps_from_safetensors_by_io_uring() {
    survives_reading(ReadMethod::Uring, false);
}

#[test]
fn a_hundred_steps_from_safetensors_by_threads() {
    survives_reading(ReadMethod::Threads, false);
}

#[test]
fn a_hundred_steps_from_shards_by_io_uring() {
    survives_reading(ReadMethod::Uring, true);
}

#[test]
fn a_hundred_steps_from_shards_by_threads() {
    survives_reading(ReadMethod::Threads, true);
}

/// Damages a file at a chosen moment, and puts back what was in it.
struct Vandal {
    files: Vec<(PathBuf, Vec<u8>)>,
    /// Cuts files off, or changes a byte of them.
    cuts: bool,
    numbers: u64,
    num_transitions_before: Option<usize>,
    damaged: Option<(usize, usize)>,
}

impl Vandal {
    fn new(source: &dyn BlockSource, cuts: bool) -> Self {
        let streamed = (0..model().parts.len()).map(BlockIndex);
        let extents = streamed.flat_map(|block| source.extents(block).unwrap());
        let used: BTreeSet<usize> = extents.map(|extent| extent.file).collect();
        let read = |file: usize| {
            let path = source.files()[file].to_owned();
            let bytes = fs::read(&path).unwrap();
            (path, bytes)
        };
        let files = used.into_iter().map(read).collect();
        Self { files, cuts, numbers: 1, num_transitions_before: None, damaged: None }
    }

    fn below(&mut self, limit: usize) -> usize {
        self.numbers = self.numbers.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (self.numbers >> 33) as usize % limit
    }

    fn open(path: &Path) -> File {
        File::options().write(true).open(path).unwrap()
    }

    /// Counts the changes of slots, and strikes when it is time.
    fn note(&mut self) {
        self.num_transitions_before = match self.num_transitions_before {
            Some(0) => {
                let file = self.below(self.files.len());
                let (path, bytes) = &self.files[file];
                // The image of any block takes so much; what follows in a shard may be padding.
                let limit = if self.cuts { bytes.len() } else { TENSOR_ALIGNMENT_BYTES };
                let path = path.clone();
                let from = self.below(limit);
                match self.cuts {
                    true => Self::open(&path).set_len(from as u64).unwrap(),
                    false => {
                        let changed = [!self.files[file].1[from]];
                        Self::open(&path).write_all_at(&changed, from as u64).unwrap();
                    }
                }
                self.damaged = Some((file, from));
                None
            }
            number => number.map(|number| number - 1),
        };
    }

    fn mend(&mut self) {
        self.num_transitions_before = None;
        if let Some((file, from)) = self.damaged.take() {
            let (path, bytes) = &self.files[file];
            // Written, not stretched and then filled: whoever reads meanwhile must find no zeros.
            let end = if self.cuts { bytes.len() } else { from + 1 };
            Self::open(path).write_all_at(&bytes[from..end], from as u64).unwrap();
        }
    }
}

/// A hundred times a file is damaged during a step: the step is right, or the damage is its error; and when
/// the file is whole again, so is training. Damage that the next step's reads met is that step's error.
fn survives_damage(source: Arc<dyn BlockSource>, method: ReadMethod, cuts: bool) {
    if !can(method) {
        return;
    }
    let model = model();
    let vandal = Arc::new(Mutex::new(Vandal::new(&*source, cuts)));
    let executor = trainer(&model, source, plain(), reading(method, 2, 8));
    let observer = Arc::clone(&vandal);
    let observer = move |transition: &Transition| {
        assert!(transition.resident_blocks <= 3);
        observer.lock().unwrap_or_else(PoisonError::into_inner).note();
    };
    executor.stream().observe(Box::new(observer)).unwrap();
    let calm = calm(&model);
    let said = if cuts { "truncated since it was opened" } else { "do not match their checksum" };
    let assert_damage = |error: &Error| match error {
        Error::Block { block, source } => {
            assert!(block.starts_with("part.") && source.to_string().contains(said), "{error}");
        }
        other => panic!("{other}"),
    };
    let (mut num_errors, mut num_late, mut num_unharmed) = (0, 0, 0);
    for number in 0..100 {
        let wanted = step(&calm, number, false).unwrap();
        let assert_right = |found: &(f64, Vec<(String, Tensor)>)| {
            assert_eq!(found.0, wanted.0, "step {number}");
            assert_same_bits(&found.1, &wanted.1);
        };
        // A step has about seventy.
        let mut at_work = vandal.lock().unwrap();
        let num_transitions = at_work.below(80);
        at_work.num_transitions_before = Some(num_transitions);
        drop(at_work);
        let is_announced = number % 2 == 0;
        let first = step(&executor, number, is_announced);
        vandal.lock().unwrap().mend();
        let failed = first.inspect(assert_right).inspect_err(assert_damage).is_err();
        match step(&executor, number, false).inspect(assert_right) {
            Ok(_) => num_unharmed += u32::from(!failed),
            Err(error) => {
                assert!(is_announced && !failed, "step {number}: it surfaced again: {error}");
                assert_damage(&error);
                num_late += 1;
                assert_right(&step(&executor, number, false).unwrap());
            }
        }
        num_errors += u32::from(failed);
    }
    println!(
        "{method:?}: {num_errors} errors, {num_late} in the next step, {num_unharmed} unharmed"
    );
    assert!(num_errors > 10 && num_unharmed > 10, "{num_errors}, {num_unharmed}");
    assert_eq!(executor.stats().unwrap().peak_resident_blocks, 3, "no slot was lost");
}

#[test]
fn files_that_are_cut_under_a_run_are_an_error_once_and_then_whole_again() {
    for method in [ReadMethod::Uring, ReadMethod::Threads] {
        let folder = folder();
        survives_damage(safetensors(folder.path()), method, true);
    }
}

#[test]
fn shards_that_are_damaged_under_a_run_are_an_error_once_and_then_whole_again() {
    for method in [ReadMethod::Uring, ReadMethod::Threads] {
        let folder = folder();
        survives_damage(shards(folder.path(), true), method, false);
    }
}

#[test]
fn staging_takes_as_many_chunks_as_it_is_told_and_not_a_byte_more() {
    let folder = folder();
    let files = safetensors(folder.path());
    let opaque: Arc<dyn BlockSource> = crate::rig::Disk::new(&model());
    for (source, method) in [
        (&opaque, ReadMethod::Auto),
        (&files, ReadMethod::Auto),
        (&files, ReadMethod::Threads),
        (&files, ReadMethod::Buffered),
    ] {
        let unit = (blockstreamer_core::read::open(source, method, 1).unwrap()).alignment_bytes(0);
        let largest_bytes = source.blocks()[9].image_bytes;
        for (chunk_bytes, num_chunks) in [(700, 2), (4096, 1), (10_000, 5), (1 << 20, 3)] {
            let mut options = options(Kind::Float, 1);
            options.stream.read = method;
            (options.stream.chunk_bytes, options.stream.num_chunks) = (chunk_bytes, num_chunks);
            let executor = trainer(&model(), Arc::clone(source), plain(), options);
            let before = executor.stats().unwrap().staging_bytes;
            step(&executor, 0, false).unwrap();
            let staging_bytes = executor.stats().unwrap().staging_bytes;
            let wanted = chunk_bytes.min(largest_bytes).next_multiple_of(unit) * num_chunks;
            assert_eq!((before, staging_bytes), (0, wanted as u64), "{method:?}");
        }
    }
    // What is lent needs none.
    let lent = trainer(&model(), ram(&model()), plain(), options(Kind::Float, 1));
    step(&lent, 0, false).unwrap();
    assert_eq!(lent.stats().unwrap().staging_bytes, 0);
}
