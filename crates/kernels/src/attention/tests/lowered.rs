//! Sites in bf16 or f16: where they round, and the effect.

use super::*;

/// Inputs whose products and logits are whole numbers that bf16 holds.
pub(super) fn exact_products() -> (Problem, Reference, Vec<f64>) {
    let p = Problem { sinks: true, ..Problem::of(DIMS, &[300, 20]) };
    let (mut r, d_o) = p.build();
    let signs = |x: &mut Vec<f64>| x.iter_mut().for_each(|x| *x = x.signum());
    signs(&mut r.q);
    signs(&mut r.k);
    (p, r, d_o)
}

#[test]
fn a_lowered_product_changes_nothing_where_every_product_is_exact() {
    let (p, r, d_o) = exact_products();
    let (f32s, _) = kernel::<f32>(&r, DIMS, &p.options, &d_o);
    for qk_product in [Rounding::Bf16, Rounding::F16] {
        let (lowered, _) = kernel::<f32>(&r, DIMS, &Options { qk_product, ..p.options }, &d_o);
        same_bits(&lowered, &f32s, "only the product is rounded");
    }
}

#[test]
fn a_lowered_product_differs_by_what_its_rounding_predicts() {
    let p = Problem::of(DIMS, &[200]);
    let (mut r, d_o) = p.build();
    // Logits around 100, where half an ulp of bf16 is 1/4.
    r.q.iter_mut().for_each(|x| *x *= 30.0);
    let exact = r.run(DIMS, &p.options, &d_o);
    let largest = exact.lse.iter().fold(0f64, |m, x| m.max(x.abs()));
    let mut previous = 0.0;
    for (qk_product, half_ulp) in [(Rounding::F16, 2f64.powi(-11)), (Rounding::Bf16, 2f64.powi(-8))] {
        let options = Options { qk_product, ..p.options };
        let (got, _) = kernel::<f32>(&r, DIMS, &options, &d_o);
        // Logits off by at most b move lse by at most b.
        let bound = largest * half_ulp;
        let error = got.lse.iter().zip(&exact.lse).fold(0f64, |m, (a, b)| m.max((a - b).abs()));
        println!("{qk_product:?}: lse off by {error:e}, at most {bound:e}");
        assert!(error <= bound && error > bound / 20.0 && error > previous);
        previous = error;
        // The reference rounds at the same place.
        let expected = r.run(DIMS, &options, &d_o);
        let error = got.lse.iter().zip(&expected.lse).filter(|(a, b)| (*a - *b).abs() > 1e-4).count();
        assert!(error * 100 < got.lse.len(), "{error} rows differ, more than the odd tie");
    }
}

#[test]
fn lowered_logits_agree_with_the_twin_that_rounds_at_the_same_places() {
    let (p, r, d_o) = exact_products();
    for logits in [Rounding::Bf16, Rounding::F16] {
        for soft_cap in [None, Some(2.0)] {
            let options = Options { logits, qk_product: logits, soft_cap, ..p.options };
            let expected = r.run(DIMS, &options, &d_o);
            let (got, saved) = kernel::<f32>(&r, DIMS, &options, &d_o);
            assert_eq!(saved.bytes(), 3 * 320 * 4 * 4);
            compare(&got, &expected, &r, DIMS, 1e-5, "lowered logits");
            let (f32s, _) = kernel::<f32>(&r, DIMS, &Options { logits: Rounding::F32, ..options }, &d_o);
            let (difference, _) = ratio(&got.o, &f32s.o);
            assert!(difference > 1e-5, "{logits:?}: rounding must show");
        }
    }
}

#[test]
fn a_sum_in_bf16_stops_growing_at_256() {
    let dims = Dims { heads: 1, kv_heads: 1, head_dim: 1, value_dim: 1 };
    let r = Reference {
        q: vec![0.0; 1000],
        k: vec![0.0; 1000],
        v: vec![1.0; 1000],
        sinks: None,
        selected: None,
        cu_seqlens: vec![0, 1000],
    };
    let run =
        |logits| kernel::<f32>(&r, dims, &Options { logits, ..Options::default() }, &vec![0.0; 1000]).0.o;
    assert_eq!(run(Rounding::F32)[999], 1.0);
    assert_eq!(run(Rounding::F16)[999], 1.0);
    assert_eq!(run(Rounding::Bf16)[255], 1.0);
    assert_eq!(run(Rounding::Bf16)[999], 1000.0 / 256.0);
}

#[test]
fn in_f16_a_product_of_70000_is_infinite_and_its_row_not_a_number_where_bf16_is_finite() {
    let dims = Dims { heads: 1, kv_heads: 1, head_dim: 1, value_dim: 1 };
    let with = |k: f64| Reference {
        q: vec![1.0, 1.0, 1000.0, 1.0],
        k: vec![k, 1.0, 2.0, 3.0],
        v: vec![1.0, 2.0, 3.0, 4.0],
        sinks: None,
        selected: None,
        cu_seqlens: vec![0, 4],
    };
    let run = |k, qk_product| {
        kernel_forward(&with(k), dims, &Options { scale: Some(1.0), qk_product, ..Options::default() })
    };
    for precision in [Rounding::F32, Rounding::Bf16] {
        assert!(run(70.0, precision).iter().all(|x| x.is_finite()), "{precision:?}");
    }
    let o = run(70.0, Rounding::F16);
    // inf - inf in row 2 alone; rows whose products fit are unchanged.
    assert_eq!(o.iter().map(|x| x.is_nan()).collect::<Vec<_>>(), [false, false, true, false]);
    // A product of -70000 is a weight of zero, which is right.
    assert_eq!(run(-70.0, Rounding::F16)[2], run(-70.0, Rounding::F32)[2]);
}

fn kernel_forward(r: &Reference, dims: Dims, options: &Options) -> Vec<f32> {
    let (q, k, v) = (cast::<f32>(&r.q), cast::<f32>(&r.k), cast::<f32>(&r.v));
    let input =
        Input { q: &q, k: &k, v: &v, sinks: None, selected: None, before: 0, cu_seqlens: &r.cu_seqlens };
    let mut o = vec![0.0; q.len() / dims.head_dim * dims.value_dim];
    let scratch = Scratch::new(attention_forward_scratch::<f32>(dims, None));
    attention_forward(&mut o, None, &input, dims, options, &scratch).unwrap();
    o
}

#[test]
fn backward_has_the_probabilities_that_forward_had_where_sites_are_lowered() {
    // <do, o> = sum_tj p_tj do_t.v_j = <v, dv>, if p is the same on both sides. Logits around 100 in bf16: a
    // product that is rounded in the other direction changes its weight by half.
    let narrow = Dims { heads: 6, kv_heads: 2, head_dim: 16, value_dim: 8 };
    let wide = Dims { heads: 1, kv_heads: 1, head_dim: 512, value_dim: 8 };
    for dims in [narrow, wide] {
        for (window, topk) in [(None, None), (Some(150), None), (None, Some(100))] {
            for logits in [Rounding::F32, Rounding::Bf16] {
                let qk_product = Rounding::Bf16;
                let options = Options { window, qk_product, logits, scale: Some(1.0), ..Options::default() };
                let p = Problem { options, topk, ..Problem::of(dims, &[600, 1, 257]) };
                let (r, _) = p.build();
                // Positive throughout, so that nothing cancels.
                let positive = |x: &[f64]| x.iter().map(|x| x.abs() + 0.1).collect::<Vec<_>>();
                let r = Reference { v: positive(&r.v), ..r };
                let d_o = vec![1.0; 858 * dims.heads * dims.value_dim];
                let (got, _) = kernel::<f32>(&r, dims, &options, &d_o);
                let forward: f64 = got.o.iter().sum();
                let backward: f64 = got.dv.iter().zip(&r.v).map(|(dv, v)| dv * v).sum();
                assert!(
                    (forward - backward).abs() < 2e-6 * forward,
                    "{dims:?} {options:?}: {forward} {backward}"
                );
            }
        }
    }
}

#[test]
fn rounded_factors_agree_with_the_twin_that_rounds_at_the_same_places() {
    // Up to one tile of keys, so that every e has the final maximum. Groups of 2 and 8 queries: row by row, and
    // in blocks with keys that are gathered.
    let grouped = Dims { heads: 8, kv_heads: 1, head_dim: 20, value_dim: 24 };
    for (dims, topk) in [(DIMS, None), (DIMS, Some(30)), (grouped, None), (grouped, Some(30))] {
        for (rounding, limit) in [(Rounding::Bf16, 1e-4), (Rounding::F16, 2e-5)] {
            for soft_cap in [None, Some(2.0)] {
                let (probabilities, gradient) = (rounding, rounding);
                let options = Options { probabilities, gradient, soft_cap, ..Options::default() };
                let p = Problem { options, topk, sinks: true, ..Problem::of(dims, &[200, 1, 56]) };
                let (r, d_o) = p.build();
                let expected = r.run(dims, &options, &d_o);
                let (got, _) = kernel::<f32>(&r, dims, &options, &d_o);
                compare(&got, &expected, &r, dims, limit, &format!("{dims:?} {topk:?} {options:?}"));
                let plain = Options { soft_cap, ..Options::default() };
                let exact = r.run(dims, &plain, &d_o);
                for ((name, got), (_, exact)) in fields(&got).into_iter().zip(fields(&exact)) {
                    let (difference, _) = ratio(got, exact);
                    let what = format!("{name} of {options:?} is off by {difference:e}");
                    assert!(difference < 5e-3, "{what}");
                    // Neither the sum nor the sinks' gradient is a product with a rounded factor.
                    assert!(["lse", "dsinks"].contains(&name) || difference > limit / 5.0, "{what}");
                }
            }
        }
    }
}

#[test]
fn stored_rows_and_rounded_factors_give_what_widened_rows_give() {
    // Inputs that are exact in bf16: whichever product the machine has, the results differ by rounding alone.
    let dims = Dims { heads: 8, kv_heads: 2, head_dim: 40, value_dim: 24 };
    for (rounding, topk, window) in [
        (Rounding::F32, None, None),
        (Rounding::F32, Some(60), None),
        (Rounding::Bf16, None, None),
        (Rounding::Bf16, None, Some(77)),
        (Rounding::Bf16, Some(60), None),
        (Rounding::F16, None, None),
    ] {
        let (probabilities, gradient) = (rounding, rounding);
        let options = Options { probabilities, gradient, window, ..Options::default() };
        let p = Problem { options, topk, ..Problem::of(dims, &[130, 3, 400]) };
        let (r, d_o) = p.build();
        let exact = |x: &[f64]| wide(&cast::<bf16>(x));
        let r = Reference { q: exact(&r.q), k: exact(&r.k), v: exact(&r.v), ..r };
        let d_o = exact(&d_o);
        let (wide, _) = kernel::<f32>(&r, dims, &options, &d_o);
        let (stored, _) = kernel::<bf16>(&r, dims, &options, &d_o);
        compare(&stored, &wide, &r, dims, 3e-3, &format!("{options:?} {topk:?}"));
    }
}

#[test]
fn each_rounded_factor_changes_its_own_results_alone() {
    let p = Problem::of(DIMS, &[70, 300]);
    let (r, d_o) = p.build();
    let (plain, _) = kernel::<f32>(&r, DIMS, &p.options, &d_o);
    let (got, _) = kernel::<f32>(&r, DIMS, &Options { gradient: Rounding::Bf16, ..p.options }, &d_o);
    assert_eq!((&got.o, &got.lse), (&plain.o, &plain.lse));
    assert!(got.dq != plain.dq && got.dk != plain.dk && got.dv != plain.dv);
    let (got, _) = kernel::<f32>(&r, DIMS, &Options { probabilities: Rounding::Bf16, ..p.options }, &d_o);
    assert_eq!((&got.lse, &got.dv), (&plain.lse, &plain.dv));
    assert!(got.o != plain.o);
}
