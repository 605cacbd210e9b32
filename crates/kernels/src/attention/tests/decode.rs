//! Decoding on a cache against the full forward.

use super::lowered::exact_products;
use super::*;

/// o of the last `n` of the first `len` tokens, from a cache with room for more.
fn decode<T: Element>(r: &Reference, p: &Problem, len: usize, n: usize) -> Vec<f64> {
    let d = p.dims;
    let (q, mut k, mut v) = (cast::<T>(&r.q), cast::<T>(&r.k), cast::<T>(&r.v));
    // Tokens beyond `len` are not there yet.
    k[len * d.kv_heads * d.head_dim..].fill(T::from_f32(f32::NAN));
    v[len * d.kv_heads * d.value_dim..].fill(T::from_f32(f32::NAN));
    let sinks: Option<Vec<f32>> = r.sinks.as_deref().map(cast);
    let selected = r
        .selected
        .as_ref()
        .map(|(keys, topk)| Selected { keys: &keys[(len - n) * topk..len * topk], topk: *topk });
    let mut o = vec![T::default(); n * d.heads * d.value_dim];
    let scratch = Scratch::new(attention_decode_scratch::<T>(d, p.topk));
    let planned = scratch.bytes();
    let q = &q[(len - n) * d.heads * d.head_dim..len * d.heads * d.head_dim];
    let cache = Cache { k: &k, v: &v, len };
    attention_decode(&mut o, q, &cache, sinks.as_deref(), selected, d, &p.options, &scratch).unwrap();
    assert_eq!(scratch.bytes(), planned);
    wide(&o)
}

#[test]
fn decoding_on_a_cache_is_the_full_forward_at_every_position() {
    let plain = Problem::of(DIMS, &[280]);
    let options = Options { window: Some(33), soft_cap: Some(3.0), ..Options::default() };
    for p in [
        plain.clone(),
        Problem { options, sinks: true, ..plain.clone() },
        Problem { topk: Some(20), sinks: true, ..plain },
    ] {
        let (r, d_o) = p.build();
        let (whole, _) = kernel::<f32>(&r, DIMS, &p.options, &d_o);
        for len in 1..=280 {
            let got = decode::<f32>(&r, &p, len, 1);
            let (error, count) = ratio(&got, &whole.o[(len - 1) * 96..len * 96]);
            assert!(count == 96 && error < 1e-5, "position {len}: {error:e}");
        }
        for (len, n) in [(280, 280), (280, 7), (279, 150), (100, 99), (40, 0)] {
            let got = decode::<f32>(&r, &p, len, n);
            let (error, count) = ratio(&got, &whole.o[(len - n) * 96..len * 96]);
            assert!(count == n * 96 && error < 1e-5, "{n} tokens up to {len}: {error:e}");
        }
    }
}

#[test]
fn decoding_rounds_where_the_full_forward_does() {
    let (p, mut r, d_o) = exact_products();
    r.cu_seqlens = vec![0, 320];
    for logits in [Rounding::F32, Rounding::Bf16, Rounding::F16] {
        let p = Problem { options: Options { qk_product: Rounding::Bf16, logits, ..p.options }, ..p.clone() };
        let (whole, _) = kernel::<f32>(&r, DIMS, &p.options, &d_o);
        for len in (1..=320).step_by(29) {
            let (error, count) = ratio(&decode::<f32>(&r, &p, len, 1), &whole.o[(len - 1) * 96..len * 96]);
            assert!(count == 96 && error < 1e-5, "{logits:?}, position {len}: {error:e}");
        }
        let (whole, _) = kernel::<bf16>(&r, DIMS, &p.options, &d_o);
        let (error, _) = ratio(&decode::<bf16>(&r, &p, 300, 5), &whole.o[295 * 96..300 * 96]);
        assert!(error < 0.004, "{error:e}");
    }
}

#[test]
fn a_cache_that_is_too_short_is_refused() {
    let (q, kv, mut o) = ([0f32; 8], [0f32; 4], [0f32; 8]);
    let dims = Dims { heads: 2, kv_heads: 1, head_dim: 2, value_dim: 2 };
    let mut run = |len| {
        let cache = Cache { k: &kv, v: &kv, len };
        let scratch = Scratch::new(0);
        let options = Options::default();
        attention_decode(&mut o, &q, &cache, None, None, dims, &options, &scratch).map_err(|e| e.to_string())
    };
    assert!(run(1).unwrap_err().contains("must include the 2 new tokens, but has only 1"));
    assert!(run(3).unwrap_err().contains("at most its capacity of 2, got 3"));
    assert_eq!(run(2), Ok(()));
}
