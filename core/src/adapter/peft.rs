//! LoRA adapters in PEFT's files: `adapter_model.safetensors` and `adapter_config.json`.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use safetensors::SafeTensors;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};

use crate::adapter::Adapter;
use crate::adapter::lora::{Lora, LoraShape, Matrix, NewMatrix};
use crate::adapter::targets::{ModuleRule, Target, compile, names_parameter};
use crate::checkpoint::atomic::{AtomicDirectory, write_file};
use crate::checkpoint::write_safetensors;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::site::{Site, SiteKind};
use crate::state::NamedTensors;

const CONFIG_FILE: &str = "adapter_config.json";
const TENSOR_FILE: &str = "adapter_model.safetensors";
/// The release of PEFT whose files these are.
const PEFT_VERSION: &str = "0.21.2";

/// The first release whose factors of experts are `[num_experts * rank, in]` and `[out, rank * num_experts]`
/// for the weights `[num_experts, out, in]` of transformers 5. Earlier ones exchange in and out.
const FIRST_WITH_OUT_IN: (u64, u64) = (0, 19);

/// The module under whose name PEFT keeps the matrices of each target, by [`Target::path`].
///
/// It wraps the module that holds a parameter. Where several parameters of one module are adapted, the
/// wrappers nest in the order in which the module declares them, the last one outside; an inner one is the
/// `base_layer` of the next.
pub(crate) fn module_keys(targets: &[Target<'_>]) -> HashMap<String, String> {
    let mut wrapped: HashMap<String, Vec<String>> = HashMap::new();
    let mut keys = HashMap::new();
    for target in targets {
        let path = target.path();
        match path.rsplit_once('.') {
            Some((module, _)) if target.is_parameter => {
                let paths = wrapped.entry(module.to_owned()).or_default();
                // A layer in several blocks names its parameters in each.
                if !paths.contains(&path) {
                    paths.push(path);
                }
            }
            _ => drop(keys.insert(path.clone(), path)),
        }
    }
    for (module, paths) in wrapped {
        let mut key = module;
        for path in paths.into_iter().rev() {
            keys.insert(path, key.clone());
            key += ".base_layer";
        }
    }
    keys
}

/// The name of a matrix in `adapter_model.safetensors`.
pub(crate) fn key(module: &str, matrix: Matrix) -> String {
    let matrix = if matrix == Matrix::A { "lora_A" } else { "lora_B" };
    format!("base_model.model.{module}.{matrix}.weight")
}

/// Settings that say nothing about the arithmetic, whatever their value.
const PASSIVE_SETTINGS: [&str; 8] = [
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "inference_mode",
    "megatron_core",
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
    fn as_slice(&self) -> &[T] {
        match self {
            Self::One(value) => std::slice::from_ref(value),
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
    target_modules: Option<ModuleRule>,
    target_parameters: Option<Vec<String>>,
    exclude_modules: Option<ModuleRule>,
    layers_to_transform: Option<OneOrMany<usize>>,
    layers_pattern: Option<OneOrMany<String>>,
    peft_version: Option<String>,
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
        if let Some((name, value)) =
            config.rest.iter().find(|(name, value)| is_unsupported(name, value))
        {
            return Err(refuse(format!("{name} = {value} is not supported")));
        }
        match (&config.target_modules, &config.target_parameters) {
            (None, None) => {
                Err(refuse("names neither target_modules nor target_parameters".into()))
            }
            _ => Ok(config),
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

    /// The sites that PEFT would adapt. Exclusions and layers do not count for parameters.
    fn select<'a>(&self, sites: &'a [Site]) -> Result<Vec<Target<'a>>> {
        let none = ModuleRule::Names(Vec::new());
        let target_modules = self.target_modules.as_ref().unwrap_or(&none);
        let is_target = target_modules.matcher()?;
        let is_excluded = self.exclude_modules.as_ref().map(ModuleRule::matcher).transpose()?;
        let layers = self.layers_to_transform.as_ref().map(OneOrMany::as_slice).unwrap_or_default();
        let patterns = self.layers_pattern.as_ref().map(OneOrMany::as_slice).unwrap_or_default();
        let layer_expressions: Vec<_> = match patterns.is_empty() {
            true => vec![compile(r"\A.*?\.[^.]*\.(\d+)\.", "layers_pattern")?],
            false => patterns
                .iter()
                .map(|name| compile(&format!(r"\A(?:|.*?\.)(?:{name})\.(\d+)\."), name))
                .collect::<Result<_>>()?,
        };
        let in_layers = |module: &str| {
            // PEFT asks for the layer only of modules that it found by the end of their path.
            let is_named = match target_modules {
                ModuleRule::Names(names) => names.iter().any(|name| name == module),
                ModuleRule::Pattern(_) => true,
            };
            let layer = layer_expressions.iter().find_map(|found| found.captures(module));
            let layer = layer.and_then(|found| found[1].parse().ok());
            layers.is_empty() || is_named || layer.is_some_and(|layer| layers.contains(&layer))
        };
        let parameters = self.target_parameters.as_deref().unwrap_or_default();
        Target::choose(
            sites,
            |site| {
                is_target.matches(&site.module)
                    && in_layers(&site.module)
                    && !is_excluded.as_ref().is_some_and(|excluded| excluded.matches(&site.module))
            },
            |site| names_parameter(parameters, site),
        )
    }

    /// Whether the factors of experts mean what they mean here; where input and output are equally wide,
    /// their shapes do not show it.
    fn has_out_in_experts(&self) -> bool {
        let version = self.peft_version.as_deref().unwrap_or_default();
        let mut parts = version.split('.').map(str::parse::<u64>);
        match (parts.next(), parts.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= FIRST_WITH_OUT_IN,
            _ => false,
        }
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
    let keys = module_keys(&chosen);
    let names = |target: &Target<'_>, matrix| {
        key(keys.get(&target.path()).unwrap_or(&target.site.module), matrix)
    };
    let Some(example) = chosen.first().map(|target| names(target, Matrix::A)) else {
        let message = "target_modules match no linear of this model and target_parameters nothing; the \
                       adapter was made for another";
        return Err(Error::file(config_path, message));
    };
    let is_square = |site: &Site| site.num_experts() > 1 && site.in_features == site.out_features;
    if let Some(target) = chosen.iter().find(|target| is_square(target.site))
        && !config.has_out_in_experts()
    {
        let message = format!(
            "peft_version is {}; peft before 0.19 exchanges the two factors of experts, which shapes do not \
             show at '{}', where input and output are equally wide; save the adapter with peft 0.19 or later",
            config.peft_version.as_deref().unwrap_or("missing"),
            target.site.module
        );
        return Err(Error::file(config_path, message));
    }

    let path = directory.join(TENSOR_FILE);
    let bytes = std::fs::read(&path).map_err(Error::io("read", &path))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| {
        Error::file(&path, format!("is damaged or incomplete ({error}); fetch it again"))
    })?;
    let expected: HashSet<_> = chosen
        .iter()
        .flat_map(|target| [names(target, Matrix::A), names(target, Matrix::B)])
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
    Lora::build(&chosen, shape, device, |slot| read_matrix(&path, &tensors, slot)).map_err(
        |error| match error {
            Error::Adapter { .. } => in_config(error),
            other => other,
        },
    )
}

fn read_matrix(path: &Path, tensors: &SafeTensors<'_>, slot: &NewMatrix<'_>) -> Result<Tensor> {
    let &NewMatrix { site, name, matrix, shape } = slot;
    let refuse = |message: String| Error::file(path, format!("tensor '{name}' {message}"));
    let view = tensors
        .tensor(name)
        .map_err(|_| refuse("is missing, though the configuration targets its module".into()))?;
    if view.shape() != shape {
        let found = view.shape();
        let exchanged = match matrix {
            Matrix::A => [shape[0], site.out_features],
            Matrix::B => [site.in_features, shape[1]],
        };
        let reason = match site.kind {
            SiteKind::Experts { .. } if found == exchanged => {
                "; input and output are exchanged, as peft before 0.19 writes them: save the adapter with \
                 peft 0.19 or later and transformers 5"
            }
            _ => "",
        };
        return Err(refuse(format!("has shape {found:?}; the model needs {shape:?}{reason}")));
    }
    let kind = match Dtype::from_name(&view.dtype().to_string()).map(Dtype::kind) {
        Ok(kind @ (Kind::Float | Kind::Half | Kind::BFloat16)) => kind,
        _ => return Err(refuse(format!("is {}; only F32, F16, BF16 are supported", view.dtype()))),
    };
    let size = shape.map(|extent| extent as i64);
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

/// The configuration with which PEFT adapts exactly the modules and parameters of `lora`.
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
        "target_parameters": if lora.parameters().is_empty() { Value::Null } else { json!(lora.parameters()) },
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": shape.use_rslora,
    })
}

/// Whole numbers without a fraction: some readers take alpha for an integer.
fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e15 { json!(value as i64) } else { json!(value) }
}
