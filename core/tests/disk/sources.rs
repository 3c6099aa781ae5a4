//! The three sources and the two wrappers.

use std::sync::Arc;
use std::time::Instant;

use blockstreamer_core::block::{BlockIndex, Placement};
use blockstreamer_core::checkpoint::{Checkpoint, Layout, tensor_from_bytes};
use blockstreamer_core::device::HostBuffer;
use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::read::ReadMethod;
use blockstreamer_core::source::shards::{ShardSource, write_shards};
use blockstreamer_core::source::{
    BlockSource, FaultySource, RamSource, SafetensorsSource, ThrottledSource, TieredSource,
};
use blockstreamer_core::tch::{Kind, Tensor};
use blockstreamer_core::weights::{Role, WeightTable, row};

use crate::{Fixture, Numbers, assert_says, folder, names_in};

#[test]
fn every_source_returns_every_byte_of_random_checkpoints() {
    for seed in 0..40 {
        let fixture = Fixture::random(seed);
        let numbers = &mut Numbers(!seed);
        let files = SafetensorsSource::open(fixture.layout()).unwrap();
        fixture.check(&files, numbers);

        let target = tempfile::tempdir().unwrap();
        write_shards(&files, "id", &[target.path().to_owned()], &mut |_| {}).unwrap();
        let shards = ShardSource::open(target.path(), Some("id")).unwrap();
        fixture.check(&shards, numbers);
        fixture.check(&shards.with_verify(false), numbers);
    }
}

#[test]
fn bytes_read_from_files_are_the_tensors_without_gaps() {
    for seed in 0..10 {
        let fixture = Fixture::random(seed);
        let source = SafetensorsSource::open(fixture.layout()).unwrap();
        for (block, spec) in source.blocks().iter().enumerate() {
            let mut image = vec![0; spec.image_bytes];
            let read_bytes = source.read(BlockIndex(block), 0..image.len(), &mut image).unwrap();
            assert_eq!(read_bytes, spec.payload_bytes());
        }
    }
}

#[test]
fn a_block_over_2_gib_is_read_in_one_call() {
    use std::os::unix::fs::FileExt;

    // One system call returns at most 0x7fff_f000 bytes. The file is sparse.
    let num_bytes = (1_usize << 31) + 12_345;
    let header = format!(
        r#"{{"big":{{"dtype":"U8","shape":[{num_bytes}],"data_offsets":[0,{num_bytes}]}}}}"#
    );
    let directory = folder(&[("model.safetensors", crate::raw_file(header.as_bytes(), b""))]);
    let path = directory.path().join("model.safetensors");
    let data_start = 8 + header.len() as u64;
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(data_start + num_bytes as u64).unwrap();
    let marks = [0, 0x7fff_efff, 0x7fff_f000, 1 << 31, num_bytes - 1];
    for (value, mark) in (1..).zip(marks) {
        file.write_all_at(&[value], data_start + mark as u64).unwrap();
    }

    let rows = [row("big", "big", Role::Buffer(Dtype::U8), &[num_bytes])];
    let table = WeightTable::new(Dtype::BF16).layers("layers.{n}", 1, &rows);
    let layout =
        Layout::new(&Checkpoint::open(directory.path()).unwrap(), &table, None, |_| Ok(false))
            .unwrap();
    let source = SafetensorsSource::open(layout).unwrap();
    let mut image = HostBuffer::new(source.blocks()[0].image_bytes).unwrap();
    let range = 0..image.bytes().len();
    assert_eq!(source.read(BlockIndex(0), range, image.bytes_mut()).unwrap(), num_bytes);
    for (value, mark) in (1..).zip(marks) {
        assert_eq!(image.bytes()[mark], value);
    }
    let part = crate::read(&source, 0, (1 << 31) - 2..(1 << 31) + 2);
    assert_eq!(part, [0, 0, 4, 0]);
}

#[test]
fn a_file_cut_after_it_was_opened_is_an_error_that_names_it() {
    let fixture = Fixture::random(5);
    let layout = fixture.layout();
    let source = SafetensorsSource::open(layout.clone()).unwrap();
    for name in names_in(fixture.path()) {
        if name.ends_with(".safetensors") {
            std::fs::File::options()
                .write(true)
                .open(fixture.path().join(name))
                .unwrap()
                .set_len(9)
                .unwrap();
        }
    }
    let block = layout.blocks.iter().position(|spec| spec.payload_bytes() > 0).unwrap();
    let mut image = vec![0; layout.blocks[block].image_bytes];
    let range = 0..image.len();
    assert_says(
        source.read(BlockIndex(block), range, &mut image),
        &["part-", ".safetensors", "cut short"],
    );
    assert_says(
        SafetensorsSource::open(layout),
        &["part-0.safetensors", "9 bytes", "open the checkpoint again"],
    );
}

#[test]
fn requests_outside_a_block_are_refused() {
    let fixture = Fixture::random(5);
    let files: Arc<dyn BlockSource> = Arc::new(SafetensorsSource::open(fixture.layout()).unwrap());
    let ram =
        TieredSource::load(Arc::clone(&files), &[BlockIndex(0)], ReadMethod::Auto, HostBuffer::new)
            .unwrap();
    for source in [&*files, &ram] {
        let image_bytes = source.blocks()[0].image_bytes;
        let mut into = vec![0; image_bytes + 1];
        assert_says(source.read(BlockIndex(99), 0..1, &mut into[..1]), &["block 99"]);
        assert_says(source.read(BlockIndex(0), 0..image_bytes + 1, &mut into), &["block.0"]);
        assert_says(source.read(BlockIndex(0), 0..1, &mut into[..0]), &["into 0 bytes"]);
        assert!(source.lend(BlockIndex(99)).is_none());
    }
}

#[test]
fn blocks_made_of_tensors_hold_their_values_in_any_strides() {
    let weight =
        Tensor::arange(12, (Kind::Float, blockstreamer_core::tch::Device::Cpu)).reshape([3, 4]);
    let turned = weight.transpose(0, 1);
    let tensors = vec![
        ("weight", turned.to_kind(Kind::BFloat16)),
        ("scalar", Tensor::from(7_i64)),
        ("mask", weight.gt(5.0)),
    ];
    let blocks =
        [("layers.0", Placement::Streamed, tensors), ("empty", Placement::Resident, vec![])];
    let source = RamSource::from_tensors(blocks, HostBuffer::new).unwrap();
    let spec = &source.blocks()[0];
    let tensor = |name: &str| {
        let tensor = spec.tensor(name).unwrap();
        let bytes =
            crate::read(&source, 0, tensor.offset_bytes..tensor.offset_bytes + tensor.num_bytes);
        tensor_from_bytes(tensor.dtype, &tensor.shape, &bytes).unwrap()
    };
    assert_eq!(tensor("weight"), turned.to_kind(Kind::BFloat16));
    assert_eq!(tensor("scalar"), Tensor::from(7_i64));
    assert_eq!(tensor("mask"), weight.gt(5.0));
    assert_eq!(source.lend(BlockIndex(1)).unwrap().bytes().len(), 0);
}

#[test]
fn a_fault_hits_the_chosen_read_once_and_names_the_source() {
    let fixture = Fixture::random(5);
    let files = Arc::new(SafetensorsSource::open(fixture.layout()).unwrap());
    let source = FaultySource::new(files, vec![(BlockIndex(0), 1)]);
    let mut image = vec![0; source.blocks()[0].image_bytes];
    let mut read = || source.read(BlockIndex(0), 0..image.len(), &mut image);
    read().unwrap();
    assert_says(read(), &["injected fault in read 1", "safetensors files in"]);
    read().unwrap();
}

#[test]
fn a_throttled_source_takes_its_time_over_all_threads_together() {
    let values = Tensor::zeros([100_000], (Kind::Uint8, blockstreamer_core::tch::Device::Cpu));
    let blocks = [("layers.0", Placement::Streamed, vec![("values", values)])];
    let ram = Arc::new(RamSource::from_tensors(blocks, HostBuffer::new).unwrap());
    let source = ThrottledSource::new(ram.clone(), 2e6).unwrap();
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| crate::read(&source, 0, 0..100_000));
        }
    });
    assert!(start.elapsed().as_secs_f64() >= 0.1);
    assert!(source.lend(BlockIndex(0)).is_none());
    assert_says(ThrottledSource::new(ram, 0.0), &["0 bytes per second"]);
}
