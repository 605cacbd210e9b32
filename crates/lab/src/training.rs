//! A few training steps in f32 and under every choice: losses, and the drift of the parameters.
//!
//! AdamW with f32 master weights, the whole input in every step, no weight decay, a constant learning rate. A
//! choice that rounds a tensor rounds it after every step.

use std::path::Path;

use ballast_files::jobs::Observer;
use ballast_model::{Batch, LossOptions, Model, Plan, Precision, Recompute, Step, memory};
use ballast_train::config::OptimizerConfig;
use ballast_train::optimizer::{Optimizer, Place};

use crate::choices::Choice;
use crate::engine::sparse_loss;
use crate::error::Result;
use crate::findings::{Training, TrainingRun};

/// Setup of the training steps.
pub struct Steps<'a> {
    /// Path of the checkpoint.
    pub path: &'a Path,
    /// Batch of every step.
    pub batch: &'a Batch,
    /// Number of steps.
    pub steps: usize,
    /// Learning rate of AdamW.
    pub learning_rate: f64,
    /// Progress: a unit is a step.
    pub observer: &'a dyn Observer,
}

/// Outcome of a run.
struct Outcome {
    losses: Vec<f64>,
    not_finite: Option<usize>,
    start: Vec<Vec<f32>>,
    end: Vec<Vec<f32>>,
    protected: Vec<bool>,
}

impl Steps<'_> {
    /// Trains under [`Choice::f32`] and under `choices`; f32 comes first in the result.
    pub fn run(&self, choices: &[Choice]) -> Result<Training> {
        let exact = self.one(&Choice::f32())?;
        let mut runs = vec![exact.compare(&exact, "f32")];
        for choice in choices {
            runs.push(self.one(choice)?.compare(&exact, &choice.name));
        }
        let Steps { steps, learning_rate, .. } = *self;
        Ok(Training { steps, learning_rate, reference: exact.losses, runs })
    }

    fn one(&self, choice: &Choice) -> Result<Outcome> {
        let mut model = Model::load(self.path, |_| Ok(Precision::f32()))?;
        let loss = LossOptions { indexer: sparse_loss(&model.config), ..LossOptions::default() };
        let step = Step { loss, ..Step::new(&self.batch.cu_seqlens, Recompute::None) };
        let plan = Plan::new(&model.config, &choice.precision, &step)?;
        memory::check("the lab's training steps", (plan.total() + 6 * 4 * plan.parameters) as u64)?;
        let mut grads = model.grads();
        let settings = OptimizerConfig { weight_decay: 0.0, ..OptimizerConfig::default() };
        let mut optimizer = Optimizer::new(&model, &grads, &settings, &choice.precision);
        let start = values(&optimizer, &model);
        model.set_precision(choice.precision.clone());
        let (mut losses, mut not_finite) = (Vec::new(), None);
        for number in 0..self.steps {
            if self.observer.cancelled() {
                return Err(ballast_files::Error::Interrupted.into());
            }
            grads.clear();
            let loss = model.forward_backward(&mut grads, self.batch, &loss, Recompute::None, None)?;
            let loss = loss.language.sum / loss.language.tokens.max(1) as f64;
            let norm = optimizer.norms(&grads).global;
            losses.push(loss);
            if !loss.is_finite() || !norm.is_finite() {
                not_finite = Some(number + 1);
                break;
            }
            match optimizer.step(&mut model, &grads, norm, self.learning_rate) {
                Err(ballast_train::Error::Diverged(_)) => {
                    not_finite = Some(number + 1);
                    break;
                }
                taken => taken?,
            }
            self.observer.advance(1);
        }
        let protected =
            optimizer.slots.iter().map(|slot| matches!(slot.place, Place::Protected(_))).collect();
        Ok(Outcome { losses, not_finite, start, end: values(&optimizer, &model), protected })
    }
}

/// The trained values in f32: master weights if there are any.
fn values(optimizer: &Optimizer, model: &Model) -> Vec<Vec<f32>> {
    optimizer.slots.iter().map(|slot| slot.values(model)).collect()
}

impl Outcome {
    fn compare(&self, exact: &Outcome, name: &str) -> TrainingRun {
        TrainingRun {
            name: name.into(),
            losses: self.losses.clone(),
            drift: self.drift(exact, |_| true),
            protected_drift: exact.protected.contains(&true).then(|| self.drift(exact, |p| p)),
            not_finite: self.not_finite,
        }
    }

    /// |a - b| / |b - start| over the wanted tensors, b being the f32 run's.
    fn drift(&self, exact: &Outcome, wanted: impl Fn(bool) -> bool) -> f64 {
        let (mut apart, mut moved) = (0.0, 0.0);
        let tensors = self.end.iter().zip(&exact.end).zip(&exact.start).zip(&exact.protected);
        for (((a, b), start), protected) in tensors {
            if wanted(*protected) {
                for ((a, b), start) in a.iter().zip(b).zip(start) {
                    apart += (*a as f64 - *b as f64).powi(2);
                    moved += (*b as f64 - *start as f64).powi(2);
                }
            }
        }
        if apart == 0.0 { 0.0 } else { (apart / moved).sqrt() }
    }
}
