//! Each choice first changes the site that it names, by as much as theory says.

use ballast_kernels::Rounding;
use ballast_lab::experiment::Arithmetic;
use ballast_lab::findings::Kind;
use ballast_lab::{Choice, More};
use ballast_model::probe::Recorder;
use ballast_model::{LazyCheckpoint, LossOptions, Model, Precision, Recompute, Site};

use crate::common::{MODELS, batch, defaults, folder, run, study};

/// First tensor whose bits differ, among all that a probe sees.
fn first_difference(model: &str, choice: &Choice) -> Option<String> {
    let see = |precision: &Precision| {
        let model = Model::load(&folder(model), |_| Ok(precision.clone())).unwrap();
        let mut recorder = Recorder::default();
        let (mut grads, batch) = (model.grads(), batch_of(model.config.vocabulary));
        model.logits(&batch, Some(&mut recorder)).unwrap();
        let options = LossOptions::default();
        model.forward_backward(&mut grads, &batch, &options, Recompute::None, Some(&mut recorder)).unwrap();
        recorder.seen
    };
    let (plain, lowered) = (see(&Precision::f32()), see(&choice.precision));
    assert_eq!(plain.len(), lowered.len());
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let differing = plain.iter().zip(&lowered).find(|(a, b)| bits(&a.values) != bits(&b.values));
    differing.map(|(_, seen)| seen.site.clone())
}

/// Sequence length at which an indexer has a choice.
fn batch_of(vocabulary: usize) -> ballast_model::Batch {
    ballast_model::Batch::rows((0..96).map(|t| (t * 37 % vocabulary) as u32).collect(), 48).unwrap()
}

#[test]
fn every_single_choice_changes_its_own_site_first() {
    let mut checked = 0;
    for name in MODELS {
        let checkpoint = LazyCheckpoint::open(&folder(name)).unwrap();
        for choice in defaults(&checkpoint).iter().filter(|choice| choice.is_single()) {
            let site = choice.name.split('=').next().unwrap();
            let first = first_difference(name, choice);
            if choice.kind == Kind::Tensor {
                let end = choice.precision.rounded[0].as_str();
                let values = checkpoint.read(|spec| spec.name.ends_with(end)).unwrap();
                let carries = values
                    .protected()
                    .iter()
                    .any(|tensor| tensor.values().iter().any(|x| Rounding::Bf16.round(*x) != *x));
                match first {
                    Some(first) => {
                        assert!(first.starts_with("param.") && first.ends_with(end), "{name} {site}: {first}")
                    }
                    None => assert!(!carries, "{name}: {site} carries more than bf16, and nothing changed"),
                }
            } else {
                let first = first.unwrap_or_else(|| panic!("{name}: {} changes nothing", choice.name));
                let sites = Site::behind(&first);
                assert!(
                    sites.contains(&Site::named(site).unwrap()),
                    "{name}: {} changes {first} first, which is {sites:?}",
                    choice.name
                );
            }
            checked += 1;
        }
    }
    assert!(checked > 80, "{checked}");
}

#[test]
fn a_rounded_a_log_moves_rates_by_two_to_the_minus_nine_of_it() {
    let findings = study("qwen3_5", Arithmetic::F32, false, |study| {
        let choice = Choice::parse("A_log", &study.checkpoint.config, &study.checkpoint.specs).unwrap();
        (study.choices(vec![choice], More::default()).unwrap(), study.checkpoint.read(|_| true).unwrap())
    });
    let (findings, values) = findings;
    let checkpoint = LazyCheckpoint::open(&folder("qwen3_5")).unwrap();
    let mut checked = 0;
    for error in &run(&findings, "A_log").decay {
        let name = format!("layers.{}.linear_attn.A_log", error.layer);
        let index = checkpoint.specs.protected.iter().position(|spec| spec.name == name).unwrap();
        let a_log = values.protected()[index].values()[error.head] as f64;
        // Rounding to 8 bits moves A_log by at most 2^-9 of the power of two above it, the rate by as much
        // relatively.
        let most = 2f64.powi(-9) * 2f64.powf(a_log.abs().log2().ceil());
        assert!(
            error.rate_error.abs() <= most.exp_m1() * (1.0 + 1e-6),
            "{name}: {} > {most}",
            error.rate_error
        );
        checked += 1;
    }
    assert!(checked > 0);
    let largest = |of: fn(&ballast_lab::findings::DecayError) -> f64| {
        run(&findings, "A_log").decay.iter().map(of).fold(0.0, f64::max)
    };
    // Within a factor of 4 of the bound: of a few heads, one is rounded by a quarter of what is possible at
    // least.
    assert!(largest(|e| e.rate_error.abs()) > 2f64.powi(-9) / 4.0);
    assert!(run(&findings, "f32").decay.iter().all(|e| e.rate_error == 0.0 && e.per_token_error == 0.0));
}

#[test]
fn lowered_logits_are_off_by_half_an_ulp_at_most() {
    for name in ["gemma3", "qwen3_next", "deepseek_v32"] {
        let findings = study(name, Arithmetic::F32, false, |study| {
            let choice =
                |name: &str| Choice::parse(name, &study.checkpoint.config, &study.checkpoint.specs).unwrap();
            study.choices(vec![choice("qk_product"), choice("qk_product=f16")], More::default()).unwrap()
        });
        for (choice, dtype) in [("qk_product", Rounding::Bf16), ("qk_product=f16", Rounding::F16)] {
            // The first layer with attention: later ones see other inputs.
            let (exact, found) = (&findings.attention[0], &run(&findings, choice).attention[0]);
            let half = 0.5 * dtype.ulp(exact.largest).unwrap();
            // The largest error of thousands of logits is near half an ulp of the upper binade, or of the
            // next one.
            assert!(
                found.max_abs <= half * (1.0 + 1e-6) && found.max_abs >= half / 4.0,
                "{name} {choice}: {}",
                found.max_abs
            );
        }
    }
}

#[test]
fn sampled_logits_are_those_that_the_model_shows() {
    for name in ["gemma2", "gemma4_ple", "qwen3_5", "deepseek_v32"] {
        let batch = batch(name);
        for preset in ["f32", "hf-bf16"] {
            let model = Model::load(&folder(name), |config| Precision::preset(preset, config)).unwrap();
            let mut recorder = Recorder { pattern: Some("layers.*.self_attn.logits".into()), seen: vec![] };
            model.logits(&batch, Some(&mut recorder)).unwrap();
            let findings = study(name, Arithmetic::F32, false, |study| {
                study
                    .choices(
                        vec![
                            Choice::parse(preset, &study.checkpoint.config, &study.checkpoint.specs).unwrap(),
                        ],
                        More::default(),
                    )
                    .unwrap()
            });
            let attention = &run(&findings, preset).attention;
            assert_eq!(attention.len(), recorder.seen.len(), "{name}");
            for (found, seen) in attention.iter().zip(&recorder.seen) {
                // Every query of two rows of 29 is in the sample but the first of each, which sees itself
                // alone.
                let of_others = seen.values.chunks(29).enumerate().filter(|(row, _)| row % 29 > 0);
                let largest = of_others.flat_map(|(_, row)| row).fold(0f32, |a, b| a.max(b.abs())) as f64;
                assert!(
                    (found.largest - largest).abs() <= 1e-6 * largest,
                    "{name} {preset}: {} for {largest}",
                    found.largest
                );
            }
        }
    }
}

#[test]
fn names_that_mean_nothing_are_refused_with_those_that_do() {
    let checkpoint = LazyCheckpoint::open(&folder("qwen3_5")).unwrap();
    for (text, problem) in [
        ("A_logg", "unknown term \"A_logg\""),
        ("A_log+bf16", "must come first"),
        ("A_log=f16", "bf16 only"),
        ("logits=f8", "f32, bf16 or f16"),
        ("", "unknown term \"\""),
    ] {
        let error = Choice::parse(text, &checkpoint.config, &checkpoint.specs).unwrap_err().to_string();
        assert!(error.contains(problem), "{text}: {error}");
    }
    let several = Choice::parse("bf16+A_log+state=f16", &checkpoint.config, &checkpoint.specs).unwrap();
    assert_eq!((several.kind, several.precision.site(Site::State)), (Kind::Several, Rounding::F16));
    assert_eq!(several.precision.rounded, ["linear_attn.A_log"]);
}
