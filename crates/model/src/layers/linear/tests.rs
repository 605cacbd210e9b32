use std::path::Path;

use ballast_kernels::Scratch;

use super::*;
use crate::batch::Batch;
use crate::model::Model;
use crate::params::Params;
use crate::precision::Precision;
use crate::random::Rng;
use crate::run::{Parameters, Tally};

const TOKENS: usize = 23;
const INPUTS: usize = 20;
const OUTPUTS: usize = 30;
const RANK: usize = 4;
const SCALE: f32 = 1.5;

fn random(name: &str, len: usize) -> Vec<f32> {
    let mut rng = Rng::of(1, name, 0);
    (0..len).map(|_| rng.unit() as f32 - 0.5).collect()
}

/// c [n, m] of a [n, k] and b [k, m], each a function of row and column.
fn product(
    n: usize,
    k: usize,
    m: usize,
    a: impl Fn(usize, usize) -> f32,
    b: impl Fn(usize, usize) -> f32,
) -> Vec<f64> {
    let dot = |i: usize, j: usize| (0..k).map(|l| a(i, l) as f64 * b(l, j) as f64).sum();
    (0..n).flat_map(|i| (0..m).map(move |j| (i, j))).map(|(i, j)| dot(i, j)).collect()
}

fn assert_close(name: &str, got: &[f32], expected: &[f64]) {
    assert_eq!(got.len(), expected.len(), "{name}");
    for (got, expected) in got.iter().zip(expected) {
        assert!((*got as f64 - expected).abs() < 2e-5, "{name}: {got} where {expected} is expected");
    }
}

/// W + s B A of the rows from `first` on, in f64 and then f32: what the layer is equal to.
fn whole(w: &[f32], a: &[f32], b: &[f32], first: usize, rows: usize) -> Vec<f32> {
    let low = product(rows, RANK, INPUTS, |i, l| b[(first + i) * RANK + l], |l, j| a[l * INPUTS + j]);
    w[first * INPUTS..].iter().zip(low).map(|(w, low)| (*w as f64 + SCALE as f64 * low) as f32).collect()
}

#[test]
fn an_adapter_and_its_gradients_are_those_of_the_sum_also_on_some_rows() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/qwen3_5");
    let model = Model::load(&folder, |_| Ok(Precision::f32())).unwrap();
    for (first, rows) in [(0, OUTPUTS), (0, 7), (7, 11), (18, 12)] {
        let mut specs = Specs::default();
        let linear = Linear::new(&mut specs, "x", INPUTS, OUTPUTS, false).rows(first, rows);
        let (w, x) = (random("w", OUTPUTS * INPUTS), random("x", TOKENS * INPUTS));
        let (a, b) = (random("a", RANK * INPUTS), random("b", OUTPUTS * RANK));
        let dy = random("dy", TOKENS * rows);
        let low = Adapter { a: a.clone(), b: b.clone(), rank: RANK, scale: SCALE };
        let params = Params {
            weights: vec![Weight::F32(w.clone())],
            protected: Vec::new(),
            adapters: vec![Some(low)],
        };
        let batch = Batch::packed(vec![0; TOKENS], vec![0, TOKENS]).unwrap();
        let run = Run {
            config: &model.config,
            parameters: Parameters::new(&specs, &params),
            precision: &Precision::f32(),
            batch: &batch,
            context: None,
            tables: &[],
            scratch: &Scratch::new(0),
            ties: Default::default(),
            probe: None,
            tally: &Tally::default(),
        };
        let sum = whole(&w, &a, &b, first, rows);
        let y: Vec<f32> = linear.forward(&run, &x).unwrap();
        let expected = product(TOKENS, INPUTS, rows, |t, j| x[t * INPUTS + j], |j, i| sum[i * INPUTS + j]);
        assert_close("y", &y, &expected);
        let mut grads = Grads::new(&specs, &params, |_| false);
        let mut dx = vec![1.0; x.len()];
        linear.backward(&run, &mut grads, &mut dx, &dy, &x).unwrap();
        let dx_alone = linear.backward_alone(&run, &mut grads, &dy, &x).unwrap();
        let expected = product(TOKENS, rows, INPUTS, |t, i| dy[t * rows + i], |i, j| sum[i * INPUTS + j]);
        assert_close("dx alone", &dx_alone, &expected);
        assert_close("dx, on top of 1", &dx, &expected.iter().map(|d| d + 1.0).collect::<Vec<f64>>());
        // The gradient of the sum G = dy^T x gives both: dA = s B^T G, dB = s G A^T. Two calls have added it
        // twice.
        let g: Vec<f32> = product(rows, TOKENS, INPUTS, |i, t| dy[t * rows + i], |t, j| x[t * INPUTS + j])
            .iter()
            .map(|g| (2.0 * SCALE as f64 * g) as f32)
            .collect();
        let da = product(RANK, rows, INPUTS, |l, i| b[(first + i) * RANK + l], |i, j| g[i * INPUTS + j]);
        assert_close("dA", grads.adapter(0).a, &da);
        let db = product(rows, INPUTS, RANK, |i, j| g[i * INPUTS + j], |j, l| a[l * INPUTS + j]);
        let mut all = vec![0.0; OUTPUTS * RANK];
        all[first * RANK..(first + rows) * RANK].copy_from_slice(&db);
        assert_close("dB", grads.adapter(0).b, &all);
        assert!(grads.weight(0).is_empty());
    }
}
