//! CUDA kernels for matrices packed in MXFP4, compiled for the device when they are first needed.

use std::sync::{Arc, Mutex};

use tch::{Device, Kind, Tensor};

use super::kernel_module::{Arguments, Kernel, KernelModule, PerDevice, blocks_for, of_device};
use crate::error::{Error, Result};
use crate::numerics::Mxfp4;

pub(super) const SOURCE: &str = include_str!("kernels/mxfp4.cu");

/// What the kernels load at once.
const ALIGNMENT_BYTES: usize = 16;

/// The kernels of one device.
#[derive(Debug)]
pub(crate) struct Mxfp4Kernels {
    module: KernelModule,
    device: Device,
    expand: Kernel,
    forward: Kernel,
    backward: Kernel,
}

impl Mxfp4Kernels {
    /// The kernels for `device`, where there are any (see [`of_device`]).
    pub(crate) fn of(device: Device) -> Option<Arc<Self>> {
        static LOADED: PerDevice<Mxfp4Kernels> = Mutex::new(None);
        let effect = "packed experts are computed without kernels of their own, which is slower";
        of_device(device, &LOADED, effect, |index| {
            let module = KernelModule::load(index, SOURCE)?;
            Ok(Self {
                expand: module.kernel("mxfp4_expand")?,
                forward: module.kernel("mxfp4_forward")?,
                backward: module.kernel("mxfp4_backward")?,
                module,
                device: Device::Cuda(index),
            })
        })
    }

    /// Whether the kernels take these matrices: three dimensions, no gaps, aligned, and rows in fours.
    pub(crate) fn take(&self, packed: &Mxfp4) -> bool {
        let (blocks, scales) = (packed.blocks(), packed.scales());
        let is_size = matches!(packed.size()[..], [1..=65_535, rows, columns]
            if rows > 0 && rows % 4 == 0 && columns > 0 && rows <= 1 << 30 && columns <= 1 << 30);
        is_size
            && [blocks, scales].iter().all(|it| it.device() == self.device && it.is_contiguous())
            && (blocks.data_ptr() as usize).is_multiple_of(ALIGNMENT_BYTES)
    }

    /// The matrices in bf16, `[num_experts, out_features, in_features]`.
    ///
    /// # Errors
    /// [`Error::Usage`] for what the kernels do not take; [`Error::Cuda`], [`Error::OutOfMemory`].
    pub(crate) fn expand(&self, packed: &Mxfp4) -> Result<Tensor> {
        const THREADS: i64 = 256;
        // A few words per thread.
        const MOST_BLOCKS: i64 = 1 << 16;
        self.check(packed)?;
        let values = Tensor::f_empty(packed.size(), (Kind::BFloat16, self.device))?;
        let num_words = packed.scales().numel() as i64 * 4;
        let mut arguments = Arguments::new();
        arguments.tensor(packed.blocks()).tensor(packed.scales()).tensor(&values).long(num_words);
        let num_blocks = blocks_for(num_words, THREADS).min(MOST_BLOCKS);
        // SAFETY: these are the kernel's parameters; the sizes were checked.
        unsafe { self.module.launch(self.expand, [num_blocks, 1], THREADS, arguments)? };
        Ok(values)
    }

    /// Row `i` of `x` `[slots, in_features]`, bf16, times the matrix of the expert whose slots end first behind
    /// `i`: `[slots, out_features]`. `ends` `[num_experts]`, Int, ascend. Rows behind the last end are not
    /// written. Nobody waits.
    ///
    /// # Errors
    /// As [`Mxfp4Kernels::expand`].
    pub(crate) fn forward(&self, packed: &Mxfp4, x: &Tensor, ends: &Tensor) -> Result<Tensor> {
        const ROWS_PER_BLOCK: i64 = 64;
        let [experts, rows, columns] = self.check(packed)?;
        let (x, ends) = (self.rows(x, columns)?, self.ends(ends, experts)?);
        let y = Tensor::f_empty([x.size2()?.0, rows], (Kind::BFloat16, self.device))?;
        let mut arguments = Arguments::new();
        arguments.packed(packed).tensor(&x).tensor(&ends).tensor(&y).int(rows).int(columns / 32);
        let blocks = [blocks_for(rows, ROWS_PER_BLOCK), experts];
        // SAFETY: these are the kernel's parameters; the sizes were checked.
        unsafe { self.module.launch(self.forward, blocks, 128, arguments)? };
        Ok(y)
    }

    /// The same with the matrices transposed: from `dy` `[slots, out_features]` to `[slots, in_features]`.
    ///
    /// # Errors
    /// As [`Mxfp4Kernels::expand`].
    pub(crate) fn backward(&self, packed: &Mxfp4, dy: &Tensor, ends: &Tensor) -> Result<Tensor> {
        const COLUMNS_PER_BLOCK: i64 = 128;
        let [experts, rows, columns] = self.check(packed)?;
        let (dy, ends) = (self.rows(dy, rows)?, self.ends(ends, experts)?);
        let dx = Tensor::f_empty([dy.size2()?.0, columns], (Kind::BFloat16, self.device))?;
        let mut arguments = Arguments::new();
        arguments.packed(packed).tensor(&dy).tensor(&ends).tensor(&dx).int(rows).int(columns / 32);
        let blocks = [blocks_for(columns, COLUMNS_PER_BLOCK), experts];
        // SAFETY: these are the kernel's parameters; the sizes were checked.
        unsafe { self.module.launch(self.backward, blocks, 256, arguments)? };
        Ok(dx)
    }

    /// The unpacked size, of what the kernels take.
    fn check(&self, packed: &Mxfp4) -> Result<[i64; 3]> {
        match packed.size()[..] {
            [experts, rows, columns] if self.take(packed) => Ok([experts, rows, columns]),
            _ => Err(Error::usage(format!(
                "packed matrices {:?} on {:?} are not for the kernels of {:?}",
                packed.size(),
                packed.blocks().device(),
                self.device
            ))),
        }
    }

    /// `x` without gaps and aligned.
    fn rows(&self, x: &Tensor, width: i64) -> Result<Tensor> {
        if x.size2()?.1 != width || x.f_kind()? != Kind::BFloat16 || x.device() != self.device {
            let message =
                format!("is {:?} {:?}, but must be bf16 [.., {width}]", x.kind(), x.size());
            return Err(Error::tensor("rows", message));
        }
        let x = x.f_contiguous()?;
        let is_aligned = (x.data_ptr() as usize).is_multiple_of(ALIGNMENT_BYTES);
        Ok(if is_aligned { x } else { x.f_detach_copy()? })
    }

    fn ends(&self, ends: &Tensor, num_experts: i64) -> Result<Tensor> {
        if ends.size() != [num_experts]
            || ends.f_kind()? != Kind::Int
            || ends.device() != self.device
        {
            let message =
                format!("is {:?} {:?}, but must be Int [{num_experts}]", ends.kind(), ends.size());
            return Err(Error::tensor("ends", message));
        }
        Ok(ends.f_contiguous()?)
    }
}

impl Arguments {
    fn packed(&mut self, packed: &Mxfp4) -> &mut Self {
        self.tensor(packed.blocks()).tensor(packed.scales())
    }
}
