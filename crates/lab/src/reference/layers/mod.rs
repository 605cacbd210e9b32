//! Parts of a layer, forward only; the tape computes gradients.

mod attention;
mod experts;
mod feed_forward;
mod indexer;
mod latent_attention;
mod layer;
mod linear_attention;
mod per_layer_input;

pub use layer::{KeyValues, Links, layer};
pub use per_layer_input::per_layer_inputs;
