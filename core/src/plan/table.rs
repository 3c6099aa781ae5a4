//! A plan as lines for people.

use std::fmt;

use super::{Bound, Plan, PlannedBlock, Tier};
use crate::size::size;

/// `2.00 GiB of 8.00 GiB`; without a limit only the first.
fn share(used_bytes: u64, budget_bytes: u64) -> String {
    match budget_bytes {
        u64::MAX => size(used_bytes),
        _ => format!("{} of {}", size(used_bytes), size(budget_bytes)),
    }
}

/// `staging 128.00 MiB` in the memory that it is in.
fn staging(num_bytes: u64, before: &str, after: &str) -> String {
    match num_bytes {
        0 => String::new(),
        _ => format!("{before}staging {}{after}", size(num_bytes)),
    }
}

/// ` (0.25 s)` when it is known.
fn time(seconds: Option<f64>) -> String {
    seconds.map_or_else(String::new, |seconds| format!(" ({seconds:.3} s)"))
}

impl Plan {
    /// Blocks that are treated alike: `layers.0 … layers.17: disk`, or, with others between them,
    /// `12 of layers.0 … layers.17: disk`.
    fn groups(&self) -> Vec<String> {
        let kind =
            |block: &PlannedBlock| (block.is_used, block.tier, block.placement, block.holds_graph);
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for (index, block) in self.blocks.iter().enumerate() {
            match groups.iter_mut().find(|group| kind(&self.blocks[group[0]]) == kind(block)) {
                Some(group) => group.push(index),
                None => groups.push(vec![index]),
            }
        }
        let describe = |group: &Vec<usize>| {
            let (first, last) = (group[0], group[group.len() - 1]);
            let names = format!("{} … {}", self.blocks[first].name, self.blocks[last].name);
            let names = match group.len() {
                1 => self.blocks[first].name.clone(),
                length if length == last - first + 1 => names,
                length => format!("{length} of {names}"),
            };
            let place = match (self.blocks[first].tier, self.blocks[first].holds_graph) {
                _ if !self.blocks[first].is_used => "not used",
                (Tier::Device, true) => "device, graphs held",
                (Tier::Device, false) => "device",
                (Tier::Ram, _) => "host memory",
                (Tier::Disk, _) => "disk",
            };
            format!("{names}: {place}")
        };
        groups.iter().map(describe).collect()
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (device, host) = (&self.device, &self.host);
        writeln!(formatter, "blocks         {}", self.groups().join("; "))?;
        writeln!(
            formatter,
            "device memory  {}: tensors that stay {}, blocks that stay {}, {} slots {}, graphs {}, \
             computing {}{}",
            share(device.used_bytes(), device.budget_bytes),
            size(device.resident_bytes),
            size(device.kept_bytes),
            self.num_slots,
            size(device.slot_bytes),
            size(device.graph_bytes),
            size(device.working_set_bytes),
            staging(device.staging_bytes, ", ", ""),
        )?;
        writeln!(
            formatter,
            "host memory    {}: {}embedding {}, blocks {}",
            share(host.used_bytes(), host.budget_bytes),
            staging(host.staging_bytes, "", ", "),
            size(host.gathered_bytes),
            size(host.block_bytes),
        )?;
        // Where nothing is queued there is nothing to say.
        let launches = match self.prediction.launch_seconds {
            Some(seconds) => format!(", {}{}", Bound::Host, time(Some(seconds))),
            None => String::new(),
        };
        writeln!(
            formatter,
            "every step     {} from disk{}, {} to the device{}, arithmetic{}{}",
            size(self.later.disk_bytes),
            time(self.prediction.disk_seconds),
            size(self.later.link_bytes + self.gathered_bytes),
            time(self.prediction.link_seconds),
            time(self.prediction.compute_seconds),
            launches,
        )?;
        match self.prediction.bound {
            Some(bound) => write!(
                formatter,
                "prediction     {:.3} s per step, as long as {bound} takes",
                self.prediction.seconds
            ),
            None => write!(formatter, "prediction     none: no rate was measured"),
        }
    }
}
