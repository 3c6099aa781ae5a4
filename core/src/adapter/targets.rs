//! What an adapter attaches to: PEFT's rules for names of modules and parameters, and a choice of layers.

use std::collections::BTreeSet;

use regex::Regex;
use serde::{Deserialize, Serialize};

use crate::adapter::LoraOptions;
use crate::error::{Error, Result};
use crate::site::{Site, SiteKind};

/// Last part of the output head's module path, which `all-linear` leaves out.
const OUTPUT_HEAD: &str = "lm_head";

/// A choice of modules by name, as in PEFT's `target_modules` and `exclude_modules`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ModuleRule {
    /// Each entry is a module path, or the end of one that follows a dot: `q_proj`, `self_attn.q_proj`.
    Names(Vec<String>),
    /// `all-linear`: every linear except the output head, and except the vision tower unless
    /// [`LoraOptions::vision`] is set. Anything else: a regular expression that must match the whole module
    /// path.
    ///
    /// The syntax is that of the `regex` crate. It differs from Python's `re` in that there is no
    /// look-around and no back reference, and in that `$` does not match before a final line break.
    Pattern(String),
}

impl ModuleRule {
    /// The rule with these names.
    pub fn names<S: Into<String>>(names: impl IntoIterator<Item = S>) -> Self {
        Self::Names(names.into_iter().map(Into::into).collect())
    }

    /// Every linear except the output head and the vision tower.
    pub fn all_linear() -> Self {
        Self::Pattern("all-linear".into())
    }

    fn is_all_linear(&self) -> bool {
        matches!(self, Self::Pattern(pattern) if pattern.eq_ignore_ascii_case("all-linear"))
    }

    /// Whether it takes nothing, on purpose.
    fn is_empty(&self) -> bool {
        matches!(self, Self::Names(names) if names.is_empty())
    }

    /// The rule ready for use.
    ///
    /// # Errors
    /// [`Error::Adapter`] when the pattern is no regular expression.
    pub(crate) fn matcher(&self) -> Result<Matcher<'_>> {
        Ok(match self {
            Self::Names(names) => Matcher::Names(names),
            Self::Pattern(_) if self.is_all_linear() => Matcher::AllLinear,
            Self::Pattern(pattern) => {
                Matcher::Expression(compile(&format!(r"\A(?:{pattern})\z"), pattern)?)
            }
        })
    }
}

/// A [`ModuleRule`] with its expression compiled.
pub(crate) enum Matcher<'a> {
    Names(&'a [String]),
    AllLinear,
    Expression(Regex),
}

impl Matcher<'_> {
    /// Whether the rule takes the module at this path.
    pub(crate) fn matches(&self, module: &str) -> bool {
        match self {
            Self::Names(names) => names.iter().any(|name| names_module(name, module)),
            Self::AllLinear => !names_module(OUTPUT_HEAD, module),
            Self::Expression(expression) => expression.is_match(module),
        }
    }
}

/// Whether `name` is the module path, or the end of it after a dot.
pub(crate) fn names_module(name: &str, module: &str) -> bool {
    module.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Compiles `expression`; a message names `written`, what the user wrote.
///
/// # Errors
/// [`Error::Adapter`] with the reason.
pub(crate) fn compile(expression: &str, written: &str) -> Result<Regex> {
    Regex::new(expression).map_err(|error| Error::Adapter {
        message: format!(
            "'{written}' is not a regular expression that can be used (look-around and back \
             references are not supported; a list of names always works): {error}"
        ),
    })
}

/// A choice of decoder layers. Nothing in the vision tower depends on it: what the other rules take there
/// is adapted whichever layers are chosen.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum LayerRule {
    /// Every layer, and the linears outside the layers.
    #[default]
    All,
    /// The last `max(1, round(num_layers * fraction))` layers, `0 < fraction <= 1`; halves round to even.
    TopFraction(f64),
    /// These layers, counted from 0.
    Only(Vec<usize>),
}

impl LayerRule {
    /// The layers of a model of `num_layers` that are chosen; `None`: all, and what is outside them.
    ///
    /// # Errors
    /// [`Error::Adapter`] for a fraction out of range, and for layers that do not exist.
    fn resolve(&self, num_layers: usize) -> Result<Option<BTreeSet<usize>>> {
        match self {
            Self::All => Ok(None),
            Self::TopFraction(fraction) if *fraction > 0.0 && *fraction <= 1.0 => {
                let chosen = (num_layers as f64 * fraction).round_ties_even().max(1.0) as usize;
                Ok(Some((num_layers.saturating_sub(chosen)..num_layers).collect()))
            }
            Self::TopFraction(fraction) => Err(Error::Adapter {
                message: format!(
                    "the fraction of layers to adapt must be greater than 0 and at most 1, not {fraction}"
                ),
            }),
            Self::Only(layers) => match layers.iter().find(|layer| **layer >= num_layers) {
                Some(layer) => Err(Error::Adapter {
                    message: format!(
                        "layer {layer} cannot be adapted: the model has layers 0 to {}",
                        num_layers.saturating_sub(1)
                    ),
                }),
                None => Ok(Some(layers.iter().copied().collect())),
            },
        }
    }
}

/// A site that is to be adapted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Target<'a> {
    pub(crate) site: &'a Site,
    /// Whether PEFT reaches it by `target_parameters`. A linear may be reached both ways.
    pub(crate) is_parameter: bool,
}

impl<'a> Target<'a> {
    /// The sites that `is_module` takes of the linears and `is_parameter` of all, in their order.
    ///
    /// # Errors
    /// [`Error::Adapter`] for a linear that both take, which PEFT refuses.
    pub(crate) fn choose(
        sites: &'a [Site],
        is_module: impl Fn(&Site) -> bool,
        is_parameter: impl Fn(&Site) -> bool,
    ) -> Result<Vec<Self>> {
        let mut targets = Vec::new();
        for site in sites {
            let is_module = site.kind == SiteKind::Linear && is_module(site);
            let is_parameter = is_parameter(site);
            if is_module && is_parameter {
                let message = format!(
                    "'{}' is matched by target_modules and its weight by target_parameters; name it in one",
                    site.module
                );
                return Err(Error::Adapter { message });
            }
            if is_module || is_parameter {
                targets.push(Self { site, is_parameter });
            }
        }
        Ok(targets)
    }

    /// The path by which PEFT looks for ranks and alphas of its own.
    pub(crate) fn path(&self) -> String {
        if self.is_parameter { self.site.parameter() } else { self.site.module.clone() }
    }
}

/// Whether one of PEFT's `target_parameters` names the weight of `site`.
pub(crate) fn names_parameter(names: &[String], site: &Site) -> bool {
    names.iter().any(|name| names_module(name, &site.parameter()))
}

/// The sites that `options` choose, in their order.
///
/// # Errors
/// [`Error::Adapter`] when a name, or the whole choice, matches nothing (lists what there is), and for
/// faults of the rules themselves.
pub(crate) fn select<'a>(sites: &'a [Site], options: &LoraOptions) -> Result<Vec<Target<'a>>> {
    let LoraOptions { target_modules, target_parameters, exclude_modules, layers, vision, .. } =
        options;
    let num_layers = sites.iter().filter_map(|site| site.layer).max().map_or(0, |last| last + 1);
    let layers = layers.resolve(num_layers)?;
    let is_linear = |site: &&Site| site.kind == SiteKind::Linear;
    if let ModuleRule::Names(names) = target_modules {
        let matches = |name: &str| {
            sites.iter().filter(is_linear).any(|site| names_module(name, &site.module))
        };
        if let Some(name) = names.iter().find(|name| !matches(name)) {
            return Err(no_module(&format!("target module '{name}'"), sites));
        }
    }
    for name in target_parameters {
        if !sites.iter().any(|site| names_module(name, &site.parameter())) {
            return Err(no_parameter(name, sites));
        }
    }
    if *vision && !target_modules.is_all_linear() {
        let message = "vision = true adds the vision tower to target_modules = \"all-linear\"; with other \
                       target_modules, name its linears there";
        return Err(Error::Adapter { message: message.into() });
    }
    if *vision && !sites.iter().any(|site| site.is_vision) {
        let message =
            "vision = true, but this model has no vision tower that an adapter can attach to";
        return Err(Error::Adapter { message: message.into() });
    }
    let is_target = target_modules.matcher()?;
    let is_excluded = exclude_modules.as_ref().map(ModuleRule::matcher).transpose()?;
    let in_layers = |site: &Site| match &layers {
        None => true,
        Some(_) if site.is_vision => true,
        Some(layers) => site.layer.is_some_and(|layer| layers.contains(&layer)),
    };
    let leaves_out_vision = target_modules.is_all_linear() && !vision;
    let chosen = Target::choose(
        sites,
        |site| {
            is_target.matches(&site.module)
                && !(leaves_out_vision && site.is_vision)
                && !is_excluded.as_ref().is_some_and(|excluded| excluded.matches(&site.module))
                && in_layers(site)
        },
        |site| names_parameter(target_parameters, site) && in_layers(site),
    )?;
    if !target_modules.is_empty() && chosen.iter().all(|target| target.is_parameter) {
        let choice = match target_modules {
            ModuleRule::Names(names) => format!("target_modules [{}]", names.join(", ")),
            ModuleRule::Pattern(pattern) => format!("target_modules '{pattern}'"),
        };
        return Err(no_module(&format!("{choice}, with the exclusions and layers,"), sites));
    }
    if !target_parameters.is_empty() && !chosen.iter().any(|target| target.is_parameter) {
        let names = target_parameters.join(", ");
        let message = format!("target_parameters [{names}] match nothing in the chosen layers");
        return Err(Error::Adapter { message });
    }
    if chosen.is_empty() {
        let message =
            "target_modules and target_parameters are both empty: nothing would be trained";
        return Err(Error::Adapter { message: message.into() });
    }
    Ok(chosen)
}

fn no_module(what: &str, sites: &[Site]) -> Error {
    let linears = sites.iter().filter(|site| site.kind == SiteKind::Linear);
    let suffixes: BTreeSet<_> =
        linears.map(|site| site.module.rsplit('.').next().unwrap_or(&site.module)).collect();
    let suffixes: Vec<_> = suffixes.into_iter().collect();
    let mut message = format!(
        "{what} matches no linear of this model; its linears end in: {}",
        suffixes.join(", ")
    );
    let parameters = parameters(sites);
    if !parameters.is_empty() {
        message += &format!("; by target_parameters it has: {}", parameters.join(", "));
    }
    Error::Adapter { message }
}

fn no_parameter(name: &str, sites: &[Site]) -> Error {
    let mut there_are = parameters(sites);
    there_are.push("the weight of each linear, such as q_proj.weight".into());
    Error::Adapter {
        message: format!(
            "target parameter '{name}' matches no parameter of this model that can be adapted; there are: {}",
            there_are.join(", ")
        ),
    }
}

/// Ends of the paths of parameters that are no linear's, each once.
fn parameters(sites: &[Site]) -> Vec<String> {
    let ends: BTreeSet<_> = (sites.iter())
        .filter_map(|site| match site.kind {
            SiteKind::Linear => None,
            SiteKind::Parameter => Some(format!("{}.weight", site.local)),
            SiteKind::Experts { .. } => Some(site.local.clone()),
        })
        .collect();
    ends.into_iter().collect()
}
