//! Tape of reverse-mode differentiation: values in the order of computation, each with the function that
//! passes its gradient on.
//!
//! ```text
//! y = f(x, w)          record(y, |dy, sums| sums.of(x) += dy f_x,  sums.parameter(w) += dy f_w)
//! ```
//! A tape lives for one layer. Values are reference-counted, so a tape that does not record keeps nothing.

use std::collections::BTreeMap;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// A tensor without its shape, which its users know.
#[derive(Clone, Debug)]
pub struct Value {
    values: Arc<Vec<f64>>,
    id: usize,
}

impl Value {
    /// The values, shared.
    pub fn share(&self) -> Arc<Vec<f64>> {
        self.values.clone()
    }
}

impl Deref for Value {
    type Target = [f64];

    fn deref(&self) -> &[f64] {
        &self.values
    }
}

/// A parameter as stored, or a part of one.
#[derive(Clone, Debug)]
pub struct Param<'w> {
    name: String,
    values: &'w [f32],
    /// Offset of the part, and length of the whole.
    first: usize,
    whole: usize,
}

impl<'w> Param<'w> {
    /// The whole parameter.
    pub fn new(name: String, values: &'w [f32]) -> Param<'w> {
        Param { name, values, first: 0, whole: values.len() }
    }

    /// A part of the parameter.
    pub fn part(&self, range: Range<usize>) -> Param<'w> {
        Param { first: self.first + range.start, values: &self.values[range], ..self.clone() }
    }

    /// Values as stored.
    pub fn values(&self) -> &'w [f32] {
        self.values
    }

    /// Element i in f64.
    pub fn at(&self, i: usize) -> f64 {
        self.values[i] as f64
    }
}

/// Passes the gradient of a value on.
type Step<'w> = Box<dyn FnOnce(&[f64], &mut Sums) + 'w>;

/// The tape.
pub struct Tape<'w> {
    recording: bool,
    /// By value; `None` for leaves.
    steps: Vec<Option<Step<'w>>>,
}

impl<'w> Tape<'w> {
    /// Creates an empty tape; without `recording` it only passes values through.
    pub fn new(recording: bool) -> Tape<'w> {
        Tape { recording, steps: Vec::new() }
    }

    /// Returns true if backward may follow.
    pub fn is_recording(&self) -> bool {
        self.recording
    }

    /// Adds a leaf: a value that was not computed on this tape.
    pub fn leaf(&mut self, values: Arc<Vec<f64>>) -> Value {
        self.push(values, None)
    }

    /// Adds a value with the function that adds its gradient to those of its inputs.
    pub fn record(&mut self, values: Vec<f64>, step: impl FnOnce(&[f64], &mut Sums) + 'w) -> Value {
        let step: Option<Step<'w>> = if self.recording { Some(Box::new(step)) } else { None };
        self.push(Arc::new(values), step)
    }

    fn push(&mut self, values: Arc<Vec<f64>>, step: Option<Step<'w>>) -> Value {
        self.steps.push(step);
        Value { values, id: self.steps.len() - 1 }
    }

    /// Runs backward: the gradients of leaves and parameters from those of some values.
    pub fn backward(mut self, seeds: &[(&Value, &[f64])]) -> Sums {
        let mut sums = Sums { values: vec![Vec::new(); self.steps.len()], parameters: BTreeMap::new() };
        for (value, gradient) in seeds {
            add(sums.of(value), gradient);
        }
        for id in (0..self.steps.len()).rev() {
            // An unused value has no gradient.
            if let Some(step) = self.steps[id].take()
                && !sums.values[id].is_empty()
            {
                let gradient = std::mem::take(&mut sums.values[id]);
                step(&gradient, &mut sums);
            }
        }
        sums
    }
}

/// Gradients while they are summed.
pub struct Sums {
    /// By value; empty if nothing was added.
    values: Vec<Vec<f64>>,
    parameters: BTreeMap<String, Vec<f64>>,
}

impl Sums {
    /// Gradient sum of a value, initially zero.
    pub fn of(&mut self, value: &Value) -> &mut [f64] {
        let sum = &mut self.values[value.id];
        if sum.is_empty() {
            sum.resize(value.len(), 0.0);
        }
        sum
    }

    /// Gradient sum of a parameter or of its part, initially zero.
    pub fn parameter(&mut self, param: &Param<'_>) -> &mut [f64] {
        if !self.parameters.contains_key(&param.name) {
            self.parameters.insert(param.name.clone(), vec![0.0; param.whole]);
        }
        let sum = self.parameters.get_mut(&param.name).expect("it was inserted");
        &mut sum[param.first..param.first + param.values.len()]
    }

    /// Takes the gradient of a leaf.
    pub fn take(&mut self, value: &Value) -> Vec<f64> {
        self.of(value);
        std::mem::take(&mut self.values[value.id])
    }

    /// Takes the gradients of the parameters, by name.
    pub fn into_parameters(self) -> BTreeMap<String, Vec<f64>> {
        self.parameters
    }
}

/// sum += x
pub fn add(sum: &mut [f64], x: &[f64]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += x;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_used_twice_has_the_sum_of_both_gradients() {
        let weights = [2.0, 3.0];
        let both = Param::new("w".into(), &weights);
        let mut tape = Tape::new(true);
        let x = tape.leaf(Arc::new(vec![5.0]));
        // y = w_1 x, z = x y
        let (w, from) = (both.part(1..2), x.clone());
        let y = tape.record(vec![w.at(0) * x[0]], move |dy, sums| {
            sums.of(&from)[0] += w.at(0) * dy[0];
            sums.parameter(&w)[0] += from[0] * dy[0];
        });
        let (a, b) = (x.clone(), y.clone());
        let z = tape.record(vec![x[0] * y[0]], move |dz, sums| {
            sums.of(&a)[0] += b[0] * dz[0];
            sums.of(&b)[0] += a[0] * dz[0];
        });
        let mut sums = tape.backward(&[(&z, &[1.0]), (&y, &[100.0])]);
        assert_eq!(sums.take(&x), [2.0 * 3.0 * 5.0 + 300.0]);
        assert_eq!(sums.into_parameters()["w"], [0.0, 25.0 + 500.0]);
    }
}
