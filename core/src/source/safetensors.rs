//! Blocks straight from the safetensors files as they were downloaded.

use std::fs::File;
use std::ops::Range;
use std::path::Path;

use super::{BlockSource, Extent, check_request, push_extent};
use crate::block::{BlockIndex, BlockSpec};
use crate::checkpoint::{Layout, open, read_exact_at};
use crate::error::{Error, Result};

/// Reads blocks from safetensors files, whatever their alignment and however a block is spread over
/// them. Nothing is converted and no second copy is made.
#[derive(Debug)]
pub struct SafetensorsSource {
    layout: Layout,
    files: Vec<File>,
}

impl SafetensorsSource {
    /// Opens the files of `layout`.
    ///
    /// # Errors
    /// [`Error::Io`] when one cannot be opened; [`Error::File`] when one has changed since its header
    /// was read.
    pub fn open(layout: Layout) -> Result<Self> {
        let mut files = Vec::new();
        for expected in &layout.files {
            let file = open(&expected.path)?;
            let found = file.metadata().map_err(Error::io("inspect", &expected.path))?.len();
            if found != expected.num_bytes {
                let message = format!(
                    "has {found} bytes, but had {} when its header was read; open the checkpoint again",
                    expected.num_bytes
                );
                return Err(Error::file(&expected.path, message));
            }
            files.push(file);
        }
        Ok(Self { layout, files })
    }
}

impl BlockSource for SafetensorsSource {
    fn describe(&self) -> String {
        let folder = self.layout.files.first().and_then(|file| file.path.parent());
        format!("safetensors files in {}", folder.unwrap_or("".as_ref()).display())
    }

    fn blocks(&self) -> &[BlockSpec] {
        &self.layout.blocks
    }

    fn read(&self, block: BlockIndex, range: Range<usize>, into: &mut [u8]) -> Result<usize> {
        let spec = check_request(self.blocks(), block, &range, into)?;
        let sources = &self.layout.sources[block.0];
        // Everything before `filled` (counted in the image) is done; what lies between tensors is a gap.
        let mut filled = range.start;
        let mut read_bytes = 0;
        let first = spec
            .tensors
            .partition_point(|tensor| tensor.offset_bytes + tensor.num_bytes <= range.start);
        for (tensor, source) in spec.tensors.iter().zip(sources).skip(first) {
            let start = tensor.offset_bytes.max(range.start);
            let end = (tensor.offset_bytes + tensor.num_bytes).min(range.end);
            if tensor.offset_bytes >= range.end {
                break;
            }
            into[filled - range.start..start - range.start].fill(0);
            let path = &self.layout.files[source.file].path;
            let offset_bytes = source.offset_bytes + (start - tensor.offset_bytes) as u64;
            let part = &mut into[start - range.start..end - range.start];
            read_exact_at(&self.files[source.file], path, offset_bytes, part)?;
            read_bytes += part.len();
            filled = end;
        }
        into[filled - range.start..].fill(0);
        Ok(read_bytes)
    }

    fn files(&self) -> Vec<&Path> {
        self.layout.files.iter().map(|file| &*file.path).collect()
    }

    fn extents(&self, block: BlockIndex) -> Option<Vec<Extent>> {
        let spec = self.layout.blocks.get(block.0)?;
        let mut extents = Vec::new();
        for (tensor, source) in spec.tensors.iter().zip(self.layout.sources.get(block.0)?) {
            let extent = Extent {
                file: source.file,
                file_offset_bytes: source.offset_bytes,
                image_offset_bytes: tensor.offset_bytes,
                num_bytes: tensor.num_bytes,
            };
            push_extent(&mut extents, extent);
        }
        Some(extents)
    }
}
