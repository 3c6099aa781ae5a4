//! How the experts of a checkpoint lie in its files.

use super::Checkpoint;
use crate::error::{Error, Result};
use crate::weights::{ExpertLayout, Role, Weight, WeightTable};

impl ExpertLayout {
    /// The other one.
    fn other(self) -> Self {
        match self {
            Self::InOut => Self::OutIn,
            Self::OutIn => Self::InOut,
        }
    }

    /// As a setting spells it.
    fn setting(self) -> &'static str {
        match self {
            Self::InOut => "in_out",
            Self::OutIn => "out_in",
        }
    }

    fn describe(self) -> &'static str {
        match self {
            Self::InOut => "[experts, in, out]",
            Self::OutIn => "[experts, out, in]",
        }
    }
}

/// What the shape of a stored tensor says.
enum Told<'a> {
    Layout(ExpertLayout),
    /// Both layouts have this shape.
    Nothing(&'a Weight),
    /// Neither has it: the tensor belongs to another model.
    Foreign,
}

/// The layout of all experts of `checkpoint`, by the first tensor whose shape tells it; `None` without
/// experts. Files are written in one layout, so one tensor tells for all.
///
/// # Errors
/// [`Error::Tensor`] when tensors differ, when one contradicts `setting`, and when none tells and there is
/// no `setting`.
pub(super) fn resolve(
    checkpoint: &Checkpoint,
    table: &WeightTable,
    setting: Option<ExpertLayout>,
) -> Result<Option<ExpertLayout>> {
    let mut found: Option<(ExpertLayout, &str)> = None;
    let mut silent = None;
    for weight in &table.weights {
        let (Role::Experts(published), Some(stored)) =
            (weight.role, checkpoint.tensors.get(&weight.checkpoint))
        else {
            continue;
        };
        let told = match tell(weight, published, &stored.shape) {
            Told::Layout(layout) => layout,
            Told::Nothing(weight) => {
                silent = silent.or(Some(weight));
                continue;
            }
            Told::Foreign => continue,
        };
        let refuse = |message: String| Err(Error::tensor(&weight.checkpoint, message));
        if let Some(setting) = setting.filter(|setting| *setting != told) {
            return refuse(format!(
                "has shape {:?}, which is {}, but expert_layout = \"{}\" is set; leave the setting out",
                stored.shape,
                told.describe(),
                setting.setting()
            ));
        }
        match found {
            Some((layout, first)) if layout != told => {
                return refuse(format!(
                    "has shape {:?}, which is {}, but '{first}' is {}; the files were written by \
                     different programs",
                    stored.shape,
                    told.describe(),
                    layout.describe()
                ));
            }
            Some(_) => {}
            None => found = Some((told, &weight.checkpoint)),
        }
    }
    let told = found.map(|(layout, _)| layout).or(setting);
    match (told, silent) {
        (None, Some(weight)) => Err(Error::tensor(
            &weight.checkpoint,
            format!(
                "has shape {:?}: its input and output are equally wide, so that the shape cannot tell \
                 whether it is [experts, in, out], as published checkpoints of some families are, or \
                 [experts, out, in], as transformers 5 saves them; say it with expert_layout = \"in_out\" or \
                 \"out_in\" in the run file, or with --expert-layout",
                weight.shape
            ),
        )),
        (told, _) => Ok(told),
    }
}

fn tell<'a>(weight: &'a Weight, published: ExpertLayout, stored: &[usize]) -> Told<'a> {
    let &[experts, rows, columns] = &weight.shape[..] else { return Told::Foreign };
    match (stored == [experts, rows, columns], stored == [experts, columns, rows]) {
        (true, true) => Told::Nothing(weight),
        (true, false) => Told::Layout(published),
        (false, true) => Told::Layout(published.other()),
        (false, false) => Told::Foreign,
    }
}

/// The shape in which a checkpoint of this layout stores `weight`.
pub(super) fn stored_shape(weight: &Weight, layout: Option<ExpertLayout>) -> Vec<usize> {
    match (weight.role, &weight.shape[..], layout) {
        (Role::Experts(published), &[experts, rows, columns], Some(layout))
            if layout != published =>
        {
            vec![experts, columns, rows]
        }
        _ => weight.shape.clone(),
    }
}
