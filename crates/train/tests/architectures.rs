//! Every architecture trained in bf16: the loss falls, the protected-tensor check passes, checkpoints have
//! the same bits.

use std::path::Path;

use ballast_model::{Batch, Model, Precision};
use ballast_train::metrics::MetricsEntry;
use serde_json::json;

use crate::common::{config, run};

fn trains(name: &str, extra: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let fixture =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name).join("config.json");
    let mut architecture: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(fixture).unwrap()).unwrap();
    for key in ["vocab_size", "vocab_size_per_layer_input"] {
        if architecture.get(key).is_some() {
            architecture[key] = json!(257);
        }
    }
    let path = folder.path().join("config.json");
    std::fs::write(&path, architecture.to_string()).unwrap();
    let model = format!("model.config={:?}", path.display().to_string());
    let mut settings = vec![
        model.as_str(),
        "steps=50",
        "optimizer.learning_rate=3e-3",
        "samples.count=0",
        "ledger.every=10",
    ];
    settings.extend(extra);
    let out = folder.path().join("run");
    let (trainer, listener, summary) = run(config(&out, &settings));
    let loss = |record: &MetricsEntry| match record {
        MetricsEntry::Step(step) => Some(step.loss),
        _ => None,
    };
    let losses: Vec<f64> = listener.records.lock().unwrap().borrow().iter().filter_map(loss).collect();
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    let (first, last) = (mean(&losses[..5]), mean(&losses[45..]));
    assert!(last < first - 0.3, "{name}: the loss went from {first} to {last}");
    let protected = trainer.ledger.entries.len();
    assert_eq!(summary.ledger, format!("{protected} protected tensors: f32 for 50/50 steps"), "{name}");
    assert!(trainer.ledger.entries.iter().all(|entry| entry.live >= 6 && entry.saved == 1), "{name}");
    let batch = Batch::packed((40..80).collect(), vec![0, 15, 40]).unwrap();
    let logits = trainer.model.logits(&batch, None).unwrap();
    for saved in [summary.model.clone().unwrap(), out.join("checkpoints/step-00000050/model")] {
        let model = Model::load(&saved, |config| Precision::preset("bf16", config)).unwrap();
        assert!(model.logits(&batch, None).unwrap() == logits, "{name}: {}", saved.display());
    }
}

#[test]
fn the_indexers_warm_up_changes_nothing_but_the_indexers() {
    let folder = tempfile::tempdir().unwrap();
    let settings = ["model.preset=deepseek", "steps=3", "loss.indexer_scale=0.1", "loss.indexer_stage=dense"];
    let (trainer, ..) = run(config(folder.path(), &settings));
    let fresh = Model::init(
        &trainer.model.config_json().unwrap(),
        |config| Precision::preset("bf16", config),
        trainer.config.seed,
    )
    .unwrap();
    let (mut moved, mut still) = (0, 0);
    for ((spec, now), then) in
        fresh.specs.weights.iter().zip(trainer.model.params.weights()).zip(fresh.params.weights())
    {
        let is_indexer = spec.name.contains(".indexer.");
        assert_eq!(now != then, is_indexer, "{}", spec.name);
        *(if is_indexer { &mut moved } else { &mut still }) += 1;
    }
    assert!(moved >= 9 && still > 20, "{moved} {still}");
}

macro_rules! architectures {
    ($($test:ident: $name:literal $extra:expr;)*) => {$(
        #[test]
        fn $test() {
            trains($name, $extra);
        }
    )*};
}

architectures! {
    qwen3_next_trains: "qwen3_next" &["loss.balance=0.01"];
    qwen3_5_trains: "qwen3_5" &["precision.recompute=selective"];
    qwen3_5_moe_trains: "qwen3_5_moe" &["loss.balance=0.001"];
    gemma2_trains: "gemma2" &[];
    gemma3_trains: "gemma3" &["precision.recompute=full"];
    gemma4_dense_trains: "gemma4_dense" &[];
    gemma4_moe_trains: "gemma4_moe" &[];
    gemma4_with_per_layer_inputs_trains: "gemma4_ple" &[];
    deepseek_trains_with_its_indexer: "deepseek_v32" &["loss.indexer_scale=0.01"];
}
