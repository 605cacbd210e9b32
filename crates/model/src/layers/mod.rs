//! Layers: the forward, the saved activations and the backward of each part are in one file.
//!
//! Every part has the same interface. `forward` returns the output and a `Saved` with named tensors.
//! `backward` takes the gradient of the output, adds the gradients of the parameters to
//! [`Grads`](crate::params::Grads) and adds the gradient of the input to an f32 buffer, which all readers of
//! the same input share. With [`Keep::Selective`], the fields marked "recomputed" stay empty and `backward`
//! recomputes them: the bits are the same, since it calls the same functions.

mod attention;
mod experts;
mod feed_forward;
mod heads;
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
pub(crate) use residual::{Stream, narrowed};

/// Activations that forward saves for backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    Nothing,
    /// As `Selective`, without the feed-forward part if backward can recompute that from the stream, some tokens
    /// at a time; the output of the layer is then not computed. For a layer that backward runs again.
    Mixer,
    /// Only activations that are expensive to recompute.
    Selective,
    Everything,
}

impl Keep {
    /// Returns true if anything is saved.
    pub(crate) fn any(self) -> bool {
        self != Keep::Nothing
    }

    /// Returns the values if everything is saved, else an empty vector: for values that backward recomputes.
    pub(crate) fn unless_recomputed<T>(self, values: Vec<T>) -> Vec<T> {
        if self == Keep::Everything { values } else { Vec::new() }
    }

    /// Returns the values if anything is saved, else an empty vector.
    pub(crate) fn always<T>(self, values: Vec<T>) -> Vec<T> {
        if self.any() { values } else { Vec::new() }
    }
}

/// Returns the bytes of several tensors.
pub(crate) fn bytes_of<T>(tensors: &[&Vec<T>]) -> usize {
    tensors.iter().map(|t| t.len() * size_of::<T>()).sum()
}
