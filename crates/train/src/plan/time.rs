//! Time of a step, as a timeline of one rank: all ranks do the same.
//!
//! The network carries one message after the other. A rank that computes does not wait for it, until it needs what
//! is in flight: the weights of the next part, or the oldest of the gradient buckets.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use ballast_kernels::linear::{Dims, linear_forward, linear_scratch};
use ballast_kernels::{Element, Scratch};
use ballast_model::params::Part;
use ballast_model::pass::{Direction, Visit};
use ballast_model::precision::Storage;
use half::bf16;
use serde::Serialize;

use super::blueprint::{Blueprint, BucketShape};
use super::work::Work;
use crate::error::Result;

/// Rates of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rates {
    /// Floating-point operations per second.
    pub flops: f64,
    /// Bytes per second, in each direction.
    pub bandwidth: f64,
    /// Seconds that a message takes beside its bytes.
    pub latency: f64,
}

/// Time of a step in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StepTime {
    /// Floating-point operations of a rank.
    pub flops: f64,
    /// Computing.
    pub compute: f64,
    /// Messages in flight.
    pub messages: f64,
    /// Waiting for messages: the part of `messages` that no computing hides.
    pub waiting: f64,
    /// The whole step.
    pub total: f64,
}

/// Number of small all-gathers of a step: counts, losses, norms, flags, checksums.
const SMALL_GATHERS: f64 = 6.0;

#[derive(Default)]
struct Timeline {
    now: f64,
    /// Time at which the network is free.
    network: f64,
    time: StepTime,
}

impl Timeline {
    /// Starts a message that takes `seconds`; returns the time of its arrival.
    fn start(&mut self, seconds: f64) -> f64 {
        self.network = self.network.max(self.now) + seconds;
        self.time.messages += seconds;
        self.network
    }

    fn wait_until(&mut self, arrival: f64) {
        let waiting = (arrival - self.now).max(0.0);
        self.time.waiting += waiting;
        self.now += waiting;
    }

    fn compute(&mut self, flops: f64, rates: &Rates) {
        self.time.flops += flops;
        self.time.compute += flops / rates.flops;
        self.now += flops / rates.flops;
    }

    /// A message that is waited for at once.
    fn exchange(&mut self, seconds: f64) {
        // Without a message there is nothing to wait for, also not for those before it.
        if seconds == 0.0 {
            return;
        }
        let arrival = self.start(seconds);
        self.wait_until(arrival);
    }

    /// Messages of which some are in flight at once, without computing.
    fn one_after_the_other(&mut self, seconds: impl IntoIterator<Item = f64>) {
        let arrivals: Vec<f64> = seconds.into_iter().map(|seconds| self.start(seconds)).collect();
        arrivals.into_iter().for_each(|arrival| self.wait_until(arrival));
    }
}

/// Costs of a part of the model in every micro-batch of a step.
struct Costs {
    work: Work,
    /// Seconds to gather the weights; `None` if they are whole.
    gather: Option<f64>,
    /// Seconds to sum each bucket.
    buckets: Vec<f64>,
    /// Seconds of the exchange within a sequence, forward and backward.
    exchange: [f64; 2],
}

impl Blueprint<'_> {
    /// Time of a step at these rates.
    pub(super) fn time(&self, rates: &Rates) -> Result<StepTime> {
        let costs = self.costs(rates, &self.exchanges()?);
        let mut line = Timeline::default();
        let mut under_way = VecDeque::new();
        for _ in 0..self.rounds() {
            for index in 0..self.per_group() {
                let is_last = index + 1 == self.per_group() && !self.is_solo();
                self.micro_batch(&mut line, &costs, is_last.then_some(&mut under_way), rates);
            }
            under_way.drain(..).for_each(|arrival| line.wait_until(arrival));
        }
        if !self.is_solo() {
            let undivided = self.buckets.iter().filter(|bucket| !self.stays_divided(bucket));
            let bytes = |part: &std::ops::Range<usize>| 4 * part.len();
            line.one_after_the_other(
                undivided.map(|bucket| {
                    self.gather_time(&bucket.parts.iter().map(bytes).collect::<Vec<_>>(), rates)
                }),
            );
            if self.divides_updates() && !self.divides_weights() {
                let parts = self.model_parts();
                line.one_after_the_other(parts.map(|part| self.gather_time(self.owned_learned(part), rates)));
            }
            line.exchange(SMALL_GATHERS * rates.latency * (self.ranks - 1) as f64);
        }
        Ok(StepTime { total: line.now, ..line.time })
    }

    fn costs(&self, rates: &Rates, exchanges: &[[usize; 2]]) -> BTreeMap<Part, Costs> {
        let exchange = |part: Part| match part {
            Part::Layer(index) if self.config.cluster.context > 1 => exchanges[index].map(|bytes| {
                bytes as f64 / rates.bandwidth + rates.latency * self.config.cluster.context as f64
            }),
            _ => [0.0; 2],
        };
        let bucket = |bucket: &BucketShape| {
            let own = bucket.parts.iter().map(|part| part.len());
            let most = own.map(|own| (bucket.len - own).max(own * (self.ranks - 1))).max();
            self.message_time(4 * most.unwrap_or(0), rates)
        };
        let buckets = |part: Part| match self.is_solo() {
            true => Vec::new(),
            false => {
                let buckets = self.in_backward_order().into_iter();
                buckets.filter(|bucket| bucket.part == part).map(bucket).collect()
            }
        };
        let gather = |part: Part| self.gather_time(self.owned(part), rates);
        let costs = |part: Part| Costs {
            work: self.work(part),
            gather: self.divides_weights().then(|| gather(part)),
            buckets: buckets(part),
            exchange: exchange(part),
        };
        self.model_parts().map(|part| (part, costs(part))).collect()
    }

    /// Seconds in which every rank gets the parts of all others, whose bytes these are.
    fn gather_time(&self, owned: &[usize], rates: &Rates) -> f64 {
        let total: usize = owned.iter().sum();
        let most = owned.iter().map(|own| (own * (self.ranks - 1)).max(total - own)).max();
        self.message_time(most.unwrap_or(0), rates)
    }

    fn message_time(&self, bytes: usize, rates: &Rates) -> f64 {
        bytes as f64 / rates.bandwidth + rates.latency * (self.ranks - 1) as f64
    }

    /// One micro-batch, in the order of the run; buckets are summed in the last one of a group.
    fn micro_batch(
        &self,
        line: &mut Timeline,
        costs: &BTreeMap<Part, Costs>,
        mut under_way: Option<&mut VecDeque<f64>>,
        rates: &Rates,
    ) {
        let mut arrivals = BTreeMap::new();
        for visit in Visit::forward_backward(self.layers()) {
            for (part, next) in visit.fetches(self.layers(), self.model.config.tied) {
                let next = next.filter(|_| self.config.cluster.window > 0);
                for part in [Some(part), next].into_iter().flatten() {
                    if let Some(seconds) = costs[&part].gather {
                        arrivals.entry(part).or_insert_with(|| line.start(seconds));
                    }
                }
                if let Some(arrival) = arrivals.remove(&part) {
                    line.wait_until(arrival);
                }
            }
            let Costs { work, exchange, buckets, .. } = &costs[&visit.part];
            if visit.direction == Direction::Forward {
                line.exchange(exchange[0]);
                line.compute(work.forward, rates);
                continue;
            }
            if visit.part == Part::Head {
                line.compute(work.forward, rates);
            }
            line.exchange(exchange[1]);
            line.compute(work.backward, rates);
            let Some(under_way) = &mut under_way else { continue };
            for seconds in buckets {
                under_way.push_back(line.start(*seconds));
                while under_way.len() > self.config.cluster.window {
                    under_way.pop_front().into_iter().for_each(|arrival| line.wait_until(arrival));
                }
            }
        }
    }
}

/// Floating-point operations per second of this machine, measured by a matrix product of this type on all threads.
pub fn measured_flops(storage: Storage) -> Result<f64> {
    match storage {
        Storage::F32 => measure::<f32>(1.0),
        Storage::Bf16 => measure(bf16::ONE),
    }
}

fn measure<T: Element>(one: T) -> Result<f64> {
    const TOKENS: usize = 1024;
    const DIMS: Dims = Dims { inputs: 2048, outputs: 2048 };
    let (x, w) = (vec![one; TOKENS * DIMS.inputs], vec![one; DIMS.inputs * DIMS.outputs]);
    let mut y = vec![one; TOKENS * DIMS.outputs];
    let scratch = Scratch::new(linear_scratch(DIMS, TOKENS));
    let mut best = f64::INFINITY;
    for _ in 0..6 {
        let started = Instant::now();
        linear_forward(&mut y, &x, &w, None, DIMS, &scratch)?;
        best = best.min(started.elapsed().as_secs_f64());
    }
    Ok(2.0 * (TOKENS * DIMS.inputs * DIMS.outputs) as f64 / best.max(1e-9))
}
