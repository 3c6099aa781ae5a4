//! Safetensors files of named tensors.

use blockstreamer_core::checkpoint::{
    RawTensor, read_header, read_safetensors, tensor_bytes, write_raw_safetensors,
    write_safetensors,
};
use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::state::NamedTensors;
use blockstreamer_core::tch::{Device, Kind, Tensor};

use crate::{ALL_DTYPES, Numbers, assert_says, made, names_in};

#[test]
fn named_tensors_of_every_dtype_survive_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("state.safetensors");
    let values = Tensor::arange(15, (Kind::Float, Device::Cpu)).reshape([3, 5]) - 7.0;
    let mut tensors: NamedTensors = ALL_DTYPES
        .iter()
        .map(|dtype| (dtype.name().to_owned(), values.to_kind(dtype.kind()).transpose(0, 1)))
        .collect();
    tensors.insert("scalar", Tensor::from(0.5_f64).set_requires_grad(true));
    tensors.insert("empty", Tensor::zeros([0, 4], (Kind::Float, Device::Cpu)));
    write_safetensors(&path, &tensors, &[("format", "pt")]).unwrap();

    let read = read_safetensors(&path).unwrap();
    assert_eq!(read.len(), tensors.len());
    for (name, expected) in tensors.iter() {
        let found = read.get(name).unwrap();
        assert_eq!((found.kind(), found.size()), (expected.kind(), expected.size()), "{name}");
        assert_eq!(tensor_bytes(found).unwrap(), tensor_bytes(expected).unwrap(), "{name}");
    }
    let header = read_header(&path).unwrap();
    assert_eq!(header.metadata["format"], "pt");
    for tensor in header.tensors {
        assert_eq!(tensor.offset_bytes % tensor.dtype.size_bytes() as u64, 0, "{}", tensor.name);
    }
    assert_eq!(names_in(directory.path()), ["state.safetensors"]);
}

#[test]
fn the_published_parser_reads_our_raw_files() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("raw.safetensors");
    let numbers = &mut Numbers(3);
    let tensors = ALL_DTYPES.map(|dtype| made(dtype.name(), dtype, &[3, 7], numbers));
    let raw: Vec<_> = (tensors.iter())
        .map(|tensor| RawTensor {
            name: &tensor.name,
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            bytes: &tensor.bytes,
        })
        .collect();
    write_raw_safetensors(&path, &raw, &[]).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let parsed = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(parsed.len(), raw.len());
    for expected in tensors {
        let view = parsed.tensor(&expected.name).unwrap();
        assert_eq!((view.shape(), view.data()), (&expected.shape[..], &expected.bytes[..]));
    }
}

#[test]
fn what_no_file_can_hold_is_refused_and_nothing_is_left() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("bad.safetensors");
    let complex = Tensor::zeros([2], (Kind::ComplexFloat, Device::Cpu));
    let result = write_safetensors(&path, &NamedTensors::new().with("odd", complex), &[]);
    assert_says(result, &["'odd'", "ComplexFloat"]);
    let raw = |name| RawTensor { name, dtype: Dtype::F32, shape: vec![2], bytes: &[0; 8] };
    assert_says(write_raw_safetensors(&path, &[raw("a"), raw("a")], &[]), &["'a'", "twice"]);
    assert_says(write_raw_safetensors(&path, &[raw("__metadata__")], &[]), &["reserved"]);
    let short = RawTensor { bytes: &[0; 7], ..raw("a") };
    assert_says(write_raw_safetensors(&path, &[short], &[]), &["'a'", "7 bytes"]);
    assert!(names_in(directory.path()).is_empty());
}
