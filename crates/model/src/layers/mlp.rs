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

/// Most tokens that are computed at once, so that the temporary tensors have a limit.
const SLICE: usize = 4096;

/// Activations that forward saves, in addition to x, by slice of tokens. Without any, backward recomputes all.
#[derive(Clone, Debug, Default)]
pub(crate) struct Saved<A> {
    slices: Vec<Slice<A>>,
}

#[derive(Clone, Debug)]
struct Slice<A> {
    /// [tokens, I]
    gate: Vec<A>,
    /// [tokens, I]
    up: Vec<A>,
    /// act(gate) * up: [tokens, I]; recomputed
    inner: Vec<A>,
}

impl<A> Saved<A> {
    pub(crate) fn bytes(&self) -> usize {
        self.slices.iter().map(|slice| bytes_of(&[&slice.gate, &slice.up, &slice.inner])).sum()
    }
}

/// Tokens of a slice: about as many in each, so that all are multiplied in the same way.
fn slice_of(tokens: usize) -> usize {
    tokens.div_ceil(tokens.div_ceil(SLICE).max(1)).max(1)
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
        let (len, hidden) = (x.len(), self.gate.inputs());
        let (mut y, mut saved) = (Vec::new(), Saved::default());
        for x in x.chunks(slice_of(len / hidden) * hidden) {
            let mut slice = self.inner(run, x)?;
            let part = self.down.forward(run, &slice.inner)?;
            slice.inner = keep.unless_recomputed(slice.inner);
            saved.slices.extend(Some(slice).filter(|_| keep.any()));
            if y.is_empty() {
                y = part;
            } else {
                y.reserve_exact(len - y.len());
                y.extend_from_slice(&part);
            }
        }
        Ok((y, saved))
    }

    /// Computes the activations of a slice before the last layer.
    fn inner<A: Element>(&self, run: &Run<'_>, x: &[A]) -> Result<Slice<A>> {
        let [gate, up] = Linear::forward_many::<A, A, 2>(run, [&self.gate, &self.up], x)?;
        let mut inner = zeros(gate.len());
        glu_forward(&mut inner, &gate, &up, self.activation)?;
        Ok(Slice { gate, up, inner })
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
        let hidden = self.gate.inputs();
        let elements = slice_of(x.len() / hidden) * hidden;
        let mut slices = saved.slices.into_iter();
        for ((dx, dy), x) in dx.chunks_mut(elements).zip(dy.chunks(elements)).zip(x.chunks(elements)) {
            let Slice { gate, up, mut inner } = match slices.next() {
                Some(slice) => slice,
                None => self.inner(run, x)?,
            };
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
            self.up.backward(run, grads, dx, &dup, x)?;
        }
        Ok(())
    }

    /// Returns the bytes that forward saves.
    pub(crate) fn saved_bytes<A>(&self, tokens: usize, keep: Keep) -> usize {
        let tensors = match keep {
            Keep::Nothing => 0,
            Keep::Mixer | Keep::Selective => 2,
            Keep::Everything => 3,
        };
        tensors * tokens * self.gate.outputs() * size_of::<A>()
    }

    /// Returns the temporary bytes of backward on a slice: the gradients of inner and up, and inner if it is
    /// recomputed; gate and up too if nothing is saved.
    pub(crate) fn transient<A>(&self, tokens: usize, keep: Keep) -> usize {
        let tensors = match keep {
            Keep::Nothing => 5,
            Keep::Mixer | Keep::Selective => 3,
            Keep::Everything => 2,
        };
        tensors * slice_of(tokens) * self.gate.outputs() * size_of::<A>()
    }

    pub(crate) fn scratch(&self, tokens: usize) -> usize {
        [&self.gate, &self.up, &self.down].map(|linear| linear.scratch(tokens)).into_iter().max().unwrap_or(0)
    }
}
