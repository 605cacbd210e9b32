//! The optimizer: f32 masters and f32 state for every learned parameter, whatever type the model computes in.
//!
//! ```text
//! weight, bf16      master f32 -> update -> rounded into the model
//! weight, f32       the model's own value is the master
//! protected         in place, in f32; a tensor that the policy leaves out, like a bf16 weight
//! adapter           in place, in f32
//! ```
//! This file has what all optimizers share: slots, masters, norms, clipping, the check before an update,
//! saved tensors. An optimizer itself is an [`UpdateRule`] in a file of its own; `rule_for` chooses it for
//! each parameter.
//!
//! Weight decay is for matrices: not for norms, biases, or protected tensors.

mod adamw;
mod muon;
mod rule;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use ballast_kernels::Rounding;
use ballast_kernels::adamw::{block_squares, clip_factor};
use ballast_model::params::{Grads, Spec, Weight};
use ballast_model::precision::Storage;
use ballast_model::{Config as ModelConfig, Model, Precision};

use crate::cluster::Shards;
use crate::config::{OptimizerConfig, OptimizerKind};
use crate::error::{Error, Result};

use adamw::AdamW;
use muon::Muon;
pub(crate) use rule::state_bytes;
pub use rule::{BadElement, StateKind, StateTensor, Step, UpdateRule};

/// Place of a parameter in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Index among the weights.
    Weight(usize),
    /// Index among the protected tensors.
    Protected(usize),
    /// A of the adapter of this weight.
    AdapterA(usize),
    /// B of the adapter of this weight.
    AdapterB(usize),
}

/// A learned parameter and its optimizer state.
#[derive(Clone, Debug)]
pub struct Slot {
    /// Name, as in the checkpoint.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Place in the model.
    pub place: Place,
    /// Group in reports.
    pub group: &'static str,
    /// True if weight decay applies.
    pub decays: bool,
    /// Elements that this process updates: all, unless the ranks of a run share the parameter.
    pub range: Range<usize>,
    /// f32 value of these elements, where the model stores a rounded one.
    pub master: Option<Vec<f32>>,
    /// State tensors of the rule, in its order.
    pub state: Vec<StateTensor>,
    /// The optimizer of this parameter.
    pub rule: Arc<dyn UpdateRule>,
}

impl Slot {
    /// Number of elements of the parameter.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The optimizer of a run.
#[derive(Clone, Debug)]
pub struct Optimizer {
    /// All learned parameters.
    pub slots: Vec<Slot>,
    /// Number of updates so far.
    pub updates: u32,
    clip: f64,
}

/// Norms of the gradients of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Norms {
    /// Norm over all parameters.
    pub global: f64,
    /// Norm of each group.
    pub groups: BTreeMap<String, f64>,
    /// Names of the parameters with non-finite gradients.
    pub faulty: Vec<String>,
}

/// An element that an update would leave non-finite.
#[derive(Clone, Debug, PartialEq)]
pub struct BadUpdate {
    /// Name of the parameter.
    pub name: String,
    /// Gradient of the element, before clipping.
    pub gradient: f32,
    /// Present value of the element, in f32.
    pub before: f32,
    /// The element, its new value and its new state.
    pub after: BadElement,
}

impl std::fmt::Display for BadUpdate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let BadUpdate { name, gradient, before, after: BadElement { element, value, state } } = self;
        write!(f, "the update takes {name} from {before:e} to {value:e} at element {element} ")?;
        write!(f, "(gradient {gradient:e}")?;
        state.iter().try_for_each(|(label, value)| write!(f, ", {label} {value:e}"))?;
        write!(f, ")")
    }
}

/// Parts of parameter names and their groups; the first match counts.
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

/// Role of a parameter of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// An ordinary weight.
    Weight,
    /// A protected tensor.
    Protected,
}

/// Returns true if weight decay applies to a parameter, or to the adapter of a weight.
fn decays(spec: &Spec, role: Role) -> bool {
    role == Role::Weight && spec.shape.len() > 1 && !spec.name.contains("norm")
}

/// The rule of a parameter of the model.
pub(crate) fn rule_for(
    config: &OptimizerConfig,
    model: &ModelConfig,
    spec: &Spec,
    role: Role,
) -> Arc<dyn UpdateRule> {
    let muon = match (config.kind, role) {
        (OptimizerKind::Muon, Role::Weight) => Muon::new(&config.muon, model, spec),
        _ => None,
    };
    match muon {
        Some(muon) => Arc::new(muon),
        None => Arc::new(AdamW::new(config, decays(spec, role))),
    }
}

/// The rule of a LoRA adapter's A and B: AdamW, whatever the kind.
pub(crate) fn adapter_rule(config: &OptimizerConfig, decays: bool) -> impl UpdateRule + use<> {
    AdamW::new(config, decays)
}

impl Optimizer {
    /// An optimizer for all parameters of a model that have a place in `grads`. The model is still in f32,
    /// and is to run in `precision`: masters begin with all its bits.
    pub fn new(model: &Model, grads: &Grads, config: &OptimizerConfig, precision: &Precision) -> Optimizer {
        Optimizer::divided(model, grads, config, precision, None)
    }

    /// [`Optimizer::new`] for the weights of this rank alone; the model holds all of each weight, or the own
    /// elements of it.
    pub fn divided(
        model: &Model,
        grads: &Grads,
        config: &OptimizerConfig,
        precision: &Precision,
        shards: Option<&Shards>,
    ) -> Optimizer {
        let mut slots = Vec::new();
        let mut add = |spec: &Spec,
                       shape: &[usize],
                       suffix: &str,
                       place: Place,
                       rule: Arc<dyn UpdateRule>,
                       master: Option<Vec<f32>>| {
            let range = match (place, shards) {
                (Place::Weight(i), Some(shards)) => shards.own(i),
                _ => 0..shape.iter().product(),
            };
            slots.push(Slot {
                name: format!("{}{suffix}", model.parameter_name(spec)),
                shape: shape.to_vec(),
                place,
                group: if suffix.is_empty() { group_of(&spec.name) } else { "adapters" },
                decays: !matches!(place, Place::Protected(_)) && decays(spec, Role::Weight),
                master,
                state: rule::new_state(&*rule, shape, &range),
                range,
                rule,
            });
        };
        let bf16 = precision.params == Storage::Bf16;
        for (i, (spec, weight)) in model.specs.weights.iter().zip(model.params.weights()).enumerate() {
            if grads.weight_place(i).is_some() {
                let own = shards.map(|shards| shards.own(i)).filter(|_| weight.len() == spec.len());
                let master = (bf16 && config.masters).then(|| match own {
                    Some(own) => weight.clone().into_share(Some(own)).to_f32(),
                    None => weight.to_f32(),
                });
                add(
                    spec,
                    &spec.shape,
                    "",
                    Place::Weight(i),
                    rule_for(config, &model.config, spec, Role::Weight),
                    master,
                );
            }
        }
        for (i, (spec, tensor)) in model.specs.protected.iter().zip(model.params.protected()).enumerate() {
            if !grads.protected(i).is_empty() {
                let rounded = is_rounded(precision, spec);
                let master = (rounded && config.masters).then(|| tensor.values().to_vec());
                let rule = rule_for(config, &model.config, spec, Role::Protected);
                add(spec, &spec.shape, "", Place::Protected(i), rule, master);
            }
        }
        for (i, (spec, low)) in model.specs.weights.iter().zip(model.params.adapters()).enumerate() {
            let Some(low) = low else { continue };
            let (outputs, inputs) = (spec.shape[0], spec.shape[1]);
            let rule = Arc::new(adapter_rule(config, decays(spec, Role::Weight)));
            add(spec, &[low.rank, inputs], ".lora_A", Place::AdapterA(i), rule.clone(), None);
            add(spec, &[outputs, low.rank], ".lora_B", Place::AdapterB(i), rule, None);
        }
        Optimizer { slots, updates: 0, clip: config.clip }
    }

    /// All tensors to save: name, shape, values. `<prefix>.<parameter>` for state, `master.<parameter>` for
    /// masters.
    pub fn tensors(&self) -> impl Iterator<Item = (String, &[usize], &[f32])> {
        self.slots_and_tensors().map(|(_, name, shape, values)| (name, shape, values))
    }

    /// [`Optimizer::tensors`] with the slot of each; `values` are those of the slot's range.
    pub(crate) fn slots_and_tensors(&self) -> impl Iterator<Item = (&Slot, String, &[usize], &[f32])> {
        self.slots.iter().flat_map(|slot| {
            let master = slot.master.as_deref().map(|values| ("master", &slot.shape[..], values));
            let state =
                slot.state.iter().map(|tensor| (tensor.kind.prefix, &tensor.shape[..], &tensor.values[..]));
            let parts = state.chain(master);
            parts.map(move |(prefix, shape, values)| (slot, format!("{prefix}.{}", slot.name), shape, values))
        })
    }

    /// The tensors of [`Optimizer::tensors`], to be filled, with the range of the elements.
    pub fn tensors_mut(&mut self) -> impl Iterator<Item = (String, &[usize], Range<usize>, &mut [f32])> {
        self.slots.iter_mut().flat_map(|slot| {
            let Slot { name, shape, state, master, range, .. } = slot;
            let (name, shape, range) = (&*name, &shape[..], range.clone());
            let master = master.as_deref_mut().map(|values| ("master", shape, values));
            let state = state
                .iter_mut()
                .map(|tensor| (tensor.kind.prefix, &tensor.shape[..], &mut tensor.values[..]));
            let parts = state.chain(master);
            parts.map(move |(prefix, shape, values)| {
                (format!("{prefix}.{name}"), shape, range.clone(), values)
            })
        })
    }

    /// Bytes of masters.
    pub fn master_bytes(&self) -> usize {
        self.slots.iter().filter_map(|slot| slot.master.as_ref()).map(|master| 4 * master.len()).sum()
    }

    /// Bytes of the rules' state: moments of AdamW, momentum of Muon.
    pub fn state_bytes(&self) -> usize {
        self.slots.iter().flat_map(|slot| &slot.state).map(|tensor| 4 * tensor.values.len()).sum()
    }

    /// Norms of the gradients.
    pub fn norms(&self, grads: &Grads) -> Norms {
        let squares = self.slots.iter().map(|slot| block_squares(gradient(grads, slot.place)));
        self.norms_of(&squares.collect::<Vec<_>>())
    }

    /// Norms of gradients whose squares are summed in blocks, for each slot.
    pub(crate) fn norms_of(&self, squares: &[Vec<f64>]) -> Norms {
        let (mut groups, mut faulty) = (BTreeMap::<String, f64>::new(), Vec::new());
        let mut sum = 0.0;
        for (slot, squares) in self.slots.iter().zip(squares) {
            let norm = squares.iter().sum::<f64>().sqrt();
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

    /// Makes one update from gradients whose norm is `norm`, which must be finite. An update that would leave
    /// a value or a state non-finite is an error, and changes nothing.
    pub fn step(&mut self, model: &mut Model, grads: &Grads, norm: f64, lr: f64) -> Result {
        match self.bad_update(model, grads, norm, lr)? {
            Some(bad) => Err(Error::Diverged(bad.to_string())),
            None => self.apply(model, grads, norm, lr),
        }
    }

    /// Returns the first element that an update would leave non-finite, if there is one. Changes nothing.
    pub fn bad_update(&self, model: &Model, grads: &Grads, norm: f64, lr: f64) -> Result<Option<BadUpdate>> {
        Ok(self.first_bad_update(model, grads, norm, lr)?.map(|(_, bad)| bad))
    }

    /// [`Optimizer::bad_update`] with the index of the slot.
    pub(crate) fn first_bad_update(
        &self,
        model: &Model,
        grads: &Grads,
        norm: f64,
        lr: f64,
    ) -> Result<Option<(usize, BadUpdate)>> {
        let scale = self.scale(norm)?;
        for (index, slot) in self.slots.iter().enumerate().filter(|(_, slot)| !slot.range.is_empty()) {
            let gradient = gradient(grads, slot.place);
            let step = Step { gradient, scale, lr, number: self.updates + 1 };
            if let Some(bad) = bad_update_of(slot, model, &step)? {
                return Ok(Some((index, bad)));
            }
        }
        Ok(None)
    }

    /// Applies the update, after [`Optimizer::bad_update`] has found nothing.
    pub(crate) fn apply(&mut self, model: &mut Model, grads: &Grads, norm: f64, lr: f64) -> Result {
        let scale = self.scale(norm)?;
        self.updates += 1;
        let longest = self.slots.iter().map(|slot| slot.rule.workspace()).max().unwrap_or(0);
        let mut workspace = vec![0.0; longest];
        for slot in self.slots.iter_mut().filter(|slot| !slot.range.is_empty()) {
            let step = Step { gradient: gradient(grads, slot.place), scale, lr, number: self.updates };
            let needed = slot.rule.workspace();
            update(slot, model, &step, &mut workspace[..needed])?;
        }
        Ok(())
    }

    /// The clipping factor of gradients with this norm.
    fn scale(&self, norm: f64) -> Result<f32> {
        Ok(if self.clip > 0.0 { clip_factor(norm, self.clip)? } else { 1.0 })
    }

    /// Returns an error that names the first invalid state or master: a non-finite value, or a negative
    /// second moment.
    pub fn check(&self) -> Result {
        for slot in &self.slots {
            let check = |what: &str, values: &[f32], valid: fn(f32) -> bool| match values
                .iter()
                .position(|x| !valid(*x))
            {
                None => Ok(()),
                Some(at) => Err(Error::Diverged(format!(
                    "optimizer state: the {what} of {} is {} at element {}; go back to an earlier checkpoint",
                    slot.name,
                    values[at],
                    slot.range.start + at
                ))),
            };
            for StateTensor { kind, values, .. } in &slot.state {
                check(kind.label, values, kind.is_valid)?;
            }
            check("master", slot.master.as_deref().unwrap_or_default(), f32::is_finite)?;
        }
        Ok(())
    }
}

/// The first element of a slot that an update would leave non-finite.
fn bad_update_of(slot: &Slot, model: &Model, step: &Step<'_>) -> Result<Option<BadUpdate>> {
    let Slot { name, place, master, state, rule, range, .. } = slot;
    let wide: Vec<f32>;
    let (own, storage): (&[f32], Storage) = match *place {
        Place::Weight(i) => match (&model.params.weights()[i], master) {
            (Weight::F32(w), _) => (&w[held(w.len(), slot)], Storage::F32),
            (Weight::Bf16(_), Some(master)) => (master, Storage::Bf16),
            (Weight::Bf16(w), None) => {
                wide = w[held(w.len(), slot)].iter().map(|x| x.to_f32()).collect();
                (&wide, Storage::Bf16)
            }
        },
        Place::Protected(i) => {
            let rounded = is_rounded(model.precision(), &model.specs.protected[i]);
            let storage = if rounded { Storage::Bf16 } else { Storage::F32 };
            (model.params.protected()[i].values(), storage)
        }
        Place::AdapterA(i) | Place::AdapterB(i) => {
            let Some(low) = &model.params.adapters()[i] else { return Ok(None) };
            (if matches!(place, Place::AdapterA(_)) { &low.a } else { &low.b }, Storage::F32)
        }
    };
    let w = master.as_deref().unwrap_or(own);
    let Some(after) = rule.bad_element(w, state, step, storage)? else { return Ok(None) };
    let (gradient, before) = (step.gradient[after.element], w[after.element]);
    let after = BadElement { element: range.start + after.element, ..after };
    Ok(Some(BadUpdate { name: name.clone(), gradient, before, after }))
}

/// The elements that a slot updates in a weight of which the model holds `len` elements: all, or the own ones.
fn held(len: usize, slot: &Slot) -> Range<usize> {
    if len == slot.elements() { slot.range.clone() } else { 0..len }
}

/// Updates a slot and its parameter in the model.
fn update(slot: &mut Slot, model: &mut Model, step: &Step<'_>, workspace: &mut [f32]) -> Result {
    let held = match slot.place {
        Place::Weight(i) => held(model.params.weights()[i].len(), slot),
        _ => 0..slot.elements(),
    };
    let Slot { place, master, state, rule, .. } = slot;
    match *place {
        Place::Weight(i) => match (&mut model.params.weights_mut()[i], master) {
            (Weight::F32(w), _) => rule.update(&mut w[held], None, state, step, workspace),
            (Weight::Bf16(w), Some(master)) => {
                rule.update(master, Some(&mut w[held]), state, step, workspace)
            }
            (Weight::Bf16(w), None) => {
                let w = &mut w[held];
                let mut wide: Vec<f32> = w.iter().map(|x| x.to_f32()).collect();
                rule.update(&mut wide, Some(w), state, step, workspace)
            }
        },
        Place::Protected(i) => {
            let rounded = is_rounded(model.precision(), &model.specs.protected[i]);
            let w = model.params.protected_mut()[i].values_mut();
            match master {
                None => rule.update(w, None, state, step, workspace)?,
                Some(master) => {
                    rule.update(master, None, state, step, workspace)?;
                    w.copy_from_slice(master);
                }
            }
            if rounded {
                Rounding::Bf16.round_all(w);
            }
            Ok(())
        }
        Place::AdapterA(i) | Place::AdapterB(i) => {
            let Some(low) = &mut model.params.adapters_mut()[i] else { return Ok(()) };
            let w = if matches!(place, Place::AdapterA(_)) { &mut low.a } else { &mut low.b };
            rule.update(w, None, state, step, workspace)
        }
    }
}

/// Returns true if the model runs with rounded values of a protected tensor.
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
