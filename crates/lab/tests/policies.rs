//! Every default policy of a model changes something in it; a policy without effect is refused.

use ballast_lab::Choice;
use ballast_lab::findings::Kind;
use ballast_model::probe::Recorder;
use ballast_model::{Batch, LazyCheckpoint, LossOptions, Model, Precision, Recompute};

use crate::common::{MODELS, defaults, folder};

/// Sequence length at which an indexer has a choice and a state passes between chunks.
fn batch(vocabulary: usize) -> Batch {
    Batch::rows((0..96).map(|t| (t * 37 % vocabulary) as u32).collect(), 48).unwrap()
}

/// Bits of all tensors that a probe sees.
fn seen(name: &str, precision: &Precision) -> Vec<u32> {
    let model = Model::load(&folder(name), |_| Ok(precision.clone())).unwrap();
    let mut recorder = Recorder::default();
    let (mut grads, batch) = (model.grads(), batch(model.config.vocabulary));
    model.logits(&batch, Some(&mut recorder)).unwrap();
    let options = LossOptions::default();
    model.forward_backward(&mut grads, &batch, &options, Recompute::None, Some(&mut recorder)).unwrap();
    recorder.seen.iter().flat_map(|seen| &seen.values).map(|x| x.to_bits()).collect()
}

/// Returns true if a choice rounds a protected tensor that is not exact in bf16.
fn rounds_a_tensor(checkpoint: &LazyCheckpoint, choice: &Choice) -> bool {
    let mut values = checkpoint.read(|_| true).unwrap();
    for tensor in values.protected_mut() {
        tensor.values_mut().iter_mut().for_each(|x| *x = 1.0 + f32::EPSILON);
    }
    let mut model = checkpoint.model(choice.precision.clone()).unwrap();
    model.hold(&values);
    model.params.protected() != values.protected()
}

#[test]
fn every_policy_that_is_offered_for_a_golden_model_changes_something() {
    let mut checked = 0;
    for name in MODELS {
        let checkpoint = LazyCheckpoint::open(&folder(name)).unwrap();
        let plain = seen(name, &Precision::f32());
        for choice in defaults(&checkpoint) {
            let changes = match choice.kind {
                Kind::Tensor => rounds_a_tensor(&checkpoint, &choice),
                _ => seen(name, &choice.precision) != plain,
            };
            assert!(changes, "{name}: {} changes nothing", choice.name);
            checked += 1;
        }
    }
    assert!(checked > 150, "{checked}");
}

#[test]
fn every_protected_tensor_of_a_golden_model_can_be_rounded_alone() {
    for name in MODELS {
        let checkpoint = LazyCheckpoint::open(&folder(name)).unwrap();
        let offered: Vec<Choice> =
            defaults(&checkpoint).into_iter().filter(|choice| choice.kind == Kind::Tensor).collect();
        for spec in &checkpoint.specs.protected {
            let covers = |choice: &&Choice| choice.precision.rounds(&choice.precision.policy(), &spec.name);
            assert_eq!(offered.iter().filter(covers).count(), 1, "{name}: {}", spec.name);
        }
    }
}

#[test]
fn a_policy_that_a_model_has_nothing_for_is_refused() {
    for (name, policy, problem) in [
        ("gemma4_moe", "per_expert_scale", "per_expert_scale is not protected in this model"),
        ("gemma2", "A_log", "this model has no protected tensor A_log\n"),
        ("gemma2", "bf16+weights_proj", "this model has no protected tensor weights_proj\n"),
        ("gemma2", "state", "this model has no state\n"),
        ("gemma2", "router=f16", "this model has no router\n"),
        ("qwen3_5", "indexer_logits", "this model has no indexer_logits\n"),
        ("qwen3_5", "logits=f32", "logits is in f32 already\n"),
    ] {
        let checkpoint = LazyCheckpoint::open(&folder(name)).unwrap();
        let error = Choice::parse(policy, &checkpoint.config, &checkpoint.specs).unwrap_err().to_string();
        assert!(error.contains(problem), "{name} {policy}: {error}");
    }
    let checkpoint = LazyCheckpoint::open(&folder("qwen3_5_moe")).unwrap();
    Choice::parse("megatron+router=f32", &checkpoint.config, &checkpoint.specs).unwrap();
}
