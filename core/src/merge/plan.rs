//! What is done with each checkpoint tensor. Nothing is read here.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use tch::Kind;

use super::{MergeInputs, PackedExperts};
use crate::adapter::AdapterCall;
use crate::block::BlockIndex;
use crate::checkpoint::{NewTensor, StoredTensor};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::numerics::LowRankFactors;
use crate::site::{Site, SiteKind};
use crate::weights::{Role, Weight};

/// A tensor of the merged checkpoint.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    pub(super) num_bytes: usize,
}

impl Output {
    fn like(name: &str, stored: &StoredTensor) -> Self {
        let StoredTensor { dtype, shape, num_bytes, .. } = stored;
        Self { name: name.into(), dtype: *dtype, shape: shape.clone(), num_bytes: *num_bytes }
    }

    pub(super) fn as_new(&self) -> NewTensor<'_> {
        let Self { name, dtype, shape, num_bytes } = self;
        NewTensor { name, dtype: *dtype, shape, num_bytes: *num_bytes }
    }
}

/// What the adapter adds to a tensor.
#[derive(Debug)]
pub(super) struct Change {
    /// On the adapter's device, fp32.
    pub(super) factors: LowRankFactors,
    /// Whether the tensor is a stack of experts, not one matrix.
    pub(super) is_stack: bool,
    /// Whether it is stored as `[num_experts, in_features, out_features]`.
    pub(super) is_transposed: bool,
}

impl Change {
    fn share(&self) -> Self {
        let LowRankFactors { a, b, scaling } = &self.factors;
        let factors =
            LowRankFactors { a: a.shallow_clone(), b: b.shallow_clone(), scaling: *scaling };
        Self { factors, ..*self }
    }
}

/// Packed experts of a layer: codes and scales.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packed<'a> {
    pub(super) blocks: &'a StoredTensor,
    pub(super) scales: &'a StoredTensor,
}

#[derive(Debug)]
pub(super) enum Work<'a> {
    Copy(&'a StoredTensor),
    Add(&'a StoredTensor, Change),
    /// To BF16.
    Unpack(Packed<'a>, Option<Change>),
    /// To MXFP4; the position of the output for the scales.
    Repack(Packed<'a>, Change, usize),
}

/// One output, or the two of packed experts.
#[derive(Debug)]
pub(super) struct Job<'a> {
    /// Position of the output; for packed experts that of the codes.
    pub(super) output: usize,
    pub(super) work: Work<'a>,
}

impl Job<'_> {
    /// The same for another thread.
    pub(super) fn share(&self) -> Self {
        let work = match &self.work {
            Work::Copy(stored) => Work::Copy(stored),
            Work::Add(stored, change) => Work::Add(stored, change.share()),
            Work::Unpack(packed, change) => {
                Work::Unpack(*packed, change.as_ref().map(Change::share))
            }
            Work::Repack(packed, change, scales) => Work::Repack(*packed, change.share(), *scales),
        };
        Self { output: self.output, work }
    }
}

#[derive(Debug)]
pub(super) struct Plan<'a> {
    /// In the order in which the checkpoint's files hold them.
    pub(super) outputs: Vec<Output>,
    pub(super) jobs: Vec<Job<'a>>,
    pub(super) num_changed: usize,
    pub(super) packed_experts: Option<PackedExperts>,
}

impl<'a> Plan<'a> {
    pub(super) fn new(
        inputs: MergeInputs<'a>,
        packed_experts: Option<PackedExperts>,
    ) -> Result<Self> {
        let tensors = &inputs.checkpoint.tensors;
        let mut changes = changes(inputs)?;
        let packed = packed_names(inputs)?;
        let num_changed = changes.len();
        let changes_packed = packed.keys().any(|blocks| changes.contains_key(blocks));
        let packed_experts = choose(packed_experts, !packed.is_empty(), changes_packed)?;
        let all_scales: BTreeSet<_> = packed.values().map(String::as_str).collect();

        let mut stored: Vec<_> = tensors.iter().collect();
        stored.sort_by_key(|(_, stored)| (stored.file, stored.offset_bytes));
        let mut outputs = Vec::new();
        let mut positions = HashMap::new();
        for (name, stored) in &stored {
            let output = match packed_experts {
                Some(PackedExperts::Bf16) if all_scales.contains(name.as_str()) => continue,
                Some(PackedExperts::Bf16) if packed.contains_key(name.as_str()) => {
                    unpacked(name, stored)?
                }
                _ => Output::like(name, stored),
            };
            positions.insert(name.as_str(), outputs.len());
            outputs.push(output);
        }
        let position =
            |name: &str| positions.get(name).copied().ok_or_else(|| missing(inputs, name));

        let mut jobs = Vec::new();
        for (name, stored) in stored {
            let is_scales = all_scales.contains(name.as_str());
            let work = match (packed.get(name.as_str()), changes.remove(name.as_str())) {
                // The codes bring their scales along.
                _ if is_scales && packed_experts == Some(PackedExperts::Bf16) => continue,
                (Some(scales_name), change) => {
                    let scales =
                        tensors.get(scales_name).ok_or_else(|| missing(inputs, scales_name))?;
                    let packed = Packed { blocks: stored, scales };
                    match (packed_experts, change) {
                        (Some(PackedExperts::Bf16), change) => Work::Unpack(packed, change),
                        (_, Some(change)) => Work::Repack(packed, change, position(scales_name)?),
                        (_, None) => Work::Copy(stored),
                    }
                }
                (None, Some(change)) => {
                    check_dtype(name, stored.dtype)?;
                    Work::Add(stored, change)
                }
                (None, None) => Work::Copy(stored),
            };
            jobs.push(Job { output: position(name)?, work });
        }
        drop_rewritten_scales(&mut jobs);
        Ok(Self { outputs, jobs, num_changed, packed_experts })
    }
}

/// Scales that are written with their codes are not copied too.
fn drop_rewritten_scales(jobs: &mut Vec<Job<'_>>) {
    let rewritten: BTreeSet<_> = (jobs.iter())
        .filter_map(|job| match job.work {
            Work::Repack(_, _, scales) => Some(scales),
            _ => None,
        })
        .collect();
    jobs.retain(|job| !rewritten.contains(&job.output));
}

fn missing(inputs: MergeInputs<'_>, name: &str) -> Error {
    let place = inputs.checkpoint.directory.display().to_string();
    Error::MissingTensor { tensor: name.to_owned(), place }
}

/// The sites, by block and by the names that their weight may have in it.
fn sites_by_weight(sites: &[Site]) -> HashMap<(BlockIndex, String), &Site> {
    let names = |site: &Site| match site.kind {
        SiteKind::Linear | SiteKind::Parameter => vec![format!("{}.weight", site.local)],
        SiteKind::Experts { .. } => vec![site.local.clone(), format!("{}_blocks", site.local)],
    };
    sites
        .iter()
        .flat_map(|site| names(site).into_iter().map(move |name| ((site.block, name), site)))
        .collect()
}

/// What changes, by the name in the checkpoint. A tensor that has several places (a part of the experts in
/// each of several blocks, tied weights) changes once.
fn changes<'a>(inputs: MergeInputs<'a>) -> Result<BTreeMap<&'a str, Change>> {
    let sites = sites_by_weight(inputs.sites);
    let mut changes = BTreeMap::new();
    let mut changed_by: HashMap<&str, &Site> = HashMap::new();
    let mut unchanged: HashMap<&str, &Weight> = HashMap::new();
    for weight in &inputs.table.weights {
        let name = weight.checkpoint.as_str();
        let site = sites.get(&(weight.block, weight.local.clone()));
        let factors = site.map(|site| factors_at(inputs, site)).transpose()?.flatten();
        let (Some(site), Some(factors)) = (site, factors) else {
            unchanged.insert(name, weight);
            continue;
        };
        changed_by.insert(name, site);
        let spec = (inputs.layout.blocks.get(weight.block.0))
            .and_then(|block| block.tensor(&weight.local));
        let is_transposed = spec.is_some_and(|spec| spec.is_transposed);
        let is_stack = matches!(site.kind, SiteKind::Experts { .. });
        changes.entry(name).or_insert(Change { factors, is_stack, is_transposed });
    }
    for (name, site) in changed_by {
        let Some(other) = unchanged.get(name) else { continue };
        let block = inputs.table.blocks.get(other.block.0).map_or("", |block| &block.name);
        let message = format!(
            "is tied: the adapter changes it as '{}', but block '{block}' uses the same weights as '{}', which \
             it leaves alone, so a merged checkpoint would compute something else; use the adapter as it is, \
             or train one without this module",
            site.module, other.local
        );
        return Err(Error::tensor(name, message));
    }
    if changes.is_empty() {
        let message = "it changes no weight of this model, so there is nothing to merge";
        return Err(Error::Adapter { message: message.into() });
    }
    Ok(changes)
}

fn factors_at(inputs: MergeInputs<'_>, site: &Site) -> Result<Option<LowRankFactors>> {
    let call = AdapterCall { block: site.block, site: &site.local, dropout_seed: None };
    inputs.adapter.expert_factors(call, 0..site.num_experts(), Kind::Float)
}

/// The checkpoint names of packed codes, each with that of its scales.
fn packed_names<'a>(inputs: MergeInputs<'a>) -> Result<BTreeMap<&'a str, String>> {
    let blocks = inputs.table.weights.iter().filter(|weight| weight.role == Role::Mxfp4Blocks);
    blocks
        .map(|weight| {
            let name = weight.checkpoint.as_str();
            Ok((name, format!("{}_scales", matrix_name(name)?)))
        })
        .collect()
}

/// The name of the matrix that packed codes stand for.
pub(super) fn matrix_name(blocks: &str) -> Result<&str> {
    blocks
        .strip_suffix("_blocks")
        .ok_or_else(|| Error::tensor(blocks, "is packed, but its name does not end in _blocks"))
}

/// The same experts in BF16, `[num_experts, in_features, out_features]`.
fn unpacked(name: &str, blocks: &StoredTensor) -> Result<Output> {
    let &[num_experts, outer, groups, half] = &blocks.shape[..] else {
        let message = format!("has shape {:?}; packed experts have four dimensions", blocks.shape);
        return Err(Error::tensor(name, message));
    };
    let shape = vec![num_experts, groups * half * 2, outer];
    // Two codes to the byte become two bytes each.
    let num_bytes = 4 * blocks.num_bytes;
    Ok(Output { name: matrix_name(name)?.to_owned(), dtype: Dtype::BF16, shape, num_bytes })
}

fn choose(
    asked: Option<PackedExperts>,
    has_packed: bool,
    changes_packed: bool,
) -> Result<Option<PackedExperts>> {
    match asked {
        Some(asked) if !has_packed => Err(Error::usage(format!(
            "--experts {} says what becomes of experts packed in MXFP4, but this model has none; leave it out",
            asked.name()
        ))),
        None if changes_packed => Err(Error::usage(
            "the adapter changes experts that are packed in MXFP4; say what becomes of them: --experts bf16 \
             stores all experts of the model in BF16, four times as large, and keeps the whole change; \
             --experts mxfp4 packs those that change again and reports how much of the change that keeps, which \
             may be none",
        )),
        None if has_packed => Ok(Some(PackedExperts::Mxfp4)),
        asked => Ok(asked),
    }
}

/// Refuses what a change cannot be added to.
fn check_dtype(name: &str, dtype: Dtype) -> Result<()> {
    match dtype {
        Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16 => Ok(()),
        _ => Err(Error::tensor(
            name,
            format!(
                "is stored as {}, which is too coarse to take the change of an adapter; merge into a BF16 or \
                 F32 checkpoint of the model",
                dtype.name()
            ),
        )),
    }
}
