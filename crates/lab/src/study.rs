//! Studies: experiment, facts, training steps, decoding, answers.

use std::collections::HashSet;
use std::path::Path;
use std::time::Instant;

use ballast_files::jobs::Observer;
use ballast_format::plural;
use ballast_model::{Batch, Config, LazyCheckpoint, Ties, memory};

use crate::answers::answers;
use crate::choices::Choice;
use crate::decoding::Decoding;
use crate::dump::Dump;
use crate::error::{Error, Result};
use crate::experiment::{self, Arithmetic, Contestant, Setup};
use crate::facts;
use crate::findings::{Findings, Input, Run};
use crate::reference::Backward;
use crate::training::Steps;

/// Setup of a study.
pub struct Study<'a> {
    /// Path of the checkpoint.
    pub path: &'a Path,
    /// The opened checkpoint.
    pub checkpoint: &'a LazyCheckpoint,
    /// Input tokens.
    pub batch: &'a Batch,
    /// Description of the input.
    pub input: Input,
    /// Arithmetic of the reference.
    pub reference: Arithmetic,
    /// Compares gradients too.
    pub gradients: bool,
    /// Progress. Phases count parts of the model, then training steps, then decoded tokens.
    pub observer: &'a dyn Observer,
}

/// Training steps of a study.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct Training {
    pub steps: usize,
    pub learning_rate: f64,
}

/// Optional parts of a study of choices. Both need the whole model in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct More {
    /// Training steps.
    pub training: Option<Training>,
    /// Also decodes the input token by token.
    pub decoding: bool,
}

impl<'a> Study<'a> {
    /// Measures the cost of each choice. The f32 run is always added.
    pub fn choices(&self, mut choices: Vec<Choice>, more: More) -> Result<Findings> {
        let begun = Instant::now();
        choices.retain(|choice| choice.name != "f32");
        let all = [Choice::f32()].into_iter().chain(choices.iter().cloned());
        let contestants: Vec<Contestant<'_>> = all.map(Contestant::Choice).collect();
        let runs = contestants.len();
        let mut findings = self.run(contestants, Ties::Earliest, Backward::WithIndexers)?;
        findings.protected = facts::protected(self.checkpoint)?;
        findings.l2norm = facts::l2norm(&self.checkpoint.config);
        let (path, batch, observer) = (self.path, self.batch, self.observer);
        if let Some(Training { steps, learning_rate }) = more.training {
            observer.steps("training", (runs * steps) as u64);
            let mut found = Steps { path, batch, steps, learning_rate, observer }.run(&choices)?;
            let place = |name: &str| findings.runs.iter().position(|run| run.name == name);
            found.runs.sort_by_key(|run| place(&run.name));
            findings.training = Some(found);
        }
        if more.decoding {
            observer.steps("decoding", (choices.len() * batch.tokens()) as u64);
            findings.decoding = Decoding { path, batch, observer }.run(&choices)?;
        }
        findings.answers = answers(&findings);
        findings.notes = notes(&self.checkpoint.config, self);
        findings.seconds = begun.elapsed().as_secs_f64();
        findings.peak_memory_bytes = memory::peak();
        Ok(findings)
    }

    /// Compares another checkpoint of the same model with this one.
    pub fn compare(&self, name: &str, other: &LazyCheckpoint) -> Result<Findings> {
        let begun = Instant::now();
        if other.config != self.checkpoint.config {
            return Err(Error::Input(format!(
                "{name}: config.json describes another model than that of {}; only checkpoints of the same model can be compared",
                self.path.display()
            )));
        }
        let contestant = Contestant::Checkpoint { name: name.into(), checkpoint: other };
        let mut findings = self.run(vec![contestant], Ties::Earliest, Backward::WithIndexers)?;
        findings.protected = facts::protected(self.checkpoint)?;
        findings.seconds = begun.elapsed().as_secs_f64();
        findings.peak_memory_bytes = memory::peak();
        Ok(findings)
    }

    /// Compares tensors that another framework wrote with this model's. Ties of indexer scores are resolved
    /// as torch does, and gradients are those of the language loss alone.
    pub fn dump(&self, name: &str, dump: Dump, tolerance: f64) -> Result<Findings> {
        let begun = Instant::now();
        let (names, logits): (Vec<String>, bool) =
            (dump.names().map(String::from).collect(), dump.has_logits());
        let contestant = Contestant::Dump { name: name.into(), dump, tolerance };
        let mut findings = self.run(vec![contestant], Ties::Torch, Backward::Language)?;
        let run = &findings.runs[0];
        if run.sites.is_empty() && !logits && run.gradients.is_empty() {
            return Err(Error::Input(format!(
                "{name}: no tensor has the name and size of a site; `ballast trace MODEL --ids IDS --sites '*' --out FILE` \
                 writes all sites"
            )));
        }
        findings.notes = self.not_compared(run, &names).into_iter().collect();
        findings.seconds = begun.elapsed().as_secs_f64();
        findings.peak_memory_bytes = memory::peak();
        Ok(findings)
    }

    /// A note on the tensors of a dump that were not compared.
    fn not_compared(&self, run: &Run, names: &[String]) -> Option<String> {
        let mut known: HashSet<String> = run.sites.iter().map(|site| site.site.clone()).collect();
        known.insert("logits".into());
        for spec in
            self.checkpoint.specs.all().filter(|spec| run.gradients.iter().any(|g| g.tensor == spec.name))
        {
            known
                .extend([format!("grad.{}", spec.name), format!("grad.{}", self.checkpoint.full_name(spec))]);
        }
        let others: Vec<&str> =
            names.iter().map(String::as_str).filter(|name| !known.contains(*name)).collect();
        let few = others.iter().take(5).copied().collect::<Vec<_>>().join(", ");
        let more = if others.len() > 5 { ", ..." } else { "" };
        (!others.is_empty())
            .then(|| format!("Not compared: {} ({few}{more}).", plural(others.len(), "tensor")))
    }

    fn run(&self, contestants: Vec<Contestant<'_>>, ties: Ties, of_interest: Backward) -> Result<Findings> {
        let Study { checkpoint, batch, reference, gradients, observer, .. } = *self;
        batch.check(checkpoint.config.vocabulary)?;
        let backward = if gradients { of_interest } else { Backward::None };
        let setup = Setup { checkpoint, batch, reference, ties, backward, observer };
        observer.steps("running", experiment::units(&setup, contestants.len()));
        let mut findings = experiment::run(&setup, contestants)?;
        findings.model = self.path.display().to_string();
        findings.model_type = checkpoint.config.model_type.clone();
        findings.parameters = checkpoint.specs.all().map(|spec| spec.len() as u64).sum();
        findings.layers = checkpoint.config.layers.len();
        findings.input = self.input.clone();
        Ok(findings)
    }
}

/// Notes for the reader.
fn notes(config: &Config, study: &Study<'_>) -> Vec<String> {
    let mut notes = vec![
        "The error of a tensor a is RMS(a - b) / RMS(b), where b is the reference's tensor.".to_string(),
        "Single choices use f32 for everything else, so their whole error is their own.".into(),
    ];
    if config.layers.iter().any(|layer| !matches!(layer.mixer, ballast_model::config::Mixer::Linear(_))) {
        notes.push(
            "Attention logits are those of up to 64 queries per head, spread evenly over the input, with all keys that mask, window \
             and indexer leave visible. For inputs over 4,096 tokens, keys that an indexer hides are included."
                .into(),
        );
    }
    if config.has_indexer() {
        notes.push(
            "The language loss does not reach the indexers' weights. Their gradients are those of the indexer loss (sparse stage, \
             factor 1) and not part of the total gradient error. Of equal scores, the earliest key is chosen."
                .into(),
        );
    }
    if study.batch.tokens() < 256 {
        notes.push(format!(
            "The input has only {} tokens, so percentiles and percentages are coarse.",
            study.batch.tokens()
        ));
    }
    notes
}
