//! Every norm against its formula in f64 and its numeric gradients.

use half::bf16;
use proptest::prelude::*;

use super::*;
use crate::Scratch;
use crate::testing::{Values, assert_close, cast, gradient, inner, same_on_any_pool, wide};

const EPS: f32 = 1e-6;

fn rms_reference(x: &[f64], gamma: &dyn Fn(usize) -> f64, width: usize) -> Vec<f64> {
    let mut y = Vec::new();
    for row in x.chunks(width) {
        let r = 1.0 / (inner(row, row) / width as f64 + EPS as f64).sqrt();
        y.extend(row.iter().enumerate().map(|(i, x)| x * r * gamma(i)));
    }
    y
}

fn layer_reference(x: &[f64], w: &[f64], b: &[f64]) -> Vec<f64> {
    let width = w.len();
    let mut y = Vec::new();
    for row in x.chunks(width) {
        let mean = row.iter().sum::<f64>() / width as f64;
        let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / width as f64;
        let r = 1.0 / (variance + EPS as f64).sqrt();
        y.extend(row.iter().zip(w).zip(b).map(|((x, w), b)| (x - mean) * r * w + b));
    }
    y
}

fn gated_reference(x: &[f64], z: &[f64], w: &[f64]) -> Vec<f64> {
    let n = rms_reference(x, &|i| w[i], w.len());
    n.iter().zip(z).map(|(n, z)| n * z / (1.0 + (-z).exp())).collect()
}

fn l2_reference(x: &[f64], width: usize) -> Vec<f64> {
    let mut y = Vec::new();
    for row in x.chunks(width) {
        let r = 1.0 / (inner(row, row) + EPS as f64).sqrt();
        y.extend(row.iter().map(|x| x * r));
    }
    y
}

/// 0: 1 + w, 1: w, 2: weightless
fn gamma_of<W: Element>(kind: usize, w: &[W]) -> Gamma<'_, W> {
    [Gamma::OnePlus(w), Gamma::Plain(w), Gamma::Weightless][kind]
}

fn gamma_reference(kind: usize, w: f64) -> f64 {
    [1.0 + w, w, 1.0][kind]
}

fn rms<T: Element, W: Element>(rows: usize, width: usize, kind: usize, seed: u64) {
    let mut values = Values::new(seed);
    let (x, w, dy) =
        (values.take(rows * width, 2.0), values.take(width, 1.0), values.take(rows * width, 1.0));
    let loss = |x: &[f64], w: &[f64]| inner(&rms_reference(x, &|i| gamma_reference(kind, w[i]), width), &dy);
    let (xt, wt, dyt): (Vec<T>, Vec<W>, Vec<T>) = (cast(&x), cast(&w), cast(&dy));
    let scratch = Scratch::new(rms_norm_backward_scratch(rows, width));
    let planned = scratch.bytes();
    let (mut y, mut dx, mut dw) = (xt.clone(), xt.clone(), vec![1.0; width]);
    let mut saved = Saved::default();
    rms_norm_forward(&mut y, Some(&mut saved), &xt, gamma_of(kind, &wt), EPS, width).unwrap();
    assert_eq!(saved.bytes(), rows * 4);
    rms_norm_backward(&mut dx, Some(&mut dw), &dyt, &xt, gamma_of(kind, &wt), &saved, width, &scratch)
        .unwrap();
    assert_eq!(scratch.bytes(), planned);
    assert_close("y", &y, &rms_reference(&x, &|i| gamma_reference(kind, w[i]), width), 1e-6);
    assert_close("dx", &dx, &gradient(&x, |x| loss(x, &w)), 1e-5);
    if kind < 2 {
        let dw_expected: Vec<f64> = gradient(&w, |w| loss(&x, w)).iter().map(|g| g + 1.0).collect();
        assert_close("dw, on top of 1", &dw, &dw_expected, 1e-5);
    }
}

fn layer<T: Element>(rows: usize, width: usize, seed: u64) {
    let mut values = Values::new(seed);
    let (x, dy) = (values.take(rows * width, 2.0), values.take(rows * width, 1.0));
    let (w, b) = (values.take(width, 1.0), values.take(width, 1.0));
    let loss = |x: &[f64], w: &[f64], b: &[f64]| inner(&layer_reference(x, w, b), &dy);
    let (xt, dyt): (Vec<T>, Vec<T>) = (cast(&x), cast(&dy));
    let (wt, bt): (Vec<T>, Vec<T>) = (cast(&w), cast(&b));
    let scratch = Scratch::new(layer_norm_backward_scratch(rows, width));
    let planned = scratch.bytes();
    let (mut y, mut dx, mut dw, mut db) = (xt.clone(), xt.clone(), vec![0.0; width], vec![0.0; width]);
    let mut saved = Saved::default();
    layer_norm_forward(&mut y, Some(&mut saved), &xt, &wt, &bt, EPS).unwrap();
    assert_eq!(saved.bytes(), rows * 8);
    layer_norm_backward(&mut dx, &mut dw, &mut db, &dyt, &xt, &wt, &saved, &scratch).unwrap();
    assert_eq!(scratch.bytes(), planned);
    assert_close("y", &y, &layer_reference(&x, &w, &b), 1e-6);
    // For one or two elements the gradient of x is a difference that cancels.
    if width > 2 {
        assert_close("dx", &dx, &gradient(&x, |x| loss(x, &w, &b)), 2e-4);
    }
    if width > 1 {
        assert_close("dw", &dw, &gradient(&w, |w| loss(&x, w, &b)), 1e-5);
    }
    assert_close("db", &db, &gradient(&b, |b| loss(&x, &w, b)), 1e-5);
}

fn gated<T: Element, W: Element>(rows: usize, width: usize, seed: u64) {
    let mut values = Values::new(seed);
    let (x, z, dy) =
        (values.take(rows * width, 2.0), values.take(rows * width, 3.0), values.take(rows * width, 1.0));
    let w = values.take(width, 1.0);
    let loss = |x: &[f64], z: &[f64], w: &[f64]| inner(&gated_reference(x, z, w), &dy);
    let (xt, zt, dyt, wt): (Vec<T>, Vec<T>, Vec<T>, Vec<W>) = (cast(&x), cast(&z), cast(&dy), cast(&w));
    let scratch = Scratch::new(gated_rms_norm_backward_scratch(rows, width));
    let (mut y, mut dx, mut dz, mut dw) = (xt.clone(), xt.clone(), xt.clone(), vec![0.0; width]);
    let mut saved = Saved::default();
    gated_rms_norm_forward(&mut y, Some(&mut saved), &xt, &zt, &wt, EPS).unwrap();
    gated_rms_norm_backward(&mut dx, &mut dz, &mut dw, &dyt, &xt, &zt, &wt, &saved, &scratch).unwrap();
    assert_close("y", &y, &gated_reference(&x, &z, &w), 2e-6);
    if width > 1 {
        assert_close("dx", &dx, &gradient(&x, |x| loss(x, &z, &w)), 1e-5);
    }
    assert_close("dz", &dz, &gradient(&z, |z| loss(&x, z, &w)), 1e-5);
    assert_close("dw", &dw, &gradient(&w, |w| loss(&x, &z, w)), 1e-5);
}

fn l2<T: Element>(rows: usize, width: usize, seed: u64) {
    let mut values = Values::new(seed);
    let (x, dy) = (values.take(rows * width, 2.0), values.take(rows * width, 1.0));
    let (xt, dyt): (Vec<T>, Vec<T>) = (cast(&x), cast(&dy));
    let (mut y, mut dx) = (xt.clone(), xt.clone());
    let mut saved = Saved::default();
    l2norm_forward(&mut y, Some(&mut saved), &xt, EPS, width).unwrap();
    l2norm_backward(&mut dx, &dyt, &xt, &saved, width).unwrap();
    assert_close("y", &y, &l2_reference(&x, width), 1e-6);
    if width > 1 {
        assert_close("dx", &dx, &gradient(&x, |x| inner(&l2_reference(x, width), &dy)), 1e-5);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn every_norm_and_its_gradients_agree_with_the_formula_at_odd_shapes(
        rows in 1usize..20, width in 2usize..40, kind in 0usize..3, seed in any::<u64>(),
    ) {
        rms::<f32, f32>(rows, width, kind, seed);
        rms::<bf16, f32>(rows, width, kind, seed);
        rms::<bf16, bf16>(rows, width, kind, seed);
        layer::<f32>(rows, width, seed);
        layer::<bf16>(rows, width.max(8), seed);
        gated::<f32, bf16>(rows, width, seed);
        gated::<bf16, f32>(rows, width, seed);
        l2::<f32>(rows, width, seed);
        l2::<bf16>(rows, width, seed);
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let (rows, width) = (1500, 36);
    let mut values = Values::new(7);
    let x: Vec<f32> = cast(&values.take(rows * width, 1.0));
    let dy: Vec<f32> = cast(&values.take(rows * width, 1.0));
    let w: Vec<f32> = cast(&values.take(width, 1.0));
    same_on_any_pool(|| {
        let scratch = Scratch::new(layer_norm_backward_scratch(rows, width));
        let (mut y, mut dx, mut dz) = (x.clone(), x.clone(), x.clone());
        let mut dw = vec![vec![0.0; width]; 4];
        let mut saved = Saved::default();
        rms_norm_forward(&mut y, Some(&mut saved), &x, Gamma::OnePlus(&w), EPS, width).unwrap();
        let gamma = Gamma::OnePlus(&w);
        rms_norm_backward(&mut dx, Some(&mut dw[0]), &dy, &x, gamma, &saved, width, &scratch).unwrap();
        gated_rms_norm_backward(&mut y, &mut dz, &mut dw[1], &dy, &x, &dy, &w, &saved, &scratch).unwrap();
        layer_norm_forward(&mut y, Some(&mut saved), &x, &w, &w, EPS).unwrap();
        let (head, tail) = dw.split_at_mut(3);
        layer_norm_backward(&mut dx, &mut head[2], &mut tail[0], &dy, &x, &w, &saved, &scratch).unwrap();
        assert!(dw.iter().all(|dw| dw.iter().all(|x| *x != 0.0)));
        let (mut l2, mut dl2) = (x.clone(), x.clone());
        l2norm_forward(&mut l2, Some(&mut saved), &x, EPS, width).unwrap();
        l2norm_backward(&mut dl2, &dy, &x, &saved, width).unwrap();
        (dw, y, dx, dz, l2, dl2)
    });
}

#[test]
fn a_row_of_zeros_stays_zero_and_its_gradient_is_finite() {
    let x = [0.0f32; 4];
    let (mut y, mut dx) = ([1.0f32; 4], [0.0f32; 4]);
    let mut saved = Saved::default();
    let gamma = Gamma::<f32>::Weightless;
    rms_norm_forward(&mut y, Some(&mut saved), &x, gamma, EPS, 4).unwrap();
    assert_eq!(y, [0.0; 4]);
    rms_norm_backward(&mut dx, None, &[1.0; 4], &x, gamma, &saved, 4, &Scratch::new(0)).unwrap();
    assert!(wide(&dx).iter().all(|dx| (dx - 1000.0).abs() < 1e-2), "{dx:?}");
}

#[test]
fn a_large_mean_does_not_cancel_in_the_layer_norm() {
    let x: Vec<f64> = (0..64).map(|i| 4096.0 + (i % 7) as f64).collect();
    let (w, b) = (vec![1.0; 64], vec![0.0; 64]);
    let mut y = vec![0f32; 64];
    layer_norm_forward(&mut y, None, &cast::<f32>(&x), &cast::<f32>(&w), &cast::<f32>(&b), EPS).unwrap();
    assert_close("y", &y, &layer_reference(&x, &w, &b), 1e-4);
}

#[test]
fn slices_that_do_not_fit_are_refused() {
    let x = [1.0f32; 6];
    let mut y = [0.0f32; 6];
    let w = [1.0f32; 4];
    assert!(rms_norm_forward(&mut y, None, &x, Gamma::Plain(&w), EPS, 4).is_err());
    assert!(rms_norm_forward(&mut y, None, &x, Gamma::Plain(&w), EPS, 3).is_err());
    assert!(rms_norm_forward(&mut y, None, &x, Gamma::<f32>::Weightless, EPS, 0).is_err());
    assert!(rms_norm_forward(&mut y[..3], None, &x, Gamma::<f32>::Weightless, EPS, 3).is_err());
    assert!(layer_norm_forward(&mut y, None, &x, &w[..3], &w, EPS).is_err());
    assert!(gated_rms_norm_forward(&mut y, None, &x, &x[..3], &w[..3], EPS).is_err());
    assert!(l2norm_backward(&mut y, &x, &x, &Saved::default(), 3).is_err());
}
