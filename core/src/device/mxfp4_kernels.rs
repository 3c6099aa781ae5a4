//! CUDA kernels for matrices packed in MXFP4, compiled for the device when they are first needed.

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_longlong, c_uint, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, result, sys};
use tch::{Device, Kind, Tensor};

use super::cuda::{context, failed, libtorch_folder};
use super::nvrtc;
use crate::error::{Error, Result};
use crate::numerics::Mxfp4;

pub(super) const SOURCE: &str = include_str!("kernels/mxfp4.cu");

/// What the kernels load at once.
const ALIGNMENT_BYTES: usize = 16;
/// Compute capability from which there are products of bf16.
const LEAST_CAPABILITY: (i32, i32) = (8, 0);

/// The kernels of one device. They run on the stream that libtorch computes on, the default one, so that
/// memory from libtorch's allocator is in order with them.
#[derive(Debug)]
pub(crate) struct Mxfp4Kernels {
    context: Arc<CudaContext>,
    device: Device,
    expand: sys::CUfunction,
    forward: sys::CUfunction,
    backward: sys::CUfunction,
}

// SAFETY: the functions are handles that the driver lets any thread launch; their module is never unloaded.
unsafe impl Send for Mxfp4Kernels {}
// SAFETY: as above; nothing here changes.
unsafe impl Sync for Mxfp4Kernels {}

impl Mxfp4Kernels {
    /// The kernels for `device`; `None` where there can be none: on the CPU, on devices that are too old, and
    /// where NVRTC is missing, of which the log warns once.
    pub(crate) fn of(device: Device) -> Option<Arc<Self>> {
        static LOADED: Mutex<Option<HashMap<usize, Option<Arc<Mxfp4Kernels>>>>> = Mutex::new(None);
        let Device::Cuda(index) = device else { return None };
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let kernels = loaded.get_or_insert_with(HashMap::new).entry(index).or_insert_with(|| {
            let kernels = Self::load(index);
            if let Err(reason) = &kernels {
                tracing::warn!(
                    "packed experts are computed without kernels of their own, which is slower: {reason}"
                );
            }
            kernels.ok().map(Arc::new)
        });
        kernels.clone()
    }

    fn load(index: usize) -> std::result::Result<Self, String> {
        let text = |error: Error| error.to_string();
        let context = context(index).map_err(text)?;
        let capability = context.compute_capability().map_err(|error| error.to_string())?;
        if capability < LEAST_CAPABILITY {
            let (major, minor) = capability;
            return Err(format!(
                "they need compute capability 8.0, but the device has {major}.{minor}"
            ));
        }
        let folders = libtorch_folder().map(|libtorch| nvrtc::folders_beside(&libtorch));
        let cubin = nvrtc::compile(SOURCE, capability, &folders.unwrap_or_default())?;
        context.bind_to_thread().map_err(|error| error.to_string())?;
        // SAFETY: the image is what NVRTC made for this device; the driver copies it.
        let module = unsafe { result::module::load_data(cubin.as_ptr().cast()) };
        let module = module.map_err(|error| error.to_string())?;
        let function = |name: &str| {
            let name = CString::new(name).map_err(|error| error.to_string())?;
            // SAFETY: the module was loaded and is never unloaded.
            unsafe { result::module::get_function(module, name) }.map_err(|error| error.to_string())
        };
        Ok(Self {
            expand: function("mxfp4_expand")?,
            forward: function("mxfp4_forward")?,
            backward: function("mxfp4_backward")?,
            context,
            device: Device::Cuda(index),
        })
    }

    /// Whether the kernels take these matrices: three dimensions, no gaps, aligned, and rows in fours.
    pub(crate) fn take(&self, packed: &Mxfp4) -> bool {
        let (blocks, scales) = (packed.blocks(), packed.scales());
        let is_size = matches!(packed.size()[..], [1..=65_535, rows, columns]
            if rows > 0 && rows % 4 == 0 && columns > 0 && rows <= 1 << 30 && columns <= 1 << 30);
        is_size
            && [blocks, scales].iter().all(|it| it.device() == self.device && it.is_contiguous())
            && (blocks.data_ptr() as usize).is_multiple_of(ALIGNMENT_BYTES)
    }

    /// The matrices in bf16, `[num_experts, out_features, in_features]`.
    ///
    /// # Errors
    /// [`Error::Usage`] for what the kernels do not take; [`Error::Cuda`], [`Error::OutOfMemory`].
    pub(crate) fn expand(&self, packed: &Mxfp4) -> Result<Tensor> {
        const THREADS: i64 = 256;
        // A few words per thread.
        const MOST_BLOCKS: i64 = 1 << 16;
        self.check(packed)?;
        let values = Tensor::f_empty(packed.size(), (Kind::BFloat16, self.device))?;
        let num_words = packed.scales().numel() as i64 * 4;
        let mut arguments = Arguments::new();
        arguments.tensor(packed.blocks()).tensor(packed.scales()).tensor(&values).long(num_words);
        let num_blocks = blocks_for(num_words, THREADS).min(MOST_BLOCKS);
        self.launch(self.expand, [num_blocks, 1], THREADS, arguments)?;
        Ok(values)
    }

    /// Row `i` of `x` `[slots, in_features]`, bf16, times the matrix of the expert whose slots end first behind
    /// `i`: `[slots, out_features]`. `ends` `[num_experts]`, Int, ascend. Rows behind the last end are not
    /// written. Nobody waits.
    ///
    /// # Errors
    /// As [`Mxfp4Kernels::expand`].
    pub(crate) fn forward(&self, packed: &Mxfp4, x: &Tensor, ends: &Tensor) -> Result<Tensor> {
        const ROWS_PER_BLOCK: i64 = 64;
        let [experts, rows, columns] = self.check(packed)?;
        let (x, ends) = (self.rows(x, columns)?, self.ends(ends, experts)?);
        let y = Tensor::f_empty([x.size2()?.0, rows], (Kind::BFloat16, self.device))?;
        let mut arguments = Arguments::new();
        arguments.packed(packed).tensor(&x).tensor(&ends).tensor(&y).int(rows).int(columns / 32);
        self.launch(self.forward, [blocks_for(rows, ROWS_PER_BLOCK), experts], 128, arguments)?;
        Ok(y)
    }

    /// The same with the matrices transposed: from `dy` `[slots, out_features]` to `[slots, in_features]`.
    ///
    /// # Errors
    /// As [`Mxfp4Kernels::expand`].
    pub(crate) fn backward(&self, packed: &Mxfp4, dy: &Tensor, ends: &Tensor) -> Result<Tensor> {
        const COLUMNS_PER_BLOCK: i64 = 128;
        let [experts, rows, columns] = self.check(packed)?;
        let (dy, ends) = (self.rows(dy, rows)?, self.ends(ends, experts)?);
        let dx = Tensor::f_empty([dy.size2()?.0, columns], (Kind::BFloat16, self.device))?;
        let mut arguments = Arguments::new();
        arguments.packed(packed).tensor(&dy).tensor(&ends).tensor(&dx).int(rows).int(columns / 32);
        self.launch(
            self.backward,
            [blocks_for(columns, COLUMNS_PER_BLOCK), experts],
            256,
            arguments,
        )?;
        Ok(dx)
    }

    /// The unpacked size, of what the kernels take.
    fn check(&self, packed: &Mxfp4) -> Result<[i64; 3]> {
        match packed.size()[..] {
            [experts, rows, columns] if self.take(packed) => Ok([experts, rows, columns]),
            _ => Err(Error::usage(format!(
                "packed matrices {:?} on {:?} are not for the kernels of {:?}",
                packed.size(),
                packed.blocks().device(),
                self.device
            ))),
        }
    }

    /// `x` without gaps and aligned.
    fn rows(&self, x: &Tensor, width: i64) -> Result<Tensor> {
        if x.size2()?.1 != width || x.f_kind()? != Kind::BFloat16 || x.device() != self.device {
            let message =
                format!("is {:?} {:?}, but must be bf16 [.., {width}]", x.kind(), x.size());
            return Err(Error::tensor("rows", message));
        }
        let x = x.f_contiguous()?;
        let is_aligned = (x.data_ptr() as usize).is_multiple_of(ALIGNMENT_BYTES);
        Ok(if is_aligned { x } else { x.f_detach_copy()? })
    }

    fn ends(&self, ends: &Tensor, num_experts: i64) -> Result<Tensor> {
        if ends.size() != [num_experts]
            || ends.f_kind()? != Kind::Int
            || ends.device() != self.device
        {
            let message =
                format!("is {:?} {:?}, but must be Int [{num_experts}]", ends.kind(), ends.size());
            return Err(Error::tensor("ends", message));
        }
        Ok(ends.f_contiguous()?)
    }

    fn launch(
        &self,
        function: sys::CUfunction,
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
        // SAFETY: the arguments have the number and types of the kernel's parameters, in the low bytes of
        // eight. They point to tensors of the sizes that the kernel was told, which libtorch's allocator
        // hands out again only to work behind it on the same stream. The null stream is libtorch's.
        unsafe {
            result::launch_kernel(function, grid, block, 0, std::ptr::null_mut(), &mut pointers)
        }
        .map_err(failed("launch a kernel"))
    }
}

/// How many blocks of threads it takes to do `per_block` each.
fn blocks_for(work: i64, per_block: i64) -> i64 {
    (work + per_block - 1) / per_block
}

/// A kernel's arguments, each in eight bytes of its own.
struct Arguments {
    values: Vec<u64>,
}

impl Arguments {
    fn new() -> Self {
        Self { values: Vec::new() }
    }

    fn tensor(&mut self, tensor: &Tensor) -> &mut Self {
        self.values.push(tensor.data_ptr() as u64);
        self
    }

    fn packed(&mut self, packed: &Mxfp4) -> &mut Self {
        self.tensor(packed.blocks()).tensor(packed.scales())
    }

    /// A C `int`, from a number that was checked to fit.
    fn int(&mut self, value: i64) -> &mut Self {
        self.values.push(u64::from(value as c_int as u32));
        self
    }

    fn long(&mut self, value: c_longlong) -> &mut Self {
        self.values.push(value as u64);
        self
    }
}
