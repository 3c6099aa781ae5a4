//! What a conformance run found.

use serde::Serialize;

/// One check.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Check {
    /// What was checked: `layer_out.3`, `grad.…`, `streaming disk prefetch 2`.
    pub name: String,
    /// Whether it holds.
    pub passed: bool,
    /// Largest error found, for checks of numbers.
    pub max_error: Option<f64>,
    /// Largest error allowed.
    pub tolerance: Option<f64>,
    /// More about it, for people.
    pub detail: String,
}

impl Check {
    /// A check that holds or not, with a word on why.
    pub fn of(name: impl Into<String>, passed: bool, detail: impl Into<String>) -> Self {
        Self { name: name.into(), passed, max_error: None, tolerance: None, detail: detail.into() }
    }

    /// A check of numbers. An error that is not a number fails.
    pub fn within(
        name: impl Into<String>,
        max_error: f64,
        tolerance: f64,
        detail: impl Into<String>,
    ) -> Self {
        Self {
            name: name.into(),
            passed: max_error <= tolerance,
            // JSON has no infinity and no NaN.
            max_error: Some(if max_error.is_finite() { max_error } else { f64::MAX }),
            tolerance: Some(tolerance),
            detail: detail.into(),
        }
    }
}

/// All checks of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Report {
    /// In the order they were made.
    pub checks: Vec<Check>,
}

impl Report {
    /// Whether every check holds, and there was one.
    pub fn passed(&self) -> bool {
        !self.checks.is_empty() && self.checks.iter().all(|check| check.passed)
    }

    /// Adds the checks of another report.
    pub fn extend(&mut self, other: Report) {
        self.checks.extend(other.checks);
    }

    /// Adds one check.
    pub fn push(&mut self, check: Check) {
        self.checks.push(check);
    }
}
