//! Keys before the first query: the later queries of a sequence against the reference of the whole one.

use super::*;

/// Results of the queries from `before` on of the first sequence and of all other sequences, with all keys.
fn later<T: Element, K: Element>(r: &Reference, p: &super::Problem, d_o: &[f64], before: usize) -> Results {
    let d = p.dims;
    let (q, k, v, d_o) = (cast::<T>(&r.q), cast::<T>(&r.k), cast::<T>(&r.v), cast::<T>(d_o));
    let (q, d_o) = (&q[before * d.heads * d.head_dim..], &d_o[before * d.heads * d.value_dim..]);
    let sinks: Option<Vec<f32>> = r.sinks.as_deref().map(cast);
    let cu_seqlens: Vec<usize> = r.cu_seqlens.iter().map(|end| end.saturating_sub(before)).collect();
    let input = Input {
        q,
        k: &k,
        v: &v,
        sinks: sinks.as_deref(),
        selected: r
            .selected
            .as_ref()
            .map(|(keys, topk)| Selected { keys: &keys[before * topk..], topk: *topk }),
        before,
        cu_seqlens: &cu_seqlens,
    };
    let keys = *r.cu_seqlens.last().unwrap();
    let scratch = Scratch::new(
        attention_forward_scratch::<T>(d, p.topk).max(attention_backward_scratch::<T>(d, p.topk)),
    );
    let planned = scratch.bytes();
    let (mut o, mut saved) = (vec![T::from_f32(f32::NAN); d_o.len()], Saved::default());
    attention_forward(&mut o, Some(&mut saved), &input, d, &p.options, &scratch).unwrap();
    let nan = |n: usize| vec![K::from_f32(f32::NAN); n];
    let (mut dq, mut dk, mut dv) = (vec![T::from_f32(f32::NAN); q.len()], nan(k.len()), nan(v.len()));
    let mut dsinks = vec![0.0f32; if r.sinks.is_some() { d.heads } else { 0 }];
    let mut buffer = vec![f32::NAN; attention_backward_workspace::<T>(d, keys)];
    let grads =
        Grads { dq: &mut dq, dk: &mut dk, dv: &mut dv, dsinks: r.sinks.is_some().then_some(&mut dsinks[..]) };
    attention_backward(grads, d_o, &o, &input, &saved, d, &p.options, &mut buffer, &scratch).unwrap();
    assert_eq!(scratch.bytes(), planned, "the scratch functions say what is needed");
    let (o, lse, dsinks) = (wide(&o), wide(&saved.lse), wide(&dsinks));
    Results { o, lse, dq: wide(&dq), dk: wide(&dk), dv: wide(&dv), dsinks }
}

/// Expected results: the reference of the whole sequences, without a gradient from the first `before`
/// queries.
fn expected(r: &Reference, p: &super::Problem, d_o: &[f64], before: usize) -> (Results, Vec<f64>) {
    let d = p.dims;
    let mut d_o = d_o.to_vec();
    d_o[..before * d.heads * d.value_dim].fill(0.0);
    let mut all = r.run(d, &p.options, &d_o);
    all.o.drain(..before * d.heads * d.value_dim);
    all.lse.drain(..before * d.heads);
    all.dq.drain(..before * d.heads * d.head_dim);
    (all, d_o)
}

fn check<T: Element, K: Element>(p: &super::Problem, before: usize, limit: f64) {
    let (mut r, mut d_o) = p.build();
    if T::as_f32(&[]).is_none() {
        for x in [&mut r.q, &mut r.k, &mut r.v, &mut d_o] {
            x.iter_mut().for_each(|x| *x = bf16::from_f64(*x).to_f64());
        }
    }
    let (expected, d_o) = expected(&r, p, &d_o, before);
    let got = later::<T, K>(&r, p, &d_o, before);
    for ((name, a), (_, b)) in fields(&got).into_iter().zip(fields(&expected)) {
        let limit = if name == "dsinks" { 10.0 * limit } else { limit };
        let (ratio, count) = ratio(a, b);
        assert_eq!(count, b.len());
        assert!(ratio <= limit, "{p:?} from {before}: {name} is off by {ratio:e}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn later_queries_agree_with_the_plain_twin(p in problem(), share in 0usize..=100) {
        let before = p.lengths[0] * share / 100;
        check::<f32, f32>(&p, before, 1e-5);
    }
}

#[test]
fn keys_of_many_tiles_before_the_queries_agree_with_the_plain_twin() {
    let full = super::Problem::of(DIMS, &[700, 300, 1]);
    for before in [1, 255, 256, 257, 300, 511, 699, 700] {
        check::<f32, f32>(&full, before, 1e-5);
        let options = Options { window: Some(130), soft_cap: Some(3.0), ..Options::default() };
        check::<f32, f32>(&super::Problem { options, sinks: true, ..full.clone() }, before, 1e-5);
        check::<f32, f32>(&super::Problem { topk: Some(60), sinks: true, ..full.clone() }, before, 1e-5);
    }
}

#[test]
fn gradients_of_keys_in_f32_are_not_rounded_to_the_storage() {
    let p = super::Problem::of(DIMS, &[300, 20]);
    check::<bf16, bf16>(&p, 130, 0.004);
    let (mut r, mut d_o) = p.build();
    for x in [&mut r.q, &mut r.k, &mut r.v, &mut d_o] {
        x.iter_mut().for_each(|x| *x = bf16::from_f64(*x).to_f64());
    }
    // D comes from the rounded o, so dk is not that of f32; dv depends on probabilities alone.
    let (expected, d_o) = expected(&r, &p, &d_o, 130);
    let got = later::<bf16, f32>(&r, &p, &d_o, 130);
    assert!(ratio(&got.dv, &expected.dv).0 < 1e-5);
    let rounded = later::<bf16, bf16>(&r, &p, &d_o, 130);
    assert!(ratio(&rounded.dv, &expected.dv).0 > 1e-4);
    let nearest = |x: &f64| <bf16 as Element>::from_f32(*x as f32).to_f64();
    assert!(got.dk.iter().map(nearest).eq(rounded.dk.iter().copied()));
    assert!(got.dv.iter().map(nearest).eq(rounded.dv.iter().copied()));
}

#[test]
fn keys_before_no_sequence_are_refused() {
    let dims = Dims { heads: 1, kv_heads: 1, head_dim: 1, value_dim: 1 };
    let input = Input {
        q: &[0.0f32; 0],
        k: &[0.0],
        v: &[0.0],
        sinks: None,
        selected: None,
        before: 1,
        cu_seqlens: &[0],
    };
    let error =
        attention_forward(&mut [], None, &input, dims, &Options::default(), &Scratch::new(0)).unwrap_err();
    assert!(error.to_string().contains("1 keys before the first sequence"), "{error}");
}
