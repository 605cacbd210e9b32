//! Residual stream: values and gradients are computed in f32 and rounded at the site `residual`.
//!
//! ```text
//! x = r(x + y)           y is the output of a part; r also rounds the embedding and the scaled stream
//! dx = r(dx + dy)        dy is the gradient through the norm that reads x
//! ```
//! Copies of the stream for backward are stored in bf16 if r rounds to bf16, which is exact, and in f32
//! otherwise. Matrix products read the stream in the type of activations.

use ballast_kernels::elementwise::{accumulate_rounded, convert};
use ballast_kernels::{Element, Rounding};
use half::bf16;

use super::{Keep, Norm};
use crate::error::Result;
use crate::params::Grads;
use crate::precision::with_storage;
use crate::run::{Run, zeros};
use ballast_kernels::norm::Saved as NormSaved;

/// Stored values of the stream or its gradient: [tokens, H].
#[derive(Clone, Debug)]
pub(crate) enum Stream {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Default for Stream {
    fn default() -> Stream {
        Stream::F32(Vec::new())
    }
}

impl Stream {
    /// Stores values that are already rounded by `rounding`.
    pub(crate) fn new(x: Vec<f32>, rounding: Rounding) -> Result<Stream> {
        match rounding {
            Rounding::Bf16 => Ok(Stream::Bf16(narrowed(&x)?)),
            Rounding::F32 | Rounding::F16 => Ok(Stream::F32(x)),
        }
    }

    /// Stores a copy for backward, if `keep` saves anything.
    pub(crate) fn kept(keep: Keep, x: &[f32], rounding: Rounding) -> Result<Stream> {
        match rounding {
            _ if !keep.any() => Ok(Stream::default()),
            Rounding::Bf16 => Ok(Stream::Bf16(narrowed(x)?)),
            Rounding::F32 | Rounding::F16 => Ok(Stream::F32(x.to_vec())),
        }
    }

    /// Returns the bytes of a stored value.
    pub(crate) fn element_bytes(rounding: Rounding) -> usize {
        if rounding == Rounding::Bf16 { size_of::<bf16>() } else { size_of::<f32>() }
    }

    pub(crate) fn len(&self) -> usize {
        with_storage!(Stream, self, |x| x.len())
    }

    pub(crate) fn bytes(&self) -> usize {
        with_storage!(Stream, self, |x| size_of_val(&x[..]))
    }

    /// Converts the values to f32.
    pub(crate) fn into_f32(self) -> Vec<f32> {
        match self {
            Stream::F32(x) => x,
            Stream::Bf16(x) => {
                let mut wide = zeros(x.len());
                Element::load(&mut wide, &x);
                wide
            }
        }
    }

    /// Adds the values to `sum` and rounds: sum = r(sum + x).
    pub(crate) fn add_to(&self, sum: &mut [f32], rounding: Rounding) -> Result {
        with_storage!(Stream, self, |x| Ok(accumulate_rounded(sum, x, rounding)?))
    }
}

/// Norms that read the stream.
impl Norm {
    /// Runs [`Norm::forward`] again on a stored stream.
    pub(crate) fn forward_again<Y: Element>(&self, run: &Run<'_>, x: &Stream) -> Result<(Vec<Y>, NormSaved)> {
        with_storage!(Stream, x, |x| self.forward(run, x))
    }

    /// Returns dx in the type of x; adds the gradient of the weight.
    pub(crate) fn backward_stream<D: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dy: &[D],
        x: &Stream,
        saved: &NormSaved,
    ) -> Result<Stream> {
        match x {
            Stream::F32(x) => Ok(Stream::F32(self.backward(run, grads, dy, x, saved)?)),
            Stream::Bf16(x) => Ok(Stream::Bf16(self.backward(run, grads, dy, x, saved)?)),
        }
    }
}

/// Returns a copy in the type of activations.
pub(crate) fn narrowed<A: Element>(x: &[f32]) -> Result<Vec<A>> {
    let mut narrow = zeros(x.len());
    convert(&mut narrow, x)?;
    Ok(narrow)
}
