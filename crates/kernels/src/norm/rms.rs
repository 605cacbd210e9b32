//! RMSNorm: y = x r gamma, r = 1/sqrt(mean x^2 + eps).

use rayon::prelude::*;

use super::{Gamma, Saved, check_rows, for_rows, partials_len};
use crate::error::{Result, check_len};
use crate::partition::{add_partials, block_rows};
use crate::simd::{simd_fn, sum_by};
use crate::{Element, Scratch};

/// y [rows, width] from x [rows, width] and gamma \[width\]; `saved` takes what backward needs.
pub fn rms_norm_forward<Y: Element, X: Element, W: Element>(
    y: &mut [Y],
    saved: Option<&mut Saved>,
    x: &[X],
    gamma: Gamma<'_, W>,
    eps: f32,
    width: usize,
) -> Result {
    check_rows("x", x, width)?;
    check_len("y", y, x.len())?;
    gamma.check(width)?;
    for_rows(y, saved, false, x, width, |_, y, x| (rms_row(y, x, gamma, eps), 0.0));
    Ok(())
}

/// Number of f32 of one scratch slot of [`rms_norm_backward`].
pub fn rms_norm_backward_scratch(rows: usize, width: usize) -> usize {
    partials_len(rows, width)
}

/// dx [rows, width] (written) and dw \[width\] (accumulated, unless `None`) from dy, x and the saved rstd.
pub fn rms_norm_backward<X: Element, D: Element, W: Element>(
    dx: &mut [X],
    dw: Option<&mut [f32]>,
    dy: &[D],
    x: &[X],
    gamma: Gamma<'_, W>,
    saved: &Saved,
    width: usize,
    scratch: &Scratch,
) -> Result {
    let rows = check_rows("x", x, width)?;
    check_len("dx", dx, x.len())?;
    check_len("dy", dy, x.len())?;
    check_len("saved rstd", &saved.rstd, rows)?;
    gamma.check(width)?;
    if let Some(dw) = &dw {
        check_len("dw", dw, width)?;
    }
    let block = block_rows(rows);
    scratch.with(rms_norm_backward_scratch(rows, width), |partials| {
        partials.fill(0.0);
        let blocks = dx
            .par_chunks_mut(block * width)
            .zip(dy.par_chunks(block * width))
            .zip(x.par_chunks(block * width))
            .zip(saved.rstd.par_chunks(block))
            .zip(partials.par_chunks_mut(width));
        blocks.for_each(|((((dx, dy), x), rstd), dw)| {
            let rows = dx.chunks_mut(width).zip(dy.chunks(width)).zip(x.chunks(width)).zip(rstd);
            for (((dx, dy), x), rstd) in rows {
                rms_row_backward(dx, dw, dy, x, gamma, *rstd);
            }
        });
        if let Some(dw) = dw {
            add_partials(dw, partials);
        }
    });
    Ok(())
}

simd_fn! {
    fn rms_row<Y: Element, X: Element, W: Element>(y: &mut [Y], x: &[X], gamma: Gamma<'_, W>, eps: f32) -> f32 {
        let mean = sum_by(x, x, x, |x, _, _| x * x) / x.len() as f32;
        let rstd = 1.0 / (mean + eps).sqrt();
        match gamma {
            Gamma::OnePlus(w) => {
                for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
                    *y = Y::from_f32(x.to_f32() * rstd * (1.0 + w.to_f32()));
                }
            }
            Gamma::Plain(w) => {
                for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
                    *y = Y::from_f32(x.to_f32() * rstd * w.to_f32());
                }
            }
            Gamma::Weightless => {
                for (y, x) in y.iter_mut().zip(x) {
                    *y = Y::from_f32(x.to_f32() * rstd);
                }
            }
        }
        rstd
    }
}

simd_fn! {
    fn rms_row_backward<X: Element, D: Element, W: Element>(
        dx: &mut [X],
        dw: &mut [f32],
        dy: &[D],
        x: &[X],
        gamma: Gamma<'_, W>,
        rstd: f32,
    ) {
        match gamma {
            Gamma::OnePlus(w) => row_backward(dx, dw, dy, x, w, rstd, |w| 1.0 + w),
            Gamma::Plain(w) => row_backward(dx, dw, dy, x, w, rstd, |w| w),
            Gamma::Weightless => row_backward(dx, dw, dy, x, x, rstd, |_| 1.0),
        }
    }
}

#[inline(always)]
fn row_backward<X: Element, D: Element, W: Element>(
    dx: &mut [X],
    dw: &mut [f32],
    dy: &[D],
    x: &[X],
    w: &[W],
    rstd: f32,
    gamma: impl Fn(f32) -> f32,
) {
    let mean = rstd / x.len() as f32 * sum_by(dy, x, w, |dy, x, w| dy * x * gamma(w));
    for ((((dx, dw), dy), x), w) in dx.iter_mut().zip(dw).zip(dy).zip(x).zip(w) {
        let (dy, normal) = (dy.to_f32(), x.to_f32() * rstd);
        *dx = X::from_f32(rstd * (gamma(w.to_f32()) * dy - normal * mean));
        *dw += dy * normal;
    }
}
