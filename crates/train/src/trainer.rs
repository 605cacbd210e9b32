//! A training step, and the handling of faults.
//!
//! ```text
//! protected tensors are unchanged              else stop
//! micro-batches have tokens to train on        else skip; if no data has any, stop
//! forward and backward, weighted by tokens
//! loss, gradients and norm are finite          else replay, name the site; abort, skip, roll back or escalate
//! new values and optimizer state are finite    else name the parameter; abort, skip or roll back
//! loss and norm are no spike                   else report or skip
//! clip, update, record the protected tensors
//! ```
//! Nothing changes before all checks have passed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use ballast_checkpoint::tensor_file::write_integers;
use ballast_kernels::Rounding;
use ballast_model::params::Grads;
use ballast_model::{LossOptions, Model, Precision, Recompute, memory};

use crate::config::{OnFault, OnSpike, TrainConfig, check_resume};
use crate::data::{Cursor, Document, FileCursor, MicroBatch, Packer, Split, TextEncoder};
use crate::error::{Error, Result};
use crate::ledger::Ledger;
use crate::metrics::{Event, ROLLBACK, Step};
use crate::optimizer::{Norms, Optimizer};
use crate::places;
use crate::plan::MemoryPlan;
use crate::schedule::learning_rate;
use crate::sentinel::{self, Fault, Sentinel};
use crate::setup;
use crate::state::{self, State, Store};

/// A training run: everything that the next step depends on.
pub struct Trainer {
    /// Configuration.
    pub config: TrainConfig,
    /// The model.
    pub model: Model,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Checksums of the protected tensors.
    pub ledger: Ledger,
    /// Fault-detection statistics.
    pub sentinel: Sentinel,
    /// Number of steps taken.
    pub step: u64,
    /// Step and loss of the best evaluation.
    pub best: Option<(u64, f64)>,
    /// Checkpoint store.
    pub store: Store,
    /// The tokenizer.
    pub encoder: Arc<TextEncoder>,
    /// Files to write beside the weights.
    pub(crate) sidecars: Vec<(String, Vec<u8>)>,
    /// Held-out micro-batches, if any.
    pub(crate) validation: Option<Packer>,
    /// Held-out documents for samples.
    pub(crate) sample_documents: Vec<Document>,
    /// Start positions of batches that a rollback excludes.
    left_out: Vec<Cursor>,
    /// Start of the current sequence of steps without trained tokens.
    untrained_since: Option<Cursor>,
    /// Checksum of the tokenizer files.
    tokenizer: u64,
    /// Remarks about the resumed checkpoint, for the start of the run.
    pub(crate) notices: Vec<String>,
    /// Memory of the process before the model was made, in bytes.
    pub(crate) program_bytes: u64,
    train: Packer,
    grads: Grads,
}

/// Outcome of an attempt at a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Attempt {
    /// The step was taken.
    Taken(Box<Step>),
    /// The step was skipped, and the run continues.
    NotTaken,
}

/// Losses of a step, per token.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Losses {
    language: f64,
    indexer: f64,
    balance: f64,
}

impl Losses {
    fn is_finite(&self) -> bool {
        self.language.is_finite() && self.indexer.is_finite() && self.balance.is_finite()
    }
}

/// The reason that a step cannot be taken.
enum Trouble {
    /// A site has non-finite values.
    Site(Box<Fault>),
    /// Loss or gradients were non-finite, but finite when the step was repeated.
    Disturbed(String),
    /// The update would make a parameter or its optimizer state non-finite.
    Update(String),
}

impl Trainer {
    /// Starts a new run.
    pub fn new(mut config: TrainConfig) -> Result<Trainer> {
        config.check()?;
        places::check_new(&config)?;
        // Fixed now, so that a resumed run with more steps has the same warm-up.
        config.schedule.warmup = config.schedule.warmup.min(config.steps);
        let store = Store::open(&config.out)?;
        if !store.steps().is_empty() {
            let problem =
                format!("{} has checkpoints of a run; resume it or set another `out`", config.out.display());
            return Err(Error::Config(problem));
        }
        let program = memory::current().unwrap_or(0);
        let model = setup::model(&config)?;
        Trainer::build(config, store, model, program)
    }

    /// Resumes the run in `out` from its last checkpoint. `settings` change its configuration where
    /// [`on_resume`] allows it.
    ///
    /// [`on_resume`]: crate::config::on_resume
    pub fn resume(out: &Path, settings: &[String]) -> Result<Trainer> {
        let none = || {
            let problem = "no checkpoint to resume from; start the run without --resume".into();
            Error::Resume { path: out.into(), problem }
        };
        if !out.join("checkpoints").is_dir() {
            return Err(none());
        }
        let store = Store::open(out)?;
        let step = store.steps().pop().ok_or_else(none)?;
        let checkpoint = store.path(step);
        let state = state::read_state(&checkpoint)?;
        let table: toml::Table = state.config.parse().map_err(|error| Error::Resume {
            path: checkpoint.join("state.json"),
            problem: format!("invalid configuration: {error}"),
        })?;
        let saved = TrainConfig::from_table(table.clone(), &[], None)?;
        let config = TrainConfig::from_table(table, settings, None)?;
        let comparable = check_resume(&saved, &config)?;
        if config.steps < step {
            let problem = format!(
                "`steps` is {}, and the run has taken {step} already; set a larger value",
                config.steps
            );
            return Err(Error::Config(problem));
        }
        let config = TrainConfig { out: out.to_path_buf(), ..config };
        places::check_resumed(&config)?;
        // Built from the original source, not from a training checkpoint: those may be removed while the run
        // still reads tensors that the model carries along.
        let program = memory::current().unwrap_or(0);
        let model = setup::model(&config)?;
        let mut trainer = Trainer::build(config, store, model, program)?;
        trainer.check_same_text(&checkpoint, &state)?;
        trainer.restore(&checkpoint, state)?;
        trainer.best = trainer.best.filter(|_| comparable);
        Ok(trainer)
    }

    /// Returns an error if tokenizer or held-out documents differ from the saved run. The cursor checks the
    /// training data.
    fn check_same_text(&self, checkpoint: &Path, state: &State) -> Result {
        if state.tokenizer.is_some_and(|saved| saved != self.tokenizer) {
            let problem = format!(
                "saved with another tokenizer than {}; resume with the same files",
                self.encoder.tokenizer.file().display()
            );
            return Err(Error::Resume { path: checkpoint.join("state.json"), problem });
        }
        let Some(path) = &self.config.data.validation else { return Ok(()) };
        self.validation_file()
            .iter()
            .zip(&state.validation)
            .try_for_each(|(now, saved)| now.check_same(path, saved))
    }

    /// The file of held-out documents, if there is one.
    fn validation_file(&self) -> Vec<FileCursor> {
        let packer = self.validation.as_ref().filter(|_| self.config.data.validation.is_some());
        let files = packer.map_or(Vec::new(), |packer| packer.cursor().files);
        files.into_iter().map(|file| FileCursor { taken: 0, ..file }).collect()
    }

    /// Builds a run from a model in f32.
    fn build(config: TrainConfig, store: Store, mut model: Model, program_bytes: u64) -> Result<Trainer> {
        refuse_impossible(&model)?;
        let mut ledger = Ledger::new(&model, model.precision());
        ledger.check(&model, "build")?;
        let precision = setup::precision(&config, &model.config)?;
        let plan = MemoryPlan::of(&config, &model, &precision)?;
        memory::check("this run", plan.total().saturating_sub(model.params.bytes() as u64))?;
        if let Some(lora) = &config.lora {
            model.add_adapters(
                &|module| setup::is_target(&config, module),
                lora.rank,
                lora.alpha,
                config.seed,
            )?;
        }
        let grads = setup::grads(&config, &model)?;
        let optimizer = Optimizer::new(&model, &grads, &config.optimizer, &precision);
        model.set_precision(precision);
        ledger.cast(&model);
        ledger.check(&model, "cast")?;
        ledger.check_live(&model, "cast")?;
        let encoder = Arc::new(setup::encoder(&config, &config.out)?);
        let Some(documents) = setup::documents(&config, Split::Train, &encoder)? else {
            return Err(Error::Config("`data` has no documents to train on".into()));
        };
        let train = setup::packer(&config, documents);
        let held_out = || setup::documents(&config, Split::Validation, &encoder);
        let validation = held_out()?.map(|documents| setup::packer(&config, documents));
        let sample_documents = match held_out()? {
            Some(documents) => setup::first_documents(documents, config.samples.count)?,
            None => Vec::new(),
        };
        optimizer.check()?;
        Ok(Trainer {
            sidecars: setup::sidecars(&config)?,
            tokenizer: setup::tokenizer_checksum(&encoder)?,
            untrained_since: None,
            notices: Vec::new(),
            config,
            model,
            optimizer,
            ledger,
            sentinel: Sentinel::default(),
            step: 0,
            best: None,
            store,
            encoder,
            validation,
            sample_documents,
            left_out: Vec::new(),
            program_bytes,
            train,
            grads,
        })
    }

    /// Restores a checkpoint of this run.
    fn restore(&mut self, checkpoint: &Path, state: State) -> Result {
        state::restore(checkpoint, &state, &mut self.model, &mut self.optimizer)?;
        self.train.seek(&state.cursor)?;
        let has_checksums = state.has_checksums();
        let State { step, mut ledger, sentinel, best, mut left_out, .. } = state;
        if !has_checksums {
            ledger.replace_checksums(&self.ledger, &self.model);
            let files = self.train.cursor().files;
            for cursor in &mut left_out {
                cursor.files.iter_mut().zip(&files).for_each(|(old, now)| old.content = now.content);
            }
            self.notices.push(format!(
                "the checkpoint of step {step} has format version 1, whose checksums use another hash: weights, optimizer \
                 state, data files and tokenizer were not compared with it; the next checkpoint has new checksums"
            ));
        }
        (self.step, self.ledger, self.sentinel, self.best) = (step, ledger, sentinel, best);
        self.left_out = left_out;
        for (_, site) in self.ledger.escalations.clone() {
            self.raise(&site)?;
        }
        self.ledger.check(&self.model, "load")?;
        self.ledger.check_live(&self.model, "load")
    }

    /// The present state without tensors.
    pub(crate) fn state(&self) -> Result<State> {
        Ok(State {
            step: self.step,
            cursor: self.train.cursor(),
            ledger: self.ledger.clone(),
            sentinel: self.sentinel.clone(),
            best: self.best,
            left_out: self.left_out.clone(),
            validation: self.validation_file(),
            tokenizer: Some(self.tokenizer),
            config: self.config.to_toml()?,
            ..State::new(&self.model, &self.optimizer)
        })
    }

    /// Bytes of masters, optimizer state and gradients.
    pub fn optimizer_bytes(&self) -> (usize, usize, usize) {
        (self.optimizer.master_bytes(), self.optimizer.state_bytes(), self.grads.bytes())
    }

    pub(crate) fn recompute(&self) -> Recompute {
        self.config.precision.recompute.into()
    }

    /// Start position and micro-batches of the next step.
    pub(crate) fn next_batches(&mut self) -> Result<(Cursor, Vec<MicroBatch>)> {
        loop {
            let cursor = self.train.cursor();
            let batches: Vec<MicroBatch> =
                (0..self.config.batch.accumulation).map(|_| self.train.next()).collect::<Result<_>>()?;
            if !self.left_out.contains(&cursor) {
                return Ok((cursor, batches));
            }
        }
    }

    /// Attempts a step; `tell` receives notices.
    pub fn attempt(&mut self, tell: &mut dyn FnMut(Event)) -> Result<Attempt> {
        let started = Instant::now();
        self.ledger.check(&self.model, "step")?;
        let (begin, batches) = self.next_batches()?;
        if batches.iter().all(|batch| batch.batch.counted() == 0) {
            return self.skip_untrained(begin, &batches, tell);
        }
        self.untrained_since = None;
        let lr = self.next_learning_rate();
        let (losses, norms) = loop {
            let (losses, norms) = self.gradients(&batches)?;
            let Some(trouble) = self.trouble(&batches, &losses, &norms, lr)? else { break (losses, norms) };
            if !self.handle_trouble(&batches, &begin, trouble, tell)? {
                return Ok(Attempt::NotTaken);
            }
        };
        let sigma = self.config.sentinel.spike_sigma;
        if let Some(text) = self.sentinel.spike(losses.language, norms.global, sigma) {
            tell(Event { step: self.step + 1, what: "spike".into(), text: text.clone() });
            if self.config.sentinel.on_spike == OnSpike::Skip {
                return self.skip_spike(&text);
            }
        }
        self.sentinel.spikes = 0;
        self.optimizer.apply(&mut self.model, &self.grads, norms.global, lr)?;
        self.step += 1;
        self.ledger.note(&self.model);
        let every = self.config.ledger.every;
        if every > 0 && self.step.is_multiple_of(every) {
            self.ledger.check_live(&self.model, "step")?;
        }
        let sum = |count: fn(&MicroBatch) -> usize| batches.iter().map(count).sum::<usize>() as u64;
        Ok(Attempt::Taken(Box::new(Step {
            step: self.step,
            loss: losses.language,
            indexer_loss: (self.config.loss.indexer_scale > 0.0).then_some(losses.indexer),
            balance_loss: (self.config.loss.balance > 0.0).then_some(losses.balance),
            learning_rate: lr,
            gradient_norm: norms.global,
            group_norms: norms.groups,
            tokens: sum(|batch| batch.batch.tokens()),
            trained_tokens: sum(|batch| batch.batch.counted()),
            seconds: started.elapsed().as_secs_f64(),
            peak_memory: memory::peak().unwrap_or(0),
        })))
    }

    fn next_learning_rate(&self) -> f64 {
        let (schedule, peak) = (&self.config.schedule, self.config.optimizer.learning_rate);
        // A resumed run with fewer steps keeps its warm-up.
        learning_rate(schedule, peak, self.step + 1, self.config.steps.max(schedule.warmup))
    }

    /// Skips a step without trained tokens. Returns an error once all documents have passed that way.
    fn skip_untrained(
        &mut self,
        begin: Cursor,
        batches: &[MicroBatch],
        tell: &mut dyn FnMut(Event),
    ) -> Result<Attempt> {
        self.sentinel.untrained += 1;
        let tokens: usize = batches.iter().map(|batch| batch.batch.tokens()).sum();
        let text = format!("none of the step's {tokens} tokens is trained on; the step is skipped");
        tell(Event { step: self.step + 1, what: "skip".into(), text });
        let since = self.untrained_since.get_or_insert(begin);
        if self.train.epochs_since(since) < 2 {
            return Ok(Attempt::NotTaken);
        }
        let origin = batches.iter().flat_map(|batch| &batch.origins).next();
        Err(Error::Data {
            file: origin.map(|origin| origin.source.clone()).unwrap_or_default().into(),
            line: None,
            problem: format!(
                "in sequences of {} tokens, none of the data's tokens is trained on; set a larger data.sequence_length or \
                 other data.train_roles",
                self.config.data.sequence_length
            ),
        })
    }

    fn skip_spike(&mut self, text: &str) -> Result<Attempt> {
        self.sentinel.skipped += 1;
        self.sentinel.spikes += 1;
        let limit = self.config.sentinel.spike_limit;
        if self.sentinel.spikes > limit {
            return Err(Error::Diverged(format!(
                "step {}: {text}; {limit} spikes in a row were skipped (sentinel.spike_limit). The last checkpoint is \
                 intact{}; resume it with a lower optimizer.learning_rate, or with sentinel.on_spike = \"report\"",
                self.step + 1,
                self.last_words()
            )));
        }
        Ok(Attempt::NotTaken)
    }

    /// The reason that these gradients must not be applied, if there is one. Changes nothing but the
    /// gradients.
    fn trouble(
        &mut self,
        batches: &[MicroBatch],
        losses: &Losses,
        norms: &Norms,
        lr: f64,
    ) -> Result<Option<Trouble>> {
        let step = self.step + 1;
        if losses.is_finite() && norms.faulty.is_empty() && norms.global.is_finite() {
            let bad = self.optimizer.bad_update(&self.model, &self.grads, norms.global, lr)?;
            return Ok(bad.map(|bad| Trouble::Update(format!("step {step}: {bad}"))));
        }
        let fault = sentinel::find(
            &self.model,
            &self.optimizer,
            &mut self.grads,
            batches,
            step_options(&self.config, batches),
            self.config.precision.recompute.into(),
            step,
        )?;
        Ok(Some(match fault {
            Some(fault) => Trouble::Site(Box::new(fault)),
            None => Trouble::Disturbed(format!(
                "step {step}: loss {}, gradient norm {}, but a repeat of the step is finite: memory or hardware \
                 changed a value",
                losses.language, norms.global
            )),
        }))
    }

    /// Losses and gradient norms of a step's micro-batches. Changes nothing but the gradients.
    pub(crate) fn gradients(&mut self, batches: &[MicroBatch]) -> Result<(Losses, Norms)> {
        self.grads.clear();
        let mut losses = Losses::default();
        let options = step_options(&self.config, batches);
        let counted: usize = batches.iter().map(|batch| batch.batch.counted()).sum();
        let recompute = self.recompute();
        for batch in batches {
            let loss = self.model.forward_backward(
                &mut self.grads,
                &batch.batch,
                &options(batch),
                recompute,
                None,
            )?;
            losses.language += loss.language.sum / counted.max(1) as f64;
            losses.indexer += loss.indexer;
            losses.balance += loss.balance;
        }
        Ok((losses, self.optimizer.norms(&self.grads)))
    }

    /// Reports and handles trouble. Returns true if the step must be tried again.
    fn handle_trouble(
        &mut self,
        batches: &[MicroBatch],
        begin: &Cursor,
        trouble: Trouble,
        tell: &mut dyn FnMut(Event),
    ) -> Result<bool> {
        let step = self.step + 1;
        self.sentinel.faults += 1;
        let (found, fault) = match &trouble {
            Trouble::Site(fault) => (fault.to_string(), Some(&**fault)),
            Trouble::Disturbed(text) | Trouble::Update(text) => (text.clone(), None),
        };
        // A full disk must not hide the fault.
        let saved = match self.save_batch(batches, fault, step) {
            Ok((path, micro_batch)) => format!(
                "Micro-batch {micro_batch} was saved to {}; `ballast trace` shows every tensor",
                path.display()
            ),
            Err(error) => format!("The micro-batch could not be saved: {error}"),
        };
        let text = format!("{found}. The update was not applied. {saved}");
        tell(Event { step, what: "fault".into(), text: text.clone() });
        if self.sentinel.faults > self.config.sentinel.fault_limit {
            let limit = self.config.sentinel.fault_limit;
            return Err(Error::Diverged(format!("{text}. Fault limit ({limit}) exceeded")));
        }
        let event = |what: &str, text: String| Event { step, what: what.into(), text };
        match self.config.sentinel.on_fault {
            OnFault::Abort => {
                Err(Error::Diverged(format!("{text}. The last checkpoint is intact{}", self.last_words())))
            }
            OnFault::Skip => {
                self.sentinel.skipped += 1;
                tell(event("skip", "the batch is skipped".into()));
                Ok(false)
            }
            OnFault::Rollback => {
                let Some(last) = self.store.steps().pop() else {
                    return Err(Error::Diverged(format!("{text}. There is no checkpoint to roll back to")));
                };
                self.roll_back(last, begin.clone())?;
                let text = format!("from step {step} back to step {last}; the batch will be skipped");
                tell(Event { step: last, what: ROLLBACK.into(), text });
                Ok(false)
            }
            OnFault::Escalate => {
                let raised = match &trouble {
                    Trouble::Site(fault) => self.escalate(fault, step)?,
                    Trouble::Disturbed(_) => return Ok(true),
                    Trouble::Update(_) => Vec::new(),
                };
                if raised.is_empty() {
                    return Err(Error::Diverged(format!(
                        "{text}. No site in lower precision leads there, so none can be escalated to f32"
                    )));
                }
                tell(event("escalate", format!("{} in f32 from now on", raised.join(", "))));
                Ok(true)
            }
        }
    }

    fn last_words(&self) -> String {
        match self.store.steps().last() {
            Some(step) => format!(": {}", self.store.path(*step).display()),
            None => " (none was due yet)".into(),
        }
    }

    /// Escalates the sites that lead to a fault to f32. Returns their names.
    fn escalate(&mut self, fault: &Fault, step: u64) -> Result<Vec<String>> {
        let is_lowered = |name: &&&'static str| {
            let sites = self.model.precision().sites();
            sites.iter().any(|(site, rounding)| *site == **name && *rounding != Rounding::F32)
        };
        let lowered: Vec<&str> = Precision::site_of(&fault.site).iter().filter(is_lowered).copied().collect();
        for site in &lowered {
            self.raise(site)?;
            self.ledger.escalations.push((step, site.to_string()));
        }
        Ok(lowered.into_iter().map(String::from).collect())
    }

    fn raise(&mut self, site: &str) -> Result {
        let mut precision = self.model.precision().clone();
        precision.set_site(site, "f32")?;
        self.model.set_precision(precision);
        Ok(())
    }

    fn roll_back(&mut self, step: u64, leave_out: Cursor) -> Result {
        let checkpoint = self.store.path(step);
        let (sentinel, mut left_out) = (self.sentinel.clone(), self.left_out.clone());
        left_out.push(leave_out);
        let state = state::read_state(&checkpoint)?;
        self.restore(&checkpoint, state)?;
        self.left_out = left_out;
        self.sentinel.faults = sentinel.faults;
        Ok(())
    }

    /// Writes the micro-batch of a fault (or the first) in the format of `ballast trace --ids`.
    fn save_batch(
        &self,
        batches: &[MicroBatch],
        fault: Option<&Fault>,
        step: u64,
    ) -> Result<(PathBuf, usize)> {
        let micro_batch = fault.map_or(0, |fault| fault.micro_batch);
        let batch = &batches[micro_batch].batch;
        let folder = self.config.out.join("faults");
        std::fs::create_dir_all(&folder).map_err(Error::io(&folder, "create"))?;
        let path = folder.join(format!("step-{step:08}.safetensors"));
        let ids: Vec<i64> = batch.ids.iter().map(|id| *id as i64).collect();
        // A label stands at the position of its id: one after the token that predicts it.
        let mut labels = vec![ballast_model::batch::IGNORED; ids.len()];
        for (t, target) in batch.targets.iter().enumerate().filter(|(t, _)| t + 1 < ids.len()) {
            if *target != ballast_model::batch::IGNORED {
                labels[t + 1] = *target;
            }
        }
        let ends: Vec<i64> = batch.cu_seqlens.iter().map(|end| *end as i64).collect();
        let row = [1, ids.len()];
        let _ = std::fs::remove_file(&path);
        write_integers(
            &path,
            &[("input_ids", &row, &ids), ("labels", &row, &labels), ("cu_seqlens", &[ends.len()], &ends)],
        )?;
        Ok((path, micro_batch))
    }
}

/// Loss options of each micro-batch, weighted so that the step is one mean over its tokens.
fn step_options<'a>(
    config: &'a TrainConfig,
    batches: &[MicroBatch],
) -> impl Fn(&MicroBatch) -> LossOptions + use<'a> {
    let counted: usize = batches.iter().map(|batch| batch.batch.counted()).sum();
    let tokens: usize = batches.iter().map(|batch| batch.batch.tokens()).sum();
    let loss = &config.loss;
    move |batch| {
        let mut options = loss.options();
        options.scale = Some(1.0 / counted.max(1) as f32);
        let share = batch.batch.tokens() as f32 / tokens.max(1) as f32;
        if let Some(indexer) = &mut options.indexer {
            indexer.scale *= share;
        }
        if let Some(balance) = &mut options.balance {
            *balance *= share;
        }
        options
    }
}

/// Returns an error for a non-finite protected tensor. A decay rate of 0 or infinity is a dead head, and
/// would show only as a NaN steps later.
fn refuse_impossible(model: &Model) -> Result {
    for (spec, tensor) in model.specs.protected.iter().zip(model.params.protected()) {
        if let Some(at) = tensor.values().iter().position(|x| !x.is_finite()) {
            let value = tensor.values()[at];
            let name = model.parameter_name(spec);
            let hint = if name.ends_with("A_log") {
                "its head has no decay rate; `ballast repair` puts it back from the original checkpoint, or set it to a \
                 finite logarithm such as 0.0"
            } else {
                "`ballast repair` puts it back from the original checkpoint"
            };
            let problem = format!("{name} is {value} at element {at}: {hint}");
            return Err(ballast_model::Error::Input(problem).into());
        }
    }
    Ok(())
}
