//! Reading, changing and writing the tensors, piece by piece.

use std::fs::File;
use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::plan::{Change, Job, Packed, Plan, Work, matrix_name};
use super::{MergeOptions, PackingLoss};
use crate::checkpoint::{
    Checkpoint, StoredTensor, WeightFiles, open, read_exact_at, tensor_bytes, tensor_from_bytes,
};
use crate::error::{Error, Result};
use crate::numerics::Mxfp4;

/// Carries out `plan`. `done` hears the tensor at hand and the bytes written so far.
pub(super) fn run(
    plan: &Plan<'_>,
    checkpoint: &Checkpoint,
    options: &MergeOptions,
    files: &WeightFiles,
    done: &mut dyn FnMut(&str, u64),
) -> Result<Vec<PackingLoss>> {
    let sources = checkpoint.files.iter().map(|file| open(&file.path)).collect::<Result<_>>()?;
    let mut worker = Worker {
        plan,
        checkpoint,
        sources,
        options,
        files,
        done,
        done_bytes: 0,
        losses: Vec::new(),
    };
    for Job { output, work } in &plan.jobs {
        worker.report(*output, 0);
        match work {
            Work::Copy(stored) => worker.copy(*output, stored)?,
            Work::Add(stored, change) => worker.add(*output, stored, change)?,
            Work::Unpack(packed, change) => worker.unpack(*output, packed, change.as_ref())?,
            Work::Repack(packed, change, scales) => {
                worker.repack([*output, *scales], packed, change)?;
            }
        }
    }
    Ok(worker.losses)
}

struct Worker<'a> {
    plan: &'a Plan<'a>,
    checkpoint: &'a Checkpoint,
    /// The checkpoint's files.
    sources: Vec<File>,
    options: &'a MergeOptions,
    files: &'a WeightFiles,
    done: &'a mut dyn FnMut(&str, u64),
    done_bytes: u64,
    losses: Vec<PackingLoss>,
}

impl Worker<'_> {
    fn copy(&mut self, output: usize, stored: &StoredTensor) -> Result<()> {
        for start in (0..stored.num_bytes).step_by(self.options.piece_bytes.max(1)) {
            let end = stored.num_bytes.min(start + self.options.piece_bytes.max(1));
            let bytes = self.read_bytes(stored, start..end)?;
            self.write_bytes(output, start, &bytes)?;
        }
        Ok(())
    }

    fn add(&mut self, output: usize, stored: &StoredTensor, change: &Change) -> Result<()> {
        for rows in self.pieces(stored.shape[0], stored.shape[1..].iter().product()) {
            let weight = self.read_rows(stored, &rows)?;
            let kind = weight.f_kind()?;
            let mut merged = change.rows(&rows)?;
            if kind == Kind::Double {
                merged = merged.f_to_kind(kind)?;
            }
            let _ = merged.f_add_(&weight.f_to_kind(merged.f_kind()?)?)?;
            self.write_rows(output, &rows, &merged, kind)?;
        }
        Ok(())
    }

    fn unpack(
        &mut self,
        output: usize,
        packed: &Packed<'_>,
        change: Option<&Change>,
    ) -> Result<()> {
        for rows in self.expert_pieces(packed.blocks) {
            let mut weight = self.read_packed(packed, &rows)?.unpack(Kind::Float)?;
            if let Some(change) = change {
                let _ = weight.f_add_(&change.rows(&rows)?)?;
            }
            self.write_rows(output, &rows, &weight.f_transpose(1, 2)?, Kind::BFloat16)?;
        }
        Ok(())
    }

    fn repack(
        &mut self,
        [codes, scales]: [usize; 2],
        packed: &Packed<'_>,
        change: &Change,
    ) -> Result<()> {
        let name = matrix_name(&self.plan.outputs[codes].name)?.to_owned();
        let mut loss = PackingLoss::new(name);
        for rows in self.expert_pieces(packed.blocks) {
            let before = self.read_packed(packed, &rows)?.unpack(Kind::Float)?;
            let change = change.rows(&rows)?;
            let merged = before.f_add(&change)?;
            self.check_finite(codes, &merged)?;
            let packed = Mxfp4::pack(&merged)?;
            drop(merged);
            loss.add(&before, &change, &packed.unpack(Kind::Float)?)?;
            self.write_rows(codes, &rows, packed.blocks(), Kind::Uint8)?;
            self.write_rows(scales, &rows, packed.scales(), Kind::Uint8)?;
        }
        self.losses.push(loss);
        Ok(())
    }

    /// Ranges of `num_rows` rows of so many elements, each of about the size of a piece.
    fn pieces(&self, num_rows: usize, row_elements: usize) -> Vec<Range<usize>> {
        let piece_elements = self.options.piece_bytes / size_of::<f32>();
        let len = (piece_elements / row_elements.max(1)).max(1);
        (0..num_rows).step_by(len).map(|start| start..num_rows.min(start + len)).collect()
    }

    fn expert_pieces(&self, blocks: &StoredTensor) -> Vec<Range<usize>> {
        self.pieces(blocks.shape[0], blocks.shape[1..].iter().product::<usize>() * 2)
    }

    fn read_packed(&self, packed: &Packed<'_>, rows: &Range<usize>) -> Result<Mxfp4> {
        Mxfp4::new(self.read_rows(packed.blocks, rows)?, self.read_rows(packed.scales, rows)?)
    }

    /// Rows of the outermost dimension, on the device.
    fn read_rows(&self, stored: &StoredTensor, rows: &Range<usize>) -> Result<Tensor> {
        let row_bytes = stored.num_bytes / stored.shape[0];
        let bytes = self.read_bytes(stored, rows.start * row_bytes..rows.end * row_bytes)?;
        let mut shape = stored.shape.clone();
        shape[0] = rows.len();
        let tensor = tensor_from_bytes(stored.dtype, &shape, &bytes)?;
        Ok(tensor.f_to_device(self.options.device)?)
    }

    fn read_bytes(&self, stored: &StoredTensor, range: Range<usize>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; range.len()];
        let path = &self.checkpoint.files[stored.file].path;
        let start = stored.offset_bytes + range.start as u64;
        read_exact_at(&self.sources[stored.file], path, start, &mut bytes)?;
        Ok(bytes)
    }

    /// Writes rows of the outermost dimension, rounded to `kind`.
    fn write_rows(
        &mut self,
        output: usize,
        rows: &Range<usize>,
        values: &Tensor,
        kind: Kind,
    ) -> Result<()> {
        let rounded = values.f_to_kind(kind)?;
        if kind != Kind::Uint8 {
            self.check_finite(output, &rounded)?;
        }
        let bytes = tensor_bytes(&rounded.f_to_device(Device::Cpu)?)?;
        self.write_bytes(output, rows.start * (bytes.len() / rows.len()), &bytes)
    }

    fn check_finite(&self, output: usize, values: &Tensor) -> Result<()> {
        // What is not finite stays so in a sum, which takes no memory; a sum alone may be too large.
        if values.f_sum(Kind::Float)?.f_double_value(&[])?.is_finite()
            || values.f_isfinite()?.f_all()?.f_int64_value(&[])? == 1
        {
            return Ok(());
        }
        let message = format!(
            "is not finite after merging, in {:?}; the adapter or the checkpoint holds values that are no \
             numbers, or the sum is too large for this dtype",
            values.f_kind()?
        );
        Err(Error::tensor(&self.plan.outputs[output].name, message))
    }

    fn write_bytes(&mut self, output: usize, start_bytes: usize, bytes: &[u8]) -> Result<()> {
        self.files.write(output, start_bytes, bytes)?;
        self.report(output, bytes.len() as u64);
        Ok(())
    }

    fn report(&mut self, output: usize, num_bytes: u64) {
        self.done_bytes += num_bytes;
        (self.done)(&self.plan.outputs[output].name, self.done_bytes);
    }
}

impl Change {
    /// What is added to these rows of the outermost dimension, as they are stored, in fp32: output features
    /// of a matrix, experts of a stack.
    fn rows(&self, rows: &Range<usize>) -> Result<Tensor> {
        let (a, b) = (&self.factors.a, &self.factors.b);
        let (start, len) = (rows.start as i64, rows.len() as i64);
        let mut product = match (self.is_stack, self.is_transposed) {
            (false, _) => b.f_select(0, 0)?.f_narrow(0, start, len)?.f_mm(&a.f_select(0, 0)?)?,
            (true, is_transposed) => {
                let (a, b) = (a.f_narrow(0, start, len)?, b.f_narrow(0, start, len)?);
                match is_transposed {
                    false => b.f_bmm(&a)?,
                    true => a.f_transpose(1, 2)?.f_bmm(&b.f_transpose(1, 2)?)?,
                }
            }
        };
        // The product first, then the scaling, as in PEFT.
        Ok(product.f_mul_scalar_(self.factors.scaling)?)
    }
}
