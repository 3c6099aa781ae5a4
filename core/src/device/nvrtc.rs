//! NVRTC, which compiles CUDA kernels at run time. It is looked for when it is first needed.

use std::error::Error as _;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// What `nvrtcProgram` is: a handle.
type Program = *mut c_void;

/// The functions that are used. Signatures: NVIDIA, "NVRTC", chapter "General".
struct Nvrtc {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    describe: unsafe extern "C" fn(c_int) -> *const c_char,
}

/// Compiles CUDA C++ for a device of this compute capability. `folders` are searched for NVRTC before the
/// system is.
///
/// # Errors
/// What is missing, or what the compiler says, as text.
pub(super) fn compile(
    source: &str,
    capability: (i32, i32),
    folders: &[PathBuf],
) -> Result<Vec<u8>, String> {
    let nvrtc = Nvrtc::load(folders)?;
    let source = CString::new(source).map_err(|error| error.to_string())?;
    let option = format!("--gpu-architecture=sm_{}{}", capability.0, capability.1);
    let option = CString::new(option).map_err(|error| error.to_string())?;
    let mut program = Compilation { nvrtc: &nvrtc, program: std::ptr::null_mut() };
    // SAFETY: the source is a C string that outlives the call, which copies it; there are no headers.
    let created = unsafe {
        (nvrtc.create)(
            &raw mut program.program,
            source.as_ptr(),
            c"kernels.cu".as_ptr(),
            0,
            std::ptr::null(),
            std::ptr::null(),
        )
    };
    nvrtc.check(created)?;
    let options = [option.as_ptr()];
    // SAFETY: the program was created, and the list has one C string that outlives the call.
    let compiled = unsafe { (nvrtc.compile)(program.program, 1, options.as_ptr()) };
    if let Err(error) = nvrtc.check(compiled) {
        let log = program.read(nvrtc.log_size, nvrtc.log).unwrap_or_default();
        return Err(format!("{error}: {}", String::from_utf8_lossy(&log).trim_end_matches('\0')));
    }
    program.read(nvrtc.cubin_size, nvrtc.cubin)
}

/// A program, which goes when this does.
struct Compilation<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Compilation<'_> {
    /// Something of the program that has a size.
    fn read(
        &self,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        content: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, String> {
        let mut num_bytes = 0;
        // SAFETY: the program exists, and the result outlives the call.
        self.nvrtc.check(unsafe { size(self.program, &raw mut num_bytes) })?;
        let mut bytes = vec![0_u8; num_bytes];
        // SAFETY: the call writes as many bytes as it said there are.
        self.nvrtc.check(unsafe { content(self.program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for Compilation<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: the program exists and is not used again. Nothing can be done about a failure.
            unsafe { (self.nvrtc.destroy)(&raw mut self.program) };
        }
    }
}

impl Nvrtc {
    fn load(folders: &[PathBuf]) -> Result<Self, String> {
        let library = find(folders)?;
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the type is the one of NVIDIA's header, the same in all versions since 11.1.
                *unsafe { library.get(concat!($name, "\0").as_bytes()) }
                    .map_err(|error| error.to_string())?
            };
        }
        let nvrtc = Self {
            create: symbol!("nvrtcCreateProgram"),
            compile: symbol!("nvrtcCompileProgram"),
            log_size: symbol!("nvrtcGetProgramLogSize"),
            log: symbol!("nvrtcGetProgramLog"),
            cubin_size: symbol!("nvrtcGetCUBINSize"),
            cubin: symbol!("nvrtcGetCUBIN"),
            destroy: symbol!("nvrtcDestroyProgram"),
            describe: symbol!("nvrtcGetErrorString"),
        };
        // Never unloaded: the functions stay valid.
        std::mem::forget(library);
        Ok(nvrtc)
    }

    fn check(&self, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: NVRTC returns a constant for every code.
        let text = unsafe { CStr::from_ptr((self.describe)(code)) };
        Err(text.to_string_lossy().into_owned())
    }
}

/// Opens NVRTC from one of the folders, or from where the system finds libraries.
fn find(folders: &[PathBuf]) -> Result<Library, String> {
    const NAMES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so.12"];
    let open = |path: &Path| {
        // SAFETY: NVIDIA's own libraries, whose constructors are harmless.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
        library.map_err(|error| {
            let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
            format!("{}: {error}{cause}", path.display())
        })
    };
    for folder in folders {
        let Some(path) = NAMES.iter().map(|name| folder.join(name)).find(|path| path.exists())
        else {
            continue;
        };
        // NVRTC opens its second half by name alone, which finds it when it is open already.
        for builtins in builtins(folder) {
            if let Ok(library) = open(&builtins) {
                std::mem::forget(library);
            }
        }
        return open(&path);
    }
    let mut message = String::new();
    for name in NAMES {
        match open(Path::new(name)) {
            Ok(library) => return Ok(library),
            Err(error) => message = error,
        }
    }
    Err(message)
}

fn builtins(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let is_builtins = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        name.is_some_and(|name| name.starts_with("libnvrtc-builtins.so."))
    };
    entries.map(|entry| entry.path()).filter(is_builtins).collect()
}

/// Where NVIDIA's Python packages put NVRTC, when libtorch is in `libtorch`: one of them came with it.
pub(super) fn folders_beside(libtorch: &Path) -> Vec<PathBuf> {
    let Some(packages) = libtorch.parent().and_then(Path::parent) else { return Vec::new() };
    let places = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"].map(|folder| packages.join(folder));
    [libtorch.to_owned()].into_iter().chain(places).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{gated_kernels, mxfp4_kernels};
    use super::*;

    /// NVRTC beside libtorch or named by `BLOCKSTREAMER_TEST_NVRTC`, where a machine without a GPU has it.
    fn folders() -> Vec<PathBuf> {
        let named = std::env::var_os("BLOCKSTREAMER_TEST_NVRTC").map(PathBuf::from);
        let beside =
            std::env::var_os("LIBTORCH").map(|path| folders_beside(&Path::new(&path).join("lib")));
        named.into_iter().chain(beside.unwrap_or_default()).collect()
    }

    #[test]
    fn the_kernels_compile_for_every_architecture_and_errors_say_where() {
        if let Err(error) = find(&folders()) {
            println!("skipped: {error}");
            return;
        }
        for source in [gated_kernels::SOURCE, mxfp4_kernels::SOURCE] {
            for capability in [(8, 0), (8, 6), (9, 0)] {
                let cubin = compile(source, capability, &folders()).unwrap();
                assert_eq!(cubin[..4], *b"\x7fELF", "{capability:?}");
            }
        }
        let error = compile("__global__ void f() { nonsense; }", (9, 0), &folders()).unwrap_err();
        assert!(error.contains("kernels.cu(1)") && error.contains("nonsense"), "{error}");
        assert!(compile("", (1, 0), &folders()).is_err());
    }

    #[test]
    fn a_folder_without_the_library_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("libnvrtc.so.13"), b"no library").unwrap();
        let error = compile("", (9, 0), &[PathBuf::from("/nowhere"), folder.path().to_owned()]);
        let error = error.unwrap_err();
        assert!(error.contains("libnvrtc.so.13"), "{error}");
    }
}
