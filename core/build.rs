//! Compiles the libtorch shim.

#[path = "build/shim.rs"]
mod shim;

fn main() {
    shim::compile();
}
