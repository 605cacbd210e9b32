//! Muon: the figures of torch.optim.Muon, and whole runs with it. fixtures/muon/make.py made the figures.

use std::path::Path;

use ballast_checkpoint::tensor_file::TensorFile;
use ballast_kernels::muon::{AdjustLr, Options, Parts, muon_step, muon_step_workspace};
use ballast_model::params::Weight;
use ballast_train::Trainer;
use ballast_train::metrics::MetricsEntry;
use ballast_train::optimizer::Place;
use ballast_train::state::weights_checksum;
use serde::Deserialize;

use crate::common::{self, Listener, config, run};

const MUON: &str = "optimizer.kind=muon";

/// RMS of the difference over the RMS of expected - start.
fn relative_error(got: &[f32], expected: &[f32], start: &[f32]) -> f64 {
    let rms = |a: &[f32], b: &[f32]| {
        let squares = a.iter().zip(b).map(|(a, b)| (*a as f64 - *b as f64).powi(2));
        (squares.sum::<f64>() / a.len() as f64).sqrt()
    };
    rms(got, expected) / rms(expected, start)
}

#[test]
fn steps_have_the_results_of_torch() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/muon");
    let text = std::fs::read_to_string(fixtures.join("cases.json")).unwrap();
    let cases: serde_json::Value = serde_json::from_str(&text).unwrap();
    let file = TensorFile::open(&fixtures.join("cases.safetensors")).unwrap();
    let mut compared = 0;
    for (name, settings) in cases["cases"].as_object().unwrap() {
        let tensor = |part: &str| file.f32(&format!("{name}.{part}")).unwrap();
        let number = |key: &str| settings[key].as_f64().unwrap();
        let coefficients: Vec<f64> =
            settings["ns_coefficients"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        let options = Options {
            lr: number("lr"),
            momentum: number("momentum"),
            nesterov: settings["nesterov"].as_bool().unwrap(),
            weight_decay: number("weight_decay"),
            eps: number("eps"),
            ns_steps: number("ns_steps") as usize,
            ns_coefficients: coefficients.try_into().unwrap(),
            adjust_lr: AdjustLr::deserialize(&settings["adjust_lr_fn"]).unwrap(),
        };
        let start = tensor("start");
        let [rows, columns] = start.shape[..] else { panic!("{name}: {:?}", start.shape) };
        let parts = Parts::whole(rows, columns);
        let (mut w, mut momentum) = (start.values.clone(), vec![0.0; rows * columns]);
        let mut workspace = vec![0.0; muon_step_workspace(&parts)];
        for g in tensor("gradients").values.chunks(rows * columns) {
            muon_step::<f32>(&mut w, None, &mut momentum, g, 1.0, &parts, &options, &mut workspace).unwrap();
        }
        let zeros = vec![0.0; w.len()];
        let exact = relative_error(&w, &tensor("exact").values, &zeros);
        let state = relative_error(&momentum, &tensor("momentum").values, &zeros);
        // Of the bf16 steps, what matters is the error of the update.
        let torch = relative_error(&w, &tensor("torch").values, &start.values);
        println!(
            "{name:16} f64 {exact:.1e}, momentum {state:.1e}, torch.optim.Muon (bf16 steps) {torch:.1e}"
        );
        assert!(exact <= 2e-6 && state <= 2e-7, "{name}: {exact:e} {state:e}");
        assert!(torch <= 3e-2, "{name}: {torch:e}");
        compared += 1;
    }
    assert_eq!(compared, 12);
}

fn losses(listener: &Listener) -> Vec<f64> {
    let loss = |record: &MetricsEntry| match record {
        MetricsEntry::Step(step) => Some(step.loss),
        _ => None,
    };
    listener.records.lock().unwrap().borrow().iter().filter_map(loss).collect()
}

#[test]
fn a_run_with_muon_learns_and_protected_tensors_stay_f32() {
    let folder = tempfile::tempdir().unwrap();
    let settings = [MUON, "steps=40", "optimizer.learning_rate=3e-3", "schedule.kind=constant"];
    let (trainer, listener, _) = run(config(folder.path(), &settings));
    let losses = losses(&listener);
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let (first, last) = (mean(&losses[..5]), mean(&losses[35..]));
    assert!(last < 0.8 * first, "{first} {last}");
    let (mut muon, mut protected) = (0, 0);
    for slot in &trainer.optimizer.slots {
        match slot.place {
            Place::Protected(_) => {
                assert_eq!((slot.rule.name(), slot.master.is_none()), ("AdamW", true), "{}", slot.name);
                protected += 1;
            }
            _ if slot.rule.name() == "Muon" => {
                assert!(slot.master.is_some() && slot.state.len() == 1, "{}", slot.name);
                muon += 1;
            }
            _ => {}
        }
        assert!(
            slot.state.iter().all(|tensor| tensor.values.to_f32().iter().any(|x| *x != 0.0)),
            "{}",
            slot.name
        );
    }
    assert!(muon > 8 && protected > 8, "{muon} {protected}");
    assert_eq!(trainer.ledger.f32_tensors(), trainer.ledger.entries.len());
    assert!(trainer.ledger.entries.iter().all(|entry| entry.first != entry.last), "all of them were updated");
    assert!(trainer.model.params.weights().iter().all(|w| matches!(w, Weight::Bf16(_))));
}

#[test]
fn a_resumed_run_with_muon_has_the_bits_of_one_that_was_not_stopped() {
    let folder = tempfile::tempdir().unwrap();
    for preset in ["hybrid-moe", "deepseek"] {
        let preset_setting = format!("model.preset={preset}");
        let settings = [MUON, "steps=4", preset_setting.as_str()];
        let (whole, ..) = run(config(&folder.path().join(format!("{preset}-whole")), &settings));
        let out = folder.path().join(format!("{preset}-stopped"));
        let mut first = Trainer::new(config(&out, &settings)).unwrap();
        first.run(&Listener::stopping_after(2)).unwrap();
        let names: Vec<String> =
            first.optimizer.tensors(&first.model).into_iter().map(|(name, ..)| name).collect();
        drop(first);
        assert!(
            names.iter().any(|name| name.starts_with("momentum."))
                && names.iter().any(|n| n.starts_with("v."))
        );
        let mut second = Trainer::resume(&out, &[]).unwrap();
        second.run(&Listener::default()).unwrap();
        assert_eq!(weights_checksum(&second.model), weights_checksum(&whole.model), "{preset}");
        let bits = |trainer: &Trainer| -> Vec<Vec<u32>> {
            trainer
                .optimizer
                .tensors(&trainer.model)
                .iter()
                .map(|(_, _, x)| x.iter().map(|x| x.to_bits()).collect())
                .collect()
        };
        assert!(bits(&second) == bits(&whole), "{preset}: masters, momentum and moments");
    }
}

#[test]
fn a_run_with_muon_has_the_same_bits_on_any_number_of_threads() {
    let folder = tempfile::tempdir().unwrap();
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let out = folder.path().join(threads.to_string());
        pool.install(|| weights_checksum(&run(config(&out, &[MUON, "steps=3"])).0.model))
    };
    let one = on(1);
    assert_eq!([on(2), on(3)], [one.clone(), one]);
}

#[test]
fn muon_needs_less_memory_than_adamw_and_the_plan_is_exact() {
    let folder = tempfile::tempdir().unwrap();
    let trainer = |kind: &str| {
        let setting = format!("optimizer.kind={kind}");
        Trainer::new(config(&folder.path().join(kind), &[&setting])).unwrap()
    };
    let bytes = |trainer: &Trainer| {
        let plan = trainer.memory_plan().unwrap();
        let row = |name: &str| plan.rows.iter().find(|(row, _)| row == name).map_or(0, |(_, bytes)| *bytes);
        assert_eq!(row("moments, f32") + row("momentum, f32"), trainer.optimizer.state_bytes() as u64);
        (row("moments, f32"), row("momentum, f32"), row("optimizer workspace"))
    };
    let (adamw, muon) = (bytes(&trainer("adamw")), bytes(&trainer("muon")));
    assert!(adamw.1 == 0 && adamw.2 == 0 && muon.1 > 0 && muon.2 > 0);
    // Where AdamW has two moments of an element, Muon has one momentum.
    assert_eq!(adamw.0, muon.0 + 2 * muon.1);
}

#[test]
fn a_bad_update_of_muon_is_not_applied() {
    let folder = tempfile::tempdir().unwrap();
    let start = |name: &str, settings: &[&str]| {
        Trainer::new(config(&folder.path().join(name), &[&[MUON], settings].concat())).unwrap()
    };
    let is_muon = |slot: &&mut ballast_train::optimizer::Slot| slot.rule.name() == "Muon";
    // f32 holds it; the nearest bf16 is infinity.
    let mut wide = start("wide", &["precision.preset=bf16", "optimizer.muon.weight_decay=0"]);
    let slot = wide.optimizer.slots.iter_mut().find(is_muon).unwrap();
    common::set_master(slot, &wide.model, 5, 3.4e38);
    let name = slot.name.clone();
    let before = weights_checksum(&wide.model);
    let error = wide.attempt(&mut |_| {}).unwrap_err().to_string();
    assert!(error.contains(&name) && error.contains("to inf at element 5"), "{error}");
    assert_eq!((weights_checksum(&wide.model), wide.optimizer.updates), (before, 0));
    let mut infinite = start("infinite", &["precision.preset=f32"]);
    let slot = infinite.optimizer.slots.iter_mut().find(is_muon).unwrap();
    common::set_state(&mut slot.state[0], 3, f32::INFINITY);
    let name = slot.name.clone();
    let error = infinite.attempt(&mut |_| {}).unwrap_err().to_string();
    assert!(error.contains(&name) && error.contains("momentum NaN"), "{error}");
    let error = infinite.optimizer.check(&infinite.model).unwrap_err().to_string();
    assert!(error.contains("the momentum of") && error.contains("element 3"), "{error}");
    // Coefficients under which the Newton-Schulz steps overflow.
    let mut wild = start("wild", &["optimizer.muon.ns_coefficients=[1e9, 1e9, 1e9]"]);
    let error = wild.attempt(&mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("the update takes") && error.contains("The update was not applied"), "{error}");
    assert_eq!(wild.optimizer.updates, 0);
}
