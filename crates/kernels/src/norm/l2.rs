//! l2norm: y = x r, r = 1/sqrt(sum x^2 + eps); eps is inside the root, with the sum, not the mean.

use rayon::prelude::*;

use super::{Saved, check_rows, for_rows};
use crate::Element;
use crate::error::{Result, check_len};
use crate::partition::task_rows;
use crate::simd::{simd_fn, sum_by};

/// y [rows, width] from x [rows, width]; `saved` takes what backward needs.
pub fn l2norm_forward<T: Element>(
    y: &mut [T],
    saved: Option<&mut Saved>,
    x: &[T],
    eps: f32,
    width: usize,
) -> Result {
    check_rows("x", x, width)?;
    check_len("y", y, x.len())?;
    for_rows(y, saved, false, x, width, |_, y, x| (l2_row(y, x, eps), 0.0));
    Ok(())
}

/// dx [rows, width] from dy, x and the saved rstd.
pub fn l2norm_backward<T: Element>(dx: &mut [T], dy: &[T], x: &[T], saved: &Saved, width: usize) -> Result {
    let rows = check_rows("x", x, width)?;
    check_len("dx", dx, x.len())?;
    check_len("dy", dy, x.len())?;
    check_len("saved rstd", &saved.rstd, rows)?;
    let task = task_rows(width);
    let tasks = dx
        .par_chunks_mut(task * width)
        .zip(dy.par_chunks(task * width))
        .zip(x.par_chunks(task * width))
        .zip(saved.rstd.par_chunks(task));
    tasks.for_each(|(((dx, dy), x), rstd)| {
        let rows = dx.chunks_mut(width).zip(dy.chunks(width)).zip(x.chunks(width)).zip(rstd);
        for (((dx, dy), x), rstd) in rows {
            l2_row_backward(dx, dy, x, *rstd);
        }
    });
    Ok(())
}

simd_fn! {
    fn l2_row<T: Element>(y: &mut [T], x: &[T], eps: f32) -> f32 {
        let rstd = 1.0 / (sum_by(x, x, x, |x, _, _| x * x) + eps).sqrt();
        for (y, x) in y.iter_mut().zip(x) {
            *y = T::from_f32(x.to_f32() * rstd);
        }
        rstd
    }
}

simd_fn! {
    fn l2_row_backward<T: Element>(dx: &mut [T], dy: &[T], x: &[T], rstd: f32) {
        let along = sum_by(dy, x, x, |dy, x, _| dy * x) * rstd;
        for ((dx, dy), x) in dx.iter_mut().zip(dy).zip(x) {
            *dx = T::from_f32(rstd * (dy.to_f32() - x.to_f32() * rstd * along));
        }
    }
}
