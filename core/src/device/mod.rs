//! The device, the copies to it, and the host memory they read.

mod copy_engine;
mod cuda;
mod host_buffer;
mod link;
mod torch_shim;

pub use copy_engine::{CopyEngine, Event};
pub use cuda::{CudaInfo, cuda_info, load_cuda};
pub use host_buffer::HostBuffer;
pub use link::host_to_device_gb_per_s;
pub use torch_shim::{dropout, grad, memory_stats, reset_peak_memory, set_deterministic, upload};
