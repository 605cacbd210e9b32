//! Memory of a rank.

use ballast_cluster::TreeSum;
use ballast_kernels::remainder::Remainders;
use ballast_model::params::{ParameterKind, Part, Spec};
use ballast_model::pass::Visit;
use ballast_model::precision::Storage;
use ballast_model::{Model, Plan, Precision, memory};
use serde::Serialize;

use super::blueprint::{Blueprint, BucketShape};
use crate::config::{MomentStorage, TrainConfig};
use crate::error::Result;
use crate::optimizer::{
    Role, Stored, UpdateRule, adapter_rule, block_workspace, is_rounded, rule_for, state_bytes,
};

/// Bytes by purpose.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryPlan {
    /// Purpose and bytes; rows without bytes are left out.
    pub rows: Vec<(String, u64)>,
}

impl MemoryPlan {
    /// The plan of a run in one process, whose micro-batches are full and whose sequences have the largest length.
    pub fn of(config: &TrainConfig, model: &Model, precision: &Precision) -> Result<MemoryPlan> {
        MemoryPlan::for_rank(config, model, precision, 0, 1)
    }

    /// The plan of one rank of a run. `model` may be without values.
    pub fn for_rank(
        config: &TrainConfig,
        model: &Model,
        precision: &Precision,
        rank: usize,
        ranks: usize,
    ) -> Result<MemoryPlan> {
        let (blueprint, activations) = of_rank(config, model, precision, rank, ranks)?;
        Ok(blueprint.memory(&activations, rank))
    }

    /// Peak bytes of one rank of a run: in a step, or while the model is read or drawn. `model` may be without values.
    pub(crate) fn needed_by(
        config: &TrainConfig,
        model: &Model,
        precision: &Precision,
        rank: usize,
        ranks: usize,
    ) -> Result<u64> {
        let (blueprint, activations) = of_rank(config, model, precision, rank, ranks)?;
        let in_a_step = blueprint.memory(&activations, rank).total();
        Ok(in_a_step.max(blueprint.loading(&activations, rank)))
    }

    /// Sum of all rows.
    pub fn total(&self) -> u64 {
        self.rows.iter().map(|(_, bytes)| bytes).sum()
    }
}

/// The division of a run, and the activations of one of its ranks.
fn of_rank<'a>(
    config: &'a TrainConfig,
    model: &Model,
    precision: &'a Precision,
    rank: usize,
    ranks: usize,
) -> Result<(Blueprint<'a>, Plan)> {
    // The smallest need, a hidden state per token, is checked before a list of sequences is made.
    let tokens = (config.batch.sequences as u64).saturating_mul(config.data.sequence_length as u64);
    let own = tokens / config.cluster.context as u64;
    let least = own.saturating_mul((model.config.hidden * precision.activations.bytes()) as u64);
    memory::check("a micro-batch of this run", least)?;
    let blueprint = Blueprint::new(config, model, precision, ranks)?;
    let activations = blueprint.activations(blueprint.context_part(rank))?;
    Ok((blueprint, activations))
}

impl Blueprint<'_> {
    /// Memory of a step as on one rank that has all weights and this part of its sequences.
    pub(super) fn activations(&self, part: usize) -> Result<Plan> {
        self.with_step(part, |step| Ok(Plan::new(&self.model.config, self.precision, step)?))
    }

    /// Memory of a rank, with the activations of [`Blueprint::activations`].
    pub(super) fn memory(&self, plan: &Plan, rank: usize) -> MemoryPlan {
        let states = OptimizerBytes::of(self, rank);
        let gathered = self.gathered_weights();
        let of_weights = if self.divides_weights() { "weights, own share" } else { "weights" };
        let of_masters = match self.divides_updates() {
            true => "masters beside bf16, own share",
            false => "masters beside bf16",
        };
        let before = [
            (of_weights, self.held_weights(rank)),
            ("weights gathered: the part in use and the next", gathered),
            ("protected tensors, f32", plan.protected),
            ("adapters, f32", plan.adapters),
            (of_masters, states.masters),
        ];
        let (gradients, sums) = (self.gradients(), self.gradient_sums(rank));
        let of_gradients =
            if self.hands_buckets_on() { "gradients, f32, alive at once" } else { "gradients, f32" };
        let after = [
            (of_gradients, gradients),
            ("gradient sums over groups, f32", sums),
            ("messages under way, at most", self.messages(rank)),
            ("saved for backward: linear attention", plan.linear_layers),
            ("saved for backward: softmax attention", plan.softmax_layers),
            ("saved for backward: latent attention", plan.latent_layers),
            ("saved for backward: outside the layers", plan.around),
            ("temporary tensors", plan.transient),
            ("scratch of all threads", plan.scratch),
            ("optimizer workspace", states.workspace),
            ("blocks of masters and state in f32, by thread", states.blocks),
        ];
        let named = |(name, bytes): (&str, usize)| (name.to_string(), bytes);
        let rows = before.into_iter().map(named).chain(states.states).chain(after.into_iter().map(named));
        let some = rows.filter(|(_, bytes)| *bytes > 0);
        MemoryPlan { rows: some.map(|(name, bytes)| (name, bytes as u64)).collect() }
    }

    /// Peak memory while the model is read or drawn, in f32, before the first step. Weights of which a rank keeps
    /// a share are made whole first.
    pub(super) fn loading(&self, plan: &Plan, rank: usize) -> u64 {
        let wide = Storage::F32.bytes() / self.storage().bytes();
        let held = wide * self.held_weights(rank) + plan.protected;
        let whole = if self.divides_weights() { self.model.specs.bytes_at_once() } else { 0 };
        (held + whole.max(OptimizerBytes::of(self, rank).masters + plan.adapters)) as u64
    }

    /// Bytes of the weights that a rank holds throughout.
    fn held_weights(&self, rank: usize) -> usize {
        let held = |(weight, spec): (usize, &Spec)| match self.divides_weights() {
            true => self.shards.range(weight, rank).len(),
            false => spec.len(),
        };
        self.storage().bytes() * self.model.specs.weights.iter().enumerate().map(held).sum::<usize>()
    }

    /// Bytes of the weights of a part.
    fn part_bytes(&self, part: Part) -> usize {
        self.owned(part).iter().sum()
    }

    /// The parts that are in use at once, and the one that is gathered meanwhile, over a forward and backward.
    fn fetches(&self) -> Vec<(Vec<Part>, Option<Part>)> {
        let ahead = self.config.cluster.window > 0;
        let fetch = |visit: Visit| {
            let next = visit.next(self.layers()).filter(|_| ahead);
            (visit.reads(self.model.config.tied).collect(), next)
        };
        Visit::forward_backward(self.layers()).map(fetch).collect()
    }

    /// Bytes of whole weights at once, where they are divided.
    fn gathered_weights(&self) -> usize {
        if !self.divides_weights() {
            return 0;
        }
        let bytes = |(used, next): (Vec<Part>, Option<Part>)| {
            used.into_iter().chain(next).map(|part| self.part_bytes(part)).sum::<usize>()
        };
        self.fetches().into_iter().map(bytes).max().unwrap_or(0)
    }

    /// Returns true if buckets are dropped as soon as they are sent.
    fn hands_buckets_on(&self) -> bool {
        self.shard().divides_gradients() && self.per_group() == 1
    }

    /// Bytes of the gradients that backward writes.
    fn gradients(&self) -> usize {
        let bytes = |wanted: &dyn Fn(&BucketShape) -> bool| {
            4 * self.buckets.iter().filter(|bucket| wanted(bucket)).map(|bucket| bucket.len).sum::<usize>()
        };
        if !self.hands_buckets_on() {
            return bytes(&|_| true);
        }
        let of_weights =
            |part: Part| bytes(&|bucket| bucket.kind == ParameterKind::Weights && bucket.part == part);
        let one = |part: Part| match (part, self.model.config.tied) {
            // A tied head begins the embedding's gradient.
            (Part::Layer(_) | Part::Head, true) => of_weights(part) + of_weights(Part::Embedding),
            _ => of_weights(part),
        };
        let largest = self.model_parts().map(one).max().unwrap_or(0);
        bytes(&|bucket| bucket.kind != ParameterKind::Weights) + largest
    }

    /// Bytes of the sums over the groups that a rank computes in sequence, beside the gradients that
    /// backward writes. One process adds whole gradients, and the one that is written is the last term.
    fn gradient_sums(&self, rank: usize) -> usize {
        let kept = TreeSum::most_kept(self.rounds());
        let own = |bucket: &BucketShape| bucket.parts[rank].len();
        let elements: usize = match self.is_solo() {
            true => (kept - 1) * self.buckets.iter().map(|bucket| bucket.len).sum::<usize>(),
            false => kept * self.buckets.iter().map(own).sum::<usize>(),
        };
        4 * elements
    }

    /// Most bytes of messages in flight at once: copies that are being sent, and buffers to receive.
    fn messages(&self, rank: usize) -> usize {
        if self.is_solo() {
            return 0;
        }
        let others = self.ranks - 1;
        // One more than the window is under way for a moment: it is started before the oldest is waited for.
        let most = |bytes: &[usize]| {
            bytes
                .windows((self.config.cluster.window + 1).min(bytes.len().max(1)))
                .map(|some| some.iter().sum())
                .max()
                .unwrap_or(0)
        };
        let reduced = |bucket: &&BucketShape| {
            let own = bucket.parts[rank].len();
            4 * (bucket.len - own + own * others + own)
        };
        let gathered = |owned: &[usize]| owned[rank] * others + owned.iter().sum::<usize>();
        let backward: Vec<usize> = self.in_backward_order().iter().map(reduced).collect();
        let in_backward: usize = most(&backward);
        let sums: Vec<usize> = (self.buckets.iter().filter(|bucket| !self.stays_divided(bucket)))
            .map(|bucket| gathered(&bucket.parts.iter().map(|part| 4 * part.len()).collect::<Vec<_>>()))
            .collect();
        let updates: Vec<usize> = match self.divides_updates() && !self.divides_weights() {
            true => self.model_parts().map(|part| gathered(self.owned_learned(part))).collect(),
            false => Vec::new(),
        };
        // The received bytes of a part exist beside the weights that are made of them; the next part's are counted
        // as gathered weights.
        let ahead = |(used, next): (Vec<Part>, Option<Part>)| {
            let sent = next.map_or(0, |part| self.owned(part)[rank] * others);
            sent + used.last().map_or(0, |part| self.part_bytes(*part))
        };
        let weights = match self.divides_weights() {
            true => self.fetches().into_iter().map(ahead).max().unwrap_or(0),
            false => 0,
        };
        (in_backward + weights).max(most(&sums)).max(most(&updates))
    }
}

/// Bytes of the optimizer.
struct OptimizerBytes {
    masters: usize,
    /// By name.
    states: Vec<(String, usize)>,
    workspace: usize,
    /// Blocks that are widened for an update.
    blocks: usize,
}

impl OptimizerBytes {
    fn of(blueprint: &Blueprint<'_>, rank: usize) -> OptimizerBytes {
        let Blueprint { config, precision, model, .. } = blueprint;
        let divided = blueprint.divides_updates();
        let mut all = OptimizerBytes { masters: 0, states: Vec::new(), workspace: 0, blocks: 0 };
        for (index, spec) in model.specs.weights.iter().enumerate() {
            if !blueprint.is_learned(index) {
                continue;
            }
            let own = if divided { blueprint.shards.range(index, rank).len() } else { spec.len() };
            if config.optimizer.masters && precision.params == Storage::Bf16 {
                all.masters += Remainders::bytes_of(own);
            }
            let rule = rule_for(&config.optimizer, &model.config, spec, Role::Weight);
            let moments = config.optimizer.moments;
            all.add(&*rule, &spec.shape, own, divided, moments);
            if precision.params == Storage::Bf16 || moments != MomentStorage::F32 {
                let states = rule.state().len();
                if rule.is_divisible() {
                    all.blocks = all.blocks.max(block_workspace(states) * rayon::current_num_threads());
                } else {
                    all.workspace = all.workspace.max((1 + states) * own + rule.workspace());
                }
            }
        }
        for (spec, learned) in model.specs.protected.iter().zip(&blueprint.learned_protected) {
            if !learned {
                continue;
            }
            if config.optimizer.masters && is_rounded(precision, spec) {
                all.masters += 4 * spec.len();
            }
            let rule = rule_for(&config.optimizer, &model.config, spec, Role::Protected);
            all.add(&*rule, &spec.shape, spec.len(), false, MomentStorage::F32);
        }
        let adapters = model.adapter_bytes() / 4;
        let rule = adapter_rule(&config.optimizer, true);
        all.add(&rule, &[adapters], adapters, false, MomentStorage::F32);
        all.workspace *= 4;
        all.blocks *= 4;
        all
    }

    /// Adds the state of a parameter of which a rank has `own` elements.
    fn add(
        &mut self,
        rule: &dyn UpdateRule,
        shape: &[usize],
        own: usize,
        divided: bool,
        moments: MomentStorage,
    ) {
        self.workspace = rule.workspace().max(self.workspace);
        let bytes = match own == shape.iter().product::<usize>() {
            true => state_bytes(rule, shape, moments),
            false => rule.state().len() * Stored::bytes_of(moments, own),
        };
        let share = if divided { ", own share" } else { "" };
        let name = format!("{}, {}{share}", rule.state_name(), moments);
        match self.states.iter_mut().find(|(known, _)| *known == name) {
            Some((_, all)) => *all += bytes,
            None => self.states.push((name, bytes)),
        }
    }
}
