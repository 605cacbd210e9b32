//! Elementwise operations, and operations that move elements.
//!
//! ```text
//! silu(x) = x s(x)                       s the sigmoid
//! gelu(x) = x s(2 c (x + a x^3))         c = sqrt(2/pi), a = 0.044715: the tanh form
//! ```

use ballast_kernels::glu::Activation;
use std::f64::consts::FRAC_2_PI;
use std::ops::Range;

use super::{add_each, each_row, map};
use crate::reference::tape::{self, Param, Tape, Value};

/// 1 / (1 + e^-x)
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// ln(1 + e^x)
pub fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// Value and derivative of an activation function.
fn function(activation: Activation, x: f64) -> (f64, f64) {
    match activation {
        Activation::Sigmoid => {
            let s = sigmoid(x);
            (s, s * (1.0 - s))
        }
        Activation::Silu => {
            let s = sigmoid(x);
            (x * s, s + x * s * (1.0 - s))
        }
        Activation::GeluTanh => {
            const A: f64 = 0.044715;
            let c = FRAC_2_PI.sqrt();
            let s = sigmoid(2.0 * c * (x + A * x * x * x));
            let bell = s * (1.0 - s);
            // For large |x| the bell is 0 and x^3 may be infinite; their product must be 0.
            let slope = if bell == 0.0 { 0.0 } else { x * bell * 2.0 * c * (1.0 + 3.0 * A * x * x) };
            (x * s, s + slope)
        }
    }
}

/// a + b
pub fn add(tape: &mut Tape<'_>, a: &Value, b: &Value) -> Value {
    let sum = map(a.len(), |i| a[i] + b[i]);
    let (a, b) = (a.clone(), b.clone());
    tape.record(sum, move |dy, sums| {
        tape::add(sums.of(&a), dy);
        tape::add(sums.of(&b), dy);
    })
}

/// factor x
pub fn scale(tape: &mut Tape<'_>, x: &Value, factor: f64) -> Value {
    let y = map(x.len(), |i| factor * x[i]);
    let x = x.clone();
    tape.record(y, move |dy, sums| add_each(sums.of(&x), |i| factor * dy[i]))
}

/// act(x)
pub fn activate(tape: &mut Tape<'_>, x: &Value, activation: Activation) -> Value {
    let y = map(x.len(), |i| function(activation, x[i]).0);
    let x = x.clone();
    tape.record(y, move |dy, sums| add_each(sums.of(&x), |i| dy[i] * function(activation, x[i]).1))
}

/// act(gate) up
pub fn gated(tape: &mut Tape<'_>, gate: &Value, up: &Value, activation: Activation) -> Value {
    let y = map(gate.len(), |i| function(activation, gate[i]).0 * up[i]);
    let (gate, up) = (gate.clone(), up.clone());
    tape.record(y, move |dy, sums| {
        add_each(sums.of(&gate), |i| dy[i] * up[i] * function(activation, gate[i]).1);
        add_each(sums.of(&up), |i| dy[i] * function(activation, gate[i]).0);
    })
}

/// Multiplies row t of x [rows, width] by factor t of `factors` `[rows]`.
pub fn mul_rows(tape: &mut Tape<'_>, x: &Value, factors: &Value, width: usize) -> Value {
    let y = map(x.len(), |i| x[i] * factors[i / width]);
    let (x, factors) = (x.clone(), factors.clone());
    tape.record(y, move |dy, sums| {
        add_each(sums.of(&x), |i| dy[i] * factors[i / width]);
        let row = |t: usize| t * width..(t + 1) * width;
        add_each(sums.of(&factors), |t| super::dot(&dy[row(t)], &x[row(t)]));
    })
}

/// The decay of the delta rule: g = -exp(A_log) softplus(a + dt_bias), from a [tokens, heads] and two
/// parameters `[heads]`.
pub fn decay<'w>(tape: &mut Tape<'w>, a: &Value, a_log: &Param<'w>, dt_bias: &Param<'w>) -> Value {
    let heads = a_log.values().len();
    let g = map(a.len(), |i| -a_log.at(i % heads).exp() * softplus(a[i] + dt_bias.at(i % heads)));
    let (a, a_log, dt_bias) = (a.clone(), a_log.clone(), dt_bias.clone());
    tape.record(g, move |dg, sums| {
        // dg/da is dg/d dt_bias; dg/d A_log is g.
        let rate = |i: usize| a_log.at(i % heads).exp();
        let inside = |i: usize| a[i] + dt_bias.at(i % heads);
        let da = map(a.len(), |i| -dg[i] * rate(i) * sigmoid(inside(i)));
        tape::add(sums.of(&a), &da);
        let ddt_bias = sums.parameter(&dt_bias);
        da.chunks(heads).for_each(|da| tape::add(ddt_bias, da));
        let da_log = sums.parameter(&a_log);
        for (i, dg) in dg.iter().enumerate() {
            da_log[i % heads] -= dg * rate(i) * softplus(inside(i));
        }
    })
}

/// Copies some columns of x [rows, width].
pub fn columns(tape: &mut Tape<'_>, x: &Value, width: usize, range: Range<usize>) -> Value {
    let y = x.chunks(width).flat_map(|row| &row[range.clone()]).copied().collect();
    let x = x.clone();
    tape.record(y, move |dy, sums| {
        let rows = sums.of(&x).chunks_mut(width).zip(dy.chunks(range.len()));
        rows.for_each(|(dx, dy)| tape::add(&mut dx[range.clone()], dy));
    })
}

/// Concatenates row i of a [rows, ..] with row i / times of b [rows / times, ..].
pub fn beside(tape: &mut Tape<'_>, a: &Value, b: &Value, widths: [usize; 2], times: usize) -> Value {
    let [wa, wb] = widths;
    let rows = a.chunks(wa).enumerate();
    let y = rows.flat_map(|(i, row)| row.iter().chain(&b[i / times * wb..][..wb])).copied().collect();
    let (a, b) = (a.clone(), b.clone());
    tape.record(y, move |dy, sums| {
        each_row(sums.of(&a), wa, |i, da| tape::add(da, &dy[i * (wa + wb)..]));
        let db = sums.of(&b);
        for (i, dy) in dy.chunks(wa + wb).enumerate() {
            tape::add(&mut db[i / times * wb..][..wb], &dy[wa..]);
        }
    })
}

/// Embedding lookup: factor times row id of w [vocabulary, width] for every token. The row of `padding` gets
/// no gradient.
pub fn embedding<'w>(
    tape: &mut Tape<'w>,
    w: &Param<'w>,
    ids: &[u32],
    padding: Option<u32>,
    factor: f64,
    width: usize,
) -> Value {
    let at = move |id: u32| id as usize * width..(id as usize + 1) * width;
    let rows = ids.iter().flat_map(|id| &w.values()[at(*id)]);
    let y = rows.map(|x| factor * *x as f64).collect();
    let (w, ids) = (w.clone(), ids.to_vec());
    tape.record(y, move |dy, sums| {
        let dw = sums.parameter(&w);
        for (id, dy) in ids.iter().zip(dy.chunks(width)).filter(|(id, _)| Some(**id) != padding) {
            for (dw, dy) in dw[at(*id)].iter_mut().zip(dy) {
                *dw += factor * dy;
            }
        }
    })
}
