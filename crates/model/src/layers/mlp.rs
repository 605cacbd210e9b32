//! MLP, the dense feed-forward part: down(act(gate x) * up x).

use ballast_kernels::Element;
use ballast_kernels::glu::{Activation, glu_backward, glu_forward};

use super::{Keep, Linear, bytes_of};
use crate::error::Result;
use crate::params::{Grads, Specs};
use crate::run::{Run, zeros};

#[derive(Clone, Debug)]
pub(crate) struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
    activation: Activation,
}

/// Activations that forward saves, in addition to x.
#[derive(Clone, Debug, Default)]
pub(crate) struct Saved<A> {
    /// [tokens, I]
    gate: Vec<A>,
    /// [tokens, I]
    up: Vec<A>,
    /// act(gate) * up: [tokens, I]; recomputed
    inner: Vec<A>,
}

impl<A> Saved<A> {
    pub(crate) fn bytes(&self) -> usize {
        bytes_of(&[&self.gate, &self.up, &self.inner])
    }
}

impl Mlp {
    pub(crate) fn new(
        specs: &mut Specs,
        name: &str,
        hidden: usize,
        intermediate: usize,
        activation: Activation,
    ) -> Mlp {
        Mlp {
            gate: Linear::new(specs, &format!("{name}.gate_proj"), hidden, intermediate, false),
            up: Linear::new(specs, &format!("{name}.up_proj"), hidden, intermediate, false),
            down: Linear::new(specs, &format!("{name}.down_proj"), intermediate, hidden, false),
            activation,
        }
    }

    pub(crate) fn forward<A: Element>(
        &self,
        run: &Run<'_>,
        x: &[A],
        keep: Keep,
    ) -> Result<(Vec<A>, Saved<A>)> {
        let [gate, up] = Linear::forward_many::<A, A, 2>(run, [&self.gate, &self.up], x)?;
        let mut inner = zeros(gate.len());
        glu_forward(&mut inner, &gate, &up, self.activation)?;
        let y = self.down.forward(run, &inner)?;
        Ok((y, Saved { gate: keep.always(gate), up: keep.always(up), inner: keep.unless_recomputed(inner) }))
    }

    /// Adds the gradient of the input to dx.
    pub(crate) fn backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dx: &mut [f32],
        dy: &[A],
        x: &[A],
        saved: Saved<A>,
    ) -> Result {
        let Saved { gate, up, mut inner } = saved;
        if inner.is_empty() {
            inner = zeros(gate.len());
            glu_forward(&mut inner, &gate, &up, self.activation)?;
        }
        let d_inner = self.down.backward_alone(run, grads, dy, &inner)?;
        // The buffer of inner is reused for dgate.
        let (mut dgate, mut dup) = (inner, zeros(d_inner.len()));
        glu_backward(&mut dgate, &mut dup, &d_inner, &gate, &up, self.activation)?;
        drop((d_inner, gate, up));
        self.gate.backward(run, grads, dx, &dgate, x)?;
        self.up.backward(run, grads, dx, &dup, x)
    }

    /// Returns the bytes that forward saves.
    pub(crate) fn saved_bytes<A>(&self, tokens: usize, keep: Keep) -> usize {
        let tensors = match keep {
            Keep::Nothing => 0,
            Keep::Selective => 2,
            Keep::Everything => 3,
        };
        tensors * tokens * self.gate.outputs() * size_of::<A>()
    }

    /// Returns the temporary bytes of backward: the gradients of inner and up, and inner if it is recomputed.
    pub(crate) fn transient<A>(&self, tokens: usize, keep: Keep) -> usize {
        let tensors = if keep == Keep::Everything { 2 } else { 3 };
        tensors * tokens * self.gate.outputs() * size_of::<A>()
    }

    pub(crate) fn scratch(&self, tokens: usize) -> usize {
        [&self.gate, &self.up, &self.down].map(|linear| linear.scratch(tokens)).into_iter().max().unwrap_or(0)
    }
}
