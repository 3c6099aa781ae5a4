//! A copy engine whose calls fail: errors of the driver leave the engine usable, too.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use blockstreamer_core::device::{CopyEngine, CopyPiece, Event, HostBuffer};
use blockstreamer_core::execute::{Executor, Gradients, StepOptions};
use blockstreamer_core::{Error, Result};
use blockstreamer_tests::ToyModel;
use tch::{Device, Kind};

use crate::rig::{assert_same_bits, batch, device, options, probe, ram, values};

/// Fails one call, counted from 0.
#[derive(Debug)]
struct Shaky {
    inner: Box<dyn CopyEngine>,
    num_calls: AtomicUsize,
    fails_at: AtomicUsize,
}

impl Shaky {
    fn call(&self) -> Result<()> {
        let number = self.num_calls.fetch_add(1, Ordering::SeqCst);
        match number == self.fails_at.load(Ordering::SeqCst) {
            true => Err(Error::Cuda { action: "do anything", message: "not today".into() }),
            false => Ok(()),
        }
    }
}

impl CopyEngine for Shaky {
    fn device(&self) -> Device {
        self.inner.device()
    }

    fn is_host_memory(&self) -> bool {
        self.inner.is_host_memory()
    }

    unsafe fn copy(
        &self,
        pieces: &[CopyPiece<'_>],
        after: Option<&Event>,
    ) -> Result<(Event, Event)> {
        self.call()?;
        // SAFETY: the caller's promises are handed on unchanged.
        unsafe { self.inner.copy(pieces, after) }
    }

    fn record(&self) -> Result<Event> {
        self.call()?;
        self.inner.record()
    }

    fn wait(&self, event: &Event) -> Result<()> {
        self.call()?;
        self.inner.wait(event)
    }

    fn synchronize(&self, event: &Event) -> Result<()> {
        self.call()?;
        self.inner.synchronize(event)
    }

    fn has_happened(&self, event: &Event) -> Result<bool> {
        self.call()?;
        self.inner.has_happened(event)
    }

    fn elapsed_ms(&self, start: &Event, end: &Event) -> Result<Option<f64>> {
        self.call()?;
        self.inner.elapsed_ms(start, end)
    }

    fn host_buffer(&self, num_bytes: usize) -> Result<HostBuffer> {
        self.inner.host_buffer(num_bytes)
    }
}

#[test]
fn a_driver_call_that_fails_surfaces_as_itself_or_harms_nothing() {
    let shaky = Arc::new(Shaky {
        inner: <dyn CopyEngine>::for_device(device()).unwrap(),
        num_calls: 0.into(),
        fails_at: usize::MAX.into(),
    });
    let model = ToyModel::mixed();
    let engine: Arc<dyn CopyEngine> = shaky.clone();
    let executor = Executor::with_engine(
        Box::new(model.clone()),
        ram(&model),
        Some(Box::new(probe(&[2, 5, 9], 0.1))),
        engine,
        options(Kind::Float, 2),
    )
    .unwrap();
    let step = || {
        let mut gradients = Gradients::new();
        let batches = [batch(4, 0, 1)];
        let loss = executor.train_step(&batches, StepOptions::default(), &mut gradients)?;
        let values = values(&gradients, executor.adapter().unwrap());
        Ok::<_, Error>((executor.loss_value(&loss)?, values))
    };
    let wanted = step().unwrap();
    let mut num_errors = 0;
    for calls in 0..80 {
        let fails_at = shaky.num_calls.load(Ordering::SeqCst) + calls;
        shaky.fails_at.store(fails_at, Ordering::SeqCst);
        match step() {
            Err(error) => {
                assert!(error.to_string().contains("do anything: not today"), "{error}");
                num_errors += 1;
            }
            Ok(found) => assert_same_bits(&found.1, &wanted.1),
        }
        shaky.fails_at.store(usize::MAX, Ordering::SeqCst);
        let found = step().unwrap();
        assert_eq!(found.0, wanted.0);
        assert_same_bits(&found.1, &wanted.1);
    }
    assert!(num_errors > 20, "{num_errors}");
    assert_eq!(executor.stats().unwrap().peak_resident_blocks, 3, "all slots are still in use");
}
