//! Layers cut into three blocks, with several tensors in the state.

use std::collections::BTreeMap;

use blockstreamer_tests::ToyModel;
use tch::Kind;

use crate::rig::{batch, executor, options, ram};

#[test]
fn tensors_that_a_block_hands_on_are_shared_not_copied() {
    let model = ToyModel::split(3);
    for prefetch_ahead in 0..=3 {
        let executor = executor(&model, ram(&model), None, options(Kind::Float, prefetch_ahead));
        let mut addresses: Vec<BTreeMap<String, usize>> = Vec::new();
        let mut kept = Vec::new();
        let logits = executor
            .logits(&batch(5, 0, 1), &mut |_, state| {
                let address = |tensor: &tch::Tensor| tensor.data_ptr() as usize;
                let entries = state.iter().map(|(name, tensor)| (name.to_owned(), address(tensor)));
                addresses.push(entries.collect());
                // Alive until the end, so that no memory is given out twice.
                kept.push(state.clone());
                Ok(())
            })
            .unwrap();
        assert_eq!(logits.size(), [2, 5, 11]);
        for layer in 0..3 {
            let [first, second, third] = [0, 1, 2].map(|part| &addresses[3 * layer + part]);
            assert_eq!(first.keys().collect::<Vec<_>>(), ["hidden", "residual"]);
            assert_eq!(second.keys().collect::<Vec<_>>(), ["choice", "gate", "hidden", "residual"]);
            assert_eq!(third.keys().collect::<Vec<_>>(), ["hidden"]);
            assert_eq!(first["residual"], second["residual"], "handed on by the second part");
            if layer > 0 {
                let before = &addresses[3 * layer - 1];
                assert_eq!(first["residual"], before["hidden"], "kept by the first part");
            }
            assert_ne!(first["hidden"], second["hidden"]);
        }
    }
}
