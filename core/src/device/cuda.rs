//! The CUDA driver beside libtorch: one copy stream, events, page-locked memory.
//!
//! cudarc panics when libcuda is missing, so every first touch goes through [`driver`].

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{self, CUevent_flags};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use tch::Device;

use super::copy_engine::{CopyEngine, CopyPiece, Event};
use crate::error::{Error, Result};

/// An event on a CUDA stream, with timing.
#[derive(Debug)]
pub struct CudaTimestamp(CudaEvent);

/// What `doctor` says of a CUDA device.
#[derive(Debug, Clone)]
pub struct CudaInfo {
    /// Marketing name.
    pub name: String,
    /// All memory of the device.
    pub total_bytes: usize,
    /// What nobody uses at the moment.
    pub free_bytes: usize,
}

pub(super) fn failed(action: &'static str) -> impl FnOnce(DriverError) -> Error {
    move |error| match error.0 {
        sys::cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY => {
            Error::OutOfMemory { action: action.into(), message: error.to_string() }
        }
        _ => Error::Cuda { action, message: error.to_string() },
    }
}

/// Whether there is a CUDA driver at all; asked once.
fn driver() -> Result<()> {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: only tries to open libcuda; its constructors are NVIDIA's own.
    match PRESENT.get_or_init(|| unsafe { sys::is_culib_present() }) {
        true => Ok(()),
        false => Err(Error::NoCuda {
            reason: "libcuda.so.1, the NVIDIA driver, is not installed".into(),
        }),
    }
}

/// Maps libtorch's CUDA half, which the linker drops from binaries that do not name it.
/// Call it before anything asks tch about CUDA: libtorch keeps its first answer for ever.
///
/// # Errors
/// [`Error::NoCuda`] without a driver, or when libtorch was installed without CUDA.
pub fn load_cuda() -> Result<()> {
    static LOADED: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    driver()?;
    let outcome = LOADED.get_or_init(|| {
        let path = libtorch_folder().ok_or("libtorch_cpu.so is not mapped")?.join("libtorch_cuda.so");
        // SAFETY: libtorch's own library, next to the one already mapped; it is never unloaded.
        let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) };
        library.map(std::mem::forget).map_err(|error| {
            format!("{error}; run `make setup` again on this machine to install the CUDA set of libtorch")
        })
    });
    outcome.clone().map_err(|reason| Error::NoCuda { reason })?;
    match tch::Cuda::device_count() {
        0 => Err(Error::NoCuda { reason: "libtorch sees no CUDA device; check nvidia-smi".into() }),
        _ => Ok(()),
    }
}

/// The folder that libtorch was mapped from.
pub(super) fn libtorch_folder() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| line.ends_with("/libtorch_cpu.so"))?;
    let path = PathBuf::from(&line[line.find('/')?..]);
    path.parent().map(PathBuf::from)
}

/// Compute capability from which there are bf16 and its products, and flash attention.
pub(super) const BF16_CAPABILITY: (i32, i32) = (8, 0);

pub(super) fn context(index: usize) -> Result<Arc<CudaContext>> {
    driver()?;
    // The primary context: the one that libtorch uses.
    CudaContext::new(index).map_err(failed("open the device"))
}

/// Name and memory of a CUDA device.
///
/// # Errors
/// [`Error::NoCuda`] without a driver, [`Error::Cuda`] when there is no such device.
pub fn cuda_info(index: usize) -> Result<CudaInfo> {
    let context = context(index)?;
    let (free_bytes, total_bytes) =
        context.mem_get_info().map_err(failed("ask for free memory"))?;
    Ok(CudaInfo {
        name: context.name().map_err(failed("ask for the name"))?,
        total_bytes,
        free_bytes,
    })
}

/// A page-locked range. It holds the device's context, without which it could not be released.
#[derive(Debug)]
pub(super) struct PageLock {
    context: Arc<CudaContext>,
    address: usize,
}

impl PageLock {
    /// Page-locks `bytes` for every context; `None` where no CUDA device needs it.
    /// The range must outlive the lock.
    pub(super) fn new(bytes: &mut [u8], device: Device) -> Result<Option<Self>> {
        let Device::Cuda(index) = device else { return Ok(None) };
        let context = context(index)?;
        context.bind_to_thread().map_err(failed("bind the device"))?;
        let address = bytes.as_mut_ptr();
        // Mapped, so that kernels can gather from it.
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the range is a live mapping, and its owner drops the lock before unmapping it.
        let locked =
            unsafe { sys::cuMemHostRegister_v2(address.cast(), bytes.len(), flags) }.result();
        match locked {
            Ok(()) => Ok(Some(Self { context, address: address as usize })),
            Err(error) => Err(Error::Cuda {
                action: "page-lock host memory",
                message: format!(
                    "{error} for {} bytes; see `ulimit -l` and the free memory, or use less (tier = \"disk\", smaller chunks)",
                    bytes.len()
                ),
            }),
        }
    }
}

impl PageLock {
    /// Where kernels of the device see the range.
    pub(super) fn device_address(&self) -> Result<usize> {
        self.context.bind_to_thread().map_err(failed("bind the device"))?;
        let mut address: sys::CUdeviceptr = 0;
        // SAFETY: `new` registered this range as mapped memory, and the result outlives the call.
        unsafe {
            sys::cuMemHostGetDevicePointer_v2(&raw mut address, self.address as *mut _, 0).result()
        }
        .map_err(failed("map host memory"))?;
        Ok(address as usize)
    }
}

impl Drop for PageLock {
    fn drop(&mut self) {
        // Kernels that read it in place may still be running.
        let idle = self.context.synchronize();
        // SAFETY: `new` locked this range, and its owner has not unmapped it yet.
        let released = unsafe { sys::cuMemHostUnregister(self.address as *mut _) }.result();
        let released = idle.and(released);
        if let Err(error) = released {
            tracing::warn!(%error, "page-locked memory could not be released");
        }
    }
}

/// Copies on a stream of its own, ordered against libtorch's default stream.
#[derive(Debug)]
pub(super) struct CudaCopyEngine {
    index: usize,
    context: Arc<CudaContext>,
    copies: Arc<CudaStream>,
    compute: Arc<CudaStream>,
}

impl CudaCopyEngine {
    pub(super) fn new(index: usize) -> Result<Self> {
        load_cuda()?;
        let context = context(index)?;
        // Non-blocking: it does not order itself against the default stream; events do.
        let copies = context.new_stream().map_err(failed("create the copy stream"))?;
        let compute = context.default_stream();
        Ok(Self { index, context, copies, compute })
    }

    fn mark(&self, stream: &CudaStream) -> Result<CudaEvent> {
        // Whoever waits for the event sleeps: the reader must not take a core from the host.
        stream
            .record_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC))
            .map_err(failed("record an event"))
    }
}

fn cuda_event(event: &Event) -> Result<&CudaEvent> {
    match event {
        Event::Cuda(timestamp) => Ok(&timestamp.0),
        Event::Host(_) => Err(Error::usage("an event of the CPU was given to a CUDA engine")),
    }
}

impl CopyEngine for CudaCopyEngine {
    fn device(&self) -> Device {
        Device::Cuda(self.index)
    }

    fn is_host_memory(&self) -> bool {
        false
    }

    unsafe fn copy(
        &self,
        pieces: &[CopyPiece<'_>],
        after: Option<&Event>,
    ) -> Result<(Event, Event)> {
        if let Some(after) = after {
            self.copies.wait(cuda_event(after)?).map_err(failed("order a copy"))?;
        }
        let start = self.mark(&self.copies)?;
        self.context.bind_to_thread().map_err(failed("bind the device"))?;
        for CopyPiece { source, destination } in
            pieces.iter().filter(|piece| !piece.source.is_empty())
        {
            let destination = *destination as sys::CUdeviceptr;
            // SAFETY: the caller vouches for both ranges until the end event has happened.
            unsafe { result::memcpy_htod_async(destination, source, self.copies.cu_stream()) }
                .map_err(failed("copy to the device"))?;
        }
        let end = self.mark(&self.copies)?;
        Ok((Event::Cuda(CudaTimestamp(start)), Event::Cuda(CudaTimestamp(end))))
    }

    fn record(&self) -> Result<Event> {
        self.mark(&self.compute).map(|event| Event::Cuda(CudaTimestamp(event)))
    }

    fn wait(&self, event: &Event) -> Result<()> {
        self.compute.wait(cuda_event(event)?).map_err(failed("order computation"))
    }

    fn synchronize(&self, event: &Event) -> Result<()> {
        cuda_event(event)?.synchronize().map_err(failed("wait for the device"))
    }

    fn has_happened(&self, event: &Event) -> Result<bool> {
        cuda_event(event)?.try_is_complete().map_err(failed("ask for an event"))
    }

    fn elapsed_ms(&self, start: &Event, end: &Event) -> Result<Option<f64>> {
        let (start, end) = (cuda_event(start)?, cuda_event(end)?);
        match end.try_is_complete().map_err(failed("ask for an event"))? {
            false => Ok(None),
            true => start
                .elapsed_ms(end)
                .map(|ms| Some(f64::from(ms)))
                .map_err(failed("time two events")),
        }
    }
}
