//! Fused attention over a sliding window.
//!
//! Queries are cut into tiles as long as the window. What a tile sees lies in itself and the tile before, so
//! every tile is an attention of its own over two tiles of keys and the sink, and neither time nor memory
//! grows with the square of the sequence. The query heads that share a key head become rows of one product:
//! keys are never repeated for them.

use tch::{Kind, Tensor};

use super::Call;
use super::full::with_sink;
use super::sinks::Inputs;
use crate::error::Result;

impl Call<'_> {
    pub(super) fn tiled(&self, window: i64) -> Result<Tensor> {
        let &Self { batch, heads, groups, sharing, sequence, scale, .. } = self;
        let tiles = (sequence + window - 1) / window;
        let missing = tiles * window - sequence;
        let Inputs { query, key, value, sink } = self.inputs()?;

        let query = query.f_constant_pad_nd([0, 0, 0, missing])?;
        let query = query.f_view([batch, groups, sharing, tiles, window, -1])?;
        let query = query.f_permute([0, 3, 1, 2, 4, 5])?;
        let query = query.f_reshape([batch * tiles, groups, sharing * window, -1])?;

        // [batch, groups, sequence, width] -> [batch * tiles, groups, 2 * window, width], behind `first`.
        let neighbours = |tensor: &Tensor, first: Option<&Tensor>| -> Result<Tensor> {
            let padded = tensor.f_constant_pad_nd([0, 0, window, missing])?;
            let width = tensor.size4()?.3;
            let from = |start: i64| -> Result<Tensor> {
                let part = padded.f_narrow(2, start, tiles * window)?;
                Ok(part.f_view([batch, groups, tiles, window, width])?.f_transpose(1, 2)?)
            };
            let first = first.map(|first| {
                first.f_unsqueeze(1)?.f_expand([batch, tiles, groups, 1, width], false)
            });
            let first = first.transpose()?;
            let parts: Vec<_> = first.into_iter().chain([from(0)?, from(window)?]).collect();
            Ok(Tensor::f_cat(&parts, 3)?.f_flatten(0, 1)?)
        };
        let key = neighbours(&key, sink.as_ref())?;
        let no_value =
            sink.as_ref().map(|_| value.f_narrow(2, 0, 1)?.f_zeros_like()).transpose()?;
        let value = neighbours(&value, no_value.as_ref())?;
        let mask = self.tile_mask(window, tiles, sink.is_some())?;

        let output = Tensor::f_scaled_dot_product_attention(
            &query,
            &key,
            &value,
            Some(&mask),
            0.0,
            false,
            scale,
            false,
        )?;
        let output = output.f_view([batch, tiles, groups, sharing, window, -1])?;
        let output = output.f_permute([0, 2, 3, 1, 4, 5])?;
        let output = output.f_reshape([batch, heads, tiles * window, -1])?;
        Ok(output.f_narrow(2, 0, sequence)?.f_narrow(3, 0, self.value.size4()?.3)?)
    }

    /// Which keys of its two tiles each query sees, Bool, `[batch * tiles, 1, sharing * window, keys]`.
    fn tile_mask(&self, window: i64, tiles: i64, has_sink: bool) -> Result<Tensor> {
        let &Self { batch, sharing, sequence, .. } = self;
        let device = self.query.device();
        let missing = tiles * window - sequence;
        // [rows, sequence] -> [rows, tiles, 1, 2 * window]; what is outside the sequence is 0.
        let neighbours = |tensor: &Tensor| -> Result<Tensor> {
            let padded = tensor.f_constant_pad_nd([window, missing])?;
            let from = |start: i64| {
                padded.f_narrow(1, start, tiles * window)?.f_reshape([-1, tiles, 1, window])
            };
            Ok(Tensor::f_cat(&[from(0)?, from(window)?], 3)?)
        };
        let ones = |rows, columns| Tensor::f_ones([rows, columns], (Kind::Bool, device));

        // Query i of a tile stands at place window + i of its keys.
        let reach = ones(window, 2 * window)?.f_tril(window)?;
        let present = match &self.pattern.key_mask {
            Some(key_mask) => neighbours(key_mask)?,
            None => neighbours(&ones(1, sequence)?)?,
        };
        let mut mask = present.f_logical_and(&reach.f_triu(1)?)?;
        if let Some(segments) = &self.pattern.segments {
            let of_query = segments.f_constant_pad_nd([0, missing])?;
            let of_query = of_query.f_view([-1, tiles, window, 1])?;
            mask = mask.f_logical_and(&of_query.f_eq_tensor(&neighbours(segments)?)?)?;
        }
        mask = match has_sink {
            true => with_sink(&mask)?,
            // Padding needs something to normalise by.
            false => mask.f_logical_or(&reach.f_triu(window)?)?,
        };
        let keys = mask.size4()?.3;
        let mask = mask.f_unsqueeze(2)?;
        let mask = mask.f_expand([batch, tiles, sharing, window, keys], false)?;
        Ok(mask.f_reshape([batch * tiles, 1, sharing * window, keys])?)
    }
}
