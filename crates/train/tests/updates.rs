//! Updates: nothing changes without a gradient, no value becomes non-finite, and skipping has a limit.

use ballast_model::Model;
use ballast_train::state::weights_checksum;
use ballast_train::{Attempt, Error, Trainer};

use crate::common::{self, Listener, config};

fn trainer(folder: &std::path::Path, settings: &[&str]) -> Trainer {
    Trainer::new(config(folder, settings)).unwrap()
}

fn optimizer_bits(trainer: &Trainer) -> Vec<Vec<u32>> {
    trainer
        .optimizer
        .tensors(&trainer.model)
        .iter()
        .map(|(_, _, values)| values.iter().map(|x| x.to_bits()).collect())
        .collect()
}

#[test]
fn indexers_without_a_loss_stay_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let settings = ["model.preset=deepseek", "precision.preset=f32", "steps=3", "optimizer.weight_decay=0.5"];
    let mut trainer = trainer(folder.path(), &settings);
    let before: Vec<_> = trainer.model.params.weights().to_vec();
    let protected: Vec<Vec<f32>> =
        trainer.model.params.protected().iter().map(|p| p.values().to_vec()).collect();
    trainer.run(&Listener::default()).unwrap();
    let names = |model: &Model| -> Vec<String> { model.specs.all().map(|spec| spec.name.clone()).collect() };
    let moved = trainer.model.params.weights().iter().zip(&before).map(|(now, then)| now != then);
    let moved = moved.chain(
        trainer.model.params.protected().iter().zip(&protected).map(|(now, then)| now.values() != then),
    );
    let (mut indexers, mut others) = (0, 0);
    for (name, moved) in names(&trainer.model).iter().zip(moved) {
        match name.contains(".indexer.") {
            true => {
                indexers += 1;
                assert!(!moved, "{name}");
            }
            false => others += usize::from(moved),
        }
    }
    assert!(indexers >= 9 && others > 20, "{indexers} {others}");
    assert!(trainer.optimizer.slots.iter().all(|slot| !slot.name.contains(".indexer.")), "no moments either");
}

#[test]
fn everything_that_is_learned_has_a_gradient() {
    for (preset, settings) in [
        ("hybrid", &[][..]),
        ("hybrid-moe", &[]),
        ("gemma", &[]),
        ("deepseek", &[]),
        ("deepseek", &["loss.indexer_scale=0.1"]),
        ("deepseek", &["loss.indexer_scale=0.1", "loss.indexer_stage=dense"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let preset_setting = format!("model.preset={preset}");
        let mut trainer = trainer(folder.path(), &[&[preset_setting.as_str()], settings].concat());
        assert!(matches!(trainer.attempt(&mut |_| {}).unwrap(), Attempt::Taken(_)));
        for slot in &trainer.optimizer.slots {
            assert!(
                slot.state[0].values.to_f32().iter().any(|m| *m != 0.0),
                "{preset} {settings:?}: {}",
                slot.name
            );
        }
    }
}

#[test]
fn everything_that_is_learned_has_a_gradient_in_every_architecture_of_the_fixtures() {
    let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    let mut seen = 0;
    for entry in std::fs::read_dir(fixtures).unwrap() {
        let file = entry.unwrap().path().join("config.json");
        let mut architecture: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        for key in ["vocab_size", "vocab_size_per_layer_input"] {
            if architecture.get(key).is_some() {
                architecture[key] = serde_json::json!(257);
            }
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), architecture.to_string()).unwrap();
        let model = format!("model.config={:?}", folder.path().join("config.json").display().to_string());
        let mut trainer = trainer(&folder.path().join("run"), &[&model, "precision.preset=f32"]);
        assert!(matches!(trainer.attempt(&mut |_| {}).unwrap(), Attempt::Taken(_)));
        for slot in &trainer.optimizer.slots {
            assert!(
                slot.state[0].values.to_f32().iter().any(|m| *m != 0.0),
                "{}: {}",
                file.display(),
                slot.name
            );
        }
        seen += 1;
    }
    assert!(seen >= 10, "{seen}");
}

#[test]
fn an_update_that_is_not_finite_is_not_applied_and_nothing_is_published() {
    // eps is 0 in f32, and 0 / 0 is what embeddings of tokens get that do not occur.
    for precision in ["f32", "bf16", "hf-bf16"] {
        let folder = tempfile::tempdir().unwrap();
        let precision_setting = format!("precision.preset={precision}");
        let settings = ["model.preset=hybrid-moe", &precision_setting, "optimizer.eps=1e-50", "steps=1"];
        let mut trainer = trainer(folder.path(), &settings);
        let before = (weights_checksum(&trainer.model), optimizer_bits(&trainer), trainer.optimizer.updates);
        let error = trainer.run(&Listener::default()).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Diverged(_)), "{text}");
        assert!(text.contains("step 1: the update takes") && text.contains("to NaN at element"), "{text}");
        assert!(text.contains("embed_tokens") && text.contains("The update was not applied"), "{text}");
        let after = (weights_checksum(&trainer.model), optimizer_bits(&trainer), trainer.optimizer.updates);
        assert!(before == after, "{precision}: something was changed");
        assert!(!folder.path().join("model").exists() && trainer.store.steps().is_empty());
    }
}

#[test]
fn an_update_beyond_bf16_and_one_whose_moment_overflows_are_not_applied() {
    let folder = tempfile::tempdir().unwrap();
    let mut wide =
        trainer(&folder.path().join("wide"), &["precision.preset=bf16", "optimizer.weight_decay=0"]);
    let slot = wide.optimizer.slots.iter_mut().find(|slot| slot.master.is_some()).unwrap();
    // f32 holds it; the nearest bf16 is infinity.
    common::set_master(slot, &wide.model, 5, 3.4e38);
    let name = slot.name.clone();
    let error = wide.attempt(&mut |_| {}).unwrap_err().to_string();
    assert!(error.contains(&name) && error.contains("to inf at element 5"), "{error}");
    let mut moment = trainer(&folder.path().join("moment"), &["precision.preset=f32"]);
    common::set_state(&mut moment.optimizer.slots[2].state[1], 3, f32::INFINITY);
    let name = moment.optimizer.slots[2].name.clone();
    let error = moment.attempt(&mut |_| {}).unwrap_err().to_string();
    assert!(error.contains(&name) && error.contains("second moment inf"), "{error}");
}

#[test]
fn an_update_that_is_not_finite_is_handled_as_the_configuration_says() {
    let folder = tempfile::tempdir().unwrap();
    let start = |name: &str, on_fault: &str| {
        let on_fault = format!("sentinel.on_fault={on_fault}");
        let settings =
            ["model.preset=hybrid-moe", "optimizer.eps=1e-50", "sentinel.fault_limit=2", &on_fault];
        trainer(&folder.path().join(name), &settings)
    };
    let mut skipping = start("skip", "skip");
    let error = skipping.run(&Listener::default()).unwrap_err().to_string();
    assert!(error.contains("Fault limit (2) exceeded"), "{error}");
    assert_eq!((skipping.sentinel.faults, skipping.sentinel.skipped), (3, 2));
    let error = start("escalate", "escalate").run(&Listener::default()).unwrap_err().to_string();
    assert!(error.contains("No site in lower precision leads there"), "{error}");
    let error = start("rollback", "rollback").run(&Listener::default()).unwrap_err().to_string();
    assert!(error.contains("no checkpoint to roll back to"), "{error}");
}

#[test]
fn spikes_are_not_skipped_for_ever() {
    let folder = tempfile::tempdir().unwrap();
    let settings = ["sentinel.on_spike=skip", "sentinel.spike_limit=3", "steps=5"];
    let mut trainer = trainer(folder.path(), &settings);
    // Whatever the loss is from now on, it is above what it was.
    (0..30).for_each(|_| trainer.sentinel.loss.add(0.0));
    let listener = Listener::default();
    let error = trainer.run(&listener).unwrap_err();
    assert!(matches!(error, Error::Diverged(_)), "{error}");
    assert!(error.to_string().contains("3 spikes in a row were skipped (sentinel.spike_limit)"), "{error}");
    assert_eq!(listener.events().iter().filter(|(what, _)| what == "spike").count(), 4);
    assert_eq!(trainer.step, 0);
}

#[test]
fn spikes_with_steps_between_them_are_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let settings = ["sentinel.on_spike=skip", "sentinel.spike_limit=1", "steps=4"];
    let mut trainer = trainer(folder.path(), &settings);
    for _ in 0..3 {
        let calm = trainer.sentinel.clone();
        trainer.sentinel.loss = Default::default();
        (0..30).for_each(|_| trainer.sentinel.loss.add(0.0));
        assert_eq!(trainer.attempt(&mut |_| {}).unwrap(), Attempt::NotTaken);
        (trainer.sentinel.loss, trainer.sentinel.norm) = (calm.loss, calm.norm);
        assert!(matches!(trainer.attempt(&mut |_| {}).unwrap(), Attempt::Taken(_)));
    }
    assert_eq!((trainer.step, trainer.sentinel.skipped), (3, 3));
}
