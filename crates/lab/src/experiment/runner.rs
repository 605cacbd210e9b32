//! A run of an experiment: its engine, and its comparison with the reference part by part.

use std::borrow::Cow;
use std::collections::HashMap;

use ballast_model::LazyCheckpoint;
use ballast_model::params::{Params, Part};

use super::{Contestant, Setup, Shown, decays, read, sampled, scores};
use crate::engine::{Engine, Gradient, SiteTensor};
use crate::error::{Error, Result};
use crate::findings::{GradientError, Kind, LayerError, NotFinite, PositionError, Run, SiteError};
use crate::measure::attention::{Roundings, Shape};
use crate::measure::output::Outputs;
use crate::measure::position::{self, MeanErrors, Sums};
use crate::measure::{Together, difference};

/// A run in progress.
pub(super) struct Runner<'a> {
    pub(super) checkpoint: &'a LazyCheckpoint,
    pub(super) engine: Engine<'a>,
    rounds: Option<Roundings>,
    /// Largest error that does not count as a difference; `None`: every bit that differs from the f32 run
    /// counts.
    tolerance: Option<f64>,
    found: Run,
    pub(super) outputs: Outputs,
    hidden: Vec<f64>,
    recurrence: MeanErrors,
    keys: HashMap<usize, Vec<f64>>,
    pub(super) pending: HashMap<String, Vec<f64>>,
    gradients: Together,
    indexer_gradients: Together,
}

impl<'a> Runner<'a> {
    pub(super) fn new(setup: &Setup<'a>, contestant: Contestant<'a>) -> Result<Runner<'a>> {
        let (engine, checkpoint, rounds, tolerance, found) = match contestant {
            Contestant::Choice(choice) => {
                let Setup { checkpoint, batch, ties, backward, .. } = *setup;
                let engine = Engine::model(checkpoint, batch, ties, choice.precision.clone(), backward)?;
                let found = Run { name: choice.name, what: choice.what, kind: choice.kind, ..Run::default() };
                (engine, setup.checkpoint, Some(Roundings::of(&choice.precision)), None, found)
            }
            Contestant::Checkpoint { name, checkpoint } => {
                let what = format!("another checkpoint, in {}", setup.reference.name());
                let kind = Kind::Checkpoint;
                let found = Run { name, what, kind, ..Run::default() };
                (setup.reference.engine(checkpoint, setup)?, checkpoint, None, Some(0.0), found)
            }
            Contestant::Dump { name, dump, tolerance } => {
                let what = "tensors written by another framework".into();
                let kind = Kind::Dump;
                let found = Run { name, what, kind, ..Run::default() };
                (Engine::Dump(Box::new(dump)), setup.checkpoint, None, Some(tolerance), found)
            }
        };
        Ok(Runner {
            checkpoint,
            engine,
            rounds,
            tolerance,
            found,
            outputs: Outputs::default(),
            hidden: Vec::new(),
            recurrence: MeanErrors::default(),
            keys: HashMap::new(),
            pending: HashMap::new(),
            gradients: Together::default(),
            indexer_gradients: Together::default(),
        })
    }

    /// Parameters of a part: `values` of the shared checkpoint, or read from the run's own.
    pub(super) fn values<'v>(
        &self,
        shared: &LazyCheckpoint,
        part: Part,
        values: &'v Params,
    ) -> Result<Cow<'v, Params>> {
        if std::ptr::eq(self.checkpoint, shared) {
            return Ok(Cow::Borrowed(values));
        }
        Ok(Cow::Owned(read(self.checkpoint, part)?))
    }

    fn see_not_finite(&mut self, site: &str, dtype: &str, count: usize) {
        if count > 0 && self.found.not_finite.is_none() {
            self.found.not_finite = Some(NotFinite { site: site.into(), count, dtype: dtype.into() });
        }
    }

    pub(super) fn see_logits(&mut self, logits: &[f64], exact: &[f64], control: Option<&[f64]>) {
        let found = difference(logits, exact);
        self.see_not_finite("logits", "f32", found.not_finite);
        let differs = match (self.tolerance, control) {
            (Some(tolerance), _) => is_beyond(found.error, tolerance),
            (None, control) => control.is_some_and(|control| !same_bits(control, logits)),
        };
        if differs && self.found.first_difference.is_none() {
            self.found.first_difference = Some("logits".into());
        }
    }

    /// Compares every tensor of a part, in the reference's order.
    pub(super) fn compare(&mut self, sites: &[SiteTensor], shown: &Shown, buckets: &[usize]) -> Result {
        let own: HashMap<&str, &SiteTensor> = sites.iter().map(|site| (site.name.as_str(), site)).collect();
        let control: HashMap<&str, &SiteTensor> =
            shown.control.iter().map(|site| (site.name.as_str(), site)).collect();
        for exact in &shown.reference {
            let Some(site) = own.get(exact.name.as_str()) else { continue };
            self.same_size(&site.name, &site.values, &exact.values)?;
            let found = difference(&site.values, &exact.values);
            self.see_not_finite(&site.name, site.dtype, found.not_finite);
            let differs = match (self.tolerance, control.get(exact.name.as_str())) {
                (Some(tolerance), _) => is_beyond(found.error, tolerance),
                (None, Some(control)) => !same_bits(&control.values, &site.values),
                (None, None) => false,
            };
            if differs && self.found.first_difference.is_none() {
                self.found.first_difference = Some(site.name.clone());
            }
            if exact.name == "norm" {
                self.hidden = Sums::new(&site.values, &exact.values, buckets).errors();
            }
            if exact.name.ends_with("linear_attn.o") {
                self.recurrence.add(&Sums::new(&site.values, &exact.values, buckets).errors());
            }
            self.found.sites.push(SiteError {
                site: site.name.clone(),
                dtype: site.dtype.into(),
                error: found.error,
                max_abs: found.max_abs,
                largest: found.largest,
            });
        }
        Ok(())
    }

    /// Fails if a tensor of a dump has another size.
    fn same_size(&self, name: &str, own: &[f64], exact: &[f64]) -> Result {
        if own.len() == exact.len() {
            return Ok(());
        }
        Err(Error::Input(format!(
            "{}: {name} has {} elements, expected {}; is it of the same model and input?",
            self.found.name,
            own.len(),
            exact.len()
        )))
    }

    /// Compares a layer's output, decay, attention logits and chosen keys.
    pub(super) fn compare_layer(
        &mut self,
        index: usize,
        sites: &[SiteTensor],
        shown: &Shown,
        setup: &Setup<'_>,
        values: &Params,
    ) {
        let out = format!("layers.{index}.out");
        if let Some(site) = self.found.sites.iter().rev().find(|site| site.site == out) {
            self.found.by_layer.push(LayerError { layer: index, error: site.error });
        }
        let own = decays(&self.engine, index, sites, self.checkpoint, values);
        if let (Some(own), Some(exact)) = (own, &shown.decays) {
            self.found.decay.extend(own.compare(exact, index));
        }
        let mixer = &setup.checkpoint.config.layers[index].mixer;
        if let (Some(shape), Some(exact)) = (Shape::of(index, mixer), &shown.rows)
            && let Some(rows) = sampled(&mut self.keys, index, &shape, sites, setup, self.rounds)
        {
            self.found.attention.push(rows.compare(exact, index));
        }
        if let (Some(own), Some(exact)) =
            (scores(index, sites, setup), scores(index, &shown.reference, setup))
        {
            let found = own.compare(&exact, index);
            if found.queries > 0 {
                self.found.indexer.push(found);
            }
        }
    }

    pub(super) fn compare_gradients(&mut self, found: &[Gradient], exact: &[Gradient]) -> Result {
        let own: HashMap<&str, &Vec<f64>> =
            found.iter().map(|(name, values)| (name.as_str(), values)).collect();
        for (name, exact) in exact {
            let Some(own) = own.get(name.as_str()) else { continue };
            let site = format!("grad.{name}");
            self.same_size(&site, own, exact)?;
            let found = difference(own, exact);
            self.see_not_finite(&site, "f32", found.not_finite);
            let beyond = self.tolerance.is_some_and(|tolerance| is_beyond(found.error, tolerance));
            if beyond && self.found.first_difference.is_none() {
                self.found.first_difference = Some(site);
            }
            let of_indexer = name.contains(".indexer.");
            let together = if of_indexer { &mut self.indexer_gradients } else { &mut self.gradients };
            together.add(&found);
            self.found.gradients.push(GradientError {
                tensor: name.clone(),
                error: found.error,
                cosine: found.cosine,
            });
        }
        Ok(())
    }

    pub(super) fn finish(self, loss: f64, buckets: &[usize]) -> Run {
        let mut found = self.found;
        found.loss = self.outputs.loss();
        found.perplexity = found.loss.exp();
        found.loss_difference = found.loss - loss;
        found.kl = self.outputs.spread();
        found.top1_agreement = self.outputs.agreement();
        found.gradient_error = self.gradients.error();
        found.indexer_gradient_error = self.indexer_gradients.error();
        // A dump may have no logits, or not the last norm.
        let kl: HashMap<usize, f64> = position::means(&self.outputs.kl, buckets)
            .into_iter()
            .map(|(range, kl)| (range.start, kl))
            .collect();
        for (bucket, hidden) in self.hidden.into_iter().enumerate() {
            let range = position::range(bucket);
            if !buckets.contains(&bucket) {
                continue;
            }
            found.by_position.push(PositionError {
                from: range.start,
                to: range.end,
                hidden,
                recurrence: self.recurrence.error(bucket),
                kl: kl.get(&range.start).copied().unwrap_or(f64::NAN),
            });
        }
        found
    }
}

/// Returns true if an error exceeds the tolerance; NaN does.
fn is_beyond(error: f64, tolerance: f64) -> bool {
    error.is_nan() || error > tolerance
}

fn same_bits(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}
