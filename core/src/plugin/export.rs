//! The plugin's side: its list of families, and the bodies of its C functions.

use std::ffi::c_void;
use std::panic;

use crate::error::{Error, Result};
use crate::family::ModelFamily;
use crate::plugin::abi::{HostServices, Registrar};
use crate::plugin::guard::{GuardedFamily, guarded};

/// A family in the list that every library keeps for itself.
#[derive(Debug)]
pub struct FamilyEntry {
    /// The package that offers it, for messages until the family has said its name.
    pub package: &'static str,
    /// Makes the family.
    pub make: fn() -> Box<dyn ModelFamily>,
}

inventory::collect!(FamilyEntry);

/// The families linked into the calling binary or library, each under its panic guard.
/// An entry that panics while it is made, or while it says its name and model types, is an error.
pub fn linked_families() -> impl Iterator<Item = Result<Box<dyn ModelFamily>>> {
    inventory::iter::<FamilyEntry>().map(|entry| {
        let family = GuardedFamily::new(entry.package, entry.make)?;
        Ok(Box::new(family) as Box<dyn ModelFamily>)
    })
}

/// Makes this library's copies of global state those of the host: events go to the host's subscriber,
/// and so do panics, which the guards turn into errors.
///
/// # Safety
/// `host` must be null or valid for reads, and so must the dispatch in it.
pub unsafe fn adopt_host(host: *const HostServices) {
    // SAFETY: the caller promises it.
    let Some(host) = (unsafe { host.as_ref() }) else { return };
    // SAFETY: as above.
    let Some(dispatch) = (unsafe { host.dispatch.as_ref() }) else { return };
    // Refused when the same file is registered a second time: the first subscriber stays.
    if tracing::dispatcher::set_global_default(dispatch.clone()).is_err() {
        return;
    }
    // The dispatch was made in the host, so this copy of tracing has never asked it for its level.
    tracing::callsite::rebuild_interest_cache();
    panic::set_hook(Box::new(|info| {
        let message = info.payload_as_str().unwrap_or("(a panic without a text)");
        let location = info.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(location, "panic in a plugin: {message}");
    }));
}

/// The body of `blockstreamer_register`: hands every family of this library to the host.
/// Returns 0, or 1 when at least one family could not be handed over.
///
/// # Safety
/// `host` and `registrar` must be valid for reads during the call and be made by a host of the same
/// [`ABI`](super::abi::ABI) and the same [fingerprint](super::fingerprint).
pub unsafe fn register(host: *const HostServices, registrar: *const Registrar) -> i32 {
    // SAFETY: the caller promises it.
    let Some(registrar) = (unsafe { registrar.as_ref() }) else { return 1 };
    let mut num_refused = 0;
    let mut hand_over = |family: Result<Box<dyn ModelFamily>>| match family {
        Ok(family) => {
            let family: *mut Box<dyn ModelFamily> = Box::into_raw(Box::new(family));
            // SAFETY: the registrar is the host's, which takes exactly this type.
            unsafe { (registrar.add)(registrar.context, family.cast::<c_void>()) };
        }
        Err(error) => {
            num_refused += 1;
            let reason = error.to_string();
            // SAFETY: as above; the host copies the text during the call.
            unsafe { (registrar.refuse)(registrar.context, reason.as_ptr(), reason.len()) };
        }
    };
    let done = guarded("plugin", "register", || {
        // SAFETY: the caller promises it.
        let host_size = unsafe { host.as_ref() }.map(|host| host.size);
        if registrar.size != size_of::<Registrar>() || host_size != Some(size_of::<HostServices>())
        {
            return Err(Error::usage("host and plugin disagree on the size of the entry tables"));
        }
        // SAFETY: as above.
        unsafe { adopt_host(host) };
        let mut families = linked_families().peekable();
        if families.peek().is_none() {
            return Err(Error::usage("the plugin offers no family"));
        }
        families.for_each(&mut hand_over);
        Ok(())
    });
    if let Err(error) = done {
        hand_over(Err(error));
    }
    i32::from(num_refused > 0)
}

/// Offers model families: `export_family!(MyFamily)` or `export_family!(First, Second)`, each an
/// expression whose value implements [`ModelFamily`]. Once in a crate.
///
/// The families enter the crate's inventory, where a host finds them that links the crate. With the
/// crate's feature `export` the C entry points are written as well, so that a host can load the crate as
/// a shared library. A crate therefore declares the feature, on by default, and is both `cdylib` and
/// `rlib`; a host that links it turns default features off, for the entry points of two families
/// would clash.
#[macro_export]
macro_rules! export_family {
    ($($family:expr),+ $(,)?) => {
        $(
            $crate::inventory::submit! {
                $crate::plugin::FamilyEntry {
                    package: ::core::env!("CARGO_PKG_NAME"),
                    make: || ::std::boxed::Box::new($family),
                }
            }
        )+

        #[cfg(feature = "export")]
        const _: () = {
            use $crate::plugin::abi::{ABI, HostServices, Registrar};

            // SAFETY: the name is prefixed, and a library has one plugin.
            #[unsafe(no_mangle)]
            extern "C" fn blockstreamer_abi() -> u32 {
                ABI
            }

            // SAFETY: as above.
            #[unsafe(no_mangle)]
            extern "C" fn blockstreamer_fingerprint() -> *const ::core::ffi::c_char {
                $crate::plugin::fingerprint::as_c_str().as_ptr()
            }

            // SAFETY: as above.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn blockstreamer_register(
                host: *const HostServices,
                registrar: *const Registrar,
            ) -> i32 {
                // SAFETY: the host passes its own structures, after both comparisons.
                unsafe { $crate::plugin::register(host, registrar) }
            }
        };
    };
}
