//! Gated delta rule, token by token; q and k are normalized before.
//!
//! One head, S [dk, dv] its state, s = dk^-1/2:
//! ```text
//! S = e^g S      error = v - S^T k      S = S + k (beta error)^T      o = s S^T q
//! ```
//! Backward, tokens in reverse, dS the gradient of the state that leaves the token, S the new state, Z the
//! decayed one:
//! ```text
//! dq = s S do                   dS += s q do^T
//! u = dS^T k                    dv = beta u          dbeta = <u, error>
//! dk = dS (beta error) - Z (beta u)
//! dS -= k (beta u)^T            dg = <dS, Z>         dS = e^g dS
//! ```
//! Only the states before every [`SEGMENT`]-th token are kept.

use std::ops::Range;

use ballast_model::config::LinearAttention;
use rayon::prelude::*;

use super::{dot, put, take};
use crate::reference::tape::{Tape, Value};

/// Tokens between two saved states.
const SEGMENT: usize = 64;

/// Inputs of the delta rule.
#[derive(Clone)]
pub struct Inputs {
    /// [tokens, key heads, dk], normalized
    pub q: Value,
    /// [tokens, key heads, dk], normalized
    pub k: Value,
    /// [tokens, value heads, dv]
    pub v: Value,
    /// [tokens, value heads]
    pub g: Value,
    /// [tokens, value heads]
    pub beta: Value,
}

/// Returns o [tokens, value heads, dv].
pub fn delta_rule(
    tape: &mut Tape<'_>,
    inputs: Inputs,
    shape: LinearAttention,
    cu_seqlens: &[usize],
) -> Value {
    let heads: Vec<Head> = cu_seqlens
        .windows(2)
        .flat_map(|ends| {
            (0..shape.value_heads).map(move |head| Head { shape, head, tokens: ends[0]..ends[1] })
        })
        .collect();
    let keep = tape.is_recording();
    let results: Vec<(Vec<f64>, Vec<Vec<f64>>)> =
        heads.par_iter().map(|head| head.gather(&inputs).forward(keep)).collect();
    let mut o = vec![0.0; inputs.v.len()];
    let (outputs, states): (Vec<_>, Vec<_>) = results.into_iter().unzip();
    for (head, rows) in heads.iter().zip(&outputs) {
        put(&mut o, rows, &head.tokens, head.head, shape.value_heads, shape.value_dim);
    }
    tape.record(o, move |d_o, sums| {
        let gradients: Vec<Rows> = heads
            .par_iter()
            .zip(&states)
            .map(|(head, states)| {
                let d_o = take(d_o, &head.tokens, head.head, shape.value_heads, shape.value_dim);
                head.gather(&inputs).backward(&d_o, states)
            })
            .collect();
        for (head, d) in heads.iter().zip(&gradients) {
            let (key, value, tokens) = (head.key(), head.head, &head.tokens);
            put(sums.of(&inputs.q), &d.q, tokens, key, shape.key_heads, shape.key_dim);
            put(sums.of(&inputs.k), &d.k, tokens, key, shape.key_heads, shape.key_dim);
            put(sums.of(&inputs.v), &d.v, tokens, value, shape.value_heads, shape.value_dim);
            put(sums.of(&inputs.g), &d.g, tokens, value, shape.value_heads, 1);
            put(sums.of(&inputs.beta), &d.beta, tokens, value, shape.value_heads, 1);
        }
    })
}

/// A value head of a sequence.
struct Head {
    shape: LinearAttention,
    head: usize,
    tokens: Range<usize>,
}

impl Head {
    fn key(&self) -> usize {
        self.head / (self.shape.value_heads / self.shape.key_heads)
    }

    fn gather(&self, inputs: &Inputs) -> Rows {
        let LinearAttention { key_heads, value_heads, key_dim, value_dim, .. } = self.shape;
        Rows {
            q: take(&inputs.q, &self.tokens, self.key(), key_heads, key_dim),
            k: take(&inputs.k, &self.tokens, self.key(), key_heads, key_dim),
            v: take(&inputs.v, &self.tokens, self.head, value_heads, value_dim),
            g: take(&inputs.g, &self.tokens, self.head, value_heads, 1),
            beta: take(&inputs.beta, &self.tokens, self.head, value_heads, 1),
            key_dim,
            value_dim,
        }
    }
}

/// One head of one sequence, or its gradients: q, k [n, dk], v [n, dv], g, beta `[n]`.
struct Rows {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    g: Vec<f64>,
    beta: Vec<f64>,
    key_dim: usize,
    value_dim: usize,
}

impl Rows {
    fn q(&self, t: usize) -> &[f64] {
        &self.q[t * self.key_dim..][..self.key_dim]
    }

    fn k(&self, t: usize) -> &[f64] {
        &self.k[t * self.key_dim..][..self.key_dim]
    }

    fn v(&self, t: usize) -> &[f64] {
        &self.v[t * self.value_dim..][..self.value_dim]
    }

    fn scale(&self) -> f64 {
        (self.key_dim as f64).powf(-0.5)
    }

    /// Decays the state and returns its prediction error, v - S^T k.
    fn decay(&self, t: usize, state: &mut [f64]) -> Vec<f64> {
        let decay = self.g[t].exp();
        state.iter_mut().for_each(|x| *x *= decay);
        let predicted = down(state, self.k(t), self.value_dim);
        self.v(t).iter().zip(predicted).map(|(v, p)| v - p).collect()
    }

    /// Returns o [n, dv] and the state before every segment.
    fn forward(&self, keep: bool) -> (Vec<f64>, Vec<Vec<f64>>) {
        let mut state = vec![0.0; self.key_dim * self.value_dim];
        let (mut o, mut states) = (Vec::with_capacity(self.v.len()), Vec::new());
        for t in 0..self.g.len() {
            if keep && t % SEGMENT == 0 {
                states.push(state.clone());
            }
            let error = self.decay(t, &mut state);
            add_outer(&mut state, self.beta[t], self.k(t), &error);
            o.extend(down(&state, self.q(t), self.value_dim).iter().map(|x| self.scale() * x));
        }
        (o, states)
    }

    /// Returns the gradients from d_o [n, dv].
    fn backward(&self, d_o: &[f64], states: &[Vec<f64>]) -> Rows {
        let (tokens, dk, dv) = (self.g.len(), self.key_dim, self.value_dim);
        let mut d = Rows {
            q: vec![0.0; self.q.len()],
            k: vec![0.0; self.k.len()],
            v: vec![0.0; self.v.len()],
            g: vec![0.0; tokens],
            beta: vec![0.0; tokens],
            key_dim: dk,
            value_dim: dv,
        };
        let mut d_state = vec![0.0; dk * dv];
        for (segment, entering) in states.iter().enumerate().rev() {
            let (first, mut state) = (segment * SEGMENT, entering.clone());
            let segment = first..(first + SEGMENT).min(tokens);
            let mut kept = Vec::new();
            for t in segment.clone() {
                let error = self.decay(t, &mut state);
                let decayed = state.clone();
                add_outer(&mut state, self.beta[t], self.k(t), &error);
                kept.push((decayed, error));
            }
            for (t, (decayed, error)) in segment.zip(kept).rev() {
                self.step_back(&mut d, &mut d_state, t, &decayed, &error, &d_o[t * dv..][..dv]);
            }
        }
        d
    }

    /// Computes the gradients of token t. `d_state` is the gradient of the state after the token and becomes
    /// that of the state before it.
    fn step_back(
        &self,
        d: &mut Rows,
        d_state: &mut [f64],
        t: usize,
        decayed: &[f64],
        error: &[f64],
        d_o: &[f64],
    ) {
        let (beta, k, decay) = (self.beta[t], self.k(t), self.g[t].exp());
        let mut state = decayed.to_vec();
        add_outer(&mut state, beta, k, error);
        write(&mut d.q, t, across(&state, d_o).iter().map(|x| self.scale() * x));
        add_outer(d_state, self.scale(), self.q(t), d_o);
        let u = down(d_state, k, self.value_dim);
        write(&mut d.v, t, u.iter().map(|u| beta * u));
        d.beta[t] = dot(&u, error);
        let (by_state, by_error) = (across(d_state, error), across(decayed, &u));
        write(&mut d.k, t, by_state.iter().zip(&by_error).map(|(a, b)| beta * (a - b)));
        add_outer(d_state, -beta, k, &u);
        d.g[t] = dot(d_state, decayed);
        d_state.iter_mut().for_each(|x| *x *= decay);
    }
}

/// Row t of a tensor.
fn write(rows: &mut [f64], t: usize, row: impl ExactSizeIterator<Item = f64>) {
    let at = t * row.len();
    rows[at..].iter_mut().zip(row).for_each(|(x, new)| *x = new);
}

/// S^T x `[dv]`
fn down(state: &[f64], x: &[f64], dv: usize) -> Vec<f64> {
    let mut y = vec![0.0; dv];
    for (row, x) in state.chunks(dv).zip(x) {
        for (y, s) in y.iter_mut().zip(row) {
            *y += s * x;
        }
    }
    y
}

/// S y `[dk]`
fn across(state: &[f64], y: &[f64]) -> Vec<f64> {
    state.chunks(y.len()).map(|row| dot(row, y)).collect()
}

/// S += factor a b^T
fn add_outer(state: &mut [f64], factor: f64, a: &[f64], b: &[f64]) {
    for (row, a) in state.chunks_mut(b.len()).zip(a) {
        for (s, b) in row.iter_mut().zip(b) {
            *s += factor * a * b;
        }
    }
}
