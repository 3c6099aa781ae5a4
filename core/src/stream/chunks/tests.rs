use super::*;
use crate::block::{BlockSpec, Placement};
use crate::error::Result;

/// Small numbers from a seed: splitmix64.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((mixed ^ (mixed >> 27)) % limit.max(1) as u64) as usize
    }
}

/// What lies in file `file` at `offset`.
fn stored(file: usize, offset: u64) -> u8 {
    (offset.wrapping_mul(31).wrapping_add(file as u64 * 97) >> 1) as u8
}

#[derive(Debug)]
struct Files {
    blocks: Vec<BlockSpec>,
    extents: Option<Vec<Extent>>,
    unit_bytes: usize,
}

impl Files {
    fn new(image_bytes: usize, extents: Option<Vec<Extent>>, unit_bytes: usize) -> Self {
        let mut spec = BlockSpec::pack("block", Placement::Streamed, []).unwrap();
        spec.image_bytes = image_bytes;
        Self { blocks: vec![spec], extents, unit_bytes }
    }
}

impl BlockSource for Files {
    fn describe(&self) -> String {
        "files".into()
    }
    fn blocks(&self) -> &[BlockSpec] {
        &self.blocks
    }
    fn read(&self, _: BlockIndex, range: Range<usize>, _: &mut [u8]) -> Result<usize> {
        Ok(range.len())
    }
    fn extents(&self, _: BlockIndex) -> Option<Vec<Extent>> {
        self.extents.clone()
    }
    fn check_unit_bytes(&self) -> usize {
        self.unit_bytes
    }
}

/// Carries the chunks out by hand; returns the image, what was read, and how often each byte came.
fn carry_out(
    chunks: &[Chunk],
    image_bytes: usize,
    buffer_bytes: usize,
) -> (Vec<u8>, usize, Vec<u8>) {
    let (mut image, mut copies, mut read_bytes) = (vec![0; image_bytes], vec![0; image_bytes], 0);
    for chunk in chunks {
        let mut staging = vec![None; buffer_bytes];
        for fill in &chunk.fills {
            let Request::File { file, offset_bytes, num_bytes, needed_bytes } = fill.request else {
                panic!("{fill:?}")
            };
            read_bytes += needed_bytes;
            assert!(needed_bytes <= num_bytes);
            for at in 0..num_bytes {
                let place = &mut staging[fill.staging_offset + at];
                assert_eq!(*place, None, "two reads into one place");
                let value =
                    if at < needed_bytes { stored(file, offset_bytes + at as u64) } else { 0 };
                *place = Some(value);
            }
        }
        for piece in &chunk.pieces {
            for (from, to) in piece.staged().zip(piece.image()) {
                image[to] = staging[from].unwrap();
                copies[to] += 1;
            }
        }
    }
    (image, read_bytes, copies)
}

#[test]
fn any_extents_are_read_aligned_and_every_byte_is_copied_once_to_its_place() {
    let mut numbers = Numbers(3);
    for _ in 0..400 {
        let alignments = [[1, 1, 1], [16, 16, 16], [64, 1, 16]][numbers.below(3)];
        let largest = alignments.into_iter().max().unwrap();
        let chunk_bytes =
            [1_usize, 16, 40, 100, 256, 4096][numbers.below(6)].next_multiple_of(largest);
        let (mut extents, mut wanted) = (Vec::new(), Vec::new());
        let mut ends = [numbers.below(300) as u64, numbers.below(9) as u64, 0];
        for _ in 0..numbers.below(12) {
            let file = numbers.below(3);
            ends[file] += [0, 0, 1, 20, 500][numbers.below(5)];
            let num_bytes = [0, 1, 7, 64, 130, 900][numbers.below(6)];
            wanted.resize(wanted.len() + numbers.below(3), 0_u8);
            let extent = Extent {
                file,
                file_offset_bytes: ends[file],
                image_offset_bytes: wanted.len(),
                num_bytes,
            };
            wanted.extend((0..num_bytes as u64).map(|at| stored(file, ends[file] + at)));
            ends[file] += num_bytes as u64;
            extents.push(extent);
        }
        // The order of a file is not the order of the image.
        let by = numbers.below(extents.len() + 1);
        extents.rotate_left(by);
        let source = Files::new(wanted.len(), Some(extents.clone()), 1);
        let alignment_bytes = |file: usize| alignments[file];
        let chunks = cut(&source, BlockIndex(0), chunk_bytes, &alignment_bytes);
        for fill in chunks.iter().flat_map(|chunk| &chunk.fills) {
            let Request::File { file, offset_bytes, num_bytes, .. } = fill.request else {
                panic!()
            };
            for value in [offset_bytes as usize, num_bytes, fill.staging_offset] {
                assert_eq!(value % alignments[file], 0, "{fill:?} {alignments:?}");
            }
        }
        let (image, read_bytes, copies) = carry_out(&chunks, wanted.len(), chunk_bytes);
        assert_eq!(image, wanted);
        let payload: usize = extents.iter().map(|extent| extent.num_bytes).sum();
        assert_eq!(copies.iter().map(|times| usize::from(*times)).sum::<usize>(), payload);
        assert!(copies.iter().all(|times| *times <= 1));
        // Around every run at most one aligned span is read for nothing, and what lies in small gaps.
        let spare: usize = extents.iter().map(|extent| 2 * alignments[extent.file]).sum();
        assert!(read_bytes <= payload + spare, "{read_bytes} of {payload}");
        let counted: usize = chunks.iter().map(|chunk| chunk.payload_bytes(0)).sum();
        assert_eq!(counted, payload);
    }
}

#[test]
fn stripes_of_several_files_take_turns_and_checked_units_are_never_cut() {
    const UNIT: usize = 64;
    let image_bytes = 10 * UNIT + 5;
    for (num_files, chunk_bytes) in [(1, 64), (2, 208), (3, 1008), (3, 64)] {
        let stripe = |unit: usize| Extent {
            file: unit % num_files,
            file_offset_bytes: (unit / num_files * UNIT) as u64,
            image_offset_bytes: unit * UNIT,
            num_bytes: UNIT.min(image_bytes - unit * UNIT),
        };
        let extents: Vec<Extent> = (0..=10).map(stripe).collect();
        let source = Files::new(image_bytes, Some(extents), UNIT);
        let chunks = cut(&source, BlockIndex(0), chunk_bytes, &|_| 16);
        let (_, read_bytes, copies) = carry_out(&chunks, image_bytes, chunk_bytes);
        assert_eq!(read_bytes, image_bytes);
        assert!(copies.iter().all(|times| *times == 1));
        let pieces: Vec<_> = chunks.iter().flat_map(|chunk| &chunk.pieces).collect();
        for piece in &pieces {
            let Range { start, end } = piece.image();
            assert!(start % UNIT == 0 && (end % UNIT == 0 || end == image_bytes), "{piece:?}");
        }
        let first_files: std::collections::BTreeSet<usize> = chunks
            .iter()
            .flat_map(|chunk| &chunk.fills)
            .take(num_files)
            .map(|fill| match fill.request {
                Request::File { file, .. } => file,
                Request::Block { .. } => panic!(),
            })
            .collect();
        assert_eq!(first_files.len(), num_files, "every drive works from the start");
    }
}

#[test]
fn a_source_without_extents_reads_itself() {
    for unit_bytes in [1, 100] {
        let source = Files::new(25, None, unit_bytes);
        let chunks = cut(&source, BlockIndex(0), 10, &|_| 16);
        let ranges: Vec<_> = chunks.iter().map(|chunk| chunk.pieces[0].image()).collect();
        assert_eq!(ranges, [0..10, 10..20, 20..25]);
        for (chunk, range) in chunks.iter().zip(ranges) {
            let request = Request::Block { block: BlockIndex(0), range };
            assert_eq!(chunk.fills, [Fill { request, staging_offset: 0 }]);
            assert_eq!(chunk.payload_bytes(7), 7, "the source says what came from storage");
        }
    }
    assert!(cut(&Files::new(0, None, 1), BlockIndex(0), 10, &|_| 1).is_empty());
}
