//! Where bytes come from, how far ahead they are read and how a step is cut up change no loss.

use super::{Folder, blockstreamer, losses, metrics, model};

const TWO: [&str; 2] = ["--set", "steps=2"];

#[test]
fn losses_are_the_same_from_every_source_at_every_depth() {
    let folder = Folder::new();
    let shards = folder.path("shards");
    blockstreamer(&["shard", model(), "--out", &shards]).ok();
    folder.train("reference", &TWO).ok();
    let expected = losses(&folder.path("reference"));
    let shards = format!("stream.shards='{shards}'");
    let depth = |ahead: usize| format!("stream.prefetch_ahead={ahead}");
    let mut cases: Vec<Vec<String>> = (0..=5).map(|ahead| vec![depth(ahead)]).collect();
    cases.push(vec!["stream.tier=ram".into(), depth(0)]);
    cases.push(vec![shards.clone(), depth(3)]);
    cases.push(vec![shards.clone(), "stream.tier=ram".into(), "stream.verify=false".into()]);
    // Reads and copies in pieces that fit no tensor.
    cases.push(vec!["stream.chunk=5000".into(), "stream.num_chunks=2".into()]);
    for (index, case) in cases.iter().enumerate() {
        let out = format!("run{index}");
        let settings = case.iter().flat_map(|setting| ["--set", setting.as_str()]);
        folder.train(&out, &TWO.into_iter().chain(settings).collect::<Vec<_>>()).ok();
        assert_eq!(losses(&folder.path(&out)), expected, "{case:?}");
    }
}

#[test]
fn weights_in_ram_are_read_from_storage_only_once() {
    let folder = Folder::new();
    folder.train("run", &[&TWO[..], &["--set", "stream.tier=ram"]].concat()).ok();
    for line in &metrics(&folder.path("run"))[1..] {
        assert_eq!(line["read_bytes"], 0, "{line}");
        assert!(line["h2d_bytes"].as_u64().unwrap() > 0, "{line}");
    }
}

#[test]
fn two_micro_batches_of_one_row_are_a_batch_of_two() {
    let folder = Folder::new();
    folder.train("batch", &["--set", "steps=3"]).ok();
    let micro = ["--set", "steps=3", "--set", "batch_size=1", "--set", "micro_batches=2"];
    folder.train("micro", &micro).ok();
    let (batch, micro) = (metrics(&folder.path("batch")), metrics(&folder.path("micro")));
    for (batch, micro) in batch.iter().zip(&micro) {
        let (loss, other) = (batch["loss"].as_f64().unwrap(), micro["loss"].as_f64().unwrap());
        // Sums in another order; the rows themselves are the same.
        assert!((loss - other).abs() < 1e-4 * loss, "{loss} and {other}");
        // Weights are read once for both micro-batches.
        assert_eq!(batch["h2d_bytes"], micro["h2d_bytes"]);
    }
}
