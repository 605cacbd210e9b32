//! Context parallelism: a batch divided over ranks, against the same batch on one rank.

use std::collections::BTreeMap;

use ballast_cluster::{Group, Kind, threads};
use ballast_model::params::Weight;
use ballast_model::pass::{Direction, Visit};
use ballast_model::{
    Batch, IndexerLoss, IndexerStage, LayerwiseRun, LossOptions, Model, Plan, Recompute, Step, StepLoss,
};

use crate::common::{MODELS, ids, load};

const RECOMPUTE: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];

type Named = BTreeMap<String, Vec<f32>>;

/// Results of one rank.
struct Outcome {
    logits: Vec<f32>,
    loss: StepLoss,
    grads: Named,
}

fn outcome(model: &Model, batch: &Batch, options: &LossOptions, recompute: Recompute) -> Outcome {
    let logits = model.logits(batch, None).unwrap();
    let mut grads = model.grads();
    let loss = model.forward_backward(&mut grads, batch, options, recompute, None).unwrap();
    let grads = model.named_grads(&grads, None).unwrap();
    Outcome { logits, loss, grads: grads.into_iter().map(|tensor| (tensor.name, tensor.values)).collect() }
}

/// Results of all ranks together: logits one after another, losses and gradients summed.
fn join(ranks: Vec<&Outcome>) -> (Vec<f32>, [f64; 4], BTreeMap<String, Vec<f64>>) {
    let logits = ranks.iter().flat_map(|rank| rank.logits.iter().copied()).collect();
    let mut losses = [0.0; 4];
    let mut grads: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for rank in ranks {
        let StepLoss { language, indexer, balance } = rank.loss;
        for (sum, loss) in losses.iter_mut().zip([language.sum, language.tokens as f64, indexer, balance]) {
            *sum += loss;
        }
        for (name, values) in &rank.grads {
            let sum = grads.entry(name.clone()).or_insert_with(|| vec![0.0; values.len()]);
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += *value as f64);
        }
    }
    (logits, losses, grads)
}

/// |a - b| / |b|; 0 if both are zero.
fn relative(a: impl Iterator<Item = f64>, b: impl Iterator<Item = f64>) -> f64 {
    let (mut difference, mut size) = (0.0, 0.0);
    for (a, b) in a.zip(b) {
        difference += (a - b) * (a - b);
        size += b * b;
    }
    if difference == 0.0 { 0.0 } else { (difference / size).sqrt() }
}

/// Errors of one tensor in several batches.
#[derive(Clone, Copy, Default)]
struct Errors {
    worst: f64,
    compared: usize,
    /// Comparisons with an error above 1e-5, for which the model amplifies rounding as much.
    amplified: usize,
}

/// Largest errors of several batches.
#[derive(Default)]
struct Worst {
    logits: f64,
    loss: f64,
    /// By tensor.
    grads: BTreeMap<String, Errors>,
}

/// Largest relative error of a gradient, unless the model amplifies rounding.
const LIMIT: f64 = 1e-5;

/// [`LIMIT`], or ten times that for what depends on dg, whose terms nearly cancel.
fn limit(tensor: &str) -> f64 {
    let decay = ["A_log", "dt_bias", "in_proj_a.weight"].iter().any(|name| tensor.ends_with(name));
    if decay { 10.0 * LIMIT } else { LIMIT }
}

impl Worst {
    /// Compares the ranks with one. A gradient may be off by more than [`limit`] only where it moves by a
    /// tenth as much if every weight is rounded differently: `moved` is the result with such weights.
    fn compare(&mut self, ranks: Vec<&Outcome>, alone: &Outcome, moved: Option<&[Outcome]>, what: &str) {
        let (logits, losses, grads) = join(ranks);
        assert_eq!(logits.len(), alone.logits.len(), "{what}");
        let wide = |x: &[f32]| x.iter().map(|x| *x as f64).collect::<Vec<f64>>();
        let off = relative(wide(&logits).into_iter(), wide(&alone.logits).into_iter());
        self.logits = self.logits.max(off);
        let StepLoss { language, indexer, balance } = alone.loss;
        assert_eq!(losses[1], language.tokens as f64, "{what}: tokens");
        for (sum, loss) in [(losses[0], language.sum), (losses[2], indexer), (losses[3], balance)] {
            self.loss = self.loss.max((sum - loss).abs() / (loss.abs() + 1e-30));
        }
        assert_eq!(grads.len(), alone.grads.len(), "{what}: tensors");
        for (name, expected) in &alone.grads {
            let got = &grads[name];
            assert_eq!(got.len(), expected.len(), "{what}: {name}");
            let off = relative(got.iter().copied(), expected.iter().map(|x| *x as f64));
            let errors = self.grads.entry(name.clone()).or_default();
            errors.compared += 1;
            let by = |moved: &Outcome| {
                relative(wide(&moved.grads[name]).into_iter(), expected.iter().map(|x| *x as f64))
            };
            let floor = moved.unwrap_or_default().iter().map(by).fold(0.0, f64::max);
            // A gradient that is zero but for rounding has no size to compare with.
            if floor < 0.01 {
                errors.worst = errors.worst.max(off);
            }
            if moved.is_some() && off > limit(name) {
                errors.amplified += 1;
                assert!(off < 10.0 * floor, "{what}: {name} is off by {off:e}, and moves by {floor:e}");
            }
        }
    }

    fn worst_gradient(&self) -> (f64, &str) {
        let by_error = |a: &(f64, &str), b: &(f64, &str)| a.0.total_cmp(&b.0);
        self.grads.iter().map(|(name, errors)| (errors.worst, &name[..])).max_by(by_error).unwrap()
    }

    /// Asserts that every tensor was compared `compared` times and that outputs are those of one rank.
    fn check(&self, compared: usize, what: &str) {
        self.print(what);
        assert!(self.logits < 2e-5 && self.loss < 1e-6, "{what}: {:e} {:e}", self.logits, self.loss);
        assert!(self.grads.values().all(|errors| errors.compared == compared), "{what}");
    }

    fn print(&self, what: &str) {
        let (off, name) = self.worst_gradient();
        let compared: usize = self.grads.values().map(|errors| errors.compared).sum();
        let amplified: usize = self.grads.values().map(|errors| errors.amplified).sum();
        println!(
            "{what}: logits {:.1e}, loss {:.1e}, gradients {off:.1e} ({name}), {compared} compared, {amplified} of them \
             amplified",
            self.logits, self.loss
        );
    }
}

/// Results of every rank and batch: the ranks are threads with a model of their own.
fn divided<R: Send>(
    name: &str,
    preset: &str,
    of: usize,
    work: impl Fn(&Model, &Group) -> R + Sync,
) -> Vec<R> {
    threads::run(of, |group| {
        let mut model = load(name, preset);
        model.set_context(Some(group.clone()));
        work(&model, &group)
    })
}

/// A model whose weights are rounded differently: each is moved by half a unit in the last place, or not.
fn moved(name: &str, seed: u64) -> Model {
    let mut model = load(name, "f32");
    let mut state = seed;
    for weight in model.params.weights_mut() {
        let Weight::F32(values) = weight else { panic!("the model is f32") };
        for value in values {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            *value *= 1.0 + if state >> 63 == 0 { f32::EPSILON } else { 0.0 };
        }
    }
    model
}

/// Sequence boundaries of 58 tokens around all boundaries of the ranks.
fn layouts(of: usize) -> Vec<Vec<usize>> {
    let mut all = vec![vec![0, 58], vec![0, 5, 50, 58], vec![0, 3, 3, 4, 58], (0..=58).collect()];
    for boundary in (1..of).map(|rank| rank * 58 / of) {
        for cut in [boundary - 1, boundary, boundary + 1] {
            all.push(vec![0, cut, 58]);
            all.push(vec![0, cut - 7, cut, cut, 58]);
        }
        let around = [boundary - 2, boundary - 1, boundary, boundary + 1, boundary + 2];
        all.push([&[0][..], &around, &[58]].concat());
    }
    all
}

fn check(name: &str, options: &LossOptions, batches: &[Batch], of: usize, worst: &mut Worst) {
    let model = load(name, "f32");
    let ranks = divided(name, "f32", of, |model, group| {
        let part = |batch: &Batch| batch.part(group.rank(), of).unwrap();
        batches
            .iter()
            .map(|batch| outcome(model, &part(batch), options, Recompute::None))
            .collect::<Vec<Outcome>>()
    });
    let others = [moved(name, 1), moved(name, 2)];
    for (number, batch) in batches.iter().enumerate() {
        let alone = outcome(&model, batch, options, Recompute::None);
        let moved = others.each_ref().map(|model| outcome(model, batch, options, Recompute::None));
        let what = format!("{name} on {of} ranks, sequences {:?}", batch.cu_seqlens);
        worst.compare(ranks.iter().map(|rank| &rank[number]).collect(), &alone, Some(&moved), &what);
    }
}

fn check_family(name: &str) {
    let mut worst = Worst::default();
    let mut compared = 0;
    for of in [2, 3, 4] {
        let pack = |ends: Vec<usize>| Batch::packed(ids(name), ends).unwrap();
        let batches: Vec<Batch> = layouts(of).into_iter().map(pack).collect();
        compared += batches.len();
        check(name, &LossOptions::default(), &batches, of, &mut worst);
    }
    worst.check(compared, name);
}

macro_rules! families {
    ($($name:ident,)*) => {
        $(#[test]
        fn $name() {
            check_family(stringify!($name));
        })*

        #[test]
        fn all_families_are_here() {
            assert_eq!([$(stringify!($name)),*], MODELS);
        }
    };
}

families! {
    qwen3_next,
    qwen3_5,
    qwen3_5_moe,
    gemma2,
    gemma3,
    gemma4_dense,
    gemma4_moe,
    gemma4_ple,
    deepseek_v32,
}

#[test]
fn parts_shorter_than_the_convolution_and_the_window() {
    for name in MODELS {
        let (mut worst, mut compared) = (Worst::default(), 0);
        for (tokens, of) in [(4, 4), (7, 4), (5, 3), (9, 8), (12, 6)] {
            let pack = |ends: Vec<usize>| Batch::packed(ids(name)[..tokens].to_vec(), ends).unwrap();
            let mut batches: Vec<Batch> = (1..tokens).map(|cut| pack(vec![0, cut, tokens])).collect();
            batches.push(pack(vec![0, tokens]));
            compared += batches.len();
            check(name, &LossOptions::default(), &batches, of, &mut worst);
        }
        worst.check(compared, name);
    }
}

#[test]
fn a_boundary_of_documents_anywhere() {
    for name in ["qwen3_5", "gemma3", "deepseek_v32"] {
        let pack = |cut: usize| Batch::packed(ids(name), vec![0, cut, 58]).unwrap();
        let batches: Vec<Batch> = (1..58).map(pack).collect();
        let mut worst = Worst::default();
        check(name, &LossOptions::default(), &batches, 3, &mut worst);
        worst.check(batches.len(), name);
    }
}

#[test]
fn the_indexers_loss_is_a_mean_over_all_ranks() {
    for stage in [IndexerStage::Dense, IndexerStage::Sparse] {
        let indexer = Some(IndexerLoss { scale: 0.5, stage });
        let options = LossOptions { indexer, ..LossOptions::default() };
        let (mut worst, mut compared) = (Worst::default(), 0);
        for of in [2, 3, 4] {
            let pack = |ends: Vec<usize>| Batch::packed(ids("deepseek_v32"), ends).unwrap();
            let batches: Vec<Batch> = layouts(of).into_iter().map(pack).collect();
            compared += batches.len();
            check("deepseek_v32", &options, &batches, of, &mut worst);
        }
        worst.check(compared, &format!("{stage:?}"));
    }
}

#[test]
fn the_balance_of_experts_is_that_of_all_ranks() {
    for name in ["qwen3_next", "qwen3_5_moe", "gemma4_moe", "deepseek_v32"] {
        let options = LossOptions { balance: Some(0.3), z_loss: 1e-3, ..LossOptions::default() };
        let batch = Batch::packed(ids(name), vec![0, 11, 40, 58]).unwrap();
        let mut worst = Worst::default();
        for of in [2, 3, 4] {
            check(name, &options, std::slice::from_ref(&batch), of, &mut worst);
        }
        worst.check(3, name);
    }
}

/// Bits of all gradients, and the loss.
fn bits(outcome: &Outcome) -> (Vec<Vec<u32>>, Vec<u32>, u64) {
    let of = |values: &Vec<f32>| values.iter().map(|x| x.to_bits()).collect();
    (outcome.grads.values().map(of).collect(), of(&outcome.logits), outcome.loss.language.sum.to_bits())
}

#[test]
fn whatever_is_recomputed_and_on_any_number_of_threads_the_bits_are_the_same() {
    for name in MODELS {
        let batch = Batch::packed(ids(name), vec![0, 11, 40, 58]).unwrap();
        for preset in ["f32", "bf16"] {
            let run = |recompute, threads: usize| {
                divided(name, preset, 3, |model, group| {
                    let part = batch.part(group.rank(), 3).unwrap();
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    pool.install(|| bits(&outcome(model, &part, &LossOptions::default(), recompute)))
                })
            };
            let one = run(Recompute::None, 1);
            assert!(one == run(Recompute::None, 3), "{name} {preset}: three threads");
            for recompute in [Recompute::Selective, Recompute::Full] {
                assert!(one == run(recompute, 2), "{name} {preset} {recompute:?}");
            }
        }
    }
}

#[test]
fn bf16_storage_adds_its_own_rounding() {
    for name in MODELS {
        let batch = Batch::packed(ids(name), vec![0, 11, 40, 58]).unwrap();
        let options = LossOptions::default();
        let exact = outcome(&load(name, "f32"), &batch, &options, Recompute::None);
        let alone = outcome(&load(name, "bf16"), &batch, &options, Recompute::None);
        let ranks = divided(name, "bf16", 3, |model, group| {
            outcome(model, &batch.part(group.rank(), 3).unwrap(), &options, Recompute::Selective)
        });
        // Rounding can change the experts or the keys of a token, and with them its logits: the distance to
        // f32 says how much that is.
        let (mut of_alone, mut of_ranks) = (Worst::default(), Worst::default());
        of_alone.compare(vec![&alone], &exact, None, name);
        of_ranks.compare(ranks.iter().collect(), &exact, None, name);
        let median = |worst: &Worst| {
            let mut all: Vec<f64> = worst.grads.values().map(|errors| errors.worst).collect();
            all.sort_by(f64::total_cmp);
            all[all.len() / 2]
        };
        let (one, three) = (median(&of_alone), median(&of_ranks));
        println!(
            "{name}: bf16 against f32: logits {:.3} and {:.3}, gradients {one:.3} and {three:.3} (1 and 3 ranks)",
            of_alone.logits, of_ranks.logits
        );
        assert!(of_ranks.logits < 1.5 * of_alone.logits + 0.01, "{name}");
        assert!(three < 1.5 * one + 0.01, "{name}: {one} {three}");
    }
}

#[test]
fn the_plan_of_a_part_is_what_is_kept() {
    for name in MODELS {
        for preset in ["f32", "bf16", "hf-bf16"] {
            let batch = Batch::packed(ids(name), vec![0, 1, 22, 58]).unwrap();
            let stages = [None, Some(IndexerStage::Dense), Some(IndexerStage::Sparse)];
            let stages = if load(name, preset).config.has_indexer() { &stages[..] } else { &stages[..1] };
            for (of, stage) in [2, 3, 4].into_iter().flat_map(|of| stages.iter().map(move |s| (of, *s))) {
                let indexer = stage.map(|stage| IndexerLoss { scale: 1.0, stage });
                let loss = LossOptions { indexer, ..LossOptions::default() };
                divided(name, preset, of, |model, group| {
                    let part = batch.part(group.rank(), of).unwrap();
                    for recompute in RECOMPUTE {
                        let new = Step::new(&batch.cu_seqlens, recompute);
                        let step = Step { loss, part: Some((group.rank(), of)), ..new };
                        let plan = Plan::new(&model.config, model.precision(), &step).unwrap();
                        let kept = model.measure_kept(&part, &loss, recompute).unwrap();
                        let whole = Plan::new(&model.config, model.precision(), &new).unwrap();
                        let what =
                            format!("{name} {preset} {recompute:?} {stage:?} {} of {of}", group.rank());
                        assert_eq!(plan.kept(), kept, "{what}");
                        assert_eq!(plan.parameters, whole.parameters, "{what}");
                    }
                });
            }
        }
    }
}

#[test]
fn the_plan_of_a_part_is_what_is_sent() {
    for name in MODELS {
        let batch = Batch::packed(ids(name), vec![0, 1, 22, 58]).unwrap();
        let config = load(name, "f32").config;
        let balance = config.layers.iter().any(|layer| layer.experts.is_some()).then_some(0.1);
        let sparse = IndexerLoss { scale: 1.0, stage: IndexerStage::Sparse };
        let dense = IndexerLoss { scale: 1.0, stage: IndexerStage::Dense };
        let stages = [None, Some(sparse), Some(dense)];
        let stages = if config.has_indexer() { &stages[..] } else { &stages[..1] };
        for (preset, of) in [("f32", 2), ("bf16", 3), ("hf-bf16", 4)] {
            for (indexer, recompute) in stages.iter().flat_map(|s| RECOMPUTE.map(|recompute| (*s, recompute)))
            {
                let loss = LossOptions { indexer, balance, ..LossOptions::default() };
                divided(name, preset, of, |model, group| {
                    let part = batch.part(group.rank(), of).unwrap();
                    model.forward_backward(&mut model.grads(), &part, &loss, recompute, None).unwrap();
                    let step = Step {
                        loss,
                        part: Some((group.rank(), of)),
                        ..Step::new(&batch.cu_seqlens, recompute)
                    };
                    let plan = Plan::sent(&model.config, model.precision(), &step).unwrap();
                    let what = format!("{name} {preset} {recompute:?} {indexer:?} {} of {of}", group.rank());
                    assert_eq!(plan, group.traffic().sent(), "{what}");
                });
            }
        }
    }
}

#[test]
fn layer_by_layer_is_the_same_on_every_rank() {
    for name in ["qwen3_5", "gemma4_ple", "deepseek_v32"] {
        let batch = Batch::packed(ids(name), vec![0, 40, 58]).unwrap();
        divided(name, "f32", 2, |model, group| {
            let part = batch.part(group.rank(), 2).unwrap();
            let expected = outcome(model, &part, &LossOptions::default(), Recompute::Full);
            let mut grads = model.grads();
            let recompute = Some(Recompute::Full);
            let mut run = LayerwiseRun::new(model, &part, recompute, LossOptions::default()).unwrap();
            for Visit { part, direction } in Visit::forward_backward(model.config.layers.len()) {
                match direction {
                    Direction::Forward => run.forward(model, part, None).unwrap(),
                    Direction::Backward => run.backward(model, &mut grads, part, None).unwrap(),
                }
            }
            let named = model.named_grads(&grads, None).unwrap();
            let named: Named = named.into_iter().map(|tensor| (tensor.name, tensor.values)).collect();
            assert!(named == expected.grads, "{name}");
        });
    }
}

#[test]
fn only_sequences_that_cross_a_boundary_are_exchanged() {
    for name in MODELS {
        let sent = |ends: Vec<usize>| {
            let batch = Batch::packed(ids(name), ends).unwrap();
            divided(name, "f32", 2, |model, group| {
                outcome(
                    model,
                    &batch.part(group.rank(), 2).unwrap(),
                    &LossOptions::default(),
                    Recompute::None,
                );
                let sent = group.traffic().sent();
                [Kind::Attention, Kind::States].map(|kind| sent.get(&kind).copied().unwrap_or(0))
            })
        };
        assert_eq!(sent(vec![0, 29, 58]), [[0, 0], [0, 0]], "{name}: documents end where ranks do");
        let (short, long) = (sent(vec![0, 27, 58]), sent(vec![0, 58]));
        assert!(short[0][0] < long[0][0] && short[0][0] > 0, "{name}: {short:?} {long:?}");
        // States have one size.
        let linear = name.starts_with("qwen");
        assert_eq!(short[0][1] > 0, linear, "{name}");
        if linear {
            assert!(long[0][1] - short[0][1] < short[0][1], "{name}: {short:?} {long:?}");
        }
    }
}

#[test]
fn a_part_needs_its_ranks() {
    let batch = Batch::packed(ids("qwen3_5"), vec![0, 58]).unwrap();
    let model = load("qwen3_5", "f32");
    let error = model.logits(&batch.part(0, 2).unwrap(), None).unwrap_err().to_string();
    assert!(error.contains("part 0 of 2") && error.contains("set_context"), "{error}");
    let errors = divided("qwen3_5", "f32", 2, |model, group| {
        let other = batch.part(1 - group.rank(), 2).unwrap();
        // A batch that is not divided runs on every rank by itself.
        let alone = model.logits(&batch, None).unwrap();
        assert!(alone == load("qwen3_5", "f32").logits(&batch, None).unwrap());
        model.logits(&other, None).unwrap_err().to_string()
    });
    assert!(errors[0].contains("part 1 of 2, but this rank is number 0 of 2"), "{errors:?}");
}
