//! How much memory there is to plan with.

use std::fs;
use std::path::{Path, PathBuf};

use tch::Device;

use crate::device::{MemoryStats, cuda_info, memory_stats};
use crate::error::{Error, Result};

/// Least that is left to the system and to other programs.
const LEAST_MARGIN_BYTES: u64 = 1 << 30;

/// Host memory that a run may take: what the system and every enclosing control group still have, less
/// a tenth and at least 1 GiB, because what is promised to us others may want a moment later.
///
/// # Errors
/// [`Error::Io`] or [`Error::File`] when the system does not say; pass a size instead.
pub fn host_budget_bytes() -> Result<u64> {
    Ok(less_margin(HostMemory::new("/").available_bytes()?))
}

/// The tightest limit on memory of the control groups that the process is in; `None` when none of them has
/// one.
pub fn host_limit_bytes() -> Option<u64> {
    HostMemory::new("/").least_of_groups(GroupFiles::limit_bytes)
}

/// Memory of `device` that nobody uses, what libtorch keeps for its next request included; of the CPU,
/// [`host_budget_bytes`].
///
/// # Errors
/// As [`cuda_info`] and [`host_budget_bytes`].
pub fn device_budget_bytes(device: Device) -> Result<u64> {
    match device {
        Device::Cuda(index) => {
            let MemoryStats { current_bytes, reserved_bytes, .. } = memory_stats(device)?;
            let kept_bytes = reserved_bytes.saturating_sub(current_bytes);
            Ok((cuda_info(index)?.free_bytes + kept_bytes) as u64)
        }
        _ => host_budget_bytes(),
    }
}

fn less_margin(available_bytes: u64) -> u64 {
    available_bytes.saturating_sub(LEAST_MARGIN_BYTES.max(available_bytes / 10))
}

/// Asks the system's files, under a root that tests choose.
#[derive(Debug)]
struct HostMemory {
    root: PathBuf,
}

impl HostMemory {
    fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The least of what the system and the control groups have.
    fn available_bytes(&self) -> Result<u64> {
        let path = self.root.join("proc/meminfo");
        let text = fs::read_to_string(&path).map_err(Error::io("read", &path))?;
        let system = text
            .lines()
            .find_map(|line| line.strip_prefix("MemAvailable:"))
            .and_then(|rest| rest.trim().strip_suffix("kB"))
            .and_then(|number| number.trim().parse::<u64>().ok())
            .ok_or_else(|| {
                Error::file(&path, "has no MemAvailable; say how much memory may be used")
            })?;
        let free = self.least_of_groups(GroupFiles::available_bytes);
        Ok(free.map_or(system << 10, |free| free.min(system << 10)))
    }

    /// The least that `number` says of any of the control groups around the process. `None` when it says
    /// nothing of any.
    fn least_of_groups(&self, number: fn(&GroupFiles, &Path) -> Option<u64>) -> Option<u64> {
        // A system without control groups has no such file.
        let groups = fs::read_to_string(self.root.join("proc/self/cgroup")).unwrap_or_default();
        groups.lines().filter_map(|line| self.least_above(line, number)).min()
    }

    /// The least over the group on a line of `/proc/self/cgroup`, `number:controllers:path`, and those above
    /// it.
    fn least_above(
        &self,
        line: &str,
        number: fn(&GroupFiles, &Path) -> Option<u64>,
    ) -> Option<u64> {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?.trim_start_matches('/'));
        let (mount, files) = match controllers {
            "" => ("sys/fs/cgroup", &UNIFIED),
            _ if controllers.split(',').any(|name| name == "memory") => {
                ("sys/fs/cgroup/memory", &LEGACY)
            }
            _ => return None,
        };
        // In a container the path may be the host's and not be there; its parents end at the mount.
        let mount = self.root.join(mount);
        Path::new(path).ancestors().filter_map(|above| number(files, &mount.join(above))).min()
    }
}

/// The names that a generation of control groups gives its numbers.
struct GroupFiles {
    limit: &'static str,
    used: &'static str,
    reclaimable: &'static str,
}

/// Limits from here on are none: the first generation says the largest multiple of a page.
const NO_LIMIT_BYTES: u64 = 1 << 62;

const UNIFIED: GroupFiles =
    GroupFiles { limit: "memory.max", used: "memory.current", reclaimable: "inactive_file" };

const LEGACY: GroupFiles = GroupFiles {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file",
};

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

impl GroupFiles {
    /// `None` when the group has no limit: "max", no such file, or the first generation's largest number.
    fn limit_bytes(&self, group: &Path) -> Option<u64> {
        number(&group.join(self.limit)).filter(|limit| *limit < NO_LIMIT_BYTES)
    }

    /// What the group leaves of its limit, if it has one.
    fn available_bytes(&self, group: &Path) -> Option<u64> {
        let (limit, used) = (self.limit_bytes(group)?, number(&group.join(self.used))?);
        // File pages count as used, but the system drops them when memory is wanted.
        let statistics = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        let reclaimable = statistics
            .lines()
            .filter_map(|line| line.split_once(' '))
            .find(|(name, _)| *name == self.reclaimable)
            .and_then(|(_, number)| number.trim().parse::<u64>().ok())
            .unwrap_or(0);
        Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file system root with these files.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        root
    }

    const MEMINFO: (&str, &str) =
        ("proc/meminfo", "MemTotal:  8000000 kB\nMemFree: 1 kB\nMemAvailable:    4000 kB\n");

    fn available(files: &[(&str, &str)]) -> u64 {
        let root = root(&[&[MEMINFO], files].concat());
        HostMemory::new(root.path()).available_bytes().unwrap()
    }

    fn limit(files: &[(&str, &str)]) -> Option<u64> {
        HostMemory::new(root(files).path()).least_of_groups(GroupFiles::limit_bytes)
    }

    #[test]
    fn without_a_limit_it_is_what_the_system_says() {
        assert_eq!(available(&[]), 4_096_000);
        let unlimited = [
            ("proc/self/cgroup", "0::/user\n"),
            ("sys/fs/cgroup/user/memory.max", "max\n"),
            ("sys/fs/cgroup/user/memory.current", "5\n"),
        ];
        assert_eq!(available(&unlimited), 4_096_000);
        assert_eq!((limit(&[]), limit(&unlimited)), (None, None));
        let first_generation = [
            ("proc/self/cgroup", "4:memory:/x\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ];
        assert_eq!(limit(&first_generation), None);
    }

    #[test]
    fn the_tightest_group_on_the_way_to_the_root_decides() {
        let files = [
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "3000000\n"),
            ("sys/fs/cgroup/a/b/memory.current", "1000\n"),
            ("sys/fs/cgroup/a/memory.max", "2000000\n"),
            ("sys/fs/cgroup/a/memory.current", "1500000\n"),
            ("sys/fs/cgroup/memory.max", "max\n"),
        ];
        assert_eq!(available(&files), 500_000);
        assert_eq!(limit(&files), Some(2_000_000));
        let cached = ("sys/fs/cgroup/a/memory.stat", "anon 7\ninactive_file 400000\nfile 9\n");
        assert_eq!(available(&[&files[..], &[cached]].concat()), 900_000);
    }

    #[test]
    fn in_a_container_that_does_not_see_its_own_path_the_mount_counts() {
        let files = [
            ("proc/self/cgroup", "0::/host/only/path\n"),
            ("sys/fs/cgroup/memory.max", "1000000\n"),
            ("sys/fs/cgroup/memory.current", "1200000\n"),
        ];
        assert_eq!(available(&files), 0, "over its limit is not below zero");
    }

    #[test]
    fn groups_of_the_first_generation_are_read_too() {
        let files = [
            ("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/x\n0::/\n"),
            ("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "2000000\n"),
            ("sys/fs/cgroup/memory/x/memory.usage_in_bytes", "600000\n"),
            ("sys/fs/cgroup/memory/x/memory.stat", "inactive_file 1\ntotal_inactive_file 100000\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n"),
        ];
        assert_eq!(available(&files), 1_500_000);
        assert_eq!(limit(&files), Some(2_000_000));
    }

    #[test]
    fn a_system_that_does_not_say_is_an_error_that_names_the_file() {
        let empty = root(&[]);
        let error = HostMemory::new(empty.path()).available_bytes().unwrap_err().to_string();
        assert!(error.contains("proc/meminfo"), "{error}");
        let old = root(&[("proc/meminfo", "MemTotal: 5 kB\nMemAvailable: many kB\n")]);
        let error = HostMemory::new(old.path()).available_bytes().unwrap_err().to_string();
        assert!(error.contains("MemAvailable"), "{error}");
    }

    #[test]
    fn the_margin_is_a_tenth_and_at_least_a_gibibyte() {
        assert_eq!(less_margin(100 << 30), (100 << 30) - (10 << 30));
        assert_eq!(less_margin(4 << 30), 3 << 30);
        assert_eq!(less_margin(1000), 0);
    }
}
