//! Runs of the reference on the tiny models.

use std::collections::BTreeMap;

use ballast_lab::reference::{Backward, Reference};
use ballast_model::params::{Grads, Spec};
use ballast_model::{Batch, Config, Model, Precision, Ties};

use super::common::folder;

pub type Parameters = BTreeMap<String, Vec<f32>>;
pub type Gradients = BTreeMap<String, Vec<f64>>;

/// Model in f32, with ties of scores resolved as torch does.
pub fn load(model: &str) -> Model {
    let mut model = Model::load(&folder(model), |_| Ok(Precision::f32())).unwrap();
    model.set_ties(Ties::Torch);
    model
}

pub fn parameters(model: &Model) -> Parameters {
    let weights = model.params.weights().iter().map(|weight| weight.to_f32());
    let protected = model.params.protected().iter().map(|tensor| tensor.values().to_vec());
    let named = model.specs.all().zip(weights.chain(protected));
    named.map(|(spec, values)| (spec.name.clone(), values)).collect()
}

pub struct Site {
    pub name: String,
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

pub struct Run {
    pub sites: Vec<Site>,
    pub logits: Vec<f64>,
    pub loss: f64,
    pub grads: Gradients,
}

/// Runs forward, and backward if wanted. Only the parameters of the current part are available.
pub fn run<'p>(
    config: &Config,
    parameters: &'p Parameters,
    batch: &Batch,
    ties: Ties,
    backward: Backward,
) -> Run {
    let within = |prefix: String| {
        move |name: &str| -> &'p [f32] {
            let outside = !name.starts_with("layers.");
            let known = if prefix.is_empty() { outside } else { name.starts_with(&prefix) };
            assert!(known, "{name} is not of the part {prefix:?}");
            parameters.get(name).map_or(&[], |values| values)
        }
    };
    let (outside, layers) = (within(String::new()), config.layers.len());
    let layer = |i: usize| within(format!("layers.{i}."));
    let (mut sites, mut grads) = (Vec::new(), Gradients::new());
    let see = &mut |name: &str, shape: &[usize], values: &[f64]| {
        sites.push(Site { name: name.into(), shape: shape.to_vec(), values: values.to_vec() });
    };
    let mut reference = Reference::new(config, batch, ties, backward).unwrap();
    reference.embed(&outside, see).unwrap();
    for i in 0..layers {
        reference.layer(i, &layer(i), see).unwrap();
    }
    reference.norm(&outside, see).unwrap();
    let logits = reference.logits(0..batch.tokens(), &outside).unwrap();
    if backward == Backward::None {
        let loss = reference.loss(&outside, None).unwrap();
        return Run { sites, logits, loss, grads };
    }
    let take = &mut |name: &str, values: Vec<f64>| {
        let sum = grads.entry(name.into()).or_insert_with(|| vec![0.0; values.len()]);
        sum.iter_mut().zip(&values).for_each(|(sum, x)| *sum += x);
    };
    let loss = reference.loss(&outside, Some(take)).unwrap();
    for i in (0..layers).rev() {
        reference.layer_backward(i, &layer(i), take).unwrap();
    }
    reference.embed_backward(&outside, take).unwrap();
    Run { sites, logits, loss, grads }
}

/// RMS(a-b) / (RMS(b) + 1e-8), and the largest difference.
pub fn error(got: impl IntoIterator<Item = f64>, expected: &[f64]) -> (f64, f64) {
    let (mut count, mut squares, mut largest) = (0, 0.0, 0f64);
    for (a, b) in got.into_iter().zip(expected) {
        squares += (a - b) * (a - b);
        largest = largest.max((a - b).abs());
        count += 1;
    }
    assert_eq!(count, expected.len());
    let rms = |sum: f64| (sum / expected.len().max(1) as f64).sqrt();
    let size: f64 = expected.iter().map(|b| b * b).sum();
    (rms(squares) / (rms(size) + 1e-8), largest)
}

pub fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| *x as f64).collect()
}

/// Each parameter with its gradient.
pub fn by_name<'m>(model: &'m Model, grads: &'m Grads) -> impl Iterator<Item = (&'m Spec, &'m [f32])> {
    model.specs.all().zip(grads.all())
}

/// The reference's gradients in the model's form; zero for parameters without one.
pub fn in_model_form(model: &Model, grads: &Gradients) -> Grads {
    let mut form = model.grads();
    let weights = model.specs.weights.len();
    for (i, spec) in model.specs.all().enumerate() {
        let to = if i < weights { form.weight_mut(i) } else { form.protected_mut(i - weights) };
        match grads.get(&spec.name) {
            Some(values) => to.iter_mut().zip(values).for_each(|(to, x)| *to = *x as f32),
            None => assert!(!spec.trainable || spec.name.contains(".indexer."), "{} learns", spec.name),
        }
    }
    form
}
