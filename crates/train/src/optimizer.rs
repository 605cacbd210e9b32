//! AdamW over all that is learned: f32 masters and moments, whatever the model runs on.
//!
//! ```text
//! weight, bf16      master f32 -> step -> rounded into the model
//! weight, f32       the model's own value is the master
//! protected         in place, in f32; where the policy leaves it out, as a bf16 weight
//! adapter           in place, in f32
//! ```
//! Weight decay is for matrices: not for norms, biases, or anything protected.

use std::collections::BTreeMap;

use ballast_kernels::Rounding;
use ballast_kernels::adamw::{self, adamw_fault, adamw_step, adamw_step_with_copy, global_norm};
use ballast_model::params::{Grads, Spec, Weight};
use ballast_model::precision::Storage;
use ballast_model::{Model, Precision};
use half::bf16;

use crate::config::OptimizerConfig;
use crate::error::{Error, Result};

/// Which parameter of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// By the order of the weights.
    Weight(usize),
    /// By the order of the protected tensors.
    Protected(usize),
    /// A of the adapter of this weight.
    AdapterA(usize),
    /// B of the adapter of this weight.
    AdapterB(usize),
}

/// A parameter that is learned, and what the optimiser keeps of it.
#[derive(Clone, Debug)]
pub struct Slot {
    /// As in the checkpoint.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Where it is.
    pub place: Place,
    /// What it is counted under in reports.
    pub group: &'static str,
    /// Whether weight decay applies.
    pub decays: bool,
    /// The f32 value, where the model's own is rounded.
    pub master: Option<Vec<f32>>,
    /// First moment.
    pub m: Vec<f32>,
    /// Second moment.
    pub v: Vec<f32>,
}

/// The optimiser.
#[derive(Clone, Debug)]
pub struct Optimizer {
    /// Everything that is learned.
    pub slots: Vec<Slot>,
    /// Updates so far.
    pub updates: u32,
    config: OptimizerConfig,
}

/// The norms of a step's gradients.
#[derive(Clone, Debug, PartialEq)]
pub struct Norms {
    /// Of all.
    pub global: f64,
    /// By group.
    pub groups: BTreeMap<String, f64>,
    /// Names of parameters whose gradients are not finite.
    pub faulty: Vec<String>,
}

/// An element that an update would leave non-finite.
#[derive(Clone, Debug, PartialEq)]
pub struct BadUpdate {
    /// The parameter.
    pub name: String,
    /// The element of it.
    pub element: usize,
    /// Its gradient, before clipping.
    pub gradient: f32,
    /// Its value now, in f32.
    pub before: f32,
    /// The value it would get.
    pub value: f32,
    /// The first moment it would get.
    pub m: f32,
    /// The second moment it would get.
    pub v: f32,
}

impl std::fmt::Display for BadUpdate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let BadUpdate { name, element, gradient, before, value, m, v } = self;
        write!(f, "the update takes {name} from {before:e} to {value:e} at element {element} ")?;
        write!(f, "(gradient {gradient:e}, first moment {m:e}, second moment {v:e})")
    }
}

/// Beginnings and ends of names, and the group that they make; the first that matches.
const GROUPS: [(&str, &str); 8] = [
    ("embed_tokens", "embedding"),
    ("lm_head", "head"),
    ("indexer", "indexer"),
    ("linear_attn", "linear attention"),
    ("self_attn", "attention"),
    ("norm", "norms"),
    ("mlp", "feed-forward"),
    ("experts", "feed-forward"),
];

fn group_of(name: &str) -> &'static str {
    GROUPS.iter().find(|(part, _)| name.contains(part)).map_or("other", |(_, group)| group)
}

impl Optimizer {
    /// For all parameters of a model that have a place in `grads`. The model is still in f32, and is to run in `precision`:
    /// masters begin with all its bits.
    pub fn new(model: &Model, grads: &Grads, config: &OptimizerConfig, precision: &Precision) -> Optimizer {
        let mut slots = Vec::new();
        let mut add = |spec: &Spec,
                       shape: &[usize],
                       suffix: &str,
                       place: Place,
                       protected: bool,
                       master: Option<Vec<f32>>| {
            let elements = shape.iter().product();
            slots.push(Slot {
                name: format!("{}{suffix}", model.parameter_name(spec)),
                shape: shape.to_vec(),
                place,
                group: if suffix.is_empty() { group_of(&spec.name) } else { "adapters" },
                decays: !protected && shape.len() > 1 && !spec.name.contains("norm"),
                master,
                m: vec![0.0; elements],
                v: vec![0.0; elements],
            });
        };
        let bf16 = precision.params == Storage::Bf16;
        for (i, (spec, weight)) in model.specs.weights.iter().zip(model.params.weights()).enumerate() {
            if !grads.weight(i).is_empty() {
                let master = (bf16 && config.masters).then(|| weight.to_f32());
                add(spec, &spec.shape, "", Place::Weight(i), false, master);
            }
        }
        for (i, (spec, tensor)) in model.specs.protected.iter().zip(model.params.protected()).enumerate() {
            if !grads.protected(i).is_empty() {
                let rounded = is_rounded(precision, spec);
                let master = (rounded && config.masters).then(|| tensor.values().to_vec());
                add(spec, &spec.shape, "", Place::Protected(i), true, master);
            }
        }
        for (i, (spec, low)) in model.specs.weights.iter().zip(model.params.adapters()).enumerate() {
            let Some(low) = low else { continue };
            let (outputs, inputs) = (spec.shape[0], spec.shape[1]);
            add(spec, &[low.rank, inputs], ".lora_A", Place::AdapterA(i), false, None);
            add(spec, &[outputs, low.rank], ".lora_B", Place::AdapterB(i), false, None);
        }
        Optimizer { slots, updates: 0, config: config.clone() }
    }

    /// Everything that has to be saved: name, shape, values.
    pub fn tensors(&self) -> impl Iterator<Item = (String, &[usize], &[f32])> {
        self.slots.iter().flat_map(|slot| {
            let master = slot.master.as_deref().map(|values| ("master", values));
            let parts = [("m", &slot.m[..]), ("v", &slot.v[..])].into_iter().chain(master);
            parts.map(|(part, values)| (format!("{part}.{}", slot.name), &slot.shape[..], values))
        })
    }

    /// The same, to be filled.
    pub fn tensors_mut(&mut self) -> impl Iterator<Item = (String, &[usize], &mut [f32])> {
        self.slots.iter_mut().flat_map(|slot| {
            let Slot { name, shape, m, v, master, .. } = slot;
            let (name, shape) = (&*name, &shape[..]);
            let master = master.as_deref_mut().map(|values| ("master", values));
            let parts = [("m", &mut m[..]), ("v", &mut v[..])].into_iter().chain(master);
            parts.map(move |(part, values)| (format!("{part}.{name}"), shape, values))
        })
    }

    /// Bytes of masters.
    pub fn master_bytes(&self) -> usize {
        self.slots.iter().filter_map(|slot| slot.master.as_ref()).map(|master| 4 * master.len()).sum()
    }

    /// Bytes of moments.
    pub fn moment_bytes(&self) -> usize {
        self.slots.iter().map(|slot| 4 * (slot.m.len() + slot.v.len())).sum()
    }

    /// The norms of gradients; nothing is changed.
    pub fn norms(&self, grads: &Grads) -> Norms {
        let (mut groups, mut faulty) = (BTreeMap::<String, f64>::new(), Vec::new());
        let mut sum = 0.0;
        for slot in &self.slots {
            let norm = global_norm(&[gradient(grads, slot.place)]);
            if !norm.is_finite() {
                faulty.push(slot.name.clone());
            }
            *groups.entry(slot.group.into()).or_default() += norm * norm;
            sum += norm * norm;
        }
        for norm in groups.values_mut() {
            *norm = norm.sqrt();
        }
        Norms { global: sum.sqrt(), groups, faulty }
    }

    /// One update from gradients whose norm is `norm`, which must be finite. An update that would leave anything non-finite is
    /// an error, and changes nothing.
    pub fn step(&mut self, model: &mut Model, grads: &Grads, norm: f64, lr: f64) -> Result {
        match self.bad_update(model, grads, norm, lr)? {
            Some(bad) => Err(Error::Diverged(bad.to_string())),
            None => self.apply(model, grads, norm, lr),
        }
    }

    /// The first element that an update would leave non-finite, if there is one. Nothing is changed.
    pub fn bad_update(&self, model: &Model, grads: &Grads, norm: f64, lr: f64) -> Result<Option<BadUpdate>> {
        let scale = self.clip_factor(norm)?;
        for slot in &self.slots {
            if let Some(bad) = self.bad_element(slot, model, grads, scale, lr)? {
                return Ok(Some(bad));
            }
        }
        Ok(None)
    }

    fn bad_element(
        &self,
        slot: &Slot,
        model: &Model,
        grads: &Grads,
        scale: f32,
        lr: f64,
    ) -> Result<Option<BadUpdate>> {
        let Slot { name, place, master, m, v, .. } = slot;
        let wide: Vec<f32>;
        let (own, rounded): (&[f32], bool) = match *place {
            Place::Weight(i) => match (&model.params.weights()[i], master) {
                (Weight::F32(w), _) => (w, false),
                (Weight::Bf16(_), Some(master)) => (master, true),
                (Weight::Bf16(w), None) => {
                    wide = w.iter().map(|x| x.to_f32()).collect();
                    (&wide, true)
                }
            },
            Place::Protected(i) => {
                let rounded = is_rounded(model.precision(), &model.specs.protected[i]);
                (model.params.protected()[i].values(), rounded)
            }
            Place::AdapterA(i) | Place::AdapterB(i) => {
                let Some(low) = &model.params.adapters()[i] else { return Ok(None) };
                (if matches!(place, Place::AdapterA(_)) { &low.a } else { &low.b }, false)
            }
        };
        let w = master.as_deref().unwrap_or(own);
        let (g, step, options) = (gradient(grads, *place), self.updates + 1, self.options(slot, lr));
        let found = if rounded {
            adamw_fault::<bf16>(w, m, v, g, scale, step, &options)?
        } else {
            adamw_fault::<f32>(w, m, v, g, scale, step, &options)?
        };
        let Some(at) = found else { return Ok(None) };
        let (mut value, mut m, mut v) = ([w[at]], [m[at]], [v[at]]);
        adamw_step(&mut value, &mut m, &mut v, &[g[at]], scale, step, &options)?;
        if rounded {
            Rounding::Bf16.round_all(&mut value);
        }
        let [value] = value;
        let (name, gradient, before) = (name.clone(), g[at], w[at]);
        Ok(Some(BadUpdate { name, element: at, gradient, before, value, m: m[0], v: v[0] }))
    }

    /// The update itself, after [`Optimizer::bad_update`] has found nothing.
    pub(crate) fn apply(&mut self, model: &mut Model, grads: &Grads, norm: f64, lr: f64) -> Result {
        let scale = self.clip_factor(norm)?;
        self.updates += 1;
        for i in 0..self.slots.len() {
            self.update(i, model, grads, scale, lr)?;
        }
        Ok(())
    }

    fn clip_factor(&self, norm: f64) -> Result<f32> {
        Ok(if self.config.clip > 0.0 { adamw::clip_factor(norm, self.config.clip)? } else { 1.0 })
    }

    fn options(&self, slot: &Slot, lr: f64) -> adamw::Options {
        let OptimizerConfig { beta1, beta2, eps, weight_decay, .. } = self.config;
        adamw::Options { lr, beta1, beta2, eps, weight_decay: if slot.decays { weight_decay } else { 0.0 } }
    }

    fn update(&mut self, i: usize, model: &mut Model, grads: &Grads, scale: f32, lr: f64) -> Result {
        let (options, step) = (self.options(&self.slots[i], lr), self.updates);
        let Slot { place, master, m, v, .. } = &mut self.slots[i];
        let g = gradient(grads, *place);
        match *place {
            Place::Weight(i) => match (&mut model.params.weights_mut()[i], master) {
                (Weight::F32(w), _) => adamw_step(w, m, v, g, scale, step, &options)?,
                (Weight::Bf16(w), Some(master)) => {
                    adamw_step_with_copy(master, Some(w), m, v, g, scale, step, &options)?
                }
                (Weight::Bf16(w), None) => {
                    let mut wide: Vec<f32> = w.iter().map(|x| x.to_f32()).collect();
                    adamw_step_with_copy::<bf16>(&mut wide, Some(w), m, v, g, scale, step, &options)?;
                }
            },
            Place::Protected(i) => {
                let rounded = is_rounded(model.precision(), &model.specs.protected[i]);
                let w = model.params.protected_mut()[i].values_mut();
                match master {
                    None => adamw_step(w, m, v, g, scale, step, &options)?,
                    Some(master) => {
                        adamw_step(master, m, v, g, scale, step, &options)?;
                        w.copy_from_slice(master);
                    }
                }
                if rounded {
                    Rounding::Bf16.round_all(w);
                }
            }
            Place::AdapterA(i) | Place::AdapterB(i) => {
                let Some(low) = &mut model.params.adapters_mut()[i] else { return Ok(()) };
                let w = if matches!(place, Place::AdapterA(_)) { &mut low.a } else { &mut low.b };
                adamw_step(w, m, v, g, scale, step, &options)?;
            }
        }
        Ok(())
    }

    /// An error that names the first moment or master that cannot be: not finite, or a negative second moment.
    pub fn check(&self) -> Result {
        for slot in &self.slots {
            let bad = |what: &str, values: &[f32], valid: fn(f32) -> bool| match values
                .iter()
                .position(|x| !valid(*x))
            {
                None => Ok(()),
                Some(at) => Err(Error::Diverged(format!(
                    "the optimiser's {what} of {} is {} at element {at}; go back to an earlier checkpoint",
                    slot.name, values[at]
                ))),
            };
            bad("first moment", &slot.m, f32::is_finite)?;
            bad("second moment", &slot.v, |x| x.is_finite() && x >= 0.0)?;
            bad("master", slot.master.as_deref().unwrap_or_default(), f32::is_finite)?;
        }
        Ok(())
    }
}

/// Whether a protected tensor runs rounded.
pub fn is_rounded(precision: &Precision, spec: &Spec) -> bool {
    precision.rounds(&precision.policy(), &spec.name)
}

/// The gradient of a parameter.
pub fn gradient(grads: &Grads, place: Place) -> &[f32] {
    match place {
        Place::Weight(i) => grads.weight(i),
        Place::Protected(i) => grads.protected(i),
        Place::AdapterA(i) => grads.adapter(i).a,
        Place::AdapterB(i) => grads.adapter(i).b,
    }
}
