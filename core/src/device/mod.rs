//! The device, the copies to it, and the host memory they read.

mod host_buffer;

pub use host_buffer::HostBuffer;
