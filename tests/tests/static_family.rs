//! A family that is linked into the program, as by the host's feature `static-plugins`: no library is
//! opened, and the numbers are the same.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use blockstreamer_conformance::{Options, check_golden};
use blockstreamer_host::plugins::Registry;
use blockstreamer_qwen3_vl as _;
use tch::{Device, Kind};

#[test]
fn a_linked_family_is_found_and_passes_its_goldens_without_a_library_being_opened() {
    let registry = Registry::linked();
    assert_eq!(registry.refused(), []);
    let found = registry.family("qwen3-vl").unwrap();
    assert_eq!(found.path, None);

    tch::set_num_threads(1);
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/qwen3_vl_text");
    let options = Options::new(Device::Cpu, Kind::Float);
    let report = check_golden(found.family(), &golden, &options).unwrap();
    let failed: Vec<_> = report.checks.iter().filter(|check| !check.passed).collect();
    assert!(report.passed(), "{failed:?}");
    assert!(report.checks.len() > 70, "{}", report.checks.len());

    // The same file as a plugin is a library of this process as soon as one opens it; nobody did.
    let mapped = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!mapped.contains("blockstreamer_qwen3_vl.so"), "{mapped}");
}
