//! The residual stream: values and gradients are f32 in flight, rounded at the site `residual`.
//!
//! ```text
//! x = r(x + y)           y the output of a part; also for the embedding and the layer's scalar
//! dx = r(dx + dy)        dy the gradient through the norm that reads x
//! ```
//! What backward needs of the stream is stored in bf16 where r rounds to bf16, which loses nothing, and in f32 otherwise.
//! Products read the stream in the type of activations.

use ballast_kernels::elementwise::{accumulate_rounded, convert};
use ballast_kernels::{Element, Rounding};
use half::bf16;

use super::{Keep, Norm};
use crate::error::Result;
use crate::params::Grads;
use crate::run::{Run, zeros};
use ballast_kernels::norm::Saved as NormSaved;

/// Values of the stream, or of its gradient, in storage: [tokens, H].
#[derive(Clone, Debug)]
pub(crate) enum Stream {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

/// Runs `$body` with `$x` the slice of a [`Stream`], whatever its type.
macro_rules! with_stream {
    ($stream:expr, |$x:ident| $body:expr) => {
        match $stream {
            Stream::F32($x) => $body,
            Stream::Bf16($x) => $body,
        }
    };
}
pub(crate) use with_stream;

impl Default for Stream {
    fn default() -> Stream {
        Stream::F32(Vec::new())
    }
}

impl Stream {
    /// Stores values that are rounded by `rounding`.
    pub(crate) fn new(x: Vec<f32>, rounding: Rounding) -> Result<Stream> {
        match rounding {
            Rounding::Bf16 => Ok(Stream::Bf16(narrowed(&x)?)),
            Rounding::F32 | Rounding::F16 => Ok(Stream::F32(x)),
        }
    }

    /// Stores a copy for backward, if anything is kept.
    pub(crate) fn kept(keep: Keep, x: &[f32], rounding: Rounding) -> Result<Stream> {
        match rounding {
            _ if !keep.any() => Ok(Stream::default()),
            Rounding::Bf16 => Ok(Stream::Bf16(narrowed(x)?)),
            Rounding::F32 | Rounding::F16 => Ok(Stream::F32(x.to_vec())),
        }
    }

    /// Bytes of a value in storage.
    pub(crate) fn element_bytes(rounding: Rounding) -> usize {
        if rounding == Rounding::Bf16 { size_of::<bf16>() } else { size_of::<f32>() }
    }

    pub(crate) fn len(&self) -> usize {
        with_stream!(self, |x| x.len())
    }

    pub(crate) fn bytes(&self) -> usize {
        with_stream!(self, |x| size_of_val(&x[..]))
    }

    /// The values in f32.
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

    /// sum = r(sum + these values)
    pub(crate) fn add_to(&self, sum: &mut [f32], rounding: Rounding) -> Result {
        with_stream!(self, |x| Ok(accumulate_rounded(sum, x, rounding)?))
    }
}

/// Norms that read the stream.
impl Norm {
    /// y from a stored stream, as [`Norm::forward`] made it.
    pub(crate) fn forward_again<Y: Element>(&self, run: &Run<'_>, x: &Stream) -> Result<Vec<Y>> {
        with_stream!(x, |x| Ok(self.forward(run, x)?.0))
    }

    /// dx in the type of x, and the weight's gradient.
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

/// A copy in the type of activations.
pub(crate) fn narrowed<A: Element>(x: &[f32]) -> Result<Vec<A>> {
    let mut narrow = zeros(x.len());
    convert(&mut narrow, x)?;
    Ok(narrow)
}
