//! The gates around the rule, all in f32:
//! ```text
//! g = -exp(A_log) softplus(a + dt_bias)      da = -exp(A_log) sigmoid(a + dt_bias) dg   (softplus' = 1 above 20)
//! beta = sigmoid(b)                          db = dbeta beta (1 - beta)
//! dA_log = sum dg g                          ddt_bias = sum da
//! ```

use crate::Element;
use crate::error::{Result, check_len};
use crate::simd::{exp_f32, sigmoid_f32, simd_fn, softplus_f32};

/// g, beta [tokens, heads] from a, b [tokens, heads] and A_log, dt_bias `[heads]`.
pub fn gates_forward<T: Element>(
    g: &mut [f32],
    beta: &mut [f32],
    a: &[T],
    b: &[T],
    a_log: &[f32],
    dt_bias: &[f32],
) -> Result {
    let heads = a_log.len();
    check_len("dt_bias", dt_bias, heads)?;
    check_len("b", b, a.len())?;
    check_len("g", g, a.len())?;
    check_len("beta", beta, a.len())?;
    crate::error::check(heads > 0 && a.len().is_multiple_of(heads), || {
        format!("a has {} elements, not a multiple of {heads} heads", a.len())
    })?;
    T::load(g, a);
    T::load(beta, b);
    for row in g.chunks_mut(heads) {
        decay_row(row, a_log, dt_bias);
    }
    crate::simd::sigmoid(beta);
    Ok(())
}

simd_fn! {
    fn decay_row(row: &mut [f32], a_log: &[f32], dt_bias: &[f32]) {
        for ((x, a_log), dt_bias) in row.iter_mut().zip(a_log).zip(dt_bias) {
            *x = -exp_f32::<FMA>(*a_log) * softplus_f32::<FMA>(*x + *dt_bias);
        }
    }
}

/// da, db (written) and dA_log, ddt_bias (accumulated) from dg, dbeta.
pub fn gates_backward<T: Element>(
    da: &mut [T],
    db: &mut [T],
    da_log: &mut [f32],
    ddt_bias: &mut [f32],
    dg: &[f32],
    dbeta: &[f32],
    a: &[T],
    b: &[T],
    a_log: &[f32],
    dt_bias: &[f32],
) -> Result {
    let heads = a_log.len();
    for (name, len) in
        [("da", da.len()), ("db", db.len()), ("dg", dg.len()), ("dbeta", dbeta.len()), ("b", b.len())]
    {
        crate::error::check(len == a.len(), || format!("{name} has {len} elements where a has {}", a.len()))?;
    }
    check_len("dt_bias", dt_bias, heads)?;
    check_len("da_log", da_log, heads)?;
    check_len("ddt_bias", ddt_bias, heads)?;
    crate::error::check(heads > 0 && a.len().is_multiple_of(heads), || {
        format!("a has {} elements, not a multiple of {heads} heads", a.len())
    })?;
    // f64 sums over all tokens, token by token: the same for any number of threads.
    let mut sums = vec![(0f64, 0f64); heads];
    for (t, dg_row) in dg.chunks(heads).enumerate() {
        for (h, &dg) in dg_row.iter().enumerate() {
            let i = t * heads + h;
            let x = a[i].to_f32() + dt_bias[h];
            let rate = exp_f32::<false>(a_log[h]);
            let slope = if x > 20.0 { 1.0 } else { sigmoid_f32::<false>(x) };
            let dx = -rate * slope * dg;
            da[i] = T::from_f32(dx);
            sums[h].0 += dg as f64 * (-rate * softplus_f32::<false>(x)) as f64;
            sums[h].1 += dx as f64;
            let beta = sigmoid_f32::<false>(b[i].to_f32());
            db[i] = T::from_f32(dbeta[i] * beta * (1.0 - beta));
        }
    }
    for (h, (log, bias)) in sums.into_iter().enumerate() {
        da_log[h] += log as f32;
        ddt_bias[h] += bias as f32;
    }
    Ok(())
}
