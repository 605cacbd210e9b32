//! Steps: a mean over all tokens, however they are divided; spikes; frozen parameters.

use ballast_model::{Model, Precision};
use ballast_train::{Attempt, Trainer};

use crate::common::{config, run};

#[test]
fn a_step_in_micro_batches_is_the_step_in_one() {
    let folder = tempfile::tempdir().unwrap();
    let step = |name: &str, sequences: usize, accumulation: usize| {
        let (sequences, accumulation) =
            (format!("batch.sequences={sequences}"), format!("batch.accumulation={accumulation}"));
        let settings = ["precision.preset=f32", "data.packing=padded", &sequences, &accumulation];
        let mut trainer = Trainer::new(config(&folder.path().join(name), &settings)).unwrap();
        match trainer.attempt(&mut |_| {}).unwrap() {
            Attempt::Taken(step) => *step,
            Attempt::NotTaken => panic!("nothing is wrong with it"),
        }
    };
    // Documents differ in length and in what is trained, so a mean of means would be another.
    let (one, several) = (step("one", 6, 1), step("several", 2, 3));
    assert_eq!((one.tokens, one.trained_tokens), (several.tokens, several.trained_tokens));
    assert!((one.loss - several.loss).abs() < 1e-6 * one.loss, "{} {}", one.loss, several.loss);
    let off = one.gradient_norm / several.gradient_norm - 1.0;
    assert!(off.abs() < 1e-5, "{} {}", one.gradient_norm, several.gradient_norm);
}

#[test]
fn the_loss_of_a_step_has_parts_that_the_cross_entropy_has_not() {
    let folder = tempfile::tempdir().unwrap();
    let first = |name: &str, settings: &[&str]| {
        let mut trainer = Trainer::new(config(&folder.path().join(name), settings)).unwrap();
        match trainer.attempt(&mut |_| {}).unwrap() {
            Attempt::Taken(step) => *step,
            Attempt::NotTaken => panic!("nothing is wrong with it"),
        }
    };
    let plain = first("plain", &[]);
    assert_eq!(plain.cross_entropy, None, "the loss is the cross-entropy");
    for (name, setting) in [("z", "loss.z_loss=0.01"), ("smoothed", "loss.label_smoothing=0.2")] {
        let step = first(name, &[setting]);
        let cross_entropy = step.cross_entropy.unwrap();
        assert_eq!(cross_entropy.to_bits(), plain.loss.to_bits(), "{setting}");
        assert!((step.loss - cross_entropy).abs() > 1e-3, "{setting}: {} {cross_entropy}", step.loss);
    }
}

#[test]
fn spikes_are_reported_and_can_be_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let settings = ["steps=30", "sentinel.spike_sigma=0.2", "evaluation.batches=0", "samples.count=0"];
    let (trainer, listener, _) = run(config(&folder.path().join("report"), &settings));
    let spikes = listener.events().iter().filter(|(what, _)| what == "spike").count();
    assert!(spikes > 0 && trainer.sentinel.skipped == 0 && trainer.step == 30);
    let skip = [&settings[..], &["sentinel.on_spike=skip"]].concat();
    let (trainer, listener, _) = run(config(&folder.path().join("skip"), &skip));
    let spikes = listener.events().iter().filter(|(what, _)| what == "spike").count() as u64;
    assert!(spikes > 0 && trainer.sentinel.skipped == spikes && trainer.step == 30);
    assert_eq!(trainer.optimizer.updates, 30);
}

#[test]
fn time_steps_are_drawn_where_there_are_any() {
    let folder = tempfile::tempdir().unwrap();
    let new = |name: &str, settings: &[&str]| {
        Trainer::new(config(&folder.path().join(name), settings)).map_err(|error| error.to_string())
    };
    let bias = |trainer: &Trainer| {
        let at =
            trainer.model.specs.protected.iter().position(|spec| spec.name.ends_with("dt_bias")).unwrap();
        trainer.model.params.protected()[at].values().to_vec()
    };
    assert!(bias(&new("a", &[]).unwrap()).iter().all(|x| *x == 1.0));
    assert!(bias(&new("b", &["model.time_steps=drawn"]).unwrap()).iter().all(|x| (-7.0..-2.2).contains(x)));
    let problem = new("c", &["model.time_steps=drawn", "model.preset=gemma"]).map(|_| ()).unwrap_err();
    assert!(problem.contains("no layer of the model has a delta rule"), "{problem}");
}

#[test]
fn frozen_parameters_stay_and_a_pattern_that_matches_nothing_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let settings = ["steps=2", "precision.preset=f32", "model.freeze=[\"*.mlp.*\", \"*.A_log\"]"];
    let (trainer, ..) = run(config(&folder.path().join("a"), &settings));
    let fresh =
        Model::init(&trainer.model.config_json().unwrap(), |_| Ok(Precision::f32()), trainer.config.seed)
            .unwrap();
    let mut stayed = 0;
    for ((spec, now), then) in
        fresh.specs.weights.iter().zip(trainer.model.params.weights()).zip(fresh.params.weights())
    {
        assert_eq!(now == then, spec.name.contains(".mlp."), "{}", spec.name);
        stayed += usize::from(now == then);
    }
    assert_eq!(stayed, 12);
    let (now, then) = (trainer.model.params.protected(), fresh.params.protected());
    for ((spec, now), then) in fresh.specs.protected.iter().zip(now).zip(then) {
        assert_eq!(now == then, spec.name.ends_with("A_log"), "{}", spec.name);
    }
    let error = Trainer::new(config(&folder.path().join("b"), &["model.freeze=[\"nothing.*\"]"]));
    assert!(error.map(|_| ()).unwrap_err().to_string().contains("no parameter is called"));
}
