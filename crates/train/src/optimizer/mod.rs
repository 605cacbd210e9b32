//! The optimizer: an f32 master for every learned parameter, whatever type the model computes in, and its state.
//!
//! ```text
//! weight, bf16      master -> update -> rounded into the model; the master is stored beside the rounded value
//! weight, f32       the model's own value is the master
//! protected         in place, in f32; a tensor that the policy leaves out has an f32 master
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
mod saved;
mod stored;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use ballast_kernels::Rounding;
use ballast_kernels::adamw::{block_squares, clip_factor};
use ballast_kernels::moments::Noise;
use ballast_kernels::remainder::Remainders;
use ballast_model::params::{Adapter, Grads, Spec, Weight};
use ballast_model::precision::Storage;
use ballast_model::{Config as ModelConfig, Model, Precision};
use half::bf16;

use crate::cluster::Shards;
use crate::config::{MomentStorage, OptimizerConfig, OptimizerKind};
use crate::data::shuffle::{Purpose, hash};
use crate::error::{Error, Result};

use adamw::AdamW;
use muon::Muon;
pub(crate) use rule::state_bytes;
pub use rule::{BadElement, StateKind, StateTensor, Step, UpdateRule};
pub use saved::SavedTensor;
pub(crate) use stored::block_workspace;
pub use stored::{Master, Stored};
use stored::{Value, ValueRef};

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
    pub master: Option<Master>,
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
    /// Seed of the rounding of state that is stored in fewer bits.
    pub seed: u64,
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
pub(crate) struct BadUpdate {
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
    pub(crate) fn divided(
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
                       master: Option<Master>| {
            let range = match (place, shards) {
                (Place::Weight(i), Some(shards)) => shards.own(i),
                _ => 0..shape.iter().product(),
            };
            let moments = match place {
                Place::Weight(_) => config.moments,
                _ => MomentStorage::F32,
            };
            slots.push(Slot {
                name: format!("{}{suffix}", model.parameter_name(spec)),
                shape: shape.to_vec(),
                place,
                group: if suffix.is_empty() { group_of(&spec.name) } else { "adapters" },
                decays: !matches!(place, Place::Protected(_)) && decays(spec, Role::Weight),
                master,
                state: rule::new_state(&*rule, shape, &range, moments),
                range,
                rule,
            });
        };
        let bf16 = precision.params == Storage::Bf16;
        for (i, (spec, weight)) in model.specs.weights.iter().zip(model.params.weights()).enumerate() {
            if grads.weight_place(i).is_some() {
                let own = shards.map(|shards| shards.own(i)).filter(|_| weight.len() == spec.len());
                let master = (bf16 && config.masters).then(|| {
                    let values = match own {
                        Some(own) => weight.clone().into_share(Some(own)).to_f32(),
                        None => weight.to_f32(),
                    };
                    // The model rounds its weights in the same way.
                    Master::Beside(Remainders::split(&mut vec![bf16::ZERO; values.len()], &values))
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
                let master = (rounded && config.masters).then(|| Master::F32(tensor.values().to_vec()));
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
        Optimizer { slots, updates: 0, clip: config.clip, seed: 0 }
    }

    /// Bytes of masters.
    pub fn master_bytes(&self) -> usize {
        self.slots.iter().filter_map(|slot| slot.master.as_ref()).map(Master::bytes).sum()
    }

    /// Bytes of the rules' state: moments of AdamW, momentum of Muon.
    pub fn state_bytes(&self) -> usize {
        self.slots.iter().flat_map(|slot| &slot.state).map(|tensor| tensor.values.bytes()).sum()
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
    pub(crate) fn bad_update(
        &self,
        model: &Model,
        grads: &Grads,
        norm: f64,
        lr: f64,
    ) -> Result<Option<BadUpdate>> {
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
        let (seed, number) = (self.seed, self.updates);
        for (index, slot) in self.slots.iter_mut().enumerate().filter(|(_, slot)| !slot.range.is_empty()) {
            let step = Step { gradient: gradient(grads, slot.place), scale, lr, number };
            let needed = slot.rule.workspace();
            let noise = |state: usize| slot_noise(seed, number, index, state, slot.range.start);
            let noise: Vec<Noise> = (0..slot.state.len()).map(noise).collect();
            update(slot, model, &step, &noise, &mut workspace[..needed])?;
        }
        Ok(())
    }

    /// The clipping factor of gradients with this norm.
    fn scale(&self, norm: f64) -> Result<f32> {
        Ok(if self.clip > 0.0 { clip_factor(norm, self.clip)? } else { 1.0 })
    }

    /// Returns an error that names the first invalid state or master: a non-finite value, or a negative
    /// second moment.
    pub fn check(&self, model: &Model) -> Result {
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
                check(kind.label, &values.to_f32(), kind.is_valid)?;
            }
            if slot.master.is_some() {
                check("master", &slot.value(model).to_f32(), f32::is_finite)?;
            }
        }
        Ok(())
    }
}

impl Slot {
    /// The value of the parameter in f32, where it is: the master if there is one.
    fn value<'a>(&'a self, model: &'a Model) -> ValueRef<'a> {
        match (&self.master, self.place) {
            (Some(Master::F32(values)), _) => ValueRef::F32(values),
            (Some(Master::Beside(remainders)), Place::Weight(i)) => match &model.params.weights()[i] {
                Weight::Bf16(w) => ValueRef::Split(&w[held(w.len(), self)], remainders),
                // Before the model is rounded, it has all bits itself.
                Weight::F32(w) => ValueRef::F32(&w[held(w.len(), self)]),
            },
            (_, Place::Weight(i)) => match &model.params.weights()[i] {
                Weight::F32(w) => ValueRef::F32(&w[held(w.len(), self)]),
                Weight::Bf16(w) => ValueRef::Bf16(&w[held(w.len(), self)]),
            },
            (_, Place::Protected(i)) => ValueRef::F32(model.params.protected()[i].values()),
            (_, Place::AdapterA(i)) => ValueRef::F32(adapter(model, i).map_or(&[], |low| &low.a)),
            (_, Place::AdapterB(i)) => ValueRef::F32(adapter(model, i).map_or(&[], |low| &low.b)),
        }
    }

    /// The value of the parameter in f32: the master if there is one.
    pub fn values(&self, model: &Model) -> Vec<f32> {
        self.value(model).to_f32().into_owned()
    }

    /// Storage of the parameter in the model.
    fn storage(&self, model: &Model) -> Storage {
        match self.place {
            Place::Weight(i) => match &model.params.weights()[i] {
                Weight::F32(_) => Storage::F32,
                Weight::Bf16(_) => Storage::Bf16,
            },
            Place::Protected(i) if is_rounded(model.precision(), &model.specs.protected[i]) => Storage::Bf16,
            _ => Storage::F32,
        }
    }
}

fn adapter(model: &Model, weight: usize) -> Option<&Adapter> {
    model.params.adapters()[weight].as_ref()
}

/// The first element of a slot that an update would leave non-finite.
fn bad_update_of(slot: &Slot, model: &Model, step: &Step<'_>) -> Result<Option<BadUpdate>> {
    let values: Vec<&Stored> = slot.state.iter().map(|tensor| &tensor.values).collect();
    let found = stored::bad_element(&*slot.rule, &slot.value(model), &values, step, slot.storage(model))?;
    let Some((before, after)) = found else { return Ok(None) };
    let gradient = step.gradient[after.element];
    let after = BadElement { element: slot.range.start + after.element, ..after };
    Ok(Some(BadUpdate { name: slot.name.clone(), gradient, before, after }))
}

/// The noise of a state tensor in an update. Elements are counted from the start of the parameter, so the same element
/// has the same noise on any number of ranks.
fn slot_noise(seed: u64, update: u32, slot: usize, state: usize, begin: usize) -> Noise {
    let counters = [u64::from(update) << 8 | state as u64, slot as u64];
    Noise::new(hash(seed, Purpose::Moments, counters)).starting_at(begin)
}

/// The elements that a slot updates in a weight of which the model holds `len` elements: all, or this rank's.
fn held(len: usize, slot: &Slot) -> Range<usize> {
    if len == slot.elements() { slot.range.clone() } else { 0..len }
}

/// Updates a slot and its parameter in the model.
fn update(
    slot: &mut Slot,
    model: &mut Model,
    step: &Step<'_>,
    noise: &[Noise],
    workspace: &mut [f32],
) -> Result {
    let held = match slot.place {
        Place::Weight(i) => held(model.params.weights()[i].len(), slot),
        _ => 0..slot.elements(),
    };
    let Slot { place, master, state, rule, .. } = slot;
    let rounded = match *place {
        Place::Protected(i) => is_rounded(model.precision(), &model.specs.protected[i]),
        _ => false,
    };
    let value = match (*place, master) {
        (Place::Weight(i), master) => match (&mut model.params.weights_mut()[i], master) {
            (Weight::F32(w), _) => Value::F32(&mut w[held], None),
            (Weight::Bf16(w), Some(Master::Beside(remainders))) => Value::Split(&mut w[held], remainders),
            (Weight::Bf16(w), Some(Master::F32(master))) => Value::F32(master, Some(&mut w[held])),
            (Weight::Bf16(w), None) => Value::Bf16(&mut w[held]),
        },
        (Place::Protected(_), Some(Master::F32(master))) => Value::F32(master, None),
        (Place::Protected(i), _) => Value::F32(model.params.protected_mut()[i].values_mut(), None),
        (Place::AdapterA(i) | Place::AdapterB(i), _) => {
            let Some(low) = &mut model.params.adapters_mut()[i] else { return Ok(()) };
            Value::F32(if matches!(place, Place::AdapterA(_)) { &mut low.a } else { &mut low.b }, None)
        }
    };
    let mut values: Vec<&mut Stored> = state.iter_mut().map(|tensor| &mut tensor.values).collect();
    stored::update(&**rule, value, &mut values, step, noise, workspace)?;
    if let Place::Protected(i) = *place {
        let w = model.params.protected_mut()[i].values_mut();
        if let Some(Master::F32(master)) = &slot.master {
            w.copy_from_slice(master);
        }
        if rounded {
            Rounding::Bf16.round_all(w);
        }
    }
    Ok(())
}

/// Returns true if the model runs with rounded values of a protected tensor.
pub(crate) fn is_rounded(precision: &Precision, spec: &Spec) -> bool {
    precision.rounds(&precision.policy(), &spec.name)
}

/// The gradient of a parameter.
pub(crate) fn gradient(grads: &Grads, place: Place) -> &[f32] {
    match place {
        Place::Weight(i) => grads.weight(i),
        Place::Protected(i) => grads.protected(i),
        Place::AdapterA(i) => grads.adapter(i).a,
        Place::AdapterB(i) => grads.adapter(i).b,
    }
}
