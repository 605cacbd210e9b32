//! Linear layer on all or some rows of a stored matrix, with its adapter.
//!
//! ```text
//! y  = x W^T + b + s u B^T         u = x A^T
//! dx = dy W + v A                  v = s dy B
//! dW += dy^T x    dA += v^T x    dB += s dy^T u
//! ```
//! W, b and B are rows of the stored tensors, A is whole. u and v have only rank columns, so nothing is kept
//! for an adapter: backward recomputes u. The sum is rounded once.

use ballast_kernels::Element;
use ballast_kernels::elementwise::{accumulate, convert, scale};
use ballast_kernels::linear::{
    Dims, linear_backward_input, linear_backward_input_add, linear_backward_weight, linear_forward,
    linear_forward_many, linear_scratch,
};

use crate::error::Result;
use crate::params::{Adapter, Grads, Id, Init, Protected, Specs, Weight};
use crate::precision::with_storage;
use crate::run::{Run, zeros};

/// Linear layer; W is the rows of a stored matrix from `first` on.
#[derive(Clone, Debug)]
pub(crate) struct Linear<V = Weight> {
    weight: Id<V>,
    bias: Option<Id<Weight>>,
    first: usize,
    dims: Dims,
}

impl Linear {
    /// Layer called `name` (`.weight` and `.bias` are added).
    pub(crate) fn new(specs: &mut Specs, name: &str, inputs: usize, outputs: usize, bias: bool) -> Linear {
        let weight = specs.weight(format!("{name}.weight"), &[outputs, inputs], Init::Normal);
        let bias = bias.then(|| specs.weight(format!("{name}.bias"), &[outputs], Init::Zeros));
        Linear { weight, bias, first: 0, dims: Dims { inputs, outputs } }
    }

    /// Layer on a weight that another part owns.
    pub(crate) fn on(weight: Id<Weight>, inputs: usize, outputs: usize) -> Linear {
        Linear { weight, bias: None, first: 0, dims: Dims { inputs, outputs } }
    }

    /// Layer of `outputs` rows from `first` on; only for layers without a bias.
    pub(crate) fn rows(&self, first: usize, outputs: usize) -> Linear {
        assert!(self.bias.is_none() && first + outputs <= self.dims.outputs);
        Linear { first: self.first + first, dims: Dims { inputs: self.dims.inputs, outputs }, ..*self }
    }

    pub(crate) fn weight(&self) -> Id<Weight> {
        self.weight
    }

    /// y [tokens, outputs]
    pub(crate) fn forward<Y: Element, X: Element>(&self, run: &Run<'_>, x: &[X]) -> Result<Vec<Y>> {
        let Some(low) = self.low(run) else { return self.without_adapter(run, x) };
        let mut sum: Vec<f32> = self.without_adapter(run, x)?;
        let mut inner = low.inner(run, x)?;
        scale(&mut inner, low.adapter.scale);
        let mut added = vec![0.0; sum.len()];
        linear_forward(&mut added, &inner, low.b(), None, low.up, run.scratch)?;
        accumulate(&mut sum, &added)?;
        let mut y = zeros(sum.len());
        convert(&mut y, &sum)?;
        Ok(y)
    }

    /// Outputs of several layers that read one x: the bits of [`Linear::forward`], with one synchronization
    /// of the threads.
    pub(crate) fn forward_many<Y: Element, X: Element, const N: usize>(
        run: &Run<'_>,
        layers: [&Linear; N],
        x: &[X],
    ) -> Result<[Vec<Y>; N]> {
        let plain = |layer: &&Linear| layer.bias.is_none() && layer.low(run).is_none();
        if !layers.iter().all(plain) {
            let mut ys = [const { Vec::new() }; N];
            for (y, layer) in ys.iter_mut().zip(layers) {
                *y = layer.forward(run, x)?;
            }
            return Ok(ys);
        }
        let mut ys = layers.map(|layer| zeros(x.len() / layer.dims.inputs * layer.dims.outputs));
        let inputs = layers[0].dims.inputs;
        let weights = layers.map(|layer| run.weight(layer.weight));
        let places = ys.each_mut().map(|y| &mut y[..]);
        match weights[0] {
            Weight::F32(_) => {
                let all = std::array::from_fn(|i| match weights[i] {
                    Weight::F32(w) => &w[layers[i].range()],
                    Weight::Bf16(_) => unreachable!("weights are cast all at once"),
                });
                linear_forward_many(places, x, all, inputs, run.scratch)?;
            }
            Weight::Bf16(_) => {
                let all = std::array::from_fn(|i| match weights[i] {
                    Weight::Bf16(w) => &w[layers[i].range()],
                    Weight::F32(_) => unreachable!("weights are cast all at once"),
                });
                linear_forward_many(places, x, all, inputs, run.scratch)?;
            }
        }
        Ok(ys)
    }

    fn without_adapter<Y: Element, X: Element>(&self, run: &Run<'_>, x: &[X]) -> Result<Vec<Y>> {
        let mut y = zeros(x.len() / self.dims.inputs * self.dims.outputs);
        let range = self.range();
        match (run.weight(self.weight), self.bias.map(|bias| run.weight(bias))) {
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

    /// Adds the gradient of x to dx, and the parameters' gradients.
    pub(crate) fn backward<Y: Element, X: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dx: &mut [f32],
        dy: &[Y],
        x: &[X],
    ) -> Result {
        let range = self.range();
        with_storage!(Weight, run.weight(self.weight), |w| {
            linear_backward_input_add(dx, dy, &w[range], self.dims, run.scratch)?;
        });
        self.adapter_backward(run, grads, Some(dx), dy, x)?;
        self.own_backward(run, grads, dy, x)
    }

    /// Gradient of an x that no other layer reads; adds the parameters' gradients.
    pub(crate) fn backward_alone<Y: Element, X: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dy: &[Y],
        x: &[X],
    ) -> Result<Vec<X>> {
        let mut dx = zeros(x.len());
        if self.low(run).is_some() {
            let mut sum = vec![0.0; x.len()];
            self.backward(run, grads, &mut sum, dy, x)?;
            convert(&mut dx, &sum)?;
            return Ok(dx);
        }
        let range = self.range();
        with_storage!(Weight, run.weight(self.weight), |w| {
            linear_backward_input(&mut dx, dy, &w[range], self.dims, run.scratch)?;
        });
        self.own_backward(run, grads, dy, x)?;
        Ok(dx)
    }

    /// Adds the parameters' gradients.
    pub(crate) fn backward_weight<Y: Element, X: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dy: &[Y],
        x: &[X],
    ) -> Result {
        self.adapter_backward(run, grads, None, dy, x)?;
        self.own_backward(run, grads, dy, x)
    }

    /// Adds the adapter's gradients, and its part of dx.
    fn adapter_backward<Y: Element, X: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dx: Option<&mut [f32]>,
        dy: &[Y],
        x: &[X],
    ) -> Result {
        let Some(low) = self.low(run) else { return Ok(()) };
        let mut v = vec![0.0; x.len() / self.dims.inputs * low.adapter.rank];
        linear_backward_input(&mut v, dy, low.b(), low.up, run.scratch)?;
        scale(&mut v, low.adapter.scale);
        if let Some(dx) = dx {
            linear_backward_input_add(dx, &v, &low.adapter.a, low.down, run.scratch)?;
        }
        let Some([da, db]) = grads.of_adapter(self.weight) else { return Ok(()) };
        linear_backward_weight(da, None, &v, x, low.down, run.scratch)?;
        let mut u = low.inner(run, x)?;
        scale(&mut u, low.adapter.scale);
        linear_backward_weight(&mut db[low.rows()], None, dy, &u, low.up, run.scratch)?;
        Ok(())
    }

    /// Adapter of the weight, in this layer's rows.
    fn low<'a>(&self, run: &Run<'a>) -> Option<LoraRows<'a>> {
        let adapter = run.adapter(self.weight)?;
        let Dims { inputs, outputs } = self.dims;
        Some(LoraRows {
            adapter,
            first: self.first,
            down: Dims { inputs, outputs: adapter.rank },
            up: Dims { inputs: adapter.rank, outputs },
        })
    }

    /// Adds the gradients of weight and bias.
    fn own_backward<Y: Element, X: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dy: &[Y],
        x: &[X],
    ) -> Result {
        let (dw, dbias) = match self.bias {
            None => (&mut grads[self.weight], None),
            Some(bias) => {
                let [dw, dbias] = grads.of_two(self.weight, bias);
                (dw, Some(dbias).filter(|dbias| !dbias.is_empty()))
            }
        };
        if !dw.is_empty() {
            linear_backward_weight(&mut dw[self.range()], dbias, dy, x, self.dims, run.scratch)?;
        }
        Ok(())
    }
}

/// Adapter restricted to the rows of a layer.
struct LoraRows<'a> {
    adapter: &'a Adapter,
    /// First row of B.
    first: usize,
    /// Shape of A.
    down: Dims,
    /// Shape of the rows of B.
    up: Dims,
}

impl<'a> LoraRows<'a> {
    /// Range of the rows of B.
    fn rows(&self) -> std::ops::Range<usize> {
        let begin = self.first * self.adapter.rank;
        begin..begin + self.up.weight_len()
    }

    fn b(&self) -> &'a [f32] {
        &self.adapter.b[self.rows()]
    }

    /// u [tokens, rank]
    fn inner<X: Element>(&self, run: &Run<'_>, x: &[X]) -> Result<Vec<f32>> {
        let mut u = vec![0.0; x.len() / self.down.inputs * self.adapter.rank];
        linear_forward(&mut u, x, &self.adapter.a, None, self.down, run.scratch)?;
        Ok(u)
    }
}

impl Linear<Protected> {
    /// Layer with a protected weight.
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
        linear_forward(&mut y, x, run.protected(self.weight), None, self.dims, run.scratch)?;
        Ok(y)
    }

    /// Adds dy W to dx, and the weight's gradient.
    pub(crate) fn backward<X: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dx: &mut [f32],
        dy: &[f32],
        x: &[X],
    ) -> Result {
        linear_backward_input_add(dx, dy, run.protected(self.weight), self.dims, run.scratch)?;
        self.backward_weight(run, grads, dy, x)
    }

    /// Adds the weight's gradient.
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
    /// f32 elements of one slot of scratch.
    pub(crate) fn scratch(&self, tokens: usize) -> usize {
        linear_scratch(self.dims, tokens)
    }

    pub(crate) fn dims(&self) -> Dims {
        self.dims
    }

    pub(crate) fn inputs(&self) -> usize {
        self.dims.inputs
    }

    pub(crate) fn outputs(&self) -> usize {
        self.dims.outputs
    }

    fn range(&self) -> std::ops::Range<usize> {
        let begin = self.first * self.dims.inputs;
        begin..begin + self.dims.weight_len()
    }
}

#[cfg(test)]
mod tests;
