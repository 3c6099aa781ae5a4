//! Everything resident: no source, no stream, no executor.

use std::fs;
use std::path::{Path, PathBuf};

use blockstreamer_core::adapter::Adapter;
use blockstreamer_core::batch::{Batch, IGNORE_LABEL};
use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::dtype::Dtype;
use blockstreamer_core::execute::{BlockScope, Residents};
use blockstreamer_core::family::{Model, ModelFamily, ModelOptions};
use blockstreamer_core::numerics::{AttentionKernel, ExpertKernel};
use blockstreamer_core::state::{HIDDEN, NamedTensors, State};
use blockstreamer_core::tch::{Device, Kind, Reduction, Tensor};
use blockstreamer_core::vision::Patches;
use blockstreamer_core::weights::{BlockPlan, ExpertLayout, Role};
use blockstreamer_qwen3_vl::Qwen3Vl;
use safetensors::SafeTensors;

pub(crate) fn golden(variant: &str, file: &str) -> PathBuf {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens");
    goldens.join(variant).join(file)
}

pub(crate) fn config(variant: &str) -> String {
    fs::read_to_string(golden(variant, "config.json")).unwrap()
}

pub(crate) fn read(variant: &str, file: &str) -> NamedTensors {
    let bytes = fs::read(golden(variant, file)).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let load = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let kind = Dtype::from_name(&view.dtype().to_string()).unwrap().kind();
        let shape: Vec<i64> = view.shape().iter().map(|extent| *extent as i64).collect();
        (name, Tensor::f_from_data_size(view.data(), &shape, kind).unwrap())
    };
    tensors.tensors().into_iter().map(load).collect()
}

/// What a model computes of a batch.
pub(crate) struct Outputs {
    /// The state after every streamed block that was visited.
    pub(crate) states: Vec<(BlockPlan, State)>,
    pub(crate) logits: Tensor,
    pub(crate) loss: Tensor,
}

impl Outputs {
    /// Hidden states after each decoder layer; of one in several blocks after the last of them.
    pub(crate) fn layers(&self) -> Vec<&Tensor> {
        let last_parts = self.states.iter().enumerate().filter(|(index, (plan, _))| {
            let next = self.states.get(index + 1).and_then(|(next, _)| next.layer);
            plan.layer.is_some() && next != plan.layer
        });
        last_parts.map(|(_, (_, state))| state.get(HIDDEN).unwrap()).collect()
    }

    /// Layer outputs and logits by their names in the golden files.
    pub(crate) fn named(&self) -> Vec<(String, &Tensor)> {
        let layers = self.layers().into_iter().enumerate();
        let layers = layers.map(|(index, layer)| (format!("layer_out.{index}"), layer));
        layers.chain([("logits".to_owned(), &self.logits)]).collect()
    }
}

pub(crate) struct Resident {
    pub(crate) model: Box<dyn Model>,
    blocks: Vec<(BlockPlan, NamedTensors)>,
    pub(crate) residents: Residents,
}

impl Resident {
    pub(crate) fn load(variant: &str) -> Self {
        Self::with_config(variant, &config(variant), 1)
    }

    /// The checkpoint of `variant` under another config.
    pub(crate) fn with_config(variant: &str, config: &str, num_expert_groups: usize) -> Self {
        let options = ModelOptions { num_expert_groups, ..ModelOptions::default() };
        let model = Qwen3Vl.open(config, &options).unwrap();
        let table = model.weights().unwrap();
        let files =
            (1..=3).map(|part| read(variant, &format!("model-0000{part}-of-00003.safetensors")));
        let files: Vec<_> = files.collect();
        let find = |name: &str| files.iter().find_map(|file| file.find(name)).expect(name);
        let mut blocks = Vec::new();
        let mut residents = Residents::default();
        for (index, plan) in table.blocks.iter().enumerate() {
            let mut tensors = NamedTensors::new();
            for weight in table.weights.iter().filter(|weight| weight.block.0 == index) {
                let mut tensor = find(&weight.checkpoint).shallow_clone();
                let shape: Vec<i64> = weight.shape.iter().map(|extent| *extent as i64).collect();
                assert_eq!(tensor.size(), shape, "{}", weight.checkpoint);
                if let Some(slice) = &weight.slice {
                    tensor = tensor.narrow(0, slice.start as i64, slice.len() as i64);
                }
                if weight.role == Role::Experts(ExpertLayout::InOut) {
                    tensor = tensor.transpose(1, 2);
                }
                tensors.insert(&weight.local, tensor);
            }
            if plan.placement.is_streamed() {
                blocks.push((plan.clone(), tensors));
                continue;
            }
            for (name, tensor) in tensors.iter() {
                residents.tensors.insert(name, tensor.shallow_clone());
            }
        }
        Self { model, blocks, residents }
    }

    /// Names of the checkpoint's tensors that have no place in the table.
    pub(crate) fn left_over(&self, variant: &str) -> Vec<String> {
        let table = self.model.weights().unwrap();
        let known = |name: &str| table.weights.iter().any(|weight| weight.checkpoint == name);
        let files =
            (1..=3).map(|part| read(variant, &format!("model-0000{part}-of-00003.safetensors")));
        let names: Vec<_> = files
            .flat_map(|file| file.iter().map(|(name, _)| name.to_owned()).collect::<Vec<_>>())
            .collect();
        let left =
            names.into_iter().filter(|name| !known(name) && !self.model.ignores(name).unwrap());
        left.collect()
    }

    pub(crate) fn scope<'a>(
        &'a self,
        none: &'a NamedTensors,
        kernel: AttentionKernel,
        kind: Kind,
        adapter: Option<&'a dyn Adapter>,
    ) -> BlockScope<'a> {
        BlockScope {
            block: None,
            block_name: "embedding and head",
            tensors: none,
            residents: &self.residents,
            adapter,
            dropout_seed: None,
            compute_kind: kind,
            device: Device::Cpu,
            attention: kernel,
            experts: ExpertKernel::Loop,
        }
    }

    pub(crate) fn run(
        &self,
        batch: &Batch,
        kernel: AttentionKernel,
        kind: Kind,
        adapter: Option<&dyn Adapter>,
    ) -> Outputs {
        let none = NamedTensors::new();
        let outside = self.scope(&none, kernel, kind, adapter);
        let mut batch = batch.clone();
        self.model.prepare(&mut batch).unwrap();
        let (context, mut state) = self.model.embed(&outside, &batch).unwrap();
        let mut states = Vec::new();
        for (index, (plan, tensors)) in self.blocks.iter().enumerate() {
            if plan.only_with_vision && !batch.has_vision() {
                continue;
            }
            let block = BlockIndex(index);
            let scope =
                BlockScope { block: Some(block), block_name: &plan.name, tensors, ..outside };
            state = self.model.forward_block(block, &scope, &context, state).unwrap();
            states.push((plan.clone(), state.clone()));
        }
        let hidden = self.model.final_hidden(&outside, &context, state).unwrap();
        let logits = self.model.logits(&outside, &hidden).unwrap();
        assert_eq!(logits.kind(), kind);
        let loss = batch.labels.as_ref().map_or_else(Tensor::new, |labels| loss(&logits, labels));
        Outputs { states, logits, loss }
    }
}

/// Mean cross-entropy of the next token, fp32.
fn loss(logits: &Tensor, labels: &Tensor) -> Tensor {
    let sequence = labels.size()[1];
    let logits = logits.to_kind(Kind::Float).narrow(1, 0, sequence - 1).flatten(0, 1);
    let labels = labels.narrow(1, 1, sequence - 1).flatten(0, 1);
    logits.cross_entropy_loss(&labels, None::<Tensor>, Reduction::Mean, IGNORE_LABEL, 0.0)
}

/// The inputs of a golden file.
pub(crate) fn batch(golden: &NamedTensors) -> Batch {
    let input = |name: &str| golden.get(&format!("in.{name}")).unwrap().shallow_clone();
    let patches = |pixels: &str, grids: &str| {
        golden.find(&format!("in.{pixels}")).map(|pixels| {
            let rows = Vec::<Vec<i64>>::try_from(input(grids)).unwrap();
            let grids = rows.iter().map(|row| [0, 1, 2].map(|axis| row[axis] as usize)).collect();
            Patches { pixels: pixels.shallow_clone(), grids }
        })
    };
    Batch {
        attention_mask: Some(input("attention_mask").to_kind(Kind::Bool)),
        labels: Some(input("labels")),
        images: patches("pixel_values", "image_grid_thw"),
        videos: patches("pixel_values_videos", "video_grid_thw"),
        ..Batch::new(input("input_ids"))
    }
}

pub(crate) fn max_abs(tensor: &Tensor) -> f64 {
    tensor.to_kind(Kind::Double).abs().max().double_value(&[])
}

/// Largest difference, and largest value of `wanted`, where there are tokens.
pub(crate) fn compare(got: &Tensor, wanted: &Tensor, batch: &Batch) -> (f64, f64) {
    assert_eq!((got.size(), got.kind()), (wanted.size(), wanted.kind()));
    let valid = batch.attention_mask.as_ref().unwrap().unsqueeze(-1).to_kind(Kind::Double);
    let (got, wanted) = (got.to_kind(Kind::Double) * &valid, wanted.to_kind(Kind::Double) * valid);
    (max_abs(&(got - &wanted)), max_abs(&wanted))
}

/// Distance of neighbouring bf16 numbers at the size of `value`.
pub(crate) fn bf16_ulp(value: f64) -> f64 {
    (value.log2().floor() - 7.0).exp2()
}
