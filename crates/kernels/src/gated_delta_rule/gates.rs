//! Gates of the delta rule, in f32, computed by the kernel or before it:
//! ```text
//! g = -exp(A_log) softplus(a + dt_bias)      da = -exp(A_log) sigmoid(a + dt_bias) dg   (softplus' = 1 above 20)
//! beta = sigmoid(b)                          db = dbeta beta (1 - beta)
//! dA_log = sum dg g                          ddt_bias = sum da
//! ```

use super::Dims;
use super::growth::MAX_G;
use crate::Element;
use crate::error::{Result, check, check_len, check_shape};
use crate::shared::Shared;
use crate::simd::{exp_f32, sigmoid_f32, simd_fn, softplus_f32};

/// Source of the decay g and the step size beta.
#[derive(Clone, Copy, Debug)]
pub enum Gates<'a, T> {
    /// g and beta themselves, both [tokens, Hv].
    Given {
        /// Log decay; above 0 the state grows. At most 88.
        g: &'a [f32],
        /// Step size.
        beta: &'a [f32],
    },
    /// Computed from the projections a and b, chunk by chunk; g and beta are not stored.
    Raw(RawGates<'a, T>),
}

/// Tensors that g and beta are computed from.
#[derive(Clone, Copy, Debug)]
pub struct RawGates<'a, T> {
    /// [tokens, Hv]
    pub a: &'a [T],
    /// [tokens, Hv]
    pub b: &'a [T],
    /// `[Hv]`
    pub a_log: &'a [f32],
    /// `[Hv]`
    pub dt_bias: &'a [f32],
}

/// Gradients of [`Gates`], of the same variant.
pub enum GateGrads<'a, T> {
    /// Both [tokens, Hv], written.
    Given {
        /// Gradient of g.
        dg: &'a mut [f32],
        /// Gradient of beta.
        dbeta: &'a mut [f32],
    },
    /// da and db are written, da_log and ddt_bias are added to.
    Raw {
        /// [tokens, Hv]
        da: &'a mut [T],
        /// [tokens, Hv]
        db: &'a mut [T],
        /// `[Hv]`
        da_log: &'a mut [f32],
        /// `[Hv]`
        ddt_bias: &'a mut [f32],
    },
}

impl<T: Element> Gates<'_, T> {
    /// Returns true if a g is above 0.
    pub(super) fn grow(&self) -> bool {
        matches!(self, Gates::Given { g, .. } if largest(g) > 0.0)
    }

    pub(super) fn check(&self, tokens: usize, dims: Dims) -> Result {
        let heads = dims.value_heads;
        match self {
            Gates::Given { g, beta } => {
                check_shape("g", g, [tokens, heads])?;
                check_shape("beta", beta, [tokens, heads])?;
                let most = largest(g);
                check(most <= MAX_G, || {
                    format!("g must be at most {MAX_G}, so that e^g fits in f32, got {most}")
                })
            }
            Gates::Raw(RawGates { a, b, a_log, dt_bias }) => {
                check_shape("a", a, [tokens, heads])?;
                check_shape("b", b, [tokens, heads])?;
                check_len("a_log", a_log, heads)?;
                check_len("dt_bias", dt_bias, heads)
            }
        }
    }

    /// g and beta of one head's tokens from `first` on, as many as the targets hold; `heads` is Hv.
    pub(super) fn load(&self, g: &mut [f32], beta: &mut [f32], first: usize, head: usize, heads: usize) {
        let at = |i: usize| (first + i) * heads + head;
        let targets = g.iter_mut().zip(beta.iter_mut()).enumerate();
        match self {
            Gates::Given { g, beta } => targets.for_each(|(i, to)| (*to.0, *to.1) = (g[at(i)], beta[at(i)])),
            Gates::Raw(RawGates { a, b, a_log, dt_bias }) => {
                targets.for_each(|(i, to)| (*to.0, *to.1) = (a[at(i)].to_f32(), b[at(i)].to_f32()));
                decay_head(g, a_log[head], dt_bias[head]);
                crate::simd::sigmoid(beta);
            }
        }
    }
}

simd_fn! {
    /// The largest value; minus infinity without any.
    fn largest(x: &[f32]) -> f32 {
        let mut most = [f32::NEG_INFINITY; 16];
        let (blocks, rest) = x.as_chunks::<16>();
        for block in blocks {
            for (most, x) in most.iter_mut().zip(block) {
                *most = if *x > *most { *x } else { *most };
            }
        }
        most.iter().chain(rest).fold(f32::NEG_INFINITY, |most, x| most.max(*x))
    }
}

/// g of one token and head.
#[inline(always)]
fn decay<const FMA: bool>(a: f32, a_log: f32, dt_bias: f32) -> f32 {
    -exp_f32::<FMA>(a_log) * softplus_f32::<FMA>(a + dt_bias)
}

simd_fn! {
    fn decay_head(x: &mut [f32], a_log: f32, dt_bias: f32) {
        for x in x {
            *x = decay::<FMA>(*x, a_log, dt_bias);
        }
    }
}

/// [`GateGrads`] shared by the tasks: each (sequence, value head) writes its own tokens and its own sums.
pub(super) enum GateTargets<'a, T> {
    Given { dg: Shared<'a, f32>, dbeta: Shared<'a, f32> },
    Raw { gates: RawGates<'a, T>, da: Shared<'a, T>, db: Shared<'a, T>, sums: Shared<'a, (f64, f64)> },
}

impl<T: Element> GateGrads<'_, T> {
    /// Runs `work` with the targets. Parameter gradients are summed over tokens inside and over sequences, of
    /// which there are `rows`, here, in an order that does not depend on the number of threads.
    pub(super) fn with(
        self,
        gates: &Gates<'_, T>,
        rows: usize,
        work: impl FnOnce(&GateTargets<'_, T>),
    ) -> Result {
        match (self, gates) {
            (GateGrads::Given { dg, dbeta }, Gates::Given { g, beta }) => {
                check_len("dg", dg, g.len())?;
                check_len("dbeta", dbeta, beta.len())?;
                work(&GateTargets::Given { dg: Shared::new(dg), dbeta: Shared::new(dbeta) });
                Ok(())
            }
            (GateGrads::Raw { da, db, da_log, ddt_bias }, Gates::Raw(gates)) => {
                let heads = gates.a_log.len();
                check_len("da", da, gates.a.len())?;
                check_len("db", db, gates.b.len())?;
                check_len("da_log", da_log, heads)?;
                check_len("ddt_bias", ddt_bias, heads)?;
                let mut sums = vec![(0.0, 0.0); rows * heads];
                let (da, db, shared) = (Shared::new(da), Shared::new(db), Shared::new(&mut sums));
                work(&GateTargets::Raw { gates: *gates, da, db, sums: shared });
                for (h, (da_log, ddt_bias)) in da_log.iter_mut().zip(ddt_bias).enumerate() {
                    let of_head = || sums.iter().skip(h).step_by(heads);
                    *da_log += of_head().map(|sum| sum.0).sum::<f64>() as f32;
                    *ddt_bias += of_head().map(|sum| sum.1).sum::<f64>() as f32;
                }
                Ok(())
            }
            _ => check(false, || "gates and their gradients must both be Given or both be Raw".into()),
        }
    }
}

impl<T: Element> GateTargets<'_, T> {
    /// Writes the gradients of one token at value head `head` of `heads`.
    ///
    /// # Safety
    /// This token and this sequence's sums of this head belong to the caller alone.
    pub(super) unsafe fn store(
        &self,
        (dg, dbeta): (f32, f32),
        row: usize,
        token: usize,
        head: usize,
        heads: usize,
    ) {
        let at = token * heads + head;
        // SAFETY: the caller's guarantee.
        unsafe {
            match self {
                GateTargets::Given { dg: to_g, dbeta: to_beta } => {
                    to_g.part(at, 1)[0] = dg;
                    to_beta.part(at, 1)[0] = dbeta;
                }
                GateTargets::Raw { gates: RawGates { a, b, a_log, dt_bias }, da, db, sums } => {
                    let (a, b) = (a[at].to_f32(), b[at].to_f32());
                    let d = gate_gradients(dg, dbeta, a, b, a_log[head], dt_bias[head]);
                    da.part(at, 1)[0] = T::from_f32(d.a);
                    db.part(at, 1)[0] = T::from_f32(d.b);
                    let sum = &mut sums.part(row * heads + head, 1)[0];
                    *sum = (sum.0 + d.a_log, sum.1 + d.a as f64);
                }
            }
        }
    }
}

/// Contribution of one token to a, b and A_log; that to dt_bias is the same as to a.
struct GateGradient {
    a: f32,
    b: f32,
    a_log: f64,
}

fn gate_gradients(dg: f32, dbeta: f32, a: f32, b: f32, a_log: f32, dt_bias: f32) -> GateGradient {
    let x = a + dt_bias;
    let rate = exp_f32::<false>(a_log);
    let slope = if x > 20.0 { 1.0 } else { sigmoid_f32::<false>(x) };
    let beta = sigmoid_f32::<false>(b);
    GateGradient {
        a: -rate * slope * dg,
        b: dbeta * beta * (1.0 - beta),
        a_log: dg as f64 * decay::<false>(a, a_log, dt_bias) as f64,
    }
}

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
        format!("a must have a multiple of {heads} elements (heads), got {}", a.len())
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
            *x = decay::<FMA>(*x, *a_log, *dt_bias);
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
        crate::error::check(len == a.len(), || {
            format!("{name} must have as many elements as a, {}, got {len}", a.len())
        })?;
    }
    check_len("dt_bias", dt_bias, heads)?;
    check_len("da_log", da_log, heads)?;
    check_len("ddt_bias", ddt_bias, heads)?;
    crate::error::check(heads > 0 && a.len().is_multiple_of(heads), || {
        format!("a must have a multiple of {heads} elements (heads), got {}", a.len())
    })?;
    // f64 sums over the tokens in order: the same for any number of threads.
    let mut sums = vec![(0f64, 0f64); heads];
    for (t, dg_row) in dg.chunks(heads).enumerate() {
        for (h, &dg) in dg_row.iter().enumerate() {
            let i = t * heads + h;
            let d = gate_gradients(dg, dbeta[i], a[i].to_f32(), b[i].to_f32(), a_log[h], dt_bias[h]);
            (da[i], db[i]) = (T::from_f32(d.a), T::from_f32(d.b));
            sums[h].0 += d.a_log;
            sums[h].1 += d.a as f64;
        }
    }
    for (h, (log, bias)) in sums.into_iter().enumerate() {
        da_log[h] += log as f32;
        ddt_bias[h] += bias as f32;
    }
    Ok(())
}
