//! Norms over the last dimension: rows x \[width\], f32 arithmetic.
//!
//! ```text
//! RMSNorm        r = 1/sqrt(mean x^2 + eps)      x^ = x r           y = x^ gamma        gamma = 1 + w, w, or 1
//!                dx = r (gamma dy - x^ mean(x^ gamma dy))           dw = sum dy x^
//! LayerNorm      r = 1/sqrt(mean (x - m)^2 + eps)  x^ = (x - m) r   y = x^ w + b        m = mean x
//!                dx = r (w dy - mean(w dy) - x^ mean(x^ w dy))      dw = sum dy x^      db = sum dy
//! gated RMSNorm  y = n silu(z),  n = x^ w         norm first, gate after; rows are the heads of o
//!                dn = dy silu(z)                  dz = dy n (s + z s (1 - s)),  s = sigmoid(z)
//!                dx = r (w dn - x^ mean(x^ w dn))                   dw = sum dn x^
//! l2norm         r = 1/sqrt(sum x^2 + eps)        y = x r           dx = r (dy - y <dy, y>)
//! ```
//! Saved for backward ([`Saved`]): r of every row, and m for LayerNorm; x^ is recomputed from the input.
//!
//! # Example
//! ```
//! use ballast_kernels::Scratch;
//! use ballast_kernels::norm::{self, Gamma};
//!
//! let (x, w, width) = ([3.0f32, 4.0], [1.0f32, 1.0], 2);
//! let (mut y, mut saved) = ([0.0; 2], norm::Saved::default());
//! norm::rms_norm_forward(&mut y, Some(&mut saved), &x, Gamma::Plain(&w), 0.0, width)?;
//! assert!((y[0] * y[0] + y[1] * y[1] - 2.0).abs() < 1e-5);
//!
//! // The output does not depend on the length of x, so a gradient along y moves nothing.
//! let (mut dx, mut dw) = ([1.0; 2], [0.0; 2]);
//! let scratch = Scratch::new(norm::rms_norm_backward_scratch(1, width));
//! norm::rms_norm_backward(
//!     &mut dx, Some(&mut dw), &y, &x, Gamma::Plain(&w), &saved, width, &scratch,
//! )?;
//! assert!(dx.iter().all(|dx| dx.abs() < 1e-6));
//! # Ok::<(), ballast_kernels::KernelError>(())
//! ```

mod gated;
mod l2;
mod layer;
mod rms;

#[cfg(test)]
mod tests;

pub use gated::{gated_rms_norm_backward, gated_rms_norm_backward_scratch, gated_rms_norm_forward};
pub use l2::{l2norm_backward, l2norm_forward};
pub use layer::{layer_norm_backward, layer_norm_backward_scratch, layer_norm_forward};
pub use rms::{rms_norm_backward, rms_norm_backward_scratch, rms_norm_forward};

use rayon::prelude::*;

use crate::error::{Result, check, check_len};
use crate::partition::{blocks, task_rows};
use crate::shared::Shared;
use crate::{Element, KernelError};

/// Factor gamma of the normalized row.
#[derive(Clone, Copy, Debug)]
pub enum Gamma<'a, W> {
    /// 1 + w (Qwen3-Next, Gemma 2 and 3); w is initialized to 0.
    OnePlus(&'a [W]),
    /// w.
    Plain(&'a [W]),
    /// 1.
    Weightless,
}

impl<W> Gamma<'_, W> {
    fn check(&self, width: usize) -> Result {
        match self {
            Gamma::OnePlus(w) | Gamma::Plain(w) => check_len("weight", w, width),
            Gamma::Weightless => Ok(()),
        }
    }
}

/// Values that a norm saves for backward, in addition to its input.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Saved {
    /// \[rows\]: r of every row
    pub rstd: Vec<f32>,
    /// \[rows\]: mean of every row, for LayerNorm only
    pub mean: Vec<f32>,
}

impl Saved {
    /// Size of all fields in bytes.
    pub fn bytes(&self) -> usize {
        (self.rstd.len() + self.mean.len()) * size_of::<f32>()
    }

    fn resize(&mut self, rows: usize, mean: bool) {
        self.rstd.resize(rows, 0.0);
        self.mean.resize(if mean { rows } else { 0 }, 0.0);
    }
}

/// Bytes of a [`Saved`] that RMSNorm, gated RMSNorm or l2norm has filled.
pub fn saved_bytes(rows: usize) -> usize {
    rows * size_of::<f32>()
}

/// Bytes of a [`Saved`] that LayerNorm has filled.
pub fn layer_norm_saved_bytes(rows: usize) -> usize {
    2 * rows * size_of::<f32>()
}

/// Number of f32 of the partial sums of one parameter's gradient.
fn partials_len(rows: usize, width: usize) -> usize {
    blocks(rows) * width
}

/// Returns the number of rows.
fn check_rows<T>(name: &'static str, slice: &[T], width: usize) -> Result<usize, KernelError> {
    check(width > 0 && slice.len().is_multiple_of(width), || {
        format!("{name} has {} elements, not a multiple of the width {width}", slice.len())
    })?;
    Ok(slice.len() / width)
}

/// Runs `norm(row, y, x)`, which returns (rstd, mean), on every row, and saves what is needed.
fn for_rows<Y: Element, X: Element>(
    y: &mut [Y],
    saved: Option<&mut Saved>,
    keep_mean: bool,
    x: &[X],
    width: usize,
    norm: impl Fn(usize, &mut [Y], &[X]) -> (f32, f32) + Sync,
) {
    let mut none = Saved::default();
    let saved = match saved {
        Some(saved) => {
            saved.resize(x.len() / width, keep_mean);
            saved
        }
        None => &mut none,
    };
    let (rstd_len, mean_len) = (saved.rstd.len(), saved.mean.len());
    let (rstd, mean) = (Shared::new(&mut saved.rstd), Shared::new(&mut saved.mean));
    let rows = task_rows(width);
    y.par_chunks_mut(rows * width).zip(x.par_chunks(rows * width)).enumerate().for_each(|(task, (y, x))| {
        for (i, (y, x)) in y.chunks_mut(width).zip(x.chunks(width)).enumerate() {
            let row = task * rows + i;
            let (r, m) = norm(row, y, x);
            // SAFETY: a row belongs to one task.
            unsafe {
                rstd.part(row.min(rstd_len), usize::from(rstd_len > 0)).fill(r);
                mean.part(row.min(mean_len), usize::from(mean_len > 0)).fill(m);
            }
        }
    });
}
