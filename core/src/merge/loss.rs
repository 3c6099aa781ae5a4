//! How much of a change is left after packing.

use serde_json::{Value, json};
use tch::{Kind, Tensor};

use crate::error::Result;

/// What packing changed experts in MXFP4 again made of the change `D = scaling * B A`. The weights go from `W`
/// to `Q`, which is the packed `W + D`. Most of what is smaller than half a step of the codes is lost.
#[derive(Debug, Clone, PartialEq)]
pub struct PackingLoss {
    /// Name in the checkpoint, of the matrix that is packed.
    pub tensor: String,
    /// `|Q - (W + D)|^2`
    error: f64,
    /// `|D|^2`
    change: f64,
    /// `(Q - W) D`
    kept: f64,
}

impl PackingLoss {
    pub(super) fn new(tensor: String) -> Self {
        Self { tensor, error: 0.0, change: 0.0, kept: 0.0 }
    }

    /// Adds a piece: the weights before, the change, and the weights that the codes stand for. All fp32.
    pub(super) fn add(&mut self, before: &Tensor, change: &Tensor, after: &Tensor) -> Result<()> {
        let sum_of_products = |one: &Tensor, two: &Tensor| -> Result<f64> {
            Ok(one.f_mul(two)?.f_sum(Kind::Double)?.f_double_value(&[])?)
        };
        let achieved = after.f_sub(before)?;
        let error = achieved.f_sub(change)?;
        self.error += sum_of_products(&error, &error)?;
        self.change += sum_of_products(change, change)?;
        self.kept += sum_of_products(&achieved, change)?;
        Ok(())
    }

    /// Adds the sums of other pieces.
    pub(super) fn add_sums(&mut self, other: &Self) {
        self.error += other.error;
        self.change += other.change;
        self.kept += other.kept;
    }

    /// `|Q - (W + D)| / |D|`: 0 when nothing is lost, about 1 when the change is, and more when packing did
    /// more harm than the change is large.
    pub fn relative_error(&self) -> f64 {
        if self.change > 0.0 { (self.error / self.change).sqrt() } else { 0.0 }
    }

    /// `(Q - W) D / |D|^2`: which part of the change is there, on average. 1 when all of it is, 0 when
    /// nothing moved its way.
    pub fn change_kept(&self) -> f64 {
        if self.change > 0.0 { self.kept / self.change } else { 1.0 }
    }

    /// All of them together; `None` without any.
    pub fn total(losses: &[Self]) -> Option<Self> {
        if losses.is_empty() {
            return None;
        }
        Some(losses.iter().fold(Self::new("total".into()), |mut total, loss| {
            total.add_sums(loss);
            total
        }))
    }

    /// For a JSON document.
    pub fn report(&self) -> Value {
        json!({
            "tensor": self.tensor,
            "relative_error": self.relative_error(),
            "change_kept": self.change_kept(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_that_is_kept_lost_or_rounded_is_told_apart() {
        let before = Tensor::from_slice(&[1_f32, 2.0, 3.0]);
        let change = Tensor::from_slice(&[0.5_f32, 0.0, -0.5]);
        let loss = |after: &[f32]| {
            let mut loss = PackingLoss::new("w".into());
            loss.add(&before, &change, &Tensor::from_slice(after)).unwrap();
            (loss.relative_error(), loss.change_kept())
        };
        assert_eq!(loss(&[1.5, 2.0, 2.5]), (0.0, 1.0));
        assert_eq!(loss(&[1.0, 2.0, 3.0]), (1.0, 0.0));
        assert_eq!(loss(&[1.5, 2.0, 3.0]), (0.5_f64.sqrt(), 0.5));
        let nothing = PackingLoss::new("w".into());
        assert_eq!((nothing.relative_error(), nothing.change_kept()), (0.0, 1.0));
    }

    #[test]
    fn the_total_weighs_tensors_by_their_change() {
        let loss = |error, change, kept| PackingLoss { tensor: "w".into(), error, change, kept };
        let total = PackingLoss::total(&[loss(0.0, 3.0, 3.0), loss(1.0, 1.0, 0.0)]).unwrap();
        assert_eq!((total.relative_error(), total.change_kept()), (0.5, 0.75));
        assert_eq!(PackingLoss::total(&[]), None);
    }
}
