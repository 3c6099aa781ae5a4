//! Micro-batches: a fixed function of dataset, settings and step number.

use blockstreamer_core::Error;
use blockstreamer_core::batch::{Batch, IGNORE_LABEL};
use tch::Tensor;

use super::dataset::{Dataset, Sample};
use super::error::{DataError, Result};

/// How rows are put together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchOptions {
    /// Rows of one micro-batch.
    pub batch_size: usize,
    /// Micro-batches of one optimizer step.
    pub micro_batches: usize,
    /// Decides the order of the rows together with the epoch's number.
    pub seed: u64,
    /// Whether each epoch has its own order. Otherwise the file's order is kept.
    pub shuffle: bool,
}

/// The micro-batches of one optimizer step.
#[derive(Debug)]
pub struct Step {
    /// One entry per micro-batch, each padded on the right to its own longest row.
    pub batches: Vec<Batch>,
}

/// The endless sequence of optimizer steps over a dataset.
///
/// Row `k` of the whole run is row `k % samples` of epoch `k / samples`, and step `n` takes the rows from
/// `n * batch_size * micro_batches` on. The last step of an epoch therefore goes on into the next epoch
/// when the rows do not come out even, and a run resumes from its step number alone.
#[derive(Debug)]
pub struct Batches {
    samples: Vec<Sample>,
    pad_id: u32,
    options: BatchOptions,
    /// The epoch whose order is at hand.
    epoch: u64,
    order: Vec<usize>,
}

impl Batches {
    /// Steps over `dataset`; `pad_id` fills short rows, see [`super::Tokenizer::pad_id`].
    ///
    /// # Errors
    /// [`DataError::Setting`] when `batch_size` or `micro_batches` is 0, or the dataset has no rows.
    pub fn new(dataset: Dataset, pad_id: u32, options: BatchOptions) -> Result<Self> {
        for (name, value) in
            [("batch_size", options.batch_size), ("micro_batches", options.micro_batches)]
        {
            if value == 0 {
                return Err(DataError::Setting { message: format!("{name} must be at least 1") });
            }
        }
        let samples = dataset.samples;
        if samples.is_empty() {
            return Err(DataError::Setting { message: "the dataset has no rows".to_owned() });
        }
        let order = epoch_order(samples.len(), options, 0);
        Ok(Self { samples, pad_id, options, epoch: 0, order })
    }

    /// Optimizer steps that take every row at least `epochs` times.
    pub fn num_steps(&self, epochs: u64) -> u64 {
        epochs.saturating_mul(self.samples.len() as u64).div_ceil(self.rows_per_step())
    }

    /// Tokens of the longest row, to which a micro-batch may be padded.
    pub fn longest_row(&self) -> usize {
        self.samples.iter().map(|sample| sample.ids.len()).max().unwrap_or(0)
    }

    /// Step `step`, from 0. Any order of calls gives the same steps.
    ///
    /// # Errors
    /// Whatever libtorch refuses.
    pub fn step(&mut self, step: u64) -> Result<Step> {
        let first = step * self.rows_per_step();
        let rows: Vec<usize> =
            (first..first + self.rows_per_step()).map(|row| self.sample_of(row)).collect();
        let mut result = Step { batches: Vec::new() };
        for rows in rows.chunks(self.options.batch_size) {
            let rows: Vec<&Sample> = rows.iter().map(|row| &self.samples[*row]).collect();
            result.batches.push(pad(&rows, self.pad_id)?);
        }
        Ok(result)
    }

    /// Every row once, in the file's order, for evaluation: one [`Step`] of one micro-batch each.
    ///
    /// # Errors
    /// Each item as [`Batches::step`].
    pub fn in_order(&self) -> impl Iterator<Item = Result<Step>> {
        self.samples.chunks(self.options.batch_size).map(|rows| {
            let rows: Vec<&Sample> = rows.iter().collect();
            Ok(Step { batches: vec![pad(&rows, self.pad_id)?] })
        })
    }

    fn rows_per_step(&self) -> u64 {
        (self.options.batch_size * self.options.micro_batches) as u64
    }

    fn sample_of(&mut self, row: u64) -> usize {
        let count = self.samples.len() as u64;
        let epoch = row / count;
        if epoch != self.epoch {
            self.order = epoch_order(self.samples.len(), self.options, epoch);
            self.epoch = epoch;
        }
        self.order[(row % count) as usize]
    }
}

/// The order of the rows in an epoch: a Fisher-Yates shuffle.
fn epoch_order(count: usize, options: BatchOptions, epoch: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    if options.shuffle {
        // Hashing the seed first keeps (seed, epoch + 1) and (seed + 1, epoch) apart.
        let mut random = SplitMix64(SplitMix64(options.seed).next() ^ epoch);
        for last in (1..count).rev() {
            order.swap(last, random.below(last as u64 + 1) as usize);
        }
    }
    order
}

/// The generator of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`; the bias is under `bound / 2^64`.
    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}

/// One micro-batch, padded on the right to its longest row.
fn pad(rows: &[&Sample], pad_id: u32) -> Result<Batch> {
    let longest = rows.iter().map(|row| row.ids.len()).max().unwrap_or(0);
    let padding = |row: &Sample| longest - row.ids.len();
    let mut input_ids: Vec<i64> = Vec::with_capacity(rows.len() * longest);
    let mut labels: Vec<i64> = Vec::with_capacity(rows.len() * longest);
    let mut mask: Vec<bool> = Vec::with_capacity(rows.len() * longest);
    for row in rows {
        input_ids.extend(row.ids.iter().map(|id| i64::from(*id)));
        input_ids.extend(std::iter::repeat_n(i64::from(pad_id), padding(row)));
        let pairs = row.ids.iter().zip(&row.targets);
        labels
            .extend(pairs.map(|(id, target)| if *target { i64::from(*id) } else { IGNORE_LABEL }));
        labels.extend(std::iter::repeat_n(IGNORE_LABEL, padding(row)));
        mask.extend(std::iter::repeat_n(true, row.ids.len()));
        mask.extend(std::iter::repeat_n(false, padding(row)));
    }
    let shape = [rows.len() as i64, longest as i64];
    let ids_tensor = |values: &[i64]| -> Result<Tensor, Error> {
        Ok(Tensor::f_from_slice(values)?.f_view(shape)?)
    };
    let mut batch = Batch::new(ids_tensor(&input_ids)?);
    batch.labels = Some(ids_tensor(&labels)?);
    if mask.contains(&false) {
        let mask = Tensor::f_from_slice(&mask).and_then(|mask| mask.f_view(shape));
        batch.attention_mask = Some(mask.map_err(Error::from)?);
    }
    Ok(batch)
}

#[cfg(test)]
mod tests;
