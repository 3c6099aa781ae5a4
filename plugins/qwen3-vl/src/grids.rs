//! What the tower needs to know of every patch, worked out from the sizes of pictures alone.
//!
//! Patches come frame by frame, and within a frame cell by cell: the patches that are merged lie together.

use blockstreamer_core::Result;
use blockstreamer_core::tch::Tensor;

/// Entries of the position table that each patch lies between, for each axis.
const TAPS_PER_AXIS: usize = 2;

/// Tables with one entry per patch, in the order of the patches.
#[derive(Debug, Default)]
pub(crate) struct PatchTables {
    taps: Vec<i64>,
    tap_weights: Vec<f32>,
    rows: Vec<i64>,
    columns: Vec<i64>,
    segments: Vec<i64>,
}

/// A position on one axis of the table: two neighbours and the weight of each.
type Taps = [(i64, f32); TAPS_PER_AXIS];

/// Where place `index` of `size` lies on an axis of the table, whose ends are the picture's ends.
fn taps(index: usize, size: usize, table_side: usize) -> Taps {
    // Operation by operation in fp32 as transformers does.
    let last = (table_side - 1) as f32;
    let source = index as f32 * last / (size - 1).max(1) as f32;
    let floor = source.floor();
    [0.0, 1.0].map(|offset| {
        let entry = (floor + offset).clamp(0.0, last);
        let distance = (source - floor - offset).abs();
        (entry as i64, (1.0 - distance).max(0.0))
    })
}

impl PatchTables {
    /// Adds a picture or film of `grid` patches (time, height, width), of which `merge` by `merge` make a
    /// cell. `table_side` is that of the square position table.
    pub(crate) fn add(&mut self, grid: [usize; 3], merge: usize, table_side: usize) {
        let [frames, height, width] = grid;
        let on_axis = |size| (0..size).map(|index| taps(index, size, table_side)).collect();
        let (by_row, by_column): (Vec<Taps>, Vec<Taps>) = (on_axis(height), on_axis(width));
        for _ in 0..frames {
            self.segments.push((height * width) as i64);
            for cell in 0..height / merge * (width / merge) {
                let (cell_row, cell_column) = (cell / (width / merge), cell % (width / merge));
                for inside in 0..merge * merge {
                    let row = cell_row * merge + inside / merge;
                    let column = cell_column * merge + inside % merge;
                    self.rows.push(row as i64);
                    self.columns.push(column as i64);
                    for (above, down) in by_row[row] {
                        for (left, across) in by_column[column] {
                            self.taps.push(above * table_side as i64 + left);
                            self.tap_weights.push(down * across);
                        }
                    }
                }
            }
        }
    }

    /// Entries of the flattened position table, `[num_patches, 4]`, Int64.
    pub(crate) fn taps(&self) -> Result<Tensor> {
        Ok(Tensor::f_from_slice(&self.taps)?
            .f_view([-1, (TAPS_PER_AXIS * TAPS_PER_AXIS) as i64])?)
    }

    /// The weight of each, `[num_patches, 4]`, fp32.
    pub(crate) fn tap_weights(&self) -> Result<Tensor> {
        let weights = Tensor::f_from_slice(&self.tap_weights)?;
        Ok(weights.f_view([-1, (TAPS_PER_AXIS * TAPS_PER_AXIS) as i64])?)
    }

    /// Row and column of every patch in its frame, `[2, 1, num_patches]`, Int64.
    pub(crate) fn coordinates(&self) -> Result<Tensor> {
        let axes = [Tensor::f_from_slice(&self.rows)?, Tensor::f_from_slice(&self.columns)?];
        Ok(Tensor::f_stack(&axes, 0)?.f_unsqueeze(1)?)
    }

    /// Patches of every frame, `[num_frames]`, Int64.
    pub(crate) fn segments(&self) -> Result<Tensor> {
        Ok(Tensor::f_from_slice(&self.segments)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_come_cell_by_cell_and_frame_by_frame() {
        let mut tables = PatchTables::default();
        tables.add([2, 2, 4], 2, 5);
        tables.add([1, 4, 2], 2, 5);
        assert_eq!(tables.segments, [8, 8, 8]);
        let frame = ([0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 2, 3, 2, 3]);
        assert_eq!((&tables.rows[..8], &tables.columns[..8]), (&frame.0[..], &frame.1[..]));
        assert_eq!((&tables.rows[8..16], &tables.columns[8..16]), (&frame.0[..], &frame.1[..]));
        assert_eq!(tables.rows[16..], [0, 0, 1, 1, 2, 2, 3, 3]);
        assert_eq!(tables.columns[16..], [0, 1].repeat(4));
        assert_eq!(tables.coordinates().unwrap().size(), [2, 1, 24]);
        assert_eq!(tables.taps().unwrap().size(), [24, 4]);
    }

    #[test]
    fn ends_of_a_picture_are_ends_of_the_table_and_weights_add_up_to_one() {
        assert_eq!(taps(0, 7, 48)[0], (0, 1.0));
        assert_eq!(taps(6, 7, 48), [(47, 1.0), (47, 0.0)]);
        // A single row lies at the beginning.
        assert_eq!(taps(0, 1, 48)[0], (0, 1.0));
        // As many patches as entries: each is one entry.
        for index in 0..48 {
            assert_eq!(taps(index, 48, 48)[0], (index as i64, 1.0));
        }
        // Halfway between two entries.
        assert_eq!(taps(1, 3, 4), [(1, 0.5), (2, 0.5)]);
        for size in 1..100 {
            for index in 0..size {
                let [(left, a), (right, b)] = taps(index, size, 48);
                assert!((a + b - 1.0).abs() < 1e-6);
                let place = left as f32 * a + right as f32 * b;
                let wanted = index as f32 * 47.0 / (size - 1).max(1) as f32;
                assert!((place - wanted).abs() < 1e-4, "{index} of {size}");
            }
        }
    }

    #[test]
    fn a_patch_between_entries_takes_from_all_four() {
        let mut tables = PatchTables::default();
        tables.add([1, 2, 2], 1, 2);
        let corners = Vec::<Vec<f32>>::try_from(tables.tap_weights().unwrap()).unwrap();
        for (patch, weights) in corners.iter().enumerate() {
            // Two by two patches on two by two entries: each is the entry of its own number.
            let taps = &tables.taps[patch * 4..patch * 4 + 4];
            let sum: f32 = weights.iter().sum();
            assert_eq!(sum, 1.0);
            let whole = weights.iter().position(|weight| *weight == 1.0).unwrap();
            assert_eq!(taps[whole], patch as i64);
        }
        let mut middle = PatchTables::default();
        middle.add([1, 3, 3], 1, 2);
        assert_eq!(middle.taps[16..20], [0, 1, 2, 3]);
        assert_eq!(middle.tap_weights[16..20], [0.25; 4]);
    }
}
