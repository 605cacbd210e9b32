//! Training curves of transformers on torch, step by step: fixtures/training/make.py made them.

use std::path::{Path, PathBuf};

use ballast_model::{Batch, LossOptions, Model, Precision, Recompute};
use ballast_train::config::{OptimizerConfig, ScheduleConfig, ScheduleKind};
use ballast_train::optimizer::Optimizer;
use ballast_train::schedule::learning_rate;

const STEPS: u64 = 20;
const ROWS: u64 = 2;
const TOKENS: u64 = 24;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn batch(step: u64, vocabulary: u64) -> Batch {
    let token = |r: u64, t: u64| ((step * 7919 + r * 104729 + t * t * 31 + t * 17) % vocabulary) as u32;
    let ids = (0..ROWS).flat_map(|r| (0..TOKENS).map(move |t| token(r, t))).collect();
    Batch::rows(ids, TOKENS as usize).unwrap()
}

/// Losses, gradient norms, and the number of parameters without weight decay.
fn curve(name: &str) -> (Vec<f64>, Vec<f64>, usize) {
    let mut model = Model::load(&fixtures().join("models").join(name), |_| Ok(Precision::f32())).unwrap();
    let config = OptimizerConfig { learning_rate: 1e-3, weight_decay: 0.1, ..OptimizerConfig::default() };
    let schedule = ScheduleConfig { kind: ScheduleKind::Cosine, warmup: 4, floor: 0.1 };
    let mut grads = model.grads();
    let mut optimizer = Optimizer::new(&model, &grads, &config, &Precision::f32());
    let undecayed = optimizer.slots.iter().filter(|slot| !slot.decays).count();
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 1..=STEPS {
        grads.clear();
        let batch = batch(step, model.config.vocabulary as u64);
        let loss = model
            .forward_backward(&mut grads, &batch, &LossOptions::default(), Recompute::None, None)
            .unwrap()
            .language;
        let norm = optimizer.norms(&grads).global;
        optimizer
            .step(&mut model, &grads, norm, learning_rate(&schedule, config.learning_rate, step, STEPS))
            .unwrap();
        losses.push(loss.sum / loss.tokens as f64);
        norms.push(norm);
    }
    (losses, norms, undecayed)
}

#[test]
fn twenty_steps_have_the_losses_of_transformers() {
    let text = std::fs::read_to_string(fixtures().join("training/curves.json")).unwrap();
    let expected: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut compared = 0;
    for (name, expected) in expected.as_object().unwrap() {
        let numbers = |key: &str| -> Vec<f64> {
            expected[key].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
        };
        let (losses, norms, undecayed) = curve(name);
        assert_eq!(undecayed as u64, expected["undecayed"].as_u64().unwrap(), "{name}");
        for (step, ((loss, norm), (loss_there, norm_there))) in
            losses.iter().zip(&norms).zip(numbers("losses").iter().zip(numbers("norms"))).enumerate()
        {
            let off = (loss - loss_there).abs();
            assert!(off <= 1e-4, "{name}, step {}: loss {loss} where {loss_there} is expected", step + 1);
            // Rounding grows from step to step in these models; it shows in the norm first.
            let limit = if step < 5 { 1e-3 } else { 2e-2 };
            assert!(
                (norm / norm_there - 1.0).abs() < limit,
                "{name}, step {}: norm {norm}, {norm_there}",
                step + 1
            );
            compared += 1;
        }
    }
    assert_eq!(compared, 5 * STEPS);
}
