//! Norms over rows of `width` elements, n of them:
//! ```text
//! rms_norm     r = (mean x^2 + eps)^-1/2      y = gamma r x       dx = r (gamma dy - r x mean(r x gamma dy))
//! l2_norm      r = (sum x^2 + eps)^-1/2       y = r x             dx = r (dy - y <dy, y>)
//! layer_norm   r = (mean (x - m)^2 + eps)^-1/2     y = w r (x - m) + b      without gradient: only the indexer has one
//! ```

use super::{dot, each_row};
use crate::reference::tape::{Param, Tape, Value};

/// What the normalised row is multiplied by.
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

/// y [rows, width] from x [rows, width] and gamma `[width]`.
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

/// y [rows, width] from x [rows, width].
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

/// y [rows, width] from x [rows, width], w and b `[width]`.
pub fn layer_norm(x: &[f64], w: &[f32], b: &[f32], eps: f64) -> Vec<f64> {
    let width = w.len();
    let row = |x: &[f64]| -> Vec<f64> {
        let mean = x.iter().sum::<f64>() / width as f64;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
        let r = (variance + eps).powf(-0.5);
        (0..width).map(|i| w[i] as f64 * r * (x[i] - mean) + b[i] as f64).collect()
    };
    x.chunks(width).flat_map(row).collect()
}
