//! Reference in f64: token by token, forward and backward. Slow and simple.

use super::{Dims, L2NORM_EPS};

/// Inputs as in [`super::Input`], in f64.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // as in `Input`
pub struct Reference {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub g: Vec<f64>,
    pub beta: Vec<f64>,
    pub h0: Vec<f64>,
    pub cu_seqlens: Vec<usize>,
    pub scale: f64,
    pub l2norm: bool,
}

/// Outputs and gradients.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)] // as in `Output` and `Grads`
pub struct Results {
    pub o: Vec<f64>,
    pub ht: Vec<f64>,
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
    pub dg: Vec<f64>,
    pub dbeta: Vec<f64>,
    pub dh0: Vec<f64>,
}

/// x / sqrt(sum x^2 + eps) row by row, and the factors.
fn l2norm(x: &[f64], width: usize) -> (Vec<f64>, Vec<f64>) {
    let rstd: Vec<f64> = x
        .chunks(width)
        .map(|row| 1.0 / (row.iter().map(|x| x * x).sum::<f64>() + L2NORM_EPS as f64).sqrt())
        .collect();
    (x.iter().enumerate().map(|(i, x)| x * rstd[i / width]).collect(), rstd)
}

/// dx = r (dy - y <dy, y>) row by row.
fn l2norm_backward(dy: &mut [f64], y: &[f64], rstd: &[f64], width: usize) {
    for ((dy, y), r) in dy.chunks_mut(width).zip(y.chunks(width)).zip(rstd) {
        let along: f64 = dy.iter().zip(y).map(|(a, b)| a * b).sum();
        for (dy, y) in dy.iter_mut().zip(y) {
            *dy = r * (*dy - along * y);
        }
    }
}

impl Reference {
    /// Forward, and backward for the cotangents `d_o` and `dht`.
    pub fn run(&self, dims: Dims, d_o: &[f64], dht: &[f64]) -> Results {
        let Dims { key_heads, value_heads, key_dim: dk, value_dim: dv } = dims;
        let (mut q, mut k) = (self.q.clone(), self.k.clone());
        let (mut q_rstd, mut k_rstd) = (Vec::new(), Vec::new());
        if self.l2norm {
            (q, q_rstd) = l2norm(&self.q, dk);
            (k, k_rstd) = l2norm(&self.k, dk);
        }
        let mut r = Results {
            o: vec![0.0; self.v.len()],
            ht: self.h0.clone(),
            dq: vec![0.0; q.len()],
            dk: vec![0.0; k.len()],
            dv: vec![0.0; self.v.len()],
            dg: vec![0.0; self.g.len()],
            dbeta: vec![0.0; self.g.len()],
            dh0: dht.to_vec(),
        };
        let len = dk * dv;
        for sequence in 0..self.cu_seqlens.len() - 1 {
            for head in 0..value_heads {
                let key_head = head / dims.group();
                let at_state = (sequence * value_heads + head) * len;
                let key = |t: usize| (t * key_heads + key_head) * dk;
                let value = |t: usize| (t * value_heads + head) * dv;
                let gate = |t: usize| t * value_heads + head;
                let tokens = self.cu_seqlens[sequence]..self.cu_seqlens[sequence + 1];
                // Forward; keeps every decayed state and every delta.
                let mut state = self.h0[at_state..at_state + len].to_vec();
                let mut kept = Vec::new();
                for t in tokens.clone() {
                    let (q, k) = (&q[key(t)..key(t) + dk], &k[key(t)..key(t) + dk]);
                    let (v, beta) = (&self.v[value(t)..value(t) + dv], self.beta[gate(t)]);
                    state.iter_mut().for_each(|x| *x *= self.g[gate(t)].exp());
                    let decayed = state.clone();
                    let error: Vec<f64> = (0..dv)
                        .map(|j| v[j] - (0..dk).map(|i| state[i * dv + j] * k[i]).sum::<f64>())
                        .collect();
                    for i in 0..dk {
                        for j in 0..dv {
                            state[i * dv + j] += k[i] * beta * error[j];
                        }
                    }
                    for j in 0..dv {
                        r.o[value(t) + j] =
                            self.scale * (0..dk).map(|i| state[i * dv + j] * q[i]).sum::<f64>();
                    }
                    kept.push((decayed, error, state.clone()));
                }
                r.ht[at_state..at_state + len].copy_from_slice(&state);
                // Backward.
                let mut ds = dht[at_state..at_state + len].to_vec();
                for t in tokens.rev() {
                    let (decayed, error, state) = kept.pop().expect("as many as tokens");
                    let (q, k) = (&q[key(t)..key(t) + dk], &k[key(t)..key(t) + dk]);
                    let (d_out, beta) = (&d_o[value(t)..value(t) + dv], self.beta[gate(t)]);
                    for i in 0..dk {
                        for j in 0..dv {
                            r.dq[key(t) + i] += self.scale * state[i * dv + j] * d_out[j];
                            ds[i * dv + j] += self.scale * q[i] * d_out[j];
                        }
                    }
                    let d_delta: Vec<f64> =
                        (0..dv).map(|j| (0..dk).map(|i| ds[i * dv + j] * k[i]).sum()).collect();
                    for j in 0..dv {
                        r.dv[value(t) + j] = beta * d_delta[j];
                        r.dbeta[gate(t)] += d_delta[j] * error[j];
                    }
                    for i in 0..dk {
                        for j in 0..dv {
                            r.dk[key(t) + i] +=
                                ds[i * dv + j] * beta * error[j] - decayed[i * dv + j] * beta * d_delta[j];
                            ds[i * dv + j] -= k[i] * beta * d_delta[j];
                        }
                    }
                    r.dg[gate(t)] = ds.iter().zip(&decayed).map(|(a, b)| a * b).sum();
                    ds.iter_mut().for_each(|x| *x *= self.g[gate(t)].exp());
                }
                r.dh0[at_state..at_state + len].copy_from_slice(&ds);
            }
        }
        if self.l2norm {
            l2norm_backward(&mut r.dq, &q, &q_rstd, dk);
            l2norm_backward(&mut r.dk, &k, &k_rstd, dk);
        }
        r
    }
}
