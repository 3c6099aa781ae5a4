//! `synth`: a random checkpoint in the published layout, with a tokenizer.

use anyhow::{Context, Result, bail};
use blockstreamer_core::checkpoint::{SynthesizeOptions, Synthesized, synthesize};
use blockstreamer_core::family::{ModelFamily, ModelOptions};

use super::print;
use crate::cli::SynthArgs;
use crate::data::write_tokenizer;
use crate::plugins::Registry;
use crate::size::Size;

/// Text that the tokenizer is trained on.
const CORPUS: [&str; 2] =
    [include_str!("../../assets/corpus.txt"), include_str!("../../assets/demo.jsonl")];

pub(super) fn run(registry: &Registry, args: &SynthArgs) -> Result<()> {
    let written = write(registry, args)?;
    print(&format!(
        "wrote {} tensors, {} in {} file(s), to {}",
        written.num_tensors,
        Size { num_bytes: written.num_bytes },
        written.num_files,
        args.out.display()
    ))
}

/// The family that `args` name, and its config.json of the size and the layers.
pub(super) fn config<'a>(
    registry: &'a Registry,
    args: &SynthArgs,
) -> Result<(&'a dyn ModelFamily, String)> {
    let (name, size) = args.model.split_once(':').with_context(|| {
        format!("'{}' names no size; write family:size, for example qwen3-vl:tiny", args.model)
    })?;
    let family = registry.family(name)?.family();
    let sizes = family.sizes()?;
    let Some(size) = sizes.iter().find(|known| known.name == size) else {
        let known: Vec<_> = sizes.iter().map(|known| known.name.as_str()).collect();
        bail!("{name} has no size '{size}'; it has {}", known.join(", "));
    };
    let config_json = match args.layers {
        None => size.config_json.clone(),
        Some(layers) => family.with_layers(&size.config_json, layers)?,
    };
    Ok((family, config_json))
}

/// Writes the checkpoint that `args` ask for.
pub(super) fn write(registry: &Registry, args: &SynthArgs) -> Result<Synthesized> {
    let (family, config_json) = config(registry, args)?;
    let model = family.open(&config_json, &ModelOptions::default())?;
    let dimensions = model.dimensions();
    let format = family.chat_format(&config_json)?;
    let staging = tempfile::tempdir().context("cannot make a temporary folder")?;
    write_tokenizer(staging.path(), &CORPUS, dimensions.vocab_size, &format)?;
    let mut extra_files = family.processor_files(&config_json)?;
    for entry in std::fs::read_dir(staging.path())? {
        let entry = entry?;
        extra_files
            .push((entry.file_name().to_string_lossy().into_owned(), std::fs::read(entry.path())?));
    }
    extra_files.sort();
    Ok(synthesize(
        &model.weights()?,
        &SynthesizeOptions {
            directory: args.out.clone(),
            config_json,
            seed: args.seed,
            initializer_range: f64::from(dimensions.initializer_range_ppm) / 1e6,
            max_file_bytes: args.max_file.num_bytes,
            extra_files,
        },
    )?)
}
