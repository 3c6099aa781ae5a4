//! Shards: aligned, checksummed files of blocks.
//!
//! A folder of shards holds `manifest.json` and `block-00000.bin` and so on. A file is the block's image,
//! padded with zeros to a multiple of 4,096 bytes. The manifest says from which checkpoint they were
//! made, describes every block, and holds a CRC-32 of every 4 MiB of every image.
//! Blocks may be striped over several folders (disks) in pieces of 4 MiB; then each folder has a file
//! for its pieces of a block, the manifest in the first folder names the others, and `stripes.json` in each
//! of the others says whose stripes lie there.

mod claim;
mod manifest;
mod read;
mod stripes;
mod write;

pub use manifest::{CHUNK_BYTES, MANIFEST_FILE, Manifest, SHARD_VERSION, ShardEntry};
pub use read::{Damage, ShardSource, verify_shards};
pub use write::{ShardProgress, ShardSummary, write_shards};
