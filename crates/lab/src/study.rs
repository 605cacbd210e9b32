//! A whole study: experiment, facts, training steps, answers.

use std::path::Path;
use std::time::Instant;

use ballast_checkpoint::jobs::Observer;
use ballast_model::{Batch, Config, Stored, memory};

use crate::answers::answers;
use crate::choices::Choice;
use crate::dump::Dump;
use crate::error::{Error, Result};
use crate::experiment::{self, Arithmetic, Contestant, Setup};
use crate::findings::{Findings, Input};
use crate::training::Steps;
use crate::{answers, facts};

/// What all studies are told.
pub struct Study<'a> {
    /// The checkpoint.
    pub path: &'a Path,
    /// It, opened.
    pub stored: &'a Stored,
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

impl<'a> Study<'a> {
    /// What each choice costs. The run in f32 is added where it is not among them.
    pub fn choices(&self, mut choices: Vec<Choice>, training: Option<Training>) -> Result<Findings> {
        let begun = Instant::now();
        choices.retain(|choice| choice.name != "f32");
        choices.insert(0, Choice::f32());
        let contestants = choices.iter().cloned().map(Contestant::Choice).collect();
        let mut findings = self.run(contestants)?;
        findings.protected = facts::protected(self.stored)?;
        findings.l2norm = facts::l2norm(&self.stored.config);
        if let Some(Training { steps, learning_rate }) = training {
            let (path, batch, observer) = (self.path, self.batch, self.observer);
            observer.steps("training", (choices.len() * steps) as u64);
            let mut found = Steps { path, batch, steps, learning_rate, observer }.run(&choices)?;
            let place = |name: &str| findings.runs.iter().position(|run| run.name == name);
            found.runs.sort_by_key(|run| place(&run.name));
            findings.training = Some(found);
        }
        findings.answers = answers(&findings);
        findings.notes = notes(&self.stored.config, self);
        findings.seconds = begun.elapsed().as_secs_f64();
        findings.peak_memory_bytes = memory::peak();
        Ok(findings)
    }

    /// Another checkpoint of the same model beside this one.
    pub fn compare(&self, name: &str, other: &Stored) -> Result<Findings> {
        let begun = Instant::now();
        if other.config != self.stored.config {
            return Err(Error::Input(format!(
                "{name}: its config.json describes another model than {}, so their tensors cannot be compared",
                self.path.display()
            )));
        }
        let contestant = Contestant::Checkpoint { name: name.into(), stored: other };
        let mut findings = self.run(vec![contestant])?;
        findings.protected = facts::protected(self.stored)?;
        findings.seconds = begun.elapsed().as_secs_f64();
        findings.peak_memory_bytes = memory::peak();
        Ok(findings)
    }

    /// Tensors that another framework wrote beside this model's.
    pub fn dump(&self, name: &str, dump: Dump, tolerance: f64) -> Result<Findings> {
        let begun = Instant::now();
        let mut findings = self.run(vec![Contestant::Dump { name: name.into(), dump, tolerance }])?;
        let run = &findings.runs[0];
        if run.sites.is_empty() && run.kl.max == 0.0 && run.gradients.is_empty() {
            return Err(Error::Input(format!(
                "{name}: none of its tensors has the name and the size of a site; `ballast trace MODEL --ids IDS --sites '*' \
                 --out FILE` writes all names"
            )));
        }
        findings.seconds = begun.elapsed().as_secs_f64();
        findings.peak_memory_bytes = memory::peak();
        Ok(findings)
    }

    fn run(&self, contestants: Vec<Contestant<'_>>) -> Result<Findings> {
        let Study { stored, batch, reference, gradients, observer, .. } = *self;
        batch.check(stored.config.vocabulary)?;
        let setup = Setup { stored, batch, reference, backward: gradients, observer };
        observer.steps("running", experiment::units(&setup, contestants.len()));
        let mut findings = experiment::run(&setup, contestants)?;
        findings.model = self.path.display().to_string();
        findings.model_type = stored.config.model_type.clone();
        findings.parameters = stored.specs.all().map(|spec| spec.len() as u64).sum();
        findings.layers = stored.config.layers.len();
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
             by mask or window."
                .into(),
        );
    }
    if config.has_indexer() {
        notes.push(
            "The indexers' weights have no gradient here: the language loss does not reach them. Equal scores: the earliest key \
             is chosen."
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

/// One line that says what does most damage.
pub fn headline(findings: &Findings) -> String {
    answers::headline(findings)
}
