//! Products of bf16 matrices with sums in f32, on AVX512-BF16.
//!
//! `vdpbf16ps` multiplies sixteen pairs of bf16 and adds both products of a pair to a sum in f32:
//! ```text
//! c_ij += a_i,2l b_2l,j + a_i,2l+1 b_2l+1,j        one a, sixteen j
//! ```
//! So the inner index is grouped in pairs; an odd last element is paired with zero. A is copied in pairs in
//! its own order, B into strips of columns with the columns of a pair side by side. C is computed in tiles
//! that stay in registers over a block of the inner index. The sum of an element runs over the pairs from
//! first to last, block after block, whatever the shape.
//!
//! The instruction ignores the rounding mode of the machine: it rounds to nearest, may round the two products
//! of a pair together, and treats subnormal inputs and results as zero. Products of normal bf16 values are
//! exact in f32, so the error is that of an f32 sum in this order, plus 2^-126 per product.

use half::bf16;

use super::{Side, Tile};
use crate::shared::Shared;

/// Most rows of C in one product.
pub(crate) const M: usize = 256;
/// Most columns of C in one product.
pub(crate) const N: usize = 512;
/// Pairs of the inner index in one block.
const PAIRS: usize = 256;
/// Gap between the rows of the copied A: rows a power of two apart would share a few sets of the L1 cache.
const GAP: usize = 16;
/// Pairs from row to row of an A whose rows are stored.
const A_ROW: usize = PAIRS + GAP;
/// Pairs from pair to pair of the inner index, of an A whose columns are stored.
const A_COLUMN: usize = M + GAP;
/// Columns of a strip of B, and of a tile of C in registers.
const WIDTH: usize = 48;

/// Number of f32 of the copy of A.
const A_LEN: usize = if M * A_ROW > PAIRS * A_COLUMN { M * A_ROW } else { PAIRS * A_COLUMN };
/// Number of f32 of the copies of A and B.
pub(crate) const SCRATCH: usize = A_LEN + N.div_ceil(WIDTH) * WIDTH * PAIRS;

/// Row-major C [m, n] = (C +) A [m, k] B [k, n] for a tile of C whose first element is `begin`, while other
/// threads write other tiles. Returns false and does nothing if the machine lacks the instructions.
///
/// # Safety
/// No part of the tile's rows, gaps between rows excepted, may be read or written elsewhere during the call.
///
/// # Panics
/// If the shapes do not match, or the tile is larger than [`M`] x [`N`], or `panels` shorter than
/// [`SCRATCH`].
pub(crate) unsafe fn matmul_tile_bf16(
    c: &Shared<'_, f32>,
    begin: usize,
    row_stride: usize,
    add: bool,
    a: Side<'_, bf16>,
    b: Side<'_, bf16>,
    (m, n, k): (usize, usize, usize),
    panels: &mut [f32],
) -> bool {
    #[cfg(target_arch = "x86_64")]
    if crate::simd::level() >= crate::simd::Level::Avx512Bf16 {
        assert!(m <= M && n <= N, "a tile of {m}x{n}");
        assert!(panels.len() >= SCRATCH, "panels must have {SCRATCH} f32, got {}", panels.len());
        if m > 0 && n > 0 {
            // SAFETY: the tile lies inside C; exclusive by the caller's guarantee. This machine has the level.
            unsafe { x86::blocks(Tile::new(c, begin, row_stride, m, n), add, a, b, k, panels) };
        }
        return true;
    }
    let _ = (c, begin, row_stride, add, a, b, (m, n, k), panels);
    false
}

/// Sum of x_i y_i; its bits depend on the values alone.
///
/// # Safety
/// The machine has the instructions of `Level::Avx512Bf16`.
pub(crate) unsafe fn dot_bf16(x: &[bf16], y: &[bf16]) -> f32 {
    assert_eq!(x.len(), y.len());
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's guarantee.
    return unsafe { x86::dot(x, y) };
    #[cfg(not(target_arch = "x86_64"))]
    unreachable!("no other machine has that level")
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::transposed;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::mem::transmute;

    use half::bf16;

    use super::{A_COLUMN, A_LEN, A_ROW, M, PAIRS, Side, Tile, WIDTH};

    /// Rows of a tile in registers.
    const ROWS: usize = 8;
    /// Partner of an odd last element.
    const ZEROS: [bf16; super::N] = [bf16::ZERO; super::N];

    /// Uses four vector sums to hide the latency of an addition.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub(super) fn dot(x: &[bf16], y: &[bf16]) -> f32 {
        let mut sums = [_mm512_setzero_ps(); 4];
        let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<128>(), y.as_chunks::<128>());
        for (x, y) in x.iter().zip(y) {
            for (sum, (x, y)) in sums.iter_mut().zip(x.chunks_exact(32).zip(y.chunks_exact(32))) {
                *sum = _mm512_dpbf16_ps(*sum, pairs(vector(x)), pairs(vector(y)));
            }
        }
        for (sum, (x, y)) in sums.iter_mut().zip(x_rest.chunks(32).zip(y_rest.chunks(32))) {
            *sum = _mm512_dpbf16_ps(*sum, pairs(vector(x)), pairs(vector(y)));
        }
        let [a, b, c, d] = sums;
        _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)))
    }

    /// Loads up to 32 elements; the rest are zeros.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn vector(part: &[bf16]) -> __m512i {
        let mask = ((1u64 << part.len().min(32)) - 1) as u32;
        // SAFETY: the mask has the lanes that are in the slice.
        unsafe { _mm512_maskz_loadu_epi16(mask, part.as_ptr().cast()) }
    }

    /// A register seen as pairs of bf16.
    #[inline(always)]
    fn pairs(register: __m512i) -> __m512bh {
        // SAFETY: both types have the same size, and any bits are valid.
        unsafe { transmute(register) }
    }

    /// Block after block of the inner index.
    ///
    /// # Safety
    /// The tile is valid for reading and writing and used by the caller alone; the machine has the
    /// instructions.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub(super) unsafe fn blocks(
        tile: Tile,
        add: bool,
        a: Side<'_, bf16>,
        b: Side<'_, bf16>,
        k: usize,
        panels: &mut [f32],
    ) {
        let (a_panel, b_panel) = bytemuck::cast_slice_mut::<f32, u32>(panels).split_at_mut(A_LEN);
        for first in (0..k).step_by(2 * PAIRS) {
            let inner = first..k.min(first + 2 * PAIRS);
            let (depth, add) = (inner.len().div_ceil(2), add || first > 0);
            if b.outer_first {
                transpose(b_panel, b, inner.clone(), tile.n);
            } else {
                for l in 0..depth {
                    let (low, high) = pair_of_rows(b, inner.start + 2 * l, inner.end, tile.n);
                    for (strip, (low, high)) in low.chunks(WIDTH).zip(high.chunks(WIDTH)).enumerate() {
                        interleave(&mut b_panel[(strip * PAIRS + l) * WIDTH..][..WIDTH], low, high);
                    }
                }
            }
            if a.outer_first {
                copy_rows(a_panel, a, inner, tile.m);
                // SAFETY: the panels hold `depth` pairs of all rows and columns; the rest is the caller's
                // guarantee.
                unsafe { strips::<true>(tile, add, a_panel, b_panel, depth) };
            } else {
                for l in 0..depth {
                    let (low, high) = pair_of_rows(a, inner.start + 2 * l, inner.end, tile.m);
                    interleave(&mut a_panel[l * A_COLUMN..][..M], low, high);
                }
                // SAFETY: as above.
                unsafe { strips::<false>(tile, add, a_panel, b_panel, depth) };
            }
        }
    }

    /// The first `n` elements of the stored rows l and l + 1; the second is zero when it is not below `end`.
    fn pair_of_rows<'a>(side: Side<'a, bf16>, l: usize, end: usize, n: usize) -> (&'a [bf16], &'a [bf16]) {
        let row = |l: usize| &side.data[l * side.stride..][..n];
        (row(l), if l + 1 < end { row(l + 1) } else { &ZEROS[..n] })
    }

    /// Pairs of equally long rows. Up to fifteen more may be written, to a multiple of sixteen.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn interleave(target: &mut [u32], low: &[bf16], high: &[bf16]) {
        // Word 2 i is word i of the lower row, 2 i + 1 that of the upper, which has 32 more.
        const FIRST: [u16; 32] = order(0);
        const SECOND: [u16; 32] = order(16);
        const fn order(begin: u16) -> [u16; 32] {
            let (mut order, mut i) = ([0; 32], 0);
            while i < 32 {
                order[i as usize] = begin + i / 2 + 32 * (i % 2);
                i += 1;
            }
            order
        }
        for (target, (low, high)) in target.chunks_mut(32).zip(low.chunks(32).zip(high.chunks(32))) {
            let halves = if low.len() > 16 { 2 } else { 1 };
            for (target, order) in target.chunks_exact_mut(16).zip([FIRST, SECOND]).take(halves) {
                // SAFETY: the order has 32 words, and the target sixteen elements, as it was cut.
                unsafe {
                    let order = _mm512_loadu_si512(order.as_ptr().cast());
                    let pairs = _mm512_permutex2var_epi16(vector(low), order, vector(high));
                    _mm512_storeu_si512(target.as_mut_ptr().cast(), pairs);
                }
            }
        }
    }

    /// Rows of A, which are pairs already.
    fn copy_rows(panel: &mut [u32], a: Side<'_, bf16>, inner: std::ops::Range<usize>, rows: usize) {
        for (i, row) in
            bytemuck::cast_slice_mut::<u32, bf16>(panel).chunks_mut(2 * A_ROW).take(rows).enumerate()
        {
            row[..inner.len()].copy_from_slice(&a.data[i * a.stride..][inner.clone()]);
            row[inner.len()] = bf16::ZERO;
        }
    }

    /// Strips of B whose columns are stored, sixteen columns and sixteen pairs at a time.
    #[target_feature(enable = "avx512f,avx512bw")]
    fn transpose(panel: &mut [u32], b: Side<'_, bf16>, inner: std::ops::Range<usize>, columns: usize) {
        for j in (0..columns).step_by(16) {
            let strip = &mut panel[j / WIDTH * PAIRS * WIDTH + j % WIDTH..];
            for l in inner.clone().step_by(32) {
                let wide = 32.min(inner.end - l);
                let mut square = [_mm512_setzero_si512(); 16];
                for (j, column) in (j..columns.min(j + 16)).zip(&mut square) {
                    *column = vector(&b.data[j * b.stride + l..][..wide]);
                }
                let rows = strip[(l - inner.start) / 2 * WIDTH..].chunks_mut(WIDTH);
                for (row, pair) in rows.zip(transposed(square)).take(wide.div_ceil(2)) {
                    // SAFETY: sixteen elements, as the slice says.
                    unsafe { _mm512_storeu_si512(row[..16].as_mut_ptr().cast(), pair) };
                }
            }
        }
    }

    /// Sixteen rows of sixteen, transposed: within quarters of registers first, then the quarters.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(in crate::matmul) fn transposed(rows: [__m512i; 16]) -> [__m512i; 16] {
        let (mut x, mut y) = (rows, rows);
        for i in (0..16).step_by(2) {
            y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
            y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
        }
        for i in (0..16).step_by(4) {
            for half in 0..2 {
                x[i + 2 * half] = _mm512_unpacklo_epi64(y[i + half], y[i + half + 2]);
                x[i + 2 * half + 1] = _mm512_unpackhi_epi64(y[i + half], y[i + half + 2]);
            }
        }
        for i in 0..4 {
            for half in [0, 8] {
                y[half + i] = _mm512_shuffle_i32x4::<0x88>(x[half + i], x[half + i + 4]);
                y[half + i + 4] = _mm512_shuffle_i32x4::<0xdd>(x[half + i], x[half + i + 4]);
            }
        }
        for i in 0..8 {
            x[i] = _mm512_shuffle_i32x4::<0x88>(y[i], y[i + 8]);
            x[i + 8] = _mm512_shuffle_i32x4::<0xdd>(y[i], y[i + 8]);
        }
        x
    }

    /// All register tiles: a few rows of A stay in the L1 cache while the strips of B pass.
    ///
    /// # Safety
    /// The panels hold `depth` pairs of all rows and columns of the tile; the rest as for [`blocks`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn strips<const BY_ROW: bool>(tile: Tile, add: bool, a: &[u32], b: &[u32], depth: usize) {
        let mut i = 0;
        // SAFETY: the caller's guarantee.
        unsafe {
            while i < tile.m {
                i += match tile.m - i {
                    ROWS.. => across::<BY_ROW, ROWS>(tile, i, add, a, b, depth),
                    4.. => across::<BY_ROW, 4>(tile, i, add, a, b, depth),
                    2.. => across::<BY_ROW, 2>(tile, i, add, a, b, depth),
                    _ => across::<BY_ROW, 1>(tile, i, add, a, b, depth),
                };
            }
        }
    }

    /// `ROWS` rows from row i on, strip by strip; returns `ROWS`.
    ///
    /// # Safety
    /// The caller's guarantee is that of [`strips`]; the tile has these rows.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn across<const BY_ROW: bool, const ROWS: usize>(
        tile: Tile,
        i: usize,
        add: bool,
        a: &[u32],
        b: &[u32],
        depth: usize,
    ) -> usize {
        let a = a[if BY_ROW { i * A_ROW } else { i }..].as_ptr();
        for j in (0..tile.n).step_by(WIDTH) {
            let b = b[j * PAIRS..].as_ptr();
            // SAFETY: row i and column j are inside the tile; the rest is the caller's guarantee.
            unsafe {
                let part = Tile { c: tile.c.add(i * tile.row_stride + j), n: WIDTH.min(tile.n - j), ..tile };
                match part.n.div_ceil(16) {
                    1 => registers::<BY_ROW, ROWS, 1>(part, add, a, b, depth),
                    2 => registers::<BY_ROW, ROWS, 2>(part, add, a, b, depth),
                    _ => registers::<BY_ROW, ROWS, 3>(part, add, a, b, depth),
                }
            }
        }
        ROWS
    }

    /// `ROWS` rows of `WIDE` vectors, the last of which may be partly outside.
    ///
    /// # Safety
    /// The caller's guarantee is that of [`strips`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn registers<const BY_ROW: bool, const ROWS: usize, const WIDE: usize>(
        part: Tile,
        add: bool,
        a: *const u32,
        b: *const u32,
        depth: usize,
    ) {
        let (down, along) = if BY_ROW { (A_ROW, 1) } else { (1, A_COLUMN) };
        let mut sums = [[_mm512_setzero_ps(); WIDE]; ROWS];
        // SAFETY: pairs and lanes stay inside the panels, masked lanes inside C, by the caller's guarantee.
        unsafe {
            for l in 0..depth {
                let b: [__m512bh; WIDE] =
                    std::array::from_fn(|v| pairs(_mm512_loadu_si512(b.add(l * WIDTH + 16 * v).cast())));
                for (i, sums) in sums.iter_mut().enumerate() {
                    let a = pairs(_mm512_set1_epi32(*a.add(i * down + l * along) as i32));
                    for (sum, b) in sums.iter_mut().zip(b) {
                        *sum = _mm512_dpbf16_ps(*sum, a, b);
                    }
                }
            }
            for (i, sums) in sums.iter().enumerate() {
                for (v, sum) in sums.iter().enumerate() {
                    let c = part.c.add(i * part.row_stride + 16 * v);
                    let mask = u16::MAX >> (16 - (part.n - 16 * v).min(16));
                    let old = if add { _mm512_maskz_loadu_ps(mask, c) } else { _mm512_setzero_ps() };
                    _mm512_mask_storeu_ps(c, mask, _mm512_add_ps(old, *sum));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::simd::{Level, level};
    use crate::testing::{Values, cast, inner};

    /// A stored matrix [outer, inner] or [inner, outer] with unused elements between its rows.
    struct Operand {
        data: Vec<bf16>,
        stride: usize,
        outer_first: bool,
    }

    impl Operand {
        fn new(outer: usize, inner: usize, outer_first: bool, gap: usize, seed: u64) -> Operand {
            let (rows, columns) = if outer_first { (outer, inner) } else { (inner, outer) };
            let stride = columns + gap;
            Operand { data: cast(&Values::new(seed).take(rows * stride, 1.0)), stride, outer_first }
        }

        fn side(&self) -> Side<'_, bf16> {
            Side { data: &self.data, stride: self.stride, outer_first: self.outer_first }
        }

        fn at(&mut self, outer: usize, inner: usize) -> &mut bf16 {
            let (i, j) = if self.outer_first { (outer, inner) } else { (inner, outer) };
            &mut self.data[i * self.stride + j]
        }
    }

    /// Returns true if the machine supports the product; otherwise C is unchanged.
    fn run(
        c: &mut [f32],
        stride: usize,
        add: bool,
        a: &Operand,
        b: &Operand,
        sizes: (usize, usize, usize),
    ) -> bool {
        let before = c.to_vec();
        let mut panels = vec![f32::NAN; SCRATCH];
        // SAFETY: C is borrowed mutably.
        let done = unsafe {
            matmul_tile_bf16(&Shared::new(c), 0, stride, add, a.side(), b.side(), sizes, &mut panels)
        };
        assert_eq!(done, level() >= Level::Avx512Bf16);
        assert!(done || c.iter().zip(&before).all(|(c, before)| c.to_bits() == before.to_bits()));
        done
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// |error| <= (k + 3) 2^-24 sum |a b|: that of a sum in f32 in any order.
        #[test]
        fn any_shape_and_layout_agrees_with_a_triple_loop(
            m in prop_oneof![1usize..30, 250usize..=M], n in prop_oneof![1usize..110, 500usize..=N],
            k in prop_oneof![1usize..70, 510usize..530],
            by in any::<(bool, bool)>(), gap in 0usize..3, add in any::<bool>(), seed in any::<u64>(),
        ) {
            // Large in two directions at most: the triple loop takes its time.
            let m = if n > 400 && k > 400 { m.min(20) } else { m };
            let (mut a, mut b) = (Operand::new(m, k, by.0, gap, seed), Operand::new(n, k, by.1, gap, seed ^ 1));
            let before: Vec<f32> = cast(&Values::new(seed ^ 2).take(m * (n + gap), 1.0));
            let mut c = before.clone();
            if run(&mut c, n + gap, add, &a, &b, (m, n, k)) {
                for i in 0..m {
                    for j in 0..n + gap {
                        let at = i * (n + gap) + j;
                        if j >= n {
                            prop_assert_eq!(c[at], before[at], "between rows");
                            continue;
                        }
                        let old = if add { before[at] as f64 } else { 0.0 };
                        let (mut sum, mut size) = (old, old.abs());
                        for l in 0..k {
                            let term = a.at(i, l).to_f64() * b.at(j, l).to_f64();
                            (sum, size) = (sum + term, size + term.abs());
                        }
                        let limit = (k + 3) as f64 * 2f64.powi(-24) * size;
                        prop_assert!((c[at] as f64 - sum).abs() <= limit, "({i}, {j}): {} {sum}", c[at]);
                    }
                }
            }
        }
    }

    #[test]
    fn the_bits_of_an_element_do_not_depend_on_the_shape_around_it() {
        let k = 1301;
        let (a, b) = (Operand::new(45, k, true, 0, 1), Operand::new(130, k, false, 0, 2));
        let mut whole = vec![0.0; 45 * 130];
        run(&mut whole, 130, false, &a, &b, (45, 130, k));
        for (i, j) in [(0, 0), (7, 47), (8, 48), (43, 100), (44, 129)] {
            let mut one = [0.0];
            let a = Operand { data: a.data[i * k..].to_vec(), ..a };
            let b = Operand { data: b.data[j..].to_vec(), ..b };
            run(&mut one, 1, false, &a, &b, (1, 1, k));
            assert_eq!(one[0], whole[i * 130 + j]);
        }
    }

    #[test]
    fn a_dot_product_of_any_length_agrees_with_f64() {
        if level() < Level::Avx512Bf16 {
            return;
        }
        for n in [0, 1, 2, 31, 32, 33, 127, 128, 129, 300, 1000] {
            let (x, y) = (Values::new(n).take(n as usize, 1.0), Values::new(n + 1).take(n as usize, 1.0));
            // SAFETY: this machine has the level.
            let got = unsafe { dot_bf16(&cast::<bf16>(&x), &cast::<bf16>(&y)) } as f64;
            let size: f64 = x.iter().zip(&y).map(|(x, y)| (x * y).abs()).sum();
            assert!((got - inner(&x, &y)).abs() <= (n + 3) as f64 * 2f64.powi(-24) * size, "{n}: {got}");
        }
    }

    #[test]
    fn zeros_give_zero_and_huge_values_infinity() {
        for k in [1, 2, 7] {
            let (mut a, mut b) = (Operand::new(9, k, true, 0, 3), Operand::new(50, k, true, 0, 4));
            a.data.fill(bf16::ZERO);
            let mut c = vec![f32::NAN; 9 * 50];
            if run(&mut c, 50, false, &a, &b, (9, 50, k)) {
                assert!(c.iter().all(|c| *c == 0.0));
                a.data.fill(bf16::MAX);
                b.data.fill(bf16::from_f32(2.0));
                run(&mut c, 50, false, &a, &b, (9, 50, k));
                assert!(c.iter().all(|c| *c == f32::INFINITY));
            }
        }
    }

    #[test]
    fn non_finite_values_reach_only_their_row_and_column() {
        for (value, layout) in
            [(f32::INFINITY, true), (f32::NAN, true), (f32::NEG_INFINITY, false), (f32::NAN, false)]
        {
            let (mut a, mut b) = (Operand::new(11, 33, layout, 0, 5), Operand::new(70, 33, layout, 0, 6));
            *a.at(8, 32) = bf16::from_f32(value);
            *b.at(49, 31) = bf16::from_f32(value);
            let mut c = vec![0.0; 11 * 70];
            if run(&mut c, 70, true, &a, &b, (11, 70, 33)) {
                for (at, c) in c.iter().enumerate() {
                    assert_eq!(c.is_finite(), at / 70 != 8 && at % 70 != 49, "{value}: element {at} is {c}");
                }
                assert_eq!(c[8 * 70].is_nan(), value.is_nan());
            }
        }
    }

    #[test]
    fn subnormal_values_count_as_zero() {
        let (mut a, mut b) = (Operand::new(1, 2, true, 0, 7), Operand::new(1, 2, true, 0, 8));
        a.data.fill(bf16::from_bits(1));
        b.data.fill(bf16::MAX);
        let mut c = [1.0];
        if run(&mut c, 1, false, &a, &b, (1, 1, 2)) {
            assert_eq!(c, [0.0]);
        }
    }
}
