//! The layers: forward, what it keeps, backward, side by side.
//!
//! Every part has the same shape: `forward` gives its output and a `Saved` whose fields are named tensors; `backward`
//! takes the gradient of the output, adds the parameters' gradients into [`Grads`](crate::params::Grads) and the
//! input's gradient into an f32 buffer that all readers of the same input share. With [`Keep::Selective`] the fields
//! that are cheap to make anew are empty, and `backward` makes them: the same bits, since it calls the same functions.

mod attention;
mod experts;
mod feed_forward;
mod indexer;
mod latent_attention;
mod layer;
mod linear;
mod linear_attention;
mod mlp;
mod norm;
mod per_layer_input;
mod residual;

pub(crate) use layer::{Layer, Links, Saved, State};
pub(crate) use linear::Linear;
pub(crate) use norm::Norm;
pub(crate) use per_layer_input::{InputsSaved, PerLayerInputs};
pub(crate) use residual::{Stream, narrowed, with_stream};

/// What a forward keeps for backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    Nothing,
    /// What is dear to make anew.
    Selective,
    Everything,
}

impl Keep {
    /// Whether anything is kept.
    pub(crate) fn any(self) -> bool {
        self != Keep::Nothing
    }

    /// The values, if cheap ones are kept; else nothing.
    pub(crate) fn unless_recomputed<T>(self, values: Vec<T>) -> Vec<T> {
        if self == Keep::Everything { values } else { Vec::new() }
    }

    /// The values, if anything is kept; else nothing.
    pub(crate) fn always<T>(self, values: Vec<T>) -> Vec<T> {
        if self.any() { values } else { Vec::new() }
    }
}

/// Bytes of several tensors.
pub(crate) fn bytes_of<T>(tensors: &[&Vec<T>]) -> usize {
    tensors.iter().map(|t| t.len() * size_of::<T>()).sum()
}
