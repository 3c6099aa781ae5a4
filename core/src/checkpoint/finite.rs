//! Looking for values that are not numbers.

use super::Layout;
use crate::block::{BlockIndex, TensorSpec};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::source::BlockSource;

/// Bytes looked at together; a multiple of every tensor's alignment, so that no element is cut.
const SCAN_BYTES: usize = 4 << 20;

/// How names of [`Role::Mxfp4Scales`](crate::weights::Role::Mxfp4Scales) end.
const MXFP4_SCALES_END: &str = "_scales";
/// The least scale with which the largest code is infinite in fp32. 255 makes no number of any code.
const MXFP4_INFINITE: u8 = 253;

/// A tensor that holds NaN or infinite values, or scales that make some.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NonFinite {
    /// Name inside the block.
    pub tensor: String,
    /// How many such values it holds.
    pub num_values: usize,
    /// Position of the first, counted in elements.
    pub first_element: usize,
}

/// The tensors of `block` that hold NaN or infinite values.
///
/// # Errors
/// Whatever the source returns.
pub fn scan_block(source: &dyn BlockSource, block: BlockIndex) -> Result<Vec<NonFinite>> {
    let mut found = Vec::new();
    let mut buffer = Vec::new();
    for TensorSpec { name, dtype, offset_bytes, num_bytes, .. } in
        source.blocks().get(block.0).map_or(&[][..], |spec| &spec.tensors)
    {
        let (mut num_values, mut first_element) = (0, None);
        let are_scales = *dtype == Dtype::U8 && name.ends_with(MXFP4_SCALES_END);
        let is_scanned = dtype.is_float() || are_scales;
        for start in (0..*num_bytes).step_by(SCAN_BYTES).filter(|_| is_scanned) {
            let end = (start + SCAN_BYTES).min(*num_bytes);
            buffer.resize(end - start, 0);
            source.read(block, offset_bytes + start..offset_bytes + end, &mut buffer)?;
            for (index, element) in buffer.chunks_exact(dtype.size_bytes()).enumerate() {
                if !is_finite(*dtype, element) || (are_scales && *element >= [MXFP4_INFINITE][..]) {
                    num_values += 1;
                    first_element.get_or_insert(start / dtype.size_bytes() + index);
                }
            }
        }
        if let Some(first_element) = first_element {
            found.push(NonFinite { tensor: name.clone(), num_values, first_element });
        }
    }
    Ok(found)
}

impl Layout {
    /// Scans every block of `source`, which was made from this layout.
    ///
    /// # Errors
    /// [`Error::Tensor`] for the first tensor with a NaN or infinite value, naming its file; whatever
    /// the source returns.
    pub fn check_finite(&self, source: &dyn BlockSource) -> Result<()> {
        for (index, (block, sources)) in self.blocks.iter().zip(&self.sources).enumerate() {
            let Some(found) = scan_block(source, BlockIndex(index))?.into_iter().next() else {
                continue;
            };
            let position = block.tensors.iter().position(|tensor| tensor.name == found.tensor);
            let origin = position.and_then(|position| sources.get(position));
            let (tensor, place) = match origin {
                Some(origin) => {
                    (&origin.checkpoint, self.files[origin.file].path.display().to_string())
                }
                None => (&found.tensor, source.describe()),
            };
            let message = format!(
                "holds {} NaN or infinite values, the first at element {} (block '{}', in {place}); fetch the file again, or the checkpoint was broken when it was trained",
                found.num_values, found.first_element, block.name
            );
            return Err(Error::tensor(tensor, message));
        }
        Ok(())
    }
}

/// Whether the little-endian `element` is a number: its exponent is not all ones. E4M3 has no infinity
/// and one NaN of each sign.
fn is_finite(dtype: Dtype, element: &[u8]) -> bool {
    let exponent = |mask: u16| match element {
        [.., low, high] => u16::from_le_bytes([*low, *high]) & mask != mask,
        _ => true,
    };
    match dtype {
        Dtype::F64 => exponent(0x7ff0),
        Dtype::F32 | Dtype::BF16 => exponent(0x7f80),
        Dtype::F16 => exponent(0x7c00),
        Dtype::F8E5M2 => element.iter().all(|byte| byte & 0x7c != 0x7c),
        Dtype::F8E4M3 => element.iter().all(|byte| byte & 0x7f != 0x7f),
        Dtype::I64 | Dtype::I32 | Dtype::I16 | Dtype::I8 | Dtype::U8 | Dtype::BOOL => true,
    }
}
