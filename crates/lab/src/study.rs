//! A whole study: experiment, facts, training steps, answers.

use std::collections::HashSet;
use std::path::Path;
use std::time::Instant;

use ballast_checkpoint::jobs::Observer;
use ballast_model::{Batch, Config, LazyCheckpoint, Ties, memory};
use ballast_report::format::plural;

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

/// What all studies are told.
pub struct Study<'a> {
    /// The checkpoint.
    pub path: &'a Path,
    /// It, opened.
    pub checkpoint: &'a LazyCheckpoint,
    /// What it reads.
    pub batch: &'a Batch,
    /// The same in words.
    pub input: Input,
    /// What the reference computes in.
    pub reference: Arithmetic,
    /// Whether gradients are compared too.
    pub gradients: bool,
    /// Progress. Phases count parts of the model, then training steps.
    pub observer: &'a dyn Observer,
}

/// Training steps of a study.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct Training {
    pub steps: usize,
    pub learning_rate: f64,
}

/// What a study of choices can have beside the runs. Both need the whole model in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct More {
    /// Training steps.
    pub training: Option<Training>,
    /// Whether the input is also read token by token.
    pub decoding: bool,
}

impl<'a> Study<'a> {
    /// What each choice costs. The run in f32 is added where it is not among them.
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

    /// Another checkpoint of the same model beside this one.
    pub fn compare(&self, name: &str, other: &LazyCheckpoint) -> Result<Findings> {
        let begun = Instant::now();
        if other.config != self.checkpoint.config {
            return Err(Error::Input(format!(
                "{name}: its config.json describes another model than {}, so their tensors cannot be compared",
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

    /// Tensors that another framework wrote beside this model's; equal indexer scores are resolved as torch does, and gradients
    /// are those of the language loss alone.
    pub fn dump(&self, name: &str, dump: Dump, tolerance: f64) -> Result<Findings> {
        let begun = Instant::now();
        let (names, logits): (Vec<String>, bool) =
            (dump.names().map(String::from).collect(), dump.has_logits());
        let contestant = Contestant::Dump { name: name.into(), dump, tolerance };
        let mut findings = self.run(vec![contestant], Ties::Torch, Backward::Language)?;
        let run = &findings.runs[0];
        if run.sites.is_empty() && !logits && run.gradients.is_empty() {
            return Err(Error::Input(format!(
                "{name}: none of its tensors has the name and the size of a site; `ballast trace MODEL --ids IDS --sites '*' \
                 --out FILE` writes all names"
            )));
        }
        findings.notes = self.left_aside(run, &names).into_iter().collect();
        findings.seconds = begun.elapsed().as_secs_f64();
        findings.peak_memory_bytes = memory::peak();
        Ok(findings)
    }

    /// Which of another framework's tensors were compared with nothing.
    fn left_aside(&self, run: &Run, names: &[String]) -> Option<String> {
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
        (!others.is_empty()).then(|| {
            format!("Compared with nothing: {} ({few}{more}).", plural(others.len() as u64, "tensor"))
        })
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

/// What a reader must know.
fn notes(config: &Config, study: &Study<'_>) -> Vec<String> {
    let mut notes = vec![
        "An error is RMS(a - b) / RMS(b), b being the reference's tensor.".to_string(),
        "Single choices are made in f32 storage: everything else is f32, so that what is seen is theirs alone.".into(),
    ];
    if config.layers.iter().any(|layer| !matches!(layer.mixer, ballast_model::config::Mixer::Linear(_))) {
        notes.push(
            "Attention logits are those of up to 64 queries by head, evenly over the input, with all keys that are not hidden \
             by mask, window or indexer (of an input whose scores are too many to look at, over 4,096 tokens, also those that an \
             indexer hides)."
                .into(),
        );
    }
    if config.has_indexer() {
        notes.push(
            "The language loss does not reach the indexers' weights: their gradients are those of their own loss (sparse stage, \
             factor 1), and no part of the error of all gradients. Equal scores: the earliest key is chosen."
                .into(),
        );
    }
    if study.batch.tokens() < 256 {
        notes.push(format!(
            "The input has {} tokens: percentiles and shares are coarse.",
            study.batch.tokens()
        ));
    }
    notes
}
