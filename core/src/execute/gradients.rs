//! Where gradients of trainable tensors go.

use tch::Tensor;

use crate::adapter::Trainable;
use crate::device::into_own;
use crate::error::{Error, Result};

/// Takes the gradient of one trainable tensor from one block's backward visit.
///
/// The executor calls it once per trainable tensor, block and micro-batch that used it, and in the head
/// once per chunk of rows; a tensor shared by several blocks is handed in several times. Nothing outside
/// the sink knows what becomes of it.
pub trait GradientSink {
    /// `index` is the position among the adapter's trainables; `gradient` has that tensor's shape and
    /// dtype, on the device.
    ///
    /// # Errors
    /// Whatever keeps the sink from taking it; the step then fails.
    fn accept(&mut self, index: usize, gradient: Tensor) -> Result<()>;
}

/// Sums gradients on the device, over blocks, micro-batches and steps, until [`Gradients::clear`].
#[derive(Debug, Default)]
pub struct Gradients {
    sums: Vec<Option<Tensor>>,
}

impl Gradients {
    /// No gradients yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The sum for the trainable at `index`; `None` when nothing used it.
    pub fn get(&self, index: usize) -> Option<&Tensor> {
        self.sums.get(index).and_then(Option::as_ref)
    }

    /// The trainables that have a gradient, with it.
    pub fn of<'a>(
        &'a self,
        trainables: &'a [Trainable],
    ) -> impl Iterator<Item = (&'a Trainable, &'a Tensor)> {
        trainables
            .iter()
            .enumerate()
            .filter_map(|(index, trainable)| Some((trainable, self.get(index)?)))
    }

    /// Forgets all sums.
    pub fn clear(&mut self) {
        self.sums.clear();
    }
}

impl GradientSink for Gradients {
    fn accept(&mut self, index: usize, gradient: Tensor) -> Result<()> {
        if self.sums.len() <= index {
            self.sums.resize_with(index + 1, || None);
        }
        match &mut self.sums[index] {
            Some(sum) => {
                let _no_graph = tch::no_grad_guard();
                sum.f_add_(&gradient).map(drop).map_err(Error::from)
            }
            empty => {
                // libtorch may hand the same tensor, or a view, to several takers: sums are changed in place.
                *empty = Some(into_own(gradient)?);
                Ok(())
            }
        }
    }
}
