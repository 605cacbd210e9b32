//! The site `residual`: the residual stream and its gradient.

use ballast_kernels::Rounding;
use ballast_model::probe::Recorder;
use ballast_model::{Batch, LossOptions, Model, Plan, Precision, Recompute, Site, Step};

use crate::common::{MODELS, batch, error, folder, ids, load};

const ROUNDINGS: [Rounding; 3] = [Rounding::F32, Rounding::Bf16, Rounding::F16];
const RECOMPUTE: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];

fn with_residual(name: &str, preset: &str, rounding: Rounding) -> Model {
    let precision = |config: &_| {
        let mut precision = Precision::preset(preset, config)?;
        precision.set(Site::Residual, rounding);
        Ok(precision)
    };
    Model::load(&folder(name), precision).unwrap()
}

fn gradients(model: &Model, batch: &Batch, recompute: Recompute) -> Vec<f32> {
    let mut grads = model.grads();
    model.forward_backward(&mut grads, batch, &LossOptions::default(), recompute, None).unwrap();
    model.named_grads(&grads, None).unwrap().into_iter().flat_map(|tensor| tensor.values).collect()
}

#[test]
fn the_plan_counts_the_stream_as_it_is_stored() {
    for name in MODELS {
        for (preset, rounding) in ["f32", "bf16"].into_iter().flat_map(|p| ROUNDINGS.map(|r| (p, r))) {
            let model = with_residual(name, preset, rounding);
            let batch = Batch::packed(ids(name), vec![0, 1, 22, 58]).unwrap();
            for recompute in RECOMPUTE {
                let step = Step::new(&batch.cu_seqlens, recompute);
                let plan = Plan::new(&model.config, model.precision(), &step).unwrap();
                let kept = model.measure_kept(&batch, &LossOptions::default(), recompute).unwrap();
                assert_eq!(plan.kept(), kept, "{name} {preset} {rounding:?} {recompute:?}");
            }
        }
    }
}

#[test]
fn the_stream_of_a_bf16_run_takes_twice_the_bytes_in_f32() {
    for name in MODELS {
        let batch = batch(name);
        let kept = |rounding| {
            let model = with_residual(name, "bf16", rounding);
            model.measure_kept(&batch, &LossOptions::default(), Recompute::None).unwrap()
        };
        let config = load(name, "f32").config;
        // Before the layer and between its parts; and before the last norm.
        let values = batch.tokens() * config.hidden * (2 * config.layers.len() + 1);
        assert_eq!(kept(Rounding::F32) - kept(Rounding::Bf16), 2 * values, "{name}");
    }
}

#[test]
fn recomputing_gives_the_same_bits_for_every_rounding() {
    for name in MODELS {
        for (preset, rounding) in ["f32", "bf16"].into_iter().flat_map(|p| ROUNDINGS.map(|r| (p, r))) {
            let model = with_residual(name, preset, rounding);
            let [none, selective, full] = RECOMPUTE.map(|r| gradients(&model, &batch(name), r));
            assert!(none == selective && none == full, "{name} {preset} {rounding:?}");
        }
    }
}

#[test]
fn every_value_of_the_stream_and_its_gradient_is_rounded() {
    for name in MODELS {
        for rounding in ROUNDINGS {
            let model = with_residual(name, "f32", rounding);
            let pattern = "embed,d.embed,layers.*.middle,layers.*.out,d.layers.*.middle,d.layers.*.out";
            let mut recorder = Recorder { pattern: Some(pattern.into()), ..Recorder::default() };
            let options = LossOptions::default();
            let (mut grads, batch) = (model.grads(), batch(name));
            model
                .forward_backward(&mut grads, &batch, &options, Recompute::None, Some(&mut recorder))
                .unwrap();
            let stream: Vec<_> =
                recorder.seen.iter().filter(|seen| !Site::behind(&seen.site).is_empty()).collect();
            assert_eq!(stream.len(), 2 + 4 * model.config.layers.len(), "{name}");
            for seen in stream {
                let rounded = seen.values.iter().all(|x| rounding.round(*x) == *x);
                assert!(rounded, "{name} {rounding:?}: {}", seen.site);
                assert_eq!(
                    seen.dtype.to_lowercase(),
                    format!("{rounding:?}").to_lowercase(),
                    "{}",
                    seen.site
                );
            }
        }
    }
}

#[test]
fn a_stream_in_f32_brings_bf16_runs_nearer_to_f32() {
    let mut ratios = Vec::new();
    for name in MODELS {
        let (batch, model) = (batch(name), load(name, "f32"));
        // A router that chooses another expert outweighs every rounding.
        if model.config.layers.iter().any(|layer| layer.experts.is_some()) {
            continue;
        }
        let exact = model.logits(&batch, None).unwrap();
        let [wide, narrow] = [Rounding::F32, Rounding::Bf16].map(|rounding| {
            let model = with_residual(name, "bf16", rounding);
            error(&model.logits(&batch, None).unwrap(), &exact).0
        });
        ratios.push(wide / narrow);
    }
    let mean = ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64;
    assert!(ratios.len() > 3 && mean.exp() < 0.95, "{ratios:?}");
}

#[test]
fn decoding_follows_the_site() {
    for name in MODELS {
        let model = with_residual(name, "bf16", Rounding::F32);
        let ids = &ids(name)[..16];
        let whole = model.logits(&Batch::rows(ids.to_vec(), ids.len()).unwrap(), None).unwrap();
        let mut session = model.session(1);
        let mut steps = session.advance_all(&[&ids[..8]], None).unwrap();
        for id in &ids[8..] {
            steps.extend(session.advance_all(&[&[*id]], None).unwrap());
        }
        let (ratio, _) = error(&steps, &whole);
        assert!(ratio < 1e-2, "{name}: {ratio:e}");
    }
}
