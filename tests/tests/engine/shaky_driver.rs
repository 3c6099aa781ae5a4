//! A copy engine whose calls fail: errors of the driver leave the engine usable, too.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use blockstreamer_core::Error;
use blockstreamer_core::execute::{Executor, Gradients, StepOptions};
use blockstreamer_tests::ToyModel;
use tch::Kind;

use crate::links::Hooked;
use crate::rig::{assert_same_bits, batch, options, probe, ram, values};

#[test]
fn a_driver_call_that_fails_surfaces_as_itself_or_harms_nothing() {
    let (num_calls, fails_at) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(usize::MAX)));
    let (counter, chosen) = (Arc::clone(&num_calls), Arc::clone(&fails_at));
    let shaky = Hooked::new(move |_, _| {
        let number = counter.fetch_add(1, Ordering::SeqCst);
        match number == chosen.load(Ordering::SeqCst) {
            true => Err(Error::Cuda { action: "do anything", message: "not today".into() }),
            false => Ok(()),
        }
    });
    let model = ToyModel::mixed();
    let executor = Executor::with_engine(
        Box::new(model.clone()),
        ram(&model),
        Some(Box::new(probe(&[2, 5, 9], 0.1))),
        Arc::new(shaky),
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
        fails_at.store(num_calls.load(Ordering::SeqCst) + calls, Ordering::SeqCst);
        match step() {
            Err(error) => {
                assert!(error.to_string().contains("do anything: not today"), "{error}");
                num_errors += 1;
            }
            Ok(found) => assert_same_bits(&found.1, &wanted.1),
        }
        fails_at.store(usize::MAX, Ordering::SeqCst);
        let found = step().unwrap();
        assert_eq!(found.0, wanted.0);
        assert_same_bits(&found.1, &wanted.1);
    }
    assert!(num_errors > 20, "{num_errors}");
    assert_eq!(executor.stats().unwrap().peak_resident_blocks, 3, "all slots are still in use");
}
