//! Experiment: the same input through the reference and through every run, layer by layer.
//!
//! All runs advance in lockstep. The parameters of a layer are read once; the reference goes first, each run
//! follows and is compared at every named tensor; then the layer's parameters and tensors are dropped. A
//! checkpoint of any size thus needs the memory of its largest layer and of the residual streams. Gradients,
//! if wanted, are compared the same way in reverse.

mod runner;

use std::collections::HashMap;

use ballast_files::jobs::Observer;
use ballast_model::config::{Layer, Mixer};
use ballast_model::params::{Params, Part};
use ballast_model::pass::Visit;
use ballast_model::{Batch, LazyCheckpoint, Precision, Ties, memory};

use crate::choices::Choice;
use crate::engine::{Engine, Gradient, SiteTensor};
use crate::error::Result;
use crate::findings::{Findings, Reference};
use crate::measure::attention::{Roundings, Rows, Shape};
use crate::measure::decay::Decays;
use crate::measure::indexer::Scores;
use crate::measure::output::Outputs;
use crate::measure::position;
use crate::reference::Backward;
use runner::Runner;

/// Arithmetic of the reference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Arithmetic {
    #[default]
    F64,
    F32,
}

impl Arithmetic {
    /// Returns `f64` or `f32`.
    pub fn name(self) -> &'static str {
        match self {
            Arithmetic::F64 => "f64",
            Arithmetic::F32 => "f32",
        }
    }

    fn engine<'b>(self, checkpoint: &LazyCheckpoint, setup: &Setup<'b>) -> Result<Engine<'b>> {
        let Setup { batch, ties, backward, .. } = *setup;
        match self {
            Arithmetic::F64 => Engine::exact(checkpoint, batch, ties, backward),
            Arithmetic::F32 => Engine::model(checkpoint, batch, ties, Precision::f32(), backward),
        }
    }
}

/// Setup of an experiment.
pub(crate) struct Setup<'a> {
    /// Checkpoint of the model.
    pub checkpoint: &'a LazyCheckpoint,
    /// Input tokens.
    pub batch: &'a Batch,
    /// Arithmetic of the reference.
    pub reference: Arithmetic,
    /// Resolution of ties between indexer scores.
    pub ties: Ties,
    /// Gradients to compare.
    pub backward: Backward,
    /// Progress: a unit is one part of the model in one run.
    pub observer: &'a dyn Observer,
}

impl Setup<'_> {
    fn is_backward(&self) -> bool {
        self.backward != Backward::None
    }
}

/// A run to compare with the reference.
pub(crate) enum Contestant<'a> {
    /// The same checkpoint in some precision.
    Choice(Choice),
    /// Another checkpoint, in the reference's arithmetic.
    Checkpoint {
        /// Name, as given.
        name: String,
        /// The opened checkpoint.
        checkpoint: &'a LazyCheckpoint,
    },
    /// Tensors that another framework wrote.
    Dump {
        /// Name, as given.
        name: String,
        /// The tensors.
        dump: crate::dump::Dump,
        /// Largest error that does not count as a difference.
        tolerance: f64,
    },
}

/// Number of progress units of an experiment.
pub(crate) fn units(setup: &Setup<'_>, contestants: usize) -> u64 {
    let parts = setup.checkpoint.config.layers.len() + 2;
    ((contestants + 1) * parts * if setup.is_backward() { 2 } else { 1 }) as u64
}

/// Runs an experiment. The first of several choices must be [`Choice::f32`].
pub(crate) fn run(setup: &Setup<'_>, contestants: Vec<Contestant<'_>>) -> Result<Findings> {
    check_memory(setup, contestants.len())?;
    let runners: Result<Vec<Runner<'_>>> =
        contestants.into_iter().map(|one| Runner::new(setup, one)).collect();
    let mut experiment = Experiment {
        setup,
        reference: setup.reference.engine(setup.checkpoint, setup)?,
        runners: runners?,
        buckets: position::buckets(setup.batch),
        keys: HashMap::new(),
        pending: HashMap::new(),
        outputs: Outputs::default(),
        findings: Findings::default(),
    };
    experiment.forward()?;
    if setup.is_backward() {
        experiment.backward()?;
    }
    Ok(experiment.finish())
}

struct Experiment<'a> {
    setup: &'a Setup<'a>,
    reference: Engine<'a>,
    runners: Vec<Runner<'a>>,
    /// Position bucket of each token.
    buckets: Vec<usize>,
    keys: HashMap<usize, Vec<f64>>,
    pending: HashMap<String, Vec<f64>>,
    outputs: Outputs,
    findings: Findings,
}

/// Tensors of a part of the model in the reference and in the f32 run.
struct Shown {
    reference: Vec<SiteTensor>,
    control: Vec<SiteTensor>,
    decays: Option<Decays>,
    rows: Option<Rows>,
}

impl<'a> Experiment<'a> {
    fn step(&self) -> Result {
        self.setup.observer.advance(1);
        if self.setup.observer.cancelled() {
            return Err(ballast_files::Error::Interrupted.into());
        }
        Ok(())
    }

    fn forward(&mut self) -> Result {
        Visit::forward(self.layers()).try_for_each(|visit| self.part(visit.part))?;
        self.compare_outputs()
    }

    fn layers(&self) -> usize {
        self.setup.checkpoint.config.layers.len()
    }

    /// Runs one part of the model forward in the reference and in every run.
    fn part(&mut self, part: Part) -> Result {
        let checkpoint = self.setup.checkpoint;
        let values = read(checkpoint, part)?;
        let reference = self.reference.forward(part, checkpoint, &values)?;
        self.step()?;
        let mut shown = Shown { reference, control: Vec::new(), decays: None, rows: None };
        if let Part::Layer(index) = part {
            shown.decays = decays(&self.reference, index, &shown.reference, checkpoint, &values);
            shown.rows = self.rows(index, &shown.reference);
            self.findings.decays.extend(shown.decays.iter().flat_map(|decays| decays.describe(index)));
            self.findings.attention.extend(shown.rows.iter().map(|rows| rows.range(index)));
        }
        for number in 0..self.runners.len() {
            let runner = &mut self.runners[number];
            let values = runner.values(checkpoint, part, &values)?;
            let sites = runner.engine.forward(part, runner.checkpoint, &values)?;
            runner.compare(&sites, &shown, &self.buckets)?;
            if let Part::Layer(index) = part {
                runner.compare_layer(index, &sites, &shown, self.setup, &values);
            }
            runner.engine.release();
            if number == 0 {
                shown.control = sites;
            }
            self.step()?;
        }
        Ok(())
    }

    /// Attention logits of sampled queries in the reference.
    fn rows(&mut self, index: usize, sites: &[SiteTensor]) -> Option<Rows> {
        let config = &self.setup.checkpoint.config;
        let shape = Shape::of(index, &config.layers[index].mixer)?;
        // An f32 reference has no rounding sites either.
        sampled(&mut self.keys, index, &shape, sites, self.setup, None)
    }

    /// Compares output logits in slices of tokens, since all of them may not fit in memory.
    fn compare_outputs(&mut self) -> Result {
        let (checkpoint, batch) = (self.setup.checkpoint, self.setup.batch);
        let (vocabulary, tokens) = (checkpoint.config.vocabulary, batch.tokens());
        let values = read(checkpoint, Part::Head)?;
        let rows = slice_rows(vocabulary);
        for begin in (0..tokens).step_by(rows) {
            let slice = begin..(begin + rows).min(tokens);
            let targets = &batch.targets[slice.clone()];
            let exact = self.reference.logits(slice.clone(), checkpoint, &values)?;
            self.outputs.add(&exact, &exact, targets, vocabulary);
            let mut control = None;
            for runner in &mut self.runners {
                if !runner.engine.has_logits() {
                    continue;
                }
                let values = runner.values(checkpoint, Part::Head, &values)?;
                let logits = runner.engine.logits(slice.clone(), runner.checkpoint, &values)?;
                runner.engine.release();
                runner.see_logits(&logits, &exact, control.as_deref());
                runner.outputs.add(&logits, &exact, targets, vocabulary);
                control.get_or_insert(logits);
            }
        }
        Ok(())
    }

    fn backward(&mut self) -> Result {
        Visit::backward(self.layers()).try_for_each(|visit| self.part_backward(visit.part))
    }

    fn part_backward(&mut self, part: Part) -> Result {
        let checkpoint = self.setup.checkpoint;
        let values = read(checkpoint, part)?;
        let exact = gradients(&mut self.reference, part, checkpoint, &values, &mut self.pending)?;
        self.step()?;
        for number in 0..self.runners.len() {
            let runner = &mut self.runners[number];
            let values = runner.values(checkpoint, part, &values)?;
            let found = gradients(&mut runner.engine, part, runner.checkpoint, &values, &mut runner.pending)?;
            runner.engine.release();
            runner.compare_gradients(&found, &exact)?;
            self.step()?;
        }
        Ok(())
    }

    fn finish(mut self) -> Findings {
        let loss = self.outputs.loss();
        self.findings.reference =
            Reference { arithmetic: self.setup.reference.name().into(), loss, perplexity: loss.exp() };
        for runner in self.runners {
            self.findings.runs.push(runner.finish(loss, &self.buckets));
        }
        self.findings.runs.sort_by(|a, b| b.kl.damage().total_cmp(&a.kl.damage()));
        self.findings
    }
}

fn read(checkpoint: &LazyCheckpoint, part: Part) -> Result<Params> {
    let tied = checkpoint.config.tied;
    Ok(checkpoint.read(|spec| spec.is_read_by(part, tied))?)
}

/// Gradients of one part. Those of a tied head are held back in `pending` and added to the embedding's.
fn gradients(
    engine: &mut Engine<'_>,
    part: Part,
    checkpoint: &LazyCheckpoint,
    values: &Params,
    pending: &mut HashMap<String, Vec<f64>>,
) -> Result<Vec<Gradient>> {
    let mut found = engine.backward(part, checkpoint, values)?;
    if part == Part::Head && checkpoint.config.tied {
        let (head, rest): (Vec<Gradient>, Vec<Gradient>) =
            found.into_iter().partition(|(name, _)| name == "embed_tokens.weight");
        pending.extend(head);
        return Ok(rest);
    }
    for (name, gradient) in &mut found {
        for (sum, early) in gradient.iter_mut().zip(pending.remove(name).unwrap_or_default()) {
            *sum += early;
        }
    }
    Ok(found)
}

/// Scores of a layer's indexer.
fn scores<'s>(index: usize, sites: &'s [SiteTensor], setup: &'s Setup<'_>) -> Option<Scores<'s>> {
    let Mixer::Latent(latent) = &setup.checkpoint.config.layers[index].mixer else { return None };
    let values = site(sites, &format!("layers.{index}.self_attn.indexer.scores"))?;
    Some(Scores { values, cu_seqlens: &setup.batch.cu_seqlens, topk: latent.index_topk, ties: setup.ties })
}

fn site<'s>(sites: &'s [SiteTensor], name: &str) -> Option<&'s [f64]> {
    sites.iter().find(|site| site.name == name).map(|site| &site.values[..])
}

fn decays(
    engine: &Engine<'_>,
    index: usize,
    sites: &[SiteTensor],
    checkpoint: &LazyCheckpoint,
    values: &Params,
) -> Option<Decays> {
    let g = site(sites, &format!("layers.{index}.linear_attn.g"))?;
    let a_log = engine.protected(&format!("layers.{index}.linear_attn.A_log"), checkpoint, values)?;
    Some(Decays::new(&a_log, g))
}

/// Attention logits of sampled queries. Keys that later layers share are kept in `keys`.
fn sampled(
    keys: &mut HashMap<usize, Vec<f64>>,
    index: usize,
    shape: &Shape,
    sites: &[SiteTensor],
    setup: &Setup<'_>,
    rounds: Option<Roundings>,
) -> Option<Rows> {
    let q = site(sites, &format!("layers.{index}.self_attn.q"))?;
    let own = site(sites, &format!("layers.{index}.self_attn.k"));
    let mut users = setup.checkpoint.config.layers.iter().enumerate();
    let uses = |(user, layer): (usize, &Layer)| {
        user > index && Shape::of(user, &layer.mixer).is_some_and(|shape| shape.keys_of == index)
    };
    if let Some(k) = own
        && users.any(uses)
    {
        keys.insert(index, k.to_vec());
    }
    let k = own.or_else(|| keys.get(&shape.keys_of).map(|k| &k[..]))?;
    Some(Rows::new(q, k, shape, setup.batch, scores(index, sites, setup), rounds))
}

/// Tokens whose output logits are compared at a time.
fn slice_rows(vocabulary: usize) -> usize {
    ((1 << 24) / vocabulary.max(1)).max(16)
}

/// Fails before anything is read if the experiment would not fit in memory.
fn check_memory(setup: &Setup<'_>, contestants: usize) -> Result {
    let (config, specs) = (&setup.checkpoint.config, &setup.checkpoint.specs);
    let tokens = setup.batch.tokens() as u64;
    let elements = |part: Part| -> u64 {
        specs.all().filter(|spec| spec.is_read_by(part, config.tied)).map(|spec| spec.len() as u64).sum()
    };
    let largest = Part::all(config.layers.len()).map(elements).max().unwrap_or(0);
    let stream = tokens * config.hidden as u64;
    let kept = if setup.is_backward() { config.layers.len() as u64 + 1 } else { 2 };
    let streams = stream * kept * (8 + 4 * contestants as u64);
    // Parameters as read and as held; about 20 tensors of a layer, each the size of the residual stream, of
    // three runs in f64; three copies of a slice of logits of two runs; in backward, gradients of two runs.
    let gradients = if setup.is_backward() { 3 * 8 * largest } else { 0 };
    let logits = 6 * 8 * (slice_rows(config.vocabulary) as u64).min(tokens) * config.vocabulary as u64;
    let needed = 2 * 4 * largest + gradients + streams + 3 * 20 * 8 * stream + logits;
    Ok(memory::check("this lab run (fewer tokens or policies or --no-gradients need less)", needed)?)
}
