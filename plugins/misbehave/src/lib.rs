//! A plugin that misbehaves on request. Tests only.
//!
//! What goes wrong while it is registered is chosen by the environment variable
//! `BLOCKSTREAMER_MISBEHAVE`: `wrong_abi`, `wrong_fingerprint`, `null_family`, `no_family`, `duplicate`,
//! `silent_failure`, `panic_in_register`, `panic_in_name`, `panic_in_model_types`, `panic_in_sizes`.
//! What goes wrong later is chosen by the key `panic_in` of the model's `config.json`: any method of
//! `ModelFamily` from `open` on, any method of `Model`, `fmt` or `drop`.
#![allow(clippy::panic, reason = "it is here to panic")]

mod probe;

use std::ffi::{CString, c_char};
use std::sync::LazyLock;

use blockstreamer_core::family::{ChatFormat, FamilySize, Model, ModelFamily, ModelOptions};
use blockstreamer_core::plugin::abi::{ABI, HostServices, Registrar};
use blockstreamer_core::plugin::{self, FamilyEntry, fingerprint};
use blockstreamer_core::{Error, Result, inventory};

use probe::Probe;

fn misbehaviour() -> String {
    std::env::var("BLOCKSTREAMER_MISBEHAVE").unwrap_or_default()
}

fn panic_if(chosen: &str, method: &str) {
    if chosen == format!("panic_in_{method}") {
        panic!("asked to panic in {method}");
    }
}

struct Misbehave;

fn make() -> Box<dyn ModelFamily> {
    panic_if(&misbehaviour(), "register");
    Box::new(Misbehave)
}

inventory::submit! { FamilyEntry { package: env!("CARGO_PKG_NAME"), make } }

impl ModelFamily for Misbehave {
    fn name(&self) -> String {
        let chosen = misbehaviour();
        panic_if(&chosen, "name");
        if chosen == "duplicate" { "well-behaved".into() } else { "misbehave".into() }
    }

    fn model_types(&self) -> Vec<String> {
        panic_if(&misbehaviour(), "model_types");
        vec!["misbehave".into()]
    }

    fn sizes(&self) -> Result<Vec<FamilySize>> {
        panic_if(&misbehaviour(), "sizes");
        Ok(vec![FamilySize {
            name: "tiny".into(),
            config_json: r#"{"model_type": "misbehave"}"#.into(),
        }])
    }

    fn open(&self, config_json: &str, _options: &ModelOptions) -> Result<Box<dyn Model>> {
        let panic_in = Probe::panic_in("misbehave", config_json)?;
        panic_if(&panic_in, "open");
        Ok(Box::new(Probe { panic_in }))
    }

    fn with_layers(&self, config_json: &str, _num_hidden_layers: usize) -> Result<String> {
        panic_if(&Probe::panic_in("misbehave", config_json)?, "with_layers");
        Ok(config_json.to_owned())
    }

    fn chat_format(&self, config_json: &str) -> Result<ChatFormat> {
        panic_if(&Probe::panic_in("misbehave", config_json)?, "chat_format");
        Err(Error::NotSupported { operation: "chat_format", implementer: "misbehave".into() })
    }

    fn processor_files(&self, config_json: &str) -> Result<Vec<(String, Vec<u8>)>> {
        panic_if(&Probe::panic_in("misbehave", config_json)?, "processor_files");
        Ok(vec![("processor.json".into(), config_json.into())])
    }
}

// The entry points are those of `export_family!`, with a fault each.

// SAFETY: the name is prefixed, and this library has one plugin.
#[unsafe(no_mangle)]
extern "C" fn blockstreamer_abi() -> u32 {
    if misbehaviour() == "wrong_abi" { ABI + 1 } else { ABI }
}

// SAFETY: as above.
#[unsafe(no_mangle)]
extern "C" fn blockstreamer_fingerprint() -> *const c_char {
    static OTHER: LazyLock<CString> = LazyLock::new(|| {
        let text = fingerprint::as_str().replace("panic=unwind", "panic=abort");
        CString::new(text).unwrap_or_default()
    });
    match misbehaviour().as_str() {
        "wrong_fingerprint" => OTHER.as_ptr(),
        _ => fingerprint::as_c_str().as_ptr(),
    }
}

// SAFETY: as above.
#[unsafe(no_mangle)]
unsafe extern "C" fn blockstreamer_register(
    host: *const HostServices,
    registrar: *const Registrar,
) -> i32 {
    match misbehaviour().as_str() {
        "null_family" => {
            // SAFETY: the host made the registrar; it must cope with null.
            unsafe { ((*registrar).add)((*registrar).context, std::ptr::null_mut()) };
            0
        }
        "no_family" => 0,
        "silent_failure" => 7,
        // SAFETY: the host made both structures.
        _ => unsafe { plugin::register(host, registrar) },
    }
}
