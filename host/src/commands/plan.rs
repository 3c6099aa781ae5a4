//! `plan`: what would be where during a training run, and how long a step would take.

use anyhow::{Context, Result, bail};
use blockstreamer_core::adapter::{Adapter, Lora};
use blockstreamer_core::plan::{Plan, host_budget_bytes};
use serde_json::json;
use tch::{Device, Kind};

use super::{print, print_json};
use crate::cli::{Mode, PlanArgs};
use crate::engine::{
    Cut, Job, Memory, OpenModel, Planner, Precision, StreamConfig, Trained, device,
};
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
    let open = OpenModel::open(registry, &args.model, args.experts.options())?;
    let stream = StreamConfig {
        vram: args.vram,
        ram: args.ram,
        expert_groups: args.experts.expert_groups,
        ..StreamConfig::default()
    };
    let lora = LoraConfig { top_fraction: Some(args.top_fraction), ..LoraConfig::default() };
    let adapter = Lora::new(&open.model.sites()?, &lora.options(0)?, Device::Cpu)?;
    let kind = if assumed { Kind::BFloat16 } else { Precision::Auto.kind(device) };
    let job =
        Job { trains: true, tokens: args.tokens, num_micro_batches: 1, patches: args.patches };
    let memory = match (assumed, args.vram) {
        (true, Some(vram)) => {
            let host_bytes = match args.ram {
                Some(ram) => ram.num_bytes,
                None => host_budget_bytes().context("say how much host memory there is: --ram")?,
            };
            Memory { device_bytes: vram.num_bytes, host_bytes, is_asked: true }
        }
        _ => Memory::of(&stream, device)?,
    };
    let is_cuda = assumed || device.is_cuda();
    let cut = Cut { registry, open: &open, stream: &stream, job, is_cuda, kind };
    let trained = Trained::of(Some(&adapter as &dyn Adapter), &open.layout.blocks);
    let fitted = cut.fit(&trained, memory, 1)?;
    let groups = fitted.reopened.as_ref().map_or(open.options, |open| open.options);
    let groups = (open.model.dimensions().num_experts > 0).then_some(groups.num_expert_groups);
    let mut planner = fitted.planner;
    let plan = match assumed {
        true => planner.assumed_plan(memory)?,
        false => {
            // People want to know, also where nothing moves.
            planner.measure(device, kind);
            planner.plan(memory)?
        }
    };
    report(args, &plan, &planner, groups, assumed)
}

/// `groups` is how many blocks the experts of a layer are dealt over, if there are any.
fn report(
    args: &PlanArgs,
    plan: &Plan,
    planner: &Planner<'_>,
    groups: Option<usize>,
    assumed: bool,
) -> Result<()> {
    let rates = planner.rates();
    if args.json {
        return print_json(&json!({
            "model": args.model,
            "tokens": args.tokens,
            "top_fraction": args.top_fraction,
            "expert_groups": groups,
            "rates": rates,
            "rates_are_assumed": assumed,
            "plan": plan,
        }));
    }
    let rate = |name: &str, rate: Option<f64>, unit: &str| match rate {
        Some(rate) => format!("{name} {rate:.1} {unit}"),
        None => format!("{name} not measured"),
    };
    let groups = groups.map_or_else(String::new, |groups| {
        format!("\nexperts        those of a layer in {groups} block(s)")
    });
    print(&format!(
        "{plan}{groups}\nrates          {}: {}, {}, {}, {}, {}",
        if assumed { "assumed, there is no GPU here" } else { "measured" },
        rate("disk", rates.disk_gb_per_s, "GB/s"),
        rate("link", rates.link_gb_per_s, "GB/s"),
        rate("device memory", rates.memory_gb_per_s, "GB/s"),
        rate("arithmetic", rates.tflops, "TFLOPS"),
        rate("queueing", rates.launch_us, "us per kernel"),
    ))
}
