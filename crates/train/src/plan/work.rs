//! Floating-point operations of a micro-batch: matrix products, attention and the delta rule. Everything else passes
//! over memory once and is not counted.

use ballast_kernels::gated_delta_rule::Options;
use ballast_model::Recompute;
use ballast_model::config::{Layer, Mixer};
use ballast_model::params::{Part, Spec};

use super::blueprint::Blueprint;

/// Backward of attention and of the delta rule, in forwards: five products instead of two.
const MIXER_BACKWARD: f64 = 2.5;

/// Operations of a part of the model on a rank, for one micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Work {
    pub(super) forward: f64,
    pub(super) backward: f64,
}

impl Blueprint<'_> {
    /// Tokens of a micro-batch that a rank computes.
    pub(super) fn own_tokens(&self) -> f64 {
        let tokens = self.config.batch.sequences as f64 * self.config.data.sequence_length as f64;
        tokens / self.config.cluster.context as f64
    }

    /// Operations of a part.
    pub(super) fn work(&self, part: Part) -> Work {
        let tokens = self.own_tokens();
        let mut work = Work::default();
        for weight in self.weights_of(part) {
            let product = 2.0 * tokens * self.used_elements(&self.model.specs.weights[weight], part);
            work.forward += product;
            // The gradient of the input, and that of the weight if it is learned.
            work.backward += if self.is_learned(weight) { 2.0 * product } else { product };
            if let Some(Some(low)) = self.model.params.adapters().get(weight) {
                let shape = &self.model.specs.weights[weight].shape;
                let product = 2.0 * tokens * (low.rank * (shape[0] + shape[1])) as f64;
                (work.forward, work.backward) = (work.forward + product, work.backward + 2.0 * product);
            }
        }
        match part {
            Part::Embedding => {}
            Part::Layer(index) => {
                let mixer = self.mixer_work(&self.model.config.layers[index]);
                (work.forward, work.backward) =
                    (work.forward + mixer, work.backward + MIXER_BACKWARD * mixer);
                if self.config.precision.recompute == Recompute::Full {
                    work.backward += work.forward;
                }
            }
            Part::Head if self.model.config.tied => {
                let product = 2.0 * tokens * (self.model.config.vocabulary * self.model.config.hidden) as f64;
                let embedding = self.weights_of(Part::Embedding).next();
                let learned = embedding.is_some_and(|weight| self.is_learned(weight));
                work.forward += product;
                work.backward += if learned { 2.0 * product } else { product };
            }
            Part::Head => {}
        }
        work
    }

    /// Elements of a weight that a token is multiplied by.
    fn used_elements(&self, spec: &Spec, part: Part) -> f64 {
        let len = spec.len() as f64;
        let experts = match part {
            Part::Layer(index) => self.model.config.layers[index].experts,
            _ => None,
        };
        match experts {
            _ if spec.shape.len() < 2 || spec.name.starts_with("embed_tokens") => 0.0,
            Some(experts) if spec.name.contains(".experts.") => {
                len * experts.top_k as f64 / experts.count as f64
            }
            _ => len,
        }
    }

    /// Operations of attention or of the delta rule, forward. Sequences that ranks share are divided evenly.
    fn mixer_work(&self, layer: &Layer) -> f64 {
        let (sequences, length) =
            (self.config.batch.sequences as f64, self.config.data.sequence_length as f64);
        // Pairs of a query and a key that it sees, at most `most` keys.
        let pairs = |most: f64| {
            let full = length.min(most);
            sequences * (full * (full + 1.0) / 2.0 + (length - full) * full)
                / self.config.cluster.context as f64
        };
        match &layer.mixer {
            Mixer::Linear(shape) => {
                let (chunk, keys, values) =
                    (Options::default().chunk as f64, shape.key_dim as f64, shape.value_dim as f64);
                let products = 2.0 * chunk * (keys + values) + 3.0 * keys * values;
                2.0 * self.own_tokens() * shape.value_heads as f64 * products
            }
            Mixer::Softmax(shape) => {
                let window = shape.window.map_or(f64::INFINITY, |window| window as f64);
                4.0 * (shape.heads * shape.head_dim) as f64 * pairs(window)
            }
            Mixer::Latent(shape) => {
                let width = shape.heads * (shape.nope_dim + shape.rope_dim + shape.value_dim);
                let index = 2.0 * (shape.index_heads * shape.index_dim) as f64 * pairs(f64::INFINITY);
                2.0 * width as f64 * pairs(shape.index_topk as f64) + index
            }
        }
    }
}
