use safetensors::tensor::{Dtype, TensorView, serialize};

use super::*;

/// A copy of the golden adapter that a test may damage.
struct Copy {
    folder: tempfile::TempDir,
}

impl Copy {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["adapter_config.json", "adapter_model.safetensors"] {
            fs::copy(golden().join("adapter").join(name), folder.path().join(name)).unwrap();
        }
        Self { folder }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn set(&self, name: &str, value: Value) -> &Self {
        let path = self.path().join("adapter_config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        match value {
            Value::String(text) if text == "<remove>" => {
                config.as_object_mut().unwrap().remove(name);
            }
            value => config[name] = value,
        }
        fs::write(path, config.to_string()).unwrap();
        self
    }

    /// Rewrites the tensor file.
    fn rewrite(
        &self,
        change: impl Fn(&mut BTreeMap<String, (Vec<usize>, String, Vec<u8>)>),
    ) -> &Self {
        let mut tensors = tensors_of(self.path());
        change(&mut tensors);
        let views = tensors.iter().map(|(name, (shape, dtype, bytes))| {
            let dtype = match dtype.as_str() {
                "BF16" => Dtype::BF16,
                "F16" => Dtype::F16,
                "I32" => Dtype::I32,
                _ => Dtype::F32,
            };
            (name.as_str(), TensorView::new(dtype, shape.clone(), bytes).unwrap())
        });
        let bytes = serialize(views, None).unwrap();
        fs::write(self.path().join("adapter_model.safetensors"), bytes).unwrap();
        self
    }

    fn import(&self) -> Result<Lora> {
        Lora::import(self.path(), &golden_sites(), CPU)
    }

    fn refused(&self) -> String {
        self.import().unwrap_err().to_string()
    }
}

const FIRST: &str = "base_model.model.model.language_model.layers.0.mlp.down_proj.lora_A.weight";

#[test]
fn features_that_are_not_supported_are_refused_by_name() {
    let cases = [
        ("use_dora", json!(true)),
        ("bias", json!("lora_only")),
        ("modules_to_save", json!(["lm_head"])),
        ("fan_in_fan_out", json!(true)),
        ("layer_replication", json!([[0, 2]])),
        ("init_lora_weights", json!("pissa_niter_4")),
        ("trainable_token_indices", json!([1])),
        ("something_of_a_later_release", json!({"on": true})),
    ];
    for (name, value) in cases {
        let message = Copy::new().set(name, value.clone()).refused();
        let expected = format!("adapter_config.json: {name} = {value} is not supported");
        assert!(message.contains(&expected), "{message}");
    }
    for value in [json!("LOHA"), Value::Null] {
        let message = Copy::new().set("peft_type", value).refused();
        assert!(message.contains("only LORA is supported"), "{message}");
    }
}

#[test]
fn a_configuration_that_is_damaged_or_incomplete_is_refused_naming_the_key() {
    let copy = Copy::new();
    fs::write(copy.path().join("adapter_config.json"), "{\"peft_type\":").unwrap();
    assert!(copy.refused().contains("adapter_config.json: is not valid JSON"));
    fs::remove_file(copy.path().join("adapter_config.json")).unwrap();
    let message = copy.refused();
    assert!(
        message.contains("cannot read") && message.contains("adapter_config.json"),
        "{message}"
    );

    for name in ["r", "lora_alpha"] {
        let message = Copy::new().set(name, json!("<remove>")).refused();
        assert!(message.contains(&format!("missing field `{name}`")), "{message}");
    }
    let message = Copy::new().set("target_modules", json!("<remove>")).refused();
    assert!(message.contains("neither target_modules nor target_parameters"), "{message}");
    let message = Copy::new().set("r", json!(0)).refused();
    assert!(message.contains("adapter_config.json: adapter: the rank must be"), "{message}");
    let message = Copy::new().set("rank_pattern", json!({"q_proj": "four"})).refused();
    assert!(message.contains("the value for 'q_proj' is not a number"), "{message}");
    let message = Copy::new().set("target_modules", json!(["query"])).refused();
    assert!(message.contains("target_modules match no linear of this model"), "{message}");
}

#[test]
fn tensors_left_over_missing_or_misshapen_are_refused_by_name() {
    let text_only = FIRST.replace("language_model.", "");
    let message = Copy::new()
        .rewrite(|tensors| {
            let tensor = tensors.remove(FIRST).unwrap();
            tensors.insert(text_only.clone(), tensor);
        })
        .refused();
    assert!(message.contains("1 of 56 tensors fit no linear"), "{message}");
    assert!(message.contains(&text_only) && message.contains(FIRST), "{message}");

    let message = Copy::new().set("target_modules", json!(["q_proj"])).refused();
    assert!(message.contains("48 of 56 tensors fit no linear"), "{message}");

    let remove = |tensors: &mut BTreeMap<_, _>| drop(tensors.remove(FIRST));
    let message = Copy::new().rewrite(remove).refused();
    assert!(message.contains(&format!("tensor '{FIRST}' is missing")), "{message}");

    let message = Copy::new().set("r", json!(8)).refused();
    assert!(message.contains("has shape [4, 160]; the model needs [8, 160]"), "{message}");
}

#[test]
fn a_damaged_tensor_file_is_refused_naming_it() {
    let copy = Copy::new();
    let path = copy.path().join("adapter_model.safetensors");
    let bytes = fs::read(&path).unwrap();
    for length in [0, 7, 100, bytes.len() - 1] {
        fs::write(&path, &bytes[..length]).unwrap();
        let message = copy.refused();
        assert!(message.contains("adapter_model.safetensors: is damaged"), "{message}");
    }
    fs::remove_file(&path).unwrap();
    assert!(copy.refused().contains("cannot read"));
    let message =
        Copy::new().rewrite(|tensors| tensors.get_mut(FIRST).unwrap().1 = "I32".into()).refused();
    assert!(message.contains("is I32; only F32, F16, BF16 are supported"), "{message}");
}

#[test]
fn bf16_and_fp16_tensors_become_fp32_masters() {
    for (dtype, kind) in [("BF16", Kind::BFloat16), ("F16", Kind::Half)] {
        let whole = Copy::new().import().unwrap();
        let copy = Copy::new();
        copy.rewrite(|tensors| {
            for (name, (_, found, bytes)) in tensors.iter_mut() {
                let master = whole.trainables().iter().find(|t| t.name == *name).unwrap();
                let narrow = master.tensor.detach().to_kind(kind);
                *bytes = vec![0; narrow.numel() * 2];
                narrow.copy_data_u8(bytes, narrow.numel());
                *found = dtype.into();
            }
        });
        for (found, master) in copy.import().unwrap().trainables().iter().zip(whole.trainables()) {
            assert_eq!(found.tensor.kind(), Kind::Float);
            assert_eq!(found.tensor, master.tensor.to_kind(kind).to_kind(Kind::Float));
        }
    }
}

#[test]
fn peft_applies_layers_to_names_but_not_to_whole_paths() {
    let layers = |tensors: &mut BTreeMap<String, _>, keep: &[&str]| {
        tensors.retain(|name, _| keep.iter().any(|part| name.contains(part)));
    };
    for (number, pattern) in [(json!(2), Value::Null), (json!([2]), json!("layers"))] {
        let copy = Copy::new();
        copy.set("layers_to_transform", number).set("layers_pattern", pattern);
        copy.rewrite(|tensors| layers(tensors, &["layers.2."]));
        assert_eq!(copy.import().unwrap().modules().len(), 7);
    }
    let copy = Copy::new();
    let path = "model.language_model.layers.0.mlp.up_proj";
    copy.set("layers_to_transform", json!([2])).set("target_modules", json!([path, "q_proj"]));
    copy.rewrite(|tensors| layers(tensors, &[path, "layers.2.self_attn.q_proj"]));
    assert_eq!(copy.import().unwrap().modules().len(), 2);
    copy.set("layers_pattern", json!(["blocks"]));
    assert!(copy.refused().contains("2 of 4 tensors fit no linear"));
}
