//! Rotary embeddings that reach past the length a model was first trained at.

use std::f64::consts::PI;

use crate::error::{Error, Result};
use crate::numerics::rope::inverses;

/// YaRN (Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models"): low
/// frequencies are divided by `factor`, high ones stay, and between them lies a ramp. The names are those of
/// `rope_scaling` in a model's configuration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// How many times longer sequences become.
    pub factor: f64,
    /// Turns within the original length from which a frequency stays as it is.
    pub beta_fast: f64,
    /// Turns up to which it is divided by the whole factor.
    pub beta_slow: f64,
    /// The original length in tokens.
    pub original_max_position_embeddings: usize,
    /// Whether the ends of the ramp are rounded outwards to whole frequencies.
    pub truncate: bool,
}

impl Yarn {
    /// Frequencies of `rotary_dim / 2` pairs of dimensions, fp32, operation by operation as transformers
    /// computes them.
    ///
    /// # Errors
    /// [`Error::Usage`] for numbers that give no frequencies, naming the one that is out of range.
    pub fn inverse_frequencies(&self, rope_theta: f64, rotary_dim: usize) -> Result<Vec<f32>> {
        self.check(rope_theta, rotary_dim)?;
        let dim = rotary_dim as f64;
        // The frequency, counted as a real number, that makes so many turns within the original length.
        let at_turns = |turns: f64| {
            let length = self.original_max_position_embeddings as f64;
            dim * (length / (turns * 2.0 * PI)).ln() / (2.0 * rope_theta.ln())
        };
        let (mut low, mut high) = (at_turns(self.beta_fast), at_turns(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        let scaled = |(index, inverse): (usize, f32)| {
            let ramp = ((index as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            let kept = 1.0 - ramp;
            (self.factor as f32 * inverse).recip() * (1.0 - kept) + inverse.recip() * kept
        };
        Ok(inverses(rope_theta, rotary_dim)?.into_iter().enumerate().map(scaled).collect())
    }

    /// What cosines and sines are multiplied by where a configuration does not say: `0.1 ln(factor) + 1`, or
    /// 1 when nothing becomes longer. Scores carry its square.
    pub fn attention_factor(&self) -> f64 {
        0.1 * self.factor.max(1.0).ln() + 1.0
    }

    fn check(&self, rope_theta: f64, rotary_dim: usize) -> Result<()> {
        let positive = |number: f64| number.is_finite() && number > 0.0;
        let wrong = [
            ("factor", self.factor, positive(self.factor), "a number above 0"),
            ("beta_fast", self.beta_fast, positive(self.beta_fast), "a number above 0"),
            (
                "beta_slow",
                self.beta_slow,
                positive(self.beta_slow) && self.beta_slow <= self.beta_fast,
                "a number above 0 and no larger than beta_fast",
            ),
            (
                "original_max_position_embeddings",
                self.original_max_position_embeddings as f64,
                self.original_max_position_embeddings > 0,
                "a number of tokens above 0",
            ),
            (
                "rope_theta",
                rope_theta,
                rope_theta.is_finite() && rope_theta > 1.0,
                "a number above 1",
            ),
            (
                "the rotary dimension",
                rotary_dim as f64,
                rotary_dim > 0 && rotary_dim.is_multiple_of(2),
                "an even number above 0",
            ),
        ];
        match wrong.into_iter().find(|(_, _, is_right, _)| !is_right) {
            Some((name, number, _, wanted)) => {
                Err(Error::usage(format!("YaRN: {name} is {number}, but must be {wanted}")))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numerics::inverse_frequencies;

    const PUBLISHED: Yarn = Yarn {
        factor: 32.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position_embeddings: 4096,
        truncate: false,
    };

    /// Bits of frequencies by their number, as transformers 5.24 computes them.
    fn agree(yarn: &Yarn, rope_theta: f64, rotary_dim: usize, wanted: &[(usize, u32)]) {
        let found = yarn.inverse_frequencies(rope_theta, rotary_dim).unwrap();
        assert_eq!(found.len(), rotary_dim / 2);
        for &(index, bits) in wanted {
            assert_eq!(found[index].to_bits(), bits, "{index}: {} in {yarn:?}", found[index]);
        }
    }

    #[test]
    fn frequencies_have_the_bits_of_transformers() {
        let wanted = [
            (0, 0x3f80_0000),
            (8, 0x3d50_2194),
            (9, 0x3d01_ddd5),
            (10, 0x3c9e_646f),
            (12, 0x3bde_a840),
            (13, 0x3b7c_fe14),
            (15, 0x3a89_f778),
            (17, 0x3907_99b9),
            (18, 0x3820_adc6),
            (31, 0x34a2_52d3),
        ];
        agree(&PUBLISHED, 150_000.0, 64, &wanted);
        let wanted = [(8, 0x3d50_2194), (9, 0x3d01_84c3), (12, 0x3be5_e413), (17, 0x396f_0548)];
        agree(&Yarn { truncate: true, ..PUBLISHED }, 150_000.0, 64, &wanted);
        let short = Yarn { original_max_position_embeddings: 64, ..PUBLISHED };
        let wanted = [
            (0, 1_065_353_216),
            (1, 1_034_852_116),
            (2, 986_718_612),
            (3, 968_600_194),
            (4, 950_613_654),
            (7, 897_062_696),
        ];
        agree(&short, 150_000.0, 16, &wanted);
        let long = Yarn {
            factor: 4.0,
            original_max_position_embeddings: 32_768,
            truncate: true,
            ..PUBLISHED
        };
        let wanted = [(24, 0x3bb0_2377), (30, 0x3a8b_8207), (36, 0x393c_93be), (63, 0x34a6_8e4c)];
        agree(&long, 1e6, 128, &wanted);
        // Both ends of the ramp are below the first frequency.
        let tiny = Yarn { factor: 2.0, original_max_position_embeddings: 8, ..PUBLISHED };
        agree(&tiny, 10_000.0, 8, &[(0, 1_065_353_216), (1, 1_028_443_341), (3, 973_279_855)]);
    }

    #[test]
    fn published_numbers_are_those_of_the_paper_formula() {
        let found = PUBLISHED.inverse_frequencies(150_000.0, 64).unwrap();
        for (index, wanted) in [
            (8, 0.050_813_274_8),
            (9, 0.031_705_696_2),
            (12, 0.006_794_959_49),
            (17, 0.000_129_318_701),
            (18, 3.830_881_24e-5),
            (31, 3.023_511_43e-7),
        ] {
            assert!((f64::from(found[index]) / wanted - 1.0).abs() < 1e-6, "{index}");
        }
        assert_eq!(PUBLISHED.attention_factor(), 1.346_573_590_279_972_7);
    }

    #[test]
    fn a_factor_of_one_changes_nothing() {
        let same = Yarn { factor: 1.0, ..PUBLISHED };
        assert_eq!(same.attention_factor(), 1.0);
        let plain = inverse_frequencies(150_000.0, 64).unwrap();
        for (found, plain) in same.inverse_frequencies(150_000.0, 64).unwrap().iter().zip(plain) {
            assert!((found / plain - 1.0).abs() < 1e-6);
        }
    }

    #[test]
    fn numbers_that_give_no_frequencies_are_refused_by_name() {
        let refused = [
            (Yarn { factor: 0.0, ..PUBLISHED }, 1e4, 64, "factor is 0"),
            (Yarn { factor: f64::NAN, ..PUBLISHED }, 1e4, 64, "factor is NaN"),
            (Yarn { beta_fast: -1.0, ..PUBLISHED }, 1e4, 64, "beta_fast is -1"),
            (Yarn { beta_slow: 33.0, ..PUBLISHED }, 1e4, 64, "beta_slow is 33"),
            (
                Yarn { original_max_position_embeddings: 0, ..PUBLISHED },
                1e4,
                64,
                "original_max_position_embeddings is 0",
            ),
            (PUBLISHED, 1.0, 64, "rope_theta is 1"),
            (PUBLISHED, 1e4, 7, "the rotary dimension is 7"),
            (PUBLISHED, 1e4, 0, "the rotary dimension is 0"),
        ];
        for (yarn, rope_theta, rotary_dim, wanted) in refused {
            let error = yarn.inverse_frequencies(rope_theta, rotary_dim).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
