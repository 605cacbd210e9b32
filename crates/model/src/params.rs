//! Parameters and their types.
//!
//! A parameter is a [`Weight`], stored in f32 or bf16, or a [`Protected`] tensor, which is always f32.
//! [`Params::cast`] casts the weights of a model and leaves the protected tensors alone. A cast of a
//! protected tensor does not compile:
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
//! Layers hold the [`Id`]s of their parameters; values, gradients, optimizer state and names are stored in
//! the same order.

use std::marker::PhantomData;
use std::ops::{Index, IndexMut, Range};

use ballast_kernels::{Element, Rounding};
use half::bf16;

pub use crate::grads::{AdapterGrads, Bucket, Grads, ParameterKind, Part};
use crate::precision::{Storage, with_storage};

/// An ordinary parameter.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Weight {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Weight {
    /// Storage type.
    pub fn storage(&self) -> Storage {
        match self {
            Weight::F32(_) => Storage::F32,
            Weight::Bf16(_) => Storage::Bf16,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        with_storage!(Weight, self, |w| w.len())
    }

    /// Returns true if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Casts the values, rounding to nearest even where the new type is narrower.
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

    /// The elements of a range, all without one.
    pub fn into_share(self, range: Option<Range<usize>>) -> Weight {
        match (self, range) {
            (whole, None) => whole,
            (whole, Some(range)) if range == (0..whole.len()) => whole,
            (Weight::F32(values), Some(range)) => Weight::F32(values[range].to_vec()),
            (Weight::Bf16(values), Some(range)) => Weight::Bf16(values[range].to_vec()),
        }
    }

    /// Values in f32.
    pub fn to_f32(&self) -> Vec<f32> {
        match self.clone().cast(Storage::F32) {
            Weight::F32(values) => values,
            Weight::Bf16(_) => unreachable!("it was cast"),
        }
    }
}

/// A parameter protected by the contract: always f32.
#[derive(Clone, Debug, PartialEq)]
pub struct Protected(Vec<f32>);

impl Protected {
    /// Makes a protected tensor of these values.
    pub fn new(values: Vec<f32>) -> Protected {
        Protected(values)
    }

    /// Values.
    pub fn values(&self) -> &[f32] {
        &self.0
    }

    /// Values, for the optimizer, which updates them in place.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }

    /// Rounds the values to a narrower type, in f32 storage, as a framework without the contract would. For
    /// comparison: only [`crate::Model::set_precision`] calls it, for tensors that the policy does not cover.
    pub(crate) fn round_to(&mut self, rounding: Rounding) {
        rounding.round_all(&mut self.0);
    }
}

/// Low-rank adapter of a weight [out, in]: W + scale B A. Always f32.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// [rank, in]
    pub a: Vec<f32>,
    /// [out, rank]
    pub b: Vec<f32>,
    /// Rank: rows of A.
    pub rank: usize,
    /// alpha / rank
    pub scale: f32,
}

/// Initialization of a parameter of a new model.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Init {
    /// Normal, with the configuration's standard deviation.
    Normal,
    /// Normal, with zeros for the padding token.
    Embedding,
    Zeros,
    Ones,
    /// Logarithm of a decay rate drawn from U(0.01, 16).
    ALog,
}

/// Description of a parameter: everything but its values.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// Name without the prefix before `layers.` and `embed_tokens.`; `lm_head.weight` has no prefix.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Initialization.
    pub init: Init,
    /// True if it can be trained; otherwise it is a constant stored in the checkpoint.
    pub trainable: bool,
    /// Part of the model that it belongs to.
    pub part: Part,
}

impl Spec {
    /// Returns true if a [visit](crate::pass::Visit) to `part` reads the parameter: a tied head reads the
    /// embedding's matrix.
    pub fn is_read_by(&self, part: Part, tied: bool) -> bool {
        self.part == part || tied && part == Part::Head && self.name == "embed_tokens.weight"
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns true if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Typed index of a parameter; `V` is [`Weight`] or [`Protected`].
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

/// Descriptions of all parameters of a model; building the layers fills them in.
#[derive(Clone, Debug, Default)]
pub struct Specs {
    /// Weights.
    pub weights: Vec<Spec>,
    /// Protected tensors.
    pub protected: Vec<Spec>,
    /// Part that new parameters belong to.
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

    /// Adds a weight that is never trained.
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

    /// Adds a protected tensor that is never trained.
    pub(crate) fn protected_constant(&mut self, name: String, shape: &[usize], init: Init) -> Id<Protected> {
        let id = self.protected(name, shape, init);
        self.protected[id.index].trainable = false;
        id
    }

    /// All parameters: weights, then protected tensors.
    pub fn all(&self) -> impl Iterator<Item = &Spec> {
        self.weights.iter().chain(&self.protected)
    }

    /// Bytes of all parameters with weights in `storage`.
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

/// Values of all parameters of a model.
#[derive(Clone, Debug, Default)]
pub struct Params {
    pub(crate) weights: Vec<Weight>,
    pub(crate) protected: Vec<Protected>,
    /// Adapters by weight; empty if no weight has one.
    pub(crate) adapters: Vec<Option<Adapter>>,
}

impl Params {
    /// Weights, in the order of [`Specs::weights`].
    pub fn weights(&self) -> &[Weight] {
        &self.weights
    }

    /// Weights, for the optimizer, which updates them in place. All have one type; neither it nor a length
    /// may change.
    pub fn weights_mut(&mut self) -> &mut [Weight] {
        &mut self.weights
    }

    /// Protected tensors, in the order of [`Specs::protected`].
    pub fn protected(&self) -> &[Protected] {
        &self.protected
    }

    /// Protected tensors, for the optimizer: see [`Protected::values_mut`].
    pub fn protected_mut(&mut self) -> &mut [Protected] {
        &mut self.protected
    }

    /// Adapters, in the order of [`Specs::weights`]; empty if no weight has one.
    pub fn adapters(&self) -> &[Option<Adapter>] {
        &self.adapters
    }

    /// Adapters, for the optimizer, which updates them in place.
    pub fn adapters_mut(&mut self) -> &mut [Option<Adapter>] {
        &mut self.adapters
    }

    pub(crate) fn adapter(&self, id: Id<Weight>) -> Option<&Adapter> {
        self.adapters.get(id.index)?.as_ref()
    }

    /// Casts all weights to `storage`; protected tensors and adapters stay as they are.
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
