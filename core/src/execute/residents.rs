//! What every block sees: the resident blocks on the device, and tables gathered from host memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use tch::{Device, Tensor};

use super::options::Residency;
use crate::block::{BlockIndex, Placement};
use crate::device::{CopyEngine, HostBuffer, tensor_over};
use crate::error::{Error, Result};
use crate::source::BlockSource;
use crate::state::NamedTensors;
use crate::stream::{HostLoader, StreamOptions, load_blocks, views};

/// What every block sees besides its own tensors.
#[derive(Debug, Default)]
pub struct Residents {
    /// All tensors on the device, in stored dtypes.
    pub tensors: NamedTensors,
    /// Which block each name comes from.
    pub blocks: BTreeMap<String, BlockIndex>,
    /// Device memory they take.
    pub num_bytes: usize,
    /// Tables in host memory, for [`Scope::embedding`](crate::scope::Scope::embedding) alone.
    pub gathered: NamedTensors,
    /// Host memory that these take, the source's own included where it lends it.
    pub gathered_bytes: usize,
    /// Bytes that all of this took from storage.
    pub read_bytes: usize,
}

impl Residents {
    /// Brings everything that is not streamed to where `residency` wants it.
    pub(super) fn load(
        source: &Arc<dyn BlockSource>,
        engine: &Arc<dyn CopyEngine>,
        residency: &Residency,
        options: &StreamOptions,
    ) -> Result<Self> {
        let mut residents = Self::default();
        let mut on_device = Vec::new();
        for (index, spec) in source.blocks().iter().enumerate() {
            let block = BlockIndex(index);
            match spec.placement {
                Placement::Streamed => {}
                Placement::Head if residency.stream_head => {}
                Placement::Gathered if residency.gather_from_host => {
                    let table = residents.table(source, engine, options, block);
                    let table = table.map_err(|error| error.in_block(&spec.name))?;
                    residents.gathered_bytes += spec.image_bytes;
                    for (name, tensor) in views(&table, spec)?.iter() {
                        residents.gathered.insert(name, tensor.shallow_clone());
                    }
                }
                Placement::Resident | Placement::Gathered | Placement::Head => {
                    on_device.push(block);
                }
            }
        }
        let loaded = load_blocks(source, engine, &on_device, options)?;
        residents.read_bytes += loaded.read_bytes as usize;
        for (block, loaded) in on_device.into_iter().zip(&loaded.blocks) {
            residents.num_bytes += source.blocks()[block.0].image_bytes;
            for (name, tensor) in loaded.tensors.iter() {
                residents.tensors.insert(name, tensor.shallow_clone());
                residents.blocks.insert(name.to_owned(), block);
            }
        }
        Ok(residents)
    }

    /// The image of a block in host memory, as the device sees it: the source's own, if it can be read in
    /// place, else a copy.
    fn table(
        &mut self,
        source: &Arc<dyn BlockSource>,
        engine: &Arc<dyn CopyEngine>,
        options: &StreamOptions,
        block: BlockIndex,
    ) -> Result<Tensor> {
        let device = engine.device();
        let readable = |buffer: &&HostBuffer| buffer.is_pinned() || device == Device::Cpu;
        if let Some(lent) = tensor_over(source, |it| it.lend(block).filter(readable), device)? {
            return Ok(lent);
        }
        let image_bytes = source.blocks()[block.0].image_bytes;
        let mut image = engine.host_buffer(image_bytes)?;
        let mut loader = HostLoader::new(source, options.read, image_bytes);
        self.read_bytes += loader.fill(block, &mut image)?;
        let found = tensor_over(&Arc::new(image), |image| Some(image), device)?;
        found.ok_or_else(|| Error::usage("host memory that was just reserved is not there"))
    }
}
