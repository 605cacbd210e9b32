//! The kernel against its reference, the reference against finite differences, and exact properties.

mod before;
mod decode;
mod hidden;
mod lowered;

use half::bf16;
use proptest::prelude::*;

use super::reference::{Reference, Results};
use super::*;
use crate::{Element, Scratch};

/// RMS(a-b) / (RMS(b) + 0.1), and the number of values compared. The inputs are of size 1: a much smaller
/// result is a difference of such numbers and has their error.
fn ratio(a: &[f64], b: &[f64]) -> (f64, usize) {
    assert_eq!(a.len(), b.len());
    let rms = |x: f64| (x / b.len().max(1) as f64).sqrt();
    let difference: f64 = a.iter().zip(b).filter(|(a, b)| a != b).map(|(a, b)| (a - b) * (a - b)).sum();
    let size: f64 = b.iter().filter(|b| b.is_finite()).map(|b| b * b).sum();
    assert!(!difference.is_nan(), "a value is not a number");
    (rms(difference) / (rms(size) + 0.1), b.len())
}

fn cast<T: Element>(x: &[f64]) -> Vec<T> {
    x.iter().map(|x| T::from_f32(*x as f32)).collect()
}

fn wide<T: Element>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| x.to_f32() as f64).collect()
}

/// Results of the kernel, widened to f64.
fn kernel<T: Element>(r: &Reference, dims: Dims, options: &Options, d_o: &[f64]) -> (Results, Saved) {
    let (q, k, v, d_o) = (cast::<T>(&r.q), cast::<T>(&r.k), cast::<T>(&r.v), cast::<T>(d_o));
    let sinks: Option<Vec<f32>> = r.sinks.as_deref().map(cast);
    let topk = r.selected.as_ref().map(|s| s.1);
    let input = Input {
        q: &q,
        k: &k,
        v: &v,
        sinks: sinks.as_deref(),
        selected: r.selected.as_ref().map(|(keys, topk)| Selected { keys, topk: *topk }),
        before: 0,
        cu_seqlens: &r.cu_seqlens,
    };
    let tokens = *r.cu_seqlens.last().unwrap();
    let scratch = Scratch::new(
        attention_forward_scratch::<T>(dims, topk).max(attention_backward_scratch::<T>(dims, topk)),
    );
    let planned = scratch.bytes();
    let mut o = vec![T::default(); tokens * dims.heads * dims.value_dim];
    let mut saved = Saved::default();
    attention_forward(&mut o, Some(&mut saved), &input, dims, options, &scratch).unwrap();
    assert_eq!(saved.bytes(), saved_bytes(dims, options, tokens));
    let (mut dq, mut dk, mut dv) =
        (vec![T::default(); q.len()], vec![T::default(); k.len()], vec![T::default(); v.len()]);
    // Parameter gradients are added to the previous content.
    let mut dsinks = vec![2.0f32; dims.heads];
    let mut buffer = vec![f32::NAN; attention_backward_workspace::<T>(dims, tokens)];
    let grads =
        Grads { dq: &mut dq, dk: &mut dk, dv: &mut dv, dsinks: r.sinks.is_some().then_some(&mut dsinks[..]) };
    attention_backward(grads, &d_o, &o, &input, &saved, dims, options, &mut buffer, &scratch).unwrap();
    assert_eq!(scratch.bytes(), planned, "the scratch functions say what is needed");
    let dsinks = if r.sinks.is_some() { dsinks.iter().map(|x| *x as f64 - 2.0).collect() } else { vec![] };
    let results =
        Results { o: wide(&o), lse: wide(&saved.lse), dq: wide(&dq), dk: wide(&dk), dv: wide(&dv), dsinks };
    (results, saved)
}

fn fields(r: &Results) -> [(&'static str, &Vec<f64>); 6] {
    [("o", &r.o), ("lse", &r.lse), ("dq", &r.dq), ("dk", &r.dk), ("dv", &r.dv), ("dsinks", &r.dsinks)]
}

/// Asserts that every result is within the limit and was compared in full.
fn compare(got: &Results, expected: &Results, r: &Reference, dims: Dims, limit: f64, what: &str) {
    let tokens = *r.cu_seqlens.last().unwrap();
    let counts = [
        tokens * dims.heads * dims.value_dim,
        tokens * dims.heads,
        tokens * dims.heads * dims.head_dim,
        tokens * dims.kv_heads * dims.head_dim,
        tokens * dims.kv_heads * dims.value_dim,
        r.sinks.as_ref().map_or(0, |_| dims.heads),
    ];
    for (((name, a), (_, b)), expected) in fields(got).into_iter().zip(fields(expected)).zip(counts) {
        // The sum may nearly cancel, so its size is no measure.
        let limit = if name == "dsinks" { 10.0 * limit } else { limit };
        let (ratio, count) = ratio(a, b);
        assert_eq!(count, expected, "{what}: {name}");
        assert!(ratio <= limit, "{what}: {name} is off by {ratio:e}");
    }
}

fn same_bits(a: &Results, b: &Results, what: &str) {
    for ((name, a), (_, b)) in fields(a).into_iter().zip(fields(b)) {
        assert_eq!(a.len(), b.len());
        assert!(a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()), "{what}: {name}");
    }
}

/// A random problem.
#[derive(Clone, Debug)]
struct Problem {
    dims: Dims,
    lengths: Vec<usize>,
    options: Options,
    sinks: bool,
    topk: Option<usize>,
    seed: u64,
}

const DIMS: Dims = Dims { heads: 4, kv_heads: 2, head_dim: 16, value_dim: 24 };

impl Problem {
    fn of(dims: Dims, lengths: &[usize]) -> Problem {
        Problem {
            dims,
            lengths: lengths.to_vec(),
            options: Options::default(),
            sinks: false,
            topk: None,
            seed: 7,
        }
    }

    fn build(&self) -> (Reference, Vec<f64>) {
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
        let mut values = |n: usize| -> Vec<f64> { (0..n).map(|_| (next() * 1.7) as f32 as f64).collect() };
        let (q, k, v) = (
            values(tokens * d.heads * d.head_dim),
            values(tokens * d.kv_heads * d.head_dim),
            values(tokens * d.kv_heads * d.value_dim),
        );
        let (d_o, sinks) = (values(tokens * d.heads * d.value_dim), values(d.heads));
        // Each key of the sequence at most once, in no order, with unused slots; some are in the future.
        let selected = self.topk.map(|topk| {
            let mut keys = vec![UNUSED; tokens * topk];
            for w in cu_seqlens.windows(2) {
                for t in w[0]..w[1] {
                    let length = w[1] - w[0];
                    let (first, step) = ((values(1)[0].abs() * 1e6) as usize % length, length / 2 + 1);
                    for slot in 0..topk.min(length) {
                        let used = values(1)[0] > -0.6;
                        // Steps of half the length and more meet no key twice within a lap of coprime length.
                        let key = if gcd(step, length) == 1 { first + slot * step } else { first + slot };
                        if used {
                            keys[t * topk + slot] = (key % length) as u32;
                        }
                    }
                }
            }
            (keys, topk)
        });
        (Reference { q, k, v, sinks: self.sinks.then_some(sinks), selected, cu_seqlens }, d_o)
    }

    fn check(&self, limit: f64) {
        let (r, d_o) = self.build();
        let expected = r.run(self.dims, &self.options, &d_o);
        let (got, _) = kernel::<f32>(&r, self.dims, &self.options, &d_o);
        compare(&got, &expected, &r, self.dims, limit, &format!("{self:?}"));
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn problem() -> impl Strategy<Value = Problem> {
    (
        (1usize..4, 1usize..6, 1usize..20, 1usize..20),
        prop::collection::vec(0usize..50, 1..4),
        prop::option::of(0usize..30),
        prop::option::of(prop_oneof![Just(0.5f32), Just(5.0), Just(50.0)]),
        prop::option::of(prop_oneof![Just(1.0f32), Just(0.1)]),
        any::<bool>(),
        prop::option::of(0usize..20),
        any::<u64>(),
    )
        .prop_map(|((kv, g, hd, vd), lengths, window, soft_cap, scale, sinks, topk, seed)| Problem {
            dims: Dims { heads: kv * g, kv_heads: kv, head_dim: hd, value_dim: vd },
            lengths,
            options: Options { scale, window, soft_cap, ..Options::default() },
            sinks,
            topk,
            seed,
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_shape_agrees_with_the_plain_twin(p in problem()) {
        p.check(1e-5);
    }
}

#[test]
fn sequences_of_many_tiles_agree_with_the_plain_twin() {
    let full = Problem::of(DIMS, &[600, 257, 1, 256]);
    full.check(1e-5);
    for window in [1, 100, 256, 300] {
        let options = Options { window: Some(window), soft_cap: Some(3.0), ..Options::default() };
        Problem { options, sinks: true, ..full.clone() }.check(1e-5);
    }
    Problem { topk: Some(300), sinks: true, ..full.clone() }.check(1e-5);
    let one_group = Dims { heads: 1, kv_heads: 1, head_dim: 5, value_dim: 3 };
    Problem { dims: one_group, ..full.clone() }.check(1e-5);
    // More query heads per kv head than a tile has rows.
    let wide = Dims { heads: 300, kv_heads: 1, head_dim: 4, value_dim: 4 };
    Problem { dims: wide, lengths: vec![20, 3], sinks: true, ..full }.check(1e-5);
}

#[test]
fn heads_of_width_512_agree_with_the_plain_twin() {
    let dims = Dims { heads: 2, kv_heads: 1, head_dim: 512, value_dim: 512 };
    Problem::of(dims, &[70, 33]).check(1e-5);
    let latent = Dims { heads: 3, kv_heads: 3, head_dim: 192, value_dim: 128 };
    Problem::of(latent, &[130]).check(1e-5);
}

#[test]
fn bf16_storage_adds_its_rounding_and_no_more() {
    for (sinks, topk) in [(false, None), (true, None), (true, Some(40))] {
        let p = Problem { sinks, topk, ..Problem::of(DIMS, &[300, 45]) };
        let (mut r, d_o) = p.build();
        let round = |x: &[f64]| -> Vec<f64> { x.iter().map(|x| bf16::from_f64(*x).to_f64()).collect() };
        (r.q, r.k, r.v) = (round(&r.q), round(&r.k), round(&r.v));
        let d_o = round(&d_o);
        let expected = r.run(DIMS, &p.options, &d_o);
        let (got, _) = kernel::<bf16>(&r, DIMS, &p.options, &d_o);
        compare(&got, &expected, &r, DIMS, 0.004, "bf16");
    }
}

#[test]
fn the_plain_twin_agrees_with_finite_differences() {
    let dims = Dims { heads: 4, kv_heads: 2, head_dim: 3, value_dim: 2 };
    for (window, soft_cap, topk) in [(None, None, None), (Some(3), Some(2.0), None), (None, None, Some(4))] {
        let options = Options { window, soft_cap, ..Options::default() };
        let p = Problem { options, sinks: true, topk, ..Problem::of(dims, &[6, 1, 3]) };
        let (r, d_o) = p.build();
        let expected = r.run(dims, &options, &d_o);
        let loss = |r: &Reference| -> f64 {
            r.run(dims, &options, &d_o).o.iter().zip(&d_o).map(|(o, d)| o * d).sum()
        };
        let eps = 1e-5;
        type Field = fn(&mut Reference) -> &mut Vec<f64>;
        let tensors: [(&str, &Vec<f64>, Field); 4] = [
            ("dq", &expected.dq, |r| &mut r.q),
            ("dk", &expected.dk, |r| &mut r.k),
            ("dv", &expected.dv, |r| &mut r.v),
            ("dsinks", &expected.dsinks, |r| r.sinks.as_mut().unwrap()),
        ];
        for (name, grad, field) in tensors {
            let mut nonzero = 0;
            for (i, grad) in grad.iter().enumerate() {
                let (mut up, mut down) = (r.clone(), r.clone());
                field(&mut up)[i] += eps;
                field(&mut down)[i] -= eps;
                let slope = (loss(&up) - loss(&down)) / (2.0 * eps);
                assert!((slope - grad).abs() < 1e-7 * (1.0 + grad.abs()), "{name}[{i}]: {slope} {grad}");
                nonzero += (*grad != 0.0) as usize;
            }
            assert!(nonzero * 3 > grad.len(), "{name}: {nonzero} of {} have a gradient", grad.len());
        }
    }
}

#[test]
fn packed_sequences_are_the_same_bits_as_one_by_one() {
    for (window, topk) in [(None, None), (Some(40), None), (None, Some(9))] {
        let options = Options { window, ..Options::default() };
        let p = Problem { options, topk, ..Problem::of(DIMS, &[37, 1, 300, 5]) };
        let (r, d_o) = p.build();
        let (packed, _) = kernel::<f32>(&r, DIMS, &options, &d_o);
        for w in r.cu_seqlens.windows(2) {
            let cut = |x: &[f64], width: usize| x[w[0] * width..w[1] * width].to_vec();
            let one = Reference {
                q: cut(&r.q, 64),
                k: cut(&r.k, 32),
                v: cut(&r.v, 48),
                sinks: None,
                selected: r.selected.as_ref().map(|(keys, k)| (keys[w[0] * k..w[1] * k].to_vec(), *k)),
                cu_seqlens: vec![0, w[1] - w[0]],
            };
            let (got, _) = kernel::<f32>(&one, DIMS, &options, &cut(&d_o, 96));
            let expected = Results {
                o: cut(&packed.o, 96),
                lse: cut(&packed.lse, 4),
                dq: cut(&packed.dq, 64),
                dk: cut(&packed.dk, 32),
                dv: cut(&packed.dv, 48),
                dsinks: vec![],
            };
            same_bits(&got, &expected, &format!("sequence {w:?}"));
        }
    }
}

#[test]
fn a_query_that_sees_nothing_gives_zeros_forward_and_backward() {
    let lowered = Options { logits: Rounding::Bf16, ..Options::default() };
    for options in [Options::default(), lowered] {
        for sinks in [false, true] {
            let closed = Options { window: Some(0), ..options };
            let p = Problem { options: closed, sinks, ..Problem::of(DIMS, &[5, 300]) };
            let (r, d_o) = p.build();
            let (got, _) = kernel::<f32>(&r, DIMS, &closed, &d_o);
            for (name, values) in fields(&got) {
                let expected = |x: &f64| *x == 0.0 || name == "lse" && !x.is_nan();
                assert!(values.iter().all(expected), "window 0: {name}");
            }
            // Queries 2 and 5 have no key listed, the others have.
            let p = Problem { options, sinks, topk: Some(8), ..Problem::of(DIMS, &[8]) };
            let (mut r, d_o) = p.build();
            for t in 0..8 {
                for j in 0..8 {
                    r.selected.as_mut().unwrap().0[t * 8 + j] =
                        if t == 2 || t == 5 { UNUSED } else { j as u32 };
                }
            }
            let (got, _) = kernel::<f32>(&r, DIMS, &options, &d_o);
            for t in 0..8 {
                let zero = t == 2 || t == 5;
                assert_eq!(got.o[t * 96..(t + 1) * 96].iter().all(|x| *x == 0.0), zero, "o of {t}");
                // The gradient of a query's one key is zero unless a sink shares the row.
                if t > 0 {
                    assert_eq!(got.dq[t * 64..(t + 1) * 64].iter().all(|x| *x == 0.0), zero, "dq of {t}");
                }
            }
            for (name, values) in fields(&got) {
                assert!(values.iter().all(|x| !x.is_nan()), "{name}");
            }
        }
    }
}

#[test]
fn logits_of_ten_thousand_stay_finite() {
    let p = Problem { sinks: true, ..Problem::of(DIMS, &[300]) };
    let (mut r, d_o) = p.build();
    r.q.iter_mut().for_each(|x| *x *= 10_000.0);
    let largest = r.run(DIMS, &p.options, &d_o).lse.iter().fold(0f64, |m, x| m.max(x.abs()));
    assert!(largest > 1e4);
    for precision in [Rounding::F32, Rounding::Bf16] {
        let options = Options { qk_product: precision, logits: precision, ..p.options };
        let (got, _) = kernel::<f32>(&r, DIMS, &options, &d_o);
        for (name, values) in fields(&got) {
            assert!(values.iter().all(|x| x.is_finite()), "{name}");
        }
        let most = r.v.iter().fold(0f64, |m, x| m.max(x.abs()));
        assert!(got.o.iter().all(|x| x.abs() <= most * 1.00001), "o is a mean of values");
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for topk in [None, Some(50)] {
        let p = Problem { sinks: true, topk, ..Problem::of(DIMS, &[700, 7, 300]) };
        let (r, d_o) = p.build();
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let wide = kernel::<f32>(&r, DIMS, &p.options, &d_o).0;
                (wide, kernel::<bf16>(&r, DIMS, &p.options, &d_o).0)
            })
        };
        let one = run(1);
        for threads in [2, 3, 8] {
            let more = run(threads);
            same_bits(&one.0, &more.0, "f32");
            same_bits(&one.1, &more.1, "bf16");
        }
    }
}

#[test]
fn bad_shapes_are_errors_that_name_the_argument() {
    let scratch = Scratch::new(0);
    let run = |dims: Dims, options: Options, q: usize, cu: &[usize], sinks: usize, selected: usize| {
        let (q, k, v) = (vec![0f32; q], vec![0f32; 2 * dims.kv_heads * 4], vec![0f32; 2 * dims.kv_heads * 4]);
        let (sinks, keys) = (vec![0f32; sinks], vec![0; selected]);
        let selected = Some(Selected { keys: &keys, topk: 3 });
        let input = Input { q: &q, k: &k, v: &v, sinks: Some(&sinks), selected, before: 0, cu_seqlens: cu };
        let mut o = vec![0f32; 2 * dims.heads * 4];
        attention_forward(&mut o, None, &input, dims, &options, &scratch).err().map(|e| e.to_string())
    };
    let ok = Dims { heads: 4, kv_heads: 2, head_dim: 4, value_dim: 4 };
    let options = Options::default();
    let bad = |text: Option<String>, part: &str| assert!(text.as_ref().unwrap().contains(part), "{text:?}");
    bad(
        run(Dims { heads: 3, ..ok }, options, 24, &[0, 2], 3, 6),
        "query heads must be a multiple of kv heads, got 3 and 2",
    );
    bad(run(Dims { head_dim: 513, ..ok }, options, 32, &[0, 2], 4, 6), "must be 1 to 512, got 513 and 4");
    bad(run(ok, Options { soft_cap: Some(0.0), ..options }, 32, &[0, 2], 4, 6), "soft cap");
    bad(run(ok, options, 31, &[0, 2], 4, 6), "q must have 32 elements, got 31");
    bad(run(ok, options, 32, &[0, 2], 3, 6), "sinks must have 4 elements, got 3");
    bad(run(ok, options, 32, &[0, 2], 4, 5), "selected must have 6 elements, got 5");
    bad(run(ok, options, 32, &[0, 2, 1], 4, 6), "must not decrease");
    assert_eq!(run(ok, options, 32, &[0, 2], 4, 6), None);
}

#[test]
fn more_heads_than_memory_holds_are_refused_though_there_are_no_tokens() {
    let (scratch, options) = (Scratch::new(0), Options::default());
    for (heads, kv_heads) in [(1 << 40, 1 << 40), (1 << 40, 1)] {
        let dims = Dims { heads, kv_heads, head_dim: 4, value_dim: 4 };
        for selected in [None, Some(Selected { keys: &[], topk: 2 })] {
            let cu_seqlens = &[0, 0, 0];
            let input = Input::<f32> { q: &[], k: &[], v: &[], sinks: None, selected, before: 0, cu_seqlens };
            let grads = Grads::<f32> { dq: &mut [], dk: &mut [], dv: &mut [], dsinks: None };
            let saved = Saved::default();
            let backward =
                attention_backward(grads, &[], &[], &input, &saved, dims, &options, &mut [], &scratch);
            let forward = attention_forward(&mut [], None, &input, dims, &options, &scratch);
            for error in [forward, backward] {
                let error = error.unwrap_err().to_string();
                assert_eq!(error, format!("heads must be at most 65536, got {heads}"));
            }
        }
    }
}

#[test]
fn many_sequences_without_tokens_beside_many_heads_take_no_memory() {
    let dims = Dims { heads: 1 << 16, kv_heads: 1 << 16, head_dim: 1, value_dim: 1 };
    let (scratch, options, cu_seqlens) = (Scratch::new(0), Options::default(), vec![0; 1 << 24]);
    fn run<T: Element>(dims: Dims, options: &Options, cu_seqlens: &[usize], scratch: &Scratch) {
        for selected in [None, Some(Selected { keys: &[], topk: 2 })] {
            let input = Input::<T> { q: &[], k: &[], v: &[], sinks: None, selected, before: 0, cu_seqlens };
            let grads = Grads::<T> { dq: &mut [], dk: &mut [], dv: &mut [], dsinks: None };
            let saved = Saved::default();
            attention_backward(grads, &[], &[], &input, &saved, dims, options, &mut [], scratch).unwrap();
        }
    }
    run::<f32>(dims, &options, &cu_seqlens, &scratch);
    run::<bf16>(dims, &options, &cu_seqlens, &scratch);
}
