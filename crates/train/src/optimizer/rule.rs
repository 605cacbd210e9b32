//! The interface of an optimizer: the state it keeps for a parameter, and the update it makes.
//!
//! An optimizer is one file beside this one that implements [`UpdateRule`], and a line in `rule_for` that
//! says which parameters it updates. Masters, clipping, checkpoints, the memory plan and the check before an
//! update follow from the trait.

use std::fmt::Debug;
use std::ops::Range;

use ballast_model::precision::Storage;
use half::bf16;

use super::stored::Stored;
use crate::config::MomentStorage;
use crate::error::Result;

/// A kind of state tensor: `m` of AdamW, for example.
#[derive(Debug)]
pub struct StateKind {
    /// Prefix of the tensor's name in a checkpoint: `m` in `m.<parameter>`.
    pub prefix: &'static str,
    /// Name in messages and tables.
    pub label: &'static str,
    /// Shape of the tensor for a parameter of this shape.
    pub shape: fn(&[usize]) -> Vec<usize>,
    /// True if values may be negative. All are 0 before the first update.
    pub signed: bool,
    /// Returns true for values that an update can leave behind.
    pub is_valid: fn(f32) -> bool,
}

/// A state tensor of one parameter.
#[derive(Clone, Debug)]
pub struct StateTensor {
    /// Its kind.
    pub kind: &'static StateKind,
    /// Shape.
    pub shape: Vec<usize>,
    /// Values of the elements that this process updates.
    pub values: Stored,
}

/// The arguments of one update that do not depend on the rule.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// Gradient, before clipping.
    pub gradient: &'a [f32],
    /// Clipping factor: the rule uses `scale * gradient`.
    pub scale: f32,
    /// Learning rate of this step, from the schedule.
    pub lr: f64,
    /// Number of this update, from 1.
    pub number: u32,
}

/// The first element of a parameter that an update would leave non-finite.
#[derive(Clone, Debug, PartialEq)]
pub struct BadElement {
    /// Index of the element.
    pub element: usize,
    /// New value, rounded to the type that the model stores.
    pub value: f32,
    /// New state of the element, by label.
    pub state: Vec<(&'static str, f32)>,
}

/// An optimizer for one parameter. It holds its settings; the state lies in the parameter's slot.
pub trait UpdateRule: Debug + Send + Sync {
    /// Name of the optimizer.
    fn name(&self) -> &'static str;

    /// Collective name of the state tensors, for the memory plan.
    fn state_name(&self) -> &'static str;

    /// The state tensors of a parameter, in the order in which [`UpdateRule::update`] gets them.
    fn state(&self) -> &'static [StateKind];

    /// Returns true if blocks of [`ballast_kernels::adamw::BLOCK`] elements can be updated one by one, with the
    /// same bits as all at once; then several ranks can share a parameter. All state tensors must have the
    /// parameter's shape.
    fn is_divisible(&self) -> bool {
        false
    }

    /// Number of f32 of working memory that an update needs.
    fn workspace(&self) -> usize {
        0
    }

    /// Returns the first element that [`UpdateRule::update`] with these arguments would leave with a
    /// non-finite state, or would take from a finite value to one that is non-finite in `storage`. Changes
    /// nothing.
    fn bad_element(
        &self,
        w: &[f32],
        state: &[&[f32]],
        step: &Step<'_>,
        storage: Storage,
    ) -> Result<Option<BadElement>>;

    /// Updates a parameter's f32 value and its state; `copy` gets the new value, rounded. `workspace` has
    /// [`UpdateRule::workspace`] elements.
    fn update(
        &self,
        w: &mut [f32],
        copy: Option<&mut [bf16]>,
        state: &mut [&mut [f32]],
        step: &Step<'_>,
        workspace: &mut [f32],
    ) -> Result;
}

/// State tensors before the first update, for the elements `range` of a parameter of this shape.
pub(super) fn new_state(
    rule: &dyn UpdateRule,
    shape: &[usize],
    range: &Range<usize>,
    storage: MomentStorage,
) -> Vec<StateTensor> {
    let whole = range.len() == shape.iter().product::<usize>();
    let tensor = |kind: &'static StateKind| {
        let shape = (kind.shape)(shape);
        let len = if whole { shape.iter().product() } else { range.len() };
        StateTensor { kind, values: Stored::zeros(storage, len, kind.signed), shape }
    };
    rule.state().iter().map(tensor).collect()
}

/// Bytes of the state of a parameter of this shape.
pub(crate) fn state_bytes(rule: &dyn UpdateRule, shape: &[usize], storage: MomentStorage) -> usize {
    let len = |kind: &StateKind| (kind.shape)(shape).iter().product::<usize>();
    rule.state().iter().map(|kind| Stored::bytes_of(storage, len(kind))).sum()
}
