//! Gradients in flat f32 buckets.
//!
//! A bucket holds the gradients of one [`Part`] of the model and one [`ParameterKind`] of parameter, end to end in the
//! order of [`Specs`]; a tensor is a range of its bucket. Parameters that are not learned take no space.
//! Backward completes the parts from the head to the embedding, and
//! [`Hooks::complete`](crate::pass::Hooks::complete) receives each bucket when it is final.

use std::collections::BTreeMap;
use std::ops::{Index, IndexMut, Range};

use crate::params::{Adapter, Id, Params, Protected, Spec, Specs, Weight};

/// A part of the model, in the order in which the forward runs them; backward completes them in reverse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// The embedding, also where the head is tied to it, and everything that makes the layers' own inputs.
    #[default]
    Embedding,
    /// A layer.
    Layer(usize),
    /// The last norm and the output head.
    Head,
}

impl Part {
    /// All parts of a model with this number of layers, in the order of the forward.
    pub fn all(layers: usize) -> impl DoubleEndedIterator<Item = Part> {
        Part::before_head(layers).chain([Part::Head])
    }

    pub(crate) fn before_head(layers: usize) -> impl DoubleEndedIterator<Item = Part> {
        [Part::Embedding].into_iter().chain((0..layers).map(Part::Layer))
    }
}

/// A kind of parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ParameterKind {
    /// Ordinary weights.
    Weights,
    /// Protected tensors.
    Protected,
    /// A and B of adapters.
    Adapters,
}

/// A bucket whose gradients are final for the batch.
#[derive(Debug)]
pub struct Bucket<'a> {
    /// Index among all buckets of the gradients.
    pub index: usize,
    /// The part of the model.
    pub part: Part,
    /// The kind of parameter.
    pub kind: ParameterKind,
    /// The gradients, end to end. They may be taken away: the next access makes new ones, which are zero.
    pub values: &'a mut Vec<f32>,
}

/// Place of a tensor: which bucket, and where in it. An empty range if the tensor is not learned.
#[derive(Clone, Debug, Default, PartialEq)]
struct Place {
    bucket: usize,
    range: Range<usize>,
}

#[derive(Clone, Debug, PartialEq)]
struct StoredBucket {
    part: Part,
    kind: ParameterKind,
    /// Number of elements.
    len: usize,
    /// Index of the first element of `values`.
    begin: usize,
    /// All elements; or a share of them ([`Grads::set_share`]); or nothing, to be allocated when needed.
    values: Vec<f32>,
}

impl StoredBucket {
    fn is_whole(&self) -> bool {
        self.values.len() == self.len
    }
}

/// f32 gradients of all parameters of a model; empty for those that are not learned.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Grads {
    buckets: Vec<StoredBucket>,
    /// In the order of [`Specs::weights`].
    weights: Vec<Place>,
    /// In the order of [`Specs::protected`].
    protected: Vec<Place>,
    /// A and B in the order of [`Specs::weights`]; empty where no weight has an adapter.
    adapters: Vec<[Place; 2]>,
}

/// Gradients of an [`Adapter`]; empty without one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterGrads<'a> {
    /// [rank, in]
    pub a: &'a [f32],
    /// [out, rank]
    pub b: &'a [f32],
}

/// Gives tensors their places, before the buckets exist.
#[derive(Default)]
struct Layout {
    lengths: BTreeMap<(Part, ParameterKind), usize>,
}

impl Layout {
    /// Adds a tensor; [`Layout::place`] numbers its bucket when all are known.
    fn add(
        &mut self,
        part: Part,
        kind: ParameterKind,
        len: usize,
    ) -> (Option<(Part, ParameterKind)>, Range<usize>) {
        if len == 0 {
            return (None, 0..0);
        }
        let end = self.lengths.entry((part, kind)).or_default();
        *end += len;
        (Some((part, kind)), *end - len..*end)
    }

    fn place(&self, (key, range): (Option<(Part, ParameterKind)>, Range<usize>)) -> Place {
        let bucket = key.map_or(0, |key| self.lengths.range(..key).count());
        Place { bucket, range }
    }

    fn buckets(&self) -> Vec<StoredBucket> {
        let bucket = |(&(part, kind), &len): (&(Part, ParameterKind), &usize)| StoredBucket {
            part,
            kind,
            len,
            begin: 0,
            values: Vec::new(),
        };
        self.lengths.iter().map(bucket).collect()
    }
}

impl Grads {
    /// Zeros for every parameter that is learned and that `wanted` does not exclude, and for the adapters of
    /// `params`.
    pub fn new(specs: &Specs, params: &Params, wanted: impl Fn(&Spec) -> bool) -> Grads {
        let mut grads = Grads::outline(specs, params, wanted);
        grads.buckets.iter_mut().for_each(allocate);
        grads
    }

    /// [`Grads::new`] without memory: each bucket is allocated when it is needed. `params` may have adapters
    /// without values.
    pub fn outline(specs: &Specs, params: &Params, wanted: impl Fn(&Spec) -> bool) -> Grads {
        let mut layout = Layout::default();
        let len = |spec: &Spec| if spec.trainable && wanted(spec) { spec.len() } else { 0 };
        let mut all = |specs: &[Spec], kind| -> Vec<_> {
            specs.iter().map(|spec| layout.add(spec.part, kind, len(spec))).collect()
        };
        let weights = all(&specs.weights, ParameterKind::Weights);
        let protected = all(&specs.protected, ParameterKind::Protected);
        let adapters: Vec<_> = specs
            .weights
            .iter()
            .zip(params.adapters())
            .map(|(spec, adapter)| {
                let len = |low: &Adapter| [low.rank * spec.shape[1], spec.shape[0] * low.rank];
                let lens = adapter.as_ref().map_or([0, 0], len);
                lens.map(|len| layout.add(spec.part, ParameterKind::Adapters, len))
            })
            .collect();
        Grads {
            weights: weights.into_iter().map(|place| layout.place(place)).collect(),
            protected: protected.into_iter().map(|place| layout.place(place)).collect(),
            adapters: adapters.into_iter().map(|pair| pair.map(|place| layout.place(place))).collect(),
            buckets: layout.buckets(),
        }
    }

    /// Sets all gradients to zero. Buckets of which a share is held are allocated whole when needed.
    pub fn clear(&mut self) {
        for bucket in &mut self.buckets {
            match bucket.is_whole() {
                true => bucket.values.fill(0.0),
                false => (bucket.begin, bucket.values) = (0, Vec::new()),
            }
        }
    }

    /// Frees the memory of all buckets: they are allocated again, with zeros, when they are needed.
    pub fn release(&mut self) {
        self.buckets.iter_mut().for_each(|bucket| (bucket.begin, bucket.values) = (0, Vec::new()));
    }

    /// Replaces the content of a bucket by a share of it: the elements from `begin` on.
    pub fn set_share(&mut self, bucket: usize, begin: usize, values: Vec<f32>) {
        let bucket = &mut self.buckets[bucket];
        (bucket.begin, bucket.values) = (begin, values);
    }

    /// Part, kind and number of elements of every bucket.
    pub fn layout(&self) -> impl Iterator<Item = (Part, ParameterKind, usize)> {
        self.buckets.iter().map(|bucket| (bucket.part, bucket.kind, bucket.len))
    }

    /// Bucket and range of the gradient of a weight, by its place in [`Specs::weights`]; `None` if it is not
    /// learned.
    pub fn weight_place(&self, index: usize) -> Option<(usize, Range<usize>)> {
        let Place { bucket, range } = self.weights[index].clone();
        (!range.is_empty()).then_some((bucket, range))
    }

    /// Bytes of all gradients.
    pub fn bytes(&self) -> usize {
        self.buckets.iter().map(|bucket| size_of_val(&bucket.values[..])).sum()
    }

    /// Gradient of a weight, by its place in [`Specs::weights`]; of a bucket of which a share is held, the
    /// elements in the share.
    pub fn weight(&self, index: usize) -> &[f32] {
        self.at(&self.weights[index])
    }

    /// Gradient of a protected tensor, by its place in [`Specs::protected`].
    pub fn protected(&self, index: usize) -> &[f32] {
        self.at(&self.protected[index])
    }

    /// Gradient of a weight, to be changed.
    pub fn weight_mut(&mut self, index: usize) -> &mut [f32] {
        self.at_mut(self.weights[index].clone())
    }

    /// Gradient of a protected tensor, to be changed.
    pub fn protected_mut(&mut self, index: usize) -> &mut [f32] {
        self.at_mut(self.protected[index].clone())
    }

    /// Gradients of a weight's adapter, by the weight's place in [`Specs::weights`]; empty without one.
    pub fn adapter(&self, index: usize) -> AdapterGrads<'_> {
        match self.adapters.get(index) {
            Some([a, b]) => AdapterGrads { a: self.at(a), b: self.at(b) },
            None => AdapterGrads { a: &[], b: &[] },
        }
    }

    /// Gradients of all parameters, in the order of [`Specs::all`].
    pub fn all(&self) -> impl Iterator<Item = &[f32]> {
        self.weights.iter().chain(&self.protected).map(|place| self.at(place))
    }

    /// Gradients of all adapters, in the order of [`Specs::weights`]; none where no weight has an adapter.
    pub fn adapters(&self) -> impl Iterator<Item = AdapterGrads<'_>> {
        (0..self.adapters.len()).map(|index| self.adapter(index))
    }

    /// All buckets, in the order of the forward.
    pub fn buckets(&mut self) -> impl Iterator<Item = Bucket<'_>> {
        self.buckets.iter_mut().enumerate().map(|(index, bucket)| Bucket {
            index,
            part: bucket.part,
            kind: bucket.kind,
            values: &mut bucket.values,
        })
    }

    /// Hands the buckets of a part on: its gradients are final for this batch.
    pub fn finish(&mut self, part: Part, finished: &mut dyn FnMut(Bucket<'_>)) {
        // A part without a gradient in this batch has zeros.
        self.buckets.iter_mut().filter(|bucket| bucket.part == part).for_each(allocate);
        self.buckets().filter(|bucket| bucket.part == part).for_each(finished);
    }

    /// Gradient of a parameter, unless it is not learned.
    pub(crate) fn of<V>(&mut self, id: Id<V>) -> Option<&mut [f32]>
    where
        Grads: IndexMut<Id<V>, Output = [f32]>,
    {
        let gradient = &mut self[id];
        if gradient.is_empty() { None } else { Some(gradient) }
    }

    /// Gradients of two weights of one part at once; empty for those that are not learned.
    pub(crate) fn of_two(&mut self, first: Id<Weight>, second: Id<Weight>) -> [&mut [f32]; 2] {
        let (first, second) = (self.weights[first.index].clone(), self.weights[second.index].clone());
        self.two(first, second)
    }

    /// Gradients of A and B of a weight's adapter, if it has one.
    pub(crate) fn of_adapter(&mut self, id: Id<Weight>) -> Option<[&mut [f32]; 2]> {
        let [a, b] = self.adapters.get(id.index)?.clone();
        if a.range.is_empty() { None } else { Some(self.two(a, b)) }
    }

    fn two(&mut self, first: Place, second: Place) -> [&mut [f32]; 2] {
        if first.range.is_empty() || second.range.is_empty() {
            // One bucket at most is needed.
            let bucket = if first.range.is_empty() { second.bucket } else { first.bucket };
            let Some(bucket) = self.buckets.get_mut(bucket) else { return [&mut [], &mut []] };
            allocate(bucket);
            let values = &mut bucket.values[..];
            return if first.range.is_empty() {
                [&mut [], &mut values[second.range]]
            } else {
                [&mut values[first.range], &mut []]
            };
        }
        assert_eq!(first.bucket, second.bucket, "gradients of one part");
        let bucket = &mut self.buckets[first.bucket];
        allocate(bucket);
        bucket.values.get_disjoint_mut([first.range, second.range]).expect("tensors have places of their own")
    }

    /// The elements of a tensor that are held.
    fn at(&self, place: &Place) -> &[f32] {
        let Some(StoredBucket { begin, values, .. }) = self.buckets.get(place.bucket) else { return &[] };
        let held = |at: usize| at.clamp(*begin, begin + values.len()) - begin;
        &values[held(place.range.start)..held(place.range.end)]
    }

    fn at_mut(&mut self, place: Place) -> &mut [f32] {
        match self.buckets.get_mut(place.bucket) {
            Some(bucket) if !place.range.is_empty() => {
                allocate(bucket);
                &mut bucket.values[place.range]
            }
            _ => &mut [],
        }
    }
}

/// Makes a bucket whole, with zeros, unless it is.
fn allocate(bucket: &mut StoredBucket) {
    if !bucket.is_whole() {
        (bucket.begin, bucket.values) = (0, vec![0.0; bucket.len]);
    }
}

impl Index<Id<Weight>> for Grads {
    type Output = [f32];

    fn index(&self, id: Id<Weight>) -> &[f32] {
        self.weight(id.index)
    }
}

impl IndexMut<Id<Weight>> for Grads {
    fn index_mut(&mut self, id: Id<Weight>) -> &mut [f32] {
        self.weight_mut(id.index)
    }
}

impl Index<Id<Protected>> for Grads {
    type Output = [f32];

    fn index(&self, id: Id<Protected>) -> &[f32] {
        self.protected(id.index)
    }
}

impl IndexMut<Id<Protected>> for Grads {
    fn index_mut(&mut self, id: Id<Protected>) -> &mut [f32] {
        self.protected_mut(id.index)
    }
}
