//! The delta rule against golden values of another framework, and against its reference.

use std::collections::BTreeMap;

use half::bf16;
use proptest::prelude::*;

use super::reference::{Reference, Results};
use super::*;
use crate::Scratch;
use crate::testing::{Values, cast};

/// RMS(a-b) / (RMS(b) + 1e-8), and the number of values compared.
fn ratio(a: impl IntoIterator<Item = f64>, b: &[f64]) -> (f64, usize) {
    let a: Vec<f64> = a.into_iter().collect();
    assert_eq!(a.len(), b.len());
    let rms = |x: f64| (x / b.len().max(1) as f64).sqrt();
    let difference: f64 = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum();
    let size: f64 = b.iter().map(|b| b * b).sum();
    assert!(!difference.is_nan(), "a value is not a number");
    (rms(difference) / (rms(size) + 1e-8), b.len())
}

/// Results of the kernel, widened to f64.
fn kernel<T: Element>(
    r: &Reference,
    dims: Dims,
    d_o: &[f64],
    dht: &[f64],
    options: &Options,
) -> (Results, Saved<T>) {
    let cast = |x: &[f64]| -> Vec<T> { x.iter().map(|x| T::from_f32(*x as f32)).collect() };
    let narrow = |x: &[f64]| -> Vec<f32> { x.iter().map(|x| *x as f32).collect() };
    let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|x| *x as f64).collect() };
    let wide_t = |x: &[T]| -> Vec<f64> { x.iter().map(|x| x.to_f32() as f64).collect() };
    let (q, k, v, d_o) = (cast(&r.q), cast(&r.k), cast(&r.v), cast(d_o));
    let (g, beta, h0, dht) = (narrow(&r.g), narrow(&r.beta), narrow(&r.h0), narrow(dht));
    let input = Input {
        q: &q,
        k: &k,
        v: &v,
        gates: Gates::Given { g: &g, beta: &beta },
        h0: Some(&h0),
        cu_seqlens: &r.cu_seqlens,
    };
    let scratch = Scratch::new(
        gated_delta_rule_forward_scratch(dims, options).max(gated_delta_rule_backward_scratch(dims, options)),
    );
    let planned = scratch.bytes();
    let (mut o, mut ht) = (vec![T::default(); v.len()], vec![0.0; h0.len()]);
    let output = Output { o: &mut o, ht: Some(&mut ht) };
    let mut saved = Saved::default();
    gated_delta_rule_forward(output, Some(&mut saved), &input, dims, options, &scratch).unwrap();
    assert_eq!(saved.bytes(), saved_bytes::<T>(dims, options, &r.cu_seqlens));
    let (mut dq, mut dk, mut dv) =
        (vec![T::default(); q.len()], vec![T::default(); k.len()], vec![T::default(); v.len()]);
    let (mut dg, mut dbeta, mut dh0) = (vec![0.0; g.len()], vec![0.0; g.len()], vec![0.0; h0.len()]);
    let grads = Grads {
        dq: &mut dq,
        dk: &mut dk,
        dv: &mut dv,
        gates: GateGrads::Given { dg: &mut dg, dbeta: &mut dbeta },
        dh0: Some(&mut dh0),
    };
    gated_delta_rule_backward(grads, &d_o, Some(&dht), &input, &saved, dims, options, &scratch).unwrap();
    if r.g.iter().all(|g| *g <= 0.0) {
        assert_eq!(scratch.bytes(), planned, "the scratch functions say what is needed");
    }
    let results = Results {
        o: wide_t(&o),
        ht: wide(&ht),
        dq: wide_t(&dq),
        dk: wide_t(&dk),
        dv: wide_t(&dv),
        dg: wide(&dg),
        dbeta: wide(&dbeta),
        dh0: wide(&dh0),
    };
    (results, saved)
}

fn fields(r: &Results) -> [(&'static str, &Vec<f64>); 8] {
    [
        ("o", &r.o),
        ("ht", &r.ht),
        ("dq", &r.dq),
        ("dk", &r.dk),
        ("dv", &r.dv),
        ("dg", &r.dg),
        ("dbeta", &r.dbeta),
        ("dh0", &r.dh0),
    ]
}

/// Asserts that every result is within its limit; returns the ratios.
fn compare(
    got: &Results,
    expected: &Results,
    limit: impl Fn(&str) -> f64,
    what: &str,
) -> BTreeMap<&'static str, f64> {
    let mut ratios = BTreeMap::new();
    for ((name, a), (_, b)) in fields(got).into_iter().zip(fields(expected)) {
        let (ratio, count) = ratio(a.iter().copied(), b);
        assert!(count > 0, "{what}: nothing was compared for {name}");
        assert!(ratio <= limit(name), "{what}: {name} is off by {ratio:e}");
        ratios.insert(name, ratio);
    }
    assert_eq!(ratios.len(), 8);
    ratios
}

struct Golden {
    reference: Reference,
    dims: Dims,
    d_o: Vec<f64>,
    dht: Vec<f64>,
    expected: Results,
}

fn golden(name: &str) -> Golden {
    let path = format!("{}/../../fixtures/gdn/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
    let bytes = std::fs::read(path).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().clone().unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |name: &str| -> (Vec<usize>, Vec<f64>) {
        let t = file.tensor(name).unwrap();
        let values =
            t.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()) as f64).collect();
        (t.shape().to_vec(), values)
    };
    let (q_shape, q) = tensor("q");
    let (v_shape, v) = tensor("v");
    let dims =
        Dims { key_heads: q_shape[2], value_heads: v_shape[2], key_dim: q_shape[3], value_dim: v_shape[3] };
    let cu_seqlens = match file.tensor("cu_seqlens") {
        Ok(t) if t.dtype() == safetensors::Dtype::I64 => {
            t.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as usize).collect()
        }
        Ok(t) => {
            t.data().chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap()) as usize).collect()
        }
        Err(_) => (0..=q_shape[0]).map(|b| b * q_shape[1]).collect(),
    };
    let get = |name: &str| tensor(name).1;
    let reference = Reference {
        q,
        k: get("k"),
        v,
        g: get("g"),
        beta: get("beta"),
        h0: get("h0"),
        cu_seqlens,
        scale: metadata["scale"].parse().unwrap(),
        l2norm: metadata["l2norm"].to_lowercase() == "true" || metadata["l2norm"] == "1",
    };
    let expected = Results {
        o: get("o"),
        ht: get("ht"),
        dq: get("dq"),
        dk: get("dk"),
        dv: get("dv"),
        dg: get("dg"),
        dbeta: get("dbeta"),
        dh0: get("dh0"),
    };
    Golden { reference, dims, d_o: get("do"), dht: get("dht"), expected }
}

const GOLDEN: [&str; 6] = ["head128", "no_decay", "l2norm_gva", "strong_decay", "plain_ragged", "packed"];

fn golden_options(g: &Golden) -> Options {
    let l2norm = if g.reference.l2norm { L2Norm::Inside } else { L2Norm::Off };
    Options { scale: Some(g.reference.scale as f32), l2norm, ..Options::default() }
}

#[test]
fn the_plain_twin_gives_every_golden_result() {
    for name in GOLDEN {
        let g = golden(name);
        let got = g.reference.run(g.dims, &g.d_o, &g.dht);
        compare(&got, &g.expected, |_| 1e-6, name);
    }
}

#[test]
fn every_golden_result_in_f32_at_every_chunk_size() {
    for name in GOLDEN {
        let g = golden(name);
        for chunk in [1, 7, 16, 32, 64, 128] {
            for states_every in [1, 3] {
                let options = Options { chunk, states_every, ..golden_options(&g) };
                let (got, _) = kernel::<f32>(&g.reference, g.dims, &g.d_o, &g.dht, &options);
                let limit = |tensor: &str| if (name, tensor) == ("strong_decay", "dg") { 1e-4 } else { 1e-5 };
                compare(&got, &g.expected, limit, &format!("{name}, chunk {chunk}"));
            }
        }
    }
}

#[test]
fn every_golden_result_in_bf16_storage_is_within_the_published_tolerances() {
    for name in GOLDEN {
        let g = golden(name);
        // Inputs rounded to bf16, so that only the rounding of the kernel is measured.
        let round = |x: &[f64]| -> Vec<f64> { x.iter().map(|x| bf16::from_f64(*x).to_f64()).collect() };
        let mut r = g.reference.clone();
        (r.q, r.k, r.v) = (round(&r.q), round(&r.k), round(&r.v));
        let d_o = round(&g.d_o);
        let expected = r.run(g.dims, &d_o, &g.dht);
        let (got, _) = kernel::<bf16>(&r, g.dims, &d_o, &g.dht, &golden_options(&g));
        let limit = |tensor: &str| match tensor {
            "o" | "ht" => 0.005,
            "dbeta" | "dg" => 0.02,
            _ => 0.008,
        };
        compare(&got, &expected, limit, name);
    }
}

/// A random problem.
#[derive(Clone, Debug)]
struct Problem {
    dims: Dims,
    lengths: Vec<usize>,
    chunk: usize,
    states_every: usize,
    l2norm: bool,
    decay: f64,
    seed: u64,
}

impl Problem {
    fn build(&self) -> (Reference, Vec<f64>, Vec<f64>) {
        let mut state = self.seed;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) as f64 / (1u64 << 31) as f64) * 2.0 - 1.0
        };
        let mut cu_seqlens = vec![0];
        for length in &self.lengths {
            cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + length);
        }
        let tokens = cu_seqlens[cu_seqlens.len() - 1];
        let d = self.dims;
        // Rounded to f32.
        let mut values =
            |n: usize, by: f64| -> Vec<f64> { (0..n).map(|_| (next() * by) as f32 as f64).collect() };
        let keys = tokens * d.key_heads * d.key_dim;
        // Without the norm, keys of length over 1 make the recurrence itself unstable.
        let size = if self.l2norm { 1.0 } else { 1.0 / (d.key_dim as f64).sqrt() };
        let states = self.lengths.len() * d.value_heads * d.state_len();
        let reference = Reference {
            q: values(keys, size),
            k: values(keys, size),
            v: values(tokens * d.value_heads * d.value_dim, 1.0),
            g: values(tokens * d.value_heads, 1.0)
                .iter()
                .map(|x| (-self.decay * x.abs()) as f32 as f64)
                .collect(),
            beta: values(tokens * d.value_heads, 1.0).iter().map(|x| x.abs()).collect(),
            h0: values(states, 1.0),
            cu_seqlens,
            scale: ((d.key_dim as f64).powf(-0.5) as f32) as f64,
            l2norm: self.l2norm,
        };
        (reference, values(tokens * d.value_heads * d.value_dim, 1.0), values(states, 1.0))
    }

    fn options(&self) -> Options {
        let l2norm = if self.l2norm { L2Norm::Inside } else { L2Norm::Off };
        Options { l2norm, chunk: self.chunk, states_every: self.states_every, ..Options::default() }
    }
}

fn problem() -> impl Strategy<Value = Problem> {
    let dims = (1usize..3, 1usize..4, 1usize..20, 1usize..20);
    let lengths = prop::collection::vec(0usize..40, 1..4);
    (
        dims,
        lengths,
        1usize..40,
        1usize..4,
        any::<bool>(),
        prop_oneof![Just(0.0), Just(0.1), Just(3.0), Just(100.0)],
        any::<u64>(),
    )
        .prop_map(|((hk, r, dk, dv), lengths, chunk, states_every, l2norm, decay, seed)| Problem {
            // The gradient through the norm of one or two elements is nearly zero: nothing to compare with.
            dims: Dims {
                key_heads: hk,
                value_heads: hk * r,
                key_dim: if l2norm { dk + 3 } else { dk },
                value_dim: dv,
            },
            lengths,
            chunk,
            states_every,
            l2norm,
            decay,
            seed,
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_shape_agrees_with_the_plain_twin(p in problem()) {
        prop_assume!(p.lengths.iter().sum::<usize>() > 0);
        let (reference, d_o, dht) = p.build();
        let expected = reference.run(p.dims, &d_o, &dht);
        let (got, _) = kernel::<f32>(&reference, p.dims, &d_o, &dht, &p.options());
        // At strong decay some gradients are differences of nearly equal numbers.
        compare(&got, &expected, |name| if name == "dg" { 2e-4 } else { 2e-5 }, "proptest");
    }
}

#[test]
fn the_norm_inside_and_outside_agree_and_differ_in_memory_by_the_normalised_copies() {
    let dims = Dims { key_heads: 2, value_heads: 4, key_dim: 16, value_dim: 24 };
    let p = Problem {
        dims,
        lengths: vec![70, 1, 33],
        chunk: 32,
        states_every: 1,
        l2norm: true,
        decay: 0.2,
        seed: 3,
    };
    let (mut r, d_o, dht) = p.build();
    // A zero vector, a huge and a tiny one.
    r.q[..16].fill(0.0);
    r.k[16..32].fill(0.0);
    r.q[32..48].iter_mut().for_each(|x| *x *= 1e15);
    r.k[48..64].iter_mut().for_each(|x| *x *= 1e-12);
    let inside = p.options();
    let outside = Options { l2norm: L2Norm::Outside, ..inside };
    let (a, saved_a) = kernel::<f32>(&r, dims, &d_o, &dht, &inside);
    let (b, saved_b) = kernel::<f32>(&r, dims, &d_o, &dht, &outside);
    for ((name, a), (_, b)) in fields(&a).into_iter().zip(fields(&b)) {
        assert_eq!(a, b, "{name}: in f32 both do the same operations");
        assert!(a.iter().all(|x| x.is_finite()), "{name}");
    }
    let normalized = 2 * 104 * 2 * 16 * size_of::<f32>();
    assert_eq!(saved_b.bytes() - saved_a.bytes(), normalized);
    let (_, saved_a) = kernel::<bf16>(&r, dims, &d_o, &dht, &inside);
    let (_, saved_b) = kernel::<bf16>(&r, dims, &d_o, &dht, &outside);
    assert_eq!(saved_b.bytes() - saved_a.bytes(), normalized / 2);
}

#[test]
fn packed_sequences_are_the_same_bits_as_one_by_one() {
    let dims = Dims { key_heads: 2, value_heads: 2, key_dim: 16, value_dim: 16 };
    let p = Problem {
        dims,
        lengths: vec![37, 1, 64, 5],
        chunk: 16,
        states_every: 2,
        l2norm: true,
        decay: 0.5,
        seed: 9,
    };
    let (r, d_o, dht) = p.build();
    let (packed, _) = kernel::<f32>(&r, dims, &d_o, &dht, &p.options());
    for (s, w) in r.cu_seqlens.windows(2).enumerate() {
        let tokens = w[0]..w[1];
        let cut = |x: &[f64], width: usize| x[tokens.start * width..tokens.end * width].to_vec();
        let state = |x: &[f64]| x[s * 2 * 256..(s + 1) * 2 * 256].to_vec();
        let one = Reference {
            q: cut(&r.q, 32),
            k: cut(&r.k, 32),
            v: cut(&r.v, 32),
            g: cut(&r.g, 2),
            beta: cut(&r.beta, 2),
            h0: state(&r.h0),
            cu_seqlens: vec![0, tokens.len()],
            ..r.clone()
        };
        let (got, _) = kernel::<f32>(&one, dims, &cut(&d_o, 32), &state(&dht), &p.options());
        assert_eq!(got.o, cut(&packed.o, 32));
        assert_eq!((got.dq, got.dk, got.dv), (cut(&packed.dq, 32), cut(&packed.dk, 32), cut(&packed.dv, 32)));
        assert_eq!((got.dg, got.dbeta), (cut(&packed.dg, 2), cut(&packed.dbeta, 2)));
        assert_eq!((got.ht, got.dh0), (state(&packed.ht), state(&packed.dh0)));
    }
}

#[test]
fn a_sequence_split_in_two_with_the_state_carried_over_is_the_whole() {
    let dims = Dims { key_heads: 1, value_heads: 2, key_dim: 8, value_dim: 12 };
    let p =
        Problem { dims, lengths: vec![50], chunk: 16, states_every: 1, l2norm: true, decay: 0.3, seed: 4 };
    let (r, d_o, dht) = p.build();
    let whole = r.run(dims, &d_o, &dht);
    let (at, options) = (21, p.options());
    let part = |range: std::ops::Range<usize>, h0: &[f64]| {
        let cut = |x: &[f64], width: usize| x[range.start * width..range.end * width].to_vec();
        let one = Reference {
            q: cut(&r.q, 8),
            k: cut(&r.k, 8),
            v: cut(&r.v, 24),
            g: cut(&r.g, 2),
            beta: cut(&r.beta, 2),
            h0: h0.to_vec(),
            cu_seqlens: vec![0, range.len()],
            ..r.clone()
        };
        (one, cut(&d_o, 24))
    };
    let (first, d_first) = part(0..at, &r.h0);
    let (a, _) = kernel::<f32>(&first, dims, &d_first, &vec![0.0; 192], &options);
    let (second, d_second) = part(at..50, &a.ht);
    let (b, _) = kernel::<f32>(&second, dims, &d_second, &dht, &options);
    // The gradient of the state in the middle enters the backward of the first half.
    let (a, _) = kernel::<f32>(&first, dims, &d_first, &b.dh0, &options);
    let join = |x: Vec<f64>, y: Vec<f64>| [x, y].concat();
    let got = Results {
        o: join(a.o, b.o),
        ht: b.ht,
        dq: join(a.dq, b.dq),
        dk: join(a.dk, b.dk),
        dv: join(a.dv, b.dv),
        dg: join(a.dg, b.dg),
        dbeta: join(a.dbeta, b.dbeta),
        dh0: a.dh0,
    };
    compare(&got, &whole, |_| 1e-5, "split");
}

#[test]
fn single_steps_are_the_whole_sequence() {
    let dims = Dims { key_heads: 2, value_heads: 4, key_dim: 16, value_dim: 8 };
    let p =
        Problem { dims, lengths: vec![30], chunk: 16, states_every: 1, l2norm: true, decay: 0.3, seed: 5 };
    let (r, d_o, dht) = p.build();
    let whole = r.run(dims, &d_o, &dht);
    let narrow = |x: &[f64]| -> Vec<f32> { x.iter().map(|x| *x as f32).collect() };
    let (q, k, v, g, beta) = (narrow(&r.q), narrow(&r.k), narrow(&r.v), narrow(&r.g), narrow(&r.beta));
    let mut state = narrow(&r.h0);
    let mut o = vec![0.0; v.len()];
    let scratch = Scratch::new(gated_delta_rule_step_scratch(dims));
    let planned = scratch.bytes();
    for t in 0..30 {
        let row = |width: usize| t * width..(t + 1) * width;
        let (keys, values, gates) = (row(32), row(32), row(4));
        gated_delta_rule_step(
            &mut o[values.clone()],
            &mut state,
            &q[keys.clone()],
            &k[keys],
            &v[values],
            &g[gates.clone()],
            &beta[gates],
            dims,
            &p.options(),
            &scratch,
        )
        .unwrap();
    }
    assert_eq!(scratch.bytes(), planned, "the scratch functions say what is needed");
    assert!(ratio(o.iter().map(|x| *x as f64), &whole.o).0 < 1e-5);
    assert!(ratio(state.iter().map(|x| *x as f64), &whole.ht).0 < 1e-5);
}

#[test]
fn extreme_inputs_stay_finite_forward_and_backward() {
    let dims = Dims { key_heads: 1, value_heads: 1, key_dim: 8, value_dim: 8 };
    for (g, beta) in [(0.0, 0.0), (0.0, 1.0), (-1e4, 1.0), (-1e4, 0.0), (-1e-30, 1.0), (-50.0, 0.5)] {
        let p = Problem {
            dims,
            lengths: vec![150],
            chunk: 64,
            states_every: 1,
            l2norm: true,
            decay: 1.0,
            seed: 6,
        };
        let (mut r, d_o, dht) = p.build();
        // An extreme decay on every third token, so that small and huge ones are adjacent.
        r.g.iter_mut().step_by(3).for_each(|x| *x = g);
        r.beta.fill(beta);
        let (got, _) = kernel::<f32>(&r, dims, &d_o, &dht, &p.options());
        for (name, values) in fields(&got) {
            assert!(values.iter().all(|x| x.is_finite()), "g {g}, beta {beta}: {name}");
        }
        let expected = r.run(dims, &d_o, &dht);
        compare(&got, &expected, |_| 1e-4, &format!("g {g}, beta {beta}"));
    }
}

#[test]
fn gates_above_zero_let_the_state_grow_in_every_result() {
    let dims = Dims { key_heads: 2, value_heads: 4, key_dim: 16, value_dim: 24 };
    // (lowest, highest) g, also with strong decays in between
    let ranges = [(0.0, 0.01), (0.0, 0.1), (0.1, 0.1), (-1.0, 1.0), (-3.0, 3.0), (-200.0, 5.0)];
    for (low, high) in ranges {
        for (chunk, states_every) in [(1, 4), (7, 3), (32, 4), (64, 1), (256, 1)] {
            let lengths = vec![70, 0, 1, 33];
            let p = Problem { dims, lengths, chunk, states_every, l2norm: true, decay: 1.0, seed: 12 };
            let (mut r, d_o, dht) = p.build();
            r.g.iter_mut().for_each(|g| *g = (high + *g * (high - low)) as f32 as f64);
            let expected = r.run(dims, &d_o, &dht);
            let (got, _) = kernel::<f32>(&r, dims, &d_o, &dht, &p.options());
            let what = format!("g {low} to {high}, chunk {chunk}");
            compare(&got, &expected, |name| if name == "dg" { 2e-4 } else { 2e-5 }, &what);
        }
    }
}

#[test]
fn a_growing_sequence_changes_no_bit_of_the_others() {
    let dims = Dims { key_heads: 2, value_heads: 2, key_dim: 8, value_dim: 8 };
    let lengths = vec![40, 40];
    let p = Problem { dims, lengths, chunk: 16, states_every: 2, l2norm: true, decay: 0.5, seed: 13 };
    let (r, d_o, dht) = p.build();
    let (before, _) = kernel::<f32>(&r, dims, &d_o, &dht, &p.options());
    let mut grown = r.clone();
    grown.g[..40 * 2].iter_mut().step_by(2).for_each(|g| *g = 0.5);
    let (after, _) = kernel::<f32>(&grown, dims, &d_o, &dht, &p.options());
    assert_ne!(after.o[..40 * 16], before.o[..40 * 16]);
    assert_eq!(after.o[40 * 16..], before.o[40 * 16..]);
    assert_eq!(after.dk[40 * 16..], before.dk[40 * 16..]);
}

#[test]
fn a_gate_of_minus_infinity_resets_the_state() {
    let dims = Dims { key_heads: 1, value_heads: 2, key_dim: 8, value_dim: 8 };
    for huge in [f64::NEG_INFINITY, -1e30] {
        let lengths = vec![50];
        let p = Problem { dims, lengths, chunk: 32, states_every: 1, l2norm: true, decay: 0.3, seed: 14 };
        let (mut r, d_o, dht) = p.build();
        r.g.iter_mut().step_by(11).for_each(|g| *g = huge);
        let expected = r.run(dims, &d_o, &dht);
        let (got, _) = kernel::<f32>(&r, dims, &d_o, &dht, &p.options());
        compare(&got, &expected, |_| 2e-5, &format!("g {huge}"));
    }
}

#[test]
fn a_gate_whose_exponential_overflows_is_an_error() {
    let dims = Dims { key_heads: 1, value_heads: 1, key_dim: 1, value_dim: 1 };
    let x = [1f32; 2];
    for (g, refused) in [(88.0, false), (88.5, true), (f32::INFINITY, true)] {
        let gates = Gates::Given { g: &[-1.0, g], beta: &x };
        let input = Input { q: &x, k: &x, v: &x, gates, h0: None, cu_seqlens: &[0, 2] };
        let output = Output { o: &mut [0f32; 2], ht: None };
        let done =
            gated_delta_rule_forward(output, None, &input, dims, &Options::default(), &Scratch::new(0));
        assert_eq!(done.is_err(), refused, "{g}");
        assert!(done.err().is_none_or(|e| e.to_string().contains("g must be at most 88")), "{g}");
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let dims = Dims { key_heads: 3, value_heads: 6, key_dim: 16, value_dim: 16 };
    let p = Problem {
        dims,
        lengths: vec![100, 7, 64],
        chunk: 32,
        states_every: 2,
        l2norm: true,
        decay: 0.5,
        seed: 8,
    };
    let (r, d_o, dht) = p.build();
    let runs: Vec<Results> = [1, 2, 3, 8]
        .iter()
        .map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(*threads).build().unwrap();
            pool.install(|| kernel::<f32>(&r, dims, &d_o, &dht, &p.options()).0)
        })
        .collect();
    for run in &runs[1..] {
        for ((name, a), (_, b)) in fields(&runs[0]).into_iter().zip(fields(run)) {
            assert!(a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}");
        }
    }
}

#[test]
fn bad_shapes_are_errors_that_name_the_argument() {
    let dims = Dims { key_heads: 2, value_heads: 3, key_dim: 4, value_dim: 4 };
    let scratch = Scratch::new(0);
    let run = |dims: Dims, options: Options, q: usize, cu: &[usize]| {
        let (q, v, g) =
            (vec![0f32; q], vec![0f32; 2 * dims.value_heads * 4], vec![0f32; 2 * dims.value_heads]);
        let k = vec![0f32; 2 * dims.key_heads * 4];
        let input =
            Input { q: &q, k: &k, v: &v, gates: Gates::Given { g: &g, beta: &g }, h0: None, cu_seqlens: cu };
        let mut o = v.clone();
        let output = Output { o: &mut o, ht: None };
        gated_delta_rule_forward(output, None, &input, dims, &options, &scratch).err().map(|e| e.to_string())
    };
    let ok = Dims { value_heads: 4, ..dims };
    let options = Options::default();
    assert!(
        run(dims, options, 16, &[0, 2])
            .unwrap()
            .contains("value heads must be a multiple of key heads, got 3 and 2")
    );
    assert_eq!(run(ok, options, 15, &[0, 2]).unwrap(), "q must have 16 elements, got 15");
    assert!(run(ok, options, 16, &[1, 2]).unwrap().contains("start with 0"));
    assert!(run(ok, options, 16, &[0, 2, 1]).unwrap().contains("must not decrease"));
    assert!(
        run(ok, Options { chunk: 0, ..options }, 16, &[0, 2])
            .unwrap()
            .contains("chunk must be 1 to 256, got 0")
    );
    assert_eq!(run(ok, options, 16, &[0, 2]), None);
}

#[test]
fn the_gates_agree_with_their_formulas_and_finite_differences() {
    let (a_log, dt_bias) = ([-20.0f32, 0.3, 5.0], [1.0f32, -0.5, 0.0]);
    let a: Vec<f32> = [0.3, -2.0, 25.0, 1e4, -1e4, 19.9, 0.0, 5.0, -7.0].to_vec();
    let b: Vec<f32> = [0.0, 6.5, -6.5, 1e4, -1e4, 1.0, 2.0, -3.0, 0.1].to_vec();
    let exact = |a: f64, a_log: f64, bias: f64| {
        let x = a + bias;
        -a_log.exp() * if x > 20.0 { x } else { x.exp().ln_1p() }
    };
    let (mut g, mut beta) = (vec![0.0; 9], vec![0.0; 9]);
    gates_forward(&mut g, &mut beta, &a, &b, &a_log, &dt_bias).unwrap();
    let dg: Vec<f32> = (0..9).map(|i| (i as f32 * 0.9).sin()).collect();
    let (mut da, mut db, mut da_log, mut ddt) = (vec![0f32; 9], vec![0f32; 9], vec![1f32; 3], vec![2f32; 3]);
    gates_backward(&mut da, &mut db, &mut da_log, &mut ddt, &dg, &dg, &a, &b, &a_log, &dt_bias).unwrap();
    let close = |x: f32, y: f64| assert!((x as f64 - y).abs() <= 2e-5 * y.abs() + 1e-7, "{x} {y}");
    let eps = 1e-5;
    let (mut sum_log, mut sum_bias) = ([1f64; 3], [2f64; 3]);
    for i in 0..9 {
        let h = i % 3;
        let (x, l, d) = (a[i] as f64, a_log[h] as f64, dt_bias[h] as f64);
        close(g[i], exact(x, l, d));
        close(beta[i], 1.0 / (1.0 + (-b[i] as f64).exp()));
        let slope = (exact(x + eps, l, d) - exact(x - eps, l, d)) / (2.0 * eps);
        // The finite difference is useless where the function is flat or huge.
        if x.abs() < 100.0 {
            assert!((da[i] as f64 - slope * dg[i] as f64).abs() < 1e-4 * slope.abs() + 1e-9, "{i}");
        }
        let s = 1.0 / (1.0 + (-b[i] as f64).exp());
        close(db[i], dg[i] as f64 * s * (1.0 - s));
        sum_log[h] += dg[i] as f64 * exact(x, l, d);
        sum_bias[h] += da[i] as f64;
    }
    for h in 0..3 {
        close(da_log[h], sum_log[h]);
        close(ddt[h], sum_bias[h]);
    }
    // beta saturates in bf16 from about 6.2 on; here it does not.
    assert!(beta[1] < 1.0 && beta[1] > 0.998);
}

/// o, ht, da, db, dA_log, ddt_bias, and the other gradients, with the gates computed inside the kernel or
/// before it.
fn with_gates<T: Element>(
    p: &Problem,
    raw: (&[f64], &[f64], &[f32], &[f32]),
    fused: bool,
) -> [(&'static str, Vec<f64>); 10] {
    let (r, d_o, dht) = p.build();
    let dims = p.dims;
    let cast = |x: &[f64]| -> Vec<T> { x.iter().map(|x| T::from_f32(*x as f32)).collect() };
    let narrow = |x: &[f64]| -> Vec<f32> { x.iter().map(|x| *x as f32).collect() };
    let (q, k, v, d_o, a, b) = (cast(&r.q), cast(&r.k), cast(&r.v), cast(&d_o), cast(raw.0), cast(raw.1));
    let (h0, dht, a_log, dt_bias) = (narrow(&r.h0), narrow(&dht), raw.2, raw.3);
    let (mut g, mut beta) = (vec![0.0; a.len()], vec![0.0; a.len()]);
    gates_forward(&mut g, &mut beta, &a, &b, a_log, dt_bias).unwrap();
    let gates = if fused {
        Gates::Raw(RawGates { a: &a, b: &b, a_log, dt_bias })
    } else {
        Gates::Given { g: &g, beta: &beta }
    };
    let input = Input { q: &q, k: &k, v: &v, gates, h0: Some(&h0), cu_seqlens: &r.cu_seqlens };
    let options = p.options();
    let scratch = Scratch::new(0);
    let (mut o, mut ht) = (vec![T::default(); v.len()], vec![0.0; h0.len()]);
    let mut saved = Saved::default();
    let output = Output { o: &mut o, ht: Some(&mut ht) };
    gated_delta_rule_forward(output, Some(&mut saved), &input, dims, &options, &scratch).unwrap();
    assert_eq!(saved.bytes(), saved_bytes::<T>(dims, &options, &r.cu_seqlens), "nothing more is kept");
    let zeros = |n: usize| vec![T::default(); n];
    let (mut dq, mut dk, mut dv) = (zeros(q.len()), zeros(k.len()), zeros(v.len()));
    let (mut da, mut db, mut dh0) = (zeros(a.len()), zeros(a.len()), vec![0.0; h0.len()]);
    // Parameter gradients are added to the previous content.
    let (mut da_log, mut ddt_bias) = (vec![1.0; a_log.len()], vec![-1.0; a_log.len()]);
    let (mut dg, mut dbeta) = (vec![0.0; a.len()], vec![0.0; a.len()]);
    let gates = if fused {
        GateGrads::Raw { da: &mut da, db: &mut db, da_log: &mut da_log, ddt_bias: &mut ddt_bias }
    } else {
        GateGrads::Given { dg: &mut dg, dbeta: &mut dbeta }
    };
    let grads = Grads { dq: &mut dq, dk: &mut dk, dv: &mut dv, gates, dh0: Some(&mut dh0) };
    gated_delta_rule_backward(grads, &d_o, Some(&dht), &input, &saved, dims, &options, &scratch).unwrap();
    if !fused {
        gates_backward(&mut da, &mut db, &mut da_log, &mut ddt_bias, &dg, &dbeta, &a, &b, a_log, dt_bias)
            .unwrap();
    }
    let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|x| *x as f64).collect() };
    let wide_t = |x: &[T]| -> Vec<f64> { x.iter().map(|x| x.to_f32() as f64).collect() };
    [
        ("o", wide_t(&o)),
        ("ht", wide(&ht)),
        ("dq", wide_t(&dq)),
        ("dk", wide_t(&dk)),
        ("dv", wide_t(&dv)),
        ("da", wide_t(&da)),
        ("db", wide_t(&db)),
        ("da_log", wide(&da_log)),
        ("ddt_bias", wide(&ddt_bias)),
        ("dh0", wide(&dh0)),
    ]
}

#[test]
fn gates_inside_the_rule_give_what_gates_around_it_give() {
    let dims = Dims { key_heads: 2, value_heads: 4, key_dim: 16, value_dim: 24 };
    let p = Problem {
        dims,
        lengths: vec![70, 1, 0, 33],
        chunk: 16,
        states_every: 3,
        l2norm: true,
        decay: 0.0,
        seed: 11,
    };
    let (a_log, dt_bias) = ([-20.0f32, 0.3, 5.0, -1.0], [1.0f32, -0.5, 0.0, 0.2]);
    let mut a: Vec<f64> = (0..104 * 4).map(|i| (i as f64 * 0.7).sin() * 3.0).collect();
    let b: Vec<f64> = (0..104 * 4).map(|i| (i as f64 * 1.3).cos() * 4.0).collect();
    for (i, extreme) in [1e4, -1e4, 25.0, -30.0].into_iter().enumerate() {
        a.iter_mut().skip(i * 37).step_by(151).for_each(|a| *a = extreme);
    }
    let raw = (&a[..], &b[..], &a_log[..], &dt_bias[..]);
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let run =
            |fused| pool.install(|| (with_gates::<f32>(&p, raw, fused), with_gates::<bf16>(&p, raw, fused)));
        let (fused, given) = (run(true), run(false));
        assert_eq!(fused.0, with_gates::<f32>(&p, raw, true), "the same bits on any pool");
        assert!(given.0.iter().all(|(_, x)| x.iter().any(|x| *x != 0.0)), "every tensor has something in it");
        let pairs = fused.0.iter().chain(&fused.1).zip(given.0.iter().chain(&given.1));
        for ((name, x), (_, y)) in pairs {
            assert!(x.iter().all(|x| x.is_finite()), "{name}");
            let (off, count) = ratio(x.iter().copied(), y);
            assert!(count > 0 && off <= 1e-6, "{name} is off by {off:e}");
        }
    }
}

#[test]
fn gradients_of_another_kind_than_the_gates_are_an_error() {
    let dims = Dims { key_heads: 1, value_heads: 1, key_dim: 2, value_dim: 2 };
    let (x, g, scratch) = ([0f32; 2], [0f32; 1], Scratch::new(0));
    let gates = Gates::Given { g: &g, beta: &g };
    let input = Input { q: &x, k: &x, v: &x, gates, h0: None, cu_seqlens: &[0, 1] };
    let (mut saved, mut o, options) = (Saved::default(), [0f32; 2], Options::default());
    let output = Output { o: &mut o, ht: None };
    gated_delta_rule_forward(output, Some(&mut saved), &input, dims, &options, &scratch).unwrap();
    let (mut dq, mut dk, mut dv) = ([0f32; 2], [0f32; 2], [0f32; 2]);
    let (mut da, mut db, mut da_log, mut ddt_bias) = ([0f32], [0f32], [0f32], [0f32]);
    let gates = GateGrads::Raw { da: &mut da, db: &mut db, da_log: &mut da_log, ddt_bias: &mut ddt_bias };
    let grads = Grads { dq: &mut dq, dk: &mut dk, dv: &mut dv, gates, dh0: None };
    let error = gated_delta_rule_backward(grads, &x, None, &input, &saved, dims, &options, &scratch);
    assert!(error.unwrap_err().to_string().contains("both be Given or both be Raw"));
}

#[test]
fn heads_computed_in_parts_have_the_same_bits() {
    let dims = Dims { key_heads: 5, value_heads: 10, key_dim: 9, value_dim: 6 };
    let p = Problem {
        dims,
        lengths: vec![70, 3, 33],
        chunk: 16,
        states_every: 2,
        l2norm: true,
        decay: 0.3,
        seed: 4,
    };
    let (r, d_o, dht) = p.build();
    let narrow = |x: &[f64]| -> Vec<f32> { x.iter().map(|x| *x as f32).collect() };
    let (q, k, v, d_o, dht) = (narrow(&r.q), narrow(&r.k), narrow(&r.v), narrow(&d_o), narrow(&dht));
    let (g, beta, h0) = (narrow(&r.g), narrow(&r.beta), narrow(&r.h0));
    let gates = Gates::Given { g: &g, beta: &beta };
    let input = Input { q: &q, k: &k, v: &v, gates, h0: Some(&h0), cu_seqlens: &r.cu_seqlens };
    let scratch = Scratch::new(0);
    let run = |parts: &[Option<(usize, usize)>]| {
        let nan = |n: usize| vec![f32::NAN; n];
        let (mut o, mut ht, mut saved) = (nan(v.len()), nan(h0.len()), Saved::default());
        let (mut dq, mut dk, mut dv) = (nan(q.len()), nan(k.len()), nan(v.len()));
        let (mut dg, mut dbeta, mut dh0) = (nan(g.len()), nan(g.len()), nan(h0.len()));
        for heads in parts {
            let options = Options { heads: *heads, ..p.options() };
            let output = Output { o: &mut o, ht: Some(&mut ht) };
            gated_delta_rule_forward(output, Some(&mut saved), &input, dims, &options, &scratch).unwrap();
        }
        for heads in parts.iter().rev() {
            let options = Options { heads: *heads, ..p.options() };
            let gates = GateGrads::Given { dg: &mut dg, dbeta: &mut dbeta };
            let grads = Grads { dq: &mut dq, dk: &mut dk, dv: &mut dv, gates, dh0: Some(&mut dh0) };
            gated_delta_rule_backward(grads, &d_o, Some(&dht), &input, &saved, dims, &options, &scratch)
                .unwrap();
        }
        [o, ht, dq, dk, dv, dg, dbeta, dh0].map(|x| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>())
    };
    let whole = run(&[None]);
    assert_eq!(whole, run(&[Some((0, 2)), Some((2, 1)), Some((3, 2))]));
    let outside = Options { heads: Some((4, 2)), ..p.options() };
    let output = Output { o: &mut vec![0.0; v.len()], ht: None };
    let error = gated_delta_rule_forward(output, None, &input, dims, &outside, &scratch).unwrap_err();
    assert!(error.to_string().contains("heads 4 + 2 are outside the 5 key heads"), "{error}");
}

#[test]
fn saved_values_in_memory_of_the_caller_have_the_same_bits_and_the_right_lengths() {
    let dims = Dims { key_heads: 2, value_heads: 4, key_dim: 8, value_dim: 4 };
    let cu_seqlens = [0, 30, 30, 77];
    for l2norm in [L2Norm::Off, L2Norm::Inside, L2Norm::Outside] {
        let options = Options { l2norm, chunk: 8, states_every: 2, ..Options::default() };
        let mut values = Values::new(5);
        let (q, k) = (cast::<f32>(&values.take(77 * 16, 1.0)), cast::<f32>(&values.take(77 * 16, 1.0)));
        let (v, beta) = (cast::<f32>(&values.take(77 * 16, 1.0)), vec![0.5f32; 77 * 4]);
        let g = vec![-0.1f32; 77 * 4];
        let gates = Gates::Given { g: &g, beta: &beta };
        let input = Input { q: &q, k: &k, v: &v, gates, h0: None, cu_seqlens: &cu_seqlens };
        let scratch = Scratch::new(0);
        let (mut o, mut saved) = (vec![0f32; 77 * 16], Saved::default());
        let output = Output { o: &mut o, ht: None };
        gated_delta_rule_forward(output, Some(&mut saved), &input, dims, &options, &scratch).unwrap();

        assert_eq!(saved.states.len(), saved_states(&cu_seqlens, &options) * 4 * dims.state_len());
        let mut own = saved.clone();
        own.states.fill(f32::NAN);
        own.q_rstd.fill(f32::NAN);
        let (mut again, mut short) = (vec![0f32; 77 * 16], own.states.len());
        for missing in [1, 0] {
            short -= missing;
            let Saved { q_rstd, k_rstd, q_normalized, k_normalized, states } = &mut own;
            let states = &mut states[..short];
            let into = SavedMut { q_rstd, k_rstd, q_normalized, k_normalized, states };
            let output = Output { o: &mut again, ht: None };
            let done = gated_delta_rule_forward_into(output, into, &input, dims, &options, &scratch);
            assert_eq!(done.is_err(), missing == 1);
            short += missing;
        }
        assert_eq!((again, &own.states, &own.q_rstd), (o.clone(), &saved.states, &saved.q_rstd));

        let mut all = Vec::new();
        for view in [SavedRef::from(&saved), SavedRef::from(&own)] {
            let (mut dq, mut dk, mut dv) = (q.clone(), k.clone(), v.clone());
            let (mut dg, mut dbeta) = (g.clone(), beta.clone());
            let gates = GateGrads::Given { dg: &mut dg, dbeta: &mut dbeta };
            let grads = Grads { dq: &mut dq, dk: &mut dk, dv: &mut dv, gates, dh0: None };
            gated_delta_rule_backward(grads, &o, None, &input, view, dims, &options, &scratch).unwrap();
            all.push((dq, dk, dv, dg, dbeta));
        }
        assert_eq!(all[0], all[1]);
    }
}

#[test]
fn many_heads_and_sequences_without_tokens_take_no_memory() {
    let (scratch, options) = (Scratch::new(0), Options::default());
    // Heads without memory, and parameters of many heads beside many sequences.
    let (many, few, parameters) = (vec![0; 1 << 20], vec![0; 2], vec![0f32; 1 << 20]);
    for (heads, raw, cu_seqlens) in [(1 << 40, false, &few), (1 << 20, true, &many)] {
        let dims = Dims { key_heads: heads, value_heads: heads, key_dim: 4, value_dim: 4 };
        let gates = match raw {
            true => Gates::Raw(RawGates { a: &[], b: &[], a_log: &parameters, dt_bias: &parameters }),
            false => Gates::Given { g: &[], beta: &[] },
        };
        let input = Input::<f32> { q: &[], k: &[], v: &[], gates, h0: None, cu_seqlens };
        let mut saved = Saved::default();
        let output = Output { o: &mut [], ht: None };
        gated_delta_rule_forward(output, Some(&mut saved), &input, dims, &options, &scratch).unwrap();
        let (mut da_log, mut ddt_bias) = (parameters.clone(), parameters.clone());
        let gates = match raw {
            true => GateGrads::Raw { da: &mut [], db: &mut [], da_log: &mut da_log, ddt_bias: &mut ddt_bias },
            false => GateGrads::Given { dg: &mut [], dbeta: &mut [] },
        };
        let grads = Grads { dq: &mut [], dk: &mut [], dv: &mut [], gates, dh0: None };
        gated_delta_rule_backward(grads, &[], None, &input, &saved, dims, &options, &scratch).unwrap();
        assert!(da_log.iter().all(|x| *x == 0.0));
    }
}

#[test]
fn a_step_without_heads_and_a_state_beyond_memory_are_errors() {
    let (scratch, options) = (Scratch::new(0), Options::default());
    let ok = Dims { key_heads: 1, value_heads: 1, key_dim: 1, value_dim: 1 };
    let huge = 1 << 33;
    for dims in [
        Dims { key_heads: 0, ..ok },
        Dims { value_dim: 0, ..ok },
        Dims { key_dim: huge, value_dim: huge, ..ok },
    ] {
        let x = [0f32; 1];
        let step =
            gated_delta_rule_step(&mut [0.0], &mut [0.0], &x, &x, &x, &x, &x, dims, &options, &scratch);
        assert!(step.is_err(), "{dims:?}");
        let gates = Gates::Given { g: &[], beta: &[] };
        let input = Input::<f32> { q: &[], k: &[], v: &[], gates, h0: None, cu_seqlens: &[0, 0] };
        let output = Output { o: &mut [], ht: None };
        let forward = gated_delta_rule_forward(output, None, &input, dims, &options, &scratch);
        assert!(forward.is_err(), "{dims:?}");
    }
}
