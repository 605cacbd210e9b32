//! Ablation of each property of latent attention; decoding; saved bytes; the indexer's gradients.

use std::path::{Path, PathBuf};

use ballast_checkpoint::tensor_file::TensorFile;
use ballast_kernels::Scratch;
use ballast_kernels::rotary::{Frequencies, Layout};
use half::bf16;

use super::*;
use crate::batch::{Batch, Sequences};
use crate::config::{Mixer, Router};
use crate::model::{IndexerLoss, LossOptions, Model, Recompute};
use crate::params::{Params, Protected, Weight};
use crate::run::{Parameters, Tally};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
}

fn load(name: &str) -> (Model, Batch, Vec<f32>) {
    let golden = TensorFile::open(&folder(name).join("golden.safetensors")).unwrap();
    let ids = golden.integers("input_ids").unwrap();
    let batch = Batch::rows(ids.values.iter().map(|id| *id as u32).collect(), ids.shape[1]).unwrap();
    let mut model = Model::load(&folder(name), |_| Ok(Precision::f32())).unwrap();
    model.set_ties(ballast_kernels::indexer::Ties::Torch);
    (model, batch, golden.f32("logits").unwrap().values)
}

/// RMS of the difference, in units of b's.
fn ratio(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let sum =
        |f: &dyn Fn(f64, f64) -> f64| a.iter().zip(b).map(|(a, b)| f(*a as f64, *b as f64)).sum::<f64>();
    (sum(&|a, b| (a - b) * (a - b)) / sum(&|_, b| b * b)).sqrt()
}

/// Relative distance of the logits from transformers' after a change; without one they must agree.
fn distance(name: &str, change: impl Fn(&mut Shape, Option<&mut Router>)) -> f64 {
    let (model, batch, golden) = load(name);
    assert!(ratio(&model.logits(&batch, None).unwrap(), &golden) < 1e-5);
    let mut config = model.config.clone();
    for layer in &mut config.layers {
        let Mixer::Latent(shape) = &mut layer.mixer else { panic!("{name} has latent attention") };
        change(shape, layer.experts.as_mut().map(|experts| &mut experts.router));
    }
    let mut other = Model::build(config, Precision::f32()).unwrap();
    other.params = model.params.clone();
    let off = ratio(&other.logits(&batch, None).unwrap(), &golden);
    println!("{name}: {off:.2e}");
    off
}

#[test]
fn without_the_selection_the_logits_are_others() {
    let off = distance("deepseek_v32", |shape, _| shape.index_topk = 64);
    assert!(off > 0.1, "{off}");
}

#[test]
fn the_attention_rotates_interleaved_pairs_and_the_indexer_halves() {
    let attention = distance("deepseek_v32", |shape, _| shape.rope.layout = Layout::HalfSplit);
    let indexer = distance("deepseek_v32", |shape, _| shape.indexer_rope.layout = Layout::Interleaved);
    assert!(attention > 0.05 && indexer > 0.05, "{attention} {indexer}");
}

#[test]
fn yarn_changes_the_frequencies_and_the_softmax_scale() {
    let name = "deepseek_v32_yarn";
    let scale =
        distance(name, |shape, _| shape.scale = ((shape.nope_dim + shape.rope_dim) as f32).powf(-0.5));
    let plain = Frequencies::Plain { dims: 8 };
    let frequencies = distance(name, |shape, _| {
        (shape.rope.frequencies, shape.indexer_rope.frequencies) = (plain, plain);
    });
    assert!(scale > 1e-3 && frequencies > 0.01, "{scale} {frequencies}");
}

#[test]
fn experts_are_chosen_in_groups() {
    let off = distance("deepseek_v32", |_, router| {
        if let Some(Router::SigmoidGroups { groups, kept_groups, .. }) = router {
            (*groups, *kept_groups) = (1, 1);
        }
    });
    assert!(off > 0.05, "{off}");
}

/// Numbers between -1 and 1.
struct Values(u64);

impl Values {
    fn take(&mut self, n: usize) -> Vec<f32> {
        let mut next = || {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((self.0 >> 33) as f64 / (1u64 << 31) as f64 * 2.0 - 1.0) as f32
        };
        (0..n).map(|_| next()).collect()
    }
}

/// A layer by itself, with the two rotations of its model.
struct Alone {
    model: Model,
    layer: LatentAttention,
    specs: Specs,
    params: Params,
}

impl Alone {
    fn new() -> Alone {
        let (model, _, _) = load("deepseek_v32");
        let (mut specs, mut values) = (Specs::default(), Values(5));
        let Mixer::Latent(shape) = &model.config.layers[0].mixer else { panic!("latent attention") };
        let tables = Tables { attention: 0, indexer: 1 };
        let layer = LatentAttention::new(&mut specs, "self_attn", 0, &model.config, shape, tables);
        let mut random = |n: usize| values.take(n).iter().map(|x| 0.3 * x).collect::<Vec<f32>>();
        let params = Params {
            weights: specs.weights.iter().map(|spec| Weight::F32(random(spec.len()))).collect(),
            protected: specs.protected.iter().map(|spec| Protected::new(random(spec.len()))).collect(),
            adapters: Vec::new(),
        };
        Alone { model, layer, specs, params }
    }

    /// Tokens at these positions.
    fn run<R>(
        &self,
        cu_seqlens: Vec<usize>,
        positions: Vec<u32>,
        stage: Option<IndexerStage>,
        work: impl FnOnce(&LatentAttention, &Run<'_>) -> R,
    ) -> R {
        let tokens = positions.len();
        let batch =
            Batch { ids: vec![0; tokens], targets: vec![-100; tokens], cu_seqlens, positions, part: None };
        let (tables, scratch) = (self.model.tables(&batch.positions), Scratch::new(0));
        let indexer = stage.map(|stage| IndexerLoss { scale: 1.0, stage });
        let options = LossOptions { indexer, ..LossOptions::default() };
        let run = Run {
            config: &self.model.config,
            parameters: Parameters::new(&self.specs, &self.params),
            precision: &Precision::f32(),
            batch: &batch,
            context: None,
            tables: &tables,
            scratch: &scratch,
            ties: Default::default(),
            probe: None,
            tally: &Tally::new(&self.model.config, &options).unwrap(),
        };
        work(&self.layer, &run)
    }
}

#[test]
fn chunks_and_single_tokens_give_what_the_whole_sequence_gives() {
    let alone = Alone::new();
    let hidden = alone.model.config.hidden;
    let lengths = [40, 28];
    let x = [Values(1).take(40 * hidden), Values(2).take(28 * hidden)];
    let positions: Vec<u32> = (0..40).chain(0..28).collect();
    let whole = alone.run(vec![0, 40, 68], positions, None, |layer, run| {
        layer.forward(run, &x.concat(), None, Keep::Nothing).unwrap().0
    });
    let mut caches = vec![Cache::default(); 2];
    let mut done = [0, 0];
    let mut ys = [Vec::new(), Vec::new()];
    for new in [[13, 7], [7, 1]].into_iter().chain([[1, 1]; 20]) {
        let rows = [0, 1].map(|i| done[i]..done[i] + new[i]);
        let positions = rows.iter().flat_map(|rows| rows.clone().map(|t| t as u32)).collect();
        let part: Vec<f32> = rows
            .iter()
            .zip(&x)
            .flat_map(|(rows, x)| x[rows.start * hidden..rows.end * hidden].to_vec())
            .collect();
        let y = alone.run(vec![0, new[0], new[0] + new[1]], positions, None, |layer, run| {
            layer.forward(run, &part, Some(&mut caches), Keep::Nothing).unwrap().0
        });
        ys[0].extend_from_slice(&y[..new[0] * hidden]);
        ys[1].extend_from_slice(&y[new[0] * hidden..]);
        done = [done[0] + new[0], done[1] + new[1]];
    }
    assert_eq!(done, lengths);
    let got = ys.concat();
    let largest = got.iter().zip(&whole).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(largest < 1e-4 && ratio(&got, &whole) < 1e-5, "{largest:e}");
    // 4 heads of 24 and 16, and an indexer key of 16, in f32
    assert_eq!(caches.iter().map(Cache::bytes).sum::<usize>(), 68 * (4 * (24 + 16) + 16) * 4);
}

#[test]
fn saved_tensors_have_the_planned_bytes() {
    let alone = Alone::new();
    let hidden = alone.model.config.hidden;
    let stages = [None, Some(IndexerStage::Dense), Some(IndexerStage::Sparse)];
    for (ends, stage) in
        [vec![0, 30], vec![0, 8, 13]].iter().flat_map(|ends| stages.map(|stage| (ends, stage)))
    {
        let tokens = ends[ends.len() - 1];
        let positions = ends.windows(2).flat_map(|ends| 0..(ends[1] - ends[0]) as u32).collect();
        alone.run(ends.clone(), positions, stage, |layer, run| {
            for keep in [Keep::Nothing, Keep::Selective, Keep::Everything] {
                let x = Values(3).take(tokens * hidden);
                let (_, saved) = layer.forward(run, &x, None, keep).unwrap();
                let announced = layer.saved_bytes::<f32>(Sequences::of(ends), keep, run.precision, stage);
                assert_eq!(saved.bytes(), announced, "{ends:?} {keep:?} {stage:?}");
                let x: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
                let (_, saved) = layer.forward(run, &x, None, keep).unwrap();
                let announced = layer.saved_bytes::<bf16>(Sequences::of(ends), keep, run.precision, stage);
                assert_eq!(saved.bytes(), announced, "bf16 {ends:?} {keep:?} {stage:?}");
            }
        });
    }
}

/// A parameter of the model by its place: weights, then protected tensors.
fn parameter(model: &mut Model, at: usize) -> &mut [f32] {
    let weights = model.params.weights.len();
    match at.checked_sub(weights) {
        Some(at) => model.params.protected[at].values_mut(),
        None => match &mut model.params.weights[at] {
            Weight::F32(values) => values,
            Weight::Bf16(_) => panic!("the model is f32"),
        },
    }
}

#[test]
fn the_gradients_of_the_indexer_are_the_slopes_of_its_loss() {
    let (mut model, batch, _) = load("deepseek_v32");
    for (stage, step) in [(IndexerStage::Dense, 4e-3), (IndexerStage::Sparse, 1e-3)] {
        let options =
            LossOptions { indexer: Some(IndexerLoss { scale: 1.0, stage }), ..LossOptions::default() };
        let mut grads = model.grads();
        model.forward_backward(&mut grads, &batch, &options, Recompute::None, None).unwrap();
        let all: Vec<Vec<f32>> = grads.all().map(<[f32]>::to_vec).collect();
        let names: Vec<String> = model.specs.all().map(|spec| spec.name.clone()).collect();
        let mut compared = 0;
        for (at, name) in names.iter().enumerate().filter(|(_, name)| name.contains(".indexer.")) {
            let largest =
                (0..all[at].len()).max_by(|a, b| all[at][*a].abs().total_cmp(&all[at][*b].abs())).unwrap();
            let mut loss = |by: f32| {
                parameter(&mut model, at)[largest] += by;
                let unused = &mut crate::params::Grads::new(&model.specs, &model.params, |_| false);
                let loss =
                    model.forward_backward(unused, &batch, &options, Recompute::None, None).unwrap().indexer;
                parameter(&mut model, at)[largest] -= by;
                loss
            };
            let slope = (loss(step) - loss(-step)) / (2.0 * step as f64);
            let gradient = all[at][largest] as f64;
            assert!(
                (slope - gradient).abs() < 0.02 * gradient.abs() + 1e-4,
                "{stage:?} {name}: {slope} {gradient}"
            );
            compared += 1;
        }
        assert_eq!(compared, 3 * 5, "tensors of the indexers");
    }
}
