//! Properties that hold for every architecture.

use ballast_kernels::Rounding;
use ballast_model::{
    Batch, IndexerLoss, IndexerStage, LossOptions, Model, Plan, Precision, Recompute, Site, Step,
};

use crate::common::{MODELS, batch, error, ids, load};

fn gradients(
    model: &Model,
    batch: &Batch,
    recompute: Recompute,
    scale: f32,
) -> (f64, ballast_model::params::Grads) {
    let mut grads = model.grads();
    let options = LossOptions { scale: Some(scale), ..LossOptions::default() };
    let loss = model.forward_backward(&mut grads, batch, &options, recompute, None).unwrap();
    (loss.language.sum, grads)
}

#[test]
fn packed_sequences_are_the_same_as_one_by_one() {
    for name in MODELS {
        let (model, ids) = (load(name, "f32"), ids(name));
        let ends = vec![0, 1, 22, 22, 29, 58];
        let packed = Batch::packed(ids.clone(), ends.clone()).unwrap();
        let scale = 1.0 / packed.counted() as f32;
        let logits = model.logits(&packed, None).unwrap();
        let (loss, grads) = gradients(&model, &packed, Recompute::None, scale);
        let (mut loss_alone, mut grads_alone, mut logits_alone) = (0.0, model.grads(), Vec::new());
        for ends in ends.windows(2).filter(|ends| ends[0] < ends[1]) {
            let alone = Batch::packed(ids[ends[0]..ends[1]].to_vec(), vec![0, ends[1] - ends[0]]).unwrap();
            logits_alone.extend(model.logits(&alone, None).unwrap());
            let options = LossOptions { scale: Some(scale), ..LossOptions::default() };
            let loss =
                model.forward_backward(&mut grads_alone, &alone, &options, Recompute::None, None).unwrap();
            loss_alone += loss.language.sum;
        }
        let (ratio, _) = error(&logits, &logits_alone);
        // Rounding differs with the number of tokens; the tiny models amplify it up to a hundredfold.
        assert!(ratio <= 2e-5, "{name}: logits {ratio:e}");
        assert!((loss - loss_alone).abs() <= 1e-5 * loss, "{name}: loss {loss} {loss_alone}");
        let all = grads.all();
        let alone = grads_alone.all();
        let mut compared = 0;
        for ((got, expected), spec) in all.zip(alone).zip(model.specs.all()) {
            let (ratio, _) = error(got, expected);
            assert!(ratio <= 3e-4, "{name}: gradient of {} {ratio:e}", spec.name);
            compared += 1;
        }
        assert_eq!(compared, model.specs.all().count());
    }
}

#[test]
fn recomputed_activations_have_the_same_bits() {
    for name in MODELS {
        for preset in ["f32", "bf16"] {
            let (model, batch) = (load(name, preset), batch(name));
            let none = gradients(&model, &batch, Recompute::None, 0.02);
            for recompute in [Recompute::Selective, Recompute::Full] {
                assert_eq!(gradients(&model, &batch, recompute, 0.02), none, "{name} {preset} {recompute:?}");
            }
        }
    }
}

/// 90 copies of the golden batch are more tokens than an MLP computes at once. Rounding differs with the number of
/// tokens, and the tiny models amplify it.
#[test]
fn a_batch_in_slices_has_the_gradients_of_its_halves_whatever_is_recomputed() {
    for name in ["qwen3_5", "qwen3_5_moe", "gemma2", "gemma4_ple"] {
        for preset in ["f32", "bf16"] {
            let (model, ids) = (load(name, preset), ids(name));
            let whole = Batch::rows(ids.repeat(90), 29).unwrap();
            let scale = 1.0 / whole.counted() as f32;
            let none = gradients(&model, &whole, Recompute::None, scale);
            for recompute in [Recompute::Selective, Recompute::Full] {
                assert!(gradients(&model, &whole, recompute, scale) == none, "{name} {preset} {recompute:?}");
            }
            let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
            let alone = one.install(|| gradients(&model, &whole, Recompute::Full, scale));
            assert!(alone == none, "{name} {preset}: one thread");
            let half = Batch::rows(ids.repeat(45), 29).unwrap();
            let options = LossOptions { scale: Some(scale), ..LossOptions::default() };
            let mut halves = model.grads();
            for _ in 0..2 {
                model.forward_backward(&mut halves, &half, &options, Recompute::None, None).unwrap();
            }
            let mut compared = 0;
            for ((got, expected), spec) in none.1.all().zip(halves.all()).zip(model.specs.all()) {
                let (ratio, _) = error(got, expected);
                assert!(ratio <= 3e-4, "{name} {preset}: gradient of {} {ratio:e}", spec.name);
                compared += 1;
            }
            assert_eq!(compared, model.specs.all().count());
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for name in MODELS {
        for preset in ["f32", "bf16"] {
            let (model, batch) = (load(name, preset), batch(name));
            let on = |threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| {
                    (model.logits(&batch, None).unwrap(), gradients(&model, &batch, Recompute::None, 0.02))
                })
            };
            let one = on(1);
            for threads in [2, 3, 8] {
                assert!(on(threads) == one, "{name} {preset}: {threads} threads");
            }
        }
    }
}

#[test]
fn the_plan_is_what_is_kept() {
    for name in MODELS {
        for preset in ["f32", "bf16", "maxtext-default", "hf-bf16"] {
            let model = load(name, preset);
            let batch = Batch::packed(ids(name), vec![0, 1, 22, 58]).unwrap();
            let stages = [IndexerStage::Dense, IndexerStage::Sparse].map(Some);
            let stages = if model.config.has_indexer() { &stages[..] } else { &[] };
            for (recompute, stage) in [Recompute::None, Recompute::Selective, Recompute::Full]
                .into_iter()
                .flat_map(|recompute| stages.iter().chain([&None]).map(move |stage| (recompute, *stage)))
            {
                let indexer = stage.map(|stage| IndexerLoss { scale: 1.0, stage });
                let loss = LossOptions { indexer, ..LossOptions::default() };
                let step = Step { loss, ..Step::new(&batch.cu_seqlens, recompute) };
                let plan = Plan::new(&model.config, model.precision(), &step).unwrap();
                let kept = model.measure_kept(&batch, &loss, recompute).unwrap();
                assert_eq!(plan.kept(), kept, "{name} {preset} {recompute:?} {stage:?}");
                assert_eq!(plan.parameters, model.params.bytes(), "{name} {preset}");
                assert_eq!(plan.gradients, model.grads().bytes(), "{name} {preset}");
            }
        }
    }
}

#[test]
fn recomputing_more_saves_fewer_bytes() {
    for name in MODELS {
        let model = load(name, "bf16");
        let kept = |recompute| model.measure_kept(&batch(name), &LossOptions::default(), recompute).unwrap();
        let (none, selective, full) =
            (kept(Recompute::None), kept(Recompute::Selective), kept(Recompute::Full));
        assert!(full < selective && selective < none, "{name}: {none} {selective} {full}");
    }
}

#[test]
fn every_learned_tensor_has_a_gradient() {
    for name in MODELS {
        let model = load(name, "bf16");
        let (_, grads) = gradients(&model, &batch(name), Recompute::None, 0.02);
        let all = grads.all();
        for (gradient, spec) in all.zip(model.specs.all()) {
            let learned_here = spec.trainable && !spec.name.contains(".indexer.");
            let some = gradient.iter().any(|g| *g != 0.0);
            assert!(some == learned_here, "{name}: gradient of {}", spec.name);
            assert!(gradient.iter().all(|g| g.is_finite()), "{name}: gradient of {}", spec.name);
        }
    }
}

#[test]
fn bf16_is_within_its_rounding_of_f32() {
    // The tiny models amplify rounding (and flip experts), so the measure is transformers: the ratios of
    // its own bf16 run to its f32 run, for logits and for all gradients together. Ours are the same within a
    // factor.
    let transformers = [
        ("qwen3_next", 0.099, 0.289),
        ("qwen3_5", 0.125, 0.775),
        ("qwen3_5_moe", 0.181, 0.580),
        ("gemma2", 0.014, 0.024),
        ("gemma3", 0.019, 0.041),
        ("gemma4_dense", 0.058, 0.317),
        ("gemma4_moe", 0.110, 0.346),
        ("gemma4_ple", 0.123, 0.758),
        ("deepseek_v32", 0.263, 0.431),
    ];
    for (name, theirs, their_gradients) in transformers {
        let (wide, mut narrow, batch) = (load(name, "f32"), load(name, "bf16"), batch(name));
        // transformers rounds the residual stream.
        let mut precision = narrow.precision().clone();
        precision.set(Site::Residual, Rounding::Bf16);
        narrow.set_precision(precision);
        let expected = wide.logits(&batch, None).unwrap();
        let (ratio, largest) = error(&narrow.logits(&batch, None).unwrap(), &expected);
        let (_, exact) = gradients(&wide, &batch, Recompute::None, 0.02);
        let (_, rounded) = gradients(&narrow, &batch, Recompute::None, 0.02);
        let all = |grads: &ballast_model::params::Grads| grads.all().flatten().copied().collect::<Vec<f32>>();
        let (gradient, _) = error(&all(&rounded), &all(&exact));
        println!("{name}: bf16 logits ratio {ratio:.3}, max {largest:.3}; gradients {gradient:.3}");
        assert!(ratio <= 1.2 * theirs, "{name}: logits {ratio}");
        assert!(gradient <= 2.5 * their_gradients, "{name}: gradients {gradient}");
    }
}

#[test]
fn ids_outside_the_vocabulary_and_ragged_rows_are_errors() {
    let model = load("qwen3_5", "f32");
    let outside = Batch::packed(vec![1, 160], vec![0, 2]).unwrap();
    let error = model.logits(&outside, None).unwrap_err().to_string();
    assert!(error.contains("token 1 has the id 160, outside the vocabulary of 160"), "{error}");
    let mut session = model.session(1);
    assert!(session.advance(&[&[160]]).is_err());
    assert!(session.advance(&[&[1], &[2]]).is_err());
    assert!(session.advance(&[&[]]).unwrap()[0].is_empty());
}

#[test]
fn presets_that_do_not_exist_are_named() {
    let model = load("qwen3_5", "f32");
    let error = Precision::preset("fp8", &model.config).unwrap_err().to_string();
    assert!(error.contains("\"fp8\"") && error.contains("hf-bf16"), "{error}");
}

#[test]
fn caches_are_as_large_as_was_said_before() {
    for name in MODELS {
        for preset in ["f32", "bf16"] {
            let model = load(name, preset);
            let mut session = model.session(1);
            let ids = ids(name);
            for (begin, end) in [(0, 7), (7, 8), (8, 40)] {
                session.advance(&[&ids[begin..end]]).unwrap();
                assert_eq!(session.bytes(), model.session_bytes(end), "{name} {preset}: {end} tokens");
            }
        }
    }
}
