//! What must be known, or built, before the crate is compiled.

#[path = "build/fingerprint.rs"]
mod fingerprint;
#[path = "build/shim.rs"]
mod shim;

fn main() -> Result<(), String> {
    shim::compile();
    fingerprint::emit()
}
