//! Opens one shared library and takes its families, or says why not.
//!
//! The only module of the host that calls into a plugin's C entry points.

use std::collections::BTreeSet;
use std::ffi::{CStr, c_void};
use std::mem::size_of;
use std::path::Path;

use blockstreamer_core::family::ModelFamily;
use blockstreamer_core::plugin::{abi, fingerprint};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::elf;

/// What a library handed over.
#[derive(Default)]
pub(super) struct Loaded {
    /// Its families, each under the guard that the library put around it.
    pub(super) families: Vec<Box<dyn ModelFamily>>,
    /// Why others, or all, are not among them.
    pub(super) refused: Vec<String>,
}

/// Opens the library at `path` and takes its families. It stays in the process for good, whatever the
/// outcome: its code may be referenced from anywhere by then.
pub(super) fn load(path: &Path) -> Loaded {
    let mut loaded = Loaded::default();
    if let Err(reason) = open(path, &mut loaded) {
        loaded.refused.push(reason);
    }
    loaded
}

fn open(path: &Path, loaded: &mut Loaded) -> Result<(), String> {
    let missing_end = elf::missing_end(path).map_err(|error| format!("cannot be read: {error}"))?;
    if let Some(needed_bytes) = missing_end {
        return Err(format!(
            "is cut off: its headers speak of {needed_bytes} bytes; build or download it again"
        ));
    }
    let libtorch_before = mapped_libtorch();
    // SAFETY: opening runs the library's initialisers. That cannot be made safe: the user chose the
    // folder, and beside the binary only files with our prefix are opened. RTLD_NOW makes a missing
    // symbol fail here rather than in the middle of a step.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
        // libloading says only which call failed; the loader's own words are its source.
        let reason = std::error::Error::source(&error).map(ToString::to_string);
        format!("cannot be loaded as a shared library: {}", reason.unwrap_or(error.to_string()))
    })?;
    let functions = functions(&library);
    std::mem::forget(library);
    let (abi, fingerprint, register) = functions?;

    // SAFETY: the symbol says what the function is; it takes nothing and returns an integer.
    let found = unsafe { abi() };
    if found != abi::ABI {
        return Err(format!(
            "has ABI {found}, but this host has ABI {}; build the plugin against blockstreamer-core {}",
            abi::ABI,
            env!("CARGO_PKG_VERSION")
        ));
    }
    // SAFETY: at this ABI the function returns a C string that lives as long as the library, or null.
    let text = unsafe { fingerprint().as_ref().map(|start| CStr::from_ptr(start)) };
    let text = text.ok_or("has no fingerprint")?.to_string_lossy();
    if let Some(difference) = fingerprint::difference(fingerprint::as_str(), &text) {
        return Err(format!(
            "was built differently from this host, so their types may differ ({difference}); \
             build both with one toolchain, one blockstreamer-core and one Cargo.lock"
        ));
    }
    let libtorch = mapped_libtorch();
    if libtorch.len() > libtorch_before.len().max(1) {
        let files: Vec<_> = libtorch.into_iter().collect();
        return Err(format!(
            "brings a second libtorch into the process ({}); link it against the host's",
            files.join(" and ")
        ));
    }
    take_families(register, loaded)
}

type Functions = (abi::AbiFunction, abi::FingerprintFunction, abi::RegisterFunction);

fn functions(library: &Library) -> Result<Functions, String> {
    // SAFETY: only the name says that these are functions of these types; the ABI number, whose type
    // never changes, is compared before the others are called.
    unsafe {
        Ok((
            *symbol::<abi::AbiFunction>(library, abi::ABI_SYMBOL)?,
            *symbol::<abi::FingerprintFunction>(library, abi::FINGERPRINT_SYMBOL)?,
            *symbol::<abi::RegisterFunction>(library, abi::REGISTER_SYMBOL)?,
        ))
    }
}

/// # Safety
/// The symbol, if it exists, must be of type `T`.
unsafe fn symbol<T>(
    library: &Library,
    name: &str,
) -> Result<libloading::os::unix::Symbol<T>, String> {
    // SAFETY: the caller promises it.
    unsafe { library.get(name) }.map_err(|_| {
        format!("is not a BlockStreamer plugin: it has no symbol {name} (see `export_family!`)")
    })
}

fn take_families(register: abi::RegisterFunction, loaded: &mut Loaded) -> Result<(), String> {
    let dispatch = tracing::dispatcher::get_default(Clone::clone);
    let host = abi::HostServices {
        size: size_of::<abi::HostServices>(),
        // A plugin takes a subscriber once. "None" would be for good, and would keep panics silent.
        dispatch: match dispatch.is::<tracing::subscriber::NoSubscriber>() {
            true => std::ptr::null(),
            false => &raw const dispatch,
        },
    };
    let registrar = abi::Registrar {
        size: size_of::<abi::Registrar>(),
        context: (&raw mut *loaded).cast::<c_void>(),
        add,
        refuse,
    };
    // SAFETY: ABI and fingerprint are equal, so both sides mean the same types; both structures and
    // what they point to live until the call returns.
    let status = unsafe { register(&raw const host, &raw const registrar) };
    match status {
        0 if loaded.families.is_empty() && loaded.refused.is_empty() => {
            Err("registered no family".to_owned())
        }
        status if status != 0 && loaded.refused.is_empty() => {
            Err(format!("failed to register with status {status} and gave no reason"))
        }
        _ => Ok(()),
    }
}

unsafe extern "C" fn add(context: *mut c_void, family: *mut c_void) {
    // SAFETY: `context` is the `Loaded` of the running `take_families`, and used from nowhere else.
    let loaded = unsafe { &mut *context.cast::<Loaded>() };
    if family.is_null() {
        loaded.refused.push("registered a null family table".to_owned());
        return;
    }
    // SAFETY: `abi::Registrar::add` says what this pointer is and that the host owns it from now on.
    // Both sides use the system's allocator.
    loaded.families.push(*unsafe { Box::from_raw(family.cast::<Box<dyn ModelFamily>>()) });
}

unsafe extern "C" fn refuse(context: *mut c_void, reason: *const u8, length: usize) {
    // SAFETY: as in `add`.
    let loaded = unsafe { &mut *context.cast::<Loaded>() };
    if reason.is_null() {
        loaded.refused.push("refused to register and gave no reason".to_owned());
        return;
    }
    // SAFETY: `abi::Registrar::refuse` says that `length` bytes are readable during the call.
    let text = unsafe { std::slice::from_raw_parts(reason, length) };
    loaded.refused.push(String::from_utf8_lossy(text).into_owned());
}

/// The files of every libtorch in this process. Two of them would each have their own autograd
/// mode, allocator and dispatcher.
fn mapped_libtorch() -> BTreeSet<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    // The path is the sixth column and may hold spaces.
    let paths =
        maps.lines().filter_map(|line| line.find('/').map(|start| line[start..].to_owned()));
    paths.filter(|path| path.ends_with("/libtorch_cpu.so")).collect()
}
