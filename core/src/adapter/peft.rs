//! LoRA adapters in PEFT's files: `adapter_model.safetensors` and `adapter_config.json`.

use std::collections::HashSet;
use std::path::Path;

use safetensors::SafeTensors;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};

use crate::adapter::Adapter;
use crate::adapter::lora::{Lora, LoraShape, Matrix};
use crate::adapter::targets::{ModuleRule, compile};
use crate::checkpoint::atomic::{AtomicDirectory, write_file};
use crate::checkpoint::write_safetensors;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::site::Site;
use crate::state::NamedTensors;

const CONFIG_FILE: &str = "adapter_config.json";
const TENSOR_FILE: &str = "adapter_model.safetensors";
/// The release of PEFT whose files these are.
const PEFT_VERSION: &str = "0.21.2";

/// The name of a matrix in `adapter_model.safetensors`.
pub(crate) fn key(module: &str, matrix: Matrix) -> String {
    let matrix = if matrix == Matrix::A { "lora_A" } else { "lora_B" };
    format!("base_model.model.{module}.{matrix}.weight")
}

/// Settings that say nothing about the arithmetic, whatever their value.
const PASSIVE_SETTINGS: [&str; 9] = [
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
];

/// Ways to initialise that leave the base weights as they are.
const PLAIN_INITIALISATIONS: [&str; 3] = ["eva", "gaussian", "orthogonal"];

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    fn into_vec(self) -> Vec<T> {
        match self {
            Self::One(value) => vec![value],
            Self::Many(values) => values,
        }
    }
}

/// What of `adapter_config.json` decides the arithmetic. `rest` must be inactive.
#[derive(Deserialize)]
struct PeftConfig {
    r: usize,
    lora_alpha: f64,
    #[serde(default)]
    lora_dropout: f64,
    #[serde(default)]
    use_rslora: bool,
    rank_pattern: Option<Map<String, Value>>,
    alpha_pattern: Option<Map<String, Value>>,
    target_modules: ModuleRule,
    exclude_modules: Option<ModuleRule>,
    layers_to_transform: Option<OneOrMany<usize>>,
    layers_pattern: Option<OneOrMany<String>>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

impl PeftConfig {
    fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
        let refuse = |message: String| Error::file(path, message);
        let value: Value = serde_json::from_str(&text)
            .map_err(|error| refuse(format!("is not valid JSON: {error}")))?;
        match value.get("peft_type").and_then(Value::as_str) {
            Some("LORA") => {}
            found => {
                let found = found.unwrap_or("missing");
                return Err(refuse(format!("peft_type is {found}; only LORA is supported")));
            }
        }
        let config: Self = serde_json::from_value(value)
            .map_err(|error| refuse(format!("is not a complete LoRA configuration: {error}")))?;
        match config.rest.iter().find(|(name, value)| is_unsupported(name, value)) {
            Some((name, value)) => Err(refuse(format!("{name} = {value} is not supported"))),
            None => Ok(config),
        }
    }

    fn shape(&self, path: &Path) -> Result<LoraShape> {
        let wrong =
            |name: &str| Error::file(path, format!("the value for '{name}' is not a number"));
        let entries =
            |map: &Option<Map<String, Value>>| map.clone().unwrap_or_default().into_iter();
        let rank_pattern = entries(&self.rank_pattern).map(|(name, value)| {
            let rank = value.as_u64().ok_or_else(|| wrong(&name))?;
            Ok((name, rank as usize))
        });
        let alpha_pattern = entries(&self.alpha_pattern).map(|(name, value)| {
            let alpha = value.as_f64().ok_or_else(|| wrong(&name))?;
            Ok((name, alpha))
        });
        Ok(LoraShape {
            rank: self.r,
            alpha: self.lora_alpha,
            dropout: self.lora_dropout,
            use_rslora: self.use_rslora,
            rank_pattern: rank_pattern.collect::<Result<_>>()?,
            alpha_pattern: alpha_pattern.collect::<Result<_>>()?,
        })
    }

    /// The sites that PEFT would adapt.
    fn select(self, sites: &[Site]) -> Result<Vec<&Site>> {
        let is_target = self.target_modules.matcher()?;
        let is_excluded = self.exclude_modules.as_ref().map(ModuleRule::matcher).transpose()?;
        let layers = self.layers_to_transform.map(OneOrMany::into_vec).unwrap_or_default();
        let patterns = self.layers_pattern.map(OneOrMany::into_vec).unwrap_or_default();
        let layer_expressions: Vec<_> = match patterns.is_empty() {
            true => vec![compile(r"\A.*?\.[^.]*\.(\d+)\.", "layers_pattern")?],
            false => patterns
                .iter()
                .map(|name| compile(&format!(r"\A(?:|.*?\.)(?:{name})\.(\d+)\."), name))
                .collect::<Result<_>>()?,
        };
        let in_layers = |module: &str| {
            // PEFT asks for the layer only of modules that it found by the end of their path.
            let is_named = match &self.target_modules {
                ModuleRule::Names(names) => names.iter().any(|name| name == module),
                ModuleRule::Pattern(_) => true,
            };
            let layer = layer_expressions.iter().find_map(|found| found.captures(module));
            let layer = layer.and_then(|found| found[1].parse().ok());
            layers.is_empty() || is_named || layer.is_some_and(|layer| layers.contains(&layer))
        };
        Ok(sites
            .iter()
            .filter(|site| is_target.matches(&site.module) && in_layers(&site.module))
            .filter(|site| {
                !is_excluded.as_ref().is_some_and(|excluded| excluded.matches(&site.module))
            })
            .collect())
    }
}

fn is_unsupported(name: &str, value: &Value) -> bool {
    let is_off = match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Number(_) => false,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(entries) => entries.is_empty(),
    };
    match name {
        "peft_type" => false,
        "bias" => value != "none" && !is_off,
        "init_lora_weights" => match value {
            Value::String(kind) => !PLAIN_INITIALISATIONS.contains(&kind.as_str()),
            _ => false,
        },
        _ => !is_off && !PASSIVE_SETTINGS.contains(&name),
    }
}

/// [`Lora::import`].
pub(crate) fn import(directory: &Path, sites: &[Site], device: Device) -> Result<Lora> {
    let config_path = directory.join(CONFIG_FILE);
    let config = PeftConfig::read(&config_path)?;
    let in_config = |error: Error| Error::file(&config_path, error.to_string());
    let shape = config.shape(&config_path)?;
    let chosen = config.select(sites).map_err(in_config)?;
    let Some(example) = chosen.first().map(|site| key(&site.module, Matrix::A)) else {
        let message =
            "target_modules match no linear of this model; the adapter was made for another";
        return Err(Error::file(config_path, message));
    };

    let path = directory.join(TENSOR_FILE);
    let bytes = std::fs::read(&path).map_err(Error::io("read", &path))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| {
        Error::file(&path, format!("is damaged or incomplete ({error}); fetch it again"))
    })?;
    let expected: HashSet<_> = chosen
        .iter()
        .flat_map(|site| [key(&site.module, Matrix::A), key(&site.module, Matrix::B)])
        .collect();
    let mut left_over: Vec<_> =
        tensors.names().into_iter().filter(|name| !expected.contains(*name)).collect();
    left_over.sort_unstable();
    if let Some(first) = left_over.first() {
        let message = format!(
            "{} of {} tensors fit no linear that {CONFIG_FILE} targets in this model, the first is \
             '{first}'; names must read like '{example}'",
            left_over.len(),
            tensors.len()
        );
        return Err(Error::file(path, message));
    }
    Lora::build(&chosen, shape, device, |site, rank, matrix| {
        let expected_shape = match matrix {
            Matrix::A => [rank, site.in_features],
            Matrix::B => [site.out_features, rank],
        };
        read_matrix(&path, &tensors, &key(&site.module, matrix), expected_shape)
    })
    .map_err(|error| match error {
        Error::Adapter { .. } => in_config(error),
        other => other,
    })
}

fn read_matrix(
    path: &Path,
    tensors: &SafeTensors<'_>,
    name: &str,
    expected_shape: [usize; 2],
) -> Result<Tensor> {
    let refuse = |message: String| Error::file(path, format!("tensor '{name}' {message}"));
    let view = tensors
        .tensor(name)
        .map_err(|_| refuse("is missing, though the configuration targets its module".into()))?;
    if view.shape() != expected_shape {
        let found = view.shape();
        return Err(refuse(format!("has shape {found:?}; the model needs {expected_shape:?}")));
    }
    let kind = match Dtype::from_name(&view.dtype().to_string()).map(Dtype::kind) {
        Ok(kind @ (Kind::Float | Kind::Half | Kind::BFloat16)) => kind,
        _ => return Err(refuse(format!("is {}; only F32, F16, BF16 are supported", view.dtype()))),
    };
    let size = expected_shape.map(|extent| extent as i64);
    Ok(Tensor::f_from_data_size(view.data(), &size, kind)?)
}

/// [`Adapter::export`](crate::adapter::Adapter::export).
///
/// An earlier adapter there is replaced, but nothing else is: what a user has put beside it stays.
pub(crate) fn export(lora: &Lora, directory: &Path, base_model: &str) -> Result<()> {
    if let Ok(entries) = std::fs::read_dir(directory) {
        for entry in entries {
            let name = entry.map_err(Error::io("list", directory))?.file_name();
            if name != CONFIG_FILE && name != TENSOR_FILE {
                let name = name.display();
                let message =
                    format!("holds another file, '{name}'; name a new or an empty folder");
                return Err(Error::file(directory, message));
            }
        }
    }
    let tensors = lora
        .trainables()
        .iter()
        .map(|trainable| Ok((trainable.name.clone(), trainable.tensor.f_detach()?)))
        .collect::<Result<NamedTensors>>()?;
    let folder = AtomicDirectory::create(directory, CONFIG_FILE)?;
    // transformers refuses files that do not say which framework's layout they have.
    write_safetensors(&folder.path().join(TENSOR_FILE), &tensors, &[("format", "pt")])?;
    let config = format!("{:#}\n", config_of(lora, base_model));
    write_file(&folder.path().join(CONFIG_FILE), config.as_bytes())?;
    folder.commit()
}

/// The configuration with which PEFT adapts exactly the modules of `lora`.
///
/// They are named by their whole paths: shorter names would also match modules of the same name
/// elsewhere, such as in other layers or in a vision tower.
fn config_of(lora: &Lora, base_model: &str) -> Value {
    let shape = lora.shape();
    let ranks = shape.rank_pattern.iter().map(|(name, rank)| (name.clone(), json!(rank)));
    let alphas = shape.alpha_pattern.iter().map(|(name, alpha)| (name.clone(), number(*alpha)));
    json!({
        "alpha_pattern": alphas.collect::<Map<_, _>>(),
        "auto_mapping": null,
        "base_model_name_or_path": base_model,
        "bias": "none",
        "exclude_modules": null,
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "layers_pattern": null,
        "layers_to_transform": null,
        "lora_alpha": number(shape.alpha),
        "lora_dropout": shape.dropout,
        "modules_to_save": null,
        "peft_type": "LORA",
        "peft_version": PEFT_VERSION,
        "r": shape.rank,
        "rank_pattern": ranks.collect::<Map<_, _>>(),
        "revision": null,
        "target_modules": lora.modules(),
        "target_parameters": null,
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": shape.use_rslora,
    })
}

/// Whole numbers without a fraction: some readers take alpha for an integer.
fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e15 { json!(value as i64) } else { json!(value) }
}
