//! Sizes for people.

/// A number of bytes in the unit that people would use.
pub(crate) fn size(num_bytes: u64) -> String {
    let unit = [("GiB", 30), ("MiB", 20), ("KiB", 10)]
        .into_iter()
        .find(|(_, shift)| num_bytes >> shift > 0);
    match unit {
        Some((name, shift)) => {
            format!("{:.2} {name}", num_bytes as f64 / f64::from(1_u32 << shift))
        }
        None => format!("{num_bytes} B"),
    }
}
