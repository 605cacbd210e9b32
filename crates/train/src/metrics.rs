//! Metrics of a run, one line of JSON per entry: `metrics.jsonl`.
//!
//! After a rollback the file has some steps twice: as first taken, and as repeated. [`read`] returns only
//! those that count.
//!
//! JSON has no NaN and no infinity, and a diverging run has both: they are written as the strings `"NaN"`,
//! `"Infinity"` and `"-Infinity"`.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use ballast_files::regular::open_regular;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// One line of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MetricsEntry {
    /// An optimizer step.
    Step(Step),
    /// An evaluation on held-out data.
    Evaluation(Evaluation),
    /// A notice: fault, spike, rollback, escalated site, failed save.
    Event(Event),
}

/// An optimizer step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Step number, from 1.
    pub step: u64,
    /// Mean loss per trained token, as it is minimized: with label smoothing and z-loss.
    #[serde(with = "any_float")]
    pub loss: f64,
    /// Mean cross-entropy per trained token, which a held-out loss is compared with. Present if `loss` has other
    /// parts: label smoothing or z-loss.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "any_float::option")]
    pub cross_entropy: Option<f64>,
    /// Loss of the indexers, if they are trained.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "any_float::option")]
    pub indexer_loss: Option<f64>,
    /// Balance loss of the routers, if configured.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "any_float::option")]
    pub balance_loss: Option<f64>,
    /// Learning rate.
    #[serde(with = "any_float")]
    pub learning_rate: f64,
    /// Global gradient norm, before clipping.
    #[serde(with = "any_float")]
    pub gradient_norm: f64,
    /// Gradient norm by parameter group.
    #[serde(with = "any_float::map")]
    pub group_norms: BTreeMap<String, f64>,
    /// Number of tokens in the step.
    pub tokens: u64,
    /// Number of tokens with a loss.
    pub trained_tokens: u64,
    /// Duration of the step in seconds.
    #[serde(with = "any_float")]
    pub seconds: f64,
    /// Peak memory of the process in bytes.
    pub peak_memory: u64,
    /// Use of the ranks, in a run of several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<RankUse>,
}

/// Use of the ranks in a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankUse {
    /// Fraction of the step that each rank spent waiting for others.
    pub waiting: Vec<f64>,
    /// Peak memory of each rank in bytes.
    pub peak_memory: Vec<u64>,
    /// Bytes sent by all ranks, by kind.
    pub sent: BTreeMap<String, u64>,
}

/// An evaluation on held-out data.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Number of steps before the evaluation.
    pub step: u64,
    /// Mean cross-entropy per trained token, without label smoothing and z-loss.
    #[serde(with = "any_float")]
    pub loss: f64,
    /// Fraction of trained tokens whose most likely prediction is right.
    #[serde(with = "any_float")]
    pub accuracy: f64,
    /// Number of evaluated tokens.
    pub tokens: u64,
    /// Scores by source of the documents.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub by_source: BTreeMap<String, SourceScore>,
}

/// Scores of one source.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SourceScore {
    /// Mean cross-entropy per trained token, without label smoothing and z-loss.
    #[serde(with = "any_float")]
    pub loss: f64,
    /// Fraction of trained tokens whose most likely prediction is right.
    #[serde(with = "any_float")]
    pub accuracy: f64,
    /// Number of evaluated tokens.
    pub tokens: u64,
}

/// A notice.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Step of the notice.
    pub step: u64,
    /// Kind: `fault`, `spike`, `skip`, `rollback`, `escalate`, `save failed`, `resume`, ...
    pub what: String,
    /// Message.
    pub text: String,
}

impl MetricsEntry {
    /// Step of the entry.
    pub fn step(&self) -> u64 {
        match self {
            MetricsEntry::Step(step) => step.step,
            MetricsEntry::Evaluation(evaluation) => evaluation.step,
            MetricsEntry::Event(event) => event.step,
        }
    }
}

/// Reads the entries of a file that count: all events, and the steps and evaluations that no rollback undid.
/// An incomplete last line, as a killed process leaves it, is ignored.
pub fn read(path: &Path) -> Result<Vec<MetricsEntry>> {
    Ok(history(read_all(path)?))
}

/// Removes the steps and evaluations that a rollback undid (its event names the step it returned to), and
/// those of steps that were repeated.
pub(crate) fn history(records: Vec<MetricsEntry>) -> Vec<MetricsEntry> {
    // Backward: entries of steps below `limit` were not undone by later ones.
    let mut limit = u64::MAX;
    let mut kept: Vec<MetricsEntry> = Vec::with_capacity(records.len());
    for record in records.into_iter().rev() {
        match &record {
            MetricsEntry::Event(event) => {
                if event.what == ROLLBACK {
                    limit = limit.min(event.step.saturating_add(1));
                }
            }
            record if record.step() >= limit => continue,
            MetricsEntry::Step(step) => limit = step.step,
            MetricsEntry::Evaluation(_) => {}
        }
        kept.push(record);
    }
    kept.reverse();
    kept
}

/// Kind of the event of a rollback; its step is the one that the run returned to.
pub(crate) const ROLLBACK: &str = "rollback";

fn read_all(path: &Path) -> Result<Vec<MetricsEntry>> {
    let mut records = Vec::new();
    read_lines(path, None, |_, record| {
        records.push(record);
        Ok(())
    })?;
    Ok(records)
}

/// Appends entries to a file, one system call each.
pub(crate) struct MetricsWriter {
    path: PathBuf,
    file: File,
    /// Length of the complete lines in bytes.
    length: u64,
    destroyed: u64,
}

impl MetricsWriter {
    /// Opens or creates the file. `resume_at` removes the lines of later steps, which will be repeated; an
    /// incomplete last line is removed in any case, and so are lines with the zero bytes that a loss of power
    /// leaves in place of what was not on the disk yet. The remaining lines are copied beside the file and
    /// renamed, so that a crash loses nothing.
    pub fn open(path: &Path, resume_at: Option<u64>) -> Result<MetricsWriter> {
        let mut destroyed = 0;
        if path.exists() {
            destroyed = drop_later(path, resume_at.unwrap_or(u64::MAX))?;
        }
        let file =
            OpenOptions::new().create(true).append(true).open(path).map_err(Error::io(path, "open"))?;
        let length = file.metadata().map_err(Error::io(path, "read the size"))?.len();
        Ok(MetricsWriter { path: path.to_path_buf(), file, length, destroyed })
    }

    /// Appends one line in one system call, so that readers see it complete. A line that a full disk cut is
    /// removed again.
    pub fn write(&mut self, record: &MetricsEntry) -> Result {
        let mut line = serde_json::to_vec(record)
            .map_err(std::io::Error::from)
            .map_err(Error::io(&self.path, "write"))?;
        line.push(b'\n');
        if let Err(error) = self.file.write_all(&line) {
            // If this fails too, the next run finds an incomplete line.
            let _ = self.file.set_len(self.length);
            return Err(Error::io(&self.path, "write")(error));
        }
        self.length += line.len() as u64;
        Ok(())
    }

    /// Number of lines that a loss of power had destroyed, and that were left out when the file was opened.
    pub fn destroyed(&self) -> u64 {
        self.destroyed
    }

    /// Flushes the file, so that a loss of power takes no line that was written before.
    pub fn sync(&self) -> Result {
        self.file.sync_data().map_err(Error::io(&self.path, "flush"))
    }
}

/// Calls `each` with every complete line, newline included, and its entry. Returns false if the last line is
/// incomplete. Lines with zero bytes are counted in `destroyed` where it is given, else they are an error.
fn read_lines(
    path: &Path,
    mut destroyed: Option<&mut u64>,
    mut each: impl FnMut(&[u8], MetricsEntry) -> Result,
) -> Result<bool> {
    let mut input = BufReader::new(open_regular(path).map_err(Error::io(path, "open"))?);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        if input.read_until(b'\n', &mut line).map_err(Error::io(path, "read"))? == 0 {
            break;
        }
        if !line.ends_with(b"\n") {
            return Ok(false);
        }
        if let Some(destroyed) = destroyed.as_deref_mut()
            && line.contains(&0)
        {
            *destroyed += 1;
            continue;
        }
        let record = serde_json::from_slice(&line).map_err(|error| Error::Data {
            file: path.to_path_buf(),
            line: Some(number),
            problem: format!("not a record of a run ({error}); remove the line or move the file away"),
        })?;
        each(&line, record)?;
    }
    Ok(true)
}

/// Removes an incomplete last line, destroyed lines, whose number it returns, and the lines of steps after `last`.
fn drop_later(path: &Path, last: u64) -> Result<u64> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let kept_path = path.with_file_name(format!(".{name}.kept"));
    let mut destroyed = 0;
    match copy_kept(path, &kept_path, last, &mut destroyed) {
        Ok(true) => fs::rename(&kept_path, path).map_err(Error::io(path, "replace"))?,
        nothing_dropped => {
            let _ = fs::remove_file(&kept_path);
            nothing_dropped?;
        }
    }
    Ok(destroyed)
}

/// Copies the lines that stay. Returns true, with the copy on disk, if any were removed.
fn copy_kept(path: &Path, kept_path: &Path, last: u64, destroyed: &mut u64) -> Result<bool> {
    let mut kept = BufWriter::new(File::create(kept_path).map_err(Error::io(kept_path, "create"))?);
    let mut later = false;
    let whole = read_lines(path, Some(&mut *destroyed), |line, record| {
        if record.step() <= last {
            return kept.write_all(line).map_err(Error::io(kept_path, "write"));
        }
        later = true;
        Ok(())
    })?;
    let file = kept.into_inner().map_err(|error| error.into_error());
    file.and_then(|file| file.sync_all()).map_err(Error::io(kept_path, "write"))?;
    Ok(later || !whole || *destroyed > 0)
}

/// Serialization of floats that may be non-finite.
mod any_float {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

    /// A float, or one of three strings.
    pub(super) struct AnyFloat(pub f64);

    impl Serialize for AnyFloat {
        fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
            match self.0 {
                value if value.is_nan() => to.serialize_str("NaN"),
                f64::INFINITY => to.serialize_str("Infinity"),
                f64::NEG_INFINITY => to.serialize_str("-Infinity"),
                value => to.serialize_f64(value),
            }
        }
    }

    impl<'de> Deserialize<'de> for AnyFloat {
        fn deserialize<D: Deserializer<'de>>(from: D) -> Result<AnyFloat, D::Error> {
            struct Visitor;
            impl de::Visitor<'_> for Visitor {
                type Value = f64;
                fn expecting(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    to.write_str("a number, \"NaN\", \"Infinity\" or \"-Infinity\"")
                }
                fn visit_f64<E: de::Error>(self, value: f64) -> Result<f64, E> {
                    Ok(value)
                }
                fn visit_u64<E: de::Error>(self, value: u64) -> Result<f64, E> {
                    Ok(value as f64)
                }
                fn visit_i64<E: de::Error>(self, value: i64) -> Result<f64, E> {
                    Ok(value as f64)
                }
                fn visit_str<E: de::Error>(self, value: &str) -> Result<f64, E> {
                    match value {
                        "NaN" => Ok(f64::NAN),
                        "Infinity" => Ok(f64::INFINITY),
                        "-Infinity" => Ok(f64::NEG_INFINITY),
                        other => Err(E::invalid_value(de::Unexpected::Str(other), &self)),
                    }
                }
            }
            from.deserialize_any(Visitor).map(AnyFloat)
        }
    }

    pub(super) fn serialize<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
        AnyFloat(*value).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        AnyFloat::deserialize(from).map(|value| value.0)
    }

    pub(super) mod option {
        use super::*;

        pub(in super::super) fn serialize<S: Serializer>(
            value: &Option<f64>,
            to: S,
        ) -> Result<S::Ok, S::Error> {
            value.map(AnyFloat).serialize(to)
        }

        pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
            from: D,
        ) -> Result<Option<f64>, D::Error> {
            Option::<AnyFloat>::deserialize(from).map(|value| value.map(|value| value.0))
        }
    }

    pub(super) mod map {
        use super::*;
        use std::collections::BTreeMap;

        pub(in super::super) fn serialize<S: Serializer>(
            values: &BTreeMap<String, f64>,
            to: S,
        ) -> Result<S::Ok, S::Error> {
            to.collect_map(values.iter().map(|(name, value)| (name, AnyFloat(*value))))
        }

        pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
            from: D,
        ) -> Result<BTreeMap<String, f64>, D::Error> {
            let values = BTreeMap::<String, AnyFloat>::deserialize(from)?;
            Ok(values.into_iter().map(|(name, value)| (name, value.0)).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64) -> MetricsEntry {
        let group_norms = [("embedding".to_string(), 0.25), ("mlp".to_string(), 1.5)].into();
        MetricsEntry::Step(Step {
            step,
            loss: 2.0 / step as f64,
            learning_rate: 1e-3,
            group_norms,
            ..Step::default()
        })
    }

    fn event(step: u64) -> MetricsEntry {
        MetricsEntry::Event(Event { step, what: "spike".into(), text: "twice\nthe median \u{1F6A9}".into() })
    }

    fn evaluation(step: u64) -> MetricsEntry {
        MetricsEntry::Evaluation(Evaluation {
            step,
            loss: 0.5,
            accuracy: 0.75,
            tokens: 64,
            ..Evaluation::default()
        })
    }

    fn write_all(path: &Path, resume_at: Option<u64>, records: &[MetricsEntry]) {
        let mut writer = MetricsWriter::open(path, resume_at).unwrap();
        records.iter().for_each(|record| writer.write(record).unwrap());
    }

    fn steps(path: &Path) -> Vec<u64> {
        read(path).unwrap().iter().map(MetricsEntry::step).collect()
    }

    fn tear(path: &Path) {
        let line = serde_json::to_string(&event(9)).unwrap();
        let cut = line.find('\u{1F6A9}').unwrap() + 2;
        OpenOptions::new().append(true).open(path).unwrap().write_all(&line.as_bytes()[..cut]).unwrap();
    }

    #[test]
    fn written_metrics_are_read_and_further_runs_append() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let records = [step(1), evaluation(1), event(2)];
        write_all(&path, None, &records);
        assert_eq!(read(&path).unwrap(), records);
        write_all(&path, None, &[step(3)]);
        assert_eq!(steps(&path), [1, 1, 2, 3]);
    }

    #[test]
    fn floats_are_read_to_the_last_bit() {
        // The first is off by one bit without the feature `float_roundtrip` of serde_json.
        for value in [2.1166100557845278, 0.1, 1e-320, f64::MAX, 5.527299417230675, 1.0 / 3.0] {
            let record = MetricsEntry::Step(Step { gradient_norm: value, ..Step::default() });
            let text = serde_json::to_string(&record).unwrap();
            assert_eq!(serde_json::from_str::<MetricsEntry>(&text).unwrap(), record, "{text}");
        }
    }

    #[test]
    fn non_finite_metrics_are_written_and_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let record = MetricsEntry::Step(Step {
            step: 1,
            loss: f64::NAN,
            indexer_loss: Some(f64::INFINITY),
            group_norms: [("mlp".to_string(), f64::NEG_INFINITY)].into(),
            ..Step::default()
        });
        write_all(&path, None, &[record]);
        let [MetricsEntry::Step(read)] = &read(&path).unwrap()[..] else { panic!() };
        assert!(read.loss.is_nan());
        assert_eq!(read.indexer_loss, Some(f64::INFINITY));
        assert_eq!(read.balance_loss, None);
        assert_eq!(read.group_norms["mlp"], f64::NEG_INFINITY);
        let score = SourceScore { loss: f64::NAN, accuracy: f64::INFINITY, tokens: 3 };
        let by_source = [("task".to_string(), score)].into();
        let record =
            MetricsEntry::Evaluation(Evaluation { loss: f64::NAN, by_source, ..Evaluation::default() });
        write_all(&path, None, &[record]);
        let records = self::read(&path).unwrap();
        let MetricsEntry::Evaluation(read) = &records[1] else { panic!() };
        assert!(read.loss.is_nan() && read.by_source["task"].loss.is_nan());
        assert_eq!(read.by_source["task"].accuracy, f64::INFINITY);
    }

    #[test]
    fn a_resumed_run_drops_later_steps_and_the_torn_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        write_all(&path, None, &[step(1), step(2), evaluation(2), step(3), event(3)]);
        let before = fs::read(&path).unwrap();
        tear(&path);
        assert_eq!(steps(&path), [1, 2, 2, 3, 3]);
        write_all(&path, Some(2), &[step(3)]);
        assert_eq!(read(&path).unwrap(), [step(1), step(2), evaluation(2), step(3)]);
        assert!(before.starts_with(&fs::read(&path).unwrap()[..before.len() / 2]));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    fn rollback(to: u64) -> MetricsEntry {
        MetricsEntry::Event(Event { step: to, what: ROLLBACK.into(), text: "back".into() })
    }

    #[test]
    fn after_a_rollback_every_step_is_read_once_as_it_was_taken_last() {
        let again = |step| MetricsEntry::Step(Step { step, loss: 7.0, ..Step::default() });
        let records = [
            step(1),
            step(2),
            evaluation(2),
            step(3),
            event(3),
            evaluation(3),
            rollback(1),
            again(2),
            again(3),
            rollback(2),
            again(3),
        ];
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        write_all(&path, None, &records);
        let expected = [step(1), event(3), rollback(1), again(2), rollback(2), again(3)];
        assert_eq!(read(&path).unwrap(), expected);
        // A run that ends right after it went back.
        assert_eq!(history(records[..7].to_vec()), [step(1), event(3), rollback(1)]);
        // Files without such an event: a step that comes again counts, and nothing of later ones before it
        // does.
        let untold = vec![step(1), step(2), evaluation(2), again(2)];
        assert_eq!(history(untold), [step(1), again(2)]);
    }

    #[test]
    fn a_torn_line_does_not_swallow_the_next_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        write_all(&path, None, &[step(1)]);
        tear(&path);
        write_all(&path, None, &[step(2)]);
        assert_eq!(steps(&path), [1, 2]);
    }

    #[test]
    fn lines_that_a_loss_of_power_has_destroyed_are_left_out_and_counted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        write_all(&path, None, &[step(1), step(2), step(3), step(4)]);
        let mut bytes = fs::read(&path).unwrap();
        let ends: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at] == b'\n').collect();
        bytes[ends[1] + 1..ends[2]].fill(0);
        fs::write(&path, &bytes).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("metrics.jsonl, line 3: not a record"));
        let writer = MetricsWriter::open(&path, Some(2)).unwrap();
        assert_eq!((writer.destroyed(), steps(&path)), (1, vec![1, 2]));
        writer.sync().unwrap();
        assert_eq!(MetricsWriter::open(&path, Some(2)).unwrap().destroyed(), 0);
    }

    #[test]
    fn a_malformed_line_is_named_and_the_file_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        write_all(&path, None, &[step(1), step(5)]);
        let mut text = fs::read_to_string(&path).unwrap();
        text.push_str("{\"kind\":\"step\"}\n");
        fs::write(&path, &text).unwrap();
        for error in [read(&path).unwrap_err(), MetricsWriter::open(&path, Some(2)).err().unwrap()] {
            let message = error.to_string();
            assert!(message.contains("metrics.jsonl, line 3: not a record"), "{message}");
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
