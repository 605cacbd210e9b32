//! Plans of a run, made before it starts and without its values: memory, messages and time.
//!
//! ```text
//! blueprint     who owns what: the division of weights, gradients and sequences over the ranks
//! memory        bytes of a rank by purpose
//! traffic       bytes that a rank sends in a step, by kind
//! work          floating-point operations of a micro-batch, part by part of the model
//! time          a step as a timeline: what is computed, what is on its way, what is waited for
//! cluster       all of it for a cluster that may not be here
//! alternatives  settings that would fit
//! ```

mod alternatives;
mod blueprint;
mod cluster;
mod memory;
mod time;
mod traffic;
mod work;

pub use alternatives::Alternative;
pub use cluster::{ClusterPlan, Sent};
pub use memory::MemoryPlan;
pub use time::{Rates, StepTime, measured_flops};
