//! The decoder: embedding, layers, norm, output head, loss.

use std::cell::RefCell;

use ballast_cluster::Group;
use ballast_kernels::elementwise::{round, scale};
use ballast_kernels::embedding::embedding_forward;
use ballast_kernels::indexer::Ties;
use ballast_kernels::linear_cross_entropy::{
    self as loss_kernel, Loss, linear_cross_entropy, linear_cross_entropy_scratch,
    linear_cross_entropy_workspace,
};
use ballast_kernels::rotary::{Rotary, Table};
use ballast_kernels::simd;
use ballast_kernels::{Element, Rounding, Scratch};
use serde::{Deserialize, Serialize};

use crate::batch::{Batch, IGNORED, Sequences};
use crate::config::{Config, Mixer, Rope};
use crate::context::Context;
use crate::error::Result;
use crate::layers::{Keep, Layer, Linear, Norm, PerLayerInputs};
use crate::layerwise::LayerwiseRun;
use crate::load::Source;
use crate::params::{Grads, Id, Init, Params, Part, Spec, Specs, Weight};
use crate::pass;
use crate::precision::{Precision, Storage, with_storage};
use crate::probe::Probe;
use crate::run::{Parameters, Run, Tally, lower, zeros};
use crate::site::Site;

/// Activation recomputation: which activations backward recomputes instead of keeping them; the bits are the
/// same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Keeps all activations.
    #[default]
    None,
    /// Recomputes what costs one pass over memory: norms, gated units, convolutions, rotations.
    Selective,
    /// Keeps the input of each layer and recomputes the rest.
    Full,
}

/// A decoder with its parameters.
#[derive(Debug)]
pub struct Model {
    /// Configuration.
    pub config: Config,
    /// Names and shapes of the parameters.
    pub specs: Specs,
    /// Values of the parameters.
    pub params: Params,
    precision: Precision,
    ties: Ties,
    /// The ranks that share batches.
    context: Option<Group>,
    rotaries: Vec<Rotary>,
    pub(crate) embedding: Id<Weight>,
    pub(crate) per_layer_inputs: Option<PerLayerInputs>,
    layers: Vec<Layer>,
    pub(crate) norm: Norm,
    pub(crate) head: Linear,
    pub(crate) source: Option<Source>,
    /// Warnings about the checkpoint, for the user.
    pub warnings: Vec<String>,
}

/// Settings of the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossOptions {
    /// Coefficient of the z-loss: the squared log-sum-exp of the logits.
    pub z_loss: f32,
    /// Label smoothing factor: the probability that is divided evenly among all tokens of the vocabulary.
    pub label_smoothing: f32,
    /// Factor of the gradient of the loss sum; `None`: 1 / tokens with a target, of all parts if the batch is
    /// divided.
    pub scale: Option<f32>,
    /// Loss of the indexers, for models that have them; `None`: they are not trained.
    pub indexer: Option<IndexerLoss>,
    /// Coefficient of the load-balancing loss of the experts, one loss over the routers of all layers as in
    /// transformers; `None`: no such loss. Its gradient has no other factor: neither `scale` nor one for
    /// gradient accumulation. Left out in the indexers' warm-up.
    pub balance: Option<f32>,
}

impl LossOptions {
    /// Returns true if only the indexers are trained.
    pub(crate) fn is_warm_up(&self) -> bool {
        self.indexer.is_some_and(|loss| loss.stage == IndexerStage::Dense)
    }
}

/// Loss of the indexers: see [`ballast_kernels::indexer`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexerLoss {
    /// Factor of the mean over the batch's tokens, for every layer.
    pub scale: f32,
    /// Stage: which keys the loss compares.
    pub stage: IndexerStage,
}

/// Stage of the indexers' training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IndexerStage {
    /// Warm-up: attention and the loss cover all keys; nothing else is trained, whatever the scale of the
    /// language loss.
    Dense,
    /// Attention and the loss cover the selected keys; the rest of the model is trained as usual.
    Sparse,
}

/// Losses of a forward and backward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLoss {
    /// Language loss.
    pub language: Loss,
    /// Sum of the indexers' losses over the layers, with their scale; 0 if they are not trained.
    pub indexer: f64,
    /// Load-balancing loss of the routers, with its coefficient; 0 if there is none.
    pub balance: f64,
}

impl Model {
    /// Builds the layers of a configuration; the parameters have no values yet.
    pub(crate) fn build(config: Config, precision: Precision) -> Result<Model> {
        let mut specs = Specs::default();
        let embedding =
            specs.weight("embed_tokens.weight".into(), &[config.vocabulary, config.hidden], Init::Embedding);
        let per_layer_inputs =
            config.per_layer_inputs.map(|shape| PerLayerInputs::new(&mut specs, &config, shape));
        let mut ropes: Vec<Rope> = Vec::new();
        for layer in &config.layers {
            let used = match &layer.mixer {
                Mixer::Linear(_) => vec![],
                Mixer::Softmax(attention) => vec![attention.rope],
                Mixer::Latent(attention) => vec![attention.rope, attention.indexer_rope],
            };
            for rope in used {
                if !ropes.contains(&rope) {
                    ropes.push(rope);
                }
            }
        }
        let table = |rope: &Rope| ropes.iter().position(|r| r == rope).expect("it was collected above");
        let mut layers = Vec::new();
        for index in 0..config.layers.len() {
            specs.begin(Part::Layer(index));
            layers.push(Layer::new(&mut specs, index, &config, table));
        }
        specs.begin(Part::Head);
        let norm = Norm::new(&mut specs, "norm", config.hidden, &config);
        let head = if config.tied {
            Linear::on(embedding, config.hidden, config.vocabulary)
        } else {
            Linear::new(&mut specs, "lm_head", config.hidden, config.vocabulary, false)
        };
        let rotaries = ropes.iter().map(Rope::rotary).collect::<Result<_>>()?;
        Ok(Model {
            config,
            specs,
            params: Params::default(),
            precision,
            ties: Ties::default(),
            context: None,
            rotaries,
            embedding,
            per_layer_inputs,
            layers,
            norm,
            head,
            source: None,
            warnings: Vec::new(),
        })
    }

    /// Precision of storage and arithmetic.
    pub fn precision(&self) -> &Precision {
        &self.precision
    }

    /// Casts the weights, and rounds the protected tensors that the new precision's policy does not cover.
    pub fn set_precision(&mut self, precision: Precision) {
        self.params.cast(precision.params);
        let policy = precision.policy();
        for (spec, tensor) in self.specs.protected.iter().zip(&mut self.params.protected) {
            if precision.rounds(&policy, &spec.name) {
                tensor.round_to(Rounding::Bf16);
            }
        }
        self.precision = precision;
    }

    /// Order in which equal indexer scores are selected.
    pub fn ties(&self) -> Ties {
        self.ties
    }

    /// Sets the order in which equal indexer scores are selected, to compare with another framework.
    pub fn set_ties(&mut self, ties: Ties) {
        self.ties = ties;
    }

    /// Sets the ranks that share batches by tokens (context parallelism): with a batch from
    /// [`Batch::part()`], whose number is the rank in this group, all ranks run forward, loss and backward
    /// together. Each returns the loss of its own tokens and adds to its gradients; the sums over the ranks
    /// are those of the whole batch. Batches that are not parts, and decoding, run as without.
    pub fn set_context(&mut self, group: Option<Group>) {
        self.context = group;
    }

    /// Zero gradients for all trainable parameters and the adapters.
    pub fn grads(&self) -> Grads {
        self.grads_of(|_| true)
    }

    /// Zero gradients for the trainable parameters that are `wanted`, and for the adapters. Other gradients
    /// are not computed.
    pub fn grads_of(&self, wanted: impl Fn(&Spec) -> bool) -> Grads {
        Grads::new(&self.specs, &self.params, wanted)
    }

    /// Computes the logits [tokens, V].
    pub fn logits(&self, batch: &Batch, probe: Option<&mut dyn Probe>) -> Result<Vec<f32>> {
        let logits =
            pass::forward(&mut &*self, Some(batch), &LossOptions::default(), probe, |run, model, probe| {
                run.logits(model, 0..batch.tokens(), probe)
            })?;
        Ok(logits.unwrap_or_default())
    }

    /// Computes the loss, without gradients.
    pub fn loss(&self, batch: &Batch, options: &LossOptions, probe: Option<&mut dyn Probe>) -> Result<Loss> {
        Ok(pass::loss(&mut &*self, Some(batch), options, probe)?.unwrap_or_default())
    }

    /// Runs forward and backward: [`pass::forward_backward`] without hooks.
    pub fn forward_backward(
        &self,
        grads: &mut Grads,
        batch: &Batch,
        options: &LossOptions,
        recompute: Recompute,
        probe: Option<&mut dyn Probe>,
    ) -> Result<StepLoss> {
        pass::forward_backward(&mut &*self, grads, batch, options, recompute, probe)
    }

    /// Bytes that forward keeps for backward, measured by running it.
    pub fn measure_kept(&self, batch: &Batch, options: &LossOptions, recompute: Recompute) -> Result<usize> {
        let mut run = LayerwiseRun::new(self, batch, Some(recompute), *options)?;
        for part in Part::before_head(self.layers.len()) {
            run.forward(self, part, None)?;
        }
        run.kept(self)
    }

    /// Rotary tables for these positions.
    pub(crate) fn tables(&self, positions: &[u32]) -> Vec<Table> {
        self.rotaries.iter().map(|rotary| rotary.table(positions)).collect()
    }

    /// f32 elements of one slot of scratch for these sequences.
    pub(crate) fn scratch_len<A: Element>(&self, sequences: Sequences<'_>) -> usize {
        let (tokens, before) = (sequences.tokens(), sequences.before(None));
        let head = linear_cross_entropy_scratch(self.head.dims(), tokens, &loss_kernel::Options::default());
        let layers = self.layers.iter().map(|layer| layer.scratch::<A>(tokens, before)).max().unwrap_or(0);
        let per_layer_inputs = self.per_layer_inputs.as_ref().map_or(0, |inputs| inputs.scratch(tokens));
        let adapters = self.adapter_scratch(tokens);
        head.max(layers).max(self.norm.scratch(tokens)).max(per_layer_inputs).max(adapters)
    }

    /// State that all layers share.
    pub(crate) fn run_on<'a>(
        &'a self,
        batch: &'a Batch,
        tables: &'a [Table],
        scratch: &'a Scratch,
        tally: &'a Tally,
        probe: Option<&'a mut (dyn Probe + '_)>,
    ) -> Result<Run<'a>> {
        Ok(Run {
            config: &self.config,
            parameters: Parameters::new(&self.specs, &self.params),
            precision: &self.precision,
            batch,
            context: Context::of(batch, self.context.as_ref())?,
            tables,
            scratch,
            ties: self.ties,
            probe: probe.map(|probe| RefCell::new(probe as &mut dyn Probe)),
            tally,
        })
    }

    /// Logits [rows, V] of hidden [rows, H].
    pub(crate) fn project<A: Element>(&self, run: &Run<'_>, hidden: &[A]) -> Result<Vec<f32>> {
        let mut logits: Vec<f32> = self.head.forward(run, hidden)?;
        if let Some(cap) = self.config.final_cap {
            scale(&mut logits, 1.0 / cap);
            simd::tanh(&mut logits);
            scale(&mut logits, cap);
        }
        lower(&mut logits, self.precision.site(Site::Loss));
        run.see(None, "logits", &logits);
        Ok(logits)
    }

    /// Loss of the hidden states after the final norm.
    pub(crate) fn loss_of<A: Element>(
        &self,
        run: &Run<'_>,
        hidden: &[A],
        options: &LossOptions,
    ) -> Result<Loss> {
        let options = self.loss_options(options);
        let mut workspace = zeros(linear_cross_entropy_workspace(self.head.dims(), run.tokens(), &options));
        with_storage!(Weight, run.weight(self.head.weight()), |w| {
            let (dims, targets) = (self.head.dims(), &run.batch.targets);
            let (workspace, scratch) = (&mut workspace, run.scratch);
            Ok(linear_cross_entropy(None, hidden, w, targets, dims, &options, workspace, scratch)?)
        })
    }

    pub(crate) fn loss_options(&self, options: &LossOptions) -> loss_kernel::Options {
        loss_kernel::Options {
            ignore_index: IGNORED,
            soft_cap: self.config.final_cap,
            z_loss: options.z_loss,
            label_smoothing: options.label_smoothing,
            logits: self.precision.site(Site::Loss),
            gradient: self.precision.site(Site::LossGradient),
            ..loss_kernel::Options::default()
        }
    }

    pub(crate) fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Residual stream before the first layer.
    pub(crate) fn embed(&self, run: &Run<'_>) -> Result<Vec<f32>> {
        let hidden = self.config.hidden;
        let mut x: Vec<f32> = zeros(run.tokens() * hidden);
        with_storage!(Weight, run.weight(self.embedding), |w| {
            embedding_forward(&mut x, &run.batch.ids, w, self.embedding_scale(), hidden)?;
        });
        round(&mut x, run.precision.site(Site::Residual));
        run.see_stream("", None, "embed", &x);
        Ok(x)
    }

    /// Embedding scale, rounded to the weights' type as in training.
    pub(crate) fn embedding_scale(&self) -> f32 {
        match self.precision.params {
            Storage::F32 => self.config.embedding_scale,
            Storage::Bf16 => Rounding::Bf16.round(self.config.embedding_scale),
        }
    }

    /// Loss and gradient of the hidden states; adds the gradient of the output head.
    pub(crate) fn head_backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        hidden: &[A],
        options: &LossOptions,
    ) -> Result<(Loss, Vec<A>)> {
        let mut dhidden = zeros(hidden.len());
        let scale = match options.scale {
            _ if options.is_warm_up() => 0.0,
            Some(scale) => scale,
            None => 1.0 / run.batch.counted_in_whole().max(1) as f32,
        };
        let kernel_options = self.loss_options(options);
        let mut workspace =
            zeros(linear_cross_entropy_workspace(self.head.dims(), run.tokens(), &kernel_options));
        let loss = with_storage!(Weight, run.weight(self.head.weight()), |w| {
            let to = loss_kernel::Grads { dhidden: &mut dhidden, dw: grads.of(self.head.weight()), scale };
            let (dims, targets) = (self.head.dims(), &run.batch.targets);
            linear_cross_entropy(
                Some(to),
                hidden,
                w,
                targets,
                dims,
                &kernel_options,
                &mut workspace,
                run.scratch,
            )?
        });
        Ok((loss, dhidden))
    }

    /// Bytes kept for per-layer inputs.
    pub(crate) fn per_layer_inputs_bytes<A>(&self, tokens: usize) -> usize {
        let embedded = tokens * self.config.hidden * size_of::<A>();
        self.per_layer_inputs
            .as_ref()
            .map_or(0, |inputs| embedded + inputs.saved_bytes::<A>(tokens, Keep::Everything))
    }
}
