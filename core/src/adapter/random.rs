//! Random numbers that depend on nothing but a seed, a name and a position.

/// A stream of random numbers; equal seeds and names give equal streams on every machine.
///
/// Counter based: number `i` is SplitMix64's output function (Steele, Lea and Flood 2014) applied to
/// the key advanced by `i` steps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NamedStream {
    key: u64,
}

impl NamedStream {
    /// The stream of `name` under `seed`.
    pub(crate) fn new(seed: u64, name: &str) -> Self {
        // FNV-1a over the name, so that neighbouring names get unrelated keys.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Self { key: mix(mix(seed).wrapping_add(hash)) }
    }

    /// A seed for another generator.
    pub(crate) fn seed(self) -> u64 {
        self.key
    }

    /// `len` numbers, uniform in `[-bound, bound)`.
    pub(crate) fn uniform(self, len: usize, bound: f64) -> Vec<f32> {
        const STEPS: f64 = (1_u64 << 23) as f64;
        (0..len as u64)
            .map(|position| {
                // The top 24 bits: every value is exact in fp32 before it is scaled.
                let bits = self.at(position) >> 40;
                ((bits as f64 / STEPS - 1.0) * bound) as f32
            })
            .collect()
    }

    fn at(self, position: u64) -> u64 {
        mix(self.key.wrapping_add(position.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }
}

fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_uniform_within_the_bound_and_depend_on_seed_and_name() {
        let numbers = NamedStream::new(1, "a").uniform(100_000, 0.5);
        assert!(numbers.iter().all(|number| (-0.5..=0.5).contains(number)));
        let mean = numbers.iter().map(|&n| f64::from(n)).sum::<f64>() / 1e5;
        let square = numbers.iter().map(|&n| f64::from(n).powi(2)).sum::<f64>() / 1e5;
        // Standard errors: 0.29 / sqrt(1e5) = 0.0009 and 0.0745 / sqrt(1e5) = 0.00024.
        assert!(mean.abs() < 0.004, "{mean}");
        assert!((square - 1.0 / 12.0).abs() < 0.001, "{square}");
        assert_eq!(numbers, NamedStream::new(1, "a").uniform(100_000, 0.5));
        assert_ne!(numbers[0], NamedStream::new(2, "a").uniform(1, 0.5)[0]);
        assert_ne!(numbers[0], NamedStream::new(1, "b").uniform(1, 0.5)[0]);
    }
}
