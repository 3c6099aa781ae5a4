//! Micro-batches on their way through the blocks: each on its own, or the tokens of all of them as one row.

use tch::Tensor;

use crate::error::{Error, Result};
use crate::state::{HIDDEN, NamedTensors, State};

/// `[batch, sequence]` of one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    batch: i64,
    sequence: i64,
}

impl Extent {
    /// Of the micro-batch whose state this is.
    pub(super) fn of(state: &State) -> Result<Self> {
        let (batch, sequence, _) = state.get(HIDDEN)?.size3()?;
        Ok(Self { batch, sequence })
    }

    fn num_tokens(self) -> i64 {
        self.batch * self.sequence
    }

    /// Whether `tensor` has something for every token: `[batch, sequence, width]`.
    fn is_of_tokens(self, tensor: &Tensor) -> bool {
        matches!(tensor.size()[..], [batch, sequence, _, ..]
            if (batch, sequence) == (self.batch, self.sequence))
    }

    /// `[batch, sequence, ..]` as `[1, tokens, ..]`.
    fn flat(self, tensor: &Tensor) -> Result<Tensor> {
        let mut size = tensor.size();
        size.splice(..2, [1, self.num_tokens()]);
        Ok(tensor.f_reshape(size)?)
    }
}

/// The states of all micro-batches between two blocks.
#[derive(Debug)]
pub(super) struct Flow {
    extents: Vec<Extent>,
    /// One per micro-batch, or a single one when they are joined.
    parts: Vec<State>,
    /// Per micro-batch what takes no part while they are joined.
    aside: Option<Vec<State>>,
}

impl Flow {
    /// Micro-batches on their own.
    pub(super) fn new(states: Vec<State>) -> Result<Self> {
        let extents = states.iter().map(Extent::of).collect::<Result<_>>()?;
        Ok(Self { extents, parts: states, aside: None })
    }

    /// Brings them together, or apart, unless they are already.
    pub(super) fn arrange(self, joined: bool) -> Result<Self> {
        match (&self.aside, joined) {
            (None, true) => {
                let (state, aside) = join(&self.parts, &self.extents)?;
                Ok(Self { parts: vec![state], aside: Some(aside), ..self })
            }
            (Some(_), false) => Ok(Self { parts: self.apart()?, aside: None, ..self }),
            _ => Ok(self),
        }
    }

    /// How many there are: micro-batches, or 1.
    pub(super) fn len(&self) -> usize {
        self.parts.len()
    }

    /// Takes the state at `part` away; a block's output takes its place.
    pub(super) fn take(&mut self, part: usize) -> State {
        std::mem::take(&mut self.parts[part])
    }

    /// Puts a block's output in its place.
    pub(super) fn put(&mut self, part: usize, state: State) {
        self.parts[part] = state;
    }

    /// Shows the state of every micro-batch.
    pub(super) fn each(&self, mut see: impl FnMut(usize, &State) -> Result<()>) -> Result<()> {
        let apart;
        let states = match self.aside {
            None => &self.parts,
            Some(_) => {
                apart = self.apart()?;
                &apart
            }
        };
        states.iter().enumerate().try_for_each(|(micro_batch, state)| see(micro_batch, state))
    }

    /// The states of all micro-batches.
    pub(super) fn into_states(self) -> Result<Vec<State>> {
        Ok(self.arrange(false)?.parts)
    }

    fn apart(&self) -> Result<Vec<State>> {
        let aside = self.aside.as_deref().unwrap_or_default();
        split(&self.parts[0], aside, &self.extents)
    }
}

/// Joins the gradients of all micro-batches as [`Flow::arrange`] joins their states. One that got none
/// counts as zero.
pub(super) fn join_gradients(
    gradients: &[NamedTensors],
    extents: &[Extent],
) -> Result<(NamedTensors, Vec<NamedTensors>)> {
    let mut complete = gradients.to_vec();
    let of_tokens = gradients.iter().zip(extents).flat_map(|(gradients, extent)| {
        gradients.iter().filter(|(_, gradient)| extent.is_of_tokens(gradient))
    });
    for (name, like) in of_tokens {
        for (gradients, extent) in complete.iter_mut().zip(extents) {
            if gradients.find(name).is_none() {
                let mut size = like.size();
                size.splice(..2, [extent.batch, extent.sequence]);
                gradients.insert(name, Tensor::f_zeros(size, (like.f_kind()?, like.device()))?);
            }
        }
    }
    join(&complete, extents)
}

/// The tokens of all micro-batches as one row, and what of each is not of tokens.
fn join(states: &[NamedTensors], extents: &[Extent]) -> Result<(NamedTensors, Vec<NamedTensors>)> {
    let mut joined = NamedTensors::new();
    let mut aside = Vec::new();
    for (state, extent) in states.iter().zip(extents) {
        let others = state.iter().filter(|(_, tensor)| !extent.is_of_tokens(tensor));
        aside.push(others.map(|(name, it)| (name.to_owned(), it.shallow_clone())).collect());
    }
    let Some((first, extent)) = states.iter().zip(extents).next() else {
        return Ok((joined, aside));
    };
    let of_tokens = |state: &NamedTensors, extent: Extent| {
        state.iter().filter(|(_, tensor)| extent.is_of_tokens(tensor)).count()
    };
    for (state, its_extent) in states.iter().zip(extents) {
        if of_tokens(state, *its_extent) != of_tokens(first, *extent) {
            return Err(Error::usage(
                "the states of two micro-batches hold different tensors of tokens, and cannot pass \
                 through a block together",
            ));
        }
    }
    for (name, _) in first.iter().filter(|(_, tensor)| extent.is_of_tokens(tensor)) {
        let flat = states.iter().zip(extents).map(|(state, extent)| extent.flat(state.get(name)?));
        let mut flat = flat.collect::<Result<Vec<_>>>()?;
        let tensor = match flat.len() {
            1 => flat.remove(0),
            _ => Tensor::f_cat(&flat, 1)?,
        };
        joined.insert(name, tensor);
    }
    Ok((joined, aside))
}

/// The opposite of [`join`].
pub(super) fn split(
    joined: &NamedTensors,
    aside: &[NamedTensors],
    extents: &[Extent],
) -> Result<Vec<NamedTensors>> {
    let num_tokens: i64 = extents.iter().map(|extent| extent.num_tokens()).sum();
    let mut start = 0;
    let mut states = Vec::new();
    for (number, extent) in extents.iter().enumerate() {
        let mut state = NamedTensors::new();
        for (name, tensor) in joined.iter() {
            let mut size = tensor.size();
            if size.len() < 3 || size[..2] != [1, num_tokens] {
                let message = format!(
                    "has the shape {size:?} after a block of tokens, which must hand out \
                     [1, {num_tokens}, width]"
                );
                return Err(Error::tensor(name, message));
            }
            size.splice(..2, [extent.batch, extent.sequence]);
            let part = tensor.f_narrow(1, start, extent.num_tokens())?;
            state.insert(name, part.f_reshape(size)?);
        }
        for (name, tensor) in aside.get(number).into_iter().flat_map(NamedTensors::iter) {
            state.insert(name, tensor.shallow_clone());
        }
        start += extent.num_tokens();
        states.push(state);
    }
    Ok(states)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn counting(size: &[i64], from: i64) -> Tensor {
        let count = size.iter().product::<i64>();
        (Tensor::arange(count, (Kind::Float, Device::Cpu)) + from as f64).view(size)
    }

    fn states() -> Vec<State> {
        let first = State::new()
            .with(HIDDEN, counting(&[2, 3, 4], 0))
            .with("chosen", counting(&[2, 3, 2], 100).to_kind(Kind::Int64))
            .with("feature", counting(&[5, 4], 200));
        let second = State::new()
            .with(HIDDEN, counting(&[1, 2, 4], 300))
            .with("chosen", counting(&[1, 2, 2], 400).to_kind(Kind::Int64));
        vec![first, second]
    }

    fn assert_same(found: &[State], expected: &[State]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert_eq!(found.len(), expected.len());
            for (name, tensor) in expected.iter() {
                assert!(found.get(name).unwrap().equal(tensor), "{name}");
            }
        }
    }

    #[test]
    fn micro_batches_come_apart_as_they_came_together() {
        let flow = Flow::new(states()).unwrap().arrange(true).unwrap();
        assert_eq!(flow.len(), 1);
        assert_eq!(flow.parts[0].get(HIDDEN).unwrap().size(), [1, 8, 4]);
        assert!(flow.parts[0].find("feature").is_none());
        let mut seen = Vec::new();
        flow.each(|_, state| {
            seen.push(state.clone());
            Ok(())
        })
        .unwrap();
        assert_same(&seen, &states());
        assert_same(&flow.arrange(true).unwrap().into_states().unwrap(), &states());
    }

    #[test]
    fn a_gradient_that_one_micro_batch_lacks_is_zero_there() {
        let extents: Vec<_> = states().iter().map(|state| Extent::of(state).unwrap()).collect();
        let gradients = [
            NamedTensors::new().with("feature", counting(&[5, 4], 1)),
            NamedTensors::new().with(HIDDEN, counting(&[1, 2, 4], 7)),
        ];
        let (joined, aside) = join_gradients(&gradients, &extents).unwrap();
        let hidden = joined.get(HIDDEN).unwrap();
        assert_eq!(hidden.size(), [1, 8, 4]);
        assert_eq!(hidden.narrow(1, 0, 6).abs().max().double_value(&[]), 0.0);
        let apart = split(&joined, &aside, &extents).unwrap();
        assert!(apart[1].get(HIDDEN).unwrap().equal(gradients[1].get(HIDDEN).unwrap()));
        assert!(apart[0].get("feature").unwrap().equal(gradients[0].get("feature").unwrap()));
        assert!(apart[1].find("feature").is_none());
    }

    #[test]
    fn states_that_do_not_fit_together_and_outputs_of_other_shapes_are_refused() {
        let mut odd = states();
        drop(odd[1].take("chosen").unwrap());
        let error = Flow::new(odd).unwrap().arrange(true).unwrap_err().to_string();
        assert!(error.contains("different tensors"), "{error}");
        let mut flow = Flow::new(states()).unwrap().arrange(true).unwrap();
        flow.put(0, State::new().with(HIDDEN, counting(&[8, 4], 0)));
        let error = flow.into_states().unwrap_err().to_string();
        assert!(error.contains("'hidden'") && error.contains("[1, 8, width]"), "{error}");
    }
}
