//! Making micro-batches out of samples: padding, and the pixels of pictures, one step ahead.

use std::mem;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

use blockstreamer_core::Error;
use blockstreamer_core::batch::{Batch, IGNORE_LABEL};
use blockstreamer_core::vision::Patches;
use tch::Tensor;

use super::batches::Step;
use super::dataset::Dataset;
use super::error::{DataError, Result};
use super::images::Processor;
use super::sample::{Picture, Sample};

/// Which samples go into each micro-batch of a step.
pub(super) type Selection = Vec<Vec<usize>>;

/// Samples that steps are made of.
#[derive(Debug)]
pub(super) struct Rows {
    pub(super) samples: Vec<Sample>,
    /// The dataset's file, for messages.
    name: PathBuf,
    processor: Option<Arc<Processor>>,
    /// Fills short rows.
    pad_id: u32,
}

impl Rows {
    pub(super) fn new(dataset: Dataset, pad_id: u32) -> Self {
        let Dataset { samples, name, processor, .. } = dataset;
        Self { samples, name, processor, pad_id }
    }

    pub(super) fn has_vision(&self) -> bool {
        self.samples.iter().any(|sample| !sample.pictures.is_empty())
    }

    /// The step of these samples, with all pixels.
    fn step(&self, selection: &Selection) -> Result<Step> {
        let samples = |rows: &Vec<usize>| rows.iter().map(|row| &self.samples[*row]).collect();
        let selected: Vec<Vec<&Sample>> = selection.iter().map(samples).collect();
        let pictures: Vec<(&Sample, &Picture)> = (selected.iter().flatten())
            .flat_map(|sample| sample.pictures.iter().map(|picture| (*sample, picture)))
            .collect();
        let mut patches = self.patches(&pictures)?.into_iter();
        let mut step = Step { batches: Vec::new() };
        for samples in selected {
            let mut batch = pad(&samples, self.pad_id)?;
            let (mut images, mut videos) = (Joined::default(), Joined::default());
            for picture in samples.iter().flat_map(|sample| &sample.pictures) {
                let joined = if picture.is_film() { &mut videos } else { &mut images };
                joined.grids.push(picture.media.grid);
                joined.pixels.extend(patches.next());
            }
            (batch.images, batch.videos) = (images.finish()?, videos.finish()?);
            step.batches.push(batch);
        }
        Ok(step)
    }

    /// The patches of each picture, worked out by as many threads as there are processors.
    fn patches(&self, pictures: &[(&Sample, &Picture)]) -> Result<Vec<Tensor>> {
        let Some(processor) = &self.processor else { return Ok(Vec::new()) };
        let (next, num_threads) = (AtomicUsize::new(0), thread::available_parallelism());
        let work = || {
            let mut done = Vec::new();
            while let index = next.fetch_add(1, Ordering::Relaxed)
                && let Some((sample, picture)) = pictures.get(index)
            {
                let patches = processor.patches(&picture.sources, picture.size, &picture.media);
                done.push((index, sample.line, &picture.place, patches));
            }
            done
        };
        let num_helpers = num_threads.map_or(1, usize::from).min(pictures.len()).saturating_sub(1);
        let mut done = thread::scope(|scope| {
            // A helper that the system refuses is done without.
            let helpers: Vec<_> = (0..num_helpers)
                .filter_map(|_| thread::Builder::new().spawn_scoped(scope, work).ok())
                .collect();
            let mut done = work();
            for helper in helpers {
                done.extend(helper.join().unwrap_or_else(|payload| resume_unwind(payload)));
            }
            done
        });
        // In order, so that of several errors the same one is told every time.
        done.sort_unstable_by_key(|(index, ..)| *index);
        let patches = done.into_iter().map(|(_, line, place, patches)| {
            let path = self.name.clone();
            patches.map_err(|error| DataError::Row {
                path,
                line,
                message: format!("{place}: {error}"),
            })
        });
        patches.collect()
    }
}

/// The patches of one kind of media in one micro-batch.
#[derive(Default)]
struct Joined {
    pixels: Vec<Tensor>,
    grids: Vec<[usize; 3]>,
}

impl Joined {
    fn finish(self) -> Result<Option<Patches>> {
        let Self { mut pixels, grids } = self;
        let pixels = match pixels.len() {
            0 => return Ok(None),
            1 => pixels.swap_remove(0),
            _ => Tensor::f_cat(&pixels, 0).map_err(Error::from)?,
        };
        Ok(Some(Patches { pixels, grids }))
    }
}

/// Makes steps, and where there are pictures, the next step while the last one is used.
#[derive(Debug)]
pub(super) struct Maker {
    rows: Arc<Rows>,
    looks_ahead: bool,
    ahead: Option<Ahead>,
}

#[derive(Debug)]
struct Ahead {
    selection: Selection,
    thread: JoinHandle<Result<Step>>,
}

impl Maker {
    pub(super) fn new(rows: Arc<Rows>) -> Self {
        Self { looks_ahead: rows.has_vision(), rows, ahead: None }
    }

    /// The step of `selection`. `next` is what will be asked for next, if that is known; an error in it is told when
    /// it is asked for.
    pub(super) fn make(&mut self, selection: &Selection, next: Option<Selection>) -> Result<Step> {
        let step = match self.ahead.take() {
            Some(ahead) if ahead.selection == *selection => {
                ahead.thread.join().unwrap_or_else(|payload| resume_unwind(payload))
            }
            other => {
                // At most one step is in memory ahead of the one in use.
                other.map(|ahead| ahead.thread.join().map(drop));
                self.rows.step(selection)
            }
        };
        if let Some(selection) = next.filter(|_| self.looks_ahead && step.is_ok()) {
            let (rows, wanted) = (Arc::clone(&self.rows), selection.clone());
            let thread = thread::Builder::new().name("next-step".into());
            // Where the system has no thread left, the step is made when it is asked for.
            let thread = thread.spawn(move || rows.step(&wanted)).ok();
            self.ahead = thread.map(|thread| Ahead { selection, thread });
        }
        step
    }
}

impl Drop for Maker {
    /// libtorch must not be in use when the process ends.
    fn drop(&mut self) {
        mem::take(&mut self.ahead).map(|ahead| ahead.thread.join().map(drop));
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
