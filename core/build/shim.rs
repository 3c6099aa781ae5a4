//! The few libtorch calls that tch lacks, in C++. Linked against nothing but libtorch_cpu and libc10.

use std::env;
use std::path::PathBuf;

pub(crate) fn compile() {
    println!("cargo:rerun-if-changed=shim");
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    let Some(libtorch) = env::var_os("LIBTORCH").map(PathBuf::from) else {
        println!("cargo:warning=LIBTORCH is not set: run `make setup` first");
        std::process::exit(1);
    };
    let include = libtorch.join("include");
    if !include.is_dir() {
        println!("cargo:warning={} is missing: run `make setup` first", include.display());
        std::process::exit(1);
    }
    cc::Build::new()
        .cpp(true)
        .pic(true)
        .warnings(false)
        .opt_level(2)
        .flag("-std=c++17")
        .include(&include)
        .include(include.join("torch/csrc/api/include"))
        .files(["shim/attention.cpp", "shim/low_rank.cpp", "shim/torch_shim.cpp"])
        .compile("blockstreamer_torch_shim");
    println!("cargo:rustc-link-search=native={}", libtorch.join("lib").display());
}
