//! LayerNorm: y = (x - m) r w + b.

use rayon::prelude::*;

use super::{Saved, check_rows, for_rows, partials_len};
use crate::error::{Result, check_len};
use crate::partition::{add_partials, block_rows};
use crate::simd::{simd_fn, sum_by};
use crate::{Element, Scratch};

/// y [rows, width] from x [rows, width], weight and bias \[width\]; `saved` takes what backward needs.
pub fn layer_norm_forward<T: Element, W: Element>(
    y: &mut [T],
    saved: Option<&mut Saved>,
    x: &[T],
    weight: &[W],
    bias: &[W],
    eps: f32,
) -> Result {
    let width = weight.len();
    check_rows("x", x, width)?;
    check_len("y", y, x.len())?;
    check_len("bias", bias, width)?;
    for_rows(y, saved, true, x, width, |_, y, x| layer_row(y, x, weight, bias, eps));
    Ok(())
}

/// Number of f32 of one scratch slot of [`layer_norm_backward`].
pub fn layer_norm_backward_scratch(rows: usize, width: usize) -> usize {
    2 * partials_len(rows, width)
}

/// dx [rows, width] (written), dweight and dbias \[width\] (accumulated) from dy, x and `saved` of forward.
pub fn layer_norm_backward<T: Element, W: Element>(
    dx: &mut [T],
    dweight: &mut [f32],
    dbias: &mut [f32],
    dy: &[T],
    x: &[T],
    weight: &[W],
    saved: &Saved,
    scratch: &Scratch,
) -> Result {
    let width = weight.len();
    let rows = check_rows("x", x, width)?;
    check_len("dx", dx, x.len())?;
    check_len("dy", dy, x.len())?;
    check_len("dweight", dweight, width)?;
    check_len("dbias", dbias, width)?;
    check_len("saved rstd", &saved.rstd, rows)?;
    check_len("saved mean", &saved.mean, rows)?;
    let block = block_rows(rows);
    scratch.with(layer_norm_backward_scratch(rows, width), |partials| {
        partials.fill(0.0);
        let (dw_partials, db_partials) = partials.split_at_mut(partials_len(rows, width));
        let blocks = dx
            .par_chunks_mut(block * width)
            .zip(dy.par_chunks(block * width))
            .zip(x.par_chunks(block * width))
            .zip(saved.rstd.par_chunks(block).zip(saved.mean.par_chunks(block)))
            .zip(dw_partials.par_chunks_mut(width).zip(db_partials.par_chunks_mut(width)));
        blocks.for_each(|((((dx, dy), x), (rstd, mean)), (dw, db))| {
            let rows =
                dx.chunks_mut(width).zip(dy.chunks(width)).zip(x.chunks(width)).zip(rstd.iter().zip(mean));
            for (((dx, dy), x), (rstd, mean)) in rows {
                layer_row_backward(dx, dw, db, dy, x, weight, *rstd, *mean);
            }
        });
        add_partials(dweight, dw_partials);
        add_partials(dbias, db_partials);
    });
    Ok(())
}

simd_fn! {
    fn layer_row<T: Element, W: Element>(
        y: &mut [T],
        x: &[T],
        weight: &[W],
        bias: &[W],
        eps: f32,
    ) -> (f32, f32) {
        let width = x.len() as f32;
        let mean = sum_by(x, x, x, |x, _, _| x) / width;
        // Around the mean, because E[x^2] - m^2 cancels for a large mean.
        let variance = sum_by(x, x, x, |x, _, _| (x - mean) * (x - mean)) / width;
        let rstd = 1.0 / (variance + eps).sqrt();
        for (((y, x), w), b) in y.iter_mut().zip(x).zip(weight).zip(bias) {
            *y = T::from_f32((x.to_f32() - mean) * rstd * w.to_f32() + b.to_f32());
        }
        (rstd, mean)
    }
}

simd_fn! {
    fn layer_row_backward<T: Element, W: Element>(
        dx: &mut [T],
        dw: &mut [f32],
        db: &mut [f32],
        dy: &[T],
        x: &[T],
        weight: &[W],
        rstd: f32,
        mean: f32,
    ) {
        let width = x.len() as f32;
        let mean_dy = sum_by(dy, x, weight, |dy, _, w| dy * w) / width;
        let mean_dy_normal = sum_by(dy, x, weight, |dy, x, w| dy * w * (x - mean)) * rstd / width;
        let parameters = dw.iter_mut().zip(db.iter_mut()).zip(weight);
        for (((dx, dy), x), ((dw, db), w)) in dx.iter_mut().zip(dy).zip(x).zip(parameters) {
            let (dy, normal) = (dy.to_f32(), (x.to_f32() - mean) * rstd);
            *dx = T::from_f32(rstd * (dy * w.to_f32() - mean_dy - normal * mean_dy_normal));
            *dw += dy * normal;
            *db += dy;
        }
    }
}
