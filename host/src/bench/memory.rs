//! What the process has taken of the host's memory, and had read for it.

use std::fs;

/// Most memory that the process has had at one time, page-locked memory included.
pub(super) fn peak_bytes() -> Option<u64> {
    kib_field(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// Bytes that the system fetched from storage for this process so far, page cache left out.
pub(super) fn storage_read_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/io").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("read_bytes:"))?;
    line.trim().parse().ok()
}

fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_covers_what_is_held_and_storage_counts_never_fall() {
        let held = vec![1_u8; 8 << 20];
        assert!(peak_bytes().unwrap() >= held.len() as u64);
        // Where the system does not tell, nothing is claimed.
        assert!(storage_read_bytes().is_none_or(|before| storage_read_bytes() >= Some(before)));
    }
}
