//! A run that stops between layers, with one layer's parameters in memory, has the bits of a run in
//! one call.

use ballast_model::params::{Part, Spec};
use ballast_model::{LayerwiseRun, LazyCheckpoint, LossOptions, Model, Precision, Recompute};

use crate::common::{MODELS, batch, folder};

fn is_in_layer(spec: &Spec, layer: usize) -> bool {
    spec.name.starts_with(&format!("layers.{layer}."))
}

fn is_outside(spec: &Spec) -> bool {
    !spec.name.starts_with("layers.")
}

fn check(name: &str, preset: &str) {
    let batch = batch(name);
    let model = Model::load(&folder(name), |config| Precision::preset(preset, config)).unwrap();
    let expected_logits = model.logits(&batch, None).unwrap();
    let mut expected = model.grads();
    model.forward_backward(&mut expected, &batch, &LossOptions::default(), Recompute::Full, None).unwrap();

    let stored = LazyCheckpoint::open(&folder(name)).unwrap();
    let mut thin = stored.model(Precision::preset(preset, &stored.config).unwrap()).unwrap();
    let layers = stored.config.layers.len();
    let mut grads = model.grads();
    thin.hold(&stored.read(is_outside).unwrap());
    let mut pass = LayerwiseRun::new(&thin, &batch, Some(Recompute::Full), LossOptions::default()).unwrap();
    pass.forward(&thin, Part::Embedding, None).unwrap();
    for layer in 0..layers {
        thin.hold(&stored.read(|spec| is_in_layer(spec, layer)).unwrap());
        assert!(thin.params.bytes() < model.params.bytes());
        pass.forward(&thin, Part::Layer(layer), None).unwrap();
    }
    thin.hold(&stored.read(is_outside).unwrap());
    let half = batch.tokens() / 2;
    let mut logits = pass.logits(&thin, 0..half, None).unwrap();
    logits.extend(pass.logits(&thin, half..batch.tokens(), None).unwrap());
    assert!(logits.iter().zip(&expected_logits).all(|(a, b)| a.to_bits() == b.to_bits()), "{name} {preset}");
    pass.backward(&thin, &mut grads, Part::Head, None).unwrap();
    for layer in (0..layers).rev() {
        thin.hold(&stored.read(|spec| is_in_layer(spec, layer)).unwrap());
        pass.backward(&thin, &mut grads, Part::Layer(layer), None).unwrap();
    }
    thin.hold(&stored.read(is_outside).unwrap());
    pass.backward(&thin, &mut grads, Part::Embedding, None).unwrap();
    let mut compared = 0;
    for (spec, (a, b)) in model.specs.all().zip(grads.all().zip(expected.all())) {
        assert!(a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()), "{name} {preset}: {}", spec.name);
        compared += !b.is_empty() as usize;
    }
    let learned = model.specs.all().filter(|spec| spec.trainable).count();
    assert_eq!(compared, learned, "{name}: every parameter that is learned");
}

#[test]
fn one_layer_at_a_time_gives_the_same_bits_in_f32() {
    for name in MODELS {
        check(name, "f32");
    }
}

#[test]
fn one_layer_at_a_time_gives_the_same_bits_in_bf16() {
    for name in MODELS {
        check(name, "hf-bf16");
    }
}

#[test]
fn a_pass_that_kept_nothing_cannot_go_back() {
    let (stored, batch) = (LazyCheckpoint::open(&folder("gemma2")).unwrap(), batch("gemma2"));
    let mut model = stored.model(Precision::f32()).unwrap();
    model.hold(&stored.read(|_| true).unwrap());
    let mut pass = LayerwiseRun::new(&model, &batch, None, LossOptions::default()).unwrap();
    pass.forward(&model, Part::Embedding, None).unwrap();
    pass.forward(&model, Part::Layer(0), None).unwrap();
    let problem = pass.backward(&model, &mut model.grads(), Part::Layer(0), None).unwrap_err().to_string();
    assert!(problem.contains("no saved activations"), "{problem}");
}

#[test]
fn a_tensor_that_is_rounded_alone_is_the_only_one_that_changes() {
    let stored = LazyCheckpoint::open(&folder("qwen3_5")).unwrap();
    let all = stored.read(|_| true).unwrap();
    let mut precision = Precision::f32();
    precision.rounded.push("linear_attn.A_log".into());
    let mut model = stored.model(precision).unwrap();
    model.hold(&all);
    assert_eq!(model.params.weights(), all.weights());
    let mut changed = 0;
    for ((spec, a), b) in model.specs.protected.iter().zip(model.params.protected()).zip(all.protected()) {
        if spec.name.ends_with("A_log") {
            changed += (a != b) as usize;
            assert!(a.values().iter().all(|x| x.to_bits() & 0xffff == 0), "{}", spec.name);
        } else {
            assert_eq!(a, b, "{}", spec.name);
        }
    }
    assert!(changed > 0);
}
