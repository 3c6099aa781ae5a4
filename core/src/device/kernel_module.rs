//! Kernels of our own on one device: compiled by NVRTC when they are first needed, and launched.

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_longlong, c_uint, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, result, sys};
use tch::{Device, Tensor};

use super::cuda::{BF16_CAPABILITY, context, failed, libtorch_folder};
use super::nvrtc;
use crate::error::{Error, Result};

/// What was made of one source for each device that asked; `None` where that failed.
pub(super) type PerDevice<T> = Mutex<Option<HashMap<usize, Option<Arc<T>>>>>;

/// The kernels in `loaded` for `device`, which `load` makes when they are first asked for; `None` where there
/// can be none: on the CPU, on devices that are too old, and where NVRTC is missing, of which the log warns once.
/// `effect` is what the warning says before the reason.
pub(super) fn of_device<T>(
    device: Device,
    loaded: &PerDevice<T>,
    effect: &str,
    load: impl FnOnce(usize) -> std::result::Result<T, String>,
) -> Option<Arc<T>> {
    let Device::Cuda(index) = device else { return None };
    let mut loaded = loaded.lock().unwrap_or_else(PoisonError::into_inner);
    let kernels = loaded.get_or_insert_with(HashMap::new).entry(index).or_insert_with(|| {
        let kernels = load(index);
        if let Err(reason) = &kernels {
            tracing::warn!("{effect}: {reason}");
        }
        kernels.ok().map(Arc::new)
    });
    kernels.clone()
}

/// One source, compiled and loaded. Its kernels run on the stream that libtorch computes on, the default one, so
/// that memory from libtorch's allocator is in order with them.
#[derive(Debug)]
pub(super) struct KernelModule {
    context: Arc<CudaContext>,
    module: sys::CUmodule,
}

// SAFETY: the module is a handle that the driver lets any thread use; it is never unloaded.
unsafe impl Send for KernelModule {}
// SAFETY: as above; nothing here changes.
unsafe impl Sync for KernelModule {}

/// A kernel of a [`KernelModule`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Kernel(sys::CUfunction);

// SAFETY: functions are handles that the driver lets any thread launch; their module is never unloaded.
unsafe impl Send for Kernel {}
// SAFETY: as above; nothing here changes.
unsafe impl Sync for Kernel {}

impl KernelModule {
    /// Compiles `source` for the device.
    pub(super) fn load(index: usize, source: &str) -> std::result::Result<Self, String> {
        let text = |error: Error| error.to_string();
        let context = context(index).map_err(text)?;
        let capability = context.compute_capability().map_err(|error| error.to_string())?;
        if capability < BF16_CAPABILITY {
            let (major, minor) = capability;
            return Err(format!(
                "they need compute capability 8.0, but the device has {major}.{minor}"
            ));
        }
        let folders = libtorch_folder().map(|libtorch| nvrtc::folders_beside(&libtorch));
        let cubin = nvrtc::compile(source, capability, &folders.unwrap_or_default())?;
        context.bind_to_thread().map_err(|error| error.to_string())?;
        // SAFETY: the image is what NVRTC made for this device; the driver copies it.
        let module = unsafe { result::module::load_data(cubin.as_ptr().cast()) };
        Ok(Self { context, module: module.map_err(|error| error.to_string())? })
    }

    pub(super) fn kernel(&self, name: &str) -> std::result::Result<Kernel, String> {
        let name = CString::new(name).map_err(|error| error.to_string())?;
        // SAFETY: the module was loaded and is never unloaded.
        let function = unsafe { result::module::get_function(self.module, name) };
        Ok(Kernel(function.map_err(|error| error.to_string())?))
    }

    /// Queues `width` by `height` blocks of `num_threads`.
    ///
    /// # Safety
    /// The kernel must be one of this module. The arguments must have the number and types of the kernel's parameters, and point to tensors on this
    /// device of the sizes that the kernel takes them to have.
    ///
    /// # Errors
    /// [`Error::Cuda`] when the driver refuses.
    pub(super) unsafe fn launch(
        &self,
        kernel: Kernel,
        [width, height]: [i64; 2],
        num_threads: i64,
        mut arguments: Arguments,
    ) -> Result<()> {
        if width == 0 || height == 0 {
            return Ok(());
        }
        self.context.bind_to_thread().map_err(failed("bind the device"))?;
        let mut pointers: Vec<*mut c_void> =
            arguments.values.iter_mut().map(|value| (&raw mut *value).cast()).collect();
        let (grid, block) = ((width as c_uint, height as c_uint, 1), (num_threads as c_uint, 1, 1));
        // SAFETY: the caller's promise; every argument is in the low bytes of eight. Memory of tensors is handed
        // out again only to work behind the kernel on the same stream. The null stream is libtorch's.
        unsafe {
            result::launch_kernel(kernel.0, grid, block, 0, std::ptr::null_mut(), &mut pointers)
        }
        .map_err(failed("launch a kernel"))
    }
}

/// How many blocks of threads it takes to do `per_block` each.
pub(super) fn blocks_for(work: i64, per_block: i64) -> i64 {
    (work + per_block - 1) / per_block
}

/// A kernel's arguments, each in eight bytes of its own.
pub(super) struct Arguments {
    values: Vec<u64>,
}

impl Arguments {
    pub(super) fn new() -> Self {
        Self { values: Vec::new() }
    }

    pub(super) fn tensor(&mut self, tensor: &Tensor) -> &mut Self {
        self.values.push(tensor.data_ptr() as u64);
        self
    }

    /// A C `int`, from a number that was checked to fit.
    pub(super) fn int(&mut self, value: i64) -> &mut Self {
        self.values.push(u64::from(value as c_int as u32));
        self
    }

    pub(super) fn long(&mut self, value: c_longlong) -> &mut Self {
        self.values.push(value as u64);
        self
    }

    pub(super) fn float(&mut self, value: f32) -> &mut Self {
        self.values.push(u64::from(value.to_bits()));
        self
    }
}
