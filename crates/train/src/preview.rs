//! `--dry-run`: what a run would do.

use std::collections::BTreeMap;
use std::time::Instant;

use ballast_model::batch::IGNORED;

use crate::data::MicroBatch;
use crate::error::Result;
use crate::gradients::Totals;
use crate::optimizer::is_rounded;
use crate::trainer::Trainer;

/// Role, type, tensors, elements.
pub type RoleRow = (String, String, usize, usize);

impl Trainer {
    /// The micro-batches of the first step.
    pub fn preview(&mut self) -> Result<Vec<MicroBatch>> {
        Ok(self.next_batches()?.1)
    }

    /// Duration of a step in seconds: the second of two, without an update.
    pub fn measure_step(&mut self, batches: &[MicroBatch]) -> Result<f64> {
        let mut seconds = 0.0;
        for _ in 0..2 {
            let started = Instant::now();
            let totals = Totals::of(batches, &self.ranks)?;
            self.gradients(batches, totals)?;
            seconds = started.elapsed().as_secs_f64();
        }
        Ok(seconds)
    }

    /// The first sequences as text, trained tokens in ⟦ ⟧.
    pub fn marked_samples(&self, batches: &[MicroBatch], count: usize) -> Result<Vec<(String, String)>> {
        let Some(first) = batches.first() else { return Ok(Vec::new()) };
        let batch = &first.batch;
        let mut samples = Vec::new();
        for (ends, origin) in batch.cu_seqlens.windows(2).zip(&first.origins).take(count) {
            let trained = |t: usize| t > ends[0] && batch.targets[t - 1] != IGNORED;
            let mut text = String::new();
            let mut t = ends[0];
            while t < ends[1] {
                let end = (t..ends[1]).find(|u| trained(*u) != trained(t)).unwrap_or(ends[1]);
                let piece = self.encoder.tokenizer.decode(&batch.ids[t..end], false)?;
                text += &if trained(t) { format!("⟦{piece}⟧") } else { piece };
                t = end;
            }
            samples.push((origin.to_string(), text));
        }
        Ok(samples)
    }

    /// Stored types by role of the tensor.
    pub fn dtypes_by_role(&self) -> Vec<RoleRow> {
        let mut rows: BTreeMap<(String, String), (usize, usize)> = BTreeMap::new();
        let mut add = |role: &str, dtype: &str, elements: usize| {
            let row = rows.entry((role.into(), dtype.into())).or_default();
            (row.0, row.1) = (row.0 + 1, row.1 + elements);
        };
        let storage = format!("{:?}", self.model.precision().params).to_lowercase();
        for spec in &self.model.specs.weights {
            add("weight", &storage, spec.len());
        }
        for spec in &self.model.specs.protected {
            let rounded = is_rounded(self.model.precision(), spec);
            let last = spec.name.trim_end_matches(".weight").rsplit('.').next().unwrap_or_default();
            add(
                &format!("protected: {last}"),
                if rounded { "f32 with bf16 values" } else { "f32" },
                spec.len(),
            );
        }
        for slot in &self.optimizer.slots {
            if slot.master.is_some() {
                add("master", "f32", slot.elements());
            }
            for tensor in &slot.state {
                add(tensor.kind.label, tensor.values.dtype(), tensor.values.len());
            }
            add("gradient", "f32", slot.elements());
        }
        rows.into_iter()
            .map(|((role, dtype), (tensors, elements))| (role, dtype, tensors, elements))
            .collect()
    }
}
