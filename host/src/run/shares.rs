//! Who was busy during a step, and who keeps the steps from being faster.

use std::fmt;

use blockstreamer_core::stream::StreamStats;
use serde::{Deserialize, Serialize};

/// How long each part was busy during one step. The parts work at the same time, so that the numbers do
/// not add up to the step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StepTimes {
    /// At least one read from storage was in flight.
    pub read_ms: f64,
    /// The copy stream moved bytes.
    pub copy_ms: f64,
    /// The device was in a visit: from when its block was there until its last kernel had finished.
    pub compute_ms: f64,
    /// The driving thread waited, for a block or for values from the device.
    pub wait_ms: f64,
    /// The driving thread worked (rows, launches, optimizer) while the device had nothing else to do. On the
    /// CPU without the visits, which are computed on this very thread.
    pub host_ms: f64,
    /// Of it, the part within visits, which the device only followed. 0 on the CPU.
    pub launch_ms: f64,
}

impl StepTimes {
    /// The times between two totals of the engine.
    pub(super) fn between(before: &StreamStats, after: &StreamStats) -> Self {
        let waited = |stats: &StreamStats| stats.host_wait_ms + stats.device_wait_ms;
        Self {
            read_ms: after.read_busy_ms - before.read_busy_ms,
            copy_ms: after.h2d_ms - before.h2d_ms,
            compute_ms: after.compute_ms - before.compute_ms,
            wait_ms: waited(after) - waited(before),
            host_ms: after.host_ms - before.host_ms,
            launch_ms: after.launch_ms - before.launch_ms,
        }
    }
}

/// Shares of wall time, 0 to 1, over some steps. A share of 1 is a part that never rests: it binds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Shares {
    /// [`StepTimes::read_ms`] over wall time.
    pub read: f64,
    /// [`StepTimes::copy_ms`] over wall time.
    pub copy: f64,
    /// [`StepTimes::compute_ms`] over wall time.
    pub compute: f64,
    /// [`StepTimes::host_ms`] over wall time.
    pub host: f64,
    /// [`StepTimes::launch_ms`] over wall time.
    pub launch: f64,
}

impl Shares {
    /// The shares over steps of these times and seconds. A device event is counted when it is asked for,
    /// so that a step may count a little of the one before: what is above 1 is cut.
    pub fn of<'a>(steps: impl IntoIterator<Item = (&'a StepTimes, f64)>) -> Self {
        let (mut total, mut seconds) = (StepTimes::default(), 0.0);
        for (times, step_seconds) in steps {
            total.read_ms += times.read_ms;
            total.copy_ms += times.copy_ms;
            total.compute_ms += times.compute_ms;
            total.host_ms += times.host_ms;
            total.launch_ms += times.launch_ms;
            seconds += step_seconds;
        }
        let share =
            |ms: f64| if seconds > 0.0 { (ms / seconds / 1e3).clamp(0.0, 1.0) } else { 0.0 };
        Self {
            read: share(total.read_ms),
            copy: share(total.copy_ms),
            compute: share(total.compute_ms),
            host: share(total.host_ms),
            launch: share(total.launch_ms),
        }
    }

    /// The part that binds: the busiest one. Where the device follows a visit launch by launch, it is the
    /// host's time and not computation.
    pub fn binding(&self) -> &'static str {
        let compute = ("compute", self.compute - self.launch);
        [("read", self.read), ("copy", self.copy), compute, ("host", self.host)]
            .into_iter()
            .reduce(|most, next| if next.1 > most.1 { next } else { most })
            .map_or("host", |most| most.0)
    }
}

/// `read 97%  copy 12%  compute 20%  host 3%  (read binds)`
impl fmt::Display for Shares {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { read, copy, compute, host, launch: _ } = self;
        for (name, share) in [("read", read), ("copy", copy), ("compute", compute), ("host", host)]
        {
            write!(formatter, "{name} {:.0}%  ", share * 100.0)?;
        }
        write!(formatter, "({} binds)", self.binding())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_the_wall_time_of_all_steps_and_never_above_one() {
        let times = |read_ms, copy_ms| StepTimes {
            read_ms,
            copy_ms,
            host_ms: 30.0,
            ..StepTimes::default()
        };
        let shares = Shares::of([(&times(900.0, 100.0), 1.0), (&times(1_090.0, 5_000.0), 1.0)]);
        assert_eq!(
            (shares.read, shares.copy, shares.compute, shares.host),
            (0.995, 1.0, 0.0, 0.03)
        );
        let text =
            Shares { read: 0.97, copy: 0.12, compute: 0.2, host: 0.03, launch: 0.0 }.to_string();
        assert_eq!(text, "read 97%  copy 12%  compute 20%  host 3%  (read binds)");
        assert_eq!(Shares::of([]), Shares::default());
    }

    #[test]
    fn what_the_device_computes_as_it_is_launched_is_the_hosts_time() {
        let shares =
            |copy, compute, host| Shares { copy, compute, host, launch: host, ..Shares::default() };
        assert_eq!(shares(0.3, 0.98, 0.1).binding(), "compute");
        assert_eq!(shares(0.3, 0.98, 0.9).binding(), "host");
        assert_eq!(shares(0.99, 0.4, 0.9).binding(), "copy");
        // On the CPU, and between visits, the host's time is in no visit.
        let apart = Shares { compute: 0.64, host: 0.36, ..Shares::default() };
        assert_eq!(apart.binding(), "compute");
    }

    #[test]
    fn the_times_of_a_step_are_the_differences_of_the_totals_before_and_after_it() {
        let before = StreamStats {
            read_busy_ms: 5.0,
            host_wait_ms: 10.0,
            host_ms: 3.0,
            ..StreamStats::default()
        };
        let after = StreamStats {
            read_busy_ms: 405.0,
            h2d_ms: 50.0,
            host_wait_ms: 310.0,
            device_wait_ms: 100.0,
            host_ms: 43.0,
            launch_ms: 30.0,
            compute_ms: 200.0,
            ..before
        };
        let times = StepTimes::between(&before, &after);
        assert_eq!((times.read_ms, times.copy_ms, times.compute_ms), (400.0, 50.0, 200.0));
        assert_eq!((times.wait_ms, times.host_ms, times.launch_ms), (400.0, 40.0, 30.0));
    }
}
