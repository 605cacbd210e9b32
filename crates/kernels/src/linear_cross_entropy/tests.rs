//! The fused loss against a reference in f64 and its numeric gradients.

use half::bf16;
use proptest::prelude::*;

use super::*;
use crate::testing::{Values, assert_close, cast, gradient, same_on_any_pool};

fn reference(hidden: &[f64], w: &[f64], targets: &[i64], dims: Dims, o: &Options) -> f64 {
    let mut loss = 0.0;
    for (h, target) in hidden.chunks(dims.inputs).zip(targets) {
        if *target == o.ignore_index {
            continue;
        }
        let logits: Vec<f64> = w
            .chunks(dims.inputs)
            .map(|w| {
                let u: f64 = w.iter().zip(h).map(|(w, h)| w * h).sum();
                o.soft_cap.map_or(u, |cap| cap as f64 * (u / cap as f64).tanh())
            })
            .collect();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let log_sum = max + logits.iter().map(|l| (l - max).exp()).sum::<f64>().ln();
        let (e, mean) = (o.label_smoothing as f64, logits.iter().sum::<f64>() / logits.len() as f64);
        loss +=
            log_sum - (1.0 - e) * logits[*target as usize] - e * mean + o.z_loss as f64 * log_sum * log_sum;
    }
    loss
}

#[derive(Clone)]
struct Problem {
    dims: Dims,
    options: Options,
    hidden: Vec<f64>,
    w: Vec<f64>,
    targets: Vec<i64>,
}

const SCALE: f32 = 0.25;

impl Problem {
    fn new(tokens: usize, inputs: usize, outputs: usize, options: Options, seed: u64) -> Problem {
        let dims = Dims { inputs, outputs };
        let mut values = Values::new(seed);
        let targets = (0..tokens)
            .map(|_| match values.next() % 4 {
                0 => options.ignore_index,
                _ => (values.next() % outputs as u64) as i64,
            })
            .collect();
        let (hidden, w) = (values.take(tokens * inputs, 2.0), values.take(dims.weight_len(), 1.0));
        Problem { dims, options, hidden, w, targets }
    }

    /// loss, dhidden, dw on top of 1
    fn run<T: Element, W: Element>(&self) -> (Loss, Vec<T>, Vec<f32>) {
        let (hidden, w): (Vec<T>, Vec<W>) = (cast(&self.hidden), cast(&self.w));
        let (mut dhidden, mut dw) = (hidden.clone(), vec![1.0; w.len()]);
        let tokens = self.targets.len();
        let mut logits = vec![f32::NAN; linear_cross_entropy_workspace(self.dims, tokens, &self.options)];
        let scratch = Scratch::new(linear_cross_entropy_scratch(self.dims, tokens, &self.options));
        let grads = Grads { dhidden: &mut dhidden, dw: Some(&mut dw), scale: SCALE };
        let loss = linear_cross_entropy(
            Some(grads),
            &hidden,
            &w,
            &self.targets,
            self.dims,
            &self.options,
            &mut logits,
            &scratch,
        );
        let alone = linear_cross_entropy(
            None,
            &hidden,
            &w,
            &self.targets,
            self.dims,
            &self.options,
            &mut logits,
            &scratch,
        );
        assert_eq!(loss, alone, "the loss without gradients");
        (loss.unwrap(), dhidden, dw)
    }

    fn check<T: Element, W: Element>(&self) {
        let (loss, dhidden, dw) = self.run::<T, W>();
        let at = |hidden: &[f64], w: &[f64]| reference(hidden, w, &self.targets, self.dims, &self.options);
        let expected = at(&self.hidden, &self.w);
        assert_eq!(loss.tokens, counted_tokens(&self.targets, &self.options));
        assert!((loss.sum - expected).abs() <= 1e-5 * expected.abs().max(1.0), "{} {expected}", loss.sum);
        let scaled = |g: Vec<f64>, on: f64| -> Vec<f64> { g.iter().map(|g| on + g * SCALE as f64).collect() };
        assert_close("dhidden", &dhidden, &scaled(gradient(&self.hidden, |h| at(h, &self.w)), 0.0), 2e-5);
        assert_close("dw, on top of 1", &dw, &scaled(gradient(&self.w, |w| at(&self.hidden, w)), 1.0), 2e-5);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn loss_and_gradients_agree_with_logits_written_out(
        tokens in 1usize..14, inputs in 1usize..8, outputs in 2usize..30, slice in 1usize..20,
        cap in any::<bool>(), z in any::<bool>(), smoothing in any::<bool>(), seed in any::<u64>(),
    ) {
        let options = Options {
            soft_cap: cap.then_some(5.0),
            z_loss: if z { 0.01 } else { 0.0 },
            label_smoothing: if smoothing { 0.1 } else { 0.0 },
            slice,
            ..Options::default()
        };
        let problem = Problem::new(tokens, inputs, outputs, options, seed);
        problem.check::<f32, f32>();
        problem.check::<bf16, bf16>();
        problem.check::<f32, bf16>();
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let options = Options { slice: 20, z_loss: 1e-4, ..Options::default() };
    let problem = Problem::new(50, 40, 5000, options, 8);
    let (loss, ..) = same_on_any_pool(|| problem.run::<f32, bf16>());
    assert!(loss.sum > 0.0 && loss.tokens > 20 && loss.z_sum > 0.0);
    assert!(loss.cross_entropy > 0.0 && loss.cross_entropy != loss.sum - loss.z_sum, "it has no smoothing");
}

#[test]
fn huge_logits_do_not_overflow() {
    let dims = Dims { inputs: 1, outputs: 3 };
    let (hidden, w) = ([1e4f32], [1.0f32, -1.0, 0.5]);
    let (mut dhidden, mut dw) = ([0.0f32], [0.0f32; 3]);
    let grads = Grads { dhidden: &mut dhidden, dw: Some(&mut dw), scale: 1.0 };
    let (options, scratch) = (Options::default(), Scratch::new(0));
    let mut logits = [0.0; 3];
    let loss = linear_cross_entropy(Some(grads), &hidden, &w, &[1], dims, &options, &mut logits, &scratch);
    assert_eq!(loss.unwrap(), Loss { sum: 2e4, z_sum: 0.0, cross_entropy: 2e4, tokens: 1, right: 0 });
    assert_eq!((dhidden, dw), ([2.0], [1e4, -1e4, 0.0]));
}

#[test]
fn a_batch_without_targets_has_no_loss_and_zero_gradients() {
    let problem = Problem::new(9, 4, 10, Options::default(), 1);
    let ignored = Problem { targets: vec![-100; 9], ..problem };
    let (loss, dhidden, dw) = ignored.run::<f32, f32>();
    assert_eq!(loss, Loss::default());
    assert!(dhidden.iter().all(|x| *x == 0.0) && dw.iter().all(|x| *x == 1.0));
}

#[test]
fn a_nan_reaches_the_loss() {
    let (options, scratch) = (Options::default(), Scratch::new(0));
    for at in 0..3 {
        let mut w = [1.0f32; 3];
        w[at] = f32::NAN;
        let dims = Dims { inputs: 1, outputs: 3 };
        let loss = linear_cross_entropy(None, &[1.0f32], &w, &[1], dims, &options, &mut [0.0; 3], &scratch);
        assert!(loss.unwrap().sum.is_nan());
    }
}

#[test]
fn targets_and_settings_that_make_no_sense_are_refused() {
    let dims = Dims { inputs: 2, outputs: 3 };
    let scratch = Scratch::new(0);
    let run = |targets: &[i64], options: &Options| {
        linear_cross_entropy(
            None,
            &[1.0f32; 4],
            &[1.0f32; 6],
            targets,
            dims,
            options,
            &mut [0.0; 6],
            &scratch,
        )
    };
    let usual = Options::default();
    assert!(run(&[0, -100], &usual).is_ok());
    assert_eq!(
        run(&[0, 3], &usual).unwrap_err().to_string(),
        "token 1 has target 3, but the vocabulary has 3 tokens"
    );
    assert!(run(&[0, -1], &usual).is_err());
    assert!(run(&[0], &usual).is_err());
    assert!(run(&[0, 1], &Options { slice: 0, ..usual }).is_err());
    assert!(run(&[0, 1], &Options { soft_cap: Some(0.0), ..usual }).is_err());
    assert!(run(&[0, 1], &Options { label_smoothing: 1.0, ..usual }).is_err());
}

#[test]
fn right_predictions_are_counted() {
    let dims = Dims { inputs: 1, outputs: 3 };
    let (hidden, w) = ([1f32, -1.0, 1.0, 1.0], [1.0f32, -1.0, 0.5]);
    let (options, scratch, mut logits) = (Options::default(), Scratch::new(0), [0.0; 12]);
    let targets = [0, 1, 2, options.ignore_index];
    let loss =
        linear_cross_entropy(None, &hidden, &w, &targets, dims, &options, &mut logits, &scratch).unwrap();
    assert_eq!((loss.tokens, loss.right), (3, 2));
}

/// Every element of the gradient is rounded, and nothing else: with one token, dh and dW are sums of one product.
#[test]
fn a_rounded_gradient_is_a_factor_of_both_products() {
    for gradient in [Rounding::Bf16, Rounding::F16] {
        for (tokens, outputs) in [(1, 1), (1, 7), (1, 256), (1, 600), (300, 37)] {
            let plain = Problem::new(tokens, 1, outputs, Options::default(), 3 + outputs as u64);
            // The weight 1 for one output and 0 for the others shows one element of the gradient at a time.
            let one = |of: usize| (0..outputs).map(|i| f64::from(u8::from(i == of))).collect::<Vec<_>>();
            for of in 0..outputs.min(3) {
                let plain = Problem { w: one(of), targets: vec![0; tokens], ..plain.clone() };
                let rounded = Problem { options: Options { gradient, ..plain.options }, ..plain.clone() };
                let ((loss, dh, _), (other_loss, other_dh, _)) =
                    (plain.run::<f32, f32>(), rounded.run::<f32, f32>());
                assert_eq!(loss, other_loss);
                let pairs = dh.iter().zip(&other_dh);
                assert!(pairs.clone().all(|(plain, rounded)| gradient.round(*plain) == *rounded));
                assert!(outputs == 1 || pairs.clone().any(|(plain, rounded)| plain != rounded));
            }
        }
    }
}

#[test]
fn a_gradient_in_bf16_is_close_and_leaves_out_tokens_without_loss() {
    for seed in 0..8 {
        let plain = Problem::new(37, 48, 101, Options { slice: 16, ..Options::default() }, seed);
        let options = Options { gradient: Rounding::Bf16, ..plain.options };
        let rounded = Problem { options, ..plain.clone() };
        let (_, dh, dw) = plain.run::<bf16, bf16>();
        let (_, other_dh, other_dw) = rounded.run::<bf16, bf16>();
        let wide: Vec<f64> = other_dw.iter().map(|x| *x as f64).collect();
        assert_close("dw", &dw, &wide, 3e-3);
        for (t, target) in plain.targets.iter().enumerate() {
            let (a, b) = (&dh[t * 48..(t + 1) * 48], &other_dh[t * 48..(t + 1) * 48]);
            let ignored = *target == plain.options.ignore_index;
            assert_eq!(b.iter().all(|x| *x == bf16::ZERO), ignored, "token {t}");
            assert!(a.iter().zip(b).all(|(a, b)| (a.to_f32() - b.to_f32()).abs() < 0.02), "token {t}");
        }
    }
}
