//! `blockstreamer families`: what was found, where, which sizes, and what was refused and why.

use std::fmt::Write as _;
use std::io::Write as _;

use serde_json::{Value, json};

use crate::plugins::Registry;

/// Prints the families and the refusals, as one JSON document or for people.
///
/// # Errors
/// When standard output cannot be written.
pub fn run(registry: &Registry, json: bool) -> anyhow::Result<()> {
    let text = match json {
        true => format!("{:#}\n", to_json(registry)),
        false => to_table(registry),
    };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

/// `{"families": [{"name", "path", "linked", "model_types", "sizes"}], "refused": [{"path", "reason"}]}`.
/// `path` is null for a family that is linked into the host.
pub fn to_json(registry: &Registry) -> Value {
    let families = registry.families().iter().map(|found| {
        json!({
            "name": found.name,
            "path": found.path.as_ref().map(|path| path.display().to_string()),
            "linked": found.path.is_none(),
            "model_types": found.model_types,
            "sizes": found.sizes.iter().map(|size| &*size.name).collect::<Vec<_>>(),
        })
    });
    let refused = registry.refused().iter().map(
        |refused| json!({ "path": refused.path.display().to_string(), "reason": refused.reason }),
    );
    json!({ "families": families.collect::<Vec<_>>(), "refused": refused.collect::<Vec<_>>() })
}

/// One line a family under a head line, then the refusals.
pub fn to_table(registry: &Registry) -> String {
    let mut rows = vec![["FAMILY", "MODEL TYPES", "SIZES", "FOUND IN"].map(str::to_owned)];
    rows.extend(registry.families().iter().map(|found| {
        let sizes: Vec<_> = found.sizes.iter().map(|size| &*size.name).collect();
        let place = found.path.as_ref().map(|path| path.display().to_string());
        [
            found.name.clone(),
            found.model_types.join(" "),
            sizes.join(" "),
            place.unwrap_or_else(|| "linked".to_owned()),
        ]
    }));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<_> = (0..3).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for [name, types, sizes, place] in &rows {
        let (a, b, c) = (widths[0], widths[1], widths[2]);
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name:a$}  {types:b$}  {sizes:c$}  {place}");
    }
    if registry.families().is_empty() {
        text =
            "No model family was found. Put plugins beside the binary, or name their folder with \
                --plugin-dir.\n"
                .to_owned();
    }
    for refused in registry.refused() {
        let _ = writeln!(text, "refused  {}: {}", refused.path.display(), refused.reason);
    }
    text
}
