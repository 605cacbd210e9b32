//! What a run says about itself, a line of JSON for each event: `metrics.jsonl`.
//!
//! After a rollback the file has steps twice: as they were first taken, and as they were taken again. [`read`] gives the line of
//! history that counts.
//!
//! JSON has no NaN and no infinity, and a run that diverges has both: they are written as the strings `"NaN"`,
//! `"Infinity"` and `"-Infinity"`.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MetricsEntry {
    /// A step of the optimiser.
    Step(Step),
    /// A measurement on held-out data.
    Evaluation(Evaluation),
    /// Something that a person should know: a fault, a spike, a rollback, a site that was raised, a failed save.
    Event(Event),
}

/// A step of the optimiser.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// From 1 on.
    pub step: u64,
    /// Mean loss per trained token.
    #[serde(with = "any_float")]
    pub loss: f64,
    /// Of the indexers, where they are trained.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "any_float::option")]
    pub indexer_loss: Option<f64>,
    /// Of the routers' balance, where it is asked for.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "any_float::option")]
    pub balance_loss: Option<f64>,
    /// Learning rate.
    #[serde(with = "any_float")]
    pub learning_rate: f64,
    /// Norm of all gradients, before clipping.
    #[serde(with = "any_float")]
    pub gradient_norm: f64,
    /// The same by group of parameters.
    #[serde(with = "any_float::map")]
    pub group_norms: BTreeMap<String, f64>,
    /// Tokens that the step read.
    pub tokens: u64,
    /// Tokens that it was trained on.
    pub trained_tokens: u64,
    /// Seconds that the step took.
    #[serde(with = "any_float")]
    pub seconds: f64,
    /// Most memory that the process has had, in bytes.
    pub peak_memory: u64,
}

/// A measurement on held-out data.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// After this many steps.
    pub step: u64,
    /// Mean loss per trained token.
    #[serde(with = "any_float")]
    pub loss: f64,
    /// Share of trained tokens whose most likely prediction was right.
    #[serde(with = "any_float")]
    pub accuracy: f64,
    /// Tokens that were judged.
    pub tokens: u64,
    /// The same by where documents came from.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub by_source: BTreeMap<String, SourceScore>,
}

/// A part of an evaluation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SourceScore {
    /// Mean loss per trained token.
    #[serde(with = "any_float")]
    pub loss: f64,
    /// Share of trained tokens whose most likely prediction was right.
    #[serde(with = "any_float")]
    pub accuracy: f64,
    /// Tokens that were judged.
    pub tokens: u64,
}

/// Something that a person should know.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// At this step.
    pub step: u64,
    /// `fault`, `spike`, `skip`, `rollback`, `escalate`, `save`, `resume`, ...
    pub what: String,
    /// In words.
    pub text: String,
}

impl MetricsEntry {
    /// The step that it belongs to.
    pub fn step(&self) -> u64 {
        match self {
            MetricsEntry::Step(step) => step.step,
            MetricsEntry::Evaluation(evaluation) => evaluation.step,
            MetricsEntry::Event(event) => event.step,
        }
    }
}

/// What counts of a file's records: all events, and the steps and measurements that no rollback took back. The last line may be
/// torn, as a killed process leaves it; it is then left out.
pub fn read(path: &Path) -> Result<Vec<MetricsEntry>> {
    Ok(history(read_all(path)?))
}

/// The records of a run without the steps and measurements that it went back behind: those that a rollback took back (it says
/// the step that it went back to), and those of steps that were taken again.
pub fn history(records: Vec<MetricsEntry>) -> Vec<MetricsEntry> {
    // From the end on: what lies before `limit` has not been taken back by what came later.
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

/// What an event is called whose step is the one that the run went back to.
pub const ROLLBACK: &str = "rollback";

fn read_all(path: &Path) -> Result<Vec<MetricsEntry>> {
    let mut records = Vec::new();
    read_lines(path, |_, record| {
        records.push(record);
        Ok(())
    })?;
    Ok(records)
}

/// Appends records to a file, each on disk before the next.
pub struct MetricsWriter {
    path: PathBuf,
    file: File,
    /// Bytes of whole lines.
    length: u64,
}

impl MetricsWriter {
    /// Opens the file, or starts it. `resume_at` drops the lines of later steps, which will be run again; a torn
    /// last line goes in any case. What stays is copied beside the file and renamed, so that a crash loses nothing.
    pub fn open(path: &Path, resume_at: Option<u64>) -> Result<MetricsWriter> {
        if path.exists() {
            drop_later(path, resume_at.unwrap_or(u64::MAX))?;
        }
        let file =
            OpenOptions::new().create(true).append(true).open(path).map_err(Error::io(path, "open"))?;
        let length = file.metadata().map_err(Error::io(path, "look at it"))?.len();
        Ok(MetricsWriter { path: path.to_path_buf(), file, length })
    }

    /// Appends one line, in one call of the system: other readers see it whole. What a full disk took of a line is removed
    /// again.
    pub fn write(&mut self, record: &MetricsEntry) -> Result {
        let mut line = serde_json::to_vec(record)
            .map_err(std::io::Error::from)
            .map_err(Error::io(&self.path, "write to it"))?;
        line.push(b'\n');
        if let Err(error) = self.file.write_all(&line) {
            // Where this fails too, the next run finds a torn line.
            let _ = self.file.set_len(self.length);
            return Err(Error::io(&self.path, "write to it")(error));
        }
        self.length += line.len() as u64;
        Ok(())
    }
}

/// Calls `each` with every whole line, newline included, and its record. Gives whether the end is as a writer that
/// was not killed leaves it.
fn read_lines(path: &Path, mut each: impl FnMut(&[u8], MetricsEntry) -> Result) -> Result<bool> {
    let mut input = BufReader::new(File::open(path).map_err(Error::io(path, "open"))?);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        if input.read_until(b'\n', &mut line).map_err(Error::io(path, "read"))? == 0 {
            break;
        }
        if !line.ends_with(b"\n") {
            return Ok(false);
        }
        let record = serde_json::from_slice(&line).map_err(|error| Error::Data {
            file: path.to_path_buf(),
            line: Some(number),
            problem: format!("not a record of a run ({error}); remove the line, or move the file away"),
        })?;
        each(&line, record)?;
    }
    Ok(true)
}

/// Leaves out what is torn, and what belongs to steps after `last`.
fn drop_later(path: &Path, last: u64) -> Result {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let kept_path = path.with_file_name(format!(".{name}.kept"));
    match copy_kept(path, &kept_path, last) {
        Ok(true) => fs::rename(&kept_path, path).map_err(Error::io(path, "replace")),
        nothing_dropped => {
            let _ = fs::remove_file(&kept_path);
            nothing_dropped.map(|_| ())
        }
    }
}

/// Gives whether anything was left out. The copy is on disk then.
fn copy_kept(path: &Path, kept_path: &Path, last: u64) -> Result<bool> {
    let mut kept = BufWriter::new(File::create(kept_path).map_err(Error::io(kept_path, "create"))?);
    let mut later = false;
    let whole = read_lines(path, |line, record| {
        if record.step() <= last {
            return kept.write_all(line).map_err(Error::io(kept_path, "write to it"));
        }
        later = true;
        Ok(())
    })?;
    let file = kept.into_inner().map_err(|error| error.into_error());
    file.and_then(|file| file.sync_all()).map_err(Error::io(kept_path, "write to it"))?;
    Ok(later || !whole)
}

/// Floats that need not be finite.
mod any_float {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

    /// A float in JSON.
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
    fn what_is_written_is_read_and_further_runs_append() {
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
    fn what_is_not_finite_is_written_and_read() {
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
        // Files without such an event: a step that comes again counts, and nothing of later ones before it does.
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
