//! The indexer against its reference, and the reference against finite differences.

use half::bf16;
use proptest::prelude::*;

use super::reference::{Reference, Results, distributions};
use super::*;
use crate::attention::{self, Selected, UNUSED, attention_forward, attention_forward_scratch};
use crate::{Element, Scratch};

/// Numbers between -1 and 1, rounded to f32.
fn values(seed: &mut u64, n: usize) -> Vec<f64> {
    let mut next = || {
        *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((*seed >> 33) as f64 / (1u64 << 31) as f64) * 2.0 - 1.0
    };
    (0..n).map(|_| next() as f32 as f64).collect()
}

fn cast<T: Element>(x: &[f64]) -> Vec<T> {
    x.iter().map(|x| T::from_f32(*x as f32)).collect()
}

fn wide<T: Element>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| x.to_f32() as f64).collect()
}

fn cumulate(lengths: &[usize]) -> Vec<usize> {
    let mut cu_seqlens = vec![0];
    for length in lengths {
        cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + length);
    }
    cu_seqlens
}

fn build(dims: Dims, lengths: &[usize], seed: u64) -> Reference {
    let (cu_seqlens, mut seed) = (cumulate(lengths), seed);
    let tokens = cu_seqlens[cu_seqlens.len() - 1];
    Reference {
        q: values(&mut seed, tokens * dims.heads * dims.dim),
        k: values(&mut seed, tokens * dims.dim),
        w: values(&mut seed, tokens * dims.heads),
        cu_seqlens,
    }
}

fn build_attention(dims: attention::Dims, lengths: &[usize], seed: u64) -> attention::reference::Reference {
    let (cu_seqlens, mut seed) = (cumulate(lengths), seed ^ 0x55);
    let tokens = cu_seqlens[cu_seqlens.len() - 1];
    let double = |x: Vec<f64>| x.iter().map(|x| 2.0 * x).collect();
    attention::reference::Reference {
        q: double(values(&mut seed, tokens * dims.heads * dims.head_dim)),
        k: double(values(&mut seed, tokens * dims.kv_heads * dims.head_dim)),
        v: values(&mut seed, tokens * dims.kv_heads * dims.value_dim),
        sinks: None,
        selected: None,
        cu_seqlens,
    }
}

fn topk<T: Element>(r: &Reference, dims: Dims, options: &Options, topk: usize) -> Vec<u32> {
    let (q, k, w) = (cast::<T>(&r.q), cast::<T>(&r.k), cast::<f32>(&r.w));
    let input = Input { q: &q, k: &k, w: &w, before: 0, cu_seqlens: &r.cu_seqlens };
    let longest = r.cu_seqlens.windows(2).map(|w| w[1] - w[0]).max().unwrap();
    let scratch = Scratch::new(indexer_topk_scratch::<T>(dims, longest));
    let planned = scratch.bytes();
    let mut selected = vec![7; w.len() / dims.heads * topk];
    indexer_topk(&mut selected, &input, dims, options, topk, &scratch).unwrap();
    assert_eq!(scratch.bytes(), planned, "the scratch functions say what is needed");
    selected
}

/// Loss and gradients of the kernel, after a forward of the attention.
fn kernel<T: Element>(
    r: &Reference,
    a: &attention::reference::Reference,
    dims: Dims,
    attention_dims: attention::Dims,
    options: &Options,
    attention_options: &attention::Options,
) -> Results {
    let (q, k, w) = (cast::<T>(&r.q), cast::<T>(&r.k), cast::<f32>(&r.w));
    let input = Input { q: &q, k: &k, w: &w, before: 0, cu_seqlens: &r.cu_seqlens };
    let (aq, ak, av) = (cast::<T>(&a.q), cast::<T>(&a.k), cast::<T>(&a.v));
    let sinks: Option<Vec<f32>> = a.sinks.as_deref().map(cast);
    let top = a.selected.as_ref().map(|s| s.1);
    let attention_input = attention::Input {
        q: &aq,
        k: &ak,
        v: &av,
        sinks: sinks.as_deref(),
        selected: a.selected.as_ref().map(|(keys, topk)| Selected { keys, topk: *topk }),
        before: 0,
        cu_seqlens: &a.cu_seqlens,
    };
    let tokens = *r.cu_seqlens.last().unwrap();
    let mut o = vec![T::default(); tokens * attention_dims.heads * attention_dims.value_dim];
    let scratch = Scratch::new(attention_forward_scratch::<T>(attention_dims, top));
    let mut saved = attention::Saved::default();
    let keep = Some(&mut saved);
    attention_forward(&mut o, keep, &attention_input, attention_dims, attention_options, &scratch).unwrap();
    let target =
        Target { input: &attention_input, saved: &saved, dims: attention_dims, options: attention_options };
    let longest = r.cu_seqlens.windows(2).map(|w| w[1] - w[0]).max().unwrap();
    let scratch = Scratch::new(indexer_loss_scratch::<T>(dims, attention_dims, longest, top));
    let planned = scratch.bytes();
    let (mut dq, mut dk, mut dw) =
        (vec![T::default(); q.len()], vec![T::default(); k.len()], vec![f32::NAN; w.len()]);
    let mut buffer = vec![f32::NAN; indexer_loss_workspace(dims, tokens)];
    let grads = Grads { dq: &mut dq, dk: &mut dk, dw: &mut dw };
    let loss =
        indexer_loss(Some(grads), &input, &target, dims, options, &mut buffer, &scratch).unwrap() as f64;
    let alone =
        indexer_loss(None::<Grads<'_, T>>, &input, &target, dims, options, &mut [], &scratch).unwrap();
    assert_eq!(
        (alone as f64).to_bits(),
        loss.to_bits(),
        "the loss does not depend on whether gradients are asked for"
    );
    assert_eq!(scratch.bytes(), planned, "the scratch functions say what is needed");
    Results { loss, dq: wide(&dq), dk: wide(&dk), dw: wide(&dw) }
}

fn compare(got: &Results, expected: &Results, limit: f64, what: &str) {
    assert!((got.loss - expected.loss).abs() <= limit * (expected.loss.abs() + 0.1), "{what}: loss {got:?}");
    for (name, a, b) in
        [("dq", &got.dq, &expected.dq), ("dk", &got.dk, &expected.dk), ("dw", &got.dw, &expected.dw)]
    {
        assert!(a.len() == b.len() && !a.is_empty(), "{what}: {name}");
        let norm = |x: f64| x.sqrt();
        let difference = norm(a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum());
        let size = norm(b.iter().map(|b| b * b).sum());
        assert!(difference <= limit * (size + 1e-3), "{what}: {name} is off by {difference:e} of {size:e}");
    }
}

const DIMS: Dims = Dims { heads: 4, dim: 8 };
const ATTENTION: attention::Dims = attention::Dims { heads: 4, kv_heads: 2, head_dim: 6, value_dim: 3 };
const LOSS: Options = Options { logits: Rounding::F32, loss_scale: 3.0, ties: Ties::Earliest };

#[test]
fn scores_agree_with_the_plain_twin() {
    for (dims, lengths) in [(DIMS, vec![300, 20]), (Dims { heads: 64, dim: 128 }, vec![3, 40])] {
        let r = build(dims, &lengths, 1);
        let (q, k, w) = (cast::<f32>(&r.q), cast::<f32>(&r.k), cast::<f32>(&r.w));
        let input = Input { q: &q, k: &k, w: &w, before: 0, cu_seqlens: &r.cu_seqlens };
        for (sequence, begin) in r.cu_seqlens[..2].iter().enumerate() {
            let end = lengths[sequence];
            let tokens = end / 3..end;
            let mut scores = vec![f32::NAN; tokens.len() * end];
            let scratch = Scratch::new(indexer_scores_scratch::<f32>(dims));
            let planned = scratch.bytes();
            indexer_scores(&mut scores, &input, dims, &LOSS, sequence, tokens.clone(), &scratch).unwrap();
            assert_eq!(scratch.bytes(), planned);
            for (i, t) in tokens.enumerate() {
                for u in 0..=t {
                    let expected = r.score(dims, &LOSS, begin + t, begin + u);
                    let got = scores[i * end + u] as f64;
                    assert!(
                        (got - expected).abs() < 1e-5 * (1.0 + expected.abs()),
                        "{t} {u}: {got} {expected}"
                    );
                }
            }
        }
    }
}

/// Small whole numbers: every score is exact, and many are equal.
fn with_ties(dims: Dims, lengths: &[usize], seed: u64) -> Reference {
    let mut r = build(dims, lengths, seed);
    for x in [&mut r.q, &mut r.k, &mut r.w] {
        x.iter_mut().for_each(|x| *x = (*x * 1.6).round());
    }
    r
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn the_chosen_keys_are_those_of_a_full_sort_with_ties_to_the_earliest(
        heads in 1usize..5, lengths in prop::collection::vec(0usize..60, 1..4), k in 1usize..40, seed in any::<u64>(),
    ) {
        // The width is a power of 4: its root is exact.
        let dims = Dims { heads, dim: 4 };
        let r = with_ties(dims, &lengths, seed);
        prop_assert_eq!(topk::<f32>(&r, dims, &LOSS, k), r.topk(dims, &LOSS, k));
        prop_assert_eq!(topk::<bf16>(&r, dims, &LOSS, k), r.topk(dims, &LOSS, k));
    }

    #[test]
    fn loss_and_gradients_agree_with_the_plain_twin_in_both_stages(
        shape in (1usize..5, 1usize..12, 1usize..3, 1usize..4, 1usize..9),
        lengths in prop::collection::vec(0usize..40, 1..4), window in prop::option::of(1usize..20),
        k in prop::option::of(1usize..12), sinks in any::<bool>(), seed in any::<u64>(),
    ) {
        prop_assume!(lengths.iter().sum::<usize>() > 0);
        let (heads, dim, kv, group, hd) = shape;
        let dims = Dims { heads, dim };
        let ad = attention::Dims { heads: kv * group, kv_heads: kv, head_dim: hd, value_dim: 2 };
        let (r, mut a) = (build(dims, &lengths, seed), build_attention(ad, &lengths, seed));
        a.selected = k.map(|k| (r.topk(dims, &LOSS, k), k));
        a.sinks = sinks.then(|| vec![0.5; ad.heads]);
        let options = attention::Options { window, ..attention::Options::default() };
        let expected = r.run(dims, &LOSS, &distributions(&a, ad, &options));
        let got = kernel::<f32>(&r, &a, dims, ad, &LOSS, &options);
        compare(&got, &expected, 2e-5, "proptest");
    }
}

#[test]
fn long_sequences_have_the_loss_and_gradients_of_the_plain_twin() {
    let lengths = [600, 1, 270];
    let (r, mut a) = (build(DIMS, &lengths, 3), build_attention(ATTENTION, &lengths, 3));
    let capped = attention::Options { soft_cap: Some(2.0), ..attention::Options::default() };
    for k in [None, Some(300), Some(5)] {
        a.selected = k.map(|k| (topk::<f32>(&r, DIMS, &LOSS, k), k));
        let expected = r.run(DIMS, &LOSS, &distributions(&a, ATTENTION, &capped));
        let got = kernel::<f32>(&r, &a, DIMS, ATTENTION, &LOSS, &capped);
        compare(&got, &expected, 2e-5, &format!("topk {k:?}"));
        assert!(got.loss > 0.01, "{}", got.loss);
    }
}

#[test]
fn the_plain_twin_agrees_with_finite_differences_in_both_stages() {
    let lengths = [7, 1, 4];
    let (r, mut a) = (build(DIMS, &lengths, 5), build_attention(ATTENTION, &lengths, 5));
    let options = attention::Options::default();
    for k in [None, Some(3)] {
        a.selected = k.map(|k| (r.topk(DIMS, &LOSS, k), k));
        let targets = distributions(&a, ATTENTION, &options);
        let expected = r.run(DIMS, &LOSS, &targets);
        type Field = fn(&mut Reference) -> &mut Vec<f64>;
        let tensors: [(&str, &Vec<f64>, Field); 3] = [
            ("dq", &expected.dq, |r| &mut r.q),
            ("dk", &expected.dk, |r| &mut r.k),
            ("dw", &expected.dw, |r| &mut r.w),
        ];
        for (name, grad, field) in tensors {
            let mut nonzero = 0;
            for (i, grad) in grad.iter().enumerate() {
                let loss = |by: f64| {
                    let mut r = r.clone();
                    field(&mut r)[i] += by;
                    r.run(DIMS, &LOSS, &targets).loss
                };
                let slope = (loss(1e-6) - loss(-1e-6)) / 2e-6;
                assert!((slope - grad).abs() < 1e-7, "{name}[{i}]: {slope} {grad}");
                nonzero += (*grad != 0.0) as usize;
            }
            assert!(nonzero * 3 > grad.len(), "{name}: {nonzero} of {} have a gradient", grad.len());
        }
    }
}

#[test]
fn a_sequence_not_longer_than_topk_has_the_causal_mask_and_early_queries_all_their_keys() {
    let r = build(DIMS, &[5, 9], 2);
    let selected = topk::<f32>(&r, DIMS, &LOSS, 5);
    for t in 0..14 {
        let row = &selected[t * 5..(t + 1) * 5];
        let position = if t < 5 { t } else { t - 5 };
        let used = row.iter().filter(|j| **j != UNUSED).count();
        assert_eq!(used, 5.min(position + 1), "exactly min(topk, t + 1)");
        assert!(
            row[..used].windows(2).all(|w| w[0] < w[1])
                && row[..used].iter().all(|j| *j as usize <= position)
        );
        if position < 5 {
            assert!(row[..used].iter().zip(0..).all(|(a, b)| *a == b));
        }
    }
    // With all keys selected, attention and loss are those of the dense stage.
    let (r, mut a) = (build(DIMS, &[20], 4), build_attention(ATTENTION, &[20], 4));
    let options = attention::Options::default();
    let dense = kernel::<f32>(&r, &a, DIMS, ATTENTION, &LOSS, &options);
    a.selected = Some((topk::<f32>(&r, DIMS, &LOSS, 32), 32));
    compare(&kernel::<f32>(&r, &a, DIMS, ATTENTION, &LOSS, &options), &dense, 1e-6, "all selected");
}

#[test]
fn new_queries_against_a_cache_have_the_keys_that_the_whole_sequence_gives_them() {
    for (dims, tokens, k) in [(DIMS, 300, 20), (DIMS, 300, 290), (Dims { heads: 64, dim: 128 }, 70, 16)] {
        let r = build(dims, &[tokens], 11);
        let whole = topk::<f32>(&r, dims, &LOSS, k);
        let (q, keys, w) = (cast::<f32>(&r.q), cast::<f32>(&r.k), cast::<f32>(&r.w));
        for (len, queries) in
            [(tokens, 1), (tokens, 5), (tokens, tokens), (tokens - 1, 40), (k, 3), (k + 1, 1)]
        {
            let rows = len - queries..len;
            let of = |width: usize| rows.start * width..rows.end * width;
            let scratch = Scratch::new(indexer_topk_scratch::<f32>(dims, len));
            let planned = scratch.bytes();
            let mut selected = vec![7; queries * k];
            let (q, w) = (&q[of(dims.heads * dims.dim)], &w[of(dims.heads)]);
            indexer_topk_decode(&mut selected, q, w, &keys, len, dims, &LOSS, k, &scratch).unwrap();
            assert_eq!(selected, whole[of(k)], "{queries} of {len}");
            assert_eq!(scratch.bytes(), planned);
        }
    }
}

#[test]
fn lowered_logits_are_rounded_before_the_relu_and_nothing_else_is() {
    let r = build(DIMS, &[100], 6);
    let lowered = Options { logits: Rounding::Bf16, ..LOSS };
    let run = |r: &Reference, options: &Options| {
        let (q, k, w) = (cast::<f32>(&r.q), cast::<f32>(&r.k), cast::<f32>(&r.w));
        let input = Input { q: &q, k: &k, w: &w, before: 0, cu_seqlens: &r.cu_seqlens };
        let mut scores = vec![0.0; 100 * 100];
        let scratch = Scratch::new(indexer_scores_scratch::<f32>(DIMS));
        indexer_scores(&mut scores, &input, DIMS, options, 0, 0..100, &scratch).unwrap();
        scores
    };
    let (f32s, bf16s) = (run(&r, &LOSS), run(&r, &lowered));
    let mut differ = 0;
    for (i, (a, b)) in f32s.iter().zip(&bf16s).enumerate() {
        let (t, u) = (i / 100, i % 100);
        // Half an ulp of bf16 is 2^-9 of the power of two above, at most 2^-8 of the value.
        let weights: f64 = (0..4).map(|h| r.w[t * 4 + h].abs()).sum();
        let largest =
            (0..4).map(|h| (0..8).map(|c| (r.q[(t * 4 + h) * 8 + c] * r.k[u * 8 + c]).abs()).sum::<f64>());
        let bound = weights * largest.fold(0.0, f64::max) * 8f64.powf(-0.5) * 2f64.powi(-8);
        assert!(((a - b) as f64).abs() <= bound + 1e-6);
        differ += (a != b) as usize;
    }
    assert!(differ > 5000);
    let ties = with_ties(DIMS, &[100], 6);
    assert_eq!(run(&ties, &LOSS), run(&ties, &lowered), "whole numbers up to 32 are exact in bf16");
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let lengths = [500, 7, 150];
    let (r, a) = (build(DIMS, &lengths, 8), build_attention(ATTENTION, &lengths, 8));
    let sparse =
        attention::reference::Reference { selected: Some((r.topk(DIMS, &LOSS, 20), 20)), ..a.clone() };
    let options = attention::Options::default();
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let results = [&a, &sparse].map(|a| kernel::<f32>(&r, a, DIMS, ATTENTION, &LOSS, &options));
            let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let all = results.map(|r| [bits(&[r.loss]), bits(&r.dq), bits(&r.dk), bits(&r.dw)]);
            (all, topk::<f32>(&r, DIMS, &LOSS, 20))
        })
    };
    let one = run(1);
    for threads in [2, 3, 8] {
        assert!(run(threads) == one, "{threads} threads");
    }
}

#[test]
fn a_key_that_is_not_finite_stays_with_the_queries_that_see_it() {
    let (tokens, at) = (40, 20);
    let mut values = crate::testing::Values::new(5);
    let mut r = Reference {
        q: values.take(tokens * 32, 1.0),
        k: values.take(tokens * 8, 1.0),
        w: values.take(tokens * 4, 1.0),
        cu_seqlens: vec![0, tokens],
    };
    let a = attention::reference::Reference {
        q: values.take(tokens * 24, 1.0),
        k: values.take(tokens * 12, 1.0),
        v: values.take(tokens * 6, 1.0),
        sinks: None,
        selected: None,
        cu_seqlens: vec![0, tokens],
    };
    let run = |r: &Reference| kernel::<f32>(r, &a, DIMS, ATTENTION, &LOSS, &attention::Options::default());
    let clean = run(&r);
    for bad in [f64::NAN, f64::INFINITY] {
        r.k[at * 8..(at + 1) * 8].fill(bad);
        let got = run(&r);
        assert_eq!(got.dq[..at * 32], clean.dq[..at * 32], "{bad}: dq");
        assert_eq!(got.dw[..at * 4], clean.dw[..at * 4], "{bad}: dw");
        assert!(got.loss.is_nan() && got.dq[at * 32..].iter().any(|x| x.is_nan()));
    }
}

#[test]
fn bf16_storage_adds_its_rounding_and_no_more() {
    let (mut r, mut a) = (build(DIMS, &[90, 30], 9), build_attention(ATTENTION, &[90, 30], 9));
    let round = |x: &mut Vec<f64>| x.iter_mut().for_each(|x| *x = bf16::from_f64(*x).to_f64());
    for x in [&mut r.q, &mut r.k, &mut a.q, &mut a.k] {
        round(x);
    }
    let options = attention::Options::default();
    for k in [None, Some(16)] {
        a.selected = k.map(|k| (r.topk(DIMS, &LOSS, k), k));
        let expected = r.run(DIMS, &LOSS, &distributions(&a, ATTENTION, &options));
        compare(&kernel::<bf16>(&r, &a, DIMS, ATTENTION, &LOSS, &options), &expected, 0.004, "bf16");
    }
}

#[test]
fn the_distribution_of_a_block_sums_to_one_and_agrees_with_the_plain_twin() {
    let mut a = build_attention(ATTENTION, &[10, 290], 10);
    a.sinks = Some(vec![0.3; 4]);
    let options = attention::Options { window: Some(270), ..attention::Options::default() };
    let expected = distributions(&a, ATTENTION, &options);
    let (q, k, v) = (cast::<f32>(&a.q), cast::<f32>(&a.k), cast::<f32>(&a.v));
    let sinks = cast::<f32>(a.sinks.as_ref().unwrap());
    let input = attention::Input {
        q: &q,
        k: &k,
        v: &v,
        sinks: Some(&sinks),
        selected: None,
        before: 0,
        cu_seqlens: &a.cu_seqlens,
    };
    let mut o = vec![0.0; 300 * 12];
    let scratch = Scratch::new(attention_forward_scratch::<f32>(ATTENTION, None));
    let mut saved = attention::Saved::default();
    attention_forward(&mut o, Some(&mut saved), &input, ATTENTION, &options, &scratch).unwrap();
    let target = Target { input: &input, saved: &saved, dims: ATTENTION, options: &options };
    let mut p = vec![f32::NAN; 40 * 290];
    attention_distribution(&mut p, &target, 1, 250..290, &scratch).unwrap();
    for (i, row) in p.chunks(290).enumerate() {
        assert!((row.iter().map(|p| *p as f64).sum::<f64>() - 1.0).abs() < 1e-5);
        let mut row_expected = vec![0.0; 290];
        expected[10 + 250 + i].iter().for_each(|(u, p)| row_expected[*u] = *p);
        assert!(row.iter().zip(&row_expected).all(|(a, b)| (*a as f64 - b).abs() < 1e-6), "query {i}");
    }
}

#[test]
fn bad_shapes_are_errors_that_name_the_argument() {
    let scratch = Scratch::new(0);
    let run = |q: usize, topk: usize, selected: usize, cu: &[usize]| {
        let (q, k, w) = (vec![0f32; q], vec![0f32; 16], vec![0f32; 8]);
        let input = Input { q: &q, k: &k, w: &w, before: 0, cu_seqlens: cu };
        let mut selected = vec![0; selected];
        indexer_topk(&mut selected, &input, DIMS, &LOSS, topk, &scratch).map_err(|e| e.to_string())
    };
    assert_eq!(run(63, 1, 2, &[0, 2]).unwrap_err(), "q must have 64 elements, got 63");
    assert_eq!(run(64, 0, 0, &[0, 2]).unwrap_err(), "topk must be 1 or more, got 0");
    assert_eq!(run(64, 1, 3, &[0, 2]).unwrap_err(), "selected must have 2 elements, got 3");
    assert_eq!(run(64, 1, 2, &[0, 2]), Ok(()));
    let decode = |q: usize, keys: usize, len: usize| {
        let (q, k, w) = (vec![0f32; q], vec![0f32; keys], vec![0f32; 8]);
        indexer_topk_decode(&mut [0; 2], &q, &w, &k, len, DIMS, &LOSS, 1, &scratch).map_err(|e| e.to_string())
    };
    assert_eq!(decode(63, 16, 2).unwrap_err(), "q must have 64 elements, got 63");
    assert_eq!(decode(64, 16, 1).unwrap_err(), "the cache must include the 2 new tokens, but has only 1");
    assert_eq!(decode(64, 16, 3).unwrap_err(), "cache length must be at most its capacity of 2, got 3");
    assert_eq!(decode(64, 16, 2), Ok(()));
}

/// The later queries of the first sequence, with all its keys, against the reference of the whole one.
fn check_before(lengths: &[usize], before: usize, top: Option<usize>, seed: u64) {
    let dims = Dims { heads: 3, dim: 7 };
    let served = attention::Dims { heads: 4, kv_heads: 2, head_dim: 5, value_dim: 3 };
    let (options, served_options) =
        (Options { loss_scale: 0.7, ..Options::default() }, attention::Options::default());
    let (r, mut a) = (build(dims, lengths, seed), build_attention(served, lengths, seed));
    let cu_seqlens: Vec<usize> = r.cu_seqlens.iter().map(|end| end.saturating_sub(before)).collect();
    let (q, k, w) = (cast::<f32>(&r.q), cast::<f32>(&r.k), cast::<f32>(&r.w));
    let input = Input {
        q: &q[before * dims.heads * dims.dim..],
        k: &k,
        w: &w[before * dims.heads..],
        before,
        cu_seqlens: &cu_seqlens,
    };
    let (keys, queries) = (*r.cu_seqlens.last().unwrap(), *cu_seqlens.last().unwrap());
    let scratch = Scratch::new(0);
    if let Some(top) = top {
        let mut selected = vec![7; queries * top];
        indexer_topk(&mut selected, &input, dims, &options, top, &scratch).unwrap();
        let whole = r.topk(dims, &options, top);
        assert_eq!(selected, whole[before * top..], "{lengths:?} from {before}");
        a.selected = Some((whole, top));
    }
    // Queries before have no distribution: they add nothing.
    let mut targets = distributions(&a, served, &served_options);
    targets[..before].iter_mut().for_each(Vec::clear);
    let mut expected = r.run(dims, &options, &targets);
    let share = keys as f64 / queries.max(1) as f64;
    expected.loss *= share;
    for x in [&mut expected.dq, &mut expected.dk, &mut expected.dw] {
        x.iter_mut().for_each(|x| *x *= share);
    }
    let (aq, ak) = (cast::<f32>(&a.q), cast::<f32>(&a.k));
    let av = cast::<f32>(&a.v);
    let attended = attention::Input {
        q: &aq[before * served.heads * served.head_dim..],
        k: &ak,
        v: &av,
        sinks: None,
        selected: a
            .selected
            .as_ref()
            .map(|(keys, topk)| Selected { keys: &keys[before * topk..], topk: *topk }),
        before,
        cu_seqlens: &cu_seqlens,
    };
    let (mut o, mut saved) =
        (vec![0.0; queries * served.heads * served.value_dim], attention::Saved::default());
    attention_forward(&mut o, Some(&mut saved), &attended, served, &served_options, &scratch).unwrap();
    let target = Target { input: &attended, saved: &saved, dims: served, options: &served_options };
    let nan = |n: usize| vec![f32::NAN; n];
    let (mut dq, mut dk, mut dw) = (nan(input.q.len()), nan(k.len()), nan(input.w.len()));
    let grads = Grads { dq: &mut dq, dk: &mut dk, dw: &mut dw };
    let mut buffer = nan(indexer_loss_workspace(dims, keys));
    let loss = indexer_loss(Some(grads), &input, &target, dims, &options, &mut buffer, &scratch).unwrap();
    let pad = |x: &[f32], width: usize| [vec![0.0; before * width], wide(x)].concat();
    let got = Results {
        loss: loss as f64,
        dq: pad(&dq, dims.heads * dims.dim),
        dk: wide(&dk),
        dw: pad(&dw, dims.heads),
    };
    compare(&got, &expected, 1e-5, &format!("{lengths:?} from {before}, {top:?}"));
}

#[test]
fn later_queries_with_earlier_keys_agree_with_the_plain_twin() {
    for top in [None, Some(5), Some(40)] {
        for before in [0, 1, 31, 32, 33, 60] {
            check_before(&[61, 3, 1], before, top, 11);
        }
        check_before(&[600], 299, top, 12);
    }
}
