//! Measurements: what streaming and training reach, beside what the hardware allows in the same run.

mod args;
mod blocks;
mod memory;
mod random;
mod step;
mod step_report;
mod stream;

pub(crate) use args::at_least_one;
pub use args::{BenchCommand, StepArgs, StreamArgs, StreamTier};
pub use step::bench_step;
pub use step_report::StepReport;
pub use stream::{StreamReport, bench_stream};

/// As typed: `cpu`, `cuda:0`.
fn device_name(device: tch::Device) -> String {
    match device {
        tch::Device::Cuda(index) => format!("cuda:{index}"),
        other => format!("{other:?}").to_lowercase(),
    }
}

/// The middle one of some numbers, or the mean of the middle two; NaN of none.
fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    match (values.len(), values.len() / 2) {
        (0, _) => f64::NAN,
        (length, middle) if length.is_multiple_of(2) => {
            f64::midpoint(values[middle - 1], values[middle])
        }
        (_, middle) => values[middle],
    }
}
