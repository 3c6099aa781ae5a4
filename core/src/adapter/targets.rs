//! Which linears an adapter attaches to: PEFT's rules for module names, and a choice of layers.

use std::collections::BTreeSet;

use regex::Regex;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::site::Site;

/// Last part of the output head's module path, which `all-linear` leaves out.
const OUTPUT_HEAD: &str = "lm_head";

/// A choice of modules by name, as in PEFT's `target_modules` and `exclude_modules`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ModuleRule {
    /// Each entry is a module path, or the end of one that follows a dot: `q_proj`, `self_attn.q_proj`.
    Names(Vec<String>),
    /// `all-linear`: every linear except the output head. Anything else: a regular expression that
    /// must match the whole module path.
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

    /// Every linear except the output head.
    pub fn all_linear() -> Self {
        Self::Pattern("all-linear".into())
    }

    /// The rule ready for use.
    ///
    /// # Errors
    /// [`Error::Adapter`] when the pattern is no regular expression.
    pub(crate) fn matcher(&self) -> Result<Matcher<'_>> {
        Ok(match self {
            Self::Names(names) => Matcher::Names(names),
            Self::Pattern(pattern) if pattern.eq_ignore_ascii_case("all-linear") => {
                Matcher::AllLinear
            }
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

/// A choice of layers.
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

/// The sites that `targets` and `layers` choose and `exclude` does not, in their order.
///
/// # Errors
/// [`Error::Adapter`] when a name, or the whole choice, matches nothing (lists what there is), and for
/// faults of the rules themselves.
pub fn select<'a>(
    sites: &'a [Site],
    targets: &ModuleRule,
    exclude: Option<&ModuleRule>,
    layers: &LayerRule,
) -> Result<Vec<&'a Site>> {
    let num_layers = sites.iter().filter_map(|site| site.layer).max().map_or(0, |last| last + 1);
    let layers = layers.resolve(num_layers)?;
    if let ModuleRule::Names(names) = targets {
        let matches = |name: &str| sites.iter().any(|site| names_module(name, &site.module));
        if let Some(name) = names.iter().find(|name| !matches(name)) {
            return Err(nothing_matches(&format!("target module '{name}'"), sites));
        }
    }
    let is_target = targets.matcher()?;
    let is_excluded = exclude.map(ModuleRule::matcher).transpose()?;
    let chosen: Vec<_> = sites
        .iter()
        .filter(|site| is_target.matches(&site.module))
        .filter(|site| !is_excluded.as_ref().is_some_and(|excluded| excluded.matches(&site.module)))
        .filter(|site| match &layers {
            None => true,
            Some(layers) => site.layer.is_some_and(|layer| layers.contains(&layer)),
        })
        .collect();
    if chosen.is_empty() {
        let choice = match targets {
            ModuleRule::Names(names) => format!("target_modules [{}]", names.join(", ")),
            ModuleRule::Pattern(pattern) => format!("target_modules '{pattern}'"),
        };
        return Err(nothing_matches(&format!("{choice}, with the exclusions and layers,"), sites));
    }
    Ok(chosen)
}

fn nothing_matches(what: &str, sites: &[Site]) -> Error {
    let suffixes: BTreeSet<_> =
        sites.iter().map(|site| site.module.rsplit('.').next().unwrap_or(&site.module)).collect();
    let suffixes: Vec<_> = suffixes.into_iter().collect();
    Error::Adapter {
        message: format!(
            "{what} matches no linear of this model; its linears end in: {}",
            suffixes.join(", ")
        ),
    }
}
