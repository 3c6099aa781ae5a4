//! Which bytes of which file go where in which block.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::expert_layout::{resolve, stored_shape};
use super::{Checkpoint, CheckpointFile, StoredTensor};
use crate::block::{BlockSpec, Placement};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::family::{Model, ModelOptions};
use crate::weights::{ExpertLayout, Role, Weight, WeightTable};

/// Where the bytes of one tensor of a block are. Its size is in the block's spec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSource {
    /// Name in the checkpoint.
    pub checkpoint: String,
    /// Position in [`Layout::files`].
    pub file: usize,
    /// Start in that file, counted from its first byte.
    pub offset_bytes: u64,
}

/// A checkpoint seen as blocks: the weight table matched with the headers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The blocks in order, with the dtypes of the files.
    pub blocks: Vec<BlockSpec>,
    /// For every block, the source of every tensor, in the order of its spec.
    pub sources: Vec<Vec<TensorSource>>,
    /// The files of the checkpoint.
    pub files: Vec<CheckpointFile>,
}

impl Layout {
    /// The layout of `checkpoint` for the model that was opened from it with `options`.
    ///
    /// # Errors
    /// As [`Layout::new`], and whatever the model returns.
    pub fn of(checkpoint: &Checkpoint, model: &dyn Model, options: &ModelOptions) -> Result<Self> {
        let table = model.weights()?;
        Self::new(checkpoint, &table, options.expert_layout, |name| model.ignores(name))
    }

    /// Matches `table` with `checkpoint`. The same checkpoint tensor may have several places (tied
    /// weights, slices); every one must have a place or be ignored, and slices must leave nothing over.
    /// Experts may lie in either layout; `expert_layout` says in which one where no shape tells.
    ///
    /// # Errors
    /// [`Error::MissingTensor`]; [`Error::Tensor`] for another shape or kind of dtype, naming the file, and
    /// for experts whose layout is not known or not one;
    /// [`Error::File`] for tensors left over; [`Error::Usage`] when the table itself is wrong.
    pub fn new(
        checkpoint: &Checkpoint,
        table: &WeightTable,
        expert_layout: Option<ExpertLayout>,
        ignores: impl Fn(&str) -> Result<bool>,
    ) -> Result<Self> {
        check_streamed_first(table.blocks.iter().map(|block| (&*block.name, block.placement)))?;
        check_missing(checkpoint, table)?;
        let expert_layout = resolve(checkpoint, table, expert_layout)?;
        let mut tensors = vec![Vec::new(); table.blocks.len()];
        let mut sources = vec![Vec::new(); table.blocks.len()];
        let mut transposed = vec![Vec::new(); table.blocks.len()];
        let mut used: BTreeMap<&str, Vec<Range<usize>>> = BTreeMap::new();
        for weight in &table.weights {
            let Some(stored) = checkpoint.tensors.get(&weight.checkpoint) else { continue };
            let file = &checkpoint.files[stored.file];
            let expected = (stored_shape(weight, expert_layout), expected_dtype(table, weight));
            let rows = fit(weight, stored, &expected.0, expected.1).map_err(|message| {
                Error::tensor(&weight.checkpoint, format!("{message} (in {})", file.path.display()))
            })?;
            let (Some(tensors), Some(sources)) =
                (tensors.get_mut(weight.block.0), sources.get_mut(weight.block.0))
            else {
                let message = format!(
                    "the weight table puts it in block {}, which does not exist",
                    weight.block
                );
                return Err(Error::tensor(&weight.checkpoint, message));
            };
            let mut shape = stored.shape.clone();
            let mut offset_bytes = stored.offset_bytes;
            if let Some(extent) = shape.first_mut() {
                // num_bytes is a multiple of the outermost extent, which is not 0 when rows start above 0.
                offset_bytes += (stored.num_bytes / (*extent).max(1) * rows.start) as u64;
                *extent = rows.len();
            }
            let is_transposed = matches!(weight.role, Role::Experts(_))
                && expert_layout == Some(ExpertLayout::InOut);
            tensors.push((weight.local.clone(), stored.dtype, shape));
            transposed[weight.block.0].push(is_transposed);
            let checkpoint = weight.checkpoint.clone();
            sources.push(TensorSource { checkpoint, file: stored.file, offset_bytes });
            used.entry(&weight.checkpoint).or_default().push(rows);
        }
        check_left_over(checkpoint, used, ignores)?;
        let blocks = (table.blocks.iter().zip(tensors).zip(transposed))
            .map(|((plan, tensors), transposed)| {
                let mut spec = BlockSpec::pack(&plan.name, plan.placement, tensors)
                    .map_err(|error| error.in_block(&plan.name))?;
                for (tensor, is_transposed) in spec.tensors.iter_mut().zip(transposed) {
                    tensor.is_transposed = is_transposed;
                }
                Ok(spec)
            })
            .collect::<Result<_>>()?;
        Ok(Self { blocks, sources, files: checkpoint.files.clone() })
    }
}

/// Refuses a list of blocks where a streamed one follows a resident one.
pub(crate) fn check_streamed_first<'a>(
    blocks: impl IntoIterator<Item = (&'a str, Placement)>,
) -> Result<()> {
    let mut resident = None;
    for (name, placement) in blocks {
        match (placement, resident) {
            (Placement::Resident | Placement::Gathered | Placement::Head, _) => {
                resident = Some(name)
            }
            (Placement::Streamed, None) => {}
            (Placement::Streamed, Some(before)) => {
                return Err(Error::usage(format!(
                    "streamed block '{name}' follows resident block '{before}'; streamed blocks come first"
                )));
            }
        }
    }
    Ok(())
}

fn expected_dtype(table: &WeightTable, weight: &Weight) -> Dtype {
    weight.role.buffer_dtype().unwrap_or(table.dtype)
}

fn check_missing(checkpoint: &Checkpoint, table: &WeightTable) -> Result<()> {
    let missing: BTreeSet<_> = (table.weights.iter().map(|weight| &weight.checkpoint))
        .filter(|name| !checkpoint.tensors.contains_key(*name))
        .collect();
    let Some(first) = missing.first() else { return Ok(()) };
    let mut place = checkpoint.directory.display().to_string();
    if missing.len() > 1 {
        place += &format!(" (with {} more)", missing.len() - 1);
    }
    Err(Error::MissingTensor { tensor: (*first).clone(), place })
}

/// The rows of `stored` that `weight` takes, or why it does not fit.
fn fit(
    weight: &Weight,
    stored: &StoredTensor,
    shape: &[usize],
    expected: Dtype,
) -> Result<Range<usize>, String> {
    if stored.shape != shape {
        return Err(format!(
            "has shape {:?}, but config.json asks for {shape:?}; the two belong to different models",
            stored.shape
        ));
    }
    // Any float is converted on use; whole numbers and codes mean something only as they are.
    if stored.dtype != expected && !(stored.dtype.is_float() && expected.is_float()) {
        return Err(format!(
            "is stored as {}, but the model needs {}; is this a quantised copy of the checkpoint?",
            stored.dtype.name(),
            expected.name()
        ));
    }
    let num_rows = stored.shape.first().copied().unwrap_or(1);
    let rows = weight.slice.clone().unwrap_or(0..num_rows);
    if rows.start > rows.end || rows.end > num_rows || (stored.shape.is_empty() && rows != (0..1)) {
        return Err(format!("the weight table takes rows {rows:?} of shape {:?}", stored.shape));
    }
    Ok(rows)
}

fn check_left_over(
    checkpoint: &Checkpoint,
    used: BTreeMap<&str, Vec<Range<usize>>>,
    ignores: impl Fn(&str) -> Result<bool>,
) -> Result<()> {
    let mut left_over = Vec::new();
    for name in checkpoint.tensors.keys() {
        if !used.contains_key(name.as_str()) && !ignores(name)? {
            left_over.push(name);
        }
    }
    if !left_over.is_empty() {
        let first: Vec<_> = left_over.iter().take(4).map(|name| name.as_str()).collect();
        let more = if left_over.len() > first.len() { ", …" } else { "" };
        return Err(Error::file(
            &checkpoint.directory,
            format!(
                "{} tensors of the checkpoint have no place in the model: {}{more}; config.json belongs to another checkpoint, or the family does not know this variant",
                left_over.len(),
                first.join(", ")
            ),
        ));
    }
    for (name, mut rows) in used {
        let num_rows = checkpoint.tensors[name].shape.first().copied().unwrap_or(1);
        rows.sort_by_key(|rows| rows.start);
        let covered = rows.iter().fold(0, |covered, rows| {
            if rows.start <= covered { covered.max(rows.end) } else { covered }
        });
        if covered < num_rows {
            let message =
                format!("the weight table has no place for its row {covered} of {num_rows}");
            return Err(Error::tensor(name, message));
        }
    }
    Ok(())
}
