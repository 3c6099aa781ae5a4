//! A fingerprint of a checkpoint's content, for what is derived from it.

use std::path::Path;

use super::{Checkpoint, CheckpointFile, Layout, open, read_exact_at};
use crate::error::{Error, Result};

/// Places in each file whose bytes go into the identity.
const NUM_PROBES: u64 = 32;
/// Bytes at each place.
const PROBE_BYTES: u64 = 4096;

/// FNV-1a of 128 bits (<http://www.isthe.com/chongo/tech/comp/fnv>): the same in every release and on
/// every machine, which the hasher of `std` does not promise. It finds changes, not forgeries.
pub(super) struct Fingerprint(u128);

impl Fingerprint {
    pub(super) fn new() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }

    /// Adds one field; its length keeps it apart from the next.
    pub(super) fn add(&mut self, field: &[u8]) {
        for byte in (field.len() as u64).to_le_bytes().iter().chain(field) {
            self.0 = (self.0 ^ u128::from(*byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b);
        }
    }

    pub(super) fn value(&self) -> u128 {
        self.0
    }
}

impl Layout {
    /// A text that stays the same as long as the checkpoint and its layout into blocks do.
    ///
    /// In it: name and size of every file, every tensor of every header (name, dtype, shape, place),
    /// 4,096 bytes at each of 32 places spread over every file, and the layout. Headers alone cannot tell a finetuned model from its base; times of change can, but
    /// differ between two copies of the same bytes. The probes cost a few milliseconds. A change that
    /// touches no probe goes unnoticed.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::File`] when a file cannot be read.
    pub fn identity(&self, checkpoint: &Checkpoint) -> Result<String> {
        let mut fingerprint = Fingerprint::new();
        for CheckpointFile { path, num_bytes } in &checkpoint.files {
            fingerprint.add(path.file_name().unwrap_or_default().as_encoded_bytes());
            fingerprint.add(&num_bytes.to_le_bytes());
            add_probes(&mut fingerprint, path, *num_bytes)?;
        }
        for (name, tensor) in &checkpoint.tensors {
            fingerprint.add(name.as_bytes());
            let super::StoredTensor { file, dtype, shape, offset_bytes, .. } = tensor;
            let place = format!("{} {shape:?} {file} {offset_bytes}", dtype.name());
            fingerprint.add(place.as_bytes());
        }
        for (block, sources) in self.blocks.iter().zip(&self.sources) {
            let block =
                serde_json::to_vec(block).map_err(|error| Error::usage(error.to_string()))?;
            fingerprint.add(&block);
            for source in sources {
                fingerprint.add(source.checkpoint.as_bytes());
                fingerprint.add(&source.offset_bytes.to_le_bytes());
            }
        }
        Ok(format!("{:032x}", fingerprint.value()))
    }
}

fn add_probes(fingerprint: &mut Fingerprint, path: &Path, num_bytes: u64) -> Result<()> {
    let file = open(path)?;
    let probe_bytes = num_bytes.min(PROBE_BYTES);
    let mut probe = vec![0; probe_bytes as usize];
    let last = num_bytes - probe_bytes;
    for index in 0..NUM_PROBES {
        let offset = u128::from(last) * u128::from(index) / u128::from(NUM_PROBES - 1);
        read_exact_at(&file, path, offset as u64, &mut probe)?;
        fingerprint.add(&probe);
    }
    Ok(())
}
