//! Fault detection: the first non-finite value of a step is found by replay, and named.
//!
//! A step is deterministic, so a replay of its micro-batches with a probe at every site shows where a NaN or
//! infinity first appears. The probe sees parameters as layers read them, activations in forward, and
//! gradients of activations in backward. If all of them are finite, the fault is the gradient of a parameter.
//!
//! Spikes are detected by running statistics of the loss and of the gradient norm:
//! ```text
//! mean += a (x - mean)        var = (1 - a) (var + a (x - mean)^2)        a = 0.05
//! spike: x > mean + sigma sqrt(var), after 20 values
//! ```

use std::collections::VecDeque;
use std::fmt;

use ballast_model::Probe;
use ballast_model::params::Grads;
use serde::{Deserialize, Serialize};

use crate::data::MicroBatch;
use crate::error::Result;
use crate::optimizer::{Optimizer, gradient};

/// Range of a site that was still finite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Range {
    /// Name of the site.
    pub site: String,
    /// Storage type.
    pub dtype: String,
    /// Smallest value.
    pub min: f32,
    /// Largest value.
    pub max: f32,
}

/// The first site of a step with a non-finite value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Fault {
    /// Step that was not taken.
    pub step: u64,
    /// Rank that computed it, in a run of several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// Index of the micro-batch in the step.
    pub micro_batch: usize,
    /// Document of the first such value, if the site has a row per token.
    pub document: Option<String>,
    /// Index of the token in the micro-batch.
    pub token: Option<usize>,
    /// The site: `layers.3.self_attn.logits`; `param.` for a parameter, `d.` for a gradient, `grad.` for a
    /// parameter's.
    pub site: String,
    /// `forward` or `backward`.
    pub direction: String,
    /// Index of the layer, if the site belongs to one.
    pub layer: Option<usize>,
    /// Storage type of the site.
    pub dtype: String,
    /// Number of non-finite values.
    pub count: usize,
    /// Number of values.
    pub of: usize,
    /// Number of NaN.
    pub nan: usize,
    /// Ranges of the sites just before, in the same layer.
    pub inputs: Vec<Range>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { step, micro_batch, site, direction, dtype, count, of, nan, .. } = self;
        let rank = self.rank.map(|rank| format!(", rank {rank}")).unwrap_or_default();
        write!(
            f,
            "step {step}{rank}, micro-batch {micro_batch}: {site} is the first site with non-finite values: "
        )?;
        write!(f, "{count} of {of} values ({nan} NaN, {} infinite), {dtype}, {direction}", count - nan)?;
        if let Some(layer) = self.layer {
            write!(f, ", layer {layer}")?;
        }
        if let (Some(token), Some(document)) = (self.token, &self.document) {
            write!(f, ", from token {token} on, document {document}")?;
        }
        for Range { site, dtype, min, max } in &self.inputs {
            write!(f, "; before it {site} ({dtype}) lies in [{min:.4e}, {max:.4e}]")?;
        }
        Ok(())
    }
}

/// Number of sites before the fault that are reported.
const INPUTS: usize = 3;

/// Most tokens for which attention logits [heads, tokens, tokens] are computed for the probe.
const LOGITS_TOKENS: usize = 4096;

/// Finds the first non-finite value.
struct Finder<'a> {
    batch: &'a MicroBatch,
    before: VecDeque<Range>,
    found: Option<Fault>,
}

impl Finder<'_> {
    fn document(&self, token: usize) -> Option<String> {
        let ends = &self.batch.batch.cu_seqlens;
        let sequence = ends.windows(2).position(|ends| (ends[0]..ends[1]).contains(&token))?;
        Some(self.batch.origins.get(sequence)?.to_string())
    }
}

impl Probe for Finder<'_> {
    fn wants(&self, site: &str) -> bool {
        // Only the rows that are looked up matter: those are `embed`.
        if site.starts_with("param.embed_tokens") {
            return false;
        }
        let squares = site.ends_with("self_attn.logits") || site.ends_with("indexer.scores");
        self.found.is_none() && !(squares && self.batch.batch.tokens() > LOGITS_TOKENS)
    }

    fn see(&mut self, site: &str, dtype: &'static str, shape: &[usize], values: &[f32]) {
        if values.is_empty() {
            return;
        }
        let layer = layer_of(site);
        let Some(at) = values.iter().position(|x| !x.is_finite()) else {
            let (min, max) =
                values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(a, b), x| (a.min(*x), b.max(*x)));
            self.before.push_back(Range { site: site.into(), dtype: dtype.into(), min, max });
            if self.before.len() > 8 {
                self.before.pop_front();
            }
            return;
        };
        let tokens = self.batch.batch.tokens();
        let of_tokens = !site.starts_with("param.") && shape.len() == 2 && shape[0] == tokens;
        let token = of_tokens.then(|| at / shape[1].max(1));
        let same_layer = |range: &&Range| layer.is_none() || layer_of(&range.site) == layer;
        let mut inputs: Vec<Range> =
            self.before.iter().rev().filter(same_layer).take(INPUTS).cloned().collect();
        inputs.reverse();
        self.found = Some(Fault {
            step: 0,
            rank: None,
            micro_batch: 0,
            document: token.and_then(|token| self.document(token)),
            token,
            site: site.into(),
            direction: if site.starts_with("d.") { "backward" } else { "forward" }.into(),
            layer,
            dtype: dtype.into(),
            count: values.iter().filter(|x| !x.is_finite()).count(),
            of: values.len(),
            nan: values.iter().filter(|x| x.is_nan()).count(),
            inputs,
        });
    }
}

/// The layer index in a name with `layers.<index>.`.
fn layer_of(site: &str) -> Option<usize> {
    site.split_once("layers.")?.1.split('.').next()?.parse().ok()
}

/// Runs forward and backward of a micro-batch with a probe.
pub(crate) type Replay<'a> = dyn FnMut(&mut Grads, &MicroBatch, &mut dyn Probe) -> Result + 'a;

/// Replays the micro-batches of a step with a non-finite result, and returns the first faulty site. `None` if
/// the replay is finite throughout: then memory or hardware disturbed the step. `stops_early` leaves out the
/// micro-batches after the fault.
pub(crate) fn find(
    optimizer: &Optimizer,
    grads: &mut Grads,
    batches: &[MicroBatch],
    stops_early: bool,
    replay: &mut Replay<'_>,
) -> Result<Option<Fault>> {
    let mut first = None;
    for (micro_batch, batch) in batches.iter().enumerate() {
        if first.is_some() && stops_early {
            break;
        }
        grads.clear();
        let mut finder = Finder { batch, before: VecDeque::new(), found: None };
        replay(grads, batch, &mut finder)?;
        let fault = finder.found.or_else(|| faulty_gradient(optimizer, grads));
        first = first.or(fault.map(|fault| Fault { micro_batch, ..fault }));
    }
    Ok(first)
}

/// The first parameter with a non-finite gradient, where all sites are finite.
fn faulty_gradient(optimizer: &Optimizer, grads: &Grads) -> Option<Fault> {
    optimizer.slots.iter().find_map(|slot| {
        let values = gradient(grads, slot.place);
        let count = values.iter().filter(|x| !x.is_finite()).count();
        (count > 0).then(|| Fault {
            step: 0,
            rank: None,
            micro_batch: 0,
            document: None,
            token: None,
            site: format!("grad.{}", slot.name),
            direction: "backward".into(),
            layer: layer_of(&slot.name),
            dtype: "f32".into(),
            count,
            of: values.len(),
            nan: values.iter().filter(|x| x.is_nan()).count(),
            inputs: Vec::new(),
        })
    })
}

/// Running mean and variance of a quantity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    mean: f64,
    variance: f64,
    count: u64,
}

impl Statistics {
    /// Standard deviations of `x` above the mean, after enough values.
    pub(crate) fn deviations(&self, x: f64) -> Option<f64> {
        const ENOUGH: u64 = 20;
        // A constant quantity has no variance; a thousandth of its mean is used instead.
        let scale = self.variance.sqrt().max(1e-3 * self.mean.abs()).max(1e-12);
        (self.count >= ENOUGH).then(|| (x - self.mean) / scale)
    }

    /// Adds a value.
    pub fn add(&mut self, x: f64) {
        const SHARE: f64 = 0.05;
        let share = SHARE.max(1.0 / (self.count + 1) as f64);
        let off = x - self.mean;
        self.mean += share * off;
        self.variance = (1.0 - share) * (self.variance + share * off * off);
        self.count += 1;
    }
}

/// Statistics and counters of fault detection, saved in checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sentinel {
    /// Statistics of the loss.
    pub loss: Statistics,
    /// Statistics of the gradient norm.
    pub norm: Statistics,
    /// Number of faults.
    pub faults: u64,
    /// Number of skipped batches.
    pub skipped: u64,
    /// Number of steps that were skipped because none of their tokens is trained on.
    #[serde(default)]
    pub untrained: u64,
    /// Number of consecutive skipped spikes.
    #[serde(default)]
    pub spikes: u64,
}

impl Sentinel {
    /// Returns a message if loss or norm is more than `sigma` deviations above its mean; else adds both to
    /// the statistics.
    pub(crate) fn spike(&mut self, loss: f64, norm: f64, sigma: f64) -> Option<String> {
        if sigma > 0.0 {
            for (what, statistics, value) in [("loss", &self.loss, loss), ("gradient norm", &self.norm, norm)]
            {
                if let Some(off) = statistics.deviations(value).filter(|off| *off > sigma) {
                    let mean = statistics.mean;
                    return Some(format!(
                        "{what} {value:.4} is {off:.1} standard deviations above its mean {mean:.4}"
                    ));
                }
            }
        }
        self.loss.add(loss);
        self.norm.add(norm);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_follow_and_spikes_stand_out() {
        let mut sentinel = Sentinel::default();
        for i in 0..200 {
            let wobble = (i as f64).sin() * 0.1;
            assert_eq!(sentinel.spike(2.0 + wobble, 1.0 + wobble, 8.0), None, "{i}");
        }
        assert!(sentinel.loss.deviations(2.3).unwrap() < 8.0);
        assert!(sentinel.spike(4.0, 1.0, 8.0).unwrap().contains("loss 4.0000"));
        assert!(sentinel.spike(2.0, 30.0, 8.0).unwrap().contains("gradient norm"));
        assert_eq!(sentinel.spike(4.0, 30.0, 0.0), None, "0 turns it off");
    }

    #[test]
    fn the_first_values_are_never_spikes() {
        let mut sentinel = Sentinel::default();
        for i in 0..19 {
            assert_eq!(sentinel.spike(10f64.powi(i % 4), 1.0, 1.0), None);
        }
    }

    #[test]
    fn a_layer_is_read_from_a_name() {
        assert_eq!(layer_of("d.layers.12.self_attn.q"), Some(12));
        assert_eq!(layer_of("param.layers.0.mlp.gate_proj.weight"), Some(0));
        assert_eq!(layer_of("embed"), None);
    }
}
