//! What is not merged, and that nothing is left of it.

use super::*;

/// The names beside the model, hidden ones included.
fn beside(fixture: &Fixture) -> Vec<String> {
    let entries = std::fs::read_dir(fixture.folder.path()).unwrap();
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
    let mut names: Vec<_> = entries.map(|entry| name(entry).into_string().unwrap()).collect();
    names.sort();
    names
}

/// A head that is the embedding's table as well.
fn tied(kind: Kind) -> Fixture {
    let mut table = WeightTable::new(Dtype::BF16);
    let weight = |local, role| row("embed.weight", local, role, &[INTER, HIDDEN]);
    let layer = [row("q.weight", "q.weight", Role::Linear, &[INTER, HIDDEN])];
    table.add(BlockPlan::new("layer", Placement::Streamed, Some(0)), 0, &layer);
    let table = table
        .gathered("embedding", &[weight("embed.weight", Role::Embedding)])
        .head("head", &[weight("head.weight", Role::Linear)]);
    let tensors = NamedTensors::new()
        .with("q.weight", values(1, &size(&[INTER, HIDDEN])).to_kind(kind))
        .with("embed.weight", values(2, &size(&[INTER, HIDDEN])).to_kind(kind));
    Fixture::new(table, &tensors, [&["q", "embed"], &[]])
}

#[test]
fn a_head_that_is_tied_to_the_embedding_is_not_changed() {
    let fixture = tied(Kind::BFloat16);
    let message = fixture.refused(|_| {});
    for word in ["'embed.weight'", "tied", "block 'embedding'", "use the adapter as it is"] {
        assert!(message.contains(word), "no {word} in {message}");
    }
    assert_eq!(beside(&fixture), ["model"]);
}

#[test]
fn what_is_read_is_never_replaced() {
    let fixture = dense(ExpertLayout::InOut, Kind::BFloat16);
    let model = fixture.checkpoint.directory.clone();
    // Even if it looks like a merged checkpoint.
    std::fs::write(model.join("merged.json"), "{}").unwrap();
    std::fs::write(fixture.folder.path().join("merged.json"), "{}").unwrap();
    let message = fixture.refused(|options| options.directory = model.clone());
    assert!(message.contains("is read from"), "{message}");
    let message = fixture.refused(|options| options.directory = fixture.folder.path().to_owned());
    assert!(message.contains("would be replaced, but"), "{message}");
    assert!(message.contains("/model is in it"), "{message}");
    let adapter = fixture.out().join("adapter");
    std::fs::create_dir_all(&adapter).unwrap();
    std::fs::write(fixture.out().join("merged.json"), "{}").unwrap();
    let message = fixture.refused(|options| options.also_read = vec![adapter.clone()]);
    assert!(message.contains("out/adapter is in it"), "{message}");
    assert!(adapter.exists() && model.join("model.safetensors").exists());
}

#[test]
fn an_earlier_merge_is_replaced_and_so_is_what_a_killed_one_left() {
    let fixture = dense(ExpertLayout::InOut, Kind::BFloat16);
    let left = fixture.folder.path().join(".out.Xy12ab.partial");
    std::fs::create_dir(&left).unwrap();
    std::fs::write(left.join("model.safetensors"), "half").unwrap();
    fixture.merge(|_| {}).unwrap();
    assert_eq!(beside(&fixture), ["model", "out"]);
    let first = fixture.merged();
    fixture.scale_adapter(0.6);
    fixture.merge(|_| {}).unwrap();
    assert_ne!(fixture.merged().get("q.weight").unwrap(), first.get("q.weight").unwrap());
    assert_eq!(beside(&fixture), ["model", "out"]);

    std::fs::remove_file(fixture.out().join("merged.json")).unwrap();
    let message = fixture.refused(|_| {});
    assert!(message.contains("is not empty and holds no merged.json"), "{message}");
}

#[test]
fn numbers_that_are_none_or_too_large_are_refused_by_name_and_leave_nothing() {
    for (kind, scale, word) in [(Kind::Float, f64::NAN, "Float"), (Kind::Half, 300.0, "Half")] {
        let fixture = dense(ExpertLayout::InOut, kind);
        fixture.scale_adapter(scale);
        let message = fixture.refused(|_| {});
        assert!(message.contains("is not finite after merging"), "{message}");
        assert!(message.starts_with("tensor '") && message.contains(word), "{message}");
        assert_eq!(beside(&fixture), ["model"]);
    }
}

#[test]
fn weights_of_eight_bits_take_no_change() {
    let fixture = dense(ExpertLayout::InOut, Kind::Float8e4m3fn);
    let message = fixture.refused(|_| {});
    assert!(message.contains("F8_E4M3") && message.contains("too coarse"), "{message}");
    assert_eq!(beside(&fixture), ["model"]);
}

#[test]
fn an_adapter_with_nothing_on_this_model_is_refused() {
    let fixture = dense(ExpertLayout::InOut, Kind::BFloat16);
    let inputs = MergeInputs { sites: &[], ..fixture.inputs() };
    let message = merge(inputs, &MergeOptions::new(fixture.out()), &mut |_| {});
    let message = message.unwrap_err().to_string();
    assert!(message.contains("changes no weight of this model"), "{message}");
}

#[test]
fn a_model_that_was_cut_short_after_it_was_opened_leaves_nothing() {
    let fixture = dense(ExpertLayout::InOut, Kind::BFloat16);
    let path = fixture.checkpoint.directory.join("model.safetensors");
    let len = std::fs::metadata(&path).unwrap().len();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(len - 10).unwrap();
    let message = fixture.refused(|_| {});
    assert!(message.contains("was cut short"), "{message}");
    assert_eq!(beside(&fixture), ["model"]);
}
