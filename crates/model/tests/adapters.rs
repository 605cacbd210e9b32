//! Low-rank adapters on whole models.

use std::fs;

use ballast_model::params::Grads;
use ballast_model::{LossOptions, Model, Plan, Recompute, Step};

use crate::common::{MODELS, batch, error, ids, load};

const RANK: usize = 3;

/// Model with every possible adapter, B not 0, so that both matrices matter. The indexers are trained by
/// another loss.
fn adapted(name: &str, preset: &str) -> Model {
    let mut model = load(name, preset);
    let targets = model.adapter_targets();
    let wanted = |module: &str| targets.iter().any(|t| t == module) && !module.contains(".indexer.");
    let added = model.add_adapters(&wanted, RANK, 6.0, 1).unwrap();
    assert_eq!(added, targets.iter().filter(|target| wanted(target)).count());
    let mut state = 7u64;
    for low in model.params.adapters_mut().iter_mut().flatten() {
        for b in &mut low.b {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            *b = ((state >> 33) as f32 / (1u64 << 31) as f32 - 0.5) * 0.1;
        }
    }
    model
}

fn gradients(model: &Model, name: &str, mut grads: Grads, recompute: Recompute) -> (f64, Grads) {
    let loss = model
        .forward_backward(&mut grads, &batch(name), &LossOptions::default(), recompute, None)
        .unwrap()
        .language;
    (loss.sum / loss.tokens as f64, grads)
}

#[test]
fn new_adapters_change_nothing() {
    for name in MODELS {
        for preset in ["f32", "bf16"] {
            let mut model = load(name, preset);
            let before = model.logits(&batch(name), None).unwrap();
            let targets = model.adapter_targets();
            model.add_adapters(&|module| targets.iter().any(|t| t == module), RANK, 6.0, 1).unwrap();
            assert!(model.logits(&batch(name), None).unwrap() == before, "{name} {preset}");
        }
    }
}

#[test]
fn merged_adapters_give_what_applied_ones_give() {
    for name in MODELS {
        let mut model = adapted(name, "f32");
        let plain = load(name, "f32").logits(&batch(name), None).unwrap();
        let applied = model.logits(&batch(name), None).unwrap();
        assert!(error(&applied, &plain).0 > 1e-2, "{name}: the adapters do nothing");
        assert!(model.merge_adapters().unwrap() > 0 && model.params.adapters().is_empty());
        let (ratio, _) = error(&model.logits(&batch(name), None).unwrap(), &applied);
        assert!(ratio < 3e-5, "{name}: {ratio:e}");
    }
}

#[test]
fn decoding_with_adapters_gives_what_the_whole_forward_gives() {
    for name in MODELS {
        let (model, ids) = (adapted(name, "f32"), ids(name));
        let whole = ballast_model::Batch::packed(ids[..29].to_vec(), vec![0, 29]).unwrap();
        let expected = model.logits(&whole, None).unwrap();
        let mut session = model.session(1);
        let mut got = Vec::new();
        for piece in [&ids[..13], &ids[13..14], &ids[14..15], &ids[15..29]] {
            got.extend(session.advance_all(&[piece], None).unwrap());
        }
        let (ratio, _) = error(&got, &expected);
        assert!(ratio < 3e-5, "{name}: {ratio:e}");
    }
}

/// Moves A or B of all adapters along their gradients.
fn step(model: &mut Model, grads: &Grads, of_a: bool, by: f32) {
    for (low, d) in model.params.adapters_mut().iter_mut().zip(grads.adapters()) {
        let Some(low) = low else { continue };
        let (values, gradient) = if of_a { (&mut low.a, d.a) } else { (&mut low.b, d.b) };
        values.iter_mut().zip(gradient).for_each(|(x, d)| *x += by * d);
    }
}

#[test]
fn the_gradients_of_a_and_of_b_are_the_slopes_of_the_loss() {
    for name in MODELS {
        let mut model = adapted(name, "f32");
        let (_, grads) = gradients(&model, name, model.grads_of(|_| false), Recompute::None);
        for (low, d) in model.params.adapters().iter().zip(grads.adapters()) {
            let some = |d: &[f32]| d.iter().any(|d| *d != 0.0);
            assert!(some(d.a) == low.is_some() && some(d.b) == low.is_some(), "{name}: no gradient");
        }
        for of_a in [true, false] {
            let parts = grads.adapters().flat_map(|d| if of_a { d.a } else { d.b });
            let square: f64 = parts.map(|d| *d as f64 * *d as f64).sum();
            let mut loss = |by: f32| {
                step(&mut model, &grads, of_a, by);
                let loss = model.loss(&batch(name), &LossOptions::default(), None).unwrap();
                step(&mut model, &grads, of_a, -by);
                loss.sum / loss.tokens as f64
            };
            // Steps that change the loss by twice this. A longer one may send a token to another expert,
            // where the loss jumps; a shorter one is lost in rounding.
            let off = [1e-3, 3e-4, 1e-4].map(|change| {
                let by = (change / square) as f32;
                let slope = (loss(by) - loss(-by)) / (2.0 * by as f64);
                (slope / square - 1.0).abs()
            });
            assert!(off.iter().any(|off| *off < 0.02), "{name}, of A {of_a}: off by {off:?}");
        }
    }
}

#[test]
fn a_frozen_base_has_no_gradients_and_does_not_change_the_adapters() {
    for name in MODELS {
        for preset in ["f32", "bf16"] {
            let model = adapted(name, preset);
            let (loss, all) = gradients(&model, name, model.grads(), Recompute::None);
            let (same_loss, frozen) = gradients(&model, name, model.grads_of(|_| false), Recompute::None);
            assert!(loss == same_loss && all.adapters().eq(frozen.adapters()), "{name} {preset}");
            assert!(frozen.all().all(<[f32]>::is_empty));
            for recompute in [Recompute::Selective, Recompute::Full] {
                let again = gradients(&model, name, model.grads(), recompute);
                assert!(again == (loss, all.clone()), "{name} {preset} {recompute:?}");
            }
            let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
            let again = pool.install(|| gradients(&model, name, model.grads(), Recompute::None));
            assert!(again == (loss, all), "{name} {preset}: three threads");
        }
    }
}

#[test]
fn the_plan_counts_adapters() {
    for name in MODELS {
        let (model, batch) = (adapted(name, "bf16"), batch(name));
        let targets = model.adapter_targets();
        let wanted = |module: &str| targets.iter().any(|t| t == module) && !module.contains(".indexer.");
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
            let step = Step {
                learned: &|_| false,
                adapters: Some((RANK, &wanted)),
                ..Step::new(&batch.cu_seqlens, recompute)
            };
            let plan = Plan::new(&model.config, model.precision(), &step).unwrap();
            let kept = model.measure_kept(&batch, &LossOptions::default(), recompute).unwrap();
            assert_eq!(plan.kept(), kept, "{name} {recompute:?}");
            assert_eq!(plan.parameters + plan.adapters, model.params.bytes(), "{name}");
            assert_eq!(plan.gradients, model.grads_of(|_| false).bytes(), "{name}");
        }
    }
}

#[test]
fn adapters_survive_writing_and_reading() {
    for name in MODELS {
        let model = adapted(name, "bf16");
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("adapter");
        model.write_adapters(&folder, false).unwrap();
        let mut other = load(name, "bf16");
        let read = other.read_adapters(&folder).unwrap();
        assert_eq!(read, model.params.adapters().iter().flatten().count());
        assert!(other.params.adapters() == model.params.adapters(), "{name}");
        assert!(model.write_adapters(&folder, false).is_err(), "no overwriting");
        model.write_adapters(&folder, true).unwrap();
    }
}

#[test]
fn a_tensor_that_cannot_have_an_adapter_is_refused_with_the_reason() {
    let refused = |name: &str, wanted: &str| {
        let mut model = load(name, "f32");
        let error =
            model.add_adapters(&|module| module.ends_with(wanted), 2, 2.0, 1).unwrap_err().to_string();
        assert!(model.params.adapters().is_empty());
        error
    };
    for (name, wanted, reason) in [
        ("qwen3_5_moe", "lm_head", "lm_head: the output head"),
        ("qwen3_5_moe", "embed_tokens", "model.embed_tokens: an embedding"),
        (
            "qwen3_5_moe",
            "experts.down_proj",
            "model.layers.0.mlp.experts.down_proj: the matrices of all experts",
        ),
        ("qwen3_5_moe", "mlp.gate", "model.layers.2.mlp.gate: a router"),
        ("qwen3_5", "conv1d", "not a matrix"),
        ("qwen3_5", "A_log", "model.layers.0.linear_attn.A_log: protected"),
        ("deepseek_v32", "shared_experts.up_proj", "a name that PEFT reserves for experts"),
        ("qwen3_next", "in_proj_z", "in_proj_qkvz"),
        ("qwen3_5", "q_porj", "known: down_proj, gate_proj, in_proj_a"),
    ] {
        let error = refused(name, wanted);
        assert!(error.contains(reason), "{error}");
    }
    let mut model = load("qwen3_5", "f32");
    assert!(model.add_adapters(&|module| module.ends_with("q_proj"), 0, 1.0, 1).is_err());
    assert_eq!(model.add_adapters(&|module| module.ends_with("q_proj"), 2, 1.0, 1).unwrap(), 1);
    let again = model.add_adapters(&|module| module.ends_with("q_proj"), 2, 1.0, 1).unwrap_err();
    assert!(again.to_string().contains("merge them first"), "{again}");
}

#[test]
fn adapters_of_another_kind_or_another_model_are_refused() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("adapter");
    adapted("qwen3_5", "f32").write_adapters(&folder, false).unwrap();
    let error = load("gemma2", "f32").read_adapters(&folder).unwrap_err().to_string();
    assert!(error.contains("no module of this model"), "{error}");
    let path = folder.join("adapter_config.json");
    let written: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(written["r"], RANK);
    for (field, value) in
        [("use_dora", true.into()), ("r", 4.into()), ("rank_pattern", [("a", 1)].into_iter().collect())]
    {
        let mut config = written.clone();
        config[field] = value;
        fs::write(&path, config.to_string()).unwrap();
        let mut model = load("qwen3_5", "f32");
        let error = model.read_adapters(&folder).unwrap_err().to_string();
        assert!(error.contains(field) || error.contains("shape must be"), "{error}");
        assert!(model.params.adapters().is_empty());
    }
}
