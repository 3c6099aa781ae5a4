//! The device, the copies to it, and the host memory they read.

mod copy_engine;
mod cuda;
mod host_buffer;
mod link;
mod torch_lists;
mod torch_shim;

pub use copy_engine::{CopyEngine, CopyPiece, Event};
pub use cuda::{CudaInfo, cuda_info, load_cuda};
pub use host_buffer::HostBuffer;
pub use link::{BareLink, host_to_device_gb_per_s};
pub(crate) use torch_lists::{AdamStep, AdamTensors, fused_adam, norms, scale};
pub use torch_shim::{
    MemoryStats, dropout, grad, memory_stats, reset_peak_memory, set_deterministic, upload,
};
pub(crate) use torch_shim::{into_own, tensor_over};
