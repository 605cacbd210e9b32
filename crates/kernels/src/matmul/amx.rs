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
    // Products of tiles, and the time to pack a row or a column: 64 times that of a product, by measurement, and
    // an assumption for f32, which is rounded twice and written in three parts.
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

/// Where the sums of a tile of C are.
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

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::*;
    use std::mem::transmute;
    use std::ops::Range;

    use half::bf16;

    use super::super::bf16::transposed;
    use super::{AMX_STRIP as BLOCK, K, PARTS, SIDE, STEP, Side, TILE, Target, Tile, depth};
    use crate::Element;

    /// Sixteen rows of 64 bytes in each of the eight tile registers, as `ldtilecfg` reads them.
    #[repr(C, align(64))]
    struct Configuration {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    const CONFIGURATION: Configuration = Configuration {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
        rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
    };

    /// C (+)= by A B, block after block of the inner index, and in each strip after strip of rows; only an f32 A
    /// has a factor other than 1. Tiles are configured for the call alone: other libraries of the process
    /// configure theirs, and a thread without tiles is cheaper to suspend.
    ///
    /// # Safety
    /// The tile is valid for reading and writing and used by the caller alone; the machine has the
    /// instructions.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub(super) unsafe fn blocks<A: Element, B: Element, const A_PARTS: usize, const B_PARTS: usize>(
        to: Target,
        by: f32,
        a: Side<'_, A>,
        b: Side<'_, B>,
        k: usize,
        panels: &mut [f32],
        done: &mut dyn FnMut(Range<usize>),
    ) {
        let panels = bytemuck::cast_slice_mut::<f32, u32>(panels);
        let skipped = panels.as_ptr().align_offset(64).min(super::ALIGN);
        let panels = &mut panels[skipped..];
        let (a_panel, b_panel) = panels.split_at_mut(BLOCK * PARTS * K / 2);
        let Target { tile, m, add } = to;
        let depth = depth(B_PARTS, tile.n);
        let depth_of_a = if A_PARTS == 1 { depth } else { K };
        // SAFETY: the machine has the instruction, and the configuration is valid.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &CONFIGURATION, options(nostack, readonly, preserves_flags))
        };
        for first in (0..k).step_by(depth) {
            let block = first..k.min(first + depth);
            let steps = block.len().div_ceil(STEP);
            // All steps of a strip of columns at once. A B that is stored by rows and passes through the cache is
            // read row by row, all columns of a step at once.
            let at_once = if b.outer_first || k <= depth { depth } else { STEP };
            for l in block.clone().step_by(at_once) {
                for j in (0..tile.n).step_by(BLOCK) {
                    let step = j / BLOCK * steps + (l - first) / STEP;
                    let (columns, inner) = (j..tile.n.min(j + BLOCK), l..block.end.min(l + at_once));
                    pack::<B, false, B_PARTS>(
                        &mut b_panel[step * B_PARTS * 2 * TILE..],
                        1.0,
                        b,
                        columns,
                        inner,
                    );
                }
            }
            for i in (0..m).step_by(BLOCK) {
                let rows = i..m.min(i + BLOCK);
                // The row of C that has the first sums of the strip.
                let place = if tile.m < m { 0 } else { i };
                for l in block.clone().step_by(depth_of_a) {
                    let inner = l..block.end.min(l + depth_of_a);
                    pack::<A, true, A_PARTS>(a_panel, by, a, rows.clone(), inner.clone());
                    for j in (0..tile.n).step_by(BLOCK) {
                        let step = j / BLOCK * steps + (l - first) / STEP;
                        let columns = &b_panel[step * B_PARTS * 2 * TILE..];
                        // SAFETY: the row and column are inside the tile, and the panels hold the steps of both;
                        // the rest is the caller's guarantee.
                        unsafe {
                            let part = Tile {
                                c: tile.c.add(place * tile.row_stride + j),
                                m: rows.len(),
                                n: BLOCK.min(tile.n - j),
                                ..tile
                            };
                            let steps = inner.len().div_ceil(STEP);
                            sums::<A_PARTS, B_PARTS>(part, add || l > 0, a_panel, columns, steps);
                        }
                    }
                }
                if block.end == k {
                    done(rows);
                }
            }
        }
        // SAFETY: the machine has the instruction; no tile is used after it.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }

    /// Two tiles side by side of every part of every step, for up to 32 rows of A (`BY_OUTER`) or columns of B.
    /// Elements outside are zero.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    fn pack<T: Element, const BY_OUTER: bool, const PARTS: usize>(
        panel: &mut [u32],
        by: f32,
        side: Side<'_, T>,
        outer: Range<usize>,
        inner: Range<usize>,
    ) {
        for (l, step) in inner.clone().step_by(STEP).zip(panel.chunks_exact_mut(PARTS * 2 * TILE)) {
            let inner = l..inner.end.min(l + STEP);
            if let Some(data) = T::as_bf16(side.data).filter(|_| outer.len() == BLOCK && inner.len() == STEP)
            {
                whole_tiles::<BY_OUTER>(step, data, side.stride, side.outer_first, outer.start, l);
                continue;
            }
            for (o, first) in outer.clone().step_by(SIDE).zip([0, TILE]) {
                let outer = o..outer.end.min(o + SIDE);
                for (part, lines) in lines::<T, PARTS>(by, side, outer, inner.clone()).into_iter().enumerate()
                {
                    let lines = if side.outer_first == BY_OUTER { lines } else { transposed(lines) };
                    let (target, _) = step[part * 2 * TILE + first..][..TILE].as_chunks_mut::<SIDE>();
                    for (target, line) in target.iter_mut().zip(lines) {
                        // SAFETY: sixteen elements.
                        unsafe { _mm512_storeu_si512(target.as_mut_ptr().cast(), line) };
                    }
                }
            }
        }
    }

    /// Two whole tiles of bf16 as they are stored: 32 rows of A (`BY_OUTER`) or columns of B from `outer` on, and 32
    /// inner elements from `inner` on.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn whole_tiles<const BY_OUTER: bool>(
        step: &mut [u32],
        data: &[bf16],
        stride: usize,
        outer_first: bool,
        outer: usize,
        inner: usize,
    ) {
        // Loops and no closures that others call: those would not have the instructions.
        let mut tiles = [[_mm512_setzero_si512(); SIDE]; 2];
        for at in 0..SIDE {
            if outer_first {
                tiles[0][at] = line(data, (outer + at) * stride + inner);
                tiles[1][at] = line(data, (outer + SIDE + at) * stride + inner);
            } else {
                let even = line(data, (inner + 2 * at) * stride + outer);
                let odd = line(data, (inner + 2 * at + 1) * stride + outer);
                for (tile, order) in tiles.iter_mut().zip(&PAIRS) {
                    // SAFETY: the order has 32 words.
                    let order = unsafe { _mm512_loadu_si512(order.as_ptr().cast()) };
                    tile[at] = _mm512_permutex2var_epi16(even, order, odd);
                }
            }
        }
        for (target, lines) in step.chunks_exact_mut(TILE).zip(tiles) {
            let lines = if outer_first == BY_OUTER { lines } else { transposed(lines) };
            for (target, line) in target.chunks_exact_mut(SIDE).zip(lines) {
                // SAFETY: sixteen elements.
                unsafe { _mm512_storeu_si512(target.as_mut_ptr().cast(), line) };
            }
        }
    }

    /// Loads 32 elements.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn line(data: &[bf16], first: usize) -> __m512i {
        let words = &data[first..][..STEP];
        // SAFETY: 32 words.
        unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
    }

    /// Words of two lines, the second from 32 on, as pairs: of the lower halves, and of the upper.
    const PAIRS: [[u16; 32]; 2] = {
        let (mut order, mut i) = ([[0; 32]; 2], 0);
        while i < 32 {
            order[0][i] = (i / 2 + i % 2 * 32) as u16;
            order[1][i] = order[0][i] + 16;
            i += 1;
        }
        order
    };

    /// Parts of up to 16 x 32 elements, times `by`: a line has the 16 pairs of an outer index if that is stored
    /// first, else the 16 outer indices of a pair.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    fn lines<T: Element, const PARTS: usize>(
        by: f32,
        side: Side<'_, T>,
        outer: Range<usize>,
        inner: Range<usize>,
    ) -> [[__m512i; SIDE]; PARTS] {
        let mut lines = [[_mm512_setzero_si512(); SIDE]; PARTS];
        let row = |first: usize, columns: Range<usize>| &side.data[first * side.stride..][columns];
        let count = if side.outer_first { outer.len() } else { inner.len().div_ceil(2) };
        for at in 0..count {
            // The elements of a line, in two halves: of one row, or of the two rows of a pair.
            let (low, high) = if side.outer_first {
                let row = row(outer.start + at, inner.clone());
                row.split_at(row.len().min(SIDE))
            } else {
                let l = inner.start + 2 * at;
                let odd = if l + 1 < inner.end { row(l + 1, outer.clone()) } else { &[] };
                (row(l, outer.clone()), odd)
            };
            let halves = match (T::as_bf16(low), T::as_bf16(high)) {
                (Some(low), Some(high)) => [side_by_side(words(low), words(high)); PARTS],
                _ => {
                    let wide = |half: &[T]| {
                        _mm512_mul_ps(floats(T::as_f32(half).expect("f32 or bf16")), _mm512_set1_ps(by))
                    };
                    split::<PARTS>(wide(low), wide(high))
                }
            };
            for (lines, halves) in lines.iter_mut().zip(halves) {
                lines[at] = if side.outer_first { halves } else { alternating(halves) };
            }
        }
        lines
    }

    /// Loads up to 16 elements; the rest are zeros.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn words(half: &[bf16]) -> __m256i {
        let mask = (1u32 << half.len().min(SIDE)) - 1;
        // SAFETY: the mask has the lanes that are in the slice.
        unsafe { _mm512_castsi512_si256(_mm512_maskz_loadu_epi16(mask, half.as_ptr().cast())) }
    }

    /// Loads up to 16 elements; the rest are zeros.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn floats(half: &[f32]) -> __m512 {
        let mask = ((1u32 << half.len().min(SIDE)) - 1) as u16;
        // SAFETY: the mask has the lanes that are in the slice.
        unsafe { _mm512_maskz_loadu_ps(mask, half.as_ptr()) }
    }

    /// Sixteen words, then sixteen others.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn side_by_side(low: __m256i, high: __m256i) -> __m512i {
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
    }

    /// Pairs of a word of the lower half and one of the upper.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn alternating(halves: __m512i) -> __m512i {
        const ORDER: [u16; 32] = {
            let (mut order, mut i) = ([0; 32], 0);
            while i < 32 {
                order[i] = (i / 2 + i % 2 * 16) as u16;
                i += 1;
            }
            order
        };
        // SAFETY: the order has 32 words.
        let order = unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) };
        _mm512_permutexvar_epi16(order, halves)
    }

    /// The bf16 whose sum is an f32, or the first of them; `low` and `high` side by side.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn split<const PARTS: usize>(mut low: __m512, mut high: __m512) -> [__m512i; PARTS] {
        let mut parts = [_mm512_setzero_si512(); PARTS];
        // The instruction rounds values from here on to infinity, or has nothing to round.
        let limit = _mm512_set1_epi32(0x7f00_0000);
        let size = |x: __m512| _mm512_castps_si512(_mm512_abs_ps(x));
        let usual = _mm512_cmplt_epi32_mask(size(low), limit) & _mm512_cmplt_epi32_mask(size(high), limit);
        for part in &mut parts {
            if usual == u16::MAX {
                // SAFETY: both types have the same size, and any bits are valid.
                *part = unsafe { transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) };
                low = _mm512_sub_ps(low, widened(_mm512_castsi512_si256(*part)));
                high = _mm512_sub_ps(high, widened(_mm512_extracti64x4_epi64::<1>(*part)));
            } else {
                let words;
                ((words, low), (*part, high)) = (rounded(low), rounded(high));
                let word = |x| _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(x));
                *part = side_by_side(word(words), word(*part));
            }
        }
        parts
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn widened(words: __m256i) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(words)))
    }

    /// x rounded to bf16, in the upper half of a lane, and the rest, which is exact. A finite value that would
    /// become infinite is cut instead; a non-finite one has no rest.
    #[target_feature(enable = "avx512f")]
    fn rounded(x: __m512) -> (__m512i, __m512) {
        let exponent = _mm512_set1_epi32(0x7f80_0000);
        let upper = _mm512_set1_epi32(0xffff_0000u32 as i32);
        let bits = _mm512_castps_si512(x);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        // The exponent of infinities and NaNs, or a carry into it.
        let fits = _mm512_test_epi32_mask(_mm512_andnot_si512(up, exponent), exponent);
        let finite = _mm512_test_epi32_mask(_mm512_andnot_si512(bits, exponent), exponent);
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        let cut = _mm512_mask_or_epi32(bits, nan, bits, _mm512_set1_epi32(0x40_0000));
        let high = _mm512_and_si512(_mm512_mask_mov_epi32(cut, fits & finite, up), upper);
        (high, _mm512_maskz_sub_ps(finite, x, _mm512_castsi512_ps(high)))
    }

    /// Sums of up to 32 x 32 elements of C; those that are not whole tiles go through a copy.
    ///
    /// # Safety
    /// The panels hold `steps` steps of the rows and columns of the part; the rest as for [`blocks`].
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn sums<const A_PARTS: usize, const B_PARTS: usize>(
        part: Tile,
        add: bool,
        a: &[u32],
        b: &[u32],
        steps: usize,
    ) {
        assert!(a.len() >= steps * A_PARTS * 2 * TILE && b.len() >= steps * B_PARTS * 2 * TILE);
        let (a, b) = (a.as_ptr(), b.as_ptr());
        // SAFETY: the panels are long enough by the line above, though a second tile that has no row or column
        // of C may have any content; the rest is the caller's guarantee.
        unsafe {
            if part.m == BLOCK && part.n == BLOCK {
                return registers::<A_PARTS, B_PARTS, true, true>(part.c, part.row_stride, add, a, b, steps);
            }
            let mut copy = [0f32; BLOCK * BLOCK];
            for (i, copy) in copy.chunks_exact_mut(BLOCK).take(if add { part.m } else { 0 }).enumerate() {
                part.c.add(i * part.row_stride).copy_to_nonoverlapping(copy.as_mut_ptr(), part.n);
            }
            let c = copy.as_mut_ptr();
            match (part.m > SIDE, part.n > SIDE) {
                (true, true) => registers::<A_PARTS, B_PARTS, true, true>(c, BLOCK, true, a, b, steps),
                (true, false) => registers::<A_PARTS, B_PARTS, true, false>(c, BLOCK, true, a, b, steps),
                (false, true) => registers::<A_PARTS, B_PARTS, false, true>(c, BLOCK, true, a, b, steps),
                (false, false) => registers::<A_PARTS, B_PARTS, false, false>(c, BLOCK, true, a, b, steps),
            }
            for (i, copy) in copy.chunks_exact(BLOCK).take(part.m).enumerate() {
                part.c.add(i * part.row_stride).copy_from_nonoverlapping(copy.as_ptr(), part.n);
            }
        }
    }

    /// One instruction on tile registers; the compiler uses none of them itself, and keeps the order.
    macro_rules! tile {
        (zero $c:literal) => {
            asm!(concat!("tilezero tmm", $c), options(nostack, nomem, preserves_flags))
        };
        (load $t:literal, $from:expr, $stride:expr) => {
            asm!(concat!("tileloadd tmm", $t, ", [{} + {}]"), in(reg) $from, in(reg) $stride,
                options(nostack, readonly, preserves_flags))
        };
        (store $t:literal, $to:expr, $stride:expr) => {
            asm!(concat!("tilestored [{} + {}], tmm", $t), in(reg) $to, in(reg) $stride,
                options(nostack, preserves_flags))
        };
        (multiply $c:literal, $a:literal, $b:literal) => {
            asm!(concat!("tdpbf16ps tmm", $c, ", tmm", $a, ", tmm", $b), options(nostack, nomem, preserves_flags))
        };
    }

    /// 2 x 2 tiles of C in registers 0 to 3, or fewer: `DOWN` and `RIGHT` say whether the second of a direction
    /// is there. Registers 4 and 5 have A, 6 and 7 have B.
    ///
    /// # Safety
    /// C is valid for the tiles, the panels for `steps` steps; tiles are configured.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn registers<const A_PARTS: usize, const B_PARTS: usize, const DOWN: bool, const RIGHT: bool>(
        c: *mut f32,
        row_stride: usize,
        add: bool,
        a: *const u32,
        b: *const u32,
        steps: usize,
    ) {
        let (line, stride) = (64usize, row_stride * 4);
        // SAFETY: the caller's guarantee.
        unsafe {
            let (right, down) = (c.wrapping_add(SIDE), c.wrapping_add(SIDE * row_stride));
            let across = down.wrapping_add(SIDE);
            if add {
                tile!(load 0, c, stride);
                if RIGHT {
                    tile!(load 1, right, stride);
                }
                if DOWN {
                    tile!(load 2, down, stride);
                }
                if DOWN && RIGHT {
                    tile!(load 3, across, stride);
                }
            } else {
                tile!(zero 0);
                tile!(zero 1);
                tile!(zero 2);
                tile!(zero 3);
            }
            for step in 0..steps {
                let a = a.add(step * A_PARTS * 2 * TILE);
                let b = b.add(step * B_PARTS * 2 * TILE);
                let load_b = |part: usize| {
                    let b = b.add(part * 2 * TILE);
                    tile!(load 6, b, line);
                    if RIGHT {
                        tile!(load 7, b.add(TILE), line);
                    }
                };
                if B_PARTS == 1 {
                    load_b(0);
                }
                for i in (0..A_PARTS).rev() {
                    let a = a.add(i * 2 * TILE);
                    tile!(load 4, a, line);
                    if DOWN {
                        tile!(load 5, a.add(TILE), line);
                    }
                    for j in (0..B_PARTS.min(PARTS - i)).rev() {
                        if B_PARTS > 1 {
                            load_b(j);
                        }
                        tile!(multiply 0, 4, 6);
                        if RIGHT {
                            tile!(multiply 1, 4, 7);
                        }
                        if DOWN {
                            tile!(multiply 2, 5, 6);
                        }
                        if DOWN && RIGHT {
                            tile!(multiply 3, 5, 7);
                        }
                    }
                }
            }
            tile!(store 0, c, stride);
            if RIGHT {
                tile!(store 1, right, stride);
            }
            if DOWN {
                tile!(store 2, down, stride);
            }
            if DOWN && RIGHT {
                tile!(store 3, across, stride);
            }
        }
    }
}

#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::matmul::matmul_strided;
    use crate::matmul::tests::{Matrix, assert_refusals, rms_error, values};
    use crate::rounding::to_bf16;

    /// C = (C +) A B, or `None` if the machine has no AMX.
    fn product<A: Element, B: Element>(
        before: &[f32],
        stride: usize,
        add: bool,
        a: &Matrix<A>,
        b: &Matrix<B>,
    ) -> Option<Vec<f32>> {
        if detected() < Level::Amx {
            return None;
        }
        let mut c = before.to_vec();
        // Nothing may depend on what the panels held before.
        let mut panels = vec![f32::NAN; SCRATCH];
        let shape = (a.rows, b.columns, a.columns);
        // SAFETY: C is this call's alone.
        unsafe {
            let c = &Shared::new(&mut c);
            let sums = Sums { c, begin: 0, row_stride: stride, add, in_turn: false };
            let mut rows = 0;
            matmul_tile_amx(sums, a.side(true), b.side(false), shape, &mut panels, &mut |done| {
                assert_eq!(done.start, rows);
                rows = done.end;
            });
            assert!(rows == a.rows || a.columns == 0, "{rows} of {} rows are done", a.rows);
        }
        Some(c)
    }

    /// |error| <= (1.1 terms + 3) 2^-24 sum |a b|, where every element of the inner index is as many terms as
    /// parts are multiplied.
    fn check<A: Element, B: Element>(
        (m, n, k): (usize, usize, usize),
        (ta, tb): (bool, bool),
        add: bool,
        gap: usize,
        seed: u32,
    ) {
        let (a, b) = (Matrix::<A>::new(m, k, ta, seed), Matrix::<B>::new(k, n, tb, seed + 1));
        let (before, stride) = (values(m * (n + gap), seed + 2), n + gap);
        let Some(c) = product(&before, stride, add, &a, &b) else { return };
        let terms = [[1, 3], [3, 6]][usize::from(parts::<A>() > 1)][usize::from(parts::<B>() > 1)];
        for (at, c) in c.iter().enumerate() {
            let (i, j) = (at / stride, at % stride);
            if j >= n {
                assert_eq!(*c, before[at], "between rows");
                continue;
            }
            let old = if add { before[at] as f64 } else { 0.0 };
            let (mut sum, mut size) = (old, old.abs());
            for l in 0..k {
                let term = a.at(i, l) as f64 * b.at(l, j) as f64;
                (sum, size) = (sum + term, size + term.abs());
            }
            let limit = (1.1 * (terms * k) as f64 + 3.0) * 2f64.powi(-24) * size;
            assert!((*c as f64 - sum).abs() <= limit, "{m}x{n}x{k} ({i}, {j}): {c} instead of {sum}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_shape_storage_and_order_agrees_with_a_triple_loop(
            m in 1usize..70, n in 1usize..70, k in 1usize..100, by in any::<(bool, bool)>(),
            add in any::<bool>(), gap in 0usize..3, seed in 0u32..1000,
        ) {
            check::<bf16, bf16>((m, n, k), by, add, gap, seed);
            check::<bf16, f32>((m, n, k), by, add, gap, seed);
            check::<f32, bf16>((m, n, k), by, add, gap, seed);
            check::<f32, f32>((m, n, k), by, add, gap, seed);
        }
    }

    #[test]
    fn several_blocks_of_the_inner_index_and_all_columns() {
        for by in [(false, false), (false, true), (true, false), (true, true)] {
            check::<f32, bf16>((17, N, K + 7), by, true, 0, 1);
            check::<bf16, f32>((33, 40, 2 * K_PARTS + 1), by, false, 1, 1);
            check::<f32, bf16>((20, 60, 2 * K + 31), by, false, 0, 1);
            check::<bf16, bf16>((40, N / 2, 2 * K + 40), by, true, 0, 1);
            check::<bf16, bf16>((40, N / 2 + 1, 2 * K + 40), by, false, 0, 1);
            check::<f32, f32>((16, N_PARTS, K_PARTS + 33), by, true, 0, 1);
        }
    }

    /// Errors of f32 operands are those of a sum in f32, not those of bf16.
    #[test]
    fn a_product_of_f32_is_as_exact_as_in_f32() {
        let (m, n, k) = (48, 64, 1000);
        let (a, b) = (Matrix::<f32>::new(m, k, false, 1), Matrix::<f32>::new(k, n, true, 2));
        let Some(parts) = product(&vec![0.0; m * n], n, false, &a, &b) else { return };
        let mut other = vec![0.0; m * n];
        matmul_strided(&mut other, n, 1.0, a.mat(), b.mat(), 0.0);
        let (parts, other) = (rms_error(&parts, &a, &b), rms_error(&other, &a, &b));
        println!("root mean square error: parts {parts:.2e}, f32 {other:.2e}");
        assert!(parts <= 2.0 * other && parts > 0.0, "{parts} and {other}");
    }

    #[test]
    fn the_bits_of_an_element_do_not_depend_on_the_shape_around_it() {
        fn bits<A: Element, B: Element>() {
            let k = 1301;
            let (a, b) = (Matrix::<A>::new(45, k, false, 1), Matrix::<B>::new(k, 130, true, 2));
            let Some(whole) = product(&[0.0; 45 * 130], 130, false, &a, &b) else { return };
            for (i, j) in [(0, 0), (7, 47), (31, 32), (32, 31), (44, 129)] {
                let a = Matrix::from_stored(a.stored[i * k..(i + 1) * k].to_vec(), 1, k, false);
                let b = Matrix::from_stored(b.stored[j * k..(j + 1) * k].to_vec(), k, 1, true);
                assert_eq!(product(&[0.0], 1, false, &a, &b), Some(vec![whole[i * 130 + j]]));
            }
        }
        bits::<bf16, bf16>();
        bits::<bf16, f32>();
        bits::<f32, bf16>();
        bits::<f32, f32>();
    }

    /// Every f32 is the sum of its parts: times 1 it is itself.
    #[test]
    fn an_f32_times_one_is_itself() {
        let mut values = values(2000, 5);
        values.extend([0.0, -0.0, 1.0, -1.5, f32::MAX, f32::MIN, 3.39e38, 1e-30, -1.234_567_9e-30]);
        values.extend([16_777_215.0, 1.000_000_1, f32::from_bits(0x3f80_8000), f32::from_bits(0x3f7f_ffff)]);
        let n = values.len();
        for transposed in [false, true] {
            let a = Matrix::from_stored(values.clone(), n, 1, transposed);
            let one = Matrix::from_stored(vec![bf16::ONE], 1, 1, false);
            let Some(c) = product(&vec![f32::NAN; n], 1, false, &a, &one) else { return };
            for (c, value) in c.iter().zip(&values) {
                assert_eq!(c, value);
            }
        }
    }

    #[test]
    fn non_finite_values_reach_only_their_row_and_column() {
        fn reach<A: Element, B: Element>(value: f32, transposed: bool) {
            let mut a = Matrix::<A>::new(11, 33, transposed, 5);
            let mut b = Matrix::<B>::new(33, 70, transposed, 6);
            a.set(8, 32, value);
            b.set(31, 49, value);
            let Some(c) = product(&[0.0; 11 * 70], 70, true, &a, &b) else { return };
            for (at, c) in c.iter().enumerate() {
                assert_eq!(c.is_finite(), at / 70 != 8 && at % 70 != 49, "{value}: element {at} is {c}");
            }
        }
        for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::from_bits(0x7f80_0001)] {
            for transposed in [false, true] {
                reach::<bf16, bf16>(value, transposed);
                reach::<bf16, f32>(value, transposed);
                reach::<f32, bf16>(value, transposed);
                reach::<f32, f32>(value, transposed);
            }
        }
    }

    #[test]
    fn left_factors_are_taken_as_stored_in_three_parts_or_rounded() {
        if detected() < Level::Amx {
            return;
        }
        let (m, n, k, by) = (37, N + 3, 70, 0.3);
        let mut panels = vec![f32::NAN; SCRATCH];
        let before = values(m * n, 4);
        let mut check = |add: bool,
                         left: Left<'_>,
                         factor: &dyn Fn(usize, usize) -> f32,
                         b: &Matrix<bf16>| {
            let mut c = before.clone();
            matmul_amx(&mut c, add, left, b.stored_mat(), &mut panels);
            for (at, c) in c.iter().enumerate() {
                let (i, j) = (at / n, at % n);
                let start = if add { before[at] as f64 } else { 0.0 };
                let sum: f64 = (0..k).map(|l| factor(i, l) as f64 * b.at(l, j) as f64).sum();
                assert!((*c as f64 - start - sum).abs() < 2e-6, "({i}, {j}): {c} instead of {}", start + sum);
            }
        };
        for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
            let (stored, b) = (Matrix::<bf16>::new(m, k, ta, 1), Matrix::<bf16>::new(k, n, tb, 2));
            let wide = Matrix::<f32>::new(m, k, ta, 3);
            check(false, Left::Stored(stored.stored_mat()), &|i, l| stored.at(i, l), &b);
            check(true, Left::Wide(wide.mat(), by), &|i, l| by * wide.at(i, l), &b);
            check(true, Left::Rounded(wide.mat(), by), &|i, l| to_bf16(by * wide.at(i, l)), &b);
        }
    }

    #[test]
    fn strips_in_turn_have_the_bits_of_the_whole_tile() {
        let (m, n, k) = (75, 100, 2 * K);
        let (a, b) = (Matrix::<bf16>::new(m, k, false, 1), Matrix::<bf16>::new(k, n, true, 2));
        let Some(whole) = product(&vec![0.0; m * n], n, false, &a, &b) else { return };
        let (mut strip, mut all) = (vec![f32::NAN; AMX_STRIP * n], Vec::new());
        let c = &Shared::new(&mut strip);
        let sums = Sums { c, begin: 0, row_stride: n, add: false, in_turn: true };
        let mut panels = vec![f32::NAN; SCRATCH];
        // SAFETY: C is this call's alone, and read when a strip is complete.
        unsafe {
            matmul_tile_amx(sums, a.side(true), b.side(false), (m, n, k), &mut panels, &mut |rows| {
                all.extend_from_slice(c.part(0, rows.len() * n));
            });
        }
        assert!(all == whole);
    }

    #[test]
    fn strips_in_turn_need_one_block() {
        if detected() < Level::Amx {
            return;
        }
        let k = 2 * K + 1;
        let (a, b) = (Matrix::<bf16>::new(1, k, false, 1), Matrix::<bf16>::new(k, 1, true, 2));
        let result = std::panic::catch_unwind(|| {
            let (mut c, mut panels) = (vec![0.0; AMX_STRIP], vec![0.0; SCRATCH]);
            let sums = Sums { c: &Shared::new(&mut c), begin: 0, row_stride: 1, add: false, in_turn: true };
            // SAFETY: C is this call's alone.
            unsafe {
                matmul_tile_amx(sums, a.side(true), b.side(false), (1, 1, k), &mut panels, &mut |_| {})
            };
        });
        let problem = result.unwrap_err();
        assert!(problem.downcast_ref::<&str>().is_some_and(|problem| problem.contains("several blocks")));
    }

    #[test]
    fn tiles_fit_the_panels_and_keep_all_threads_busy() {
        for threads in [1, 2, 7, 64] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for (m, n, k) in
                [(1, 1, 1), (24, 3584, 1024), (1024, 3584, 1024), (1024, 1024, 3584), (9, 5000, 400)]
            {
                let most = 512 * 512;
                let (rows, columns) = pool.install(|| amx_tile::<bf16, bf16>((m, n, k), most));
                assert!(rows % AMX_STRIP == 0 && columns <= N, "{m}x{n}x{k}: {rows}x{columns}");
                assert!(is_one_block::<bf16>(columns, k) || rows * columns <= most);
                let (rows, columns) = pool.install(|| amx_tile::<f32, f32>((m, n, k), most));
                assert!(rows % AMX_STRIP == 0 && columns <= N_PARTS, "{m}x{n}x{k}: {rows}x{columns}");
            }
            let (rows, columns) = pool.install(|| amx_tile::<bf16, bf16>((2048, 4096, 1024), usize::MAX));
            let tiles = 2048usize.div_ceil(rows) * 4096usize.div_ceil(columns);
            assert!(tiles >= threads, "{threads} threads, {tiles} tiles");
        }
    }

    #[test]
    fn without_an_inner_index_c_stays() {
        let (a, b) = (Matrix::<bf16>::new(3, 0, false, 1), Matrix::<f32>::new(0, 40, false, 1));
        if let Some(c) = product(&[2.0; 120], 40, true, &a, &b) {
            assert_eq!(c, [2.0; 120]);
        }
    }

    #[test]
    fn a_tile_that_is_too_large_or_outside_is_refused() {
        if detected() < Level::Amx {
            return;
        }
        assert_refusals(SCRATCH, |c, stride, side, shape, panels| {
            let sums = Sums { c, begin: 0, row_stride: stride, add: false, in_turn: false };
            // SAFETY: C is this call's alone.
            unsafe { matmul_tile_amx(sums, side, side, shape, panels, &mut |_| {}) }
        });
    }
}
