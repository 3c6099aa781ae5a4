//! Random bytes: nothing on the way may compress them or find them equal.

/// SplitMix64's step: 2^64 over the golden ratio.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Fills `into` with the bytes of stream `seed` from its start on. The mixing is that of SplitMix64, a
/// counter: any part of a stream is the same whichever length was asked for.
pub(super) fn fill(seed: u64, into: &mut [u8]) {
    let start = mix(seed.wrapping_add(STEP));
    for (number, word) in (0_u64..).zip(into.chunks_mut(8)) {
        let bytes = mix(start.wrapping_add(number.wrapping_mul(STEP))).to_le_bytes();
        word.copy_from_slice(&bytes[..word.len()]);
    }
}

/// Fills much memory on all cores: every piece is a stream of its own.
pub(super) fn fill_on_all_cores(seed: u64, into: &mut [u8]) {
    let num_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = into.len().div_ceil(num_threads).max(1);
    std::thread::scope(|scope| {
        for (number, part) in (0..).zip(into.chunks_mut(share)) {
            scope.spawn(move || fill(value(seed, number), part));
        }
    });
}

/// Number `number` of stream `seed`.
pub(super) fn value(seed: u64, number: u64) -> u64 {
    mix(mix(seed.wrapping_add(STEP)).wrapping_add(number.wrapping_mul(STEP)))
}

fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_differ_do_not_repeat_and_start_the_same_at_every_length() {
        let filled = |seed, length| {
            let mut bytes = vec![0; length];
            fill(seed, &mut bytes);
            bytes
        };
        let long = filled(1, 4096);
        assert_eq!(filled(1, 13), long[..13]);
        assert_ne!(filled(2, 4096), long);
        assert_ne!(long[..2048], long[2048..]);
        // All 256 values occur in random bytes of this length but with a chance of one in 30,000.
        let mut seen = [false; 256];
        long.iter().for_each(|byte| seen[usize::from(*byte)] = true);
        assert!(seen.iter().filter(|seen| **seen).count() > 250);
    }
}
