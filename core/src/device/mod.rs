//! The device, the copies to it, the host memory they read, and kernels of our own.

mod copy_engine;
mod cuda;
mod custom_gradient;
mod flash_attention;
mod gated_kernels;
mod host_buffer;
mod kernel_module;
mod link;
mod low_rank;
mod mxfp4_kernels;
mod nvrtc;
mod torch_lists;
mod torch_shim;

pub(crate) use copy_engine::HostCopyEngine;
pub use copy_engine::{CopyEngine, CopyPiece, Event};
pub use cuda::{CudaInfo, cuda_info, load_cuda};
pub(crate) use custom_gradient::with_gradient;
pub(crate) use flash_attention::{flash_attention, has_flash_attention};
pub(crate) use gated_kernels::GatedKernels;
pub use host_buffer::HostBuffer;
pub use link::{BareLink, host_to_device_gb_per_s};
pub(crate) use low_rank::add_low_rank;
pub(crate) use mxfp4_kernels::Mxfp4Kernels;
pub(crate) use torch_lists::{AdamStep, AdamTensors, fused_adam, norms, scale};
pub use torch_shim::{
    MemoryStats, dropout, grad, memory_stats, reset_peak_memory, set_deterministic, upload,
};
pub(crate) use torch_shim::{into_own, tensor_over};
