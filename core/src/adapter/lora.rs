//! LoRA: a product of two thin matrices beside each chosen matrix (Hu et al. 2021).

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use tch::{Device, Kind, Tensor};

use crate::adapter::random::NamedStream;
use crate::adapter::targets::{LayerRule, ModuleRule, Target, compile, select};
use crate::adapter::{Adapter, AdapterCall, Trainable, peft};
use crate::block::BlockIndex;
use crate::device::{add_low_rank, dropout};
use crate::error::{Error, Result};
use crate::numerics::LowRankFactors;
use crate::site::Site;

/// The numbers of a LoRA adapter, named as in PEFT's `LoraConfig`.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraShape {
    /// Inner width `r` of the product. Default 8.
    pub rank: usize,
    /// The product is scaled by `alpha / rank`. Default 16.
    pub alpha: f64,
    /// Probability with which an element of the input is dropped in training. Default 0. Parameters allow no
    /// other, in PEFT and here.
    pub dropout: f64,
    /// Scale by `alpha / sqrt(rank)` instead (Kalajdzievski 2023). Default false.
    pub use_rslora: bool,
    /// Other ranks for the modules and parameters whose path ends in a match of the expression; the first
    /// match counts.
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
    /// Rank and scaling at the module or parameter `path`.
    ///
    /// # Errors
    /// [`Error::Adapter`] for a pattern that is no regular expression.
    fn at(&self, path: &str) -> Result<(usize, f64)> {
        let rank = first_match(&self.rank_pattern, path)?.unwrap_or(self.rank);
        let alpha = first_match(&self.alpha_pattern, path)?.unwrap_or(self.alpha);
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
    /// The linears to attach to; no router and no experts are among them. Default: every linear except the
    /// output head and the vision tower.
    pub target_modules: ModuleRule,
    /// The parameters to attach to, each a path or the end of one that follows a dot:
    /// `mlp.experts.down_proj`, `mlp.gate.weight`. Default: none.
    pub target_parameters: Vec<String>,
    /// The linears to leave out of `target_modules`. Default: none.
    pub exclude_modules: Option<ModuleRule>,
    /// The layers to attach in. Default: all.
    pub layers: LayerRule,
    /// Whether `all-linear` takes in the vision tower. Default: no.
    pub vision: bool,
    /// Decides the initial values, together with each module's name. Default 0.
    pub seed: u64,
}

impl Default for LoraOptions {
    fn default() -> Self {
        Self {
            shape: LoraShape::default(),
            target_modules: ModuleRule::all_linear(),
            target_parameters: Vec::new(),
            exclude_modules: None,
            layers: LayerRule::All,
            vision: false,
            seed: 0,
        }
    }
}

/// Which of the two matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Matrix {
    /// `[rank, in_features]`; of experts `[num_experts * rank, in_features]`, one expert's rows together.
    A,
    /// `[out_features, rank]`; of experts `[out_features, rank * num_experts]`, the columns of all experts
    /// for one inner dimension together.
    B,
}

impl Matrix {
    /// Its shape at `site`.
    fn shape(self, site: &Site, rank: usize) -> [usize; 2] {
        let inner = rank * site.num_experts();
        match self {
            Self::A => [inner, site.in_features],
            Self::B => [site.out_features, inner],
        }
    }
}

/// LoRA: `y = output + scaling * B(A(dropout(x)))`, with fp32 masters of A and B.
#[derive(Debug)]
pub struct Lora {
    shape: LoraShape,
    /// A and B in turn.
    trainables: Vec<Trainable>,
    modules: Vec<String>,
    parameters: Vec<String>,
    attached: HashMap<BlockIndex, HashMap<String, Attachment>>,
}

#[derive(Debug, Clone, Copy)]
struct Attachment {
    /// Position of A in `trainables`; B follows it.
    a: usize,
    rank: usize,
    scaling: f64,
}

impl Lora {
    /// A new adapter on `device` that changes nothing yet: A is drawn from
    /// `U(-1/sqrt(in_features), 1/sqrt(in_features))`, which is PEFT's Kaiming initialisation, and B is
    /// zero. The values depend on the seed and on each path alone.
    ///
    /// # Errors
    /// [`Error::Adapter`] for options out of range and for targets that match nothing.
    pub fn new(sites: &[Site], options: &LoraOptions, device: Device) -> Result<Self> {
        let chosen = select(sites, options)?;
        Self::build(&chosen, options.shape.clone(), device, |slot| {
            let size = slot.shape.map(|extent| extent as i64);
            match slot.matrix {
                Matrix::A => {
                    let bound = 1.0 / (slot.site.in_features as f64).sqrt();
                    let values = NamedStream::new(options.seed, &slot.site.module)
                        .uniform(slot.shape[0] * slot.shape[1], bound);
                    Ok(Tensor::f_from_slice(&values)?.f_reshape(size)?)
                }
                Matrix::B => Ok(Tensor::f_zeros(size, (Kind::Float, Device::Cpu))?),
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

    /// Paths of the linears that are adapted as modules, in the order of the model's sites.
    pub fn modules(&self) -> &[String] {
        &self.modules
    }

    /// Paths of what is adapted as a parameter, likewise.
    pub fn parameters(&self) -> &[String] {
        &self.parameters
    }

    /// Attaches to `targets`, with the matrices that `fill` returns (any device). Sites of one path in
    /// several blocks share its matrices.
    pub(crate) fn build(
        targets: &[Target<'_>],
        shape: LoraShape,
        device: Device,
        mut fill: impl FnMut(&NewMatrix<'_>) -> Result<Tensor>,
    ) -> Result<Self> {
        shape.check()?;
        if shape.dropout > 0.0 && targets.iter().any(|target| target.is_parameter) {
            let message = "dropout must be 0 with target_parameters: PEFT adds to the weight itself there and \
                           drops nothing, so the adapter could not be used as it was trained";
            return Err(Error::Adapter { message: message.into() });
        }
        let keys = peft::module_keys(targets);
        let mut lora = Self {
            shape,
            trainables: Vec::new(),
            modules: Vec::new(),
            parameters: Vec::new(),
            attached: HashMap::new(),
        };
        let mut seen: HashMap<String, (Attachment, &Site)> = HashMap::new();
        for target in targets {
            let (site, path) = (target.site, target.path());
            let attachment = match seen.get(&path) {
                Some(&(attachment, first)) => {
                    let size =
                        |site: &Site| (site.in_features, site.out_features, site.num_experts());
                    if size(first) != size(site) {
                        let message = format!("'{path}' has two sizes");
                        return Err(Error::Adapter { message });
                    }
                    for trainable in &mut lora.trainables[attachment.a..attachment.a + 2] {
                        trainable.blocks.push(site.block);
                    }
                    attachment
                }
                None => {
                    let (rank, scaling) = lora.shape.at(&path)?;
                    let attachment = Attachment { a: lora.trainables.len(), rank, scaling };
                    let module = keys.get(&path).unwrap_or(&site.module);
                    for matrix in [Matrix::A, Matrix::B] {
                        let name = peft::key(module, matrix);
                        let shape = matrix.shape(site, rank);
                        let tensor = fill(&NewMatrix { site, name: &name, matrix, shape })?
                            .f_to_device(device)?
                            .f_to_kind(Kind::Float)?
                            .f_set_requires_grad(true)?;
                        lora.trainables.push(Trainable { name, blocks: vec![site.block], tensor });
                    }
                    let list =
                        if target.is_parameter { &mut lora.parameters } else { &mut lora.modules };
                    list.push(path.clone());
                    seen.insert(path, (attachment, site));
                    attachment
                }
            };
            let block = lora.attached.entry(site.block).or_default();
            if block.insert(site.local.clone(), attachment).is_some() {
                let message = format!("block {} has two sites '{}'", site.block, site.local);
                return Err(Error::Adapter { message });
            }
        }
        Ok(lora)
    }

    /// What is attached where `call` is, with A and B.
    fn attachment(&self, call: AdapterCall<'_>) -> Option<(Attachment, &Tensor, &Tensor)> {
        let attachment = *self.attached.get(&call.block)?.get(call.site)?;
        let [a, b] = &self.trainables[attachment.a..attachment.a + 2] else { return None };
        Some((attachment, &a.tensor, &b.tensor))
    }
}

/// A matrix that [`Lora::build`] asks for.
#[derive(Debug)]
pub(crate) struct NewMatrix<'a> {
    pub(crate) site: &'a Site,
    /// Its key in PEFT's file.
    pub(crate) name: &'a str,
    pub(crate) matrix: Matrix,
    pub(crate) shape: [usize; 2],
}

impl Adapter for Lora {
    fn trainables(&self) -> &[Trainable] {
        &self.trainables
    }

    fn linear(&self, call: AdapterCall<'_>, x: &Tensor, output: Tensor) -> Result<Tensor> {
        let Some((site, a, b)) = self.attachment(call) else { return Ok(output) };
        let dropped = match call.dropout_seed {
            Some(seed) if self.shape.dropout > 0.0 => {
                // Linears that share an input draw masks of their own, as in PEFT.
                let seed = NamedStream::new(seed, call.site).seed();
                Some(dropout(x, self.shape.dropout, seed)?)
            }
            _ => None,
        };
        let x = dropped.as_ref().unwrap_or(x);
        add_low_rank(x, output, a, b, site.scaling)
    }

    fn expert_factors(
        &self,
        call: AdapterCall<'_>,
        experts: Range<usize>,
        kind: Kind,
    ) -> Result<Option<LowRankFactors>> {
        let Some((Attachment { rank, scaling, .. }, a, b)) = self.attachment(call) else {
            return Ok(None);
        };
        let ((rows, in_features), out_features) = (a.size2()?, b.size2()?.0);
        let rank = rank as i64;
        let (start, num_experts) = (experts.start as i64, experts.len() as i64);
        if start + num_experts > rows / rank {
            let message = format!(
                "experts {experts:?} are asked for at '{}', but the adapter has {} there",
                call.site,
                rows / rank
            );
            return Err(Error::Adapter { message });
        }
        // PEFT keeps an expert's rows of A together, and in B the columns of all experts.
        let a = a.f_narrow(0, start * rank, num_experts * rank)?;
        let a = a.f_view([num_experts, rank, in_features])?.f_to_kind(kind)?;
        let b = b.f_view([out_features, rank, -1])?.f_narrow(2, start, num_experts)?;
        let b = b.f_permute([2, 0, 1])?.f_to_kind(kind)?;
        Ok(Some(LowRankFactors { a, b, scaling }))
    }

    fn export(&self, directory: &Path, base_model: &str) -> Result<()> {
        peft::export(self, directory, base_model)
    }
}
