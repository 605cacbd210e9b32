//! Gated RMSNorm: y = RMSNorm(x; w) silu(z), norm first, gate after.

use rayon::prelude::*;

use super::{Saved, check_rows, for_rows, partials_len};
use crate::error::{Result, check_len};
use crate::partition::{add_partials, block_rows};
use crate::simd::{sigmoid_f32, silu_f32, simd_fn, sum_by, sum_by_four};
use crate::{Element, Scratch};

/// y [tokens, heads, dv] from x and z of the same shape and w \[dv\]; `saved` takes what backward needs.
pub fn gated_rms_norm_forward<T: Element, W: Element>(
    y: &mut [T],
    saved: Option<&mut Saved>,
    x: &[T],
    z: &[T],
    w: &[W],
    eps: f32,
) -> Result {
    let width = w.len();
    check_rows("x", x, width)?;
    check_len("y", y, x.len())?;
    check_len("z", z, x.len())?;
    for_rows(y, saved, false, x, width, |row, y, x| {
        (gated_row(y, x, &z[row * width..][..width], w, eps), 0.0)
    });
    Ok(())
}

/// Number of f32 of one scratch slot of [`gated_rms_norm_backward`].
pub fn gated_rms_norm_backward_scratch(rows: usize, width: usize) -> usize {
    partials_len(rows, width)
}

/// dx, dz [tokens, heads, dv] (written) and dw \[dv\] (accumulated) from dy, x, z and the saved rstd.
pub fn gated_rms_norm_backward<T: Element, W: Element>(
    dx: &mut [T],
    dz: &mut [T],
    dw: &mut [f32],
    dy: &[T],
    x: &[T],
    z: &[T],
    w: &[W],
    saved: &Saved,
    scratch: &Scratch,
) -> Result {
    let width = w.len();
    let rows = check_rows("x", x, width)?;
    check_len("dx", dx, x.len())?;
    check_len("dz", dz, x.len())?;
    check_len("dw", dw, width)?;
    check_len("dy", dy, x.len())?;
    check_len("z", z, x.len())?;
    check_len("saved rstd", &saved.rstd, rows)?;
    let block = block_rows(rows);
    let len = block * width;
    scratch.with(gated_rms_norm_backward_scratch(rows, width), |partials| {
        partials.fill(0.0);
        let blocks = dx
            .par_chunks_mut(len)
            .zip(dz.par_chunks_mut(len))
            .zip(dy.par_chunks(len))
            .zip(x.par_chunks(len))
            .zip(z.par_chunks(len))
            .zip(saved.rstd.par_chunks(block))
            .zip(partials.par_chunks_mut(width));
        blocks.for_each(|((((((dx, dz), dy), x), z), rstd), dw)| {
            for (i, rstd) in rstd.iter().enumerate() {
                let row = i * width..(i + 1) * width;
                let (dx, dz) = (&mut dx[row.clone()], &mut dz[row.clone()]);
                gated_row_backward(dx, dz, dw, &dy[row.clone()], &x[row.clone()], &z[row], w, *rstd);
            }
        });
        add_partials(dw, partials);
    });
    Ok(())
}

simd_fn! {
    fn gated_row<T: Element, W: Element>(y: &mut [T], x: &[T], z: &[T], w: &[W], eps: f32) -> f32 {
        let mean = sum_by(x, x, x, |x, _, _| x * x) / x.len() as f32;
        let rstd = 1.0 / (mean + eps).sqrt();
        for (((y, x), z), w) in y.iter_mut().zip(x).zip(z).zip(w) {
            *y = T::from_f32(x.to_f32() * rstd * w.to_f32() * silu_f32::<FMA>(z.to_f32()));
        }
        rstd
    }
}

simd_fn! {
    fn gated_row_backward<T: Element, W: Element>(
        dx: &mut [T],
        dz: &mut [T],
        dw: &mut [f32],
        dy: &[T],
        x: &[T],
        z: &[T],
        w: &[W],
        rstd: f32,
    ) {
        // The gate is computed in both passes; storing it would need a row of scratch.
        let sum = sum_by_four(dy, x, z, w, |dy, x, z, w| dy * silu_f32::<FMA>(z) * x * w);
        let mean = sum * rstd / x.len() as f32;
        let outputs = dx.iter_mut().zip(dz).zip(dw);
        for ((((((dx, dz), dw), dy), x), z), w) in outputs.zip(dy).zip(x).zip(z).zip(w) {
            let (dy, normal, z, w) = (dy.to_f32(), x.to_f32() * rstd, z.to_f32(), w.to_f32());
            let s = sigmoid_f32::<FMA>(z);
            let dn = dy * z * s;
            *dz = T::from_f32(dy * normal * w * (s + z * s * (1.0 - s)));
            *dx = T::from_f32(rstd * (w * dn - normal * mean));
            *dw += dn * normal;
        }
    }
}
