//! Mixture of experts: routing, experts, load balance.
//!
//! One token with router logits l \[E\], f32 throughout:
//! ```text
//! softmax   p = softmax(l), the k largest p                w_i = p_i, or p_i / sum of the chosen
//! sigmoid   s = sigmoid(l), choice by c = s + bias: groups by the sum of their two best c, the best groups kept,
//!           then the k largest c in them                   w_i = scaling s_i / (sum of the chosen + 1e-20)
//! y = sum_i w_i m_{e_i} D_{e_i} (act(G_{e_i} x) * (U_{e_i} x))         m an optional multiplier per expert
//! ```
//! Experts of a group that is not kept have the score -inf, as in the DeepSeek-V3 and V3.2 routers of
//! transformers 5.22.2, with which the tests compare. (Older public code uses 0, which chooses such an expert
//! when the kept groups have a negative c.) Of equal scores the lowest index comes first. The bias affects
//! only the choice and has no gradient.
//! ```text
//! softmax, normalized   dl_i = w_i (dw_i - sum_j dw_j w_j) on the chosen, 0 elsewhere
//! softmax, not          dl_j = p_j (dw_j - sum_i dw_i p_i), dw 0 off the chosen
//! sigmoid               ds_i = scaling (dw_i - sum_j dw_j s_j / S) / S,  S = sum s + 1e-20;   dl_i = ds_i s_i (1 - s_i)
//! expert                a = D^T dy;  dw = <a, h>;  dh = w a;  dD += dy (w h)^T;  then the gated unit and G, U
//! balance               loss = E sum_e f_e P_e,  f_e = choices of e / tokens,  P_e = mean p_e    (f is a constant)
//!                       dl_j = E p_j (f_j - sum_e f_e p_e) / tokens
//! ```
//! Because <a, h> = <dy, D h>, the gradient of the weights needs no expert outputs: only gate and up are
//! saved.
//!
//! Experts run one after another, each product in parallel; a token's sum is in the order of expert indices.
//!
//! # Example
//! ```
//! use ballast_kernels::glu::Activation;
//! use ballast_kernels::{Scratch, moe};
//!
//! let dims = moe::Dims { experts: 2, top_k: 1, hidden: 1, intermediate: 1 };
//! let (x, logits) = ([1.0f32], [0.0, 5.0]);
//! let router = moe::Router::Softmax { normalize: true };
//! let routing = moe::route_forward(&logits, None, &router, dims)?;
//! assert_eq!((routing.experts[0], routing.weights[0]), (1, 1.0));
//!
//! let dispatch = moe::Dispatch::new(&routing, dims)?;
//! let (gate_up, down) = ([0.0f32, 0.0, 1.0, 1.0], [0.0f32, 2.0]);
//! let experts = moe::Experts { gate_up: &gate_up, down: &down, activation: Activation::Silu };
//! let scratch = Scratch::new(moe::experts_scratch(dims, 1));
//! let forward = moe::experts_forward_workspace::<f32>(&dispatch, dims, true);
//! let backward = moe::experts_backward_workspace(&dispatch, dims);
//! let mut workspace = vec![0.0; forward.max(backward)];
//! let (mut y, mut saved) = ([0.0f32], moe::Saved::default());
//! moe::experts_forward(
//!     &mut y, Some(&mut saved), &x, &routing, &dispatch, &experts, dims, &mut workspace, &scratch,
//! )?;
//! assert!((y[0] - 2.0 / (1.0 + (-1f32).exp())).abs() < 1e-6);
//!
//! let (mut dx, mut dweights, mut dgate_up, mut ddown) = ([0.0f32], [0.0], [0.0; 4], [0.0; 2]);
//! let grads = moe::ExpertsGrads {
//!     dx: &mut dx, dweights: &mut dweights, dgate_up: &mut dgate_up, ddown: &mut ddown,
//! };
//! moe::experts_backward(
//!     grads, &[1.0], &x, &saved, &routing, &dispatch, &experts, dims, &mut workspace, &scratch,
//! )?;
//! assert!((dweights[0] - y[0]).abs() < 1e-6 && ddown[0] == 0.0);
//! let mut dlogits = [0.0; 2];
//! moe::route_backward(&mut dlogits, None, &dweights, &logits, &routing, None, &router, dims)?;
//! // A single normalized weight is always 1.
//! assert_eq!(dlogits, [0.0, 0.0]);
//! # Ok::<(), ballast_kernels::KernelError>(())
//! ```

mod balance;
mod experts;
mod route;

#[cfg(test)]
mod tests;

pub use balance::Balance;
pub use experts::{
    Experts, ExpertsGrads, Saved, experts_backward, experts_backward_workspace, experts_forward,
    experts_forward_workspace, experts_scratch, saved_bytes,
};
pub use route::{Dispatch, Router, Routing, route_backward, route_forward};

use crate::error::{Result, check};

/// Largest number of experts.
pub const MAX_EXPERTS: usize = 1 << 16;

/// Sizes of the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// E: number of experts.
    pub experts: usize,
    /// k: experts per token.
    pub top_k: usize,
    /// H: width of x and y.
    pub hidden: usize,
    /// Im: width inside an expert.
    pub intermediate: usize,
}

fn check_dims(dims: Dims) -> Result {
    let Dims { experts, top_k, hidden, intermediate } = dims;
    check(top_k > 0 && top_k <= experts, || {
        format!("top_k must be 1 to the number of experts, {experts}, got {top_k}")
    })?;
    check(experts <= MAX_EXPERTS, || format!("experts must be at most {MAX_EXPERTS}, got {experts}"))?;
    check(hidden > 0 && intermediate > 0, || {
        format!("expert hidden and intermediate must be above 0, got {hidden} and {intermediate}")
    })
}
