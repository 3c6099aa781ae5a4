//! An adapted linear on the device under test, against its formula in fp64.

use blockstreamer_core::adapter::{Adapter, AdapterCall, Lora, LoraOptions, LoraShape};
use blockstreamer_core::block::BlockIndex;
use blockstreamer_core::device::grad;
use blockstreamer_core::site::{Site, SiteKind};
use tch::{Kind, Tensor};

use crate::experts::values;
use crate::rig::device;

const IN: usize = 48;
const OUT: usize = 40;

fn site() -> Site {
    Site {
        block: BlockIndex(0),
        layer: Some(0),
        local: "q_proj".to_owned(),
        module: "model.layers.0.q_proj".to_owned(),
        kind: SiteKind::Linear,
        is_vision: false,
        in_features: IN,
        out_features: OUT,
    }
}

/// An adapter of `rank` whose B is not zero.
fn lora(rank: usize) -> Lora {
    let shape = LoraShape { rank, alpha: 2.0 * rank as f64, ..LoraShape::default() };
    let lora = Lora::new(&[site()], &LoraOptions { shape, ..LoraOptions::default() }, device());
    let lora = lora.unwrap();
    let b = &lora.trainables()[1].tensor;
    let filled = values(3, &b.size()) * 0.3;
    tch::no_grad(|| b.shallow_clone().copy_(&filled));
    lora
}

/// How far `found` is from `wanted`, of the largest.
fn error(found: &Tensor, wanted: &Tensor) -> f64 {
    let distance = (found.to_kind(Kind::Double) - wanted).abs().max().double_value(&[]);
    distance / wanted.abs().max().double_value(&[])
}

#[test]
fn an_adapted_linear_and_all_its_gradients_are_the_formula_in_every_dtype() {
    // Gradients of the masters are summed, and on a GPU kept, in fp32; rounding the operands remains.
    for (kind, tolerance) in [(Kind::Float, 1e-5), (Kind::Half, 3e-3), (Kind::BFloat16, 2e-2)] {
        for rank in [1, 3, 8] {
            for (leading, has_bias) in
                [(&[1][..], false), (&[33], true), (&[2, 17], true), (&[2, 17], false)]
            {
                let lora = lora(rank);
                let [a, b] = [0, 1].map(|index| &lora.trainables()[index].tensor);
                let x = values(1, &[leading, &[IN as i64]].concat()).to_kind(kind);
                let x = x.set_requires_grad(true);
                let weight = (values(2, &[OUT as i64, IN as i64]) * 0.2).to_kind(kind);
                let bias = has_bias.then(|| values(4, &[OUT as i64]).to_kind(kind));
                let run = || {
                    let call =
                        AdapterCall { block: BlockIndex(0), site: "q_proj", dropout_seed: None };
                    lora.linear(call, &x, x.linear(&weight, bias.as_ref())).unwrap()
                };
                let output = run();
                let case = format!("{kind:?} rank {rank} {leading:?} bias {has_bias}");
                assert!(tch::no_grad(run).equal(&output), "{case}: with a graph and without");
                let upstream = values(5, &output.size()).to_kind(kind);
                let found = grad(&[&output], &[&upstream], &[&x, a, b]).unwrap();
                let found: Vec<_> = found.into_iter().map(Option::unwrap).collect();
                assert_eq!(
                    (found[1].kind(), found[2].kind()),
                    (Kind::Float, Kind::Float),
                    "{case}"
                );

                let double = |tensor: &Tensor| tensor.detach().to_kind(Kind::Double);
                let leaves = [&x, a, b].map(|leaf| double(leaf).set_requires_grad(true));
                let [wide_x, wide_a, wide_b] = &leaves;
                let wanted = wide_x.linear(&double(&weight), bias.as_ref().map(double))
                    + wide_x.matmul(&wide_a.tr()).matmul(&wide_b.tr()) * 2.0;
                let of_formula =
                    grad(&[&wanted], &[&double(&upstream)], &leaves.each_ref()).unwrap();
                assert!(error(&output, &wanted.detach()) < tolerance, "{case}: values");
                for (place, (found, wanted)) in found.iter().zip(of_formula).enumerate() {
                    let error = error(found, &wanted.unwrap());
                    assert!(error < tolerance, "{case}: gradient {place}: {error}");
                }
            }
        }
    }
}
