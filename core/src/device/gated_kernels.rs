//! CUDA kernels for gated activations: one each way instead of seven and a dozen, and nothing kept but their input.

use std::sync::{Arc, Mutex};

use tch::{Device, Kind, Tensor};

use super::kernel_module::{Arguments, Kernel, KernelModule, PerDevice, blocks_for, of_device};
use crate::error::{Error, Result};
use crate::scope::{ExpertActivation, GateUp};

pub(super) const SOURCE: &str = include_str!("kernels/gated.cu");

/// Gates and ups are read in pairs.
const ALIGNMENT_BYTES: usize = 4;
/// Gates and ups of a row: a grid has at most 65,535 blocks of [`THREADS`] in its second dimension.
const MOST_COLUMNS: i64 = 2 * 65_535 * THREADS;
/// Threads of a block, each with one gate and up.
const THREADS: i64 = 256;

/// The kernels of one device, each forward and backward.
#[derive(Debug)]
pub(crate) struct GatedKernels {
    module: KernelModule,
    device: Device,
    silu: [Kernel; 2],
    clamped: [Kernel; 2],
}

impl GatedKernels {
    /// The kernels for `device`, where there are any (see [`of_device`]).
    pub(crate) fn of(device: Device) -> Option<Arc<Self>> {
        static LOADED: PerDevice<GatedKernels> = Mutex::new(None);
        let effect = "activations of experts are computed step by step, which is slower";
        of_device(device, &LOADED, effect, |index| {
            let module = KernelModule::load(index, SOURCE)?;
            Ok(Self {
                silu: [module.kernel("silu_forward")?, module.kernel("silu_backward")?],
                clamped: [module.kernel("clamped_forward")?, module.kernel("clamped_backward")?],
                module,
                device: Device::Cuda(index),
            })
        })
    }

    /// Whether the kernels take `fused`: bf16, `[rows, 2 * intermediate_size]`, without gaps.
    pub(crate) fn take(&self, fused: &Tensor) -> bool {
        fused.device() == self.device
            && fused.kind() == Kind::BFloat16
            && matches!(fused.size()[..], [0..=0x7fff_ffff, 0..=MOST_COLUMNS])
            && fused.size()[1] % 2 == 0
            && fused.is_contiguous()
            && (fused.data_ptr() as usize).is_multiple_of(ALIGNMENT_BYTES)
    }

    /// `activation(gate) * up` of `fused`: `[rows, intermediate_size]`, computed in fp32 and rounded once. Nobody
    /// waits.
    ///
    /// # Errors
    /// [`Error::Usage`] for what the kernels do not take; [`Error::Cuda`], [`Error::OutOfMemory`].
    pub(crate) fn forward(
        &self,
        fused: &Tensor,
        gate_up: GateUp,
        activation: ExpertActivation,
    ) -> Result<Tensor> {
        let (rows, width) = self.check(fused)?;
        let output = Tensor::f_empty([rows, width], (Kind::BFloat16, self.device))?;
        let mut arguments = Arguments::new();
        arguments.tensor(fused).tensor(&output);
        self.launch(0, arguments, rows, width, gate_up, activation)?;
        Ok(output)
    }

    /// The gradient of `fused`, from that of the output.
    ///
    /// # Errors
    /// As [`GatedKernels::forward`].
    pub(crate) fn backward(
        &self,
        fused: &Tensor,
        gradient: &Tensor,
        gate_up: GateUp,
        activation: ExpertActivation,
    ) -> Result<Tensor> {
        let (rows, width) = self.check(fused)?;
        if gradient.size() != [rows, width]
            || gradient.f_kind()? != Kind::BFloat16
            || gradient.device() != self.device
        {
            let message = format!(
                "is {:?} {:?}, but must be bf16 [{rows}, {width}]",
                gradient.kind(),
                gradient.size()
            );
            return Err(Error::tensor("the gradient of an activation", message));
        }
        let gradient = gradient.f_contiguous()?;
        let result = fused.f_empty_like()?;
        let mut arguments = Arguments::new();
        arguments.tensor(fused).tensor(&gradient).tensor(&result);
        self.launch(1, arguments, rows, width, gate_up, activation)?;
        Ok(result)
    }

    fn check(&self, fused: &Tensor) -> Result<(i64, i64)> {
        if !self.take(fused) {
            return Err(Error::usage(format!(
                "{:?} {:?} is not for the kernels of {:?}",
                fused.kind(),
                fused.size(),
                self.device
            )));
        }
        let (rows, both) = fused.size2()?;
        Ok((rows, both / 2))
    }

    fn launch(
        &self,
        way: usize,
        mut arguments: Arguments,
        rows: i64,
        width: i64,
        gate_up: GateUp,
        activation: ExpertActivation,
    ) -> Result<()> {
        arguments.int(width).int(i64::from(gate_up == GateUp::Interleaved));
        let kernel = match activation {
            ExpertActivation::Silu => self.silu[way],
            ExpertActivation::ClampedSwiglu { alpha, limit } => {
                arguments.float(alpha as f32).float(limit as f32);
                self.clamped[way]
            }
        };
        let blocks = [rows, blocks_for(width, THREADS)];
        // SAFETY: these are the kernel's parameters; the sizes were checked.
        unsafe { self.module.launch(kernel, blocks, THREADS, arguments) }
    }
}
