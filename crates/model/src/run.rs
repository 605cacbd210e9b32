//! State of one run that all layers share.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;

use ballast_kernels::elementwise;
use ballast_kernels::indexer::Ties;
use ballast_kernels::linear_cross_entropy::Loss;
use ballast_kernels::moe::{self, Balance, Routing};
use ballast_kernels::rotary::Table;
use ballast_kernels::{Element, Rounding, Scratch};

use crate::batch::{Batch, Sequences};
use crate::config::Config;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::model::{IndexerLoss, LossOptions, StepLoss};
use crate::params::{Adapter, Id, Params, Protected, Spec, Specs, Weight};
use crate::precision::{Precision, with_storage};
use crate::probe::Probe;
use crate::site::Site;

/// State of one run that all layers share.
pub(crate) struct Run<'a> {
    pub(crate) config: &'a Config,
    pub(crate) parameters: Parameters<'a>,
    pub(crate) precision: &'a Precision,
    pub(crate) batch: &'a Batch,
    /// The ranks that share the batch, if it is divided.
    pub(crate) context: Option<Context<'a>>,
    /// Rotary tables; each layer has an index into them.
    pub(crate) tables: &'a [Table],
    pub(crate) scratch: &'a Scratch,
    /// Order of keys with equal indexer scores.
    pub(crate) ties: Ties,
    pub(crate) probe: Option<RefCell<&'a mut dyn Probe>>,
    pub(crate) tally: &'a Tally,
}

/// Parameters of the model. Layers reach them only by [`Run::weight`] and [`Run::protected`], which show them
/// to the probe.
pub(crate) struct Parameters<'a> {
    specs: &'a Specs,
    values: &'a Params,
}

impl<'a> Parameters<'a> {
    pub(crate) fn new(specs: &'a Specs, values: &'a Params) -> Parameters<'a> {
        Parameters { specs, values }
    }
}

/// Losses of a run, summed from part to part, and the parameters that its probe has seen.
#[derive(Default)]
pub(crate) struct Tally {
    /// Names of the parameters that were shown to the probe.
    offered: RefCell<HashSet<String>>,
    /// The language loss, once it is computed.
    pub(crate) language: Cell<Loss>,
    /// Loss of the indexers, if they are trained.
    pub(crate) indexer: Option<IndexerTraining>,
    /// Load-balancing loss of the routers, if they are trained with one.
    pub(crate) balance: Option<Balancing>,
}

impl Tally {
    /// The losses beside the language loss. Fails if the model has nothing that they could train.
    pub(crate) fn new(config: &Config, options: &LossOptions) -> Result<Tally> {
        if options.indexer.is_some() && !config.has_indexer() {
            let problem = "the model has no indexer to train; remove the indexer loss";
            return Err(Error::Input(problem.into()));
        }
        let experts = config.layers.iter().find_map(|layer| layer.experts);
        let balance = match (options.balance, experts) {
            (Some(_), None) => {
                let problem = "the model has no experts to balance; remove the balance loss";
                return Err(Error::Input(problem.into()));
            }
            (Some(coefficient), Some(experts)) if !options.is_warm_up() => {
                Some(Balancing::new(coefficient, experts.count))
            }
            _ => None,
        };
        let indexer = options.indexer.map(|loss| IndexerTraining { loss, sum: Cell::new(0.0) });
        Ok(Tally { offered: RefCell::default(), language: Cell::default(), indexer, balance })
    }

    /// The losses so far.
    pub(crate) fn losses(&self) -> StepLoss {
        let indexer = self.indexer.as_ref().map_or(0.0, |training| training.sum.get());
        let balance = self.balance.as_ref().map_or(0.0, Balancing::loss);
        StepLoss { language: self.language.get(), indexer, balance }
    }
}

/// Loss of the indexers, summed over the layers in backward.
pub(crate) struct IndexerTraining {
    pub(crate) loss: IndexerLoss,
    pub(crate) sum: Cell<f64>,
}

/// Load-balancing loss of the routers, summed over all layers in forward. Backward starts when the sum is
/// complete.
pub(crate) struct Balancing {
    coefficient: f32,
    sums: RefCell<Balance>,
    /// The loss, once all layers have been added; a forward that backward recomputes then adds nothing.
    loss: Cell<Option<f64>>,
}

impl Balancing {
    pub(crate) fn new(coefficient: f32, experts: usize) -> Balancing {
        Balancing { coefficient, sums: RefCell::new(Balance::new(experts)), loss: Cell::new(None) }
    }

    pub(crate) fn add(&self, logits: &[f32], routing: &Routing, dims: moe::Dims) -> Result {
        if self.loss.get().is_none() {
            self.sums.borrow_mut().add(logits, routing, dims)?;
        }
        Ok(())
    }

    /// Ends the sum, over all ranks of the context, and sets the loss.
    pub(crate) fn complete(&self, context: Option<&Context<'_>>) -> Result {
        let mut sums = self.sums.borrow_mut();
        let loss = match context {
            None => sums.loss(),
            Some(context) => {
                let own = sums.clone();
                let mut all =
                    context.gather(&own.to_values())?.into_iter().map(|values| Balance::from_values(&values));
                *sums = all.next().unwrap_or_else(|| Ok(own.clone()))?;
                for other in all {
                    sums.merge(&other?)?;
                }
                sums.loss_of(&own)
            }
        };
        self.loss.set(Some(self.coefficient as f64 * loss));
        Ok(())
    }

    /// The loss, including the coefficient; 0 until the sum is complete. With a context it is the part of the
    /// loss that the rank's own tokens contribute.
    fn loss(&self) -> f64 {
        self.loss.get().unwrap_or(0.0)
    }

    pub(crate) fn backward(&self, dlogits: &mut [f32], logits: &[f32]) -> Result {
        Ok(self.sums.borrow().backward(dlogits, logits, self.coefficient)?)
    }
}

impl<'a> Run<'a> {
    pub(crate) fn tokens(&self) -> usize {
        self.batch.ids.len()
    }

    pub(crate) fn cu_seqlens(&self) -> &[usize] {
        &self.batch.cu_seqlens
    }

    pub(crate) fn sequences(&self) -> Sequences<'_> {
        self.batch.sequences()
    }

    /// Zeros the gradient of padding tokens: their embedding is not trained.
    pub(crate) fn forget_padding<T: Element>(&self, dx: &mut [T]) {
        let Some(padding) = self.config.padding else { return };
        let width = dx.len() / self.tokens().max(1);
        for (row, id) in dx.chunks_mut(width.max(1)).zip(&self.batch.ids) {
            if *id == padding {
                row.fill(T::default());
            }
        }
    }

    /// Returns a weight; shows it to the probe as `param.<name>` at its first use in the run.
    pub(crate) fn weight(&self, id: Id<Weight>) -> &'a Weight {
        let weight = &self.parameters.values[id];
        if self.probe.is_some() {
            with_storage!(Weight, weight, |w| self.offer(&self.parameters.specs[id], w));
        }
        weight
    }

    /// Returns the adapter of a weight, if it has one.
    pub(crate) fn adapter(&self, id: Id<Weight>) -> Option<&'a Adapter> {
        self.parameters.values.adapter(id)
    }

    /// Returns the values of a protected tensor; shows them to the probe as `param.<name>` at their first use
    /// in the run.
    pub(crate) fn protected(&self, id: Id<Protected>) -> &'a [f32] {
        let values = self.parameters.values[id].values();
        if self.probe.is_some() {
            self.offer(&self.parameters.specs[id], values);
        }
        values
    }

    fn offer<T: Element>(&self, spec: &Spec, values: &[T]) {
        if self.tally.offered.borrow_mut().insert(spec.name.clone()) {
            self.show("param.", None, &spec.name, values, &spec.shape);
        }
    }

    /// Shows a tensor [tokens, ...] to the probe; `layer` is `None` outside the layers.
    pub(crate) fn see<T: Element>(&self, layer: Option<usize>, name: &str, values: &[T]) {
        self.show("", layer, name, values, &[]);
    }

    /// Shows the residual stream, or its gradient with the prefix `d.`, to the probe, with the type of the
    /// site `residual`.
    pub(crate) fn see_stream(&self, prefix: &str, layer: Option<usize>, name: &str, values: &[f32]) {
        let dtype = match self.precision.site(Site::Residual) {
            Rounding::F32 => "F32",
            Rounding::Bf16 => "BF16",
            Rounding::F16 => "F16",
        };
        self.show_as(prefix, layer, name, dtype, values, &[]);
    }

    /// Shows the gradient of a site to the probe.
    pub(crate) fn see_gradient<T: Element>(&self, layer: Option<usize>, name: &str, values: &[T]) {
        self.show("d.", layer, name, values, &[]);
    }

    /// Returns true if the probe wants this site; for tensors that are computed only for a probe.
    pub(crate) fn wanted(&self, layer: usize, name: &str) -> bool {
        self.probe.as_ref().is_some_and(|probe| probe.borrow().wants(&site_name("", Some(layer), name)))
    }

    /// Shows a tensor to the probe; an empty `shape` stands for [tokens, elements per token].
    pub(crate) fn show<T: Element>(
        &self,
        prefix: &str,
        layer: Option<usize>,
        name: &str,
        values: &[T],
        shape: &[usize],
    ) {
        self.show_as(prefix, layer, name, T::NAME, values, shape);
    }

    fn show_as<T: Element>(
        &self,
        prefix: &str,
        layer: Option<usize>,
        name: &str,
        dtype: &'static str,
        values: &[T],
        shape: &[usize],
    ) {
        let Some(probe) = &self.probe else { return };
        let mut probe = probe.borrow_mut();
        let site = site_name(prefix, layer, name);
        if !probe.wants(&site) {
            return;
        }
        let mut wide = vec![0.0; values.len()];
        T::load(&mut wide, values);
        let tokens = self.tokens();
        let rows = [tokens, values.len() / tokens.max(1)];
        probe.see(&site, dtype, if shape.is_empty() { &rows } else { shape }, &wide);
    }
}

fn site_name(prefix: &str, layer: Option<usize>, name: &str) -> String {
    match layer {
        Some(layer) => format!("{prefix}layers.{layer}.{name}"),
        None => format!("{prefix}{name}"),
    }
}

/// Rounds a tensor to the type of its site.
pub(crate) fn lower<T: Element>(values: &mut [T], rounding: Rounding) {
    if rounding == Rounding::F32 {
        return;
    }
    if let Some(values) = T::as_f32_mut(values) {
        elementwise::round(values, rounding);
        return;
    }
    for value in values {
        *value = T::from_f32(rounding.round(value.to_f32()));
    }
}

/// Returns a tensor of zeros.
pub(crate) fn zeros<T: Element>(len: usize) -> Vec<T> {
    vec![T::default(); len]
}
