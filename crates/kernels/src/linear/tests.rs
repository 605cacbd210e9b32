//! The three products against triple loops, for all combinations of storage types.

use half::bf16;
use proptest::prelude::*;

use super::*;
use crate::testing::{Values, assert_close, cast, gradient, inner, same_on_any_pool};

struct Problem {
    dims: Dims,
    tokens: usize,
    x: Vec<f64>,
    w: Vec<f64>,
    b: Vec<f64>,
    dy: Vec<f64>,
}

impl Problem {
    fn new(tokens: usize, inputs: usize, outputs: usize, seed: u64) -> Problem {
        let dims = Dims { inputs, outputs };
        let mut values = Values::new(seed);
        Problem {
            dims,
            tokens,
            x: values.take(tokens * inputs, 1.0),
            w: values.take(dims.weight_len(), 1.0),
            b: values.take(outputs, 1.0),
            dy: values.take(tokens * outputs, 1.0),
        }
    }

    /// y, dx, dw on top of 1, db on top of 1
    fn reference(&self) -> (Vec<f64>, Vec<f64>, Vec<f64>, Vec<f64>) {
        let Dims { inputs, outputs } = self.dims;
        let (mut y, mut dx) = (self.b.repeat(self.tokens), vec![0.0; self.x.len()]);
        let (mut dw, mut db) = (vec![1.0; self.w.len()], vec![1.0; outputs]);
        for t in 0..self.tokens {
            for o in 0..outputs {
                let dy = self.dy[t * outputs + o];
                for i in 0..inputs {
                    y[t * outputs + o] += self.x[t * inputs + i] * self.w[o * inputs + i];
                    dx[t * inputs + i] += dy * self.w[o * inputs + i];
                    dw[o * inputs + i] += dy * self.x[t * inputs + i];
                }
                db[o] += dy;
            }
        }
        (y, dx, dw, db)
    }

    #[allow(clippy::type_complexity)]
    fn run<Y: Element, X: Element, W: Element>(&self) -> (Vec<Y>, Vec<X>, Vec<f32>, Vec<f32>) {
        let (x, dy): (Vec<X>, Vec<Y>) = (cast(&self.x), cast(&self.dy));
        let (w, b): (Vec<W>, Vec<W>) = (cast(&self.w), cast(&self.b));
        let scratch = Scratch::new(linear_scratch(self.dims, self.tokens));
        let (mut y, mut dx) = (vec![Y::from_f32(f32::NAN); dy.len()], vec![X::from_f32(f32::NAN); x.len()]);
        let (mut dw, mut db) = (vec![1.0; w.len()], vec![1.0; b.len()]);
        linear_forward(&mut y, &x, &w, Some(&b), self.dims, &scratch).unwrap();
        linear_backward_input(&mut dx, &dy, &w, self.dims, &scratch).unwrap();
        linear_backward_weight(&mut dw, Some(&mut db), &dy, &x, self.dims, &scratch).unwrap();
        (y, dx, dw, db)
    }

    fn check<Y: Element, X: Element, W: Element>(&self) {
        let (y, dx, dw, db) = self.run::<Y, X, W>();
        let expected = self.reference();
        assert_close("y", &y, &expected.0, 2e-6);
        assert_close("dx", &dx, &expected.1, 2e-6);
        assert_close("dw, on top of 1", &dw, &expected.2, 2e-6);
        assert_close("db, on top of 1", &db, &expected.3, 2e-6);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_shape_and_mix_of_types_agrees_with_triple_loops(
        tokens in 0usize..30, inputs in 1usize..70, outputs in 1usize..70, seed in any::<u64>(),
    ) {
        let problem = Problem::new(tokens, inputs, outputs, seed);
        problem.check::<f32, f32, f32>();
        problem.check::<bf16, bf16, bf16>();
        problem.check::<f32, f32, bf16>();
        problem.check::<f32, bf16, f32>();
        problem.check::<bf16, bf16, f32>();
    }
}

#[test]
fn the_triple_loops_agree_with_finite_differences() {
    let problem = Problem::new(4, 5, 3, 9);
    let loss = |x: &[f64], w: &[f64], b: &[f64]| {
        let (x, w, b, dy) = (x.to_vec(), w.to_vec(), b.to_vec(), problem.dy.clone());
        inner(&Problem { x, w, b, dy, ..problem }.reference().0, &problem.dy)
    };
    let (x, w, b) = (&problem.x, &problem.w, &problem.b);
    let (_, dx, dw, db) = problem.reference();
    let close = |a: &[f64], b: &[f64], on: f64| a.iter().zip(b).all(|(a, b)| (a - b - on).abs() < 1e-8);
    assert!(close(&dx, &gradient(x, |x| loss(x, w, b)), 0.0), "dx");
    assert!(close(&dw, &gradient(w, |w| loss(x, w, b)), 1.0), "dw");
    assert!(close(&db, &gradient(b, |b| loss(x, w, b)), 1.0), "db");
}

#[test]
fn tiles_and_panels_leave_no_seam() {
    for (tokens, inputs, outputs) in [(300, 530, 20), (9, 20, 1100), (270, 515, 519)] {
        let problem = Problem::new(tokens, inputs, outputs, 11);
        problem.check::<f32, f32, f32>();
        problem.check::<bf16, bf16, bf16>();
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for tokens in [5, 600] {
        let problem = Problem::new(tokens, 130, 1100, 4);
        same_on_any_pool(|| problem.run::<f32, f32, f32>());
        same_on_any_pool(|| problem.run::<bf16, bf16, bf16>());
    }
}

/// Sizes that are multiples of no tile, large enough to be packed on AVX2.
#[test]
fn a_large_product_agrees_with_triple_loops() {
    let problem = Problem::new(301, 263, 273, 7);
    problem.check::<f32, f32, f32>();
    problem.check::<f32, bf16, bf16>();
}

#[test]
fn a_token_of_a_few_gives_the_bits_it_gives_alone() {
    let problem = Problem::new(7, 133, 70, 2);
    let (y, ..) = problem.run::<f32, f32, bf16>();
    for t in 0..7 {
        let alone = Problem {
            tokens: 1,
            x: problem.x[t * 133..(t + 1) * 133].to_vec(),
            dy: problem.dy[..70].to_vec(),
            w: problem.w.clone(),
            b: problem.b.clone(),
            ..problem
        };
        assert_eq!(alone.run::<f32, f32, bf16>().0, y[t * 70..(t + 1) * 70]);
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let scratch = Scratch::new(0);
    let dims = Dims { inputs: 3, outputs: 2 };
    let (x, w) = ([1.0f32; 6], [1.0f32; 6]);
    let mut y = [0.0f32; 4];
    assert!(linear_forward(&mut y, &x, &w, None, dims, &scratch).is_ok());
    assert!(linear_forward(&mut y, &x[..5], &w, None, dims, &scratch).is_err());
    assert!(linear_forward(&mut y, &x, &w[..5], None, dims, &scratch).is_err());
    assert!(linear_forward(&mut y[..3], &x, &w, None, dims, &scratch).is_err());
    assert!(linear_forward(&mut y, &x, &w, Some(&w), dims, &scratch).is_err());
    assert!(linear_backward_weight(&mut y, None, &x, &x, dims, &scratch).is_err());
    assert!(linear_forward(&mut y, &x, &w, None, Dims { inputs: 0, outputs: 2 }, &scratch).is_err());
}

fn several_at_once<W: Element>() {
    let mut values = Values::new(11);
    let inputs = 70;
    let scratch = Scratch::new(linear_scratch(Dims { inputs, outputs: 90 }, 9));
    for tokens in [1, 2, 7, 8, 9] {
        let x: Vec<W> = cast(&values.take(tokens * inputs, 1.0));
        let ws = [1, 90, 33].map(|outputs| cast::<W>(&values.take(outputs * inputs, 1.0)));
        let mut together = ws.each_ref().map(|w| vec![0f32; tokens * w.len() / inputs]);
        let ys = together.each_mut().map(|y| &mut y[..]);
        linear_forward_many(ys, &x, ws.each_ref().map(|w| &w[..]), inputs, &scratch).unwrap();
        for (y, w) in together.iter().zip(&ws) {
            let mut alone = vec![0f32; y.len()];
            let dims = Dims { inputs, outputs: w.len() / inputs };
            linear_forward(&mut alone, &x, w, None, dims, &scratch).unwrap();
            assert_eq!(&alone, y, "{tokens} tokens, {} outputs", dims.outputs);
        }
    }
}

#[test]
fn several_weights_at_once_give_the_bits_of_each() {
    several_at_once::<f32>();
    several_at_once::<bf16>();
    let scratch = Scratch::new(1000);
    let (mut a, mut b) = ([0f32; 2], [0f32; 3]);
    assert!(
        linear_forward_many([&mut a, &mut b], &[1f32; 4], [&[1f32; 8], &[1f32; 8]], 4, &scratch).is_err()
    );
}

/// Beside an f32 operand. Two bf16 operands may be summed up in another order.
#[test]
fn values_that_are_exact_in_bf16_give_the_same_bits_in_either_type() {
    for (tokens, inputs, outputs) in [(70, 96, 80), (300, 256, 400)] {
        let problem = Problem::new(tokens, inputs, outputs, 7);
        let (y, dx, dw, _) = problem.run::<f32, f32, f32>();
        let (y_bf16, dx_bf16, ..) = problem.run::<f32, f32, bf16>();
        assert!(y == y_bf16 && dx == dx_bf16, "weight, {tokens}x{inputs}x{outputs}");
        let (_, _, dw_bf16, _) = problem.run::<f32, bf16, f32>();
        assert!(dw == dw_bf16, "activations, {tokens}x{inputs}x{outputs}");
    }
}
