//! One layer: a mixer (attention) and a feed-forward part, each added to the residual stream.
//!
//! ```text
//! x = x + mixer(norm(x))          Gemma: x + after(mixer(norm(x)))
//! x = x + feed_forward(x)
//! Gemma 4:  x = x + after(W_p (gelu(W_g x) * per-layer input)),  then  x = s x
//! ```

use std::sync::Arc;

use ballast_cluster::Kind;
use ballast_kernels::Element;
use ballast_kernels::elementwise::{accumulate, accumulate_rounded, convert, round, scale};
use ballast_kernels::norm::Saved as NormSaved;

use super::attention::{self, Attention, Cache, KeyValues};
use super::feed_forward::{self, FeedForward};
use super::latent_attention::{self, LatentAttention, Tables};
use super::linear_attention::{self, LinearAttention};
use super::per_layer_input::{self, PerLayerInput};
use super::residual::{Stream, narrowed};
use super::{Keep, Norm, bytes_of};
use crate::batch::Sequences;
use crate::config::{Config, Mixer as MixerShape};
use crate::context::Sent;
use crate::error::Result;
use crate::model::IndexerStage;
use crate::params::{Grads, Id, Init, Specs, Weight};
use crate::precision::Precision;
use crate::run::Run;
use crate::site::Site;

#[derive(Clone, Debug)]
pub(crate) struct Layer {
    index: usize,
    norm: Norm,
    mixer: Mixer,
    after: Option<Norm>,
    feed_forward: FeedForward,
    per_layer_input: Option<PerLayerInput>,
    scalar: Option<Id<Weight>>,
}

#[derive(Clone, Debug)]
enum Mixer {
    Linear(LinearAttention),
    Softmax(Attention),
    Latent(Box<LatentAttention>),
}

/// Activations of a layer that forward saves.
#[derive(Clone, Debug)]
pub(crate) struct Saved<A> {
    /// Stream before the layer: [tokens, H]
    x: Stream,
    norm: NormSaved,
    /// [tokens, H]; recomputed
    normed: Vec<A>,
    mixer: MixerSaved<A>,
    /// Input of the norm after the mixer: [tokens, H]; empty without one
    mixed: Vec<A>,
    after: NormSaved,
    /// Stream between mixer and feed-forward part: [tokens, H]
    middle: Stream,
    feed_forward: feed_forward::Saved<A>,
    per_layer_input: per_layer_input::Saved<A>,
}

#[derive(Clone, Debug)]
enum MixerSaved<A> {
    Linear(linear_attention::Saved<A>),
    Softmax(attention::Saved<A>),
    Latent(latent_attention::Saved<A>),
}

/// Decoding state of one layer.
#[derive(Clone, Debug)]
pub(crate) enum State<A> {
    Linear(linear_attention::State<A>),
    /// KV caches, by sequence
    Softmax(Vec<Cache<A>>),
    /// KV caches, by sequence
    Latent(Vec<latent_attention::Cache<A>>),
    /// Index of the layer whose keys and values are used.
    Shared(usize),
}

impl<A> State<A> {
    pub(crate) fn bytes(&self) -> usize {
        match self {
            State::Linear(state) => state.bytes(),
            State::Softmax(caches) => caches.iter().map(Cache::bytes).sum(),
            State::Latent(caches) => caches.iter().map(latent_attention::Cache::bytes).sum(),
            State::Shared(_) => 0,
        }
    }
}

impl<A> Saved<A> {
    pub(crate) fn bytes(&self) -> usize {
        let mixer = match &self.mixer {
            MixerSaved::Linear(saved) => saved.bytes(),
            MixerSaved::Softmax(saved) => saved.bytes(),
            MixerSaved::Latent(saved) => saved.bytes(),
        };
        bytes_of(&[&self.normed, &self.mixed])
            + self.x.bytes()
            + self.middle.bytes()
            + self.norm.bytes()
            + self.after.bytes()
            + mixer
            + self.feed_forward.bytes()
            + self.per_layer_input.bytes()
    }
}

/// Tensors that layers exchange in addition to the residual stream, and their gradients.
#[derive(Clone, Debug)]
pub(crate) struct Links<A> {
    /// Per-layer inputs [tokens, P], by layer; empty if the model has none
    pub(crate) per_layer_inputs: Vec<Vec<A>>,
    pub(crate) d_per_layer_inputs: Vec<Vec<A>>,
    /// True for layers whose keys and values another layer uses
    shared: Vec<bool>,
    pub(crate) kv: Vec<Option<KeyValues<A>>>,
    gradients: Vec<Option<(Vec<f32>, Vec<f32>)>>,
}

impl<A: Element> Links<A> {
    pub(crate) fn new(config: &Config) -> Links<A> {
        let layers = config.layers.len();
        let mut shared = vec![false; layers];
        for layer in &config.layers {
            if let MixerShape::Softmax(attention) = &layer.mixer
                && let Some(source) = attention.shared_from
            {
                shared[source] = true;
            }
        }
        Links {
            per_layer_inputs: Vec::new(),
            d_per_layer_inputs: vec![Vec::new(); layers],
            shared,
            kv: vec![None; layers],
            gradients: vec![None; layers],
        }
    }

    /// Bytes of the tensors that no layer saves.
    pub(crate) fn bytes(&self) -> usize {
        let tensors = self.kv.iter().flatten().flat_map(|kv| [&kv.k, &kv.v]);
        let linked: usize = tensors
            .filter(|tensor| Arc::strong_count(tensor) == 1)
            .map(|tensor| size_of_val(&tensor[..]))
            .sum();
        self.per_layer_inputs.iter().map(|input| size_of_val(&input[..])).sum::<usize>() + linked
    }

    pub(crate) fn is_shared(&self, layer: usize) -> bool {
        self.shared[layer]
    }

    /// Returns the keys and values of the layer `from`.
    pub(crate) fn source(&self, from: Option<usize>) -> &KeyValues<A> {
        let kv = from.and_then(|layer| self.kv[layer].as_ref());
        kv.expect("a layer without its own keys uses those of an earlier layer")
    }

    pub(crate) fn add_gradients(&mut self, to: Option<usize>, dk: &[A], dv: &[A]) -> Result {
        let to = to.expect("a layer without its own keys uses those of an earlier layer");
        let zero = || (vec![0.0; dk.len()], vec![0.0; dv.len()]);
        let (k, v) = self.gradients[to].get_or_insert_with(zero);
        accumulate(k, dk)?;
        Ok(accumulate(v, dv)?)
    }

    pub(crate) fn take_gradients(&mut self, layer: usize) -> Option<(Vec<f32>, Vec<f32>)> {
        self.gradients[layer].take()
    }
}

impl Layer {
    /// Builds layer `index`; `table` returns the index of the run's table for a rotation.
    pub(crate) fn new(
        specs: &mut Specs,
        index: usize,
        config: &Config,
        table: impl Fn(&crate::config::Rope) -> usize,
    ) -> Layer {
        let shape = &config.layers[index];
        let name = format!("layers.{index}");
        let norm = Norm::new(specs, &format!("{name}.input_layernorm"), config.hidden, config);
        let mixer_name = format!("{name}.{}", shape.mixer_name());
        let mixer = match &shape.mixer {
            MixerShape::Linear(shape) => {
                Mixer::Linear(LinearAttention::new(specs, &mixer_name, index, config, *shape))
            }
            MixerShape::Softmax(shape) => {
                let table = table(&shape.rope);
                Mixer::Softmax(Attention::new(specs, &mixer_name, index, config, shape, table))
            }
            MixerShape::Latent(shape) => {
                let tables = Tables { attention: table(&shape.rope), indexer: table(&shape.indexer_rope) };
                let mixer = LatentAttention::new(specs, &mixer_name, index, config, shape, tables);
                Mixer::Latent(Box::new(mixer))
            }
        };
        let after = config
            .norms_after
            .then(|| Norm::new(specs, &format!("{name}.post_attention_layernorm"), config.hidden, config));
        let feed_forward = FeedForward::new(specs, &name, index, config, shape);
        let per_layer_input =
            config.per_layer_inputs.map(|inputs| PerLayerInput::new(specs, &name, config, inputs.width));
        let scalar =
            config.layer_scalar.then(|| specs.constant(format!("{name}.layer_scalar"), &[1], Init::Ones));
        Layer { index, norm, mixer, after, feed_forward, per_layer_input, scalar }
    }

    pub(crate) fn state<A: Element>(&self, config: &Config, sequences: usize) -> State<A> {
        match (&self.mixer, &config.layers[self.index].mixer) {
            (Mixer::Linear(mixer), _) => State::Linear(mixer.state(sequences)),
            (Mixer::Latent(_), _) => State::Latent(vec![latent_attention::Cache::default(); sequences]),
            (_, MixerShape::Softmax(shape)) if shape.shared_from.is_some() => {
                State::Shared(shape.shared_from.unwrap_or(0))
            }
            _ => State::Softmax((0..sequences).map(|_| Cache::default()).collect()),
        }
    }

    /// Returns the residual stream after this layer, or with [`Keep::Mixer`] some stream inside it. In decoding,
    /// `states` are the states of all layers.
    pub(crate) fn forward<A: Element>(
        &self,
        run: &Run<'_>,
        mut x: Vec<f32>,
        links: &mut Links<A>,
        states: Option<&mut [State<A>]>,
        keep: Keep,
    ) -> Result<(Vec<f32>, Saved<A>)> {
        let (index, rounding) = (Some(self.index), run.precision.site(Site::Residual));
        let (normed, norm): (Vec<A>, _) = self.norm.forward(run, &x)?;
        run.see(index, "input_layernorm", &normed);
        let (mut mixed, mixer) = self.mix(run, &normed, links, states, keep)?;
        run.see(index, "mixer.out", &mixed);
        let mut saved = Saved {
            x: Stream::kept(keep, &x, rounding)?,
            norm,
            normed: keep.unless_recomputed(normed),
            mixer,
            mixed: Vec::new(),
            after: NormSaved::default(),
            middle: Stream::default(),
            feed_forward: feed_forward::Saved::default(),
            per_layer_input: per_layer_input::Saved::default(),
        };
        if let Some(after) = &self.after {
            let (out, rstd) = after.forward(run, &mixed)?;
            saved.after = rstd;
            saved.mixed = keep.always(std::mem::replace(&mut mixed, out));
        }
        accumulate_rounded(&mut x, &mixed, rounding)?;
        drop(mixed);
        run.see_stream("", index, "middle", &x);
        saved.middle = Stream::kept(keep, &x, rounding)?;
        if self.skips_feed_forward(keep) {
            return Ok((x, saved));
        }
        let (y, kept): (Vec<A>, _) = self.feed_forward.forward(run, &x, keep)?;
        saved.feed_forward = kept;
        accumulate_rounded(&mut x, &y, rounding)?;
        drop(y);
        if let Some(part) = &self.per_layer_input {
            let input = &links.per_layer_inputs[self.index];
            saved.per_layer_input = part.forward(run, &mut x, input, keep)?;
        }
        if let Some(scalar) = self.scalar {
            scale(&mut x, run.weight(scalar).to_f32()[0]);
            round(&mut x, rounding);
        }
        run.see_stream("", index, "out", &x);
        Ok((x, saved))
    }

    fn skips_feed_forward(&self, keep: Keep) -> bool {
        keep == Keep::Mixer && self.feed_forward.is_recomputed_from_stream() && self.per_layer_input.is_none()
    }

    /// Level of saving of the feed-forward part.
    fn feed_forward_keep(&self, keep: Keep) -> Keep {
        if self.skips_feed_forward(keep) { Keep::Nothing } else { keep }
    }

    fn mix<A: Element>(
        &self,
        run: &Run<'_>,
        normed: &[A],
        links: &mut Links<A>,
        states: Option<&mut [State<A>]>,
        keep: Keep,
    ) -> Result<(Vec<A>, MixerSaved<A>)> {
        let (earlier, state) = match states {
            None => (None, None),
            Some(states) => {
                let (earlier, own) = states.split_at_mut(self.index);
                (Some(earlier), own.first_mut())
            }
        };
        match &self.mixer {
            Mixer::Linear(mixer) => {
                let state = match state {
                    Some(State::Linear(state)) => Some(state),
                    _ => None,
                };
                let (y, saved) = mixer.forward(run, normed, state, keep)?;
                Ok((y, MixerSaved::Linear(saved)))
            }
            Mixer::Softmax(mixer) => {
                let (caches, shared) = match state {
                    Some(State::Softmax(caches)) => (Some(caches), None),
                    Some(State::Shared(source)) => match earlier.map(|earlier| &earlier[*source]) {
                        Some(State::Softmax(caches)) => (None, Some(&caches[..])),
                        _ => (None, None),
                    },
                    _ => (None, None),
                };
                let (y, saved) = mixer.forward(run, normed, links, caches, shared, keep)?;
                Ok((y, MixerSaved::Softmax(saved)))
            }
            Mixer::Latent(mixer) => {
                let caches = match state {
                    Some(State::Latent(caches)) => Some(caches),
                    _ => None,
                };
                let (y, saved) = mixer.forward(run, normed, caches, keep)?;
                Ok((y, MixerSaved::Latent(saved)))
            }
        }
    }

    /// Replaces the gradient of the residual stream after this layer by the gradient before it.
    pub(crate) fn backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        d_stream: &mut [f32],
        links: &mut Links<A>,
        saved: Saved<A>,
    ) -> Result {
        let Saved { x, norm, mut normed, mixer, mixed, after, middle, feed_forward, per_layer_input } = saved;
        let (index, rounding) = (Some(self.index), run.precision.site(Site::Residual));
        run.see_stream("d.", index, "out", d_stream);
        if let Some(scalar) = self.scalar {
            scale(d_stream, run.weight(scalar).to_f32()[0]);
            round(d_stream, rounding);
        }
        if let Some(part) = &self.per_layer_input {
            let input = &links.per_layer_inputs[self.index];
            let d_input = part.backward(run, grads, d_stream, input, per_layer_input)?;
            links.d_per_layer_inputs[self.index] = d_input;
        }
        self.feed_forward.backward(run, grads, d_stream, &middle, feed_forward)?;
        drop(middle);
        run.see_stream("d.", index, "middle", d_stream);
        if normed.is_empty() {
            (normed, _) = self.norm.forward_again(run, &x)?;
        }
        let d_mixed: Vec<A> = match &self.after {
            Some(norm) => norm.backward(run, grads, d_stream, &mixed, &after)?,
            None => narrowed(d_stream)?,
        };
        drop(mixed);
        let mut d_normed = vec![0.0; normed.len()];
        match (&self.mixer, mixer) {
            (Mixer::Linear(mixer), MixerSaved::Linear(saved)) => {
                mixer.backward(run, grads, &mut d_normed, d_mixed, &normed, saved)?;
            }
            (Mixer::Softmax(mixer), MixerSaved::Softmax(saved)) => {
                mixer.backward(run, grads, &mut d_normed, &d_mixed, &normed, links, saved)?;
            }
            (Mixer::Latent(mixer), MixerSaved::Latent(saved)) => {
                mixer.backward(run, grads, &mut d_normed, &d_mixed, &normed, saved)?;
            }
            _ => unreachable!("saved activations are those of this layer's mixer"),
        }
        let mut dn = normed;
        convert(&mut dn, &d_normed)?;
        drop(d_normed);
        self.norm.backward_stream(run, grads, &dn, &x, &norm)?.add_to(d_stream, rounding)
    }

    /// Returns the bytes that forward saves for these sequences; `stage` is the stage of the indexer's
    /// training, if any.
    pub(crate) fn saved_bytes<A: Element>(
        &self,
        config: &Config,
        precision: &Precision,
        sequences: Sequences<'_>,
        keep: Keep,
        stage: Option<IndexerStage>,
    ) -> usize {
        if !keep.any() {
            return 0;
        }
        let tokens = sequences.tokens();
        let (tensor, rstd) = (tokens * config.hidden * size_of::<A>(), 4 * tokens);
        let stream = tokens * config.hidden * Stream::element_bytes(precision.site(Site::Residual));
        let mixer = match &self.mixer {
            Mixer::Linear(mixer) => mixer.saved_bytes::<A>(sequences, keep, precision.site(Site::L2Norm)),
            Mixer::Softmax(mixer) => mixer.saved_bytes::<A>(tokens, keep, precision),
            Mixer::Latent(mixer) => mixer.saved_bytes::<A>(sequences, keep, precision, stage),
        };
        let per_layer_input = self
            .per_layer_input
            .as_ref()
            .map_or(0, |part| part.saved_bytes::<A>(tokens, config.hidden, keep));
        let normed = if keep == Keep::Everything { tensor } else { 0 };
        let after = if self.after.is_some() { tensor + rstd } else { 0 };
        2 * stream
            + rstd
            + normed
            + after
            + mixer
            + per_layer_input
            + self.feed_forward.saved_bytes::<A>(tokens, config.hidden, self.feed_forward_keep(keep))
    }

    /// Returns the bytes of keys and values that later layers use and that the layer itself does not save.
    pub(crate) fn linked_bytes<A>(&self, tokens: usize, keep: Keep) -> usize {
        match &self.mixer {
            Mixer::Softmax(mixer) => mixer.linked_bytes::<A>(tokens, keep),
            Mixer::Linear(_) | Mixer::Latent(_) => 0,
        }
    }

    /// Returns the temporary bytes of backward: the stream's gradient in f32, the gradient of the current
    /// part's output, and the part's temporary bytes. The saved activations of the feed-forward part are
    /// freed before the mixer's backward.
    pub(crate) fn transient<A: Element>(
        &self,
        config: &Config,
        precision: &Precision,
        sequences: Sequences<'_>,
        keep: Keep,
        stage: Option<IndexerStage>,
    ) -> usize {
        let tokens = sequences.tokens();
        let (tensor, wide) = (tokens * config.hidden * size_of::<A>(), 4 * tokens * config.hidden);
        let normed = if keep == Keep::Everything { 0 } else { tensor };
        let mixer = match &self.mixer {
            Mixer::Linear(mixer) => mixer.transient::<A>(tokens, keep),
            Mixer::Softmax(mixer) => mixer.transient::<A>(sequences, keep),
            Mixer::Latent(mixer) => mixer.transient::<A>(sequences, keep, stage),
        };
        let per_layer_input =
            self.per_layer_input.as_ref().map_or(0, |part| part.transient::<A>(tokens, config.hidden));
        let later = self.feed_forward_keep(keep);
        let feed_forward = self.feed_forward.transient::<A>(tokens, config.hidden, later);
        let middle = tokens * config.hidden * Stream::element_bytes(precision.site(Site::Residual));
        let gone = middle + self.feed_forward.saved_bytes::<A>(tokens, config.hidden, later);
        wide + per_layer_input.max(feed_forward).max((tensor + wide + normed + mixer).saturating_sub(gone))
    }

    /// Returns the bytes that a rank sends; `stage` is the stage of the indexer's training, if any.
    pub(crate) fn sent<A: Element>(
        &self,
        precision: &Precision,
        sequences: Sequences<'_>,
        stage: Option<IndexerStage>,
    ) -> (Kind, Sent) {
        match &self.mixer {
            Mixer::Linear(mixer) => (Kind::States, mixer.sent::<A>(sequences)),
            Mixer::Softmax(mixer) => (Kind::Attention, mixer.sent::<A>(sequences, precision)),
            Mixer::Latent(mixer) => (Kind::Attention, mixer.sent::<A>(sequences, stage)),
        }
    }

    /// Returns the f32 elements that one slot of scratch needs, if `before` tokens of the first sequence are
    /// on earlier ranks.
    pub(crate) fn scratch<A: Element>(&self, tokens: usize, before: usize) -> usize {
        let mixer = match &self.mixer {
            Mixer::Linear(mixer) => mixer.scratch(tokens),
            Mixer::Softmax(mixer) => mixer.scratch::<A>(tokens),
            Mixer::Latent(mixer) => mixer.scratch::<A>(tokens, before),
        };
        let per_layer_input = self.per_layer_input.as_ref().map_or(0, |part| part.scratch(tokens));
        mixer.max(self.feed_forward.scratch(tokens)).max(self.norm.scratch(tokens)).max(per_layer_input)
    }
}
