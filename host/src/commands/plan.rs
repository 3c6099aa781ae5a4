//! `plan`: what would be where during a training run, and how long a step would take.

use anyhow::{Context, Result, bail};
use blockstreamer_core::adapter::{Adapter, Lora};
use blockstreamer_core::plan::{Plan, host_budget_bytes};
use serde_json::json;
use tch::{Device, Kind};

use super::{print, print_json};
use crate::cli::{Mode, PlanArgs};
use crate::engine::{Job, Memory, OpenModel, Planner, Precision, StreamConfig, device};
use crate::plugins::Registry;
use crate::run::LoraConfig;

pub(super) fn run(registry: &Registry, args: &PlanArgs) -> Result<()> {
    if args.mode == Mode::Full {
        bail!("--mode full: training all weights is not there yet; --mode lora trains an adapter");
    }
    if args.tokens == 0 {
        bail!("--tokens must be at least 1");
    }
    let device = device("auto")?;
    // A number for a GPU asks about a GPU, whether there is one here or not.
    let assumed = !device.is_cuda() && args.vram.is_some();
    let open = OpenModel::open(registry, &args.model)?;
    let stream = StreamConfig { vram: args.vram, ram: args.ram, ..StreamConfig::default() };
    let lora = LoraConfig { top_fraction: Some(args.top_fraction), ..LoraConfig::default() };
    let adapter = Lora::new(&open.model.sites()?, &lora.options(0)?, Device::Cpu)?;
    let kind = if assumed { Kind::BFloat16 } else { Precision::Auto.kind(device) };
    let job = Job { trains: true, tokens: args.tokens, num_micro_batches: 1 };
    let mut planner = Planner::new(
        &stream,
        open.source(&stream)?,
        &*open.model,
        Some(&adapter as &dyn Adapter),
        job,
        assumed || device.is_cuda(),
        kind,
    )?;
    let plan = match (assumed, args.vram) {
        (true, Some(vram)) => {
            let host_bytes = match args.ram {
                Some(ram) => ram.num_bytes,
                None => host_budget_bytes().context("say how much host memory there is: --ram")?,
            };
            planner.assumed_plan(Memory {
                device_bytes: vram.num_bytes,
                host_bytes,
                is_asked: true,
            })?
        }
        _ => {
            // People want to know, also where nothing moves.
            planner.measure(device, kind);
            planner.plan(Memory::of(&stream, device)?)?
        }
    };
    report(args, &plan, &planner, assumed)
}

fn report(args: &PlanArgs, plan: &Plan, planner: &Planner<'_>, assumed: bool) -> Result<()> {
    let rates = planner.rates();
    if args.json {
        return print_json(&json!({
            "model": args.model,
            "tokens": args.tokens,
            "top_fraction": args.top_fraction,
            "rates": rates,
            "rates_are_assumed": assumed,
            "plan": plan,
        }));
    }
    let rate = |name: &str, rate: Option<f64>, unit: &str| match rate {
        Some(rate) => format!("{name} {rate:.1} {unit}"),
        None => format!("{name} not measured"),
    };
    print(&format!(
        "{plan}\nrates          {}: {}, {}, {}, {}",
        if assumed { "assumed, there is no GPU here" } else { "measured" },
        rate("disk", rates.disk_gb_per_s, "GB/s"),
        rate("link", rates.link_gb_per_s, "GB/s"),
        rate("device memory", rates.memory_gb_per_s, "GB/s"),
        rate("arithmetic", rates.tflops, "TFLOPS"),
    ))
}
