//! C [m, n] (+)= A B in tiles, operands of any storage type.

use rayon::prelude::*;

use crate::matmul::{Mat, matmul_strided, matmul_tile};
use crate::scratch::take;
use crate::shared::Shared;
use crate::{Element, Scratch};

/// Rows of a tile of C at most.
const M: usize = 256;
/// Columns of a tile of C at most.
const N: usize = 512;
/// Sizes of tiles, the most efficient first.
const TILES: [(usize, usize); 5] = [(M, N), (256, 256), (128, 256), (128, 128), (64, 128)];
/// A product is cut into at least so many tiles if it is large enough: there may be as many threads.
const FEWEST: usize = 16;
/// Inner elements that are multiplied at once.
const K: usize = 256;
/// Between the rows of a copied panel: rows a power of two apart would share a few sets of the nearest cache.
const GAP: usize = 16;

/// f32 of scratch that a panel of A or B of `outer` rows or columns needs, whichever way it is stored.
const fn panel(outer: usize) -> usize {
    let (stored_by_outer, stored_by_inner) = (outer * (K + GAP), K * (outer + GAP));
    if stored_by_outer > stored_by_inner { stored_by_outer } else { stored_by_inner }
}

/// f32 of scratch that a task needs: a panel of A, a panel of B, a tile of C.
pub(super) const SCRATCH: usize = panel(M) + panel(N) + M * N;

/// A stored row-major matrix, or its transpose.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a, T> {
    data: &'a [T],
    stride: usize,
    transposed: bool,
}

impl<'a, T: Element> Operand<'a, T> {
    pub(super) fn new(data: &'a [T], stride: usize) -> Operand<'a, T> {
        Operand { data, stride, transposed: false }
    }

    pub(super) fn t(self) -> Operand<'a, T> {
        Operand { transposed: !self.transposed, ..self }
    }

    /// Rows and columns from (i, j) on: a view of what is f32 and lies well already, else a copy in `panel`.
    fn block<'b>(&'b self, panel: &'b mut [f32], i: usize, j: usize, rows: usize, columns: usize) -> Mat<'b> {
        let ((i, rows), (j, columns)) =
            if self.transposed { ((j, columns), (i, rows)) } else { ((i, rows), (j, columns)) };
        let data = &self.data[i * self.stride + j..];
        let mat = match T::as_f32(data) {
            Some(data) if !self.transposed => Mat::new(data, rows, columns, self.stride),
            _ => {
                let stride = columns + GAP;
                for (wide, row) in panel.chunks_mut(stride).zip(data.chunks(self.stride)).take(rows) {
                    T::load(&mut wide[..columns], &row[..columns]);
                }
                Mat::new(panel, rows, columns, stride)
            }
        };
        if self.transposed { mat.t() } else { mat }
    }
}

/// Row of a tile and its first column, before it is stored.
type Finish<'a> = &'a (dyn Fn(&mut [f32], usize) + Sync);

/// C [m, n] = (C +) A [m, k] B [k, n], then `finish` on every row of every tile.
pub(super) fn product<C: Element, A: Element, B: Element>(
    c: &mut [C],
    accumulate: bool,
    a: Operand<'_, A>,
    b: Operand<'_, B>,
    (m, n, k): (usize, usize, usize),
    finish: Option<Finish<'_>>,
    scratch: &Scratch,
) {
    let enough = |(rows, columns): &(usize, usize)| m.div_ceil(*rows) * n.div_ceil(*columns) >= FEWEST;
    let (rows, columns) = TILES.into_iter().find(enough).unwrap_or(TILES[TILES.len() - 1]);
    let (down, across) = (m.div_ceil(rows), n.div_ceil(columns));
    let tile = |index: usize| {
        let (i, j) = (index % down * rows, index / down * columns);
        (i, j, rows.min(m - i), columns.min(n - j))
    };
    let blocks = |first: usize| (first, K.min(k - first));
    let tasks = (0..down * across).into_par_iter();
    if let Some(c) = C::as_f32_mut(c) {
        let c = Shared::new(c);
        tasks.for_each(|index| {
            let (i, j, rows, columns) = tile(index);
            scratch.with(SCRATCH, |mut slot| {
                let (pa, pb) = (take(&mut slot, panel(M)), take(&mut slot, panel(N)));
                for (l, inner) in (0..k).step_by(K).map(blocks) {
                    let alpha = if accumulate || l > 0 { 1.0 } else { 0.0 };
                    let (a, b) = (a.block(pa, i, l, rows, inner), b.block(pb, l, j, inner, columns));
                    // SAFETY: tiles do not overlap.
                    unsafe { matmul_tile(&c, i * n + j, n, alpha, a, b) };
                }
                for row in i..i + rows {
                    // SAFETY: this row of the tile belongs to this task alone.
                    let row = unsafe { c.part(row * n + j, columns) };
                    if k == 0 && !accumulate {
                        row.fill(0.0);
                    }
                    if let Some(finish) = finish {
                        finish(row, j);
                    }
                }
            });
        });
        return;
    }
    let c = Shared::new(c);
    tasks.for_each(|index| {
        let (i, j, rows, columns) = tile(index);
        scratch.with(SCRATCH, |mut slot| {
            let (pa, pb) = (take(&mut slot, panel(M)), take(&mut slot, panel(N)));
            let sum = &mut slot[..rows * columns];
            sum.fill(0.0);
            for (l, inner) in (0..k).step_by(K).map(blocks) {
                let (a, b) = (a.block(pa, i, l, rows, inner), b.block(pb, l, j, inner, columns));
                matmul_strided(sum, columns, 1.0, 1.0, a, b);
            }
            for (row, sum) in (i..).zip(sum.chunks_mut(columns)) {
                // SAFETY: this row of the tile belongs to this task alone.
                let target = unsafe { c.part(row * n + j, columns) };
                if accumulate {
                    for (sum, c) in sum.iter_mut().zip(&*target) {
                        *sum += c.to_f32();
                    }
                }
                if let Some(finish) = finish {
                    finish(sum, j);
                }
                C::store(target, sum);
            }
        });
    });
}
