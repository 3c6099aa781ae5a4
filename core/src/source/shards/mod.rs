//! Shards: one aligned, checksummed file per block.
//!
//! A folder of shards holds `manifest.json` and `block-00000.bin` and so on. A file is the block's image,
//! padded with zeros to a multiple of 4,096 bytes. The manifest says from which checkpoint they were
//! made, describes every block, and holds a CRC-32 of every 4 MiB of every image.
//! Blocks may be dealt over several folders (disks); the manifest in the first names the others.

mod manifest;
mod read;
mod write;

pub use manifest::{CHUNK_BYTES, MANIFEST_FILE, Manifest, SHARD_VERSION, ShardEntry};
pub use read::{Damage, ShardSource, verify_shards};
pub use write::{ShardProgress, ShardSummary, write_shards};
