//! Layerwise runs: one visit of a [pass](crate::pass) at a time, and the activations and gradients between
//! them, separate from the model's parameters.

use ballast_kernels::elementwise::round;
use ballast_kernels::embedding::{embedding_backward, embedding_backward_workspace};
use ballast_kernels::linear_cross_entropy::Loss;
use ballast_kernels::norm::Saved as NormSaved;
use ballast_kernels::rotary::Table;
use ballast_kernels::{Element, Scratch};
use half::bf16;

use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::layers::{InputsSaved, Keep, Links, Saved, State, Stream, narrowed};
use crate::model::{LossOptions, Model, Recompute, StepLoss};
use crate::params::{Grads, Part};
use crate::precision::{Storage, with_storage};
use crate::probe::Probe;
use crate::run::{Run, Tally};
use crate::site::Site;

/// Residual stream of a run and the activations saved for backward.
pub(crate) struct Trail<A> {
    /// Residual stream [tokens, H]; in backward its gradient
    pub(crate) x: Vec<f32>,
    /// Residual stream after the last layer, for the backward of the final norm
    last: Stream,
    layers: Vec<LayerTrail<A>>,
    norm: NormSaved,
    links: Links<A>,
    /// Embeddings [tokens, H], if the model has per-layer inputs, which are computed from them
    embedded: Vec<A>,
    per_layer_inputs: InputsSaved<A>,
    /// Activations that backward recomputes; `None` if there is no backward.
    recompute: Option<Recompute>,
}

enum LayerTrail<A> {
    Input(Stream),
    Saved(Box<Saved<A>>),
}

impl<A: Element> Trail<A> {
    pub(crate) fn new(model: &Model, recompute: Option<Recompute>) -> Trail<A> {
        Trail {
            x: Vec::new(),
            last: Stream::default(),
            layers: Vec::new(),
            norm: NormSaved::default(),
            links: Links::new(&model.config),
            embedded: Vec::new(),
            per_layer_inputs: InputsSaved::default(),
            recompute,
        }
    }

    fn bytes(&self) -> usize {
        let layer = |trail: &LayerTrail<A>| match trail {
            LayerTrail::Input(x) => x.bytes(),
            LayerTrail::Saved(saved) => saved.bytes(),
        };
        self.layers.iter().map(layer).sum::<usize>()
            + size_of_val(&self.x[..])
            + self.last.bytes()
            + size_of_val(&self.embedded[..])
            + self.norm.bytes()
            + self.per_layer_inputs.bytes()
            + self.links.bytes()
    }
}

impl Model {
    /// Runs the forward of one part: of the head, the final norm. In decoding, `states` are the states of all
    /// layers.
    pub(crate) fn part_forward<A: Element>(
        &self,
        run: &Run<'_>,
        trail: &mut Trail<A>,
        part: Part,
        states: Option<&mut [State<A>]>,
    ) -> Result {
        match part {
            Part::Embedding => self.embedding_forward(run, trail),
            Part::Layer(index) => self.layer_forward(run, trail, index, states),
            Part::Head => self.hidden(run, trail).map(drop),
        }
    }

    /// Runs the backward of one part; of the head, with the loss.
    fn part_backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        trail: &mut Trail<A>,
        part: Part,
        options: &LossOptions,
    ) -> Result {
        match part {
            Part::Head => self.loss_backward(run, grads, trail, options),
            Part::Layer(index) => self.layer_backward(run, grads, trail, index),
            Part::Embedding => {
                // Nothing is needed after it.
                let trail = std::mem::replace(trail, Trail::new(self, None));
                self.embedding_backward(run, grads, trail)
            }
        }
    }

    fn embedding_forward<A: Element>(&self, run: &Run<'_>, trail: &mut Trail<A>) -> Result {
        trail.x = self.embed(run)?;
        if let Some(inputs) = &self.per_layer_inputs {
            let keep = if trail.recompute.is_some() { Keep::Everything } else { Keep::Nothing };
            let x: Vec<A> = narrowed(&trail.x)?;
            (trail.links.per_layer_inputs, trail.per_layer_inputs) = inputs.forward(run, &x, keep)?;
            trail.embedded = keep.always(x);
        }
        Ok(())
    }

    fn layer_forward<A: Element>(
        &self,
        run: &Run<'_>,
        trail: &mut Trail<A>,
        index: usize,
        states: Option<&mut [State<A>]>,
    ) -> Result {
        let keep = trail.recompute.map_or(Keep::Nothing, Recompute::keep);
        let input = match trail.recompute {
            Some(Recompute::Full) => Some(Stream::new(trail.x.clone(), run.precision.site(Site::Residual))?),
            _ => None,
        };
        let x = std::mem::take(&mut trail.x);
        let (out, saved) = self.layers()[index].forward(run, x, &mut trail.links, states, keep)?;
        trail.x = out;
        match input {
            Some(input) => trail.layers.push(LayerTrail::Input(input)),
            None if keep.any() => trail.layers.push(LayerTrail::Saved(Box::new(saved))),
            None => {}
        }
        Ok(())
    }

    /// Hidden states [tokens, H]: the output of the final norm.
    pub(crate) fn hidden<A: Element>(&self, run: &Run<'_>, trail: &Trail<A>) -> Result<Vec<A>> {
        let (hidden, _) = self.norm.forward(run, &trail.x)?;
        run.see(None, "norm", &hidden);
        Ok(hidden)
    }

    /// [`Model::hidden`] before backward: moves the stream to `trail.last`, for the norm's backward.
    fn keep_hidden<A: Element>(&self, run: &Run<'_>, trail: &mut Trail<A>) -> Result<Vec<A>> {
        trail.last = Stream::new(std::mem::take(&mut trail.x), run.precision.site(Site::Residual))?;
        let hidden;
        (hidden, trail.norm) = with_storage!(Stream, &trail.last, |x| self.norm.forward(run, x)?);
        Ok(hidden)
    }

    /// Runs the final norm and the loss, and the backward of both.
    fn loss_backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        trail: &mut Trail<A>,
        options: &LossOptions,
    ) -> Result {
        if let Some(balance) = &run.tally.balance {
            balance.complete(run.context.as_ref())?;
        }
        let hidden = self.keep_hidden(run, trail)?;
        run.see(None, "norm", &hidden);
        let (loss, dhidden) = self.head_backward(run, grads, &hidden, options)?;
        drop(hidden);
        run.see_gradient(None, "norm", &dhidden);
        let dx = self.norm.backward_stream(run, grads, &dhidden, &trail.last, &trail.norm)?;
        drop(dhidden);
        trail.last = Stream::default();
        trail.x = dx.into_f32();
        round(&mut trail.x, run.precision.site(Site::Residual));
        run.tally.language.set(loss);
        Ok(())
    }

    fn layer_backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        trail: &mut Trail<A>,
        index: usize,
    ) -> Result {
        let (layer, links) = (&self.layers()[index], &mut trail.links);
        let not_saved = || Error::Input(format!("layer {index}: no saved activations for backward"));
        let saved = match trail.layers.pop().ok_or_else(not_saved)? {
            LayerTrail::Saved(saved) => *saved,
            LayerTrail::Input(x) => layer.forward(run, x.into_f32(), links, None, Keep::Mixer)?.1,
        };
        layer.backward(run, grads, &mut trail.x, links, saved)
    }

    fn embedding_backward<A: Element>(&self, run: &Run<'_>, grads: &mut Grads, trail: Trail<A>) -> Result {
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

/// A run in steps, one for each visit of a pass. Every step takes the model as an argument: it needs only the
/// parameters of that part in memory ([`crate::LazyCheckpoint`]), but must otherwise be the same model. So
/// several runs can proceed side by side.
pub struct LayerwiseRun<'b> {
    batch: &'b Batch,
    options: LossOptions,
    tables: Vec<Table>,
    scratch: Scratch,
    tally: Tally,
    flow: Flow,
}

/// A [`Trail`] in the type of activations.
enum Flow {
    F32(Trail<f32>),
    Bf16(Trail<bf16>),
}

impl<'b> LayerwiseRun<'b> {
    /// Prepares a run over a batch. `recompute` selects what backward recomputes, `None` if there is no
    /// backward. The model may be without values.
    pub fn new(
        model: &Model,
        batch: &'b Batch,
        recompute: Option<Recompute>,
        options: LossOptions,
    ) -> Result<LayerwiseRun<'b>> {
        batch.check(model.config.vocabulary)?;
        let sequences = batch.sequences();
        let (scratch, flow) = match model.precision().activations {
            Storage::F32 => (model.scratch_len::<f32>(sequences), Flow::F32(Trail::new(model, recompute))),
            Storage::Bf16 => (model.scratch_len::<bf16>(sequences), Flow::Bf16(Trail::new(model, recompute))),
        };
        Ok(LayerwiseRun {
            batch,
            options,
            tables: model.tables(&batch.positions),
            scratch: Scratch::new(scratch),
            tally: Tally::new(&model.config, &options)?,
            flow,
        })
    }

    /// Runs the forward of one part; of the head, only the final norm, for a probe: [`LayerwiseRun::logits`],
    /// [`LayerwiseRun::loss`] and backward run it themselves.
    pub fn forward(&mut self, model: &Model, part: Part, probe: Option<&mut dyn Probe>) -> Result {
        let LayerwiseRun { batch, tables, scratch, tally, flow, .. } = self;
        let run = &model.run_on(batch, tables, scratch, tally, probe)?;
        with_storage!(Flow, flow, |trail| model.part_forward(run, trail, part, None))
    }

    /// Runs the backward of one part and adds its gradients; of the head, with the final norm and the loss.
    pub fn backward(
        &mut self,
        model: &Model,
        grads: &mut Grads,
        part: Part,
        probe: Option<&mut dyn Probe>,
    ) -> Result {
        let options = self.options;
        let LayerwiseRun { batch, tables, scratch, tally, flow, .. } = self;
        let run = &model.run_on(batch, tables, scratch, tally, probe)?;
        with_storage!(Flow, flow, |trail| model.part_backward(run, grads, trail, part, &options))
    }

    /// Returns the logits [rows, V] of these tokens.
    pub fn logits(
        &self,
        model: &Model,
        rows: std::ops::Range<usize>,
        probe: Option<&mut dyn Probe>,
    ) -> Result<Vec<f32>> {
        let LayerwiseRun { batch, tables, scratch, tally, flow, .. } = self;
        let run = &model.run_on(batch, tables, scratch, tally, probe)?;
        with_storage!(Flow, flow, |trail| {
            let hidden = model.hidden(run, trail)?;
            let width = model.config.hidden;
            model.project(run, &hidden[rows.start * width..rows.end * width])
        })
    }

    /// Computes the loss, without gradients.
    pub fn loss(&self, model: &Model, probe: Option<&mut dyn Probe>) -> Result<Loss> {
        let options = &self.options;
        let LayerwiseRun { batch, tables, scratch, tally, flow, .. } = self;
        let run = &model.run_on(batch, tables, scratch, tally, probe)?;
        with_storage!(Flow, flow, |trail| {
            let hidden = model.hidden(run, trail)?;
            model.loss_of(run, &hidden, options)
        })
    }

    /// Losses of the backward so far: the language loss and the load-balancing loss after that of the head,
    /// the sum of the indexers' losses after that of their layers.
    pub fn losses(&self) -> StepLoss {
        self.tally.losses()
    }

    /// Bytes that the forward of all layers, and the final norm, keep for backward.
    pub(crate) fn kept(&mut self, model: &Model) -> Result<usize> {
        let LayerwiseRun { batch, tables, scratch, tally, flow, .. } = self;
        let run = &model.run_on(batch, tables, scratch, tally, None)?;
        with_storage!(Flow, flow, |trail| {
            model.keep_hidden(run, trail)?;
            Ok(trail.bytes())
        })
    }
}
