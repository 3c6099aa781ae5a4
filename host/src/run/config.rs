//! The run file: every setting of a training run, with its default.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use blockstreamer_core::adapter::{LayerRule, LoraOptions, LoraShape, ModuleRule};
use blockstreamer_core::family::ModelOptions;
use blockstreamer_core::optimizer::{Decay, OptimizerOptions};
use blockstreamer_core::weights::ExpertLayout;
use jiff::civil::Date;
use serde::{Deserialize, Serialize};
use tch::Device;

use crate::cli::ExpertArgs;
use crate::data::{Overflow, PixelLimits};
use crate::engine::{Job, Launch, OpenModel, Precision, StreamConfig};
use crate::plugins::Registry;
use crate::size::Size;

/// Every setting of a training run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// Folder of the model: `config.json`, `*.safetensors`, `tokenizer.json`.
    pub model: PathBuf,
    /// JSONL file of the rows: a path, or a table with more settings.
    #[serde(deserialize_with = "path_or_table")]
    pub data: DataConfig,
    /// Folder of the run.
    pub out: PathBuf,
    /// Optimizer steps. Not given: as many as `epochs` has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Passes over the rows, when `steps` is not given.
    pub epochs: u64,
    /// Decides initial adapter values, row order and dropout.
    pub seed: u64,
    /// Largest learning rate.
    pub learning_rate: f64,
    /// Rows of one micro-batch.
    pub batch_size: usize,
    /// Micro-batches of one optimizer step; all of them use a block during one visit.
    pub micro_batches: usize,
    /// Most tokens of a row.
    pub sequence_length: usize,
    /// Steps between checkpoints; 0: only at the end.
    pub checkpoint_every: u64,
    /// Checkpoints that are kept.
    pub keep_checkpoints: usize,
    /// `auto`, `cpu`, `cuda`, `cuda:1`.
    pub device: String,
    /// Compute dtype; `auto`: bf16 on CUDA, fp32 on the CPU.
    pub dtype: Precision,
    /// How experts lie in the model's files, where their shapes cannot tell: `in_out`, `out_in`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert_layout: Option<ExpertLayout>,
    /// The adapter.
    pub lora: LoraConfig,
    /// Streaming.
    pub stream: StreamConfig,
    /// The optimizer.
    pub optimizer: OptimizerConfig,
}

impl RunConfig {
    /// How `open` is executed for `job` by these settings.
    pub fn launch<'a>(
        &'a self,
        registry: &'a Registry,
        open: &'a OpenModel,
        device: Device,
        job: Job,
    ) -> Launch<'a> {
        let (stream, dtype, seed) = (&self.stream, self.dtype, self.seed);
        Launch { registry, open, stream, device, dtype, job, seed }
    }

    /// What it decides about the model.
    pub fn model_options(&self) -> ModelOptions {
        ModelOptions {
            num_expert_groups: self.stream.expert_groups.unwrap_or(1),
            expert_layout: self.expert_layout,
        }
    }
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            model: PathBuf::new(),
            data: DataConfig::default(),
            out: PathBuf::new(),
            steps: None,
            epochs: 1,
            seed: 0,
            learning_rate: 2e-4,
            batch_size: 1,
            micro_batches: 1,
            sequence_length: 2048,
            checkpoint_every: 0,
            keep_checkpoints: 3,
            device: "auto".into(),
            dtype: Precision::Auto,
            expert_layout: None,
            lora: LoraConfig::default(),
            stream: StreamConfig::default(),
            optimizer: OptimizerConfig::default(),
        }
    }
}

/// `[lora]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoraConfig {
    /// Rank.
    pub rank: usize,
    /// Scaling is `alpha / rank`.
    pub alpha: f64,
    /// Dropout on the adapter's input.
    pub dropout: f64,
    /// Scaling is `alpha / sqrt(rank)` instead.
    pub rslora: bool,
    /// Names, `all-linear`, or a regular expression over module paths.
    pub target_modules: ModuleRule,
    /// Parameters, by path or the end of one: `mlp.experts.down_proj`. Experts and routers are parameters.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub target_parameters: Vec<String>,
    /// Modules left out of these.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exclude_modules: Option<ModuleRule>,
    /// Only the top share of the layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_fraction: Option<f64>,
    /// Only these layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<Vec<usize>>,
    /// Whether `all-linear` takes in the vision tower.
    pub vision: bool,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self {
            rank: 16,
            alpha: 32.0,
            dropout: 0.0,
            rslora: false,
            target_modules: ModuleRule::all_linear(),
            target_parameters: Vec::new(),
            exclude_modules: None,
            top_fraction: None,
            layers: None,
            vision: false,
        }
    }
}

impl LoraConfig {
    /// The options of a new adapter.
    pub fn options(&self, seed: u64) -> Result<LoraOptions> {
        let layers = match (self.top_fraction, &self.layers) {
            (Some(_), Some(_)) => bail!("[lora] takes top_fraction or layers, not both"),
            (Some(fraction), None) => LayerRule::TopFraction(fraction),
            (None, Some(layers)) => LayerRule::Only(layers.clone()),
            (None, None) => LayerRule::All,
        };
        Ok(LoraOptions {
            shape: LoraShape {
                rank: self.rank,
                alpha: self.alpha,
                dropout: self.dropout,
                use_rslora: self.rslora,
                ..LoraShape::default()
            },
            target_modules: self.target_modules.clone(),
            target_parameters: self.target_parameters.clone(),
            exclude_modules: self.exclude_modules.clone(),
            layers,
            vision: self.vision,
            seed,
        })
    }
}

/// `data = "FILE"`, or `[data]` with `path = "FILE"` and more.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// The JSONL file.
    pub path: PathBuf,
    /// What becomes of rows longer than `sequence_length`: `error`, `skip`, `truncate`.
    pub overflow: Overflow,
    /// Whether each epoch has its own order.
    pub shuffle: bool,
    /// Fewest pixels of a picture after resizing. Not given, here and below: the model's own bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_pixels: Option<usize>,
    /// Most pixels of a picture, or of each frame of a film, after resizing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_pixels: Option<usize>,
    /// What chat templates print as the current date, `2026-11-30`. Not given: the day on which the run
    /// began, in UTC.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub date: Option<Date>,
}

impl DataConfig {
    /// The bounds of pictures.
    pub fn pixels(&self) -> PixelLimits {
        PixelLimits { min_pixels: self.min_pixels, max_pixels: self.max_pixels }
    }
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            path: PathBuf::new(),
            overflow: Overflow::Error,
            shuffle: true,
            min_pixels: None,
            max_pixels: None,
            date: None,
        }
    }
}

fn path_or_table<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<DataConfig, D::Error> {
    let mut settings = match toml::Value::deserialize(deserializer)? {
        toml::Value::String(path) => {
            return Ok(DataConfig { path: path.into(), ..DataConfig::default() });
        }
        settings => settings,
    };
    // TOML has dates of its own, which are written without quotes.
    if let Some(date) = settings.get_mut("date").filter(|date| date.is_datetime()) {
        *date = toml::Value::String(date.to_string());
    }
    settings.try_into().map_err(serde::de::Error::custom)
}

/// `[optimizer]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// `adamw`, `adam`, `sgd`.
    pub name: String,
    /// `constant`, `linear`, `cosine`.
    pub schedule: Decay,
    /// Steps until the largest learning rate.
    pub warmup_steps: u64,
    /// Largest norm of all gradients together; 0: no clipping.
    pub max_grad_norm: f64,
    /// Decays of Adam's two means. Not given, here and below: the optimizer's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub betas: Option<(f64, f64)>,
    /// Added to the root of Adam's second mean.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eps: Option<f64>,
    /// Weight decay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// Momentum of `sgd`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub momentum: Option<f64>,
    /// Nesterov's form of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nesterov: Option<bool>,
}

impl OptimizerConfig {
    /// The options of the optimizer.
    pub fn options(&self) -> OptimizerOptions {
        let Self { betas, eps, weight_decay, momentum, nesterov, .. } = *self;
        OptimizerOptions { betas, eps, weight_decay, momentum, nesterov }
    }
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            name: "adamw".into(),
            schedule: Decay::Constant,
            warmup_steps: 0,
            max_grad_norm: 1.0,
            betas: None,
            eps: None,
            weight_decay: None,
            momentum: None,
            nesterov: None,
        }
    }
}

/// What the command line changes, besides the file.
#[derive(Debug, Default, Clone)]
pub struct Overrides {
    /// `--model`
    pub model: Option<PathBuf>,
    /// `--data`
    pub data: Option<PathBuf>,
    /// `--out`
    pub out: Option<PathBuf>,
    /// `--vram`
    pub vram: Option<Size>,
    /// `--ram`
    pub ram: Option<Size>,
    /// `--expert-layout` and `--expert-groups`
    pub experts: ExpertArgs,
    /// `--set key=value`, in order.
    pub set: Vec<String>,
}

impl RunConfig {
    /// The run file `path`, if any, changed by the command line; paths in it are relative to it.
    ///
    /// # Errors
    /// Names the file and the key that is unknown, missing or out of range.
    pub fn load(path: Option<&Path>, overrides: &Overrides) -> Result<Self> {
        let mut table = match path {
            None => toml::Table::new(),
            Some(path) => {
                let text = std::fs::read_to_string(path)
                    .with_context(|| format!("cannot read the run file {}", path.display()))?;
                text.parse()
                    .with_context(|| format!("the run file {} is not TOML", path.display()))?
            }
        };
        if let Some(folder) = path.and_then(Path::parent) {
            let relative = |value: Option<&mut toml::Value>| match value {
                Some(toml::Value::String(path)) => {
                    *path = folder.join(&*path).to_string_lossy().into_owned();
                }
                Some(toml::Value::Table(settings)) => {
                    if let Some(toml::Value::String(path)) = settings.get_mut("path") {
                        *path = folder.join(&*path).to_string_lossy().into_owned();
                    }
                }
                _ => {}
            };
            for key in ["model", "data", "out"] {
                relative(table.get_mut(key));
            }
            let stream = table.get_mut("stream").and_then(toml::Value::as_table_mut);
            relative(stream.and_then(|stream| stream.get_mut("shards")));
        }
        for setting in &overrides.set {
            set(&mut table, setting)?;
        }
        let mut config: Self = table.try_into().with_context(|| match path {
            Some(path) => format!("the run file {} or a --set is wrong", path.display()),
            None => "a --set is wrong".to_owned(),
        })?;
        for (target, given) in [
            (&mut config.model, &overrides.model),
            (&mut config.data.path, &overrides.data),
            (&mut config.out, &overrides.out),
        ] {
            if let Some(given) = given {
                target.clone_from(given);
            }
        }
        config.stream.vram = overrides.vram.or(config.stream.vram);
        config.stream.ram = overrides.ram.or(config.stream.ram);
        let experts = overrides.experts;
        config.stream.expert_groups = experts.expert_groups.or(config.stream.expert_groups);
        config.expert_layout = experts.expert_layout.or(config.expert_layout);
        config.check()?;
        // So that config.toml, which lies elsewhere, means the same files.
        let paths = [&mut config.model, &mut config.data.path, &mut config.out];
        for path in paths.into_iter().chain(&mut config.stream.shards) {
            *path = std::path::absolute(&*path)
                .with_context(|| format!("{} is no usable path", path.display()))?;
        }
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        for (key, path) in [("model", &self.model), ("data", &self.data.path), ("out", &self.out)] {
            if path.as_os_str().is_empty() {
                bail!("no {key} is given: pass --{key} or write `{key} = \"…\"` into the run file");
            }
        }
        if self.steps == Some(0) || (self.steps.is_none() && self.epochs == 0) {
            bail!("steps (or epochs) must be at least 1");
        }
        if !(self.learning_rate.is_finite() && self.learning_rate > 0.0) {
            bail!("learning_rate must be greater than 0, not {}", self.learning_rate);
        }
        if self.lora.dropout > 0.0 && !self.lora.target_parameters.is_empty() {
            bail!(
                "lora.dropout must be 0 with lora.target_parameters, which PEFT trains without dropout"
            );
        }
        if self.keep_checkpoints == 0 {
            bail!("keep_checkpoints must be at least 1");
        }
        if !(self.optimizer.max_grad_norm.is_finite() && self.optimizer.max_grad_norm >= 0.0) {
            bail!(
                "optimizer.max_grad_norm must be 0 (off) or more, not {}",
                self.optimizer.max_grad_norm
            );
        }
        Ok(())
    }
}

/// Applies `a.b=value`; the value is read as TOML, and as a plain string where it is none.
fn set(table: &mut toml::Table, setting: &str) -> Result<()> {
    let (key, value) = setting.split_once('=').with_context(|| {
        format!("--set takes key=value, for example lora.rank=8, not '{setting}'")
    })?;
    let value = format!("value = {value}")
        .parse::<toml::Table>()
        .ok()
        .and_then(|mut parsed| parsed.remove("value"))
        .unwrap_or_else(|| toml::Value::String(value.to_owned()));
    let mut parts: Vec<&str> = key.trim().split('.').collect();
    let last = parts.pop().unwrap_or_default();
    let mut target = table;
    for part in parts {
        let entry = target.entry(part).or_insert_with(|| toml::Value::Table(toml::Table::new()));
        if part == "data" && entry.is_str() {
            *entry =
                toml::Value::Table(toml::Table::from_iter([("path".to_owned(), entry.clone())]));
        }
        target = entry
            .as_table_mut()
            .with_context(|| format!("--set {key}: '{part}' is not a table"))?;
    }
    target.insert(last.to_owned(), value);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str, set: &[&str]) -> Result<RunConfig> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("run.toml");
        std::fs::write(&path, text)?;
        let set = set.iter().map(|setting| (*setting).to_owned()).collect();
        RunConfig::load(Some(&path), &Overrides { set, ..Overrides::default() })
    }

    const PATHS: &str = "model = '/m'\ndata = '/d'\nout = '/o'\n";

    #[test]
    fn a_set_wins_over_the_file_and_defaults_fill_the_rest() {
        let text = format!("{PATHS}steps = 5\n[lora]\nrank = 4\n");
        let config =
            load(&text, &["lora.rank=8", "optimizer.name=sgd", "stream.prefetch_ahead=0"]).unwrap();
        assert_eq!((config.steps, config.lora.rank, config.lora.alpha), (Some(5), 8, 32.0));
        assert_eq!((config.optimizer.name.as_str(), config.stream.prefetch_ahead), ("sgd", 0));
        assert_eq!(config.model, Path::new("/m"));
    }

    #[test]
    fn data_is_a_path_or_a_table() {
        let config = load(PATHS, &["data.overflow=skip"]).unwrap();
        assert_eq!(
            (config.data.path.as_path(), config.data.overflow),
            (Path::new("/d"), Overflow::Skip)
        );
        let text =
            "model = '/m'\nout = '/o'\n[data]\npath = '/d'\nshuffle = false\ndate = 2024-02-29\n";
        let config = load(text, &[]).unwrap();
        assert!(!config.data.shuffle);
        let date = Some(jiff::civil::date(2024, 2, 29));
        assert_eq!(config.data.date, date);
        assert_eq!(load(PATHS, &["data.date=2024-02-29"]).unwrap().data.date, date);
        assert_eq!(load(PATHS, &["data.date='2024-02-29'"]).unwrap().data.date, date);
        let error = format!("{:#}", load(PATHS, &["data.date=2023-02-29"]).unwrap_err());
        assert!(error.contains("`date`") && error.contains("2023-02"), "{error}");
        assert!(format!("{:#}", load(PATHS, &["data.shufle=1"]).unwrap_err()).contains("shufle"));
    }

    #[test]
    fn paths_of_a_run_file_are_relative_to_it() {
        let config = load("model = 'm'\ndata = '/d'\nout = 'o'\n", &[]).unwrap();
        assert!(config.model.is_absolute() && config.model.ends_with("m"), "{:?}", config.model);
    }

    #[test]
    fn the_effective_configuration_reads_back_as_itself() {
        let names = "lora.target_modules=[\"q_proj\"]";
        let parameters = "lora.target_parameters=[\"mlp.experts.down_proj\"]";
        for set in [
            &[names, "stream.slot_budget=8GiB", "data.max_pixels=4096", "data.date=2026-11-30"][..],
            &[names, parameters],
            &["lora.vision=true"],
        ] {
            let config = load(PATHS, set).unwrap();
            let text = toml::to_string(&config).unwrap();
            let again: RunConfig = toml::from_str(&text).unwrap();
            assert_eq!(config, again, "{text}");
        }
    }

    #[test]
    fn a_wrong_key_value_or_missing_path_is_named() {
        for (text, set, word) in [
            (PATHS.to_owned(), vec!["lora.rnak=3"], "rnak"),
            (PATHS.to_owned(), vec!["learning_rate=fast"], "learning_rate"),
            (PATHS.to_owned(), vec!["learning_rate=0"], "greater than 0"),
            (PATHS.to_owned(), vec!["steps=0"], "at least 1"),
            (
                PATHS.to_owned(),
                vec!["lora.dropout=0.1", "lora.target_parameters=[\"mlp.experts.down_proj\"]"],
                "lora.dropout must be 0",
            ),
            (PATHS.to_owned(), vec!["lora.target_parameters=mlp.gate.weight"], "target_parameters"),
            (PATHS.to_owned(), vec!["stepsfive"], "key=value"),
            ("model = '/m'\nout = '/o'".to_owned(), vec![], "--data"),
            ("model = ".to_owned(), vec![], "not TOML"),
        ] {
            let error = format!("{:#}", load(&text, &set).unwrap_err());
            assert!(error.contains(word), "{error} lacks {word}");
        }
    }
}
