//! Every reader delivers the bytes of the files, and says what is wrong when it cannot.

use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockstreamer_core::Result;
use blockstreamer_core::block::{BlockIndex, BlockSpec, Placement};
use blockstreamer_core::device::HostBuffer;
use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::read::{
    Completion, DriveRate, ReadMethod, ReadOffer, Reader, Request, drive_gb_per_s,
    drive_pass_gb_per_s, open,
};
use blockstreamer_core::source::{BlockSource, FaultySource};

use crate::{Numbers, assert_says};

const METHODS: [ReadMethod; 4] =
    [ReadMethod::Auto, ReadMethod::Uring, ReadMethod::Threads, ReadMethod::Buffered];

/// A folder in the working directory's file system; `/tmp` may be another one.
const HERE: &str = env!("CARGO_TARGET_TMPDIR");

/// Files without a meaning, and one block whose bytes are those of the first file.
#[derive(Debug)]
struct Files {
    paths: Vec<PathBuf>,
    blocks: Vec<BlockSpec>,
}

impl Files {
    fn write(folder: &Path, contents: &[Vec<u8>]) -> Arc<dyn BlockSource> {
        let path = |number: usize| folder.join(format!("file-{number}"));
        let paths: Vec<_> = (0..contents.len()).map(path).collect();
        for (path, bytes) in paths.iter().zip(contents) {
            fs::write(path, bytes).unwrap();
        }
        let shape = vec![contents[0].len()];
        let tensors = [("bytes".to_owned(), Dtype::U8, shape)];
        let block = BlockSpec::pack("layers.0", Placement::Streamed, tensors).unwrap();
        Arc::new(Self { paths, blocks: vec![block] })
    }
}

impl BlockSource for Files {
    fn describe(&self) -> String {
        "files of a test".to_owned()
    }

    fn blocks(&self) -> &[BlockSpec] {
        &self.blocks
    }

    fn read(&self, _block: BlockIndex, range: Range<usize>, into: &mut [u8]) -> Result<usize> {
        assert!(range.start != 77, "a source with a bug");
        let bytes = fs::read(&self.paths[0]).unwrap();
        into.copy_from_slice(&bytes[range]);
        Ok(into.len())
    }

    fn files(&self) -> Vec<&Path> {
        self.paths.iter().map(PathBuf::as_path).collect()
    }
}

/// A folder in the working directory's file system and one in memory.
fn folders() -> Vec<tempfile::TempDir> {
    let here = tempfile::tempdir_in(HERE).unwrap();
    let memory = tempfile::tempdir_in("/dev/shm").ok();
    if memory.is_none() {
        eprintln!("skipped: /dev/shm cannot be written here");
    }
    [Some(here), memory].into_iter().flatten().collect()
}

/// The reader, unless the machine refuses io_uring, which is printed.
fn reader(source: &Arc<dyn BlockSource>, method: ReadMethod) -> Option<Box<dyn Reader>> {
    let offer = ReadOffer::of(Path::new("/proc/self/exe")).unwrap();
    match (method, offer.io_uring) {
        (ReadMethod::Uring, Err(reason)) => {
            eprintln!("skipped: this machine refuses io_uring: {reason}");
            assert_says(open(source, method, 8), &["io_uring", &reason, "'threads'"]);
            None
        }
        _ => Some(open(source, method, 8).unwrap()),
    }
}

fn file(file: usize, offset_bytes: u64, num_bytes: usize, needed_bytes: usize) -> Request {
    Request::File { file, offset_bytes, num_bytes, needed_bytes }
}

/// One read, into memory that is as large as the request.
fn read_one(reader: &mut dyn Reader, request: Request) -> (Result<usize>, Vec<u8>) {
    let num_bytes = match &request {
        Request::File { num_bytes, .. } => *num_bytes,
        Request::Block { range, .. } => range.len(),
    };
    let mut memory = HostBuffer::new(num_bytes).unwrap();
    memory.bytes_mut().fill(0xa5);
    // SAFETY: the memory is as long as the request and lives until `wait` has returned it.
    unsafe { reader.submit(7, request, memory.bytes_mut().as_mut_ptr()).unwrap() };
    assert_eq!(reader.num_in_flight(), 1);
    let Completion { tag, outcome } = reader.wait().unwrap().unwrap();
    assert_eq!((tag, reader.num_in_flight()), (7, 0));
    (outcome, memory.bytes().to_vec())
}

/// Random spans of random files, all in flight at once, compared with the files' bytes.
fn read_at_random(reader: &mut dyn Reader, contents: &[Vec<u8>], numbers: &mut Numbers) {
    const SPAN_BYTES: usize = 5 << 20;
    let mut memory = HostBuffer::new(24 * SPAN_BYTES).unwrap();
    let mut places: Vec<_> = memory.bytes_mut().chunks_mut(SPAN_BYTES).collect();
    let mut buffers: Vec<_> =
        places.iter_mut().map(|place| (place.as_mut_ptr(), place.len())).collect();
    // All memory, a part of it, or none.
    buffers.truncate([buffers.len(), 5, 0][numbers.below(3)]);
    // SAFETY: nothing is in flight, and the memory is forgotten again before it goes.
    unsafe { reader.register(&buffers) };
    let mut expected = Vec::new();
    for (tag, place) in places.iter_mut().enumerate() {
        place.fill(0xa5);
        let number = numbers.below(contents.len());
        let bytes = &contents[number];
        let unit = reader.alignment_bytes(number);
        assert!(unit.is_power_of_two() && unit <= 4096, "{unit}");
        let start = numbers.below(bytes.len() + 1) / unit * unit;
        let wish = match numbers.below(3) {
            0 => numbers.below(SPAN_BYTES),
            1 => numbers.below(10_000),
            // To the end of the file and beyond.
            _ => (bytes.len() - start + numbers.below(9000)).min(SPAN_BYTES - 4096),
        };
        let num_bytes = wish.next_multiple_of(unit);
        let there = &bytes[start..bytes.len().min(start + num_bytes)];
        let request = file(number, start as u64, num_bytes, there.len());
        // SAFETY: the places do not overlap and live until all completions were returned.
        unsafe { reader.submit(tag as u64, request, place.as_mut_ptr()).unwrap() };
        expected.push(there);
    }
    let mut seen = vec![false; places.len()];
    let mut left = places.len();
    while left > 0 {
        assert_eq!(reader.num_in_flight(), left);
        let next = if numbers.below(2) == 0 { reader.poll() } else { reader.wait() };
        let Some(Completion { tag, outcome }) = next.unwrap() else { continue };
        let tag = tag as usize;
        assert!(!std::mem::replace(&mut seen[tag], true), "request {tag} ended twice");
        assert_eq!(outcome.unwrap(), expected[tag].len());
        assert!(places[tag].starts_with(expected[tag]), "request {tag} brought other bytes");
        left -= 1;
    }
    assert!(reader.wait().unwrap().is_none());
    assert!(reader.poll().unwrap().is_none());
    // SAFETY: no memory is named.
    unsafe { reader.register(&[]) };
}

#[test]
fn every_reader_delivers_the_bytes_of_the_files_many_at_a_time() {
    for folder in folders() {
        let numbers = &mut Numbers(3);
        let contents: Vec<_> =
            [1, 4096, 6_000_011, 2 << 20].map(|len| numbers.bytes(len)).into_iter().collect();
        let source = Files::write(folder.path(), &contents);
        for method in METHODS {
            let Some(mut reader) = reader(&source, method) else { continue };
            println!("{}: {}", folder.path().display(), reader.describe());
            for _ in 0..12 {
                read_at_random(&mut *reader, &contents, numbers);
            }
        }
    }
}

#[test]
fn threads_and_the_page_cache_are_used_when_they_are_asked_for() {
    let folder = tempfile::tempdir_in(HERE).unwrap();
    let source = Files::write(folder.path(), &[vec![5; 10_000]]);
    let described = |method| open(&source, method, 3).unwrap().describe();
    assert!(described(ReadMethod::Threads).starts_with("3 threads"));
    assert_eq!(described(ReadMethod::Buffered), "3 threads, through the page cache");
    assert_eq!(open(&source, ReadMethod::Buffered, 1).unwrap().alignment_bytes(0), 1);
    let offer = ReadOffer::of(&folder.path().join("file-0")).unwrap();
    match (offer.direct, offer.io_uring) {
        (Ok(alignment_bytes), io_uring) => {
            let threads = open(&source, ReadMethod::Threads, 1).unwrap();
            assert_eq!(threads.alignment_bytes(0), alignment_bytes);
            assert!(threads.describe().contains("direct"), "{}", threads.describe());
            assert_eq!(described(ReadMethod::Auto).contains("io_uring"), io_uring.is_ok());
        }
        (Err(reason), _) => {
            println!("no direct reads here: {reason}");
            assert!(described(ReadMethod::Auto).contains("page cache"));
        }
    }
}

#[test]
fn a_file_that_was_cut_or_is_missing_is_named_with_what_is_needed() {
    for folder in folders() {
        let source = Files::write(folder.path(), &[vec![1; 3 << 20], vec![2; 8192]]);
        for method in METHODS {
            let Some(mut reader) = reader(&source, method) else { continue };
            let path = folder.path().join("file-0");
            for cut in [2_500_000, 1 << 20, 4096, 0] {
                File::options().write(true).open(&path).unwrap().set_len(cut).unwrap();
                let (outcome, _) = read_one(&mut *reader, file(0, 0, 3 << 20, 3 << 20));
                let place = format!("ends at byte {cut}, but bytes up to 3145728");
                assert_says(outcome, &["file-0", &place, "truncated since it was opened"]);
                // What is still there can be read, and the others too.
                let whole = read_one(&mut *reader, file(0, 0, 4096, cut.min(4096) as usize));
                assert_eq!(whole.0.unwrap(), cut.min(4096) as usize);
                assert_eq!(read_one(&mut *reader, file(1, 4096, 4096, 4096)).1, [2; 4096]);
            }
            fs::write(&path, vec![1; 3 << 20]).unwrap();
            fs::remove_file(folder.path().join("file-1")).unwrap();
            assert_says(open(&source, method, 4), &["cannot open", "file-1", "No such file"]);
            fs::write(folder.path().join("file-1"), vec![2; 8192]).unwrap();
        }
    }
}

#[test]
fn requests_against_the_rules_are_refused_before_they_start() {
    let folder = tempfile::tempdir_in(HERE).unwrap();
    let source = Files::write(folder.path(), &[vec![1; 100_000]]);
    let mut memory = HostBuffer::new(16_384).unwrap();
    let start = memory.bytes_mut().as_mut_ptr();
    for method in METHODS {
        let Some(mut reader) = reader(&source, method) else { continue };
        let mut refused = |request, shift: usize, parts: &[&str]| {
            // SAFETY: the memory is long enough for each request and outlives the reader.
            let submitted = unsafe { reader.submit(0, request, start.add(shift)) };
            assert_says(submitted, parts);
            assert_eq!(reader.num_in_flight(), 0);
        };
        refused(file(1, 0, 4096, 0), 0, &["file 1", "only 1"]);
        refused(file(0, 0, 4096, 4097), 0, &["file-0", "4097 of them needed"]);
        refused(file(0, u64::MAX - 4095, 4096, 0), 0, &["file-0", "inside a file"]);
        let unit = open(&source, method, 1).unwrap().alignment_bytes(0);
        if unit > 1 {
            let must = format!("multiples of {unit}");
            refused(file(0, 1, 4096, 0), 0, &["file-0", " at 1 ", &must]);
            refused(file(0, 0, unit + 1, 0), 0, &["file-0", &must]);
            refused(file(0, 0, unit, 0), 1, &["file-0", &must]);
        }
    }
}

#[test]
fn threads_read_blocks_through_the_source_and_survive_its_errors_and_panics() {
    let folder = tempfile::tempdir_in(HERE).unwrap();
    let bytes = Numbers(9).bytes(100_096);
    let files = Files::write(folder.path(), std::slice::from_ref(&bytes));
    let source: Arc<dyn BlockSource> = Arc::new(FaultySource::new(files, vec![(BlockIndex(0), 1)]));
    // No wrapper names files, so whatever is asked for, the source itself reads.
    for method in [ReadMethod::Auto, ReadMethod::Threads] {
        let mut reader = open(&source, method, 2).unwrap();
        assert!(reader.describe().contains("through the source"), "{}", reader.describe());
        let block = |block, range| Request::Block { block: BlockIndex(block), range };
        let (outcome, memory) = read_one(&mut *reader, block(0, 5..9_000));
        assert_eq!((outcome.unwrap(), &memory[..]), (8_995, &bytes[5..9_000]));
        if method == ReadMethod::Auto {
            let (outcome, _) = read_one(&mut *reader, block(0, 5..9_000));
            assert_says(outcome, &["block 'layers.0'", "injected fault in read 1"]);
        }
        for _ in 0..4 {
            let (outcome, _) = read_one(&mut *reader, block(0, 77..78));
            assert_says(outcome, &["block 'layers.0'", "panicked", "a source with a bug"]);
        }
        let (outcome, _) = read_one(&mut *reader, block(3, 0..1));
        assert_says(outcome, &["block 3"]);
        assert_eq!(read_one(&mut *reader, block(0, 0..100)).1, bytes[..100]);
        // SAFETY: the request is refused, so nothing is written.
        let submitted = unsafe { reader.submit(0, file(0, 0, 0, 0), std::ptr::dangling_mut()) };
        assert_says(submitted, &["file 0", "only 0"]);
    }
}

#[test]
fn a_ring_refuses_blocks_and_says_who_reads_them() {
    let folder = tempfile::tempdir_in(HERE).unwrap();
    let source = Files::write(folder.path(), &[vec![1; 4096]]);
    let Some(mut reader) = reader(&source, ReadMethod::Uring) else { return };
    let request = Request::Block { block: BlockIndex(0), range: 0..0 };
    // SAFETY: the request is refused, so nothing is written.
    let submitted = unsafe { reader.submit(0, request, std::ptr::dangling_mut()) };
    assert_says(submitted, &["not blocks", "threads"]);
}

#[test]
fn a_reader_that_is_dropped_writes_nothing_afterwards() {
    for folder in folders() {
        let source = Files::write(folder.path(), &[vec![1; 32 << 20]]);
        for method in METHODS {
            for _ in 0..8 {
                let Some(mut reader) = reader(&source, method) else { continue };
                let mut memory = HostBuffer::new(32 << 20).unwrap();
                for (tag, part) in memory.bytes_mut().chunks_mut(2 << 20).enumerate() {
                    let request = file(0, tag as u64 * (2 << 20), 2 << 20, 2 << 20);
                    // SAFETY: the memory outlives the reader, which is dropped below.
                    unsafe { reader.submit(tag as u64, request, part.as_mut_ptr()).unwrap() };
                }
                drop(reader);
                memory.bytes_mut().fill(9);
                std::thread::sleep(std::time::Duration::from_millis(20));
                assert!(memory.bytes().iter().all(|byte| *byte == 9));
            }
        }
    }
}

#[test]
fn the_rate_of_a_drive_is_measured_on_files_of_any_size() {
    for folder in folders() {
        let numbers = &mut Numbers(4);
        let contents: Vec<_> =
            [100, 3 << 20, 150_000_001].map(|len| numbers.bytes(len)).into_iter().collect();
        let source = Files::write(folder.path(), &contents);
        let files = source.files();
        for (paths, max_bytes) in
            [(&files[..1], 1 << 40), (&files[..], 1 << 40), (&files[..], 5000)]
        {
            let DriveRate { gb_per_s, setting, lean, how } =
                drive_gb_per_s(paths, max_bytes).unwrap();
            println!("{}: {gb_per_s:.2} GB/s, {how}", folder.path().display());
            assert!(gb_per_s > 0.0 && gb_per_s.is_finite());
            assert!(how.contains("MiB") && !how.starts_with("0 threads"), "{how}");
            let whole = drive_pass_gb_per_s(paths, setting).unwrap();
            assert!(whole > 0.0 && whole.is_finite());
            assert!(lean.memory_bytes() <= setting.memory_bytes(), "{lean:?} {setting:?}");
        }
        assert_says(drive_gb_per_s(&files, 0), &["something in it"]);
        assert_says(drive_gb_per_s(&[], 1 << 30), &["something in it"]);
        let missing = folder.path().join("missing");
        assert_says(drive_gb_per_s(&[&missing], 1 << 30), &["missing", "No such file"]);
    }
}
