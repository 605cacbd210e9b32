//! Handling of a step with a non-finite value: its origin is found and named, and the step is not applied.

use std::path::PathBuf;

use ballast_checkpoint::tensor_file::write_integers;
use ballast_cluster::Kind;
use ballast_kernels::Rounding;
use ballast_model::Site;

use crate::config::OnFault;
use crate::data::{Cursor, MicroBatch};
use crate::error::{Error, Result};
use crate::gradients::{Losses, Totals, step_options};
use crate::metrics::{Event, ROLLBACK};
use crate::optimizer::Norms;
use crate::sentinel::{self, Fault};
use crate::state;
use crate::trainer::Trainer;

/// The reason that a step cannot be taken.
pub(crate) enum Trouble {
    /// A site has non-finite values.
    Site(Box<Fault>),
    /// Loss or gradients were non-finite, but finite when the step was repeated.
    Disturbed(String),
    /// The update would make a parameter or its optimizer state non-finite.
    Update(String),
}

impl Trainer {
    /// The reason that these gradients must not be applied, if there is one; the same on all ranks. Changes
    /// nothing but the gradients.
    pub(crate) fn trouble(
        &mut self,
        batches: &[MicroBatch],
        totals: Totals,
        losses: &Losses,
        norms: &Norms,
        lr: f64,
    ) -> Result<Option<Trouble>> {
        let step = self.step + 1;
        if losses.is_finite() && norms.faulty.is_empty() && norms.global.is_finite() {
            let bad = self.first_bad_update(norms.global, lr)?;
            return Ok(bad.map(|bad| Trouble::Update(format!("step {step}: {bad}"))));
        }
        Ok(Some(match self.find_fault(batches, totals)? {
            Some(fault) => Trouble::Site(Box::new(fault)),
            None => Trouble::Disturbed(format!(
                "step {step}: loss {}, gradient norm {}, but a repeat of the step is finite: memory or hardware \
                 changed a value",
                losses.language, norms.global
            )),
        }))
    }

    /// The first element, over all ranks, that the update would leave non-finite.
    fn first_bad_update(&self, norm: f64, lr: f64) -> Result<Option<String>> {
        let found = self.optimizer.first_bad_update(&self.model, &self.grads, norm, lr)?;
        let own = found.map(|(slot, bad)| (slot, bad.after.element, bad.to_string()));
        if !self.ranks.shard.divides_updates() {
            return Ok(own.map(|(_, _, text)| text));
        }
        // A flag first: a text is rare.
        if !self.ranks.any(own.is_some())? {
            return Ok(None);
        }
        let all = self.ranks.exchange(Kind::Scalars, &own)?;
        Ok(all.into_iter().flatten().min().map(|(_, _, text)| text))
    }

    /// Replays the step and returns its first faulty site, over all ranks.
    fn find_fault(&mut self, batches: &[MicroBatch], totals: Totals) -> Result<Option<Fault>> {
        let options = step_options(&self.config, totals);
        // Ranks that share weights or sequences must all replay everything.
        let stops_early = self.ranks.is_solo();
        let (mut engine, grads, optimizer, _) = self.split();
        let fault = sentinel::find(optimizer, grads, batches, stops_early, &mut |grads, batch, probe| {
            let options = options(batch);
            engine.forward_backward(grads, &batch.batch, &options, Some(probe)).map(drop)
        });
        let step = self.step + 1;
        let fault = fault?.map(|fault| {
            let micro_batch = self.micro_batch_index(fault.micro_batch);
            let rank = (!self.ranks.is_solo()).then_some(self.ranks.world.rank());
            Fault { step, micro_batch, rank, ..fault }
        });
        if self.ranks.is_solo() {
            return Ok(fault);
        }
        let all = self.ranks.exchange(Kind::Scalars, &fault)?;
        Ok(all.into_iter().flatten().min_by_key(|fault| (fault.micro_batch, fault.rank)))
    }

    /// Reports and handles trouble. Returns true if the step must be tried again.
    pub(crate) fn handle_trouble(
        &mut self,
        batches: &[MicroBatch],
        begin: &[Cursor],
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
            OnFault::Abort => Err(Error::Diverged(format!("{text}. {}", self.last_checkpoint()))),
            OnFault::Skip => {
                self.sentinel.skipped += 1;
                tell(event("skip", "the batch is skipped".into()));
                Ok(false)
            }
            OnFault::Rollback => {
                let newest = self.ranks.on_first(|| Ok(self.store.all_steps()?.pop()))?;
                let Some(last) = self.ranks.value_of_first(newest.as_ref())? else {
                    return Err(Error::Diverged(format!("{text}. There is no checkpoint to roll back to")));
                };
                self.roll_back(last, begin.to_vec())?;
                let text = format!("from step {step} back to step {last}; the batch will be skipped");
                tell(Event { step: last, what: ROLLBACK.into(), text });
                Ok(false)
            }
            OnFault::Escalate => {
                let raised = match &trouble {
                    Trouble::Site(fault) => self.escalate(fault, step),
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

    /// Names the last checkpoint, for the error of an aborted run.
    pub(crate) fn last_checkpoint(&self) -> String {
        match self.store.steps().last() {
            Some(step) => format!("The last checkpoint is intact: {}", self.store.path(*step).display()),
            None => "No checkpoint exists yet".into(),
        }
    }

    /// Escalates the sites that lead to a fault to f32. Returns their names.
    fn escalate(&mut self, fault: &Fault, step: u64) -> Vec<String> {
        let mut raised = Vec::new();
        for site in Site::behind(&fault.site) {
            if self.model.precision().site(site) != Rounding::F32 {
                self.raise(site);
                self.ledger.escalations.push((step, site.name().into()));
                raised.push(site.name().into());
            }
        }
        raised
    }

    fn roll_back(&mut self, step: u64, leave_out: Vec<Cursor>) -> Result {
        let checkpoint = self.store.path(step);
        let (sentinel, mut left_out) = (self.sentinel.clone(), self.left_out.clone());
        left_out.push(self.all_cursors(leave_out)?);
        let state = state::read_state(&checkpoint)?;
        self.restore(&checkpoint, state)?;
        self.left_out = left_out;
        self.sentinel.faults = sentinel.faults;
        Ok(())
    }

    /// Writes the micro-batch of a fault (or the first) in the format of `ballast trace --ids`, on the rank that has
    /// it; returns the path and the index of the micro-batch.
    fn save_batch(
        &self,
        batches: &[MicroBatch],
        fault: Option<&Fault>,
        step: u64,
    ) -> Result<(PathBuf, usize)> {
        let micro_batch = fault.map_or(0, |fault| fault.micro_batch);
        let path = self.config.out.join("faults").join(format!("step-{step:08}.safetensors"));
        let own = (0..batches.len()).find(|own| self.micro_batch_index(*own) == micro_batch);
        let written = match own.filter(|_| self.ranks.speaks()) {
            Some(own) => self.write_batch(&batches[own], &path),
            None => Ok(()),
        };
        self.ranks.all_succeeded(written)?;
        Ok((path, micro_batch))
    }

    fn write_batch(&self, batch: &MicroBatch, path: &std::path::Path) -> Result {
        let batch = &batch.batch;
        let folder = self.config.out.join("faults");
        std::fs::create_dir_all(&folder).map_err(Error::io(&folder, "create"))?;
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
        let _ = std::fs::remove_file(path);
        write_integers(
            path,
            &[("input_ids", &row, &ids), ("labels", &row, &labels), ("cu_seqlens", &[ends.len()], &ends)],
        )?;
        Ok(())
    }
}
