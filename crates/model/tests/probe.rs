//! Parameters as seen by a probe.

use ballast_model::probe::Recorder;
use ballast_model::{LossOptions, Probe, Recompute};

use crate::common::{MODELS, batch, load};

#[test]
fn every_parameter_is_seen_once_in_the_type_and_with_the_values_that_are_used() {
    for name in MODELS {
        for preset in ["f32", "bf16", "hf-bf16"] {
            let model = load(name, preset);
            let mut recorder = Recorder { pattern: Some("param.*".into()), ..Recorder::default() };
            model.logits(&batch(name), Some(&mut recorder)).unwrap();
            let storage = if preset == "f32" { "F32" } else { "BF16" };
            let weights = model.params.weights().iter().map(|weight| (storage, weight.to_f32()));
            let protected = model.params.protected().iter().map(|tensor| ("F32", tensor.values().to_vec()));
            for (spec, (dtype, values)) in model.specs.all().zip(weights.chain(protected)) {
                let site = format!("param.{}", spec.name);
                let seen: Vec<_> = recorder.seen.iter().filter(|seen| seen.site == site).collect();
                assert_eq!(seen.len(), 1, "{name} {preset}: {site}");
                assert_eq!((seen[0].dtype, &seen[0].shape), (dtype, &spec.shape), "{name} {preset}: {site}");
                assert!(seen[0].values == values, "{name} {preset}: {site}");
            }
            assert_eq!(recorder.seen.len(), model.specs.all().count(), "{name} {preset}");
        }
    }
}

/// Wants no site and panics if it is shown one.
struct Blind;

impl Probe for Blind {
    fn wants(&self, _: &str) -> bool {
        false
    }

    fn see(&mut self, site: &str, _: &'static str, _: &[usize], _: &[f32]) {
        panic!("{site} was copied");
    }
}

#[test]
fn a_probe_gets_no_copy_of_unwanted_tensors_and_a_step_shows_a_parameter_once() {
    let (model, batch) = (load("qwen3_5_moe", "bf16"), batch("qwen3_5_moe"));
    model.logits(&batch, Some(&mut Blind)).unwrap();
    let mut recorder = Recorder { pattern: Some("param.*".into()), ..Recorder::default() };
    let mut grads = model.grads();
    let options = LossOptions::default();
    model.forward_backward(&mut grads, &batch, &options, Recompute::Full, Some(&mut recorder)).unwrap();
    assert_eq!(recorder.seen.len(), model.specs.all().count());
}
