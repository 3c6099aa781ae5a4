use std::collections::HashSet;

use tch::{Kind, Tensor};

use super::*;

const PAD: u32 = 9;

/// Row `i` holds `2 + i % 3` times the token `100 + i`; all but the first of them are targets.
fn dataset(count: usize) -> Dataset {
    let samples = (0..count)
        .map(|index| {
            let length = 2 + index % 3;
            let ids = vec![100 + index as u32; length];
            let targets = (0..length).map(|position| position > 0).collect();
            Sample { ids, targets, pictures: Vec::new(), line: index + 1 }
        })
        .collect();
    let name = "rows.jsonl".into();
    Dataset {
        samples,
        num_skipped: 0,
        num_truncated: 0,
        unprinted: Default::default(),
        name,
        processor: None,
    }
}

fn options(batch_size: usize, micro_batches: usize) -> BatchOptions {
    BatchOptions { batch_size, micro_batches, seed: 7, shuffle: true }
}

fn values(tensor: &Tensor) -> Vec<Vec<i64>> {
    Vec::try_from(&tensor.to_kind(Kind::Int64)).unwrap()
}

/// The rows of a step, by their first token.
fn rows(step: &Step) -> Vec<i64> {
    step.batches.iter().flat_map(|batch| values(&batch.input_ids)).map(|row| row[0] - 100).collect()
}

#[test]
fn rows_are_padded_on_the_right_and_padding_is_masked_and_never_a_target() {
    let unshuffled = BatchOptions { shuffle: false, ..options(3, 1) };
    let step = Batches::new(dataset(3), PAD, unshuffled).unwrap().step(0).unwrap();
    let batch = &step.batches[0];
    assert_eq!(
        values(&batch.input_ids),
        [[100, 100, 9, 9], [101, 101, 101, 9], [102, 102, 102, 102]]
    );
    let labels = values(batch.labels.as_ref().unwrap());
    assert_eq!(labels, [[-100, 100, -100, -100], [-100, 101, 101, -100], [-100, 102, 102, 102]]);
    let mask = batch.attention_mask.as_ref().unwrap();
    assert_eq!(mask.kind(), Kind::Bool);
    assert_eq!(values(mask), [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]);
    assert!(batch.segments.is_none());
}

#[test]
fn full_rows_have_no_mask_and_each_micro_batch_has_its_own_length() {
    let unshuffled = BatchOptions { shuffle: false, ..options(1, 3) };
    let step = Batches::new(dataset(3), PAD, unshuffled).unwrap().step(0).unwrap();
    let sizes: Vec<_> = step.batches.iter().map(|batch| batch.input_ids.size()).collect();
    assert_eq!(sizes, [[1, 2], [1, 3], [1, 4]]);
    assert!(step.batches.iter().all(|batch| batch.attention_mask.is_none()));
}

#[test]
fn each_epoch_takes_every_row_once_in_an_order_of_its_own() {
    let mut batches = Batches::new(dataset(12), PAD, options(2, 2)).unwrap();
    let mut epochs = Vec::new();
    for epoch in 0..3u64 {
        let order: Vec<i64> =
            (0..3).flat_map(|step| rows(&batches.step(epoch * 3 + step).unwrap())).collect();
        assert_eq!(order.iter().collect::<HashSet<_>>().len(), 12);
        epochs.push(order);
    }
    assert!(epochs[0] != epochs[1] && epochs[1] != epochs[2]);
    assert!(epochs[0] != (0..12).collect::<Vec<_>>());
}

#[test]
fn a_run_resumed_at_any_step_sees_the_same_batches() {
    let mut whole = Batches::new(dataset(7), PAD, options(2, 2)).unwrap();
    let steps: Vec<_> = (0..9).map(|step| whole.step(step).unwrap()).collect();
    for from in [8, 3, 5] {
        let resumed = Batches::new(dataset(7), PAD, options(2, 2)).unwrap().step(from).unwrap();
        assert_eq!(rows(&resumed), rows(&steps[from as usize]));
        for (a, b) in resumed.batches.iter().zip(&steps[from as usize].batches) {
            assert_eq!(values(&a.input_ids), values(&b.input_ids));
        }
    }
}

#[test]
fn an_epoch_that_does_not_come_out_even_goes_on_into_the_next() {
    let mut batches = Batches::new(dataset(5), PAD, options(2, 1)).unwrap();
    let order: Vec<i64> = (0..5).flat_map(|step| rows(&batches.step(step).unwrap())).collect();
    assert_eq!(order.len(), 10);
    for epoch in order.chunks(5) {
        assert_eq!(epoch.iter().collect::<HashSet<_>>().len(), 5);
    }
}

#[test]
fn a_step_may_be_larger_than_the_dataset() {
    let step = Batches::new(dataset(2), PAD, options(3, 2)).unwrap().step(1).unwrap();
    let rows = rows(&step);
    assert_eq!((rows.len(), rows.iter().filter(|row| **row == 0).count()), (6, 3));
}

#[test]
fn neighbouring_seeds_and_epochs_do_not_share_orders() {
    let orders: HashSet<Vec<usize>> = (0..8)
        .flat_map(|seed| (0..8).map(move |epoch| (seed, epoch)))
        .map(|(seed, epoch)| epoch_order(20, BatchOptions { seed, ..options(1, 1) }, epoch))
        .collect();
    assert_eq!(orders.len(), 64);
}

// The first outputs for the seed 1234567, as the generator's public test vectors have them.
#[test]
fn the_generator_gives_the_published_numbers() {
    let mut random = SplitMix64(1_234_567);
    let first: Vec<u64> = (0..3).map(|_| random.next()).collect();
    assert_eq!(
        first,
        [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
    );
}

#[test]
fn every_place_is_equally_likely_in_a_shuffle() {
    let mut counts = [0u32; 5];
    for epoch in 0..5000 {
        let order = epoch_order(5, options(1, 1), epoch);
        counts[order.iter().position(|row| *row == 0).unwrap()] += 1;
    }
    // Mean 1000, standard deviation 28: five of them either way.
    assert!(counts.iter().all(|count| (860..1140).contains(count)), "{counts:?}");
}

#[test]
fn the_number_of_steps_covers_the_epochs() {
    let batches = |rows| Batches::new(dataset(rows), PAD, options(2, 2)).unwrap();
    assert_eq!(
        [batches(8).num_steps(3), batches(9).num_steps(1), batches(1).num_steps(2)],
        [6, 3, 1]
    );
}

#[test]
fn evaluation_takes_every_row_once_in_the_files_order() {
    let batches = Batches::new(dataset(5), PAD, options(2, 4)).unwrap();
    let steps: Vec<Step> = batches.in_order().map(|step| step.unwrap()).collect();
    assert_eq!(steps.iter().flat_map(rows).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert_eq!(steps.iter().map(|step| step.batches.len()).collect::<Vec<_>>(), [1, 1, 1]);
}

#[test]
fn zero_sizes_and_empty_datasets_are_refused_by_name() {
    let error =
        |count, options| Batches::new(dataset(count), PAD, options).unwrap_err().to_string();
    assert!(error(1, options(0, 1)).contains("batch_size"));
    assert!(error(1, options(1, 0)).contains("micro_batches"));
    assert!(error(0, options(1, 1)).contains("no rows"));
}
