//! The parameters and their types.
//!
//! A parameter is a [`Weight`], which may be f32 or bf16, or [`Protected`], which is f32 and has no other form. Casting
//! a model is [`Params::cast`]; it walks over the weights, and a protected tensor is not among them. It cannot be
//! written for one:
//!
//! ```compile_fail
//! use ballast_model::params::{Protected, Weight};
//! use ballast_model::precision::Storage;
//! let a_log = Protected::new(vec![1.5]);
//! let _: Protected = a_log.cast(Storage::Bf16); // Weight has `cast`, Protected has not
//! ```
//! ```
//! use ballast_model::params::Weight;
//! use ballast_model::precision::Storage;
//! let weight = Weight::F32(vec![1.5]).cast(Storage::Bf16);
//! assert_eq!(weight.storage(), Storage::Bf16);
//! ```
//!
//! Layers do not hold parameters but their [`Id`]s, so that gradients, moments and names can lie beside them in the
//! same order.

use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

use ballast_kernels::{Element, Rounding};
use half::bf16;

pub use crate::grads::{AdapterGrads, Bucket, Grads, Kind, Part};
use crate::precision::Storage;

/// An ordinary parameter.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Weight {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

/// Runs `$body` with `$w` the slice of a [`Weight`], whatever its type.
#[macro_export]
macro_rules! with_weight {
    ($weight:expr, |$w:ident| $body:expr) => {
        match $weight {
            $crate::params::Weight::F32(values) => {
                let $w = &values[..];
                $body
            }
            $crate::params::Weight::Bf16(values) => {
                let $w = &values[..];
                $body
            }
        }
    };
}

impl Weight {
    /// What it is stored in.
    pub fn storage(&self) -> Storage {
        match self {
            Weight::F32(_) => Storage::F32,
            Weight::Bf16(_) => Storage::Bf16,
        }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        with_weight!(self, |w| w.len())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same values, rounded where the new type cannot hold them.
    pub fn cast(self, storage: Storage) -> Weight {
        match (self, storage) {
            (Weight::F32(values), Storage::Bf16) => {
                let mut rounded = vec![bf16::ZERO; values.len()];
                Element::store(&mut rounded, &values);
                Weight::Bf16(rounded)
            }
            (Weight::Bf16(values), Storage::F32) => {
                let mut wide = vec![0.0; values.len()];
                Element::load(&mut wide, &values);
                Weight::F32(wide)
            }
            (same, _) => same,
        }
    }

    /// The values in f32.
    pub fn to_f32(&self) -> Vec<f32> {
        match self.clone().cast(Storage::F32) {
            Weight::F32(values) => values,
            Weight::Bf16(_) => unreachable!("it was cast"),
        }
    }
}

/// A parameter that the contract protects: f32, whatever becomes of the others.
#[derive(Clone, Debug, PartialEq)]
pub struct Protected(Vec<f32>);

impl Protected {
    /// A protected tensor of these values.
    pub fn new(values: Vec<f32>) -> Protected {
        Protected(values)
    }

    /// The values.
    pub fn values(&self) -> &[f32] {
        &self.0
    }

    /// The values, for the optimiser, which works on them in place.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }

    /// Gives up what a narrower type cannot hold, in f32 storage: what a framework without the contract does to it. For
    /// comparison; only [`crate::Model::set_precision`] calls it, and only for tensors that the policy leaves out.
    pub(crate) fn forget_beyond(&mut self, rounding: Rounding) {
        rounding.round_all(&mut self.0);
    }
}

/// A low-rank addition to a weight [out, in]: W + scale B A. f32, whatever the weight is.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// [rank, in]
    pub a: Vec<f32>,
    /// [out, rank]
    pub b: Vec<f32>,
    /// Rows of A.
    pub rank: usize,
    /// alpha / rank
    pub scale: f32,
}

/// How a parameter of a new model starts.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Init {
    /// Normal with the configuration's standard deviation.
    Normal,
    /// The same, with zeros for the padding token.
    Embedding,
    Zeros,
    Ones,
    /// The logarithm of a decay rate drawn from U(0.01, 16).
    ALog,
}

/// A parameter without its values.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// Name, without what stands before `layers.` and `embed_tokens.`; `lm_head.weight` has none there.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// How it starts.
    pub init: Init,
    /// Whether it is learned; else it is a constant that the checkpoint carries.
    pub trainable: bool,
    /// The part of the model that it belongs to.
    pub part: Part,
}

impl Spec {
    /// Elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Which parameter; `V` is its type.
#[derive(Debug, PartialEq, Eq)]
pub struct Id<V> {
    pub(crate) index: usize,
    kind: PhantomData<V>,
}

impl<V> Clone for Id<V> {
    fn clone(&self) -> Id<V> {
        *self
    }
}

impl<V> Copy for Id<V> {}

/// The parameters of a model without their values: layers are built on these.
#[derive(Clone, Debug, Default)]
pub struct Specs {
    /// Of [`Weight`]s.
    pub weights: Vec<Spec>,
    /// Of [`Protected`] tensors.
    pub protected: Vec<Spec>,
    /// The part that parameters are being added to.
    part: Part,
}

impl Specs {
    /// Begins a part: parameters that are added from now on belong to it.
    pub fn begin(&mut self, part: Part) {
        self.part = part;
    }

    /// Adds a weight.
    pub fn weight(&mut self, name: String, shape: &[usize], init: Init) -> Id<Weight> {
        self.weights.push(Spec { name, shape: shape.to_vec(), init, trainable: true, part: self.part });
        Id { index: self.weights.len() - 1, kind: PhantomData }
    }

    /// Adds a weight that is not learned.
    pub fn constant(&mut self, name: String, shape: &[usize], init: Init) -> Id<Weight> {
        let id = self.weight(name, shape, init);
        self.weights[id.index].trainable = false;
        id
    }

    /// Adds a protected tensor.
    pub fn protected(&mut self, name: String, shape: &[usize], init: Init) -> Id<Protected> {
        self.protected.push(Spec { name, shape: shape.to_vec(), init, trainable: true, part: self.part });
        Id { index: self.protected.len() - 1, kind: PhantomData }
    }

    /// Adds a protected tensor that is not learned.
    pub fn protected_constant(&mut self, name: String, shape: &[usize], init: Init) -> Id<Protected> {
        let id = self.protected(name, shape, init);
        self.protected[id.index].trainable = false;
        id
    }

    /// All of them: weights, then protected tensors.
    pub fn all(&self) -> impl Iterator<Item = &Spec> {
        self.weights.iter().chain(&self.protected)
    }

    /// Bytes of all values with weights in `storage`.
    pub fn bytes(&self, storage: Storage) -> usize {
        let sum = |specs: &[Spec]| specs.iter().map(Spec::len).sum::<usize>();
        sum(&self.weights) * storage.bytes() + sum(&self.protected) * size_of::<f32>()
    }
}

impl Index<Id<Weight>> for Specs {
    type Output = Spec;

    fn index(&self, id: Id<Weight>) -> &Spec {
        &self.weights[id.index]
    }
}

impl Index<Id<Protected>> for Specs {
    type Output = Spec;

    fn index(&self, id: Id<Protected>) -> &Spec {
        &self.protected[id.index]
    }
}

/// The parameters of a model.
#[derive(Clone, Debug, Default)]
pub struct Params {
    pub(crate) weights: Vec<Weight>,
    pub(crate) protected: Vec<Protected>,
    /// By weight; empty where no weight has one.
    pub(crate) adapters: Vec<Option<Adapter>>,
}

impl Params {
    /// The ordinary weights, in the order of [`Specs::weights`].
    pub fn weights(&self) -> &[Weight] {
        &self.weights
    }

    /// The ordinary weights, for the optimiser, which works on their values in place; all of them have one type, and stay
    /// as long as they are.
    pub fn weights_mut(&mut self) -> &mut [Weight] {
        &mut self.weights
    }

    /// The protected tensors, in the order of [`Specs::protected`].
    pub fn protected(&self) -> &[Protected] {
        &self.protected
    }

    /// The protected tensors, for the optimiser: see [`Protected::values_mut`].
    pub fn protected_mut(&mut self) -> &mut [Protected] {
        &mut self.protected
    }

    /// The adapters, in the order of [`Specs::weights`]; empty where no weight has one.
    pub fn adapters(&self) -> &[Option<Adapter>] {
        &self.adapters
    }

    /// The adapters, for the optimiser, which works on their values in place.
    pub fn adapters_mut(&mut self) -> &mut [Option<Adapter>] {
        &mut self.adapters
    }

    pub(crate) fn adapter(&self, id: Id<Weight>) -> Option<&Adapter> {
        self.adapters.get(id.index)?.as_ref()
    }

    /// Every ordinary weight in `storage`. Protected tensors and adapters are out of its reach.
    pub fn cast(&mut self, storage: Storage) {
        for weight in &mut self.weights {
            let values = std::mem::replace(weight, Weight::F32(Vec::new()));
            *weight = values.cast(storage);
        }
    }

    /// Bytes of all values.
    pub fn bytes(&self) -> usize {
        let weights: usize = self.weights.iter().map(|w| w.len() * w.storage().bytes()).sum();
        let protected: usize = self.protected.iter().map(|p| 4 * p.0.len()).sum();
        let adapters: usize = self.adapters.iter().flatten().map(|low| 4 * (low.a.len() + low.b.len())).sum();
        weights + protected + adapters
    }
}

impl Index<Id<Weight>> for Params {
    type Output = Weight;

    fn index(&self, id: Id<Weight>) -> &Weight {
        &self.weights[id.index]
    }
}

impl IndexMut<Id<Weight>> for Params {
    fn index_mut(&mut self, id: Id<Weight>) -> &mut Weight {
        &mut self.weights[id.index]
    }
}

impl Index<Id<Protected>> for Params {
    type Output = Protected;

    fn index(&self, id: Id<Protected>) -> &Protected {
        &self.protected[id.index]
    }
}

impl IndexMut<Id<Protected>> for Params {
    fn index_mut(&mut self, id: Id<Protected>) -> &mut Protected {
        &mut self.protected[id.index]
    }
}
