//! The training loop: steps, evaluations, samples, checkpoints, and the report, also after an error.

use std::path::{Path, PathBuf};
use std::time::Instant;

use ballast_files::jobs::Observer;
use ballast_format::count;
use ballast_model::{SaveOptions, memory};

use crate::error::{Error, Result};
use crate::metrics::{self, Evaluation, Event, MetricsEntry, MetricsWriter, ROLLBACK, RankUse};
use crate::places;
use crate::plan::MemoryPlan;
use crate::report::{self, PlanRow, Report, Sample};
use crate::state;
use crate::tensorboard::EventWriter;
use crate::trainer::{Attempt, Trainer};

/// Observes a run.
pub trait Watcher: Observer {
    /// Receives a metrics entry.
    fn record(&self, record: &MetricsEntry);

    /// Receives sample answers of the model.
    fn samples(&self, samples: &[Sample]);

    /// Returns true if the run should save and stop.
    fn should_stop(&self) -> bool;
}

/// Result of a run.
#[derive(Debug)]
pub struct Summary {
    /// Number of steps taken.
    pub step: u64,
    /// True if the run was stopped before its last step.
    pub stopped: bool,
    /// The last evaluation.
    pub evaluation: Option<Evaluation>,
    /// Sample answers of the model at the end.
    pub samples: Vec<Sample>,
    /// Summary of the protected-tensor check.
    pub ledger: String,
    /// Path of the finished model or adapters; for a stopped run, of its newest checkpoint, if any.
    pub model: Option<PathBuf>,
    /// Step and folder of the newest checkpoint.
    pub checkpoint: Option<(u64, PathBuf)>,
    /// The error that kept the run from saving its last step.
    pub save_failure: Option<Error>,
    /// Step and error of every checkpoint that could not be written, the last step among them.
    pub failed_saves: Vec<(u64, String)>,
    /// Path of the report, if it could be written.
    pub report: Option<PathBuf>,
    /// Training time of this process in seconds.
    pub seconds: f64,
    /// Tokens per second over the training time.
    pub tokens_per_second: f64,
    /// Peak memory of the process in bytes.
    pub peak_memory: u64,
}

/// Metrics and event files of a run. A failed write does not end the run and is reported to the watcher. Only the first
/// rank has one; on the others it does nothing.
struct Journal<'a> {
    metrics: Option<MetricsWriter>,
    /// Number of entries lost since the last one that was written.
    lost: u64,
    tensorboard: Option<EventWriter>,
    watcher: &'a dyn Watcher,
}

impl Journal<'_> {
    fn write(&mut self, record: MetricsEntry) {
        if self.metrics.is_none() {
            return;
        }
        self.watcher.record(&record);
        let step = record.step();
        if let Err(error) = self.write_metrics(&record) {
            self.lost += 1;
            if self.lost == 1 {
                self.tell(step, "metrics failed", format!("{error}; the run continues without this record"));
            }
        }
        let written = self.tensorboard.as_mut().map(|events| write_events(events, &record));
        if let Some(Err(error)) = written {
            self.tensorboard = None;
            self.tell(
                step,
                "tensorboard failed",
                format!("{error}; the run continues without TensorBoard files"),
            );
        }
    }

    fn write_metrics(&mut self, record: &MetricsEntry) -> Result {
        let Some(metrics) = &mut self.metrics else { return Ok(()) };
        if self.lost > 0 {
            let text = format!("{} records before this one could not be written", self.lost);
            metrics.write(&MetricsEntry::Event(Event { step: record.step(), what: "lost".into(), text }))?;
            self.lost = 0;
        }
        metrics.write(record)
    }

    /// Flushes the metrics: a run that is resumed from the next checkpoint repeats the steps after it, and no step
    /// before it may be missing.
    fn sync(&self, step: u64) {
        if let Some(Err(error)) = self.metrics.as_ref().map(MetricsWriter::sync) {
            self.tell(step, "metrics failed", format!("{error}; a loss of power may take records"));
        }
    }

    /// Tells the watcher alone.
    fn tell(&self, step: u64, what: &str, text: String) {
        if self.metrics.is_none() {
            return;
        }
        self.watcher.record(&MetricsEntry::Event(Event { step, what: what.into(), text }));
    }
}

fn write_events(events: &mut EventWriter, record: &MetricsEntry) -> Result {
    match record {
        MetricsEntry::Step(step) => {
            let speed = step.tokens as f64 / step.seconds.max(1e-9);
            events.scalar(step.step, "train/loss", step.loss)?;
            if let Some(cross_entropy) = step.cross_entropy {
                events.scalar(step.step, "train/cross_entropy", cross_entropy)?;
            }
            events.scalar(step.step, "train/learning_rate", step.learning_rate)?;
            events.scalar(step.step, "train/gradient_norm", step.gradient_norm)?;
            events.scalar(step.step, "train/tokens_per_second", speed)?;
            events.scalar(step.step, "memory/peak_bytes", step.peak_memory as f64)?;
            if let Some(RankUse { waiting, peak_memory, sent }) = &step.ranks {
                for (rank, (waiting, memory)) in waiting.iter().zip(peak_memory).enumerate() {
                    events.scalar(step.step, &format!("ranks/waiting/{rank}"), *waiting)?;
                    events.scalar(step.step, &format!("ranks/peak_bytes/{rank}"), *memory as f64)?;
                }
                for (kind, bytes) in sent {
                    events.scalar(step.step, &format!("ranks/sent_bytes/{kind}"), *bytes as f64)?;
                }
            }
            for (group, norm) in &step.group_norms {
                events.scalar(step.step, &format!("gradient_norm/{group}"), *norm)?;
            }
        }
        MetricsEntry::Evaluation(evaluation) => {
            events.scalar(evaluation.step, "validation/loss", evaluation.loss)?;
            events.scalar(evaluation.step, "validation/accuracy", evaluation.accuracy)?;
        }
        MetricsEntry::Event(event) => {
            if event.what == ROLLBACK {
                events.resume(event.step)?;
            }
            events.text(event.step, &format!("events/{}", event.what), &event.text)?
        }
    }
    events.flush()
}

/// Result of the loop.
struct Ended {
    /// Number of tokens read.
    tokens: u64,
    stopped: bool,
    /// The error that kept the run from saving its last step.
    save_failure: Option<Error>,
    /// The last evaluation.
    evaluation: Option<Evaluation>,
}

impl Trainer {
    /// Trains to the last step, or until the watcher asks to stop.
    pub fn run(&mut self, watcher: &dyn Watcher) -> Result<Summary> {
        let resumed = (self.step > 0).then_some(self.step);
        let opened = self.ranks.on_first(|| self.open_journal(resumed, watcher))?;
        let mut journal = opened.unwrap_or(Journal { metrics: None, lost: 0, tensorboard: None, watcher });
        if let Some(step) = resumed {
            let text = format!("resumed from the checkpoint of step {step}");
            journal.write(MetricsEntry::Event(Event { step, what: "resume".into(), text }));
        }
        for text in std::mem::take(&mut self.notices) {
            journal.write(MetricsEntry::Event(Event { step: self.step, what: "resume".into(), text }));
        }
        let started = Instant::now();
        let mut samples = Vec::new();
        let ended = self.train(&mut journal, &mut samples, watcher).and_then(|ended| {
            let seconds = started.elapsed().as_secs_f64();
            let model = match ended.stopped {
                true => self.store.newest().map(|(_, model)| model),
                false => Some(self.publish(watcher)?),
            };
            Ok((ended, seconds, model))
        });
        // Also after an error, when it is wanted most; a failed report hides neither the result nor the
        // error.
        let report = match self.ranks.world.is_first() {
            true => self.write_report(&samples).map(Some),
            false => Ok(None),
        };
        if let Err(error) = &report {
            journal.tell(self.step, "report failed", error.to_string());
        }
        let (ended, seconds, model) = ended?;
        Ok(Summary {
            step: self.step,
            stopped: ended.stopped,
            evaluation: ended.evaluation,
            samples,
            ledger: self.ledger.summary(),
            model,
            checkpoint: self.store.newest().map(|(step, _)| (step, self.store.path(step))),
            save_failure: ended.save_failure,
            failed_saves: std::mem::take(&mut self.failed_saves),
            report: report.ok().flatten(),
            seconds,
            tokens_per_second: ended.tokens as f64 / seconds.max(1e-9),
            peak_memory: memory::peak().unwrap_or(0),
        })
    }

    /// Opens the files of the journal.
    fn open_journal<'w>(&self, resumed: Option<u64>, watcher: &'w dyn Watcher) -> Result<Journal<'w>> {
        let out = &self.config.out;
        state::replace_file(&out.join("config.toml"), self.config.to_toml()?.as_bytes())?;
        let metrics = MetricsWriter::open(&out.join("metrics.jsonl"), resumed.or(Some(0)))?;
        let mut tensorboard =
            self.config.tensorboard.then(|| EventWriter::create(&out.join("tensorboard"))).transpose()?;
        if let (Some(events), Some(step)) = (&mut tensorboard, resumed) {
            events.resume(step)?;
        }
        let destroyed = metrics.destroyed();
        let mut journal = Journal { metrics: Some(metrics), lost: 0, tensorboard, watcher };
        if destroyed > 0 {
            let text = format!(
                "{destroyed} lines of metrics.jsonl were destroyed, as by a loss of power, and are removed"
            );
            let step = resumed.unwrap_or(0);
            journal.write(MetricsEntry::Event(Event { step, what: "metrics destroyed".into(), text }));
        }
        Ok(journal)
    }

    fn train(
        &mut self,
        journal: &mut Journal<'_>,
        samples: &mut Vec<Sample>,
        watcher: &dyn Watcher,
    ) -> Result<Ended> {
        let due = |every: u64, step: u64| every > 0 && step.is_multiple_of(every);
        let (mut tokens, mut evaluation, mut save_failure) = (0, None, None);
        let steps = self.config.steps;
        while self.step < steps {
            if self.ranks.any(watcher.should_stop())? {
                let save_failure = self.checkpoint(journal, watcher)?;
                return Ok(Ended { tokens, stopped: true, save_failure, evaluation });
            }
            let mut events = Vec::new();
            let attempt = self.attempt(&mut |event| events.push(event));
            for event in events {
                journal.write(MetricsEntry::Event(event));
            }
            let Attempt::Taken(step) = attempt? else {
                // A rollback undoes the samples and the evaluation of later steps.
                samples.retain(|sample: &Sample| sample.step <= self.step);
                evaluation = evaluation.filter(|found: &Evaluation| found.step <= self.step);
                continue;
            };
            tokens += step.tokens;
            journal.write(MetricsEntry::Step(*step));
            let last = self.step == steps;
            if last || due(self.config.evaluation.every, self.step) {
                evaluation = self.measure(journal)?;
            }
            if last || due(self.config.samples.every, self.step) {
                let new = self.sample()?;
                if self.ranks.world.is_first() {
                    watcher.samples(&new);
                }
                samples.extend(new);
            }
            if last || due(self.config.checkpoints.every, self.step) {
                save_failure = self.checkpoint(journal, watcher)?;
            }
        }
        self.ledger.check(&self.model, "end")?;
        self.check_live("end")?;
        if evaluation.is_none() {
            evaluation = self.evaluate()?;
        }
        Ok(Ended { tokens, stopped: false, save_failure, evaluation })
    }

    /// Evaluates on held-out data and records the result.
    fn measure(&mut self, journal: &mut Journal<'_>) -> Result<Option<Evaluation>> {
        let evaluation = self.evaluate()?;
        match &evaluation {
            Some(evaluation) => {
                if is_better(evaluation.loss, self.best) {
                    self.best = Some((self.step, evaluation.loss));
                }
                journal.write(MetricsEntry::Evaluation(evaluation.clone()));
            }
            None if self.validation.is_some() && self.config.evaluation.batches > 0 => {
                let text = "none of the held-out tokens is trained on, so there is no score".into();
                journal.write(MetricsEntry::Event(Event { step: self.step, what: "no score".into(), text }));
            }
            None => {}
        }
        Ok(evaluation)
    }

    /// Writes a checkpoint. If that fails, the older ones are intact, and the run continues with a notice;
    /// returns the error.
    fn checkpoint(&mut self, journal: &mut Journal<'_>, watcher: &dyn Watcher) -> Result<Option<Error>> {
        self.optimizer.check(&self.model)?;
        self.ledger.check(&self.model, "save")?;
        let mut state = self.state()?;
        let step = self.step;
        let event = |what: &str, text: String| MetricsEntry::Event(Event { step, what: what.into(), text });
        let division = self.division();
        journal.sync(step);
        match self.store.save(&mut state, &self.model, &self.optimizer, &self.sidecars, watcher, &division) {
            Ok(_) => {
                // The first rank has read the file back.
                let ledger =
                    self.ranks.value_of_first(self.ranks.world.is_first().then_some(&state.ledger))?;
                self.ledger = ledger;
                let best = self.best.map(|(step, _)| step);
                if !self.ranks.world.is_first() {
                    return Ok(None);
                }
                if let Err(error) = self.store.prune(&self.config.checkpoints, best) {
                    let text = format!("an old checkpoint could not be removed: {error}");
                    journal.write(event("prune failed", text));
                }
                Ok(None)
            }
            Err(error @ Error::Diverged(_)) => Err(error),
            Err(error) => {
                let text = format!("the checkpoint of step {step} could not be written: {error}");
                journal.write(event("save failed", text));
                self.failed_saves.push((step, error.to_string()));
                Ok(Some(error))
            }
        }
    }

    /// Writes the finished model to `OUT/model`, or the adapters to `OUT/adapter`.
    fn publish(&self, watcher: &dyn Watcher) -> Result<PathBuf> {
        let path = places::result(&self.config);
        let shared = self.ranks.shard.divides_weights() && self.config.lora.is_none();
        let weights = shared.then(|| self.config.out.join(".weights.safetensors"));
        if let Some(weights) = &weights {
            if self.ranks.world.is_first() {
                // A leftover of a run that was killed.
                let _ = std::fs::remove_file(weights);
            }
            self.division().write_weights(&self.model, weights)?;
        }
        self.ranks.on_first(|| {
            let written = self.publish_model(&path, weights.as_deref(), watcher);
            if let Some(weights) = &weights {
                let _ = std::fs::remove_file(weights);
            }
            written
        })?;
        Ok(path)
    }

    fn publish_model(&self, path: &Path, weights: Option<&Path>, watcher: &dyn Watcher) -> Result {
        let force = path.exists();
        if self.config.lora.is_some() {
            return Ok(self.model.write_adapters(path, force)?);
        }
        let options = SaveOptions { files: &self.sidecars, weights, force, ..SaveOptions::default() };
        self.model.save_with(path, &options, watcher)?;
        Ok(())
    }

    fn write_report(&self, samples: &[Sample]) -> Result<PathBuf> {
        let out = &self.config.out;
        let path = out.join("report.html");
        let records = metrics::read(&out.join("metrics.jsonl"))?;
        let config = self.config.to_toml()?;
        let plan = self.memory_plan()?;
        let report = Report {
            title: &format!("{} \u{2013} {}", out.display(), self.model.config.model_type),
            summary: self.facts(),
            records: &records,
            ledger: report::ledger_rows(&self.ledger),
            plan: plan
                .rows
                .iter()
                .map(|(what, bytes)| PlanRow { what: what.clone(), bytes: *bytes })
                .collect(),
            measured_peak: memory::peak().unwrap_or(0),
            samples: samples.to_vec(),
            config: &config,
        };
        std::fs::write(&path, report::html(&report)).map_err(Error::io(&path, "write"))?;
        Ok(path)
    }

    /// Memory plan of a step.
    pub fn memory_plan(&self) -> Result<MemoryPlan> {
        let (rank, ranks) = (self.ranks.world.rank(), self.ranks.size());
        let mut plan = MemoryPlan::for_rank(&self.config, &self.model, self.model.precision(), rank, ranks)?;
        plan.rows.insert(0, ("the program and its code".into(), self.program_bytes));
        Ok(plan)
    }

    fn facts(&self) -> Vec<(String, String)> {
        let fact = |name: &str, value: String| (name.to_string(), value);
        let parameters: usize = self.model.specs.all().map(|spec| spec.len()).sum();
        let learned: usize = self.optimizer.slots.iter().map(|slot| slot.elements()).sum();
        let mut facts = vec![
            fact("Model", self.model.config.model_type.clone()),
            fact("Parameters", format!("{}, {} of them trained", count(parameters), count(learned))),
            fact("Precision", self.model.precision().name.clone()),
            fact("Steps", format!("{} of {}", self.step, self.config.steps)),
            fact("Protected tensors", self.ledger.summary()),
            fact("Threads", rayon::current_num_threads().to_string()),
        ];
        if self.sentinel.untrained > 0 {
            facts
                .push(fact("Steps skipped without a token to train on", self.sentinel.untrained.to_string()));
        }
        if let Some((step, loss)) = self.best {
            facts.push(fact("Best held-out loss", format!("{loss:.4} at step {step}")));
        }
        for (step, site) in &self.ledger.escalations {
            facts.push(fact("Raised to f32", format!("{site} at step {step}")));
        }
        facts
    }
}

/// Returns true if a loss is the best so far. A NaN never is: no later loss would be below it.
fn is_better(loss: f64, best: Option<(u64, f64)>) -> bool {
    loss.is_finite() && best.is_none_or(|(_, best)| loss < best)
}

#[cfg(test)]
mod tests {
    use ballast_files::jobs::Silent;

    use super::*;
    use crate::config::TrainConfig;

    impl Watcher for Silent {
        fn record(&self, _: &MetricsEntry) {}

        fn samples(&self, _: &[Sample]) {}

        fn should_stop(&self) -> bool {
            false
        }
    }

    #[test]
    fn a_tokenizer_file_that_cannot_be_written_leaves_the_finished_model_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let config = TrainConfig { out: folder.path().join("run"), ..TrainConfig::default() };
        let mut trainer = Trainer::new(config).unwrap();
        let model = folder.path().join("run/model");
        let files = || {
            let mut names: Vec<_> =
                std::fs::read_dir(&model).unwrap().flatten().map(|entry| entry.file_name()).collect();
            names.sort();
            names
        };
        let complete = std::mem::take(&mut trainer.sidecars);
        let mut incomplete = complete.clone();
        // A file in a folder that does not exist.
        incomplete.push(("none/vocab.json".into(), Vec::new()));
        trainer.sidecars = incomplete.clone();
        let error = trainer.publish(&Silent).unwrap_err().to_string();
        assert!(error.contains("run/model/none/vocab.json: cannot write"), "{error}");
        assert!(!model.exists());
        trainer.sidecars = complete;
        trainer.publish(&Silent).unwrap();
        let published = files();
        for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
            assert!(published.iter().any(|found| found == name), "{name}: {published:?}");
        }
        trainer.sidecars = incomplete;
        assert!(trainer.publish(&Silent).is_err());
        assert_eq!(files(), published);
    }

    #[test]
    fn a_loss_that_is_not_finite_is_never_the_best() {
        assert!(!is_better(f64::NAN, None) && !is_better(f64::INFINITY, None));
        assert!(is_better(2.0, None) && is_better(1.0, Some((3, 2.0))) && !is_better(2.0, Some((3, 2.0))));
    }
}
