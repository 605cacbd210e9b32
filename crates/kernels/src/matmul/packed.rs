//! Products of tiles with sums in f32, on AVX2.
//!
//! Both operands are copied, and widened if they are stored in bf16: B into strips of sixteen columns, A row by
//! row if its rows are stored, else into groups of [`ROWS`] rows with the rows of a group side by side. So each
//! is packed once, in the order in which it is read:
//! ```text
//! for each block of the inner index: pack B
//!     for each block of rows: pack A
//!         for each strip of B (16 KiB, in the L1 cache)
//!             for each group of rows of A:  ROWS x 16 sums in registers, one chain of multiply-adds each
//! ```
//! The sum of an element runs over a block from first to last and is then added to C. So its bits depend on its
//! row of A and its column of B alone, and a product may be divided into tiles of any size.

use super::{Side, Tile, is_large};
use crate::Element;
use crate::shared::Shared;
use crate::simd::{Level, detected, level};

/// Most rows of C for which A is packed at once.
const M: usize = 256;
/// Most columns of C in one product.
pub(crate) const N: usize = 512;
/// Block size of the inner index.
const K: usize = 256;
/// Gap between the rows of the copied A: rows a power of two apart would share a few sets of the L1 cache.
const GAP: usize = 16;
/// Elements from row to row of an A whose rows are stored.
const A_ROW: usize = K + GAP;
/// Rows of a tile in registers.
const ROWS: usize = 6;
/// Columns of a strip of B, and of a tile in registers.
const WIDTH: usize = 16;

/// Number of f32 of the copy of A.
const A_LEN: usize = M * A_ROW;
const _: () = assert!(A_LEN >= M.div_ceil(ROWS) * ROWS * K);
/// Number of f32 of the copies of A and B.
pub(crate) const SCRATCH: usize = A_LEN + N.div_ceil(WIDTH) * WIDTH * K;

/// Returns true if a product C [m, n] = A [m, k] B [k, n] should be divided into tiles for
/// [`matmul_tile_packed`].
pub(crate) fn is_packed(shape: (usize, usize, usize)) -> bool {
    is_large(shape) && level() == Level::Avx2
}

/// Row-major C [m, n] = (C +) A [m, k] B [k, n] for a tile of C whose first element is `begin`, while other
/// threads write other tiles.
///
/// # Safety
/// No part of the tile's rows, gaps between rows excepted, may be read or written elsewhere during the call.
///
/// # Panics
/// If the shapes do not match, the tile has more than [`N`] columns, `panels` are shorter than [`SCRATCH`], or
/// the machine has no AVX2.
pub(crate) unsafe fn matmul_tile_packed<A: Element, B: Element>(
    c: &Shared<'_, f32>,
    begin: usize,
    row_stride: usize,
    add: bool,
    a: Side<'_, A>,
    b: Side<'_, B>,
    (m, n, k): (usize, usize, usize),
    panels: &mut [f32],
) {
    assert!(detected() >= Level::Avx2, "this machine has no AVX2");
    assert!(n <= N, "a tile of {m}x{n}");
    assert!(panels.len() >= SCRATCH, "panels must have {SCRATCH} f32, got {}", panels.len());
    if m == 0 || n == 0 {
        return;
    }
    let tile = Tile::new(c, begin, row_stride, m, n);
    // SAFETY: the tile lies inside C; exclusive by the caller's guarantee. This machine has the level.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        x86::blocks(tile, add, a, b, k, panels)
    };
    #[cfg(not(target_arch = "x86_64"))]
    unreachable!("no other machine has AVX2")
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::ops::Range;

    use super::{A_LEN, A_ROW, K, M, ROWS, Side, Tile, WIDTH};
    use crate::Element;

    /// Block after block of the inner index.
    ///
    /// # Safety
    /// The tile is valid for reading and writing and used by the caller alone; the machine has the
    /// instructions.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn blocks<A: Element, B: Element>(
        tile: Tile,
        add: bool,
        a: Side<'_, A>,
        b: Side<'_, B>,
        k: usize,
        panels: &mut [f32],
    ) {
        let (a_panel, b_panel) = panels.split_at_mut(A_LEN);
        for first in (0..k).step_by(K) {
            let inner = first..k.min(first + K);
            let (depth, add) = (inner.len(), add || first > 0);
            match b.outer_first {
                true => transpose(b_panel, b, inner.clone(), tile.n),
                false => pack_rows::<B, WIDTH>(b_panel, b, inner.clone(), tile.n),
            }
            for i in (0..tile.m).step_by(M) {
                let m = M.min(tile.m - i);
                // SAFETY: row i is inside the tile; the panels hold `depth` elements of all rows and columns;
                // the rest is the caller's guarantee.
                unsafe {
                    let tile = Tile { c: tile.c.add(i * tile.row_stride), m, ..tile };
                    if a.outer_first {
                        for (row, i) in a_panel.chunks_mut(A_ROW).zip(i..i + m) {
                            A::load(&mut row[..depth], &a.data[i * a.stride..][inner.clone()]);
                        }
                        strips::<true>(tile, add, a_panel, b_panel, depth);
                    } else {
                        let a = Side { data: &a.data[i..], ..a };
                        pack_rows::<A, ROWS>(a_panel, a, inner.clone(), m);
                        strips::<false>(tile, add, a_panel, b_panel, depth);
                    }
                }
            }
        }
    }

    /// Groups of `W` outer indices of a side whose inner index is stored first: `panel[group][l][outer]`.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn pack_rows<T: Element, const W: usize>(
        panel: &mut [f32],
        side: Side<'_, T>,
        inner: Range<usize>,
        outer: usize,
    ) {
        let mut wide = [0.0; super::N];
        for (l, stored) in inner.enumerate() {
            let row = &side.data[stored * side.stride..][..outer];
            let row = match T::as_f32(row) {
                Some(row) => row,
                None => {
                    T::load(&mut wide[..outer], row);
                    &wide[..outer]
                }
            };
            let (groups, rest) = row.as_chunks::<W>();
            for (group, values) in groups.iter().enumerate() {
                panel[(group * K + l) * W..][..W].copy_from_slice(values);
            }
            if !rest.is_empty() {
                panel[(groups.len() * K + l) * W..][..rest.len()].copy_from_slice(rest);
            }
        }
    }

    /// Strips of a B whose columns are stored, eight columns and eight inner indices at a time.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn transpose<T: Element>(panel: &mut [f32], b: Side<'_, T>, inner: Range<usize>, columns: usize) {
        let depth = inner.len();
        let mut wide = [[0.0; K]; 8];
        for j in (0..columns).step_by(8) {
            let strip = &mut panel[j / WIDTH * K * WIDTH + j % WIDTH..];
            let count = 8.min(columns - j);
            let mut stored: [&[f32]; 8] = [&[]; 8];
            for ((column, wide), stored) in (j..j + count).zip(&mut wide).zip(&mut stored) {
                let values = &b.data[column * b.stride..][inner.clone()];
                *stored = match T::as_f32(values) {
                    Some(values) => values,
                    None => {
                        T::load(&mut wide[..depth], values);
                        &wide[..depth]
                    }
                };
            }
            let whole = if count == 8 { depth / 8 * 8 } else { 0 };
            for l in (0..whole).step_by(8) {
                // SAFETY: each column has eight elements from l on.
                let square = stored.map(|column| unsafe { _mm256_loadu_ps(column[l..l + 8].as_ptr()) });
                for (i, row) in transposed(square).into_iter().enumerate() {
                    let target = &mut strip[(l + i) * WIDTH..][..8];
                    // SAFETY: eight elements, as the slice says.
                    unsafe { _mm256_storeu_ps(target.as_mut_ptr(), row) };
                }
            }
            for l in whole..depth {
                for (target, column) in strip[l * WIDTH..][..count].iter_mut().zip(&stored) {
                    *target = column[l];
                }
            }
        }
    }

    /// Eight rows of eight, transposed: within halves of registers first, then the halves.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn transposed(rows: [__m256; 8]) -> [__m256; 8] {
        let [a, b, c, d, e, f, g, h] = rows;
        let pairs = |x, y| (_mm256_unpacklo_ps(x, y), _mm256_unpackhi_ps(x, y));
        let ((ab0, ab1), (cd0, cd1), (ef0, ef1), (gh0, gh1)) =
            (pairs(a, b), pairs(c, d), pairs(e, f), pairs(g, h));
        let quads = |x, y| (_mm256_shuffle_ps::<0x44>(x, y), _mm256_shuffle_ps::<0xee>(x, y));
        let ((r0, r1), (r2, r3)) = (quads(ab0, cd0), quads(ab1, cd1));
        let ((s0, s1), (s2, s3)) = (quads(ef0, gh0), quads(ef1, gh1));
        let low = |x, y| _mm256_permute2f128_ps::<0x20>(x, y);
        let high = |x, y| _mm256_permute2f128_ps::<0x31>(x, y);
        [
            low(r0, s0),
            low(r1, s1),
            low(r2, s2),
            low(r3, s3),
            high(r0, s0),
            high(r1, s1),
            high(r2, s2),
            high(r3, s3),
        ]
    }

    /// All register tiles: a strip of B stays in the L1 cache while the rows of A pass.
    ///
    /// # Safety
    /// The panels hold `depth` elements of all rows and columns of the tile; the rest as for [`blocks`].
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn strips<const BY_ROW: bool>(tile: Tile, add: bool, a: &[f32], b: &[f32], depth: usize) {
        for j in (0..tile.n).step_by(WIDTH) {
            let b = &b[j * K..][..depth * WIDTH];
            for i in (0..tile.m).step_by(ROWS) {
                let a = &a[if BY_ROW { i * A_ROW } else { i * K }..];
                let rows = ROWS.min(tile.m - i);
                // SAFETY: row i and column j are inside the tile; the rest is the caller's guarantee.
                unsafe {
                    let c = tile.c.add(i * tile.row_stride + j);
                    let whole = tile.n - j >= WIDTH;
                    match rows {
                        ROWS if whole => sums::<BY_ROW, ROWS>(c, tile.row_stride, add, a, b),
                        4 if whole => sums::<BY_ROW, 4>(c, tile.row_stride, add, a, b),
                        _ => edge::<BY_ROW>(c, tile.row_stride, add, a, b, rows, WIDTH.min(tile.n - j)),
                    }
                }
            }
        }
    }

    /// `R` rows and sixteen columns of C, in registers.
    ///
    /// # Safety
    /// `c` is valid for these rows, `stride` apart, and used by the caller alone; the machine has the
    /// instructions.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn sums<const BY_ROW: bool, const R: usize>(
        c: *mut f32,
        stride: usize,
        add: bool,
        a: &[f32],
        b: &[f32],
    ) {
        let (row, step) = if BY_ROW { (A_ROW, 1) } else { (1, ROWS) };
        let depth = b.len() / WIDTH;
        assert!(depth > 0 && a.len() > (R - 1) * row + (depth - 1) * step);
        let (mut a, mut b) = (a.as_ptr(), b.as_ptr());
        let mut sums = [[_mm256_setzero_ps(); 2]; R];
        // SAFETY: every index is below the lengths that were compared; C is the caller's guarantee.
        unsafe {
            for i in 0..R {
                _mm_prefetch::<_MM_HINT_T0>(c.add(i * stride).cast());
                _mm_prefetch::<_MM_HINT_T0>(c.add(i * stride + WIDTH - 1).cast());
            }
            for _ in 0..depth {
                let (low, high) = (_mm256_loadu_ps(b), _mm256_loadu_ps(b.add(8)));
                for (i, sums) in sums.iter_mut().enumerate() {
                    let x = _mm256_broadcast_ss(&*a.add(i * row));
                    sums[0] = _mm256_fmadd_ps(x, low, sums[0]);
                    sums[1] = _mm256_fmadd_ps(x, high, sums[1]);
                }
                (a, b) = (a.wrapping_add(step), b.wrapping_add(WIDTH));
            }
            for (i, sums) in sums.into_iter().enumerate() {
                for (half, sum) in sums.into_iter().enumerate() {
                    let c = c.add(i * stride + 8 * half);
                    let sum = if add { _mm256_add_ps(_mm256_loadu_ps(c), sum) } else { sum };
                    _mm256_storeu_ps(c, sum);
                }
            }
        }
    }

    /// Up to [`ROWS`] rows and sixteen columns of C at its edge, in the order of [`sums`].
    ///
    /// # Safety
    /// As for [`sums`], for `rows` and `columns`.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn edge<const BY_ROW: bool>(
        c: *mut f32,
        stride: usize,
        add: bool,
        a: &[f32],
        b: &[f32],
        rows: usize,
        columns: usize,
    ) {
        let (row, step) = if BY_ROW { (A_ROW, 1) } else { (1, ROWS) };
        for i in 0..rows {
            let mut sums = [0.0f32; WIDTH];
            for (l, b) in b.as_chunks::<WIDTH>().0.iter().enumerate() {
                let x = a[i * row + l * step];
                for (sum, y) in sums.iter_mut().zip(b) {
                    *sum = x.mul_add(*y, *sum);
                }
            }
            for (j, sum) in sums[..columns].iter().enumerate() {
                // SAFETY: the caller's guarantee.
                unsafe {
                    let c = c.add(i * stride + j);
                    *c = if add { *c + sum } else { *sum };
                }
            }
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;
    use crate::matmul::tests::{Matrix, assert_refusals, rms_error, values};
    use crate::matmul::{Mat, matmul_strided};

    /// The product in the order that the module describes, element by element.
    fn expected(c: &mut [f32], stride: usize, add: bool, a: Mat<'_>, b: Mat<'_>) {
        for i in 0..a.rows {
            for j in 0..b.columns {
                let at = |m: Mat<'_>, i, j| m.data[i * m.row_stride + j * m.column_stride];
                let c = &mut c[i * stride + j];
                for first in (0..a.columns).step_by(K) {
                    let block = first..a.columns.min(first + K);
                    let sum = block.fold(0.0f32, |sum, l| at(a, i, l).mul_add(at(b, l, j), sum));
                    *c = if add || first > 0 { *c + sum } else { sum };
                }
            }
        }
    }

    fn check<A: Element, B: Element>(
        (m, n, k): (usize, usize, usize),
        ta: bool,
        tb: bool,
        add: bool,
        gap: usize,
    ) {
        if detected() < Level::Avx2 {
            return;
        }
        let (a, b) = (Matrix::<A>::new(m, k, ta, 1), Matrix::<B>::new(k, n, tb, 2));
        let before = values(m * (n + gap), 3);
        let mut want = before.clone();
        expected(&mut want, n + gap, add, a.mat(), b.mat());
        let mut got = before.clone();
        // Nothing may depend on what the panels held before.
        let mut panels = vec![f32::NAN; SCRATCH];
        let tile = Tile { c: got.as_mut_ptr(), row_stride: n + gap, m, n };
        // SAFETY: C has m rows, `n + gap` apart, and is this call's alone; the machine has AVX2.
        unsafe { x86::blocks(tile, add, a.side(true), b.side(false), k, &mut panels) };
        assert!(got == want, "{m}x{n}x{k}, transposed {ta} {tb}, add {add}");
        let mut close = before;
        matmul_strided(&mut close, n + gap, 1.0, a.mat(), b.mat(), if add { 1.0 } else { 0.0 });
        let worst = got.iter().zip(&close).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
        assert!(worst <= 1e-6 * (k as f32 + 1.0), "{worst} from the other product");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_shape_storage_and_order_has_the_bits_of_its_definition(
            m in 1usize..40, n in 1usize..70, k in 1usize..40,
            ta in any::<bool>(), tb in any::<bool>(), add in any::<bool>(), gap in 0usize..3, types in 0..4,
        ) {
            match types {
                0 => check::<f32, f32>((m, n, k), ta, tb, add, gap),
                1 => check::<bf16, f32>((m, n, k), ta, tb, add, gap),
                2 => check::<f32, bf16>((m, n, k), ta, tb, add, gap),
                _ => check::<bf16, bf16>((m, n, k), ta, tb, add, gap),
            }
        }
    }

    #[test]
    fn several_blocks_of_rows_and_of_the_inner_index() {
        for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
            check::<f32, f32>((M + 7, N, 8), ta, tb, true, 0);
            check::<f32, bf16>((31, 33, 2 * K + 5), ta, tb, false, 1);
        }
    }

    /// Both sum up in f32, in different orders.
    #[test]
    fn it_is_as_exact_as_the_other_product() {
        if detected() < Level::Avx2 {
            return;
        }
        let (m, n, k) = (48, 64, 1000);
        let (a, b) = (Matrix::<f32>::new(m, k, false, 1), Matrix::<f32>::new(k, n, true, 2));
        let (mut packed, mut other) = (vec![0.0; m * n], vec![0.0; m * n]);
        let tile = Tile { c: packed.as_mut_ptr(), row_stride: n, m, n };
        // SAFETY: C has m rows of n elements and is this call's alone; the machine has AVX2.
        unsafe { x86::blocks(tile, false, a.side(true), b.side(false), k, &mut vec![0.0; SCRATCH]) };
        matmul_strided(&mut other, n, 1.0, a.mat(), b.mat(), 0.0);
        let (packed, other) = (rms_error(&packed, &a, &b), rms_error(&other, &a, &b));
        println!("root mean square error: packed {packed:.2e}, other {other:.2e}");
        assert!(packed <= 1.2 * other && packed > 0.0, "{packed} and {other}");
    }

    #[test]
    fn a_tile_that_is_too_large_or_outside_is_refused() {
        if detected() < Level::Avx2 {
            return;
        }
        assert_refusals(SCRATCH, |c, stride, side, shape, panels| {
            // SAFETY: C is this call's alone.
            unsafe { matmul_tile_packed(c, 0, stride, false, side, side, shape, panels) }
        });
    }
}
