//! Cutting pixels into the patches that a vision tower takes.

use blockstreamer_core::vision::VisionFormat;

/// The normalised value of every level of every channel.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Levels(Box<[[f32; 256]; 3]>);

impl Levels {
    /// `(level * rescale - mean) / std`, with mean and deviation brought to the scale of levels instead, as
    /// transformers does: one subtraction and one division in single precision.
    pub(super) fn new(mean: [f64; 3], std: [f64; 3], rescale: f64) -> Self {
        let mut table = Box::new([[0.0; 256]; 3]);
        let scale = (1.0 / rescale) as f32;
        for (values, (mean, std)) in table.iter_mut().zip(mean.iter().zip(&std)) {
            let (mean, std) = (*mean as f32 * scale, *std as f32 * scale);
            for (level, value) in values.iter_mut().enumerate() {
                *value = (level as f32 - mean) / std;
            }
        }
        Self(table)
    }
}

/// The values of all patches, one patch after another: `[t, h / merge, w / merge, merge, merge]` patches of
/// `[channel, frame, y, x]` values each, so that the patches of a merged cell lie together.
///
/// `frames` are RGB pictures, row by row, as many as `grid[0] * temporal_patch_size`.
pub(super) fn cut(
    frames: &[&[u8]],
    grid: [usize; 3],
    levels: &Levels,
    format: &VisionFormat,
) -> Vec<f32> {
    let [_, grid_height, grid_width] = grid;
    let (side, merge) = (format.patch_size, format.spatial_merge_size);
    let width = grid_width * side;
    let mut values = Vec::with_capacity(grid.iter().product::<usize>() * values_per_patch(format));
    for frames in frames.chunks(format.temporal_patch_size) {
        for (cell_y, cell_x) in pairs(grid_height / merge, grid_width / merge) {
            for (y, x) in pairs(merge, merge) {
                let (top, left) = ((cell_y * merge + y) * side, (cell_x * merge + x) * side);
                for (channel, table) in levels.0.iter().enumerate() {
                    for frame in frames {
                        for row in top..top + side {
                            let at = (row * width + left) * 3;
                            let pixels = frame[at..at + side * 3].chunks_exact(3);
                            values.extend(pixels.map(|pixel| table[usize::from(pixel[channel])]));
                        }
                    }
                }
            }
        }
    }
    values
}

/// Values of one patch.
pub(super) fn values_per_patch(format: &VisionFormat) -> usize {
    3 * format.temporal_patch_size * format.patch_size * format.patch_size
}

fn pairs(rows: usize, columns: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).flat_map(move |row| (0..columns).map(move |column| (row, column)))
}
