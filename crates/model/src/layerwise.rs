//! A run layer by layer: what flows through a model, and nothing of the model.
//!
//! ```text
//! begin (embedding) -> forward 0, 1, ..., n-1 -> turn (norm, loss) -> backward n-1, ..., 1, 0 -> arrive (embedding)
//! ```
//! [`Model::forward_backward`] walks this way in one go. A [`LayerwiseRun`] stops wherever its caller wants, so that the parameters of one
//! layer are enough to have in memory, and several runs can go side by side.

use ballast_kernels::elementwise::round;
use ballast_kernels::embedding::{embedding_backward, embedding_backward_workspace};
use ballast_kernels::linear_cross_entropy::Loss;
use ballast_kernels::norm::Saved as NormSaved;
use ballast_kernels::rotary::Table;
use ballast_kernels::{Element, Scratch};
use half::bf16;

use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::layers::{InputsSaved, Keep, Links, Saved, Stream, narrowed, with_stream};
use crate::model::{IndexerLoss, LossOptions, Model, Recompute};
use crate::params::Grads;
use crate::precision::Storage;
use crate::probe::Probe;
use crate::run::Run;
use crate::site::Site;

/// What flows, and what a forward kept.
pub(crate) struct Trail<A> {
    /// The residual stream [tokens, H]; on the way back its gradient
    pub(crate) x: Vec<f32>,
    /// The stream after the last layer, for the backward of the last norm
    last: Stream,
    layers: Vec<LayerTrail<A>>,
    pub(crate) norm: NormSaved,
    links: Links<A>,
    /// The embeddings [tokens, H], where layers have inputs of their own that are made from them
    embedded: Vec<A>,
    per_layer_inputs: InputsSaved<A>,
    /// Whether a backward will follow, and how much of it is made anew.
    recompute: Option<Recompute>,
}

enum LayerTrail<A> {
    Input(Stream),
    Saved(Box<Saved<A>>),
}

impl<A> Trail<A> {
    pub(crate) fn bytes(&self) -> usize {
        let layer = |trail: &LayerTrail<A>| match trail {
            LayerTrail::Input(x) => x.bytes(),
            LayerTrail::Saved(saved) => saved.bytes(),
        };
        let per_layer_inputs: usize =
            self.links.per_layer_inputs.iter().map(|input| input.len() * size_of::<A>()).sum();
        self.layers.iter().map(layer).sum::<usize>()
            + size_of_val(&self.x[..])
            + self.last.bytes()
            + size_of_val(&self.embedded[..])
            + self.norm.bytes()
            + self.per_layer_inputs.bytes()
            + per_layer_inputs
    }
}

impl Model {
    /// Embedding and all layers; `recompute` says how a backward will be made, `None` that there will be none.
    pub(crate) fn forward<A: Element>(
        &self,
        run: &Run<'_>,
        recompute: Option<Recompute>,
    ) -> Result<Trail<A>> {
        let mut trail = self.begin(run, recompute)?;
        for index in 0..self.layers().len() {
            self.layer_forward(run, &mut trail, index)?;
        }
        Ok(trail)
    }

    /// The embedding.
    fn begin<A: Element>(&self, run: &Run<'_>, recompute: Option<Recompute>) -> Result<Trail<A>> {
        let x = self.embed(run)?;
        let mut links = Links::new(&self.config);
        let (mut embedded, mut per_layer_inputs) = (Vec::new(), InputsSaved::default());
        if let Some(inputs) = &self.per_layer_inputs {
            let keep = if recompute.is_some() { Keep::Everything } else { Keep::Nothing };
            let x: Vec<A> = narrowed(&x)?;
            (links.per_layer_inputs, per_layer_inputs) = inputs.forward(run, &x, keep)?;
            embedded = keep.always(x);
        }
        let (last, layers, norm) = (Stream::default(), Vec::new(), NormSaved::default());
        Ok(Trail { x, last, layers, norm, links, embedded, per_layer_inputs, recompute })
    }

    /// One layer forward.
    fn layer_forward<A: Element>(&self, run: &Run<'_>, trail: &mut Trail<A>, index: usize) -> Result {
        let keep = trail.recompute.map_or(Keep::Nothing, Recompute::keep);
        let input = match trail.recompute {
            Some(Recompute::Full) => Some(Stream::new(trail.x.clone(), run.precision.site(Site::Residual))?),
            _ => None,
        };
        let x = std::mem::take(&mut trail.x);
        let (out, saved) = self.layers()[index].forward(run, x, &mut trail.links, None, keep)?;
        trail.x = out;
        match input {
            Some(input) => trail.layers.push(LayerTrail::Input(input)),
            None if keep.any() => trail.layers.push(LayerTrail::Saved(Box::new(saved))),
            None => {}
        }
        Ok(())
    }

    /// The last norm and the loss, and back through both.
    pub(crate) fn loss_backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        trail: &mut Trail<A>,
        options: &LossOptions,
    ) -> Result<Loss> {
        let hidden = self.keep_last_norm(run, trail)?;
        run.see(None, "norm", &hidden);
        let (loss, dhidden) = self.head_backward(run, grads, &hidden, options)?;
        drop(hidden);
        run.see_gradient(None, "norm", &dhidden);
        let dx = self.norm.backward_stream(run, grads, &dhidden, &trail.last, &trail.norm)?;
        drop(dhidden);
        trail.last = Stream::default();
        trail.x = dx.into_f32();
        round(&mut trail.x, run.precision.site(Site::Residual));
        Ok(loss)
    }

    fn last_norm_of<A: Element>(&self, run: &Run<'_>, trail: &Trail<A>) -> Result<Vec<A>> {
        self.last_norm(run, &trail.x)
    }

    /// The last norm's output; stores what its backward needs in the place of the stream.
    pub(crate) fn keep_last_norm<A: Element>(&self, run: &Run<'_>, trail: &mut Trail<A>) -> Result<Vec<A>> {
        trail.last = Stream::new(std::mem::take(&mut trail.x), run.precision.site(Site::Residual))?;
        let hidden;
        (hidden, trail.norm) = with_stream!(&trail.last, |x| self.norm.forward(run, x)?);
        Ok(hidden)
    }

    /// One layer backward, the last first.
    pub(crate) fn layer_backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        trail: &mut Trail<A>,
        index: usize,
    ) -> Result {
        let (layer, links) = (&self.layers()[index], &mut trail.links);
        let not_kept = || Error::Input(format!("layer {index} cannot go back: nothing was kept of it"));
        let saved = match trail.layers.pop().ok_or_else(not_kept)? {
            LayerTrail::Saved(saved) => *saved,
            LayerTrail::Input(x) => layer.forward(run, x.into_f32(), links, None, Keep::Everything)?.1,
        };
        layer.backward(run, grads, &mut trail.x, links, saved)
    }

    /// Back to the embedding.
    pub(crate) fn embedding_backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        trail: Trail<A>,
    ) -> Result {
        let Trail { x: mut dx, links, embedded, per_layer_inputs, .. } = trail;
        if let Some(inputs) = &self.per_layer_inputs {
            inputs.backward(run, grads, &mut dx, &links.d_per_layer_inputs, &embedded, &per_layer_inputs)?;
            round(&mut dx, run.precision.site(Site::Residual));
        }
        run.see_stream("d.", None, "embed", &dx);
        if let Some(dw) = grads.of(self.embedding) {
            run.forget_padding(&mut dx);
            let (scale, ids) = (self.embedding_scale(), &run.batch.ids);
            let mut workspace = vec![0.0; embedding_backward_workspace(ids.len())];
            embedding_backward(dw, &dx, ids, scale, self.config.hidden, &mut workspace)?;
        }
        Ok(())
    }
}

/// A run that stops between layers. The model is given anew to every step, with the parameters of that step in memory
/// ([`crate::LazyCheckpoint`]); it must be the same one otherwise.
pub struct LayerwiseRun<'b> {
    batch: &'b Batch,
    tables: Vec<Table>,
    scratch: Scratch,
    options: LossOptions,
    flow: Flow,
}

enum Flow {
    F32(Trail<f32>),
    Bf16(Trail<bf16>),
}

/// Runs `$body` with what all layers share and the trail, whatever its type.
macro_rules! with_flow {
    ($pass:expr, $model:expr, $probe:expr, |$run:ident, $trail:ident| $body:expr) => {{
        let LayerwiseRun { batch, tables, scratch, options, flow } = $pass;
        let probe = Option::<&mut dyn Probe>::map($probe, |probe| probe as &mut dyn Probe);
        let $run = &$model.run_on(batch, tables, scratch, probe, options)?;
        match flow {
            Flow::F32($trail) => $body,
            Flow::Bf16($trail) => $body,
        }
    }};
}

impl<'b> LayerwiseRun<'b> {
    /// The embedding; `recompute` says how a backward will be made, `None` that there will be none; `indexer` whether the
    /// indexers learn on it.
    pub fn begin(
        model: &Model,
        batch: &'b Batch,
        recompute: Option<Recompute>,
        indexer: Option<IndexerLoss>,
        probe: Option<&mut dyn Probe>,
    ) -> Result<LayerwiseRun<'b>> {
        let tables = model.tables(&batch.positions);
        let narrow = model.precision().activations == Storage::Bf16;
        let (tokens, options) = (batch.tokens(), LossOptions { indexer, ..LossOptions::default() });
        let scratch = Scratch::new(if narrow {
            model.scratch_len::<bf16>(tokens)
        } else {
            model.scratch_len::<f32>(tokens)
        });
        let flow = {
            let probe = probe.map(|probe| probe as &mut dyn Probe);
            let run = model.run_on(batch, &tables, &scratch, probe, &options)?;
            if narrow {
                Flow::Bf16(model.begin(&run, recompute)?)
            } else {
                Flow::F32(model.begin(&run, recompute)?)
            }
        };
        Ok(LayerwiseRun { batch, tables, scratch, options, flow })
    }

    /// Layer `index` forward.
    pub fn forward(&mut self, model: &Model, index: usize, probe: Option<&mut dyn Probe>) -> Result {
        with_flow!(self, model, probe, |run, trail| model.layer_forward(run, trail, index))
    }

    /// The last norm, for a probe: [`LayerwiseRun::logits`] and [`LayerwiseRun::loss_backward`] take it themselves.
    pub fn norm(&self, model: &Model, probe: &mut dyn Probe) -> Result {
        with_flow!(self, model, Some(probe), |run, trail| model.last_norm_of(run, trail).map(drop))
    }

    /// The logits [rows, V] of these tokens.
    pub fn logits(&self, model: &Model, rows: std::ops::Range<usize>) -> Result<Vec<f32>> {
        with_flow!(self, model, None, |run, trail| {
            let hidden = model.last_norm_of(run, trail)?;
            let width = model.config.hidden;
            model.project(run, &hidden[rows.start * width..rows.end * width])
        })
    }

    /// The loss, and back through head and last norm.
    pub fn loss_backward(
        &mut self,
        model: &Model,
        grads: &mut Grads,
        probe: Option<&mut dyn Probe>,
    ) -> Result<Loss> {
        let options = self.options;
        with_flow!(self, model, probe, |run, trail| model.loss_backward(run, grads, trail, &options))
    }

    /// Layer `index` backward; the last one first.
    pub fn backward(
        &mut self,
        model: &Model,
        grads: &mut Grads,
        index: usize,
        probe: Option<&mut dyn Probe>,
    ) -> Result {
        with_flow!(self, model, probe, |run, trail| model.layer_backward(run, grads, trail, index))
    }

    /// Back to the embedding, where it ends.
    pub fn embedding_backward(
        self,
        model: &Model,
        grads: &mut Grads,
        probe: Option<&mut dyn Probe>,
    ) -> Result {
        let LayerwiseRun { batch, tables, scratch, options, flow } = self;
        let probe = probe.map(|probe| probe as &mut dyn Probe);
        let run = model.run_on(batch, &tables, &scratch, probe, &options)?;
        match flow {
            Flow::F32(trail) => model.embedding_backward(&run, grads, trail),
            Flow::Bf16(trail) => model.embedding_backward(&run, grads, trail),
        }
    }
}
