//! Micro-batches: a fixed function of dataset, settings and step number.

use std::sync::Arc;

use blockstreamer_core::batch::Batch;

use super::dataset::Dataset;
use super::error::{DataError, Result};
use super::making::{Maker, Rows, Selection};
use super::sample::Sample;

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
///
/// Where rows have pictures, a thread makes step `n + 1` from the moment that step `n` was handed out.
#[derive(Debug)]
pub struct Batches {
    rows: Arc<Rows>,
    maker: Maker,
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
        if dataset.samples.is_empty() {
            return Err(DataError::Setting { message: "the dataset has no rows".to_owned() });
        }
        let order = epoch_order(dataset.samples.len(), options, 0);
        let rows = Arc::new(Rows::new(dataset, pad_id));
        Ok(Self { maker: Maker::new(Arc::clone(&rows)), rows, options, epoch: 0, order })
    }

    /// Optimizer steps that take every row at least `epochs` times.
    pub fn num_steps(&self, epochs: u64) -> u64 {
        epochs.saturating_mul(self.rows.samples.len() as u64).div_ceil(self.rows_per_step())
    }

    /// Tokens of the longest row, to which a micro-batch may be padded.
    pub fn longest_row(&self) -> usize {
        self.rows.samples.iter().map(|sample| sample.ids.len()).max().unwrap_or(0)
    }

    /// Whether any row has a picture or a film.
    pub fn has_vision(&self) -> bool {
        self.rows.has_vision()
    }

    /// Whether any row of step `step` has a picture or a film. Nothing is read for it.
    pub fn step_has_vision(&mut self, step: u64) -> bool {
        let selection = self.selection(step);
        selection.iter().flatten().any(|row| !self.rows.samples[*row].pictures.is_empty())
    }

    /// Most patches that the pictures and films of a micro-batch may come to: those of the rows that have most.
    pub fn max_patches(&self) -> usize {
        let mut patches: Vec<usize> = self.rows.samples.iter().map(Sample::num_patches).collect();
        patches.sort_unstable_by(|left, right| right.cmp(left));
        // A small dataset comes round again within one micro-batch.
        (0..self.options.batch_size).map(|row| patches[row % patches.len()]).sum()
    }

    /// Step `step`, from 0. Any order of calls gives the same steps.
    ///
    /// # Errors
    /// Whatever libtorch refuses; a picture that cannot be decoded, naming its row.
    pub fn step(&mut self, step: u64) -> Result<Step> {
        let (selection, next) = (self.selection(step), self.selection(step + 1));
        self.maker.make(&selection, Some(next))
    }

    /// Every row once, in the file's order, for evaluation: one [`Step`] of one micro-batch each.
    ///
    /// # Errors
    /// Each item as [`Batches::step`].
    pub fn in_order(&self) -> impl Iterator<Item = Result<Step>> {
        let (num_rows, size) = (self.rows.samples.len(), self.options.batch_size);
        let selection = move |first: usize| -> Option<Selection> {
            let rows = first..num_rows.min(first.saturating_add(size));
            (!rows.is_empty()).then(|| vec![rows.collect()])
        };
        let mut maker = Maker::new(Arc::clone(&self.rows));
        (0..num_rows).step_by(size).filter_map(move |first| {
            let next = selection(first.saturating_add(size));
            selection(first).map(|rows| maker.make(&rows, next))
        })
    }

    /// The rows of step `step`.
    fn selection(&mut self, step: u64) -> Selection {
        let first = step * self.rows_per_step();
        let rows: Vec<usize> =
            (first..first + self.rows_per_step()).map(|row| self.sample_of(row)).collect();
        rows.chunks(self.options.batch_size).map(<[usize]>::to_vec).collect()
    }

    fn rows_per_step(&self) -> u64 {
        (self.options.batch_size * self.options.micro_batches) as u64
    }

    fn sample_of(&mut self, row: u64) -> usize {
        let count = self.rows.samples.len() as u64;
        let epoch = row / count;
        if epoch != self.epoch {
            self.order = epoch_order(self.rows.samples.len(), self.options, epoch);
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

#[cfg(test)]
mod picture_tests;
#[cfg(test)]
mod tests;
