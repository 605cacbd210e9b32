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

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_cluster::{Group, Kind};
use ballast_kernels::Rounding;
use ballast_model::params::{Grads, Spec, Specs};
use ballast_model::{Model, Recompute, Site, memory};

use crate::checksum::weights_checksum;
use crate::cluster::{
    Division, Fingerprint, Ranks, Resident, Shards, check_agreement, check_same_program, check_shared_folder,
    gather_updates,
};
use crate::compute::Engine;
use crate::config::{OnSpike, TrainConfig, check_resume};
use crate::data::{Cursor, Document, FileCursor, MicroBatch, Packer, Split, TextEncoder};
use crate::error::{Error, Result};
use crate::gradients::Totals;
use crate::ledger::Ledger;
use crate::metrics::{Event, RankUse, Step};
use crate::optimizer::{Optimizer, Role, rule_for};
use crate::places;
use crate::plan::MemoryPlan;
use crate::schedule::learning_rate;
use crate::sentinel::Sentinel;
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
    /// Start positions of steps that a rollback excludes, in the streams of all groups.
    pub(crate) left_out: Vec<Vec<Cursor>>,
    /// Start of the current sequence of steps without trained tokens, in this rank's streams.
    untrained_since: Option<Vec<Cursor>>,
    /// Checksum of the tokenizer files.
    tokenizer: u64,
    /// Remarks about the resumed checkpoint, for the start of the run.
    pub(crate) notices: Vec<String>,
    /// Step and error of every checkpoint that could not be written.
    pub(crate) failed_saves: Vec<(u64, String)>,
    /// Memory of the process before the model was made, in bytes.
    pub(crate) program_bytes: u64,
    /// Training data of this rank's groups.
    streams: Vec<Packer>,
    pub(crate) grads: Grads,
    /// The processes of the run.
    pub ranks: Ranks,
    /// Division of the weights over the ranks.
    pub(crate) shards: Shards,
    pub(crate) resident: Resident,
}

/// Outcome of an attempt at a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Attempt {
    /// The step was taken.
    Taken(Box<Step>),
    /// The step was skipped, and the run continues.
    NotTaken,
}

impl Trainer {
    /// Starts a new run in one process.
    pub fn new(config: TrainConfig) -> Result<Trainer> {
        Trainer::new_on(config, Group::solo())
    }

    /// Starts a new run on all ranks of `world`, which call this with the same configuration.
    pub fn new_on(mut config: TrainConfig, mut world: Group) -> Result<Trainer> {
        config.check()?;
        world.set_timeout(Duration::from_secs(config.cluster.timeout));
        let ranks = Ranks::new(world, &config)?;
        check_same_program(&ranks, &config)?;
        // Fixed now, so that a resumed run with more steps has the same warm-up.
        config.schedule.warmup = config.schedule.warmup.min(config.steps);
        let opened = ranks.on_first(|| open_new(&config))?;
        let store = opened.unwrap_or_else(|| Store::of_first(&config.out));
        check_shared_folder(&ranks, store.folder())?;
        Trainer::build(config, store, ranks)
    }

    /// Resumes the run in `out` from its last checkpoint. `settings` change its configuration where
    /// [`OnResume`] allows it.
    ///
    /// [`OnResume`]: crate::config::OnResume
    pub fn resume(out: &Path, settings: &[String]) -> Result<Trainer> {
        Trainer::resume_on(out, settings, Group::solo())
    }

    /// [`Trainer::resume`] on all ranks of `world`; their number may be another than before.
    pub fn resume_on(out: &Path, settings: &[String], mut world: Group) -> Result<Trainer> {
        let none = || {
            let problem = "no checkpoint to resume from; start the run without --resume".into();
            Error::Resume { path: out.into(), problem }
        };
        let all = Ranks::equal(world.clone())?;
        let open = || if out.join("checkpoints").is_dir() { Store::open(out) } else { Err(none()) };
        let store = all.on_first(open)?.unwrap_or_else(|| Store::of_first(out));
        check_shared_folder(&all, store.folder())?;
        let newest = all.on_first(|| Ok(store.all_steps()?.pop()))?;
        let step = all.value_of_first(newest.as_ref())?.ok_or_else(none)?;
        let checkpoint = store.path(step);
        let state = state::read_state(&checkpoint)?;
        let table = state.config_table().map_err(|error| Error::Resume {
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
            return Err(Error::config("steps", problem));
        }
        let config = TrainConfig { out: out.to_path_buf(), ..config };
        places::check_resumed(&config)?;
        world.set_timeout(Duration::from_secs(config.cluster.timeout));
        let ranks = Ranks::new(world, &config)?;
        check_same_program(&ranks, &config)?;
        // Built from the original source, not from a training checkpoint: those may be removed while the run
        // still reads tensors that the model carries along.
        let mut trainer = Trainer::build(config, store, ranks)?;
        trainer.check_same_text(&checkpoint, &state)?;
        trainer.restore(&checkpoint, state)?;
        memory::release_freed();
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

    /// Builds the model in f32, casts it, and opens the data.
    fn build(config: TrainConfig, store: Store, ranks: Ranks) -> Result<Trainer> {
        let program_bytes = memory::with_all_code().unwrap_or(0);
        let (rank, size, shard) = (ranks.world.rank(), ranks.size(), ranks.shard);
        let (mut model, shards) = load_model(&config, &ranks)?;
        refuse_impossible(&model)?;
        let mut ledger = Ledger::new(&model, model.precision());
        ledger.check(&model, "build")?;
        let precision = setup::precision(&config, &model.config)?;
        let plan = MemoryPlan::for_rank(&config, &model, &precision, rank, size)?;
        memory::check("this run", plan.total().saturating_sub(model.params.bytes() as u64))?;
        if let Some(lora) = &config.lora {
            model.add_adapters(
                &|module| setup::is_target(&config, module),
                lora.rank,
                lora.alpha,
                config.seed,
            )?;
        }
        let mut grads = setup::grads(&config, &model)?;
        let own = shard.divides_updates().then_some(&shards);
        let mut optimizer = Optimizer::divided(&model, &grads, &config.optimizer, &precision, own);
        optimizer.seed = config.seed;
        if shard.divides_gradients() {
            grads.release();
        }
        model.set_precision(precision);
        memory::release_freed();
        ledger.cast(&model);
        ledger.check(&model, "cast")?;
        let Data { encoder, streams, validation, sample_documents } = open_data(&config, &ranks)?;
        optimizer.check(&model)?;
        let mut trainer = Trainer {
            sidecars: setup::sidecars(&config)?,
            tokenizer: setup::tokenizer_checksum(&encoder)?,
            untrained_since: None,
            notices: Vec::new(),
            failed_saves: Vec::new(),
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
            streams,
            grads,
            ranks,
            shards,
            resident: Resident::default(),
        };
        trainer.check_live("cast")?;
        trainer.check_same_input()?;
        Ok(trainer)
    }

    /// Returns an error unless all ranks have the same data, tokenizer, weights and protected tensors.
    fn check_same_input(&self) -> Result {
        if self.ranks.is_solo() {
            return Ok(());
        }
        let mut own = Fingerprint::default();
        own.add("the tokenizer", format!("checksum {:016x}", self.tokenizer));
        let files = self.streams.first().map(|stream| stream.cursor().files).unwrap_or_default();
        for (kind, files) in [("data.files", files), ("data.validation", self.validation_file())] {
            for (number, file) in files.iter().enumerate() {
                let content =
                    format!("{} bytes, checksum {:016x}", file.bytes, file.content.unwrap_or_default());
                own.add(&format!("file {number} of `{kind}`"), content);
            }
        }
        if !self.ranks.shard.divides_weights() {
            own.add("the weights", format!("checksum {}", weights_checksum(&self.model)));
        }
        for entry in &self.ledger.entries {
            own.add(&entry.name, format!("checksum {:016x}", entry.last));
        }
        check_agreement(&self.ranks, &own)
    }

    /// The model with everything that it takes to run it, the gradients, and other parts of the run that are
    /// needed beside it.
    pub(crate) fn split(&mut self) -> (Engine<'_>, &mut Grads, &Optimizer, &mut Ledger) {
        let recompute = self.recompute();
        let Trainer { model, resident, ranks, shards, grads, optimizer, ledger, .. } = self;
        let engine = Engine {
            model,
            resident,
            ranks,
            shards: ranks.shard.divides_weights().then_some(shards),
            recompute,
            complete: None,
        };
        (engine, grads, optimizer, ledger)
    }

    /// Compares the protected tensors that a forward reads with their checksums.
    pub(crate) fn check_live(&mut self, occasion: &str) -> Result {
        let protected = self.model.specs.protected.clone();
        let (mut engine, _, _, ledger) = self.split();
        ledger.check_live(&protected, occasion, &mut |batch, probe| {
            engine.loss(Some(batch), Some(probe)).map(drop)
        })
    }

    /// Restores a checkpoint of this run.
    pub(crate) fn restore(&mut self, checkpoint: &Path, state: State) -> Result {
        let division = self.division();
        state::restore(checkpoint, &state, &mut self.model, &mut self.optimizer, &division)?;
        let cursors = state.cursors();
        if cursors.len() != self.config.batch.groups {
            let problem = format!(
                "it has the positions of {} groups, expected {}",
                cursors.len(),
                self.config.batch.groups
            );
            return Err(Error::Resume { path: checkpoint.join("state.json"), problem });
        }
        for (stream, group) in self.streams.iter_mut().zip(self.ranks.own_groups()) {
            stream.seek(&cursors[group])?;
        }
        let (has_checksums, mut left_out) = (state.has_checksums(), state.all_left_out());
        let State { step, mut ledger, sentinel, best, .. } = state;
        if !has_checksums {
            ledger.replace_checksums(&self.ledger, &self.model);
            let files = self.streams.first().map(|stream| stream.cursor().files).unwrap_or_default();
            for cursor in left_out.iter_mut().flatten() {
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
            self.raise(site.parse()?);
        }
        self.ledger.check(&self.model, "load")?;
        self.check_live("load")
    }

    /// The division of the run's tensors over the ranks, for checkpoints.
    pub(crate) fn division(&self) -> Division {
        Division { ranks: self.ranks.clone(), shards: self.shards.clone() }
    }

    /// The present state without tensors.
    pub(crate) fn state(&self) -> Result<State> {
        let mut cursors = self.all_cursors(self.cursors())?;
        let (cursor, other_cursors) = (cursors.remove(0), cursors);
        let first = |cursors: &Vec<Cursor>| cursors[0].clone();
        let others = |cursors: &Vec<Cursor>| cursors[1..].to_vec();
        Ok(State {
            step: self.step,
            cursor,
            other_cursors,
            ledger: self.ledger.clone(),
            sentinel: self.sentinel.clone(),
            best: self.best,
            left_out: self.left_out.iter().map(first).collect(),
            left_out_others: self.left_out.iter().map(others).filter(|others| !others.is_empty()).collect(),
            validation: self.validation_file(),
            tokenizer: Some(self.tokenizer),
            config: state::saved_config(&self.config, self.model.precision())?,
            ..State::new(&self.model, &self.optimizer, &self.division())?
        })
    }

    /// Positions in this rank's streams.
    fn cursors(&self) -> Vec<Cursor> {
        self.streams.iter().map(Packer::cursor).collect()
    }

    /// Positions in the streams of all groups, from those in this rank's.
    pub(crate) fn all_cursors(&self, own: Vec<Cursor>) -> Result<Vec<Cursor>> {
        if self.ranks.is_solo() {
            return Ok(own);
        }
        let own: Vec<(usize, Cursor)> = match self.ranks.speaks() {
            true => self.ranks.own_groups().zip(own).collect(),
            false => Vec::new(),
        };
        let mut all: Vec<(usize, Cursor)> = self.ranks.exchange(Kind::Setup, &own)?.concat();
        all.sort_by_key(|(group, _)| *group);
        Ok(all.into_iter().map(|(_, cursor)| cursor).collect())
    }

    /// Bytes of masters, optimizer state and gradients.
    pub fn optimizer_bytes(&self) -> (usize, usize, usize) {
        (self.optimizer.master_bytes(), self.optimizer.state_bytes(), self.grads.bytes())
    }

    pub(crate) fn recompute(&self) -> Recompute {
        self.config.precision.recompute
    }

    /// Start positions and own micro-batches of the next step, group by group.
    pub(crate) fn next_batches(&mut self) -> Result<(Vec<Cursor>, Vec<MicroBatch>)> {
        let per_group = self.config.batch.accumulation / self.config.batch.groups;
        let own: Vec<usize> = self.ranks.own_groups().collect();
        loop {
            let begin = self.cursors();
            let mut batches = Vec::with_capacity(own.len() * per_group);
            for stream in &mut self.streams {
                for _ in 0..per_group {
                    batches.push(stream.next()?);
                }
            }
            let is_begin = |left_out: &Vec<Cursor>| {
                own.iter().zip(&begin).all(|(group, begin)| left_out[*group] == *begin)
            };
            if !self.left_out.iter().any(is_begin) {
                return Ok((begin, batches));
            }
        }
    }

    /// Index in the step of an own micro-batch.
    pub(crate) fn micro_batch_index(&self, own: usize) -> usize {
        let per_group = self.config.batch.accumulation / self.config.batch.groups;
        let group = self.ranks.own_groups().nth(own / per_group).unwrap_or(0);
        group * per_group + own % per_group
    }

    /// Attempts a step; `tell` receives notices.
    pub fn attempt(&mut self, tell: &mut dyn FnMut(Event)) -> Result<Attempt> {
        let started = Instant::now();
        let (sent, waited) = (self.sent(), self.ranks.world.traffic().waited());
        let checked = self.ledger.check(&self.model, "step");
        self.ranks.all_succeeded(checked)?;
        let (begin, batches) = self.next_batches()?;
        let totals = Totals::of(&batches, &self.ranks)?;
        if totals.counted == 0 {
            return self.skip_untrained(begin, &batches, totals, tell);
        }
        self.untrained_since = None;
        let lr = self.next_learning_rate();
        let (losses, norms) = loop {
            let (losses, norms) = self.gradients(&batches, totals)?;
            let Some(trouble) = self.trouble(&batches, totals, &losses, &norms, lr)? else {
                break (losses, norms);
            };
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
        self.gather_weights()?;
        self.step += 1;
        self.ledger.note(&self.model);
        self.ledger.check_ranks(&self.ranks)?;
        let every = self.config.ledger.every;
        if every > 0 && self.step.is_multiple_of(every) {
            self.check_live("step")?;
        }
        let seconds = started.elapsed().as_secs_f64();
        let waited = (self.ranks.world.traffic().waited() - waited).as_secs_f64();
        let ranks = self.rank_use(waited / seconds.max(1e-9), sent)?;
        Ok(Attempt::Taken(Box::new(Step {
            step: self.step,
            loss: losses.language,
            cross_entropy: self.config.loss.has_other_parts().then_some(losses.cross_entropy),
            indexer_loss: (self.config.loss.indexer_scale > 0.0).then_some(losses.indexer),
            balance_loss: (self.config.loss.balance > 0.0).then_some(losses.balance),
            learning_rate: lr,
            gradient_norm: norms.global,
            group_norms: norms.groups,
            tokens: totals.tokens,
            trained_tokens: totals.counted,
            seconds,
            peak_memory: memory::peak().unwrap_or(0),
            ranks,
        })))
    }

    /// Gathers the updated weights, where each rank has updated its share of weights that all hold.
    fn gather_weights(&mut self) -> Result {
        let shard = self.ranks.shard;
        if !shard.divides_updates() || shard.divides_weights() {
            return Ok(());
        }
        let grads = &self.grads;
        gather_updates(
            &mut self.model,
            &|weight| grads.weight_place(weight).is_some(),
            &self.ranks,
            &self.shards,
        )
    }

    /// Bytes sent so far, by kind.
    fn sent(&self) -> Vec<u64> {
        let sent = self.ranks.world.traffic().sent();
        Kind::COUNTED.iter().map(|kind| sent.get(kind).copied().unwrap_or(0)).collect()
    }

    /// Share of the step spent waiting and peak memory by rank, and bytes sent by all ranks since `sent`; `None` for one rank.
    fn rank_use(&self, waited: f64, sent: Vec<u64>) -> Result<Option<RankUse>> {
        if self.ranks.is_solo() {
            return Ok(None);
        }
        let mut own = vec![waited, memory::peak().unwrap_or(0) as f64];
        own.extend(self.sent().iter().zip(&sent).map(|(now, before)| (now - before) as f64));
        let all = self.ranks.world.all_gather_f64(Kind::Scalars, &own)?;
        let total = |at: usize| all.iter().map(|values| values[at]).sum::<f64>() as u64;
        Ok(Some(RankUse {
            waiting: all.iter().map(|values| values[0]).collect(),
            peak_memory: all.iter().map(|values| values[1] as u64).collect(),
            sent: (Kind::COUNTED.iter().enumerate())
                .map(|(at, kind)| (kind.name().to_string(), total(2 + at)))
                .filter(|(_, bytes)| *bytes > 0)
                .collect(),
        }))
    }

    fn next_learning_rate(&self) -> f64 {
        let (schedule, peak) = (&self.config.schedule, self.config.optimizer.learning_rate);
        // A resumed run with fewer steps keeps its warm-up.
        learning_rate(schedule, peak, self.step + 1, self.config.steps.max(schedule.warmup))
    }

    /// Skips a step without trained tokens. Returns an error once all documents have passed that way.
    fn skip_untrained(
        &mut self,
        begin: Vec<Cursor>,
        batches: &[MicroBatch],
        totals: Totals,
        tell: &mut dyn FnMut(Event),
    ) -> Result<Attempt> {
        self.sentinel.untrained += 1;
        let tokens = totals.tokens;
        let text = format!("none of the step's {tokens} tokens is trained on; the step is skipped");
        tell(Event { step: self.step + 1, what: "skip".into(), text });
        let since = self.untrained_since.get_or_insert(begin);
        let has_more = self.streams.iter().zip(since).any(|(stream, since)| stream.epochs_since(since) < 2);
        if self.ranks.any(has_more)? {
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

    pub(crate) fn raise(&mut self, site: Site) {
        let mut precision = self.model.precision().clone();
        precision.set(site, Rounding::F32);
        self.model.set_precision(precision);
    }

    fn skip_spike(&mut self, text: &str) -> Result<Attempt> {
        self.sentinel.skipped += 1;
        self.sentinel.spikes += 1;
        let limit = self.config.sentinel.spike_limit;
        if self.sentinel.spikes > limit {
            return Err(Error::Diverged(format!(
                "step {}: {text}; {limit} spikes in a row were skipped (sentinel.spike_limit). {}; \
                 train with a lower optimizer.learning_rate, or with sentinel.on_spike = \"report\"",
                self.step + 1,
                self.last_checkpoint()
            )));
        }
        Ok(Attempt::NotTaken)
    }
}

/// Opens the folder of a new run.
fn open_new(config: &TrainConfig) -> Result<Store> {
    places::check_new(config)?;
    let store = Store::open(&config.out)?;
    if !store.all_steps()?.is_empty() {
        return Err(Error::HasRun { out: config.out.clone() });
    }
    Ok(store)
}

/// The division of a model's weights. Tensors are cut where their optimizer allows it.
pub(crate) fn shards_of(
    config: &TrainConfig,
    model: &ballast_model::Config,
    specs: &Specs,
    rank: usize,
    ranks: usize,
) -> Shards {
    let divisible = |spec: &Spec| rule_for(&config.optimizer, model, spec, Role::Weight).is_divisible();
    Shards::new(specs, divisible, rank, ranks)
}

/// Reads or draws the model, of whose weights a rank may have a share.
fn load_model(config: &TrainConfig, ranks: &Ranks) -> Result<(Model, Shards)> {
    let (rank, size) = (ranks.world.rank(), ranks.size());
    if !ranks.is_solo() {
        // Before any rank of a machine takes memory that another has counted.
        let outline = setup::outline(config)?;
        let precision = setup::precision(config, &outline.config)?;
        ranks.check_memory("this run", MemoryPlan::needed_by(config, &outline, &precision, rank, size)?)?;
    }
    let mut model = setup::model_shares(config, |config_of_model, specs| {
        let shards = shards_of(config, config_of_model, specs, rank, size);
        let own = |weight| shards.own(weight);
        ranks.shard.divides_weights().then(|| (0..specs.weights.len()).map(own).collect())
    })?;
    let shards = shards_of(config, &model.config, &model.specs, rank, size);
    if ranks.context.size() > 1 {
        model.set_context(Some(ranks.context.clone()));
    }
    Ok((model, shards))
}

/// Text of a run, as one rank reads it.
struct Data {
    encoder: Arc<TextEncoder>,
    streams: Vec<Packer>,
    validation: Option<Packer>,
    sample_documents: Vec<Document>,
}

fn open_data(config: &TrainConfig, ranks: &Ranks) -> Result<Data> {
    ranks.on_first(|| setup::write_tokenizer(config))?;
    let encoder = Arc::new(setup::encoder(config)?);
    let documents = |split| setup::documents(config, split, &encoder);
    let Some(training) = documents(Split::Train)? else {
        return Err(Error::config("data", "`data` has no documents to train on"));
    };
    let groups = config.batch.groups as u64;
    let stream = |group: usize| setup::packer(config, training.share(group as u64, groups));
    let streams = ranks.own_groups().map(stream).collect();
    let held_out = documents(Split::Validation)?;
    let sample_documents = match &held_out {
        Some(documents) => setup::first_documents(documents.share(0, 1), config.samples.count)?,
        None => Vec::new(),
    };
    let validation = held_out.map(|documents| setup::packer(config, documents));
    Ok(Data { encoder, streams, validation, sample_documents })
}

/// Returns an error for a non-finite protected tensor. A decay rate of 0 or infinity is a dead head, and
/// would show only as a NaN steps later.
fn refuse_impossible(model: &Model) -> Result {
    for (spec, tensor) in model.specs.protected.iter().zip(model.params.protected()) {
        if let Some(at) = tensor.values().iter().position(|x| !x.is_finite()) {
            let value = tensor.values()[at];
            let name = model.parameter_name(spec);
            let hint = if name.ends_with("A_log") {
                "the head has no decay rate; restore it with `ballast repair --original`, or set it to a finite logarithm such as 0.0"
            } else {
                "restore it with `ballast repair --original`"
            };
            let problem = format!("{name} is {value} at element {at}: {hint}");
            return Err(ballast_model::Error::Input(problem).into());
        }
    }
    Ok(())
}
