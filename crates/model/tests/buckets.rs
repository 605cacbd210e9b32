//! Gradients in buckets, handed on when backward has completed them.

use std::collections::HashSet;

use ballast_model::params::{Bucket, Grads, ParameterKind, Part};
use ballast_model::pass::{self, Hooks};
use ballast_model::{Error, LossOptions, Model, Recompute};

use crate::common::{MODELS, batch, load};

type Seen = Vec<(Part, ParameterKind, Vec<f32>)>;

struct Observed<'m> {
    model: &'m Model,
    seen: Seen,
}

impl Hooks for Observed<'_> {
    type Error = Error;

    fn model(&self) -> &Model {
        self.model
    }

    fn complete(&mut self, bucket: Bucket<'_>) {
        self.seen.push((bucket.part, bucket.kind, bucket.values.to_vec()));
    }
}

fn backward(model: &Model, name: &str, grads: &mut Grads, recompute: Recompute) -> Seen {
    let mut observed = Observed { model, seen: Seen::new() };
    let options = LossOptions::default();
    pass::forward_backward(&mut observed, grads, &batch(name), &options, recompute, None).unwrap();
    observed.seen
}

fn with_adapters(name: &str) -> Model {
    let mut model = load(name, "f32");
    let targets = model.adapter_targets();
    model.add_adapters(&|module| targets.iter().any(|target| target == module), 2, 4.0, 1).unwrap();
    model
}

#[test]
fn every_bucket_is_handed_on_once_with_its_final_values() {
    for name in MODELS {
        for model in [load(name, "f32"), load(name, "bf16"), with_adapters(name)] {
            for recompute in [Recompute::None, Recompute::Full] {
                let mut grads = model.grads();
                // Twice, as with two micro-batches: what is handed on is the sum so far.
                for _ in 0..2 {
                    let seen = backward(&model, name, &mut grads, recompute);
                    let all: Vec<_> = grads.buckets().map(|b| (b.part, b.kind, b.values.to_vec())).collect();
                    assert_eq!(seen.len(), all.len(), "{name}");
                    let keys: HashSet<_> = seen.iter().map(|(part, kind, _)| (*part, *kind)).collect();
                    assert_eq!(keys.len(), seen.len(), "{name}: a bucket was handed on twice");
                    for (part, kind, values) in &all {
                        let found = seen.iter().find(|(p, k, _)| (p, k) == (part, kind)).unwrap();
                        assert!(&found.2 == values, "{name}: {part:?} {kind:?} changed after it was final");
                    }
                }
            }
        }
    }
}

#[test]
fn buckets_come_from_the_head_to_the_embedding() {
    for name in MODELS {
        let model = with_adapters(name);
        let seen = backward(&model, name, &mut model.grads(), Recompute::None);
        let mut parts: Vec<Part> = seen.iter().map(|(part, ..)| *part).collect();
        parts.dedup();
        let layers = (0..model.config.layers.len()).rev().map(Part::Layer);
        let expected: Vec<Part> = [Part::Head].into_iter().chain(layers).chain([Part::Embedding]).collect();
        assert_eq!(parts, expected, "{name}");
    }
}

#[test]
fn protected_tensors_and_adapters_have_buckets_of_their_own() {
    for name in MODELS {
        let model = with_adapters(name);
        let mut grads = model.grads();
        let mut lens = std::collections::HashMap::new();
        for bucket in grads.buckets() {
            *lens.entry(bucket.kind).or_insert(0) += bucket.values.len();
        }
        let learned = |specs: &[ballast_model::params::Spec]| {
            specs.iter().filter(|spec| spec.trainable).map(|spec| spec.len()).sum::<usize>()
        };
        let adapters: usize =
            model.params.adapters().iter().flatten().map(|low| low.a.len() + low.b.len()).sum();
        assert_eq!(lens[&ParameterKind::Weights], learned(&model.specs.weights), "{name}");
        assert_eq!(
            lens.get(&ParameterKind::Protected).copied().unwrap_or(0),
            learned(&model.specs.protected),
            "{name}"
        );
        assert_eq!(lens[&ParameterKind::Adapters], adapters, "{name}");
        assert_eq!(grads.bytes(), 4 * lens.values().sum::<usize>(), "{name}");
    }
}

#[test]
fn parameters_that_are_not_wanted_take_no_space() {
    for name in MODELS {
        let model = load(name, "f32");
        let mut grads = model.grads_of(|spec| spec.part == Part::Layer(1));
        let seen = backward(&model, name, &mut grads, Recompute::None);
        assert!(!seen.is_empty() && seen.iter().all(|(part, ..)| *part == Part::Layer(1)), "{name}");
        let learned = model.specs.all().filter(|spec| spec.trainable && spec.part == Part::Layer(1));
        assert_eq!(grads.bytes(), 4 * learned.map(|spec| spec.len()).sum::<usize>(), "{name}");
        assert_eq!(model.grads_of(|_| false).bytes(), 0);
    }
}
