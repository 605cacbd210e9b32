//! Load-balancing loss of the routers, against transformers on whole models.

use ballast_checkpoint::layout::Form;
use ballast_checkpoint::tensor_file::TensorFile;
use ballast_model::{LossOptions, Recompute, StepLoss};

use crate::common::{MODELS, batch, error, folder, load};

#[test]
fn loss_and_gradients_are_those_of_transformers() {
    let golden = TensorFile::open(&folder("qwen3_5_moe").join("balance.safetensors")).unwrap();
    let coefficient: f32 = golden.metadata("coefficient").unwrap().parse().unwrap();
    let (model, batch) = (load("qwen3_5_moe", "f32"), batch("qwen3_5_moe"));
    let mut grads = model.grads();
    let options = LossOptions { balance: Some(coefficient), ..LossOptions::default() };
    let loss = model.forward_backward(&mut grads, &batch, &options, Recompute::None, None).unwrap();
    let expected = |name: &str| golden.f32(name).unwrap().values[0] as f64;
    let aux = coefficient as f64 * expected("aux_loss");
    assert!((loss.balance - aux).abs() < 1e-5 * aux, "balance loss must be {aux}, got {}", loss.balance);
    let whole = loss.language.sum / loss.language.tokens as f64 + loss.balance;
    assert!((whole - expected("loss")).abs() < 1e-5 * whole, "{whole}");
    let named = model.named_grads(&grads, Some(Form::Fused)).unwrap();
    let mut compared = 0;
    for name in golden.names().filter_map(|name| name.strip_prefix("grad.")) {
        let ours = named.iter().find(|tensor| tensor.name == name).unwrap();
        let theirs = golden.f32(&format!("grad.{name}")).unwrap();
        let (ratio, _) = error(&ours.values, &theirs.values);
        println!("{name}: {ratio:.1e}");
        assert!(ratio < 1e-4, "{name}: {ratio:e}");
        compared += 1;
    }
    assert_eq!(compared, 6);
}

#[test]
fn recomputed_routing_is_not_counted_twice() {
    for name in ["qwen3_next", "qwen3_5_moe", "gemma4_moe", "deepseek_v32"] {
        for preset in ["f32", "bf16"] {
            let (model, batch) = (load(name, preset), batch(name));
            let run = |balance: Option<f32>, recompute| -> (StepLoss, _) {
                let mut grads = model.grads();
                let options = LossOptions { balance, ..LossOptions::default() };
                let loss = model.forward_backward(&mut grads, &batch, &options, recompute, None).unwrap();
                (loss, grads)
            };
            let none = run(Some(0.3), Recompute::None);
            assert!(none.0.balance > 0.3, "{name}: {}", none.0.balance);
            assert!(none == run(Some(0.3), Recompute::Selective), "{name} {preset}");
            assert!(none == run(Some(0.3), Recompute::Full), "{name} {preset}");
            let without = run(None, Recompute::None);
            assert!(without.0.balance == 0.0 && without.1 != none.1, "{name} {preset}");
        }
    }
}

#[test]
fn a_model_without_experts_has_nothing_to_balance() {
    for name in MODELS {
        let model = load(name, "f32");
        let options = LossOptions { balance: Some(0.1), ..LossOptions::default() };
        let result =
            model.forward_backward(&mut model.grads(), &batch(name), &options, Recompute::Full, None);
        let experts = model.config.layers.iter().any(|layer| layer.experts.is_some());
        assert_eq!(result.is_ok(), experts, "{name}");
    }
}
