//! How long a pass takes: the slowest of drive, link, arithmetic and host, which all work at the same time.

use std::fmt;

use serde::Serialize;

use super::launches::FORWARDS_PER_BACKWARD;
use super::{Pass, PlanRequest, Traffic};
use crate::block::{BlockIndex, Placement};

/// What a machine can do, as measured. `None`: not known, and left out of predictions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Rates {
    /// Reads from the drive, 10^9 bytes per second.
    pub disk_gb_per_s: Option<f64>,
    /// Copies from pinned memory to the device, 10^9 bytes per second.
    pub link_gb_per_s: Option<f64>,
    /// The device's reads of its own memory, 10^9 bytes per second.
    pub memory_gb_per_s: Option<f64>,
    /// Matrix products in the compute dtype, 10^12 operations per second.
    pub tflops: Option<f64>,
    /// The host's time to queue one small kernel, microseconds. `None` where nothing is queued.
    pub launch_us: Option<f64>,
}

/// What a pass waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// The drive.
    Disk,
    /// The link between host and device.
    Link,
    /// Arithmetic, or the device's own memory.
    Compute,
    /// The host, which queues the device's work kernel by kernel.
    Host,
}

impl fmt::Display for Bound {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Disk => "the disk",
            Self::Link => "the link",
            Self::Compute => "arithmetic",
            Self::Host => "queueing kernels",
        })
    }
}

/// How long a pass takes on each lane when nothing else holds it up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Prediction {
    /// Reading.
    pub disk_seconds: Option<f64>,
    /// Copying.
    pub link_seconds: Option<f64>,
    /// Computing.
    pub compute_seconds: Option<f64>,
    /// Queueing the device's work: an estimate, by the number of kernels.
    pub launch_seconds: Option<f64>,
    /// The longest of them.
    pub seconds: f64,
    /// Which one that is; `None` when no rate is known.
    pub bound: Option<Bound>,
}

impl Prediction {
    /// `computed` is what [`computed`] counts.
    pub(super) fn new(moved: Traffic, computed: Computed, rates: &Rates) -> Self {
        let known = |rate: Option<f64>| rate.filter(|rate| rate.is_finite() && *rate > 0.0);
        let per_rate = |amount: f64, rate: Option<f64>| known(rate).map(|rate| amount / rate);
        let disk_seconds = per_rate(moved.disk_bytes as f64 / 1e9, rates.disk_gb_per_s);
        let link_seconds = per_rate(moved.link_bytes as f64 / 1e9, rates.link_gb_per_s);
        let arithmetic = per_rate(computed.flops / 1e12, rates.tflops);
        let memory = per_rate(computed.weight_bytes / 1e9, rates.memory_gb_per_s);
        let compute_seconds = match (arithmetic, memory) {
            (Some(arithmetic), Some(memory)) => Some(arithmetic.max(memory)),
            (one, other) => one.or(other),
        };
        let launch_seconds = known(rates.launch_us).map(|us| computed.launches * us / 1e6);
        let longest = [
            (compute_seconds, Bound::Compute),
            (link_seconds, Bound::Link),
            (disk_seconds, Bound::Disk),
            (launch_seconds, Bound::Host),
        ]
        .into_iter()
        .filter_map(|(seconds, bound)| Some((seconds?, bound)))
        .reduce(|longest, next| if next.0 > longest.0 { next } else { longest });
        Self {
            disk_seconds,
            link_seconds,
            compute_seconds,
            launch_seconds,
            seconds: longest.map_or(0.0, |(seconds, _)| seconds),
            bound: longest.map(|(_, bound)| bound),
        }
    }

    /// The longest of drive, link and arithmetic. Plans that move something differ in these alone: each of
    /// them queues the same kernels.
    pub(super) fn seconds_but_for_the_host(&self) -> f64 {
        let lanes = [self.disk_seconds, self.link_seconds, self.compute_seconds];
        lanes.into_iter().flatten().fold(0.0, f64::max)
    }
}

/// Work of one pass on the device, and for it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Computed {
    /// Floating-point operations.
    pub(super) flops: f64,
    /// Bytes of weights read from device memory.
    pub(super) weight_bytes: f64,
    /// What the host queues, in small kernels that would take it as long.
    pub(super) launches: f64,
}

/// Uses of a block's weights in one pass: forward, recompute unless the graph is held, and the gradient
/// of the input. Frozen weights have none of their own.
fn num_uses(request: &PlanRequest<'_>, block: BlockIndex, holds_graph: bool) -> f64 {
    let placement = request.blocks[block.0].placement;
    if placement.is_streamed() && block.0 < request.first_block {
        return 0.0;
    }
    let Pass::Training { lowest } = request.pass else { return 1.0 };
    match placement {
        Placement::Streamed if lowest.is_none_or(|lowest| block < lowest) => 1.0,
        Placement::Streamed if holds_graph => 2.0,
        Placement::Streamed => 3.0,
        Placement::Head | Placement::Resident => 2.0,
        Placement::Gathered => 0.0,
    }
}

/// The work of a pass that holds the graphs of some blocks.
pub(super) fn computed(
    request: &PlanRequest<'_>,
    holds_graph: impl Fn(BlockIndex) -> bool,
) -> Computed {
    let mut computed = Computed { launches: request.demand.other_launches, ..Computed::default() };
    for (index, block) in request.blocks.iter().enumerate() {
        let uses = num_uses(request, BlockIndex(index), holds_graph(BlockIndex(index)));
        computed.flops += uses * request.demand.forward_flops[index];
        computed.weight_bytes += uses * block.payload_bytes() as f64;
        // The last use of several is the backward.
        let num_forwards = if uses > 1.0 { uses - 1.0 + FORWARDS_PER_BACKWARD } else { uses };
        computed.launches += num_forwards * request.demand.forward_launches[index];
    }
    computed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_lane_that_has_a_rate_decides() {
        let moved = Traffic { disk_bytes: 4_000_000_000, link_bytes: 12_000_000_000 };
        let computed = Computed { flops: 3e12, weight_bytes: 8e9, launches: 2e5 };
        let mut rates = Rates {
            disk_gb_per_s: Some(2.0),
            link_gb_per_s: Some(12.0),
            memory_gb_per_s: Some(100.0),
            tflops: Some(30.0),
            launch_us: Some(5.0),
        };
        let prediction = Prediction::new(moved, computed, &rates);
        assert_eq!((prediction.seconds, prediction.bound), (2.0, Some(Bound::Disk)));
        assert_eq!((prediction.compute_seconds, prediction.launch_seconds), (Some(0.1), Some(1.0)));
        rates.disk_gb_per_s = None;
        rates.launch_us = Some(6.0);
        let prediction = Prediction::new(moved, computed, &rates);
        assert_eq!((prediction.seconds, prediction.bound), (1.2, Some(Bound::Host)));
        assert_eq!(prediction.seconds_but_for_the_host(), 1.0);
        for nothing in [None, Some(0.0), Some(f64::NAN)] {
            rates.launch_us = nothing;
            let prediction = Prediction::new(moved, computed, &rates);
            assert_eq!((prediction.seconds, prediction.bound), (1.0, Some(Bound::Link)));
            assert_eq!(prediction.launch_seconds, None, "{nothing:?}");
        }
        rates.memory_gb_per_s = Some(1.0);
        let prediction = Prediction::new(moved, computed, &rates);
        assert_eq!((prediction.seconds, prediction.bound), (8.0, Some(Bound::Compute)));
        let nothing = Prediction::new(moved, computed, &Rates::default());
        assert_eq!((nothing.seconds, nothing.bound), (0.0, None));
    }
}
