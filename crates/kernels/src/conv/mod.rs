//! Causal depthwise convolution with SiLU, over packed sequences.
//!
//! x, y [tokens, channels]; weight [channels, 1, W], whose tap W-1 is for the current token; no bias:
//! ```text
//! p_t = sum_j w_j x_{t-(W-1)+j}      y_t = silu(p_t)                       for each channel
//! dp_t = dy_t (s + p_t s (1 - s)),  s = sigmoid(p_t)
//! dx_t = sum_j w_j dp_{t+(W-1)-j}    dw_j = sum_t dp_t x_{t-(W-1)+j}
//! ```
//! The rows before the first token of a sequence are its initial state [W-1, channels], oldest row first, or
//! zeros; never the sequence before. The final state is the last W-1 rows of (initial state, x). Decoding
//! continues from it, one token at a time, with [`conv_step`]. Backward needs only x; p is recomputed.
//!
//! A task owns a tile of channels and all tokens, so dw is summed in the order of the tokens.
//!
//! # Example
//! ```
//! use ballast_kernels::{Scratch, conv};
//!
//! let silu = |x: f32| x / (1.0 + (-x).exp());
//! let dims = conv::Dims { channels: 1, width: 2 };
//! let (x, weight) = ([1.0f32, 2.0, 3.0], [1.0f32, 1.0]);
//! let input = conv::Input { x: &x, weight: &weight, state: None, cu_seqlens: &[0, 3] };
//! let scratch = Scratch::new(conv::conv_forward_scratch(dims).max(conv::conv_backward_scratch(dims)));
//! let (mut y, mut state) = ([0.0; 3], [0.0; 1]);
//! conv::conv_forward(&mut y, Some(&mut state), &input, dims, &scratch)?;
//! assert!((y[2] - silu(2.0 + 3.0)).abs() < 1e-5);
//!
//! // Decoding continues from the final state.
//! let mut next = [0.0];
//! conv::conv_step(&mut next, &mut state, &[4.0], &weight, dims)?;
//! assert!((next[0] - silu(3.0 + 4.0)).abs() < 1e-5);
//!
//! let (mut dx, mut dweight) = ([0.0; 3], [0.0; 2]);
//! let grads = conv::Grads { dx: &mut dx, dweight: &mut dweight, dstate: None };
//! conv::conv_backward(grads, &[1.0; 3], None, &input, dims, &scratch)?;
//! assert!(dweight[1] > dweight[0]);
//! # Ok::<(), ballast_kernels::KernelError>(())
//! ```

mod backward;
mod forward;

#[cfg(test)]
mod tests;

pub use backward::{Grads, conv_backward};
pub use forward::{conv_forward, conv_step};

use crate::Element;
use crate::error::{Result, check, check_shape};
use crate::gated_delta_rule::check_cu_seqlens;
use crate::scratch::take;

/// Channels per task.
const TILE: usize = 128;

/// Tokens that are widened together.
const ROWS: usize = 32;

/// Largest kernel width.
pub const MAX_WIDTH: usize = 8;

/// Channels and taps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Channels of x and y.
    pub channels: usize,
    /// W: taps of the kernel, 2 to 8.
    pub width: usize,
}

impl Dims {
    /// Number of elements of one sequence's state.
    pub fn state_len(&self) -> usize {
        (self.width - 1) * self.channels
    }
}

/// Inputs; `tokens` is the last entry of `cu_seqlens`.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a, T, W> {
    /// [tokens, channels]
    pub x: &'a [T],
    /// [channels, 1, W]
    pub weight: &'a [W],
    /// [sequences, W-1, channels]: initial states; `None` is zero
    pub state: Option<&'a [T]>,
    /// Offsets of the sequences: starts with 0, never decreases. The convolution restarts at each boundary.
    pub cu_seqlens: &'a [usize],
}

/// Number of f32 of one scratch slot of [`conv_forward`].
pub fn conv_forward_scratch(dims: Dims) -> usize {
    (dims.width + (ROWS + dims.width - 1) + ROWS) * TILE
}

/// Number of f32 of one scratch slot of [`conv_backward`].
pub fn conv_backward_scratch(dims: Dims) -> usize {
    // taps and their gradients; x with the rows before and after; dp with the rows after; one row of dx
    (2 * dims.width + (ROWS + 2 * (dims.width - 1)) + (ROWS + dims.width - 1) + 1) * TILE
}

fn check_dims(dims: Dims) -> Result {
    check(dims.channels > 0, || "channels must be 1 or more, got 0".into())?;
    check((2..=MAX_WIDTH).contains(&dims.width), || {
        format!("kernel width must be 2 to {MAX_WIDTH}, got {}", dims.width)
    })
}

/// Returns the number of sequences.
fn check_input<T, W>(dims: Dims, input: &Input<'_, T, W>) -> Result<usize> {
    check_dims(dims)?;
    let tokens = check_cu_seqlens(input.cu_seqlens)?;
    let sequences = input.cu_seqlens.len() - 1;
    check_shape("x", input.x, [tokens, dims.channels])?;
    check_shape("weight", input.weight, [dims.channels, dims.width])?;
    if let Some(state) = input.state {
        check_shape("state", state, [sequences, dims.channels, dims.width - 1])?;
    }
    Ok(sequences)
}

/// Tile of channels: the first one and their number.
#[derive(Clone, Copy)]
struct Tile {
    first: usize,
    len: usize,
}

impl Tile {
    fn all(channels: usize) -> impl rayon::iter::IndexedParallelIterator<Item = Tile> {
        use rayon::prelude::*;
        (0..channels.div_ceil(TILE))
            .into_par_iter()
            .map(move |i| Tile { first: i * TILE, len: TILE.min(channels - i * TILE) })
    }

    /// Loads row `i` of the sequence (state, x): rows before 0 are those of the state, or zeros.
    fn load_row<T: Element, W>(
        self,
        target: &mut [f32],
        input: &Input<'_, T, W>,
        dims: Dims,
        sequence: usize,
        i: isize,
    ) {
        let target = &mut target[..self.len];
        if i >= 0 {
            let at = (input.cu_seqlens[sequence] + i as usize) * dims.channels + self.first;
            return T::load(target, &input.x[at..at + self.len]);
        }
        match input.state {
            Some(state) => {
                let row = (dims.width as isize - 1 + i) as usize;
                let at = sequence * dims.state_len() + row * dims.channels + self.first;
                T::load(target, &state[at..at + self.len]);
            }
            None => target.fill(0.0),
        }
    }

    /// Loads the taps as [W, TILE]; channels beyond the tile are zeros.
    fn load_taps<'a, W: Element>(
        self,
        slot: &mut &'a mut [f32],
        weight: &[W],
        width: usize,
    ) -> &'a mut [f32] {
        let taps = take(slot, width * TILE);
        taps.fill(0.0);
        for c in 0..self.len {
            for j in 0..width {
                taps[j * TILE + c] = weight[(self.first + c) * width + j].to_f32();
            }
        }
        taps
    }
}
