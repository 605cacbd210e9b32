//! The parts of a layer, each from its input to its output; gradients are the tape's.

mod attention;
mod experts;
mod feed_forward;
mod indexer;
mod latent_attention;
mod layer;
mod linear_attention;
mod own_input;

pub use layer::{KeyValues, Links, layer};
pub use own_input::own_inputs;
