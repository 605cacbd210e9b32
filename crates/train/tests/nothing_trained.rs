//! Data with few or no trained tokens: skipped and counted, or an error if there are none.

use ballast_train::metrics::{MetricsEntry, read};
use ballast_train::{Error, Trainer};

use crate::common::{Listener, completions, on_files};

fn refused(trainer: ballast_train::Result<Trainer>) -> String {
    match trainer.and_then(|mut trainer| trainer.run(&Listener::default())) {
        Err(error @ Error::Data { .. }) => error.to_string(),
        Err(error) => panic!("another kind of error: {error}"),
        Ok(summary) => panic!("trained to step {}", summary.step),
    }
}

#[test]
fn answers_beyond_the_sequence_are_an_error_before_the_first_step() {
    let folder = tempfile::tempdir().unwrap();
    let data = completions(&[40, 50, 60], "answer");
    let config = on_files(folder.path(), "run", &[("a.jsonl", &data)], &["data.packing=padded"]);
    let error = refused(Trainer::new(config));
    assert!(error.contains("a.jsonl: nothing in it is trained on"), "{error}");
    assert!(error.contains("within the first 16 tokens (data.sequence_length)"), "{error}");
    assert!(!folder.path().join("run/model").exists());
}

#[test]
fn documents_whose_answer_is_cut_off_are_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let data = completions(&[40, 4, 60], "answer");
    let config = on_files(folder.path(), "run", &[("a.jsonl", &data)], &["data.packing=padded"]);
    let listener = Listener::default();
    Trainer::new(config).unwrap().run(&listener).unwrap();
    let trained = |record: &MetricsEntry| match record {
        MetricsEntry::Step(step) => Some(step.trained_tokens),
        _ => None,
    };
    let trained: Vec<u64> = listener.records.lock().unwrap().borrow().iter().filter_map(trained).collect();
    assert_eq!(trained.len(), 4);
    assert!(trained.iter().all(|tokens| *tokens > 0), "{trained:?}");
}

#[test]
fn a_step_without_a_token_to_train_on_is_skipped_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let data = completions(&[60, 61, 62], "answer");
    let config = on_files(folder.path(), "run", &[("a.jsonl", &data)], &["steps=3"]);
    let mut trainer = Trainer::new(config).unwrap();
    let listener = Listener::default();
    let summary = trainer.run(&listener).unwrap();
    assert_eq!(summary.step, 3);
    assert!(trainer.sentinel.untrained >= 3, "{}", trainer.sentinel.untrained);
    assert_eq!(trainer.optimizer.updates, 3);
    let skipped =
        listener.events().iter().filter(|(what, text)| what == "skip" && text.contains("none of")).count();
    assert_eq!(skipped as u64, trainer.sentinel.untrained);
    let records = read(&folder.path().join("run/metrics.jsonl")).unwrap();
    assert!(
        records.iter().all(|record| !matches!(record, MetricsEntry::Step(step) if step.trained_tokens == 0))
    );
    let report = std::fs::read_to_string(summary.report.unwrap()).unwrap();
    assert!(report.contains("without a token to train on"));
}

#[test]
fn data_that_is_cut_so_that_nothing_is_trained_on_is_an_error() {
    // In sequences of two tokens, the third one of a document stands alone: there is nothing to predict it
    // from.
    let folder = tempfile::tempdir().unwrap();
    let data = completions(&[2, 2, 2], "c");
    let settings = ["data.sequence_length=2", "data.add_eos=false"];
    let error = refused(Trainer::new(on_files(folder.path(), "run", &[("a.jsonl", &data)], &settings)));
    assert!(
        error.contains("a.jsonl: in sequences of 2 tokens, none of the data's tokens is trained on"),
        "{error}"
    );
}

#[test]
fn an_evaluation_without_tokens_has_no_score_and_is_not_the_best() {
    for packing in ["data.packing=packed", "data.packing=padded"] {
        let folder = tempfile::tempdir().unwrap();
        let files =
            [("a.jsonl", completions(&[3, 4], "answer")), ("held-out.jsonl", completions(&[300], "answer"))];
        std::fs::write(folder.path().join("held-out.jsonl"), &files[1].1).unwrap();
        let validation =
            format!("data.validation={:?}", folder.path().join("held-out.jsonl").display().to_string());
        let settings = [&validation, packing, "evaluation.every=2", "samples.count=1"];
        let config = on_files(folder.path(), "run", &[("a.jsonl", &files[0].1)], &settings);
        let mut trainer = Trainer::new(config).unwrap();
        let listener = Listener::default();
        let summary = trainer.run(&listener).unwrap();
        assert_eq!((summary.evaluation, trainer.best), (None, None), "{packing}");
        let said = listener.events().into_iter().filter(|(what, _)| what == "no score").count();
        assert_eq!(said, 2, "{packing}");
        let records = read(&folder.path().join("run/metrics.jsonl")).unwrap();
        assert!(!records.iter().any(|record| matches!(record, MetricsEntry::Evaluation(_))));
    }
}
