//! C [m, n] (+)= A B in tiles, for operands of any storage type.

use std::ops::Range;

use half::bf16;
use rayon::prelude::*;

use crate::matmul::{
    AMX_SCRATCH, AMX_STRIP, BF16_SCRATCH, Mat, PACKED_SCRATCH, Side, Sums, amx_tile, is_amx, is_one_block,
    is_packed, matmul_tile, matmul_tile_amx, matmul_tile_bf16, matmul_tile_packed,
};
use crate::shared::Shared;
use crate::{Element, Scratch};

/// Most rows of a tile of C that is computed panel by panel.
const M: usize = 256;
/// Most elements of a tile of C that is summed up in the scratch.
const SUM: usize = 512 * N;
/// Most columns of a tile of C.
const N: usize = 512;
/// Tile sizes, the most efficient first.
const TILES: [(usize, usize); 5] = [(M, N), (256, 256), (128, 256), (128, 128), (64, 128)];
/// Tile sizes of a packed product: the larger a tile, the less is packed.
const PACKED_TILES: [(usize, usize); 7] =
    [(1024, N), (512, N), (256, N), (256, 256), (128, 256), (128, 128), (64, 128)];
/// Fewest tiles of a product that is large enough: there may be as many threads.
const FEWEST: usize = 16;
/// Block size of the inner dimension.
const K: usize = 256;
/// Gap between the rows of a copied panel: rows a power of two apart would share a few sets of the L1 cache.
const GAP: usize = 16;

/// Number of f32 of a panel of A or B with `outer` rows or columns, for either storage order.
const fn panel(outer: usize) -> usize {
    most(outer * (K + GAP), K * (outer + GAP))
}

/// Number of f32 of the panels of A and B, whichever way they are multiplied.
const PANELS: usize = most(most(panel(M) + panel(N), AMX_SCRATCH), most(PACKED_SCRATCH, BF16_SCRATCH));

const fn most(a: usize, b: usize) -> usize {
    if a > b { a } else { b }
}

/// Number of f32 of a task: the panels and a tile of C.
pub(super) const SCRATCH: usize = PANELS + SUM;

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

    /// Part from row i and column j on. The outer index is the row of A or the column of B.
    fn side(&self, i: usize, j: usize, outer_is_row: bool) -> Side<'a, T> {
        let (i, j) = if self.transposed { (j, i) } else { (i, j) };
        let data = &self.data[i * self.stride + j..];
        Side { data, stride: self.stride, outer_first: outer_is_row != self.transposed }
    }

    /// Block of rows and columns from (i, j) on: a view if it is f32 and not transposed, else a copy in
    /// `panel`.
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

fn in_bf16<T: Element>(Side { data, stride, outer_first }: Side<'_, T>) -> Option<Side<'_, bf16>> {
    Some(Side { data: T::as_bf16(data)?, stride, outer_first })
}

/// Called with each row of a tile and its first column, before the row is stored.
type Finish<'a> = &'a (dyn Fn(&mut [f32], usize) + Sync);

/// A tile of C: its first row and column, its rows and columns, and the way to compute it.
#[derive(Clone, Copy)]
struct Tile {
    i: usize,
    j: usize,
    rows: usize,
    columns: usize,
    way: Way,
}

/// The way to multiply: chosen by the whole shape, so that the bits do not depend on the tiles.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Amx,
    Packed,
    Panels,
}

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
    // A tile that is stored in bf16 is summed up in the scratch.
    let most = if C::as_f32(c).is_some() { usize::MAX } else { SUM };
    let way = match (m, n, k) {
        shape if is_amx::<A, B>(shape) => Way::Amx,
        shape if is_packed(shape) => Way::Packed,
        _ => Way::Panels,
    };
    let (rows, columns) = match way {
        Way::Amx => amx_tile::<A, B>((m, n, k), most),
        Way::Packed => packed_tile(m, n, most),
        Way::Panels => panels_tile(m, n),
    };
    let (down, across) = (m.div_ceil(rows), n.div_ceil(columns));
    let tile = |index: usize| {
        let (i, j) = (index % down * rows, index / down * columns);
        Tile { i, j, rows: rows.min(m - i), columns: columns.min(n - j), way }
    };
    let tasks = (0..down * across).into_par_iter().map(tile);
    if let Some(c) = C::as_f32_mut(c) {
        let c = &Shared::new(c);
        tasks.for_each(|tile| {
            let begin = tile.i * n + tile.j;
            let sums = Sums { c, begin, row_stride: n, add: accumulate, in_turn: false };
            let mut done = |rows: Range<usize>| {
                let Some(finish) = finish else { return };
                for row in rows {
                    // SAFETY: this row of the tile belongs to this task alone, and is complete.
                    finish(unsafe { c.part(begin + row * n, tile.columns) }, tile.j);
                }
            };
            // SAFETY: tiles do not overlap.
            scratch.with(SCRATCH, |slot| unsafe {
                fill(sums, a, b, tile, k, &mut slot[..PANELS], &mut done);
            });
        });
        return;
    }
    let c = Shared::new(c);
    tasks.for_each(|tile| {
        scratch.with(SCRATCH, |slot| {
            let (panels, sum) = slot.split_at_mut(PANELS);
            let in_turn = way == Way::Amx && is_one_block::<B>(tile.columns, k);
            let rows = if in_turn { AMX_STRIP } else { tile.rows };
            let sum = &Shared::new(&mut sum[..rows * tile.columns]);
            let sums = Sums { c: sum, begin: 0, row_stride: tile.columns, add: false, in_turn };
            let mut done = |done: Range<usize>| {
                for row in done {
                    // SAFETY: the row of sums is complete, and this task's alone, as is this row of the tile.
                    let (sum, target) = unsafe {
                        let sum = sum.part(row % rows * tile.columns, tile.columns);
                        (sum, c.part((tile.i + row) * n + tile.j, tile.columns))
                    };
                    if accumulate {
                        for (sum, c) in sum.iter_mut().zip(&*target) {
                            *sum += c.to_f32();
                        }
                    }
                    if let Some(finish) = finish {
                        finish(sum, tile.j);
                    }
                    C::store(target, sum);
                }
            };
            // SAFETY: the sums are this task's alone.
            unsafe { fill(sums, a, b, tile, k, panels, &mut done) };
        });
    });
}

/// Rows and columns of a tile of an m x n product of panels.
fn panels_tile(m: usize, n: usize) -> (usize, usize) {
    let enough = |(rows, columns): &(usize, usize)| m.div_ceil(*rows) * n.div_ceil(*columns) >= FEWEST;
    TILES.into_iter().find(enough).unwrap_or(TILES[TILES.len() - 1])
}

/// Rows and columns of a tile of at most `most` elements of a packed m x n product. Tiles do not change its
/// bits, so they may depend on the number of threads: at least two for each, and few threads that wait for the
/// last ones.
fn packed_tile(m: usize, n: usize, most: usize) -> (usize, usize) {
    let threads = rayon::current_num_threads();
    let even = |(rows, columns): &(usize, usize)| {
        let tiles = m.div_ceil(*rows) * n.div_ceil(*columns);
        rows * columns <= most && tiles >= 2 * threads && 25 * tiles.next_multiple_of(threads) <= 26 * tiles
    };
    PACKED_TILES.into_iter().find(even).unwrap_or(PACKED_TILES[PACKED_TILES.len() - 1])
}

/// One tile of A B; `done` is called with the rows whose sums are complete. Panels are multiplied in bf16 if both
/// operands are and the machine supports it.
///
/// # Safety
/// No part of the tile's rows may be read or written elsewhere during the call, except by `done`.
unsafe fn fill<A: Element, B: Element>(
    sums: Sums<'_, '_>,
    a: Operand<'_, A>,
    b: Operand<'_, B>,
    Tile { i, j, rows, columns, way }: Tile,
    k: usize,
    panels: &mut [f32],
    done: &mut dyn FnMut(Range<usize>),
) {
    let Sums { c, begin, row_stride, add, .. } = sums;
    if k == 0 {
        for row in 0..if add { 0 } else { rows } {
            // SAFETY: the caller's guarantee.
            unsafe { c.part(begin + row * row_stride, columns) }.fill(0.0);
        }
        return done(0..rows);
    }
    let (left, right, shape) = (a.side(i, 0, true), b.side(0, j, false), (rows, columns, k));
    if way == Way::Amx {
        // SAFETY: the caller's guarantee.
        return unsafe { matmul_tile_amx(sums, left, right, shape, panels, done) };
    }
    let multiplied = match (in_bf16(left), in_bf16(right)) {
        // SAFETY: the caller's guarantee.
        (Some(left), Some(right)) => unsafe {
            matmul_tile_bf16(c, begin, row_stride, add, left, right, shape, panels)
        },
        _ => false,
    };
    if !multiplied && way == Way::Packed {
        // SAFETY: the caller's guarantee.
        unsafe { matmul_tile_packed(c, begin, row_stride, add, left, right, shape, panels) };
    } else if !multiplied {
        let (pa, pb) = panels.split_at_mut(panel(M));
        for l in (0..k).step_by(K) {
            let inner = K.min(k - l);
            let beta = if add || l > 0 { 1.0 } else { 0.0 };
            let (a, b) = (a.block(pa, i, l, rows, inner), b.block(pb, l, j, inner, columns));
            // SAFETY: the caller's guarantee.
            unsafe { matmul_tile(c, begin, row_stride, a, b, beta) };
        }
    }
    done(0..rows);
}
