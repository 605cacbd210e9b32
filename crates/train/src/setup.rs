//! Setup of a run from its configuration: model, tokenizer, documents.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_contract::pattern::wildcard_matches as matches;
use ballast_files::encoding::text_without_mark;
use ballast_files::look_at;
use ballast_files::regular::{read_regular, read_regular_text};
use ballast_model::params::{Grads, Specs};
use ballast_model::{Config, IndexerStage, Model, Precision};
use serde_json::Value;

use crate::checksum::Content;
use crate::config::{TimeSteps, TrainConfig};
use crate::data::{Document, Documents, Files, Packer, Split, TextEncoder};
use crate::error::{Error, Result};
use crate::task::{self, Task};

/// Embedded architectures for trials: small, with bytes as the vocabulary.
pub const PRESETS: [(&str, &str, &str); 4] = [
    ("hybrid", "three linear layers and one full, as Qwen3.5", include_str!("../presets/hybrid.json")),
    ("hybrid-moe", "the same with experts, as Qwen3.5-MoE", include_str!("../presets/hybrid-moe.json")),
    (
        "gemma",
        "sliding and full attention without soft caps, as Gemma 3",
        include_str!("../presets/gemma.json"),
    ),
    (
        "deepseek",
        "latent attention with a sparse indexer, as DeepSeek-V3.2",
        include_str!("../presets/deepseek.json"),
    ),
];

/// The configured precision for a model.
pub fn precision(config: &TrainConfig, model: &Config) -> Result<Precision> {
    let mut precision = Precision::preset(&config.precision.preset, model)?;
    for (site, dtype) in &config.precision.sites {
        precision.set_site(site, dtype).map_err(|error| {
            Error::config(format!("precision.sites.{site}"), format!("`precision.sites.{site}`: {error}"))
        })?;
    }
    Ok(precision)
}

/// The model in f32, loaded or initialized; the caller casts it.
pub fn model(config: &TrainConfig) -> Result<Model> {
    model_shares(config, |_, _| None)
}

/// [`model`] of which this process holds the elements `shares` of each weight; `None` for all.
pub(crate) fn model_shares(
    config: &TrainConfig,
    shares: impl FnOnce(&Config, &Specs) -> Option<Vec<Range<usize>>>,
) -> Result<Model> {
    match &config.model.checkpoint {
        Some(path) => {
            let mut model = Model::load_shares(path, |_| Ok(Precision::f32()), shares)?;
            model.save_as_hf();
            Ok(model)
        }
        None => {
            let mut model =
                Model::init_shares(&architecture(config)?, |_| Ok(Precision::f32()), config.seed, shares)?;
            if config.model.time_steps == TimeSteps::Drawn && model.draw_time_steps(config.seed) == 0 {
                let problem = "`model.time_steps`: no layer of the model has a delta rule; remove the key";
                return Err(Error::config("model.time_steps", problem));
            }
            Ok(model)
        }
    }
}

/// The model without values, for plans: nothing is drawn, and of a checkpoint the tensors are not read. A folder
/// with a config.json alone can stand for a checkpoint.
pub fn outline(config: &TrainConfig) -> Result<Model> {
    match &config.model.checkpoint {
        Some(path) => Ok(Model::outline_at(path)?),
        None => {
            let file = config.model.config.clone().unwrap_or_else(|| "config.json".into());
            Ok(Model::outline(Config::parse(&architecture(config)?, &file)?)?)
        }
    }
}

fn architecture(config: &TrainConfig) -> Result<Value> {
    if let Some(path) = &config.model.config {
        let text = read_regular_text(path).map_err(Error::io(path, "read"))?;
        let problem = |error| Error::Syntax(format!("{}: not JSON: {error}", path.display()));
        return serde_json::from_str(text_without_mark(&text)).map_err(problem);
    }
    let name = config.model.preset.as_deref().unwrap_or("hybrid");
    let Some((_, _, json)) = PRESETS.iter().find(|(preset, _, _)| *preset == name) else {
        let known = PRESETS.map(|(preset, _, _)| preset).join(", ");
        return Err(Error::config(
            "model.preset",
            format!("`model.preset` {name:?} is unknown; use one of {known}"),
        ));
    };
    serde_json::from_str(json).map_err(|error| Error::Syntax(format!("preset {name}: {error}")))
}

/// Returns true if a parameter is trained. Frozen parameters are not. With adapters, only the adapters are;
/// in the dense indexer stage, only the indexers; without an indexer loss, everything but the indexers
/// (without a gradient, a weight would still decay).
pub(crate) fn is_learned(config: &TrainConfig, name: &str) -> bool {
    let is_indexer = name.contains(".indexer.");
    let has_gradient = match (config.loss.indexer_scale > 0.0, config.loss.indexer_stage) {
        (false, _) => !is_indexer,
        (true, IndexerStage::Dense) => is_indexer,
        (true, IndexerStage::Sparse) => true,
    };
    config.lora.is_none() && has_gradient && !config.model.freeze.iter().any(|pattern| matches(pattern, name))
}

/// Returns true if a module gets an adapter.
pub(crate) fn is_target(config: &TrainConfig, module: &str) -> bool {
    let ends = |target: &String| module == target || module.ends_with(&format!(".{target}"));
    config.lora.as_ref().is_some_and(|lora| lora.targets.iter().any(ends))
}

/// Zero gradients for all trained parameters.
pub(crate) fn grads(config: &TrainConfig, model: &Model) -> Result<Grads> {
    for pattern in &config.model.freeze {
        if !model.specs.all().any(|spec| matches(pattern, &model.parameter_name(spec))) {
            return Err(Error::config(
                "model.freeze",
                format!("`model.freeze`: no parameter is called {pattern:?}; check the pattern"),
            ));
        }
    }
    let grads = model.grads_of(|spec| is_learned(config, &model.parameter_name(spec)));
    if grads.bytes() == 0 {
        return Err(Error::config(
            "model.freeze",
            "no parameter is left to train; check `model.freeze`, and `loss.indexer_stage` for a model without indexers",
        ));
    }
    Ok(grads)
}

/// Returns true if the run trains on the embedded task.
pub(crate) fn uses_task(config: &TrainConfig) -> bool {
    config.data.files.is_empty()
}

/// Tokenizer files to write beside the weights, if the model brings none.
pub(crate) fn sidecars(config: &TrainConfig) -> Result<Vec<(String, Vec<u8>)>> {
    if config.model.checkpoint.is_some() && config.model.tokenizer.is_none() {
        return Ok(Vec::new());
    }
    if uses_task(config) {
        return Ok(vec![
            ("tokenizer.json".into(), task::tokenizer_json().into()),
            ("tokenizer_config.json".into(), task::tokenizer_config_json().into()),
            ("generation_config.json".into(), task::generation_config_json().into()),
        ]);
    }
    let folder = tokenizer_folder(config)?;
    let names = [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "generation_config.json",
    ];
    let mut files = Vec::new();
    for name in names {
        let path = folder.join(name);
        if look_at(&path)?.is_some() {
            files.push((name.to_string(), read_regular(&path).map_err(Error::io(&path, "read"))?));
        }
    }
    Ok(files)
}

fn tokenizer_folder(config: &TrainConfig) -> Result<PathBuf> {
    let beside = |path: &PathBuf| path.parent().map(Path::to_path_buf);
    let model = &config.model;
    let folder =
        model.tokenizer.clone().or(model.checkpoint.clone()).or(model.config.as_ref().and_then(beside));
    folder.ok_or_else(|| {
        Error::config(
            "model.tokenizer",
            "`model.tokenizer` is missing: text files need a tokenizer, and a preset has none",
        )
    })
}

/// Folder of the embedded task's tokenizer, if the run uses it.
fn embedded_tokenizer(config: &TrainConfig) -> Option<PathBuf> {
    (uses_task(config) && config.model.checkpoint.is_none()).then(|| config.out.join("tokenizer"))
}

/// Writes the tokenizer of the embedded task to the folder of the run, if the run uses it.
pub(crate) fn write_tokenizer(config: &TrainConfig) -> Result {
    let Some(folder) = embedded_tokenizer(config) else { return Ok(()) };
    std::fs::create_dir_all(&folder).map_err(Error::io(&folder, "create"))?;
    for (name, bytes) in sidecars(config)? {
        let path = folder.join(name);
        std::fs::write(&path, bytes).map_err(Error::io(&path, "write"))?;
    }
    Ok(())
}

/// The tokenizer; that of the embedded task has been written before.
pub(crate) fn encoder(config: &TrainConfig) -> Result<TextEncoder> {
    match embedded_tokenizer(config) {
        Some(folder) => TextEncoder::load(&folder),
        None => TextEncoder::load(&tokenizer_folder(config)?),
    }
}

/// The checksum of all tokenizer files.
pub(crate) fn tokenizer_checksum(encoder: &TextEncoder) -> Result<u64> {
    let mut content = Content::default();
    for name in ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
    {
        let path = encoder.tokenizer.file().with_file_name(name);
        if look_at(&path)?.is_none() {
            continue;
        }
        let bytes = read_regular(&path).map_err(Error::io(&path, "read"))?;
        content.add(name.as_bytes());
        content.add(&bytes);
    }
    Ok(content.checksum())
}

/// The documents of a split; `None` without held-out data.
pub(crate) fn documents(
    config: &TrainConfig,
    split: Split,
    encoder: &Arc<TextEncoder>,
) -> Result<Option<Box<dyn Documents>>> {
    if uses_task(config) {
        if let Some(name) = config.data.task.as_deref().filter(|name| *name != "recall") {
            return Err(Error::config("data.task", format!("`data.task` {name:?} is unknown; use recall")));
        }
        return Ok(Some(Box::new(Task::new(split, config.seed))));
    }
    if split == Split::Validation && !config.data.has_validation() {
        return Ok(None);
    }
    let files = Files::open(&config.data, split, encoder.clone(), config.seed)?;
    match (split, files.is_empty()) {
        (Split::Validation, true) => Ok(None),
        (Split::Train, true) => Err(Error::config("data.files", "`data.files` has no document to train on")),
        _ => Ok(Some(Box::new(files))),
    }
}

/// Packs documents into micro-batches.
pub(crate) fn packer(config: &TrainConfig, documents: Box<dyn Documents>) -> Packer {
    Packer::new(documents, config.data.packing, config.data.sequence_length, config.batch.sequences)
}

/// The first documents of a stream, with a limit per source, for samples.
pub(crate) fn first_documents(mut documents: Box<dyn Documents>, count: usize) -> Result<Vec<Document>> {
    let mut found: Vec<Document> = Vec::new();
    for _ in 0..8 * count {
        let document = documents.next()?;
        let of_source = found.iter().filter(|other| other.origin.source == document.origin.source).count();
        // Three of four of the task's documents are recall: most samples should be.
        if found.len() < count && of_source < count.div_ceil(2).max(count.saturating_sub(2)) {
            found.push(document);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_have_stars() {
        assert!(matches("model.layers.*.mlp.*", "model.layers.3.mlp.up_proj.weight"));
        assert!(matches("*", "") && matches("a*", "a") && matches("*b", "ab"));
        assert!(!matches("a*c", "ab") && !matches("a", "ab") && !matches("é*", "e"));
    }

    #[test]
    fn every_preset_is_a_model_and_an_unknown_one_lists_them() {
        for (name, _, _) in PRESETS {
            let mut config = TrainConfig::default();
            config.model.preset = Some(name.into());
            assert_eq!(model(&config).unwrap().config.vocabulary, task::VOCABULARY, "{name}");
        }
        let mut config = TrainConfig::default();
        config.model.preset = Some("huge".into());
        assert!(model(&config).unwrap_err().to_string().contains("hybrid-moe"));
    }
}
