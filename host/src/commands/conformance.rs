//! `conformance`: checks a family, and with goldens its numbers.

use std::path::Path;

use anyhow::{Result, bail};
use blockstreamer_conformance::{Options, Report, check_family, check_golden};
use blockstreamer_core::checkpoint::Checkpoint;
use blockstreamer_core::family::ModelFamily;
use serde_json::json;

use super::{print, print_json};
use crate::cli::ConformanceArgs;
use crate::engine::device;
use crate::plugins::{Found, Registry, model_type};

pub(super) fn run(registry: &Registry, args: &ConformanceArgs) -> Result<bool> {
    let device = device(&args.device)?;
    let options = Options::new(device, args.dtype.kind(device));
    let path = Path::new(&args.family);
    // A path means that very file, whatever else was found.
    let mut loaded = Registry::default();
    let looks_like_path = args.family.contains('/') || path.extension().is_some();
    let families: Vec<&dyn ModelFamily> = if looks_like_path || path.is_file() {
        loaded.load(path);
        if let Some(refused) = loaded.refused().first() {
            bail!("plugin {}: {}", refused.path.display(), refused.reason);
        }
        loaded.families().iter().map(Found::family).collect()
    } else {
        vec![registry.family(&args.family)?.family()]
    };
    let mut report = Report::default();
    for family in &families {
        if args.golden.is_empty() {
            report.extend(check_family(*family, &options)?);
        }
    }
    for golden in &args.golden {
        let config_json = Checkpoint::open(golden)?.config_json;
        let model_type = model_type(&config_json)?;
        let Some(family) =
            families.iter().find(|family| family.model_types().contains(&model_type))
        else {
            bail!(
                "{} is a {model_type} model, which {} does not open",
                golden.display(),
                args.family
            );
        };
        report.extend(check_golden(*family, golden, &options)?);
    }
    let passed = report.passed();
    if args.json {
        print_json(&json!({ "passed": passed, "checks": report.checks }))?;
        return Ok(passed);
    }
    for check in &report.checks {
        let mark = if check.passed { "ok  " } else { "FAIL" };
        let error = match (check.max_error, check.tolerance) {
            (Some(error), Some(tolerance)) => format!("{error:.2e} (at most {tolerance:.1e})"),
            _ => String::new(),
        };
        print(&format!("{mark} {:<72} {error} {}", check.name, check.detail))?;
    }
    let num_failed = report.checks.iter().filter(|check| !check.passed).count();
    print(&format!("{} checks, {num_failed} failed", report.checks.len()))?;
    Ok(passed)
}
