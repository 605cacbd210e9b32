//! Convolution forward, and the decode step.

use rayon::prelude::*;

use super::{Dims, Input, ROWS, TILE, Tile, check_dims, check_input, conv_forward_scratch};
use crate::error::{Result, check_len, check_shape};
use crate::scratch::take;
use crate::shared::Shared;
use crate::simd::{fma, silu_f32, simd_fn};
use crate::{Element, Scratch};

/// y [tokens, channels] and, unless `None`, the final states [sequences, W-1, channels].
pub fn conv_forward<T: Element, W: Element>(
    y: &mut [T],
    final_state: Option<&mut [T]>,
    input: &Input<'_, T, W>,
    dims: Dims,
    scratch: &Scratch,
) -> Result {
    let sequences = check_input(dims, input)?;
    check_len("y", y, input.x.len())?;
    if let Some(state) = &final_state {
        check_shape("final_state", state, [sequences, dims.channels, dims.width - 1])?;
    }
    if let Some(state) = final_state {
        for (sequence, state) in state.chunks_mut(dims.state_len()).enumerate() {
            store_final_state(state, input, dims, sequence);
        }
    }
    let y = Shared::new(y);
    Tile::all(dims.channels).for_each(|tile| {
        scratch.with(conv_forward_scratch(dims), |slot| run(&y, input, dims, sequences, tile, slot));
    });
    Ok(())
}

/// The last W-1 rows of (initial state, x), copied as they are stored.
fn store_final_state<T: Element, W>(state: &mut [T], input: &Input<'_, T, W>, dims: Dims, sequence: usize) {
    let (begin, end) = (input.cu_seqlens[sequence], input.cu_seqlens[sequence + 1]);
    let kept = dims.width - 1;
    for (i, row) in state.chunks_mut(dims.channels).enumerate() {
        // `i` counts from W-1 rows before the end; rows before the sequence come from its initial state.
        if end - begin + i >= kept {
            row.copy_from_slice(&input.x[(end + i - kept) * dims.channels..][..dims.channels]);
        } else if let Some(old) = input.state {
            let from = sequence * dims.state_len() + (end - begin + i) * dims.channels;
            row.copy_from_slice(&old[from..from + dims.channels]);
        } else {
            row.fill(T::default());
        }
    }
}

fn run<T: Element, W: Element>(
    y: &Shared<'_, T>,
    input: &Input<'_, T, W>,
    dims: Dims,
    sequences: usize,
    tile: Tile,
    mut slot: &mut [f32],
) {
    let before = dims.width - 1;
    let taps = tile.load_taps(&mut slot, input.weight, dims.width);
    let x = take(&mut slot, (ROWS + before) * TILE);
    let out = take(&mut slot, ROWS * TILE);
    x.fill(0.0);
    for sequence in 0..sequences {
        let (begin, end) = (input.cu_seqlens[sequence], input.cu_seqlens[sequence + 1]);
        for first in (0..end - begin).step_by(ROWS) {
            let rows = ROWS.min(end - begin - first);
            for (i, row) in x[..(rows + before) * TILE].chunks_mut(TILE).enumerate() {
                tile.load_row(row, input, dims, sequence, (first + i) as isize - before as isize);
            }
            convolve(out, x, taps, rows, dims.width);
            crate::simd::silu(&mut out[..rows * TILE]);
            for (i, out) in out.chunks(TILE).take(rows).enumerate() {
                let at = (begin + first + i) * dims.channels + tile.first;
                // SAFETY: a token's channels of this tile belong to this task alone.
                T::store(unsafe { y.part(at, tile.len) }, &out[..tile.len]);
            }
        }
    }
}

simd_fn! {
    /// Rows i of `out` = sum_j taps_j x_{i+j}; all rows are TILE wide.
    pub(super) fn convolve(out: &mut [f32], x: &[f32], taps: &[f32], rows: usize, width: usize) {
        for i in 0..rows {
            let out = &mut out[i * TILE..(i + 1) * TILE];
            let (x, taps) = (&x[i * TILE..(i + width) * TILE], &taps[..width * TILE]);
            for c in (0..TILE).step_by(16) {
                let mut sum = [0f32; 16];
                for j in 0..width {
                    let x: &[f32; 16] = x[j * TILE + c..].first_chunk().unwrap();
                    let tap: &[f32; 16] = taps[j * TILE + c..].first_chunk().unwrap();
                    for l in 0..16 {
                        sum[l] = fma::<FMA>(tap[l], x[l], sum[l]);
                    }
                }
                out[c..c + 16].copy_from_slice(&sum);
            }
        }
    }
}

/// y \[channels\] of one token x \[channels\]; `state` [W-1, channels] is updated. For decoding.
pub fn conv_step<T: Element, W: Element>(
    y: &mut [T],
    state: &mut [T],
    x: &[T],
    weight: &[W],
    dims: Dims,
) -> Result {
    check_dims(dims)?;
    check_len("y", y, dims.channels)?;
    check_shape("state", state, [dims.channels, dims.width - 1])?;
    check_len("x", x, dims.channels)?;
    check_shape("weight", weight, [dims.channels, dims.width])?;
    step(y, state, x, weight, dims);
    state.copy_within(dims.channels.., 0);
    state[dims.state_len() - dims.channels..].copy_from_slice(x);
    Ok(())
}

simd_fn! {
    fn step<T: Element, W: Element>(y: &mut [T], state: &[T], x: &[T], weight: &[W], dims: Dims) {
        for (c, (y, taps)) in y.iter_mut().zip(weight.chunks(dims.width)).enumerate() {
            let (last, taps) = taps.split_last().unwrap();
            let mut sum = 0.0;
            for (tap, row) in taps.iter().zip(state.chunks(dims.channels)) {
                sum = fma::<FMA>(tap.to_f32(), row[c].to_f32(), sum);
            }
            sum = fma::<FMA>(last.to_f32(), x[c].to_f32(), sum);
            *y = T::from_f32(silu_f32::<FMA>(sum));
        }
    }
}
