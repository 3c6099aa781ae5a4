//! What must be known, or built, before the crate is compiled.

#[path = "build/fingerprint.rs"]
mod fingerprint;

fn main() -> Result<(), String> {
    fingerprint::emit()
}
