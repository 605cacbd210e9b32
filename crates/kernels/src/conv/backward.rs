//! Convolution backward: recomputes p from x, and dp also for the W-1 tokens after a block.

use rayon::prelude::*;

use super::forward::convolve;
use super::{Dims, Input, ROWS, TILE, Tile, check_input, conv_backward_scratch};
use crate::error::{Result, check_len, check_shape};
use crate::scratch::take;
use crate::shared::Shared;
use crate::simd::{fma, sigmoid_f32, simd_fn};
use crate::{Element, Scratch};

/// Gradients.
pub struct Grads<'a, T> {
    /// [tokens, channels], written
    pub dx: &'a mut [T],
    /// [channels, 1, W], accumulated
    pub dweight: &'a mut [f32],
    /// [sequences, W-1, channels], written: the gradient of the initial states
    pub dstate: Option<&'a mut [T]>,
}

struct Targets<'a, T> {
    dx: Shared<'a, T>,
    dweight: Shared<'a, f32>,
    dstate: Option<Shared<'a, T>>,
}

/// All gradients from dy [tokens, channels] and, unless `None`, dfinal_state [sequences, W-1, channels].
pub fn conv_backward<T: Element, W: Element>(
    grads: Grads<'_, T>,
    dy: &[T],
    dfinal_state: Option<&[T]>,
    input: &Input<'_, T, W>,
    dims: Dims,
    scratch: &Scratch,
) -> Result {
    let sequences = check_input(dims, input)?;
    check_len("dx", grads.dx, input.x.len())?;
    check_shape("dweight", grads.dweight, [dims.channels, dims.width])?;
    check_len("dy", dy, input.x.len())?;
    if let Some(dstate) = &grads.dstate {
        check_shape("dstate", dstate, [sequences, dims.channels, dims.width - 1])?;
    }
    if let Some(dfinal) = dfinal_state {
        check_shape("dfinal_state", dfinal, [sequences, dims.channels, dims.width - 1])?;
    }
    let targets = Targets {
        dx: Shared::new(grads.dx),
        dweight: Shared::new(grads.dweight),
        dstate: grads.dstate.map(Shared::new),
    };
    Tile::all(dims.channels).for_each(|tile| {
        scratch.with(conv_backward_scratch(dims), |mut slot| {
            let taps = tile.load_taps(&mut slot, input.weight, dims.width);
            let dtaps = take(&mut slot, dims.width * TILE);
            dtaps.fill(0.0);
            for sequence in 0..sequences {
                run(&targets, dtaps, dy, dfinal_state, input, taps, dims, sequence, tile, slot);
            }
            // SAFETY: the taps of these channels belong to this task alone.
            let dweight = unsafe { targets.dweight.part(tile.first * dims.width, tile.len * dims.width) };
            for (c, row) in dweight.chunks_mut(dims.width).enumerate() {
                for (j, dw) in row.iter_mut().enumerate() {
                    *dw += dtaps[j * TILE + c];
                }
            }
        });
    });
    Ok(())
}

fn run<T: Element, W: Element>(
    targets: &Targets<'_, T>,
    dtaps: &mut [f32],
    dy: &[T],
    dfinal_state: Option<&[T]>,
    input: &Input<'_, T, W>,
    taps: &[f32],
    dims: Dims,
    sequence: usize,
    tile: Tile,
    mut slot: &mut [f32],
) {
    let before = dims.width - 1;
    let x = take(&mut slot, (ROWS + 2 * before) * TILE);
    let dp = take(&mut slot, (ROWS + before) * TILE);
    let out = take(&mut slot, TILE);
    x.fill(0.0);
    let (begin, end) = (input.cu_seqlens[sequence], input.cu_seqlens[sequence + 1]);
    let tokens = end - begin;
    let store = |i: isize, out: &mut [f32]| {
        // The final state holds the last W-1 rows of (initial state, x) as they are.
        let final_row = i - (tokens as isize - before as isize);
        if let (Some(dfinal), 0..) = (dfinal_state, final_row) {
            let at = sequence * dims.state_len() + final_row as usize * dims.channels + tile.first;
            for (out, d) in out.iter_mut().zip(&dfinal[at..at + tile.len]) {
                *out += d.to_f32();
            }
        }
        // SAFETY: a token's (or a state row's) channels of this tile belong to this task alone.
        unsafe {
            if i >= 0 {
                let at = (begin + i as usize) * dims.channels + tile.first;
                T::store(targets.dx.part(at, tile.len), &out[..tile.len]);
            } else if let Some(dstate) = &targets.dstate {
                let row = (before as isize + i) as usize;
                let at = sequence * dims.state_len() + row * dims.channels + tile.first;
                T::store(dstate.part(at, tile.len), &out[..tile.len]);
            }
        }
    };
    // Rows of (state, x): first those of the state, as a block of their own. dp exists for tokens only.
    let blocks = std::iter::once((-(before as isize), before))
        .chain((0..tokens).step_by(ROWS).map(|first| (first as isize, ROWS.min(tokens - first))));
    for (first, rows) in blocks {
        // dp of the tokens from `first` on that depend on rows `first..first + rows`
        let dp_first = first.max(0) as usize;
        let dp_rows = ((first + (rows + before) as isize) as usize).min(tokens).saturating_sub(dp_first);
        for (i, row) in x[..(dp_rows + before) * TILE].chunks_mut(TILE).enumerate() {
            tile.load_row(row, input, dims, sequence, (dp_first + i) as isize - before as isize);
        }
        convolve(dp, x, taps, dp_rows, dims.width);
        for (i, dp) in dp.chunks_mut(TILE).take(dp_rows).enumerate() {
            let at = (begin + dp_first + i) * dims.channels + tile.first;
            silu_backward(&mut dp[..tile.len], &dy[at..at + tile.len]);
        }
        if first >= 0 {
            add_dtaps(dtaps, dp, x, rows, dims.width);
        }
        for i in 0..rows {
            // dx_t = sum_j w_j dp_{t+(W-1)-j}, over the tokens that exist
            out.fill(0.0);
            for j in 0..dims.width {
                let at = first + (i + before - j) as isize - dp_first as isize;
                if (0..dp_rows as isize).contains(&at) {
                    add_product(out, &taps[j * TILE..(j + 1) * TILE], &dp[at as usize * TILE..][..TILE]);
                }
            }
            store(first + i as isize, out);
        }
    }
}

simd_fn! {
    /// Replaces p by dp.
    fn silu_backward<T: Element>(p: &mut [f32], dy: &[T]) {
        for (p, dy) in p.iter_mut().zip(dy) {
            let s = sigmoid_f32::<FMA>(*p);
            *p = dy.to_f32() * (s + *p * s * (1.0 - s));
        }
    }
}

simd_fn! {
    fn add_product(out: &mut [f32], a: &[f32], b: &[f32]) {
        for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
            *out = fma::<FMA>(*a, *b, *out);
        }
    }
}

simd_fn! {
    /// dtaps_j += sum_i dp_i x_{i+j} over the block's own rows.
    fn add_dtaps(dtaps: &mut [f32], dp: &[f32], x: &[f32], rows: usize, width: usize) {
        for j in 0..width {
            for c in (0..TILE).step_by(16) {
                let mut sum = [0f32; 16];
                for i in 0..rows {
                    let dp: &[f32; 16] = dp[i * TILE + c..].first_chunk().unwrap();
                    let x: &[f32; 16] = x[(i + j) * TILE + c..].first_chunk().unwrap();
                    for l in 0..16 {
                        sum[l] = fma::<FMA>(dp[l], x[l], sum[l]);
                    }
                }
                for l in 0..16 {
                    dtaps[j * TILE + c + l] += sum[l];
                }
            }
        }
    }
}
