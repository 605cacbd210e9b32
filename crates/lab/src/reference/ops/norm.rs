//! Norms over rows of `width` elements, n of them:
//! ```text
//! rms_norm     r = (mean x^2 + eps)^-1/2      y = gamma r x       dx = r (gamma dy - r x mean(r x gamma dy))
//! l2_norm      r = (sum x^2 + eps)^-1/2       y = r x             dx = r (dy - y <dy, y>)
//! layer_norm   r = (mean (x - m)^2 + eps)^-1/2     n = r (x - m)     y = w n + b     dx = r (w dy - mean(w dy) - n mean(n w dy))
//! ```

use super::{dot, each_row};
use crate::reference::tape::{Param, Tape, Value};

/// Scale of a normalized row.
#[derive(Clone, Debug)]
pub enum Gamma<'w> {
    /// 1 + w
    OnePlus(Param<'w>),
    /// w
    Plain(Param<'w>),
    /// 1
    Weightless,
}

impl<'w> Gamma<'w> {
    fn at(&self, i: usize) -> f64 {
        match self {
            Gamma::OnePlus(w) => 1.0 + w.at(i),
            Gamma::Plain(w) => w.at(i),
            Gamma::Weightless => 1.0,
        }
    }

    fn param(&self) -> Option<&Param<'w>> {
        match self {
            Gamma::OnePlus(w) | Gamma::Plain(w) => Some(w),
            Gamma::Weightless => None,
        }
    }
}

/// Returns y [rows, width] from x [rows, width] and gamma `[width]`.
pub fn rms_norm<'w>(tape: &mut Tape<'w>, x: &Value, gamma: Gamma<'w>, eps: f64, width: usize) -> Value {
    let rstd: Vec<f64> = x.chunks(width).map(|x| (dot(x, x) / width as f64 + eps).powf(-0.5)).collect();
    let weights: Vec<f64> = (0..width).map(|i| gamma.at(i)).collect();
    let mut y = vec![0.0; x.len()];
    each_row(&mut y, width, |row, y| {
        for (i, y) in y.iter_mut().enumerate() {
            *y = weights[i] * rstd[row] * x[row * width + i];
        }
    });
    let x = x.clone();
    tape.record(y, move |dy, sums| {
        each_row(sums.of(&x), width, |row, dx| {
            let (x, dy, r) = (&x[row * width..][..width], &dy[row * width..][..width], rstd[row]);
            let mean = (0..width).map(|i| r * x[i] * weights[i] * dy[i]).sum::<f64>() / width as f64;
            for (i, dx) in dx.iter_mut().enumerate() {
                *dx += r * (weights[i] * dy[i] - r * x[i] * mean);
            }
        });
        if let Some(param) = gamma.param() {
            let dw = sums.parameter(param);
            for ((x, dy), r) in x.chunks(width).zip(dy.chunks(width)).zip(&rstd) {
                for (i, dw) in dw.iter_mut().enumerate() {
                    *dw += dy[i] * r * x[i];
                }
            }
        }
    })
}

/// Returns y [rows, width] from x [rows, width].
pub fn l2_norm(tape: &mut Tape<'_>, x: &Value, eps: f64, width: usize) -> Value {
    let rstd: Vec<f64> = x.chunks(width).map(|x| (dot(x, x) + eps).powf(-0.5)).collect();
    let y = super::map(x.len(), |i| rstd[i / width] * x[i]);
    let x = x.clone();
    tape.record(y, move |dy, sums| {
        each_row(sums.of(&x), width, |row, dx| {
            let (x, dy, r) = (&x[row * width..][..width], &dy[row * width..][..width], rstd[row]);
            let along = r * dot(dy, x);
            for (i, dx) in dx.iter_mut().enumerate() {
                *dx += r * (dy[i] - r * x[i] * along);
            }
        });
    })
}

/// Returns y [rows, width] from x [rows, width], w and b `[width]`.
pub fn layer_norm<'w>(tape: &mut Tape<'w>, x: &Value, w: &Param<'w>, b: &Param<'w>, eps: f64) -> Value {
    let width = w.values().len();
    let statistics = |x: &[f64]| -> [f64; 2] {
        let mean = x.iter().sum::<f64>() / width as f64;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
        [mean, (variance + eps).powf(-0.5)]
    };
    let rows: Vec<[f64; 2]> = x.chunks(width).map(statistics).collect();
    let (normed, values) = (x.clone(), rows.clone());
    let n = move |i: usize| {
        let [mean, r] = values[i / width];
        r * (normed[i] - mean)
    };
    let y = super::map(x.len(), |i| w.at(i % width) * n(i) + b.at(i % width));
    let (x, w, b) = (x.clone(), w.clone(), b.clone());
    tape.record(y, move |dy, sums| {
        each_row(sums.of(&x), width, |row, dx| {
            let at = |i: usize| row * width + i;
            let dn: Vec<f64> = (0..width).map(|i| w.at(i) * dy[at(i)]).collect();
            let mean = dn.iter().sum::<f64>() / width as f64;
            let along = (0..width).map(|i| dn[i] * n(at(i))).sum::<f64>() / width as f64;
            for (i, dx) in dx.iter_mut().enumerate() {
                *dx += rows[row][1] * (dn[i] - mean - n(at(i)) * along);
            }
        });
        let dw = sums.parameter(&w);
        dy.iter().enumerate().for_each(|(i, dy)| dw[i % width] += dy * n(i));
        let db = sums.parameter(&b);
        dy.iter().enumerate().for_each(|(i, dy)| db[i % width] += dy);
    })
}
