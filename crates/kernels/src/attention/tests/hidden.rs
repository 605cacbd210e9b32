//! Hidden keys and values do not affect a query, even if they are NaN.

use super::*;

/// Asserts that every row independent of the non-finite row keeps its bits.
fn check<T: Element>(p: &Problem, tensor: &str, bad: f64, at: usize) {
    let (r, d_o) = p.build();
    let (clean, _) = kernel::<T>(&r, p.dims, &p.options, &d_o);
    let (mut r, mut d_o) = (r, d_o);
    let Dims { heads, kv_heads, head_dim, value_dim } = p.dims;
    let (target, width) = match tensor {
        "q" => (&mut r.q, heads * head_dim),
        "k" => (&mut r.k, kv_heads * head_dim),
        "v" => (&mut r.v, kv_heads * value_dim),
        _ => (&mut d_o, heads * value_dim),
    };
    target[at * width..(at + 1) * width].fill(bad);
    let (got, _) = kernel::<T>(&r, p.dims, &p.options, &d_o);
    let tokens = d_o.len() / (heads * value_dim);
    let sequence = |t: usize| r.cu_seqlens.iter().rposition(|start| *start <= t).unwrap();
    let sees = |i: usize, j: usize| {
        sequence(i) == sequence(j) && j <= i && p.options.window.is_none_or(|w| i < j + w)
    };
    let is_key = tensor == "k" || tensor == "v";
    let query_meets = |i: usize| if is_key { sees(i, at) } else { i == at };
    let key_meets = |j: usize| (0..tokens).any(|i| query_meets(i) && sees(i, j));
    let (mut kept, mut lost) = (0, 0);
    for ((name, got), (_, clean)) in fields(&got).into_iter().zip(fields(&clean)) {
        if name == "dsinks" {
            continue;
        }
        let width = got.len() / tokens;
        for t in 0..tokens {
            let meets = match name {
                "o" | "lse" | "dq" => query_meets(t),
                _ => key_meets(t),
            };
            let row = t * width..(t + 1) * width;
            let same = got[row.clone()].iter().zip(&clean[row]).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(meets || same, "{tensor} of token {at} is {bad}: {name} of token {t} changed ({p:?})");
            kept += usize::from(!meets);
            lost += usize::from(meets && !same);
        }
    }
    assert!(kept > 0 && lost > 0, "{tensor}: {kept} rows kept, {lost} changed");
}

#[test]
fn non_finite_values_stay_with_the_queries_that_see_them_forward_and_backward() {
    for (window, logits, sinks) in
        [(None, Rounding::F32, false), (Some(70), Rounding::F32, true), (Some(9), Rounding::Bf16, false)]
    {
        let options = Options { window, logits, ..Options::default() };
        let p = Problem { options, sinks, ..Problem::of(DIMS, &[300, 40]) };
        for tensor in ["q", "k", "v", "do"] {
            for (bad, at) in [(f64::INFINITY, 20), (f64::NAN, 257), (f64::NEG_INFINITY, 310)] {
                check::<f32>(&p, tensor, bad, at);
            }
            check::<bf16>(&p, tensor, f64::INFINITY, 130);
        }
    }
}

#[test]
fn a_few_rows_hide_it_as_well() {
    // Blocks of one or two rows, which are multiplied row by row.
    let one = Dims { heads: 1, kv_heads: 1, head_dim: 5, value_dim: 3 };
    for lengths in [[2, 3], [1, 4]] {
        let p = Problem::of(one, &lengths);
        for tensor in ["q", "k", "v", "do"] {
            check::<f32>(&p, tensor, f64::INFINITY, 3);
        }
    }
}
