//! The shape of the C entry points. Everything here keeps its layout for as long as [`ABI`] stays.

use std::ffi::{c_char, c_void};

use tracing::Dispatch;

/// Number of this shape. Raised whenever a type of this file or the meaning of a symbol changes.
pub const ABI: u32 = 1;

/// Symbol of the function that returns the plugin's [`ABI`].
pub const ABI_SYMBOL: &str = "blockstreamer_abi";
/// Symbol of the function that returns the plugin's [fingerprint](super::fingerprint).
pub const FINGERPRINT_SYMBOL: &str = "blockstreamer_fingerprint";
/// Symbol of the function that hands over the plugin's families.
pub const REGISTER_SYMBOL: &str = "blockstreamer_register";

/// Returns the plugin's [`ABI`].
pub type AbiFunction = unsafe extern "C" fn() -> u32;
/// Returns the plugin's fingerprint: UTF-8, ends with a NUL, lives as long as the library.
pub type FingerprintFunction = unsafe extern "C" fn() -> *const c_char;
/// Calls the registrar once per family. 0: done, anything else: failed.
pub type RegisterFunction = unsafe extern "C" fn(*const HostServices, *const Registrar) -> i32;

/// What the host lends to a plugin for the rest of the process.
#[repr(C)]
#[derive(Debug)]
pub struct HostServices {
    /// `size_of::<HostServices>()` as the host knows it.
    pub size: usize,
    /// The host's subscriber, valid during the call; the plugin makes its own clone.
    /// Null: the host has none.
    pub dispatch: *const Dispatch,
}

/// How a plugin hands over its families.
#[repr(C)]
#[derive(Debug)]
pub struct Registrar {
    /// `size_of::<Registrar>()` as the host knows it.
    pub size: usize,
    /// The host's own; passed back in every call.
    pub context: *mut c_void,
    /// Takes a family: `Box::into_raw` of a `Box<Box<dyn ModelFamily>>`. The host owns it from then on.
    pub add: unsafe extern "C" fn(context: *mut c_void, family: *mut c_void),
    /// Takes the reason why a family cannot be handed over: UTF-8, `length` bytes.
    pub refuse: unsafe extern "C" fn(context: *mut c_void, reason: *const u8, length: usize),
}
