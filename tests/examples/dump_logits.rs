//! Writes what `tests/python/check_adapter.py --logits` compares with peft.
//!
//! `cargo run -p blockstreamer-tests --example dump_logits -- MODEL ADAPTER OUT.safetensors`
//!
//! Two rows of 24 tokens, fp32 on the CPU, every block streamed. Plugins are those in the folder that
//! `BLOCKSTREAMER_PLUGIN_PATH` names.

use std::path::Path;

use blockstreamer_core::adapter::Lora;
use blockstreamer_core::batch::Batch;
use blockstreamer_core::checkpoint::write_safetensors;
use blockstreamer_core::execute::{Executor, ExecutorOptions};
use blockstreamer_core::family::ModelOptions;
use blockstreamer_core::state::NamedTensors;
use blockstreamer_host::engine::{OpenModel, StreamConfig};
use blockstreamer_host::plugins::Registry;
use tch::{Device, Kind, Tensor};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, adapter, out] = &arguments[..] else {
        return Err("usage: dump_logits MODEL ADAPTER OUT.safetensors".into());
    };
    let registry = Registry::discover(&[]);
    let open = OpenModel::open(&registry, Path::new(model), ModelOptions::default())?;
    // Ids that stay clear of the special tokens, which are the last ones of a vocabulary.
    let num_ids = open.model.dimensions().vocab_size as i64 * 9 / 10;
    let ids = Tensor::f_arange(48, (Kind::Int64, Device::Cpu))?;
    let ids = ids.f_mul_scalar(37)?.f_remainder(num_ids)?.f_view([2, 24])?;

    let stream = StreamConfig::default();
    let source = open.source(&stream)?;
    let adapter = Lora::import(Path::new(adapter), &open.model.sites()?, Device::Cpu)?;
    let options = ExecutorOptions::new(Device::Cpu, Kind::Float);
    let executor = Executor::new(open.model, source, Some(Box::new(adapter)), options)?;
    let logits = executor.logits(&Batch::new(ids.shallow_clone()), &mut |_, _| Ok(()))?;

    let tensors = [("input_ids", ids), ("logits", logits)];
    let tensors: NamedTensors =
        tensors.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect();
    Ok(write_safetensors(Path::new(out), &tensors, &[])?)
}
