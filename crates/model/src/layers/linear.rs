//! A linear layer, or some rows of one.

use ballast_kernels::Element;
use ballast_kernels::linear::{
    Dims, linear_backward_input, linear_backward_input_add, linear_backward_weight, linear_forward,
    linear_scratch,
};

use crate::error::Result;
use crate::params::{Grads, Id, Init, Protected, Specs, Weight};
use crate::run::{Run, zeros};
use crate::with_weight;

/// y = x W^T + b, W the rows from `first` on of a stored matrix.
#[derive(Clone, Debug)]
pub(crate) struct Linear<V = Weight> {
    weight: Id<V>,
    bias: Option<Id<Weight>>,
    first: usize,
    dims: Dims,
}

impl Linear {
    /// A layer called `name` (`.weight` and `.bias` are added).
    pub(crate) fn new(specs: &mut Specs, name: &str, inputs: usize, outputs: usize, bias: bool) -> Linear {
        let weight = specs.weight(format!("{name}.weight"), &[outputs, inputs], Init::Normal);
        let bias = bias.then(|| specs.weight(format!("{name}.bias"), &[outputs], Init::Zeros));
        Linear { weight, bias, first: 0, dims: Dims { inputs, outputs } }
    }

    /// A layer on a weight that another part owns.
    pub(crate) fn on(weight: Id<Weight>, inputs: usize, outputs: usize) -> Linear {
        Linear { weight, bias: None, first: 0, dims: Dims { inputs, outputs } }
    }

    /// The layer that `outputs` rows from `first` on make; only for layers without a bias.
    pub(crate) fn rows(&self, first: usize, outputs: usize) -> Linear {
        assert!(self.bias.is_none() && first + outputs <= self.dims.outputs);
        Linear { first: self.first + first, dims: Dims { inputs: self.dims.inputs, outputs }, ..*self }
    }

    pub(crate) fn weight(&self) -> Id<Weight> {
        self.weight
    }

    /// y [tokens, outputs]
    pub(crate) fn forward<Y: Element, X: Element>(&self, run: &Run<'_>, x: &[X]) -> Result<Vec<Y>> {
        let mut y = zeros(x.len() / self.dims.inputs * self.dims.outputs);
        let range = self.range();
        match (&run.params[self.weight], self.bias.map(|bias| &run.params[bias])) {
            (Weight::F32(w), bias) => {
                let bias = bias.map(Weight::to_f32);
                linear_forward(&mut y, x, &w[range], bias.as_deref(), self.dims, run.scratch)?;
            }
            (Weight::Bf16(w), None) => linear_forward(&mut y, x, &w[range], None, self.dims, run.scratch)?,
            (Weight::Bf16(w), Some(Weight::Bf16(bias))) => {
                linear_forward(&mut y, x, &w[range], Some(bias), self.dims, run.scratch)?;
            }
            (Weight::Bf16(_), Some(Weight::F32(_))) => unreachable!("weights are cast all at once"),
        }
        Ok(y)
    }

    /// dx += dy W, and the weight's gradient.
    pub(crate) fn backward<Y: Element, X: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dx: &mut [f32],
        dy: &[Y],
        x: &[X],
    ) -> Result {
        let range = self.range();
        with_weight!(&run.params[self.weight], |w| {
            linear_backward_input_add(dx, dy, &w[range], self.dims, run.scratch)?;
        });
        self.backward_weight(run, grads, dy, x)
    }

    /// dx of an input that nothing else reads, and the weight's gradient.
    pub(crate) fn backward_alone<Y: Element, X: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dy: &[Y],
        x: &[X],
    ) -> Result<Vec<X>> {
        let mut dx = zeros(x.len());
        let range = self.range();
        with_weight!(&run.params[self.weight], |w| {
            linear_backward_input(&mut dx, dy, &w[range], self.dims, run.scratch)?;
        });
        self.backward_weight(run, grads, dy, x)?;
        Ok(dx)
    }

    /// The weight's gradient alone.
    pub(crate) fn backward_weight<Y: Element, X: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dy: &[Y],
        x: &[X],
    ) -> Result {
        // Both gradients at once: the bias's is taken out for a moment.
        let mut dbias = self.bias.map(|bias| std::mem::take(&mut grads[bias]));
        let wanted = dbias.as_deref_mut().filter(|dbias| !dbias.is_empty());
        let range = self.range();
        if let Some(dw) = grads.of(self.weight) {
            linear_backward_weight(&mut dw[range], wanted, dy, x, self.dims, run.scratch)?;
        }
        if let (Some(bias), Some(dbias)) = (self.bias, dbias) {
            grads[bias] = dbias;
        }
        Ok(())
    }
}

impl Linear<Protected> {
    /// A layer whose weight is protected.
    pub(crate) fn protected(
        specs: &mut Specs,
        name: &str,
        inputs: usize,
        outputs: usize,
    ) -> Linear<Protected> {
        let weight = specs.protected(format!("{name}.weight"), &[outputs, inputs], Init::Normal);
        Linear { weight, bias: None, first: 0, dims: Dims { inputs, outputs } }
    }

    /// y [tokens, outputs]
    pub(crate) fn forward<X: Element>(&self, run: &Run<'_>, x: &[X]) -> Result<Vec<f32>> {
        let mut y = zeros(x.len() / self.dims.inputs * self.dims.outputs);
        linear_forward(&mut y, x, run.params[self.weight].values(), None, self.dims, run.scratch)?;
        Ok(y)
    }

    /// dx += dy W, and the weight's gradient.
    pub(crate) fn backward<X: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dx: &mut [f32],
        dy: &[f32],
        x: &[X],
    ) -> Result {
        linear_backward_input_add(dx, dy, run.params[self.weight].values(), self.dims, run.scratch)?;
        self.backward_weight(run, grads, dy, x)
    }

    /// The weight's gradient alone.
    pub(crate) fn backward_weight<X: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dy: &[f32],
        x: &[X],
    ) -> Result {
        if let Some(dw) = grads.of(self.weight) {
            linear_backward_weight(dw, None, dy, x, self.dims, run.scratch)?;
        }
        Ok(())
    }
}

impl<V> Linear<V> {
    /// f32 that one slot of scratch needs.
    pub(crate) fn scratch(&self, tokens: usize) -> usize {
        linear_scratch(self.dims, tokens)
    }

    pub(crate) fn dims(&self) -> Dims {
        self.dims
    }

    pub(crate) fn outputs(&self) -> usize {
        self.dims.outputs
    }

    fn range(&self) -> std::ops::Range<usize> {
        let begin = self.first * self.dims.inputs;
        begin..begin + self.dims.weight_len()
    }
}
