//! LoRA: a product of two thin matrices beside each chosen linear (Hu et al. 2021).

use std::collections::HashMap;
use std::path::Path;

use tch::{Device, Kind, Tensor};

use crate::adapter::random::NamedStream;
use crate::adapter::targets::{LayerRule, ModuleRule, compile, select};
use crate::adapter::{Adapter, AdapterCall, Trainable, peft};
use crate::block::BlockIndex;
use crate::device::dropout;
use crate::error::{Error, Result};
use crate::site::Site;

/// The numbers of a LoRA adapter, named as in PEFT's `LoraConfig`.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraShape {
    /// Inner width `r` of the product. Default 8.
    pub rank: usize,
    /// The product is scaled by `alpha / rank`. Default 16.
    pub alpha: f64,
    /// Probability with which an element of the input is dropped in training. Default 0.
    pub dropout: f64,
    /// Scale by `alpha / sqrt(rank)` instead (Kalajdzievski 2023). Default false.
    pub use_rslora: bool,
    /// Other ranks for the modules whose path ends in a match of the expression; the first match counts.
    pub rank_pattern: Vec<(String, usize)>,
    /// Other alphas, likewise.
    pub alpha_pattern: Vec<(String, f64)>,
}

impl Default for LoraShape {
    fn default() -> Self {
        Self {
            rank: 8,
            alpha: 16.0,
            dropout: 0.0,
            use_rslora: false,
            rank_pattern: Vec::new(),
            alpha_pattern: Vec::new(),
        }
    }
}

impl LoraShape {
    /// Rank and scaling at `module`.
    ///
    /// # Errors
    /// [`Error::Adapter`] for a pattern that is no regular expression.
    fn at(&self, module: &str) -> Result<(usize, f64)> {
        let rank = first_match(&self.rank_pattern, module)?.unwrap_or(self.rank);
        let alpha = first_match(&self.alpha_pattern, module)?.unwrap_or(self.alpha);
        let divisor = if self.use_rslora { (rank as f64).sqrt() } else { rank as f64 };
        Ok((rank, alpha / divisor))
    }

    fn check(&self) -> Result<()> {
        let refuse = |message: String| Err(Error::Adapter { message });
        if self.rank == 0 || self.rank_pattern.iter().any(|entry| entry.1 == 0) {
            return refuse("the rank must be at least 1".into());
        }
        let mut alphas = self.alpha_pattern.iter().map(|entry| entry.1).chain([self.alpha]);
        if let Some(alpha) = alphas.find(|alpha| !(alpha.is_finite() && *alpha > 0.0)) {
            return refuse(format!("alpha must be a number greater than 0, not {alpha}"));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return refuse(format!("dropout must be at least 0 and below 1, not {}", self.dropout));
        }
        Ok(())
    }
}

/// PEFT's rule for its patterns: a match of the expression must end the module path and begin it or
/// follow a dot.
fn first_match<T: Copy>(patterns: &[(String, T)], module: &str) -> Result<Option<T>> {
    for (pattern, value) in patterns {
        if compile(&format!(r"\A(?:.*\.)?(?:{pattern})\z"), pattern)?.is_match(module) {
            return Ok(Some(*value));
        }
    }
    Ok(None)
}

/// How to make a new LoRA adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraOptions {
    /// Rank, scaling and dropout.
    pub shape: LoraShape,
    /// The linears to attach to. Default: every linear except the output head.
    pub target_modules: ModuleRule,
    /// The linears to leave out of these. Default: none.
    pub exclude_modules: Option<ModuleRule>,
    /// The layers to attach in. Default: all.
    pub layers: LayerRule,
    /// Decides the initial values, together with each module's name. Default 0.
    pub seed: u64,
}

impl Default for LoraOptions {
    fn default() -> Self {
        Self {
            shape: LoraShape::default(),
            target_modules: ModuleRule::all_linear(),
            exclude_modules: None,
            layers: LayerRule::All,
            seed: 0,
        }
    }
}

/// Which of the two matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Matrix {
    /// `[rank, in_features]`
    A,
    /// `[out_features, rank]`
    B,
}

/// LoRA: `y = output + scaling * B(A(dropout(x)))`, with fp32 masters of A and B.
#[derive(Debug)]
pub struct Lora {
    shape: LoraShape,
    /// A and B of each module in turn.
    trainables: Vec<Trainable>,
    /// Module paths, one for each two of `trainables`.
    modules: Vec<String>,
    attached: HashMap<BlockIndex, HashMap<String, Attachment>>,
}

#[derive(Debug, Clone, Copy)]
struct Attachment {
    /// Position in `modules`.
    module: usize,
    scaling: f64,
}

impl Lora {
    /// A new adapter on `device` that changes nothing yet: A is drawn from
    /// `U(-1/sqrt(in_features), 1/sqrt(in_features))`, which is PEFT's Kaiming initialisation, and B is
    /// zero. The values depend on the seed and on each module's path alone.
    ///
    /// # Errors
    /// [`Error::Adapter`] for options out of range and for targets that match nothing.
    pub fn new(sites: &[Site], options: &LoraOptions, device: Device) -> Result<Self> {
        let chosen = select(
            sites,
            &options.target_modules,
            options.exclude_modules.as_ref(),
            &options.layers,
        )?;
        Self::build(&chosen, options.shape.clone(), device, |site, rank, matrix| {
            let (rank, width) = (rank as i64, site.in_features as i64);
            match matrix {
                Matrix::A => {
                    let bound = 1.0 / (site.in_features as f64).sqrt();
                    let values = NamedStream::new(options.seed, &site.module)
                        .uniform((rank * width) as usize, bound);
                    Ok(Tensor::f_from_slice(&values)?.f_reshape([rank, width])?)
                }
                Matrix::B => {
                    let size = [site.out_features as i64, rank];
                    Ok(Tensor::f_zeros(size, (Kind::Float, Device::Cpu))?)
                }
            }
        })
    }

    /// An adapter from a folder that PEFT or [`Adapter::export`] wrote, on `device`.
    ///
    /// Tensors in bf16 and fp16 become fp32.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::File`] for files that are missing, damaged, use what is not supported,
    /// or do not fit the model: a tensor left over, missing, or of the wrong shape.
    pub fn import(directory: &Path, sites: &[Site], device: Device) -> Result<Self> {
        peft::import(directory, sites, device)
    }

    /// Rank, scaling and dropout.
    pub fn shape(&self) -> &LoraShape {
        &self.shape
    }

    /// Paths of the modules that are adapted, in the order of the model's sites.
    pub fn modules(&self) -> &[String] {
        &self.modules
    }

    /// Attaches to `sites`, with the matrices that `fill` returns (any device). Sites of one module in
    /// several blocks share its matrices.
    pub(crate) fn build(
        sites: &[&Site],
        shape: LoraShape,
        device: Device,
        mut fill: impl FnMut(&Site, usize, Matrix) -> Result<Tensor>,
    ) -> Result<Self> {
        shape.check()?;
        let mut lora =
            Self { shape, trainables: Vec::new(), modules: Vec::new(), attached: HashMap::new() };
        let mut seen: HashMap<&str, (usize, &Site)> = HashMap::new();
        for &site in sites {
            let (rank, scaling) = lora.shape.at(&site.module)?;
            let module = match seen.get(site.module.as_str()) {
                Some(&(module, first)) => {
                    let size = |site: &Site| (site.in_features, site.out_features);
                    if size(first) != size(site) {
                        let message = format!("module '{}' has two sizes", site.module);
                        return Err(Error::Adapter { message });
                    }
                    for trainable in &mut lora.trainables[2 * module..2 * module + 2] {
                        trainable.blocks.push(site.block);
                    }
                    module
                }
                None => {
                    for matrix in [Matrix::A, Matrix::B] {
                        let tensor = fill(site, rank, matrix)?
                            .f_to_device(device)?
                            .f_to_kind(Kind::Float)?
                            .f_set_requires_grad(true)?;
                        let name = peft::key(&site.module, matrix);
                        lora.trainables.push(Trainable { name, blocks: vec![site.block], tensor });
                    }
                    lora.modules.push(site.module.clone());
                    seen.insert(&site.module, (lora.modules.len() - 1, site));
                    lora.modules.len() - 1
                }
            };
            let block = lora.attached.entry(site.block).or_default();
            if block.insert(site.local.clone(), Attachment { module, scaling }).is_some() {
                let message = format!("block {} has two sites '{}'", site.block, site.local);
                return Err(Error::Adapter { message });
            }
        }
        Ok(lora)
    }
}

impl Adapter for Lora {
    fn trainables(&self) -> &[Trainable] {
        &self.trainables
    }

    fn linear(&self, call: AdapterCall<'_>, x: &Tensor, output: Tensor) -> Result<Tensor> {
        let Some(site) = self.attached.get(&call.block).and_then(|sites| sites.get(call.site))
        else {
            return Ok(output);
        };
        let kind = output.f_kind()?;
        let a = self.trainables[2 * site.module].tensor.f_to_kind(kind)?;
        let b = self.trainables[2 * site.module + 1].tensor.f_to_kind(kind)?;
        let dropped = match call.dropout_seed {
            Some(seed) if self.shape.dropout > 0.0 => {
                // Linears that share an input draw masks of their own, as in PEFT.
                let seed = NamedStream::new(seed, call.site).seed();
                Some(dropout(x, self.shape.dropout, seed)?)
            }
            _ => None,
        };
        let x = dropped.as_ref().unwrap_or(x);
        // The scaling goes where the tensor is smallest: on [.., rank].
        let inner = x.f_linear(&a, None::<&Tensor>)?.f_mul_scalar(site.scaling)?;
        let rows = |tensor: &Tensor, width: i64| tensor.f_reshape([-1, width]);
        let (out_features, rank) = b.size2()?;
        let sum = rows(&output, out_features)?.f_addmm(&rows(&inner, rank)?, &b.f_tr()?)?;
        Ok(sum.f_reshape(output.size())?)
    }

    fn export(&self, directory: &Path, base_model: &str) -> Result<()> {
        peft::export(self, directory, base_model)
    }
}
