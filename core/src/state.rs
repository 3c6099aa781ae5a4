//! Named tensors, and the state that flows from block to block.

use tch::Tensor;

use crate::error::{Error, Result};

/// A short ordered list of named tensors. Cloning shares the tensors' memory.
#[derive(Debug, Default)]
pub struct NamedTensors {
    entries: Vec<(String, Tensor)>,
}

impl NamedTensors {
    /// An empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// The tensor called `name`.
    ///
    /// # Errors
    /// [`Error::Tensor`] that lists the names there are.
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        match self.entries.iter().find(|entry| entry.0 == name) {
            Some(entry) => Ok(&entry.1),
            None => Err(self.missing(name)),
        }
    }

    /// The tensor called `name`, if there is one.
    pub fn find(&self, name: &str) -> Option<&Tensor> {
        self.entries.iter().find(|entry| entry.0 == name).map(|entry| &entry.1)
    }

    /// Takes the tensor called `name` out.
    ///
    /// # Errors
    /// As [`NamedTensors::get`].
    pub fn take(&mut self, name: &str) -> Result<Tensor> {
        match self.entries.iter().position(|entry| entry.0 == name) {
            Some(position) => Ok(self.entries.remove(position).1),
            None => Err(self.missing(name)),
        }
    }

    /// Adds a tensor, or replaces the one of the same name.
    pub fn insert(&mut self, name: impl Into<String>, tensor: Tensor) {
        let name = name.into();
        match self.entries.iter_mut().find(|entry| entry.0 == name) {
            Some(entry) => entry.1 = tensor,
            None => self.entries.push((name, tensor)),
        }
    }

    /// The same with one more tensor; for building in one expression.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, tensor: Tensor) -> Self {
        self.insert(name, tensor);
        self
    }

    /// Names and tensors in order of insertion.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Tensor)> {
        self.entries.iter().map(|entry| (entry.0.as_str(), &entry.1))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn missing(&self, name: &str) -> Error {
        let names: Vec<_> = self.entries.iter().map(|entry| entry.0.as_str()).collect();
        Error::tensor(name, format!("is not among the named tensors ({})", names.join(", ")))
    }
}

impl Clone for NamedTensors {
    fn clone(&self) -> Self {
        let share = |entry: &(String, Tensor)| (entry.0.clone(), entry.1.shallow_clone());
        Self { entries: self.entries.iter().map(share).collect() }
    }
}

impl FromIterator<(String, Tensor)> for NamedTensors {
    fn from_iter<I: IntoIterator<Item = (String, Tensor)>>(entries: I) -> Self {
        let mut all = Self::new();
        for (name, tensor) in entries {
            all.insert(name, tensor);
        }
        all
    }
}

/// Name of the tensor that every state has: the hidden states, `[batch, sequence, hidden_size]`.
pub const HIDDEN: &str = "hidden";

/// What flows from block to block: [`HIDDEN`], and for layers split over several blocks whatever the
/// parts hand on (residual, normed hidden, routing, running sum).
///
/// A block that hands a tensor on unchanged returns the same tensor; nothing is copied.
pub type State = NamedTensors;
