//! The memory plan of a step against what the step allocates.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeSet;

use ballast_model::config::{Layer, Mixer};
use ballast_model::params::Part;
use ballast_model::{
    Batch, IndexerLoss, IndexerStage, LayerwiseRun, LossOptions, Model, Plan, Recompute, Step,
};

use crate::common::{MODELS, ids, load};

/// The allocator of the system, which counts by thread.
struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    LIVE.set(LIVE.get() + bytes);
    PEAK.set(PEAK.get().max(LIVE.get()));
}

// SAFETY: every method passes its arguments on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(block, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Three sequences, long enough that a tensor is larger than what holds it.
fn long_batch(name: &str) -> Batch {
    Batch::packed(ids(name).repeat(12), vec![0, 1, 203, 696]).unwrap()
}

/// Losses that change what is saved.
fn losses(model: &Model) -> Vec<LossOptions> {
    let with = |indexer| LossOptions { indexer, ..LossOptions::default() };
    let stages =
        [IndexerStage::Sparse, IndexerStage::Dense].map(|stage| Some(IndexerLoss { scale: 1.0, stage }));
    let some = stages.into_iter().filter(|_| model.config.has_indexer());
    some.chain([None]).map(with).collect()
}

/// Index of the plan's sum for a mixer, and the kind of mixer in words.
fn kind(layer: &Layer) -> (usize, String) {
    match &layer.mixer {
        Mixer::Linear(_) => (0, "gated delta".into()),
        Mixer::Softmax(shape) => {
            let reach = if shape.window.is_some() { "sliding" } else { "global" };
            let keys = if shape.shared_from.is_some() { "shared" } else { "its" };
            (1, format!("{reach} attention, gate {}, {keys} keys", shape.gated))
        }
        Mixer::Latent(_) => (2, "latent attention with indexer".into()),
    }
}

/// Every step to plan: model, precision, recomputation and losses; on one thread, so that it has all memory.
fn steps(mut check: impl FnMut(&str, &Model, &Batch, Step<'_>) + Send) {
    let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    alone.install(|| {
        for (name, preset) in MODELS.iter().flat_map(|name| ["f32", "bf16"].map(|preset| (name, preset))) {
            let (model, batch) = (load(name, preset), long_batch(name));
            // Buffers that kernels keep for the thread are made by the first step.
            let first = LossOptions::default();
            model.forward_backward(&mut model.grads(), &batch, &first, Recompute::None, None).unwrap();
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
                for loss in losses(&model) {
                    let what = format!("{name} {preset} {recompute:?} {:?}", loss.indexer);
                    check(&what, &model, &batch, Step { loss, ..Step::new(&batch.cu_seqlens, recompute) });
                }
            }
        }
    });
}

#[test]
fn every_kind_of_mixer_saves_the_planned_bytes() {
    // What holds the tensors of a layer: vectors and boxes.
    const HOLDERS: usize = 2048;
    let mut kinds = BTreeSet::new();
    steps(|what, model, batch, step| {
        let plan = Plan::new(&model.config, model.precision(), &step).unwrap();
        let planned = [plan.linear_layers, plan.softmax_layers, plan.latent_layers];
        let (mut saved, mut holders) = ([0; 3], [0; 3]);
        let mut run = LayerwiseRun::new(model, batch, Some(step.recompute), step.loss).unwrap();
        run.forward(model, Part::Embedding, None).unwrap();
        for (index, layer) in model.config.layers.iter().enumerate() {
            let before = LIVE.get();
            run.forward(model, Part::Layer(index), None).unwrap();
            let (sum, kind) = kind(layer);
            saved[sum] += (LIVE.get() - before) as usize;
            holders[sum] += HOLDERS;
            kinds.insert(kind);
        }
        let is_planned = |i: usize| (planned[i]..=planned[i] + holders[i]).contains(&saved[i]);
        assert!((0..3).all(is_planned), "{what}: {planned:?} planned, {saved:?} saved");
    });
    let kinds: Vec<&str> = kinds.iter().map(String::as_str).collect();
    assert_eq!(
        kinds,
        [
            "gated delta",
            "global attention, gate false, its keys",
            "global attention, gate false, shared keys",
            "global attention, gate true, its keys",
            "latent attention with indexer",
            "sliding attention, gate false, its keys",
            "sliding attention, gate false, shared keys",
        ]
    );
}

#[test]
fn the_peak_of_a_step_is_near_the_plan() {
    steps(|what, model, batch, step| {
        let plan = Plan::new(&model.config, model.precision(), &step).unwrap();
        let planned = plan.kept() + plan.transient + plan.scratch;
        let mut grads = model.grads();
        let before = LIVE.get();
        PEAK.set(before);
        model.forward_backward(&mut grads, batch, &step.loss, step.recompute, None).unwrap();
        let ratio = (PEAK.get() - before) as f64 / planned as f64;
        assert!((0.95..1.15).contains(&ratio), "{what}: {ratio:.3} of {planned} planned bytes");
    });
}
