//! Products on AMX (Intel servers): tiles of bf16 with sums in f32, for operands of f32 too.
//!
//! `tdpbf16ps` multiplies a tile of 16 rows and 32 columns by one of 32 rows and 16 columns and adds to 16 x 16
//! sums in f32, pair by pair of the inner index:
//! ```text
//! c_ij += a_i,2l b_2l,j + a_i,2l+1 b_2l+1,j        sixteen i, sixteen j, sixteen l
//! ```
//! An f32 is the exact sum of three bf16, each the previous rest rounded to nearest:
//! ```text
//! x = x0 + x1 + x2        |x1| <= 2^-8 |x|, |x2| <= 2^-16 |x|
//! ```
//! So f32 times bf16 is three products of tiles, with exact operands. f32 times f32 is six: the three that are
//! left out, x1 y2 + x2 y1 + x2 y2, are together below 2^-22.9 |x y|, about a rounding of the product. For every
//! 32 of the inner index the smaller products come first.
//!
//! The sum of an element runs over the inner index from first to last and starts from C. So its bits depend on
//! its row of A and its column of B alone, and a product may be divided into tiles of any size.
//!
//! The instruction rounds to nearest and treats subnormal inputs and results as zero, so an f32 loses digits
//! below 2^-103, and a product counts as zero below 2^-126. Infinity times an f32 is NaN where a part of that f32
//! is zero.

#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod tests;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod x86;

use std::ops::Range;

use half::bf16;

use super::{Mat, Side, Tile, is_large};
use crate::Element;
use crate::shared::Shared;
use crate::simd::{Level, detected, level};

/// Most columns of C in one product.
pub(crate) const N: usize = 1024;
/// Most columns for a B in three parts: its copy then stays in the L2 cache.
const N_PARTS: usize = 512;
/// Inner elements of one block of a B with [`N`] columns in one part, and of a copy of an A in three parts.
const K: usize = 512;
/// Parts of an f32.
const PARTS: usize = 3;
/// Inner elements of one block of a B in three parts.
const K_PARTS: usize = 256;
/// Rows or columns of a tile in a register.
const SIDE: usize = 16;
/// Rows of C, and columns, that are computed at once: 2 x 2 tiles in registers.
pub(crate) const AMX_STRIP: usize = 2 * SIDE;
/// Inner elements of a tile.
const STEP: usize = 32;
/// Pairs of bf16 of a tile.
const TILE: usize = SIDE * STEP / 2;
/// f32 that are skipped at most, so that every row of a tile is a cache line.
const ALIGN: usize = 16;

/// Number of f32 of the copies of A and B.
pub(crate) const SCRATCH: usize = ALIGN + 2 * SIDE * PARTS * K / 2 + N * K / 2;
const _: () = assert!(N_PARTS * PARTS * K_PARTS <= N * K);

/// Returns true if a product C [m, n] = A [m, k] B [k, n] is computed by [`matmul_tile_amx`] on this machine. It
/// does not depend on the type of one operand if the other is f32: values that are exact in bf16 then give the
/// same bits in either type.
pub(crate) fn is_amx<A: Element, B: Element>(shape: (usize, usize, usize)) -> bool {
    level() >= Level::Amx && shape.2 > 0 && (is_large(shape) || parts::<A>() == 1 && parts::<B>() == 1)
}

/// Number of bf16 whose sum is an element.
const fn parts<T: Element>() -> usize {
    if size_of::<T>() == 2 { 1 } else { PARTS }
}

/// Inner elements of one block of a B with n columns: its copy stays in the L2 cache. The longer a block, the fewer
/// times sums are loaded and stored.
const fn depth(b_parts: usize, n: usize) -> usize {
    match b_parts {
        1 if n <= N / 2 => 2 * K,
        1 => K,
        _ => K_PARTS,
    }
}

/// Returns true if the inner index of a product with n columns is one block: the sums of a strip of rows are then
/// complete before the next strip begins.
pub(crate) fn is_one_block<B: Element>(n: usize, k: usize) -> bool {
    k <= depth(parts::<B>(), n)
}

/// Rows and columns of the tiles of a product C [m, n] = A [m, k] B [k, n] that takes the least time by an
/// estimate. A tile whose inner index is several blocks has at most `most` elements.
pub(crate) fn amx_tile<A: Element, B: Element>(
    (m, n, k): (usize, usize, usize),
    most: usize,
) -> (usize, usize) {
    let threads = rayon::current_num_threads();
    // Products of tiles, and the time to pack an element in that of a product: 64 is an estimate, and six times as
    // much for f32, which is rounded twice and written in three parts, an assumption.
    let products = [[1, 3], [3, 6]][usize::from(parts::<A>() > 1)][usize::from(parts::<B>() > 1)];
    let packing = |parts: usize| if parts == 1 { 64 } else { 6 * 64 };
    let widest = match parts::<B>() {
        1 if k <= K => N,
        1 => N / 2,
        _ => N_PARTS,
    };
    let estimate = |(rows, columns): &(usize, usize)| {
        let fullest = (m.div_ceil(*rows) * n.div_ceil(*columns)).div_ceil(threads);
        let packed = packing(parts::<A>()) * rows + packing(parts::<B>()) * columns;
        fullest * (products * rows * columns + packed)
    };
    let fewest = n.div_ceil(widest);
    let tiles = (fewest..fewest + 8).flat_map(|across| {
        let columns = n.div_ceil(across).next_multiple_of(AMX_STRIP);
        let highest = if is_one_block::<B>(columns, k) { usize::MAX } else { most / columns };
        (1..=4).map(move |times| {
            let down = (threads * times).div_ceil(n.div_ceil(columns));
            let rows = m.div_ceil(down).next_multiple_of(AMX_STRIP);
            (rows.min(highest / AMX_STRIP * AMX_STRIP).max(AMX_STRIP), columns)
        })
    });
    tiles.min_by_key(estimate).expect("there are several")
}

/// Place of the sums of a tile of C.
#[derive(Clone, Copy)]
pub(crate) struct Sums<'a, 'c> {
    pub(crate) c: &'a Shared<'c, f32>,
    /// First element of the tile.
    pub(crate) begin: usize,
    pub(crate) row_stride: usize,
    /// Sums start from the values in C, not from zero.
    pub(crate) add: bool,
    /// All strips of [`AMX_STRIP`] rows are in the first rows of the tile, one after the other; only if the inner
    /// index [`is_one_block`].
    pub(crate) in_turn: bool,
}

/// Row-major C [m, n] = (C +) A [m, k] B [k, n] for a tile of C, while other threads write other tiles. `done` is
/// called with the rows of every strip when their sums are complete.
///
/// # Safety
/// No part of the tile's rows, gaps between rows excepted, may be read or written elsewhere during the call,
/// except those that `done` is called with, by `done`.
///
/// # Panics
/// If the shapes do not match, the tile has more columns than [`amx_tile`] gives, `panels` are shorter than
/// [`SCRATCH`], or the machine has no AMX.
pub(crate) unsafe fn matmul_tile_amx<A: Element, B: Element>(
    sums: Sums<'_, '_>,
    a: Side<'_, A>,
    b: Side<'_, B>,
    (m, n, k): (usize, usize, usize),
    panels: &mut [f32],
    done: &mut dyn FnMut(Range<usize>),
) {
    assert!(detected() >= Level::Amx, "this machine has no AMX");
    assert!(n <= if parts::<B>() == 1 { N } else { N_PARTS }, "a tile of {m}x{n}");
    assert!(panels.len() >= SCRATCH, "panels must have {SCRATCH} f32, got {}", panels.len());
    assert!(!sums.in_turn || is_one_block::<B>(n, k), "strips in turn, but several blocks");
    if m == 0 || n == 0 {
        return;
    }
    let rows = if sums.in_turn { m.min(AMX_STRIP) } else { m };
    let tile = Tile::new(sums.c, sums.begin, sums.row_stride, rows, n);
    let to = Target { tile, m, add: sums.add };
    // SAFETY: the tile lies inside C; exclusive by the caller's guarantee. This machine has the level.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    unsafe {
        match (parts::<A>(), parts::<B>()) {
            (1, 1) => x86::blocks::<A, B, 1, 1>(to, 1.0, a, b, k, panels, done),
            (1, _) => x86::blocks::<A, B, 1, PARTS>(to, 1.0, a, b, k, panels, done),
            (_, 1) => x86::blocks::<A, B, PARTS, 1>(to, 1.0, a, b, k, panels, done),
            _ => x86::blocks::<A, B, PARTS, PARTS>(to, 1.0, a, b, k, panels, done),
        }
    };
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    {
        done(0..0);
        unreachable!("{:?} {:?}", (to.tile.c, to.tile.row_stride, to.m, to.add), (a.stride, b.stride, k));
    }
}

/// A tile of C with all of its m rows, or one strip of it, which all strips use in turn.
#[derive(Clone, Copy)]
struct Target {
    tile: Tile,
    m: usize,
    add: bool,
}

/// A left factor of [`matmul_amx`].
#[derive(Clone, Copy)]
pub(crate) enum Left<'a> {
    /// Values as they are stored.
    Stored(Mat<'a, bf16>),
    /// Values times a number, in three parts.
    Wide(Mat<'a>, f32),
    /// Values times a number, rounded to bf16.
    Rounded(Mat<'a>, f32),
}

/// Row-major C [m, n] = (C +) A [m, k] B [k, n] without gaps.
///
/// # Panics
/// If the shapes do not match, `panels` are shorter than [`SCRATCH`], or the machine has no AMX.
pub(crate) fn matmul_amx(c: &mut [f32], add: bool, a: Left<'_>, b: Mat<'_, bf16>, panels: &mut [f32]) {
    let (m, k) = match a {
        Left::Stored(a) => (a.rows, a.columns),
        Left::Wide(a, _) | Left::Rounded(a, _) => (a.rows, a.columns),
    };
    let n = b.columns;
    assert_eq!(k, b.rows, "inner sizes");
    assert!(detected() >= Level::Amx, "this machine has no AMX");
    assert!(panels.len() >= SCRATCH, "panels must have {SCRATCH} f32, got {}", panels.len());
    if m == 0 || n == 0 {
        return;
    }
    let whole = Tile::new(&Shared::new(c), 0, n, m, n);
    for j in (0..n).step_by(N) {
        let columns = b.part(0..k, j..n.min(j + N));
        // SAFETY: these columns of C, which is borrowed mutably. This machine has the level.
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        unsafe {
            let tile = Tile { c: whole.c.add(j), n: columns.columns, ..whole };
            let (to, b, done) = (Target { tile, m, add }, columns.t().side(), &mut |_| {});
            match a {
                Left::Stored(a) => x86::blocks::<_, _, 1, 1>(to, 1.0, a.side(), b, k, panels, done),
                Left::Wide(a, by) => x86::blocks::<_, _, PARTS, 1>(to, by, a.side(), b, k, panels, done),
                Left::Rounded(a, by) => x86::blocks::<_, _, 1, 1>(to, by, a.side(), b, k, panels, done),
            }
        };
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        unreachable!("{:?} {add}", (whole.c, columns.columns));
    }
}
