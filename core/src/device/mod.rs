//! The device, the copies to it, and the host memory they read.

mod dropout;
mod host_buffer;

pub use dropout::dropout;
pub use host_buffer::HostBuffer;
