//! Layer-by-layer runs: the activations and gradients of a run, separate from the model's parameters.
//!
//! ```text
//! begin (embedding) -> forward 0, 1, ..., n-1 -> loss_backward (norm, head, loss)
//!     -> backward n-1, ..., 1, 0 -> embedding_backward
//! ```
//! [`Model::forward_backward`] does all of this in one call. A [`LayerwiseRun`] stops after each step, so
//! that only the parameters of one layer have to be in memory and several runs can proceed side by side.

use std::cell::RefCell;

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
use crate::model::{LossOptions, Model, Recompute};
use crate::params::Grads;
use crate::precision::Storage;
use crate::probe::Probe;
use crate::run::{Balancing, Run};
use crate::site::Site;

/// Residual stream of a run and the activations saved for backward.
pub(crate) struct Trail<A> {
    /// Residual stream [tokens, H]; in backward its gradient
    pub(crate) x: Vec<f32>,
    /// Residual stream after the last layer, for the backward of the final norm
    last: Stream,
    layers: Vec<LayerTrail<A>>,
    pub(crate) norm: NormSaved,
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
    /// Runs the embedding and all layers. `recompute` selects what backward recomputes; `None` if there is no
    /// backward.
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

    /// Runs the embedding.
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

    /// Runs the forward of one layer.
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

    /// Runs the final norm and the loss, and the backward of both.
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

    /// Returns the output of the final norm; moves the stream to `trail.last`, for the norm's backward.
    pub(crate) fn keep_last_norm<A: Element>(&self, run: &Run<'_>, trail: &mut Trail<A>) -> Result<Vec<A>> {
        trail.last = Stream::new(std::mem::take(&mut trail.x), run.precision.site(Site::Residual))?;
        let hidden;
        (hidden, trail.norm) = with_stream!(&trail.last, |x| self.norm.forward(run, x)?);
        Ok(hidden)
    }

    /// Runs the backward of one layer; the last layer comes first.
    pub(crate) fn layer_backward<A: Element>(
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

    /// Runs the backward of the embedding.
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

/// A run that stops between layers. Every step takes the model as an argument: it needs only the parameters
/// of that step in memory ([`crate::LazyCheckpoint`]), but must otherwise be the same model.
pub struct LayerwiseRun<'b> {
    batch: &'b Batch,
    tables: Vec<Table>,
    scratch: Scratch,
    options: LossOptions,
    flow: Flow,
    losses: RefCell<Losses>,
}

/// Losses of single layers, summed from step to step.
#[derive(Default)]
struct Losses {
    /// Sum of the indexers' losses.
    indexer: f64,
    /// Sums of the load-balancing loss of the routers, if there is one.
    balance: Option<Balancing>,
    /// The load-balancing loss, once all layers have run.
    balance_loss: f64,
}

impl Losses {
    /// Gives a run the sums so far.
    fn lend(&mut self, run: &mut Run<'_>) {
        if self.balance.is_some() {
            run.balance = self.balance.take();
        }
    }

    /// Takes the sums back.
    fn collect(&mut self, run: Run<'_>) {
        self.indexer += run.indexer.map_or(0.0, |training| training.sum.get());
        self.balance = run.balance;
    }
}

enum Flow {
    F32(Trail<f32>),
    Bf16(Trail<bf16>),
}

/// Evaluates `$body` with `$run` the [`Run`] and `$trail` the [`Trail`] of either type.
macro_rules! with_flow {
    ($pass:expr, $model:expr, $probe:expr, |$run:ident, $trail:ident| $body:expr) => {{
        let LayerwiseRun { batch, tables, scratch, options, flow, losses } = $pass;
        let probe = Option::<&mut dyn Probe>::map($probe, |probe| probe as &mut dyn Probe);
        let mut run = $model.run_on(batch, tables, scratch, probe, options)?;
        losses.borrow_mut().lend(&mut run);
        let $run = &run;
        let result = match flow {
            Flow::F32($trail) => $body,
            Flow::Bf16($trail) => $body,
        };
        losses.borrow_mut().collect(run);
        result
    }};
}

impl<'b> LayerwiseRun<'b> {
    /// Runs the embedding. `recompute` selects what backward recomputes, `None` if there is no backward.
    pub fn begin(
        model: &Model,
        batch: &'b Batch,
        recompute: Option<Recompute>,
        options: LossOptions,
        probe: Option<&mut dyn Probe>,
    ) -> Result<LayerwiseRun<'b>> {
        let tables = model.tables(&batch.positions);
        let narrow = model.precision().activations == Storage::Bf16;
        let sequences = batch.sequences();
        let scratch = Scratch::new(if narrow {
            model.scratch_len::<bf16>(sequences)
        } else {
            model.scratch_len::<f32>(sequences)
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
        Ok(LayerwiseRun { batch, tables, scratch, options, flow, losses: RefCell::default() })
    }

    /// Runs the forward of layer `index`.
    pub fn forward(&mut self, model: &Model, index: usize, probe: Option<&mut dyn Probe>) -> Result {
        with_flow!(self, model, probe, |run, trail| model.layer_forward(run, trail, index))
    }

    /// Runs the final norm for a probe only: [`LayerwiseRun::logits`] and [`LayerwiseRun::loss_backward`] run
    /// it themselves.
    pub fn norm(&self, model: &Model, probe: &mut dyn Probe) -> Result {
        with_flow!(self, model, Some(probe), |run, trail| model.last_norm_of(run, trail).map(drop))
    }

    /// Returns the logits [rows, V] of these tokens.
    pub fn logits(&self, model: &Model, rows: std::ops::Range<usize>) -> Result<Vec<f32>> {
        with_flow!(self, model, None, |run, trail| {
            let hidden = model.last_norm_of(run, trail)?;
            let width = model.config.hidden;
            model.project(run, &hidden[rows.start * width..rows.end * width])
        })
    }

    /// Computes the loss, without gradients.
    pub fn loss(&self, model: &Model) -> Result<Loss> {
        let options = &self.options;
        with_flow!(self, model, None, |run, trail| {
            let hidden = model.last_norm_of(run, trail)?;
            model.loss_of(run, &hidden, options)
        })
    }

    /// Computes the loss and runs the backward of the head and the final norm.
    pub fn loss_backward(
        &mut self,
        model: &Model,
        grads: &mut Grads,
        probe: Option<&mut dyn Probe>,
    ) -> Result<Loss> {
        let (options, mut balance_loss) = (self.options, 0.0);
        let loss = with_flow!(self, model, probe, |run, trail| {
            if let Some(balance) = &run.balance {
                balance_loss = balance.complete(run.context.as_ref())?;
            }
            model.loss_backward(run, grads, trail, &options)
        })?;
        self.losses.borrow_mut().balance_loss = balance_loss;
        Ok(loss)
    }

    /// Sum of the indexers' losses of the layers whose backward has run, and, after
    /// [`LayerwiseRun::loss_backward`], the load-balancing loss, both with their scales.
    pub fn layer_losses(&self) -> (f64, f64) {
        let losses = self.losses.borrow();
        (losses.indexer, losses.balance_loss)
    }

    /// Runs the backward of layer `index`; the last layer comes first.
    pub fn backward(
        &mut self,
        model: &Model,
        grads: &mut Grads,
        index: usize,
        probe: Option<&mut dyn Probe>,
    ) -> Result {
        with_flow!(self, model, probe, |run, trail| model.layer_backward(run, grads, trail, index))
    }

    /// Runs the backward of the embedding and ends the run.
    pub fn embedding_backward(
        self,
        model: &Model,
        grads: &mut Grads,
        probe: Option<&mut dyn Probe>,
    ) -> Result {
        let LayerwiseRun { batch, tables, scratch, options, flow, .. } = self;
        let probe = probe.map(|probe| probe as &mut dyn Probe);
        let run = model.run_on(batch, &tables, &scratch, probe, &options)?;
        match flow {
            Flow::F32(trail) => model.embedding_backward(&run, grads, trail),
            Flow::Bf16(trail) => model.embedding_backward(&run, grads, trail),
        }
    }
}
