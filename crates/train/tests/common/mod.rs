//! Helpers for the tests of runs.

use std::cell::RefCell;
use std::path::Path;
use std::sync::Mutex;

use ballast_files::jobs::Observer;
use ballast_model::Model;
use ballast_train::metrics::MetricsEntry;
use ballast_train::optimizer::{Master, Slot, StateTensor, Stored};
use ballast_train::report::Sample;
use ballast_train::{Summary, TrainConfig, Trainer, Watcher};

/// Records metrics entries, and stops after a number of steps.
#[derive(Default)]
pub struct Listener {
    pub records: Mutex<RefCell<Vec<MetricsEntry>>>,
    pub stop_after: Option<usize>,
}

impl Listener {
    pub fn stopping_after(steps: usize) -> Listener {
        Listener { stop_after: Some(steps), ..Listener::default() }
    }

    pub fn losses(&self) -> Vec<u64> {
        let bits = |record: &MetricsEntry| match record {
            MetricsEntry::Step(step) => Some(step.loss.to_bits()),
            _ => None,
        };
        self.records.lock().unwrap().borrow().iter().filter_map(bits).collect()
    }

    /// Kind and text of all events.
    pub fn events(&self) -> Vec<(String, String)> {
        let event = |record: &MetricsEntry| match record {
            MetricsEntry::Event(event) => Some((event.what.clone(), event.text.clone())),
            _ => None,
        };
        self.records.lock().unwrap().borrow().iter().filter_map(event).collect()
    }
}

impl Observer for Listener {}

impl Watcher for Listener {
    fn record(&self, record: &MetricsEntry) {
        self.records.lock().unwrap().borrow_mut().push(record.clone());
    }

    fn samples(&self, _: &[Sample]) {}

    fn should_stop(&self) -> bool {
        self.stop_after.is_some_and(|steps| self.losses().len() >= steps)
    }
}

/// A run of a few small steps in `out`; settings come after these.
pub fn config(out: &Path, settings: &[&str]) -> TrainConfig {
    let small = [
        format!("out={:?}", out.display().to_string()),
        "data.sequence_length=64".into(),
        "batch.sequences=2".into(),
        "evaluation.batches=1".into(),
        "samples.count=2".into(),
        "schedule.warmup=2".into(),
        "checkpoints.every=0".into(),
    ];
    let settings: Vec<String> = small.into_iter().chain(settings.iter().map(|s| s.to_string())).collect();
    TrainConfig::embedded(&settings).unwrap()
}

/// Trains to the last step.
pub fn run(config: TrainConfig) -> (Trainer, Listener, Summary) {
    let mut trainer = Trainer::new(config).unwrap();
    let listener = Listener::default();
    let summary = trainer.run(&listener).unwrap();
    (trainer, listener, summary)
}

/// A run on files of text, whose tokens are bytes; settings come after these. The model is untied.
pub fn on_files(folder: &Path, out: &str, files: &[(&str, &str)], settings: &[&str]) -> TrainConfig {
    let tokenizer = folder.join("tokenizer");
    std::fs::create_dir_all(&tokenizer).unwrap();
    std::fs::write(tokenizer.join("tokenizer.json"), ballast_train::task::tokenizer_json()).unwrap();
    std::fs::write(tokenizer.join("tokenizer_config.json"), ballast_train::task::tokenizer_config_json())
        .unwrap();
    let quoted = |path: std::path::PathBuf| format!("{:?}", path.display().to_string());
    let mut paths = Vec::new();
    for (name, content) in files {
        std::fs::write(folder.join(name), content).unwrap();
        paths.push(format!("{{ path = {} }}", quoted(folder.join(name))));
    }
    let small = [
        format!("out={}", quoted(folder.join(out))),
        format!("model.tokenizer={}", quoted(tokenizer)),
        format!("data.files=[{}]", paths.join(", ")),
        "model.preset=hybrid-moe".into(),
        "steps=4".into(),
        "data.sequence_length=16".into(),
        "data.validation_fraction=0".into(),
        "batch.accumulation=1".into(),
        "evaluation.batches=1".into(),
        "samples.count=0".into(),
        "checkpoints.every=0".into(),
    ];
    let settings: Vec<String> = small.into_iter().chain(settings.iter().map(|s| s.to_string())).collect();
    TrainConfig::from_table(Default::default(), &settings, None).unwrap()
}

/// Lines with prompts of these lengths and a completion.
pub fn completions(prompts: &[usize], completion: &str) -> String {
    let line =
        |n: &usize| format!("{{\"prompt\": \"{}\", \"completion\": \"{completion}\"}}\n", "p".repeat(*n));
    prompts.iter().map(line).collect()
}

/// Sets an element of a state tensor in f32.
pub fn set_state(tensor: &mut StateTensor, element: usize, value: f32) {
    let Stored::F32(values) = &mut tensor.values else { panic!("state in f32") };
    values[element] = value;
}

/// Gives a slot an f32 master in which one element is another than the model's.
pub fn set_master(slot: &mut Slot, model: &Model, element: usize, value: f32) {
    let mut values = slot.values(model);
    values[element] = value;
    slot.master = Some(Master::F32(values));
}
