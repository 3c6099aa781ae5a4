//! Rules that only a GPU can break.

use std::sync::Arc;

use blockstreamer_core::Error;
use blockstreamer_core::device::HostBuffer;
use blockstreamer_core::execute::PassInput;
use blockstreamer_core::source::RamSource;
use blockstreamer_tests::{AllResident, Probe, ToyModel, blocks_of};
use tch::{Device, Kind};

use crate::rig::{batch, device, executor, infer, options, ram};

/// Whether a GPU is under test; says so where not.
fn on_cuda() -> bool {
    if !device().is_cuda() {
        println!("skipped: BLOCKSTREAMER_TEST_DEVICE is not cuda");
    }
    device().is_cuda()
}

#[test]
fn memory_that_is_lent_unpinned_is_refused_naming_the_block() {
    if !on_cuda() {
        return;
    }
    let model = ToyModel::equal(3);
    let source = Arc::new(RamSource::from_tensors(blocks_of(&model), HostBuffer::new).unwrap());
    let error = blockstreamer_core::execute::Executor::new(
        Box::new(model),
        source,
        None,
        options(Kind::Float, 1),
    )
    .unwrap_err();
    let Error::Block { block, source } = &error else { panic!("{error:?}") };
    assert_eq!(block, "head");
    assert!(matches!(**source, Error::Unpinned { .. }), "{source:?}");
    assert!(error.to_string().contains("not in pinned memory"), "{error}");
}

#[test]
fn inputs_and_trainables_on_the_host_are_refused_naming_them() {
    if !on_cuda() {
        return;
    }
    let model = ToyModel::equal(3);
    let on_host = AllResident::new(&model, None, Kind::Float, Device::Cpu);
    let PassInput { context, state, has_vision } = on_host.embed(&batch(4, 0, 1)).unwrap();
    let engine = executor(&model, ram(&model), None, options(Kind::Float, 1));
    let error =
        engine.forward_for_backward(vec![PassInput { context, state, has_vision }], 0).unwrap_err();
    assert!(matches!(&error, Error::WrongDevice { what, .. } if what.contains("'hidden'")));
    infer(&engine).unwrap();

    let adapter = Box::new(Probe::new(&[1], 0.0, Device::Cpu));
    let error = blockstreamer_core::execute::Executor::new(
        Box::new(model.clone()),
        ram(&model),
        Some(adapter),
        options(Kind::Float, 1),
    )
    .unwrap_err();
    assert!(matches!(&error, Error::WrongDevice { what, .. } if what == "own.1"), "{error:?}");
}
