//! Products of small blocks that are in a cache already, without packing.
//!
//! C is computed in tiles that stay in registers: a row of B is read as vectors, an element of A is
//! broadcast, and one chain of multiply-adds runs over the inner index from first to last. So the bits of an
//! element depend on its row of A and its column of B alone, not on the shape, and are the same with AVX2 and
//! AVX-512. A may have any strides. If the rows of B are not contiguous, a panel of a few columns is first
//! transposed into a buffer on the stack.

use super::{Mat, extent};
use crate::simd::{Level, level};

/// Rows of B in one panel; a longer inner index is cut into parts that are added up.
const DEPTH: usize = 128;
/// Columns of B in one panel.
const WIDTH: usize = 32;

/// Factor of the product.
#[derive(Clone, Copy)]
pub(crate) enum By<'a> {
    /// The same for every element.
    All(f32),
    /// The i-th for row i.
    Rows(&'a [f32]),
}

/// Addend of the product.
#[derive(Clone, Copy)]
pub(crate) enum Onto<'a> {
    /// Zero: the old content is not read.
    Nothing,
    /// C times a number.
    Itself(f32),
    /// Another matrix of the same shape and stride, times a number.
    Other(f32, &'a [f32]),
}

/// Row-major C [rows, columns] = onto + by A B, where C's rows are `row_stride` apart.
///
/// # Panics
/// If the shapes do not match.
pub(crate) fn matmul_small(
    c: &mut [f32],
    row_stride: usize,
    onto: Onto<'_>,
    by: By<'_>,
    a: Mat<'_>,
    b: Mat<'_>,
) {
    matmul_small_at(level(), c, row_stride, onto, by, a, b);
}

/// [`matmul_small`] with the instructions of `level`, which the machine must have.
fn matmul_small_at(
    level: Level,
    c: &mut [f32],
    row_stride: usize,
    onto: Onto<'_>,
    by: By<'_>,
    a: Mat<'_>,
    b: Mat<'_>,
) {
    let (m, n) = (a.rows, b.columns);
    assert_eq!(a.columns, b.rows, "inner sizes");
    assert!(level <= crate::simd::detected(), "this machine has no {level:?}");
    if m == 0 || n == 0 {
        return;
    }
    let needed = extent(m, n, row_stride).filter(|needed| *needed <= c.len());
    let needed = needed.filter(|_| row_stride >= n).expect("C is too short");
    if let By::Rows(factors) = by {
        assert!(factors.len() >= m, "{m} rows need as many factors, got {}", factors.len());
    }
    let (beta, old) = match onto {
        Onto::Nothing => (0.0, c.as_ptr()),
        Onto::Itself(beta) => (beta, c.as_ptr()),
        Onto::Other(beta, other) => {
            assert!(other.len() >= needed, "the addend is too short");
            (beta, other.as_ptr())
        }
    };
    let whole = Block { c: c.as_mut_ptr(), old, row_stride, beta, by, a, b };
    // SAFETY: C and the addend have been checked above, A and B by `Mat::new`; C is borrowed mutably, so
    // nothing overlaps it but the addend that is C itself, of which an element is read before it is written.
    // The level has been found on this machine.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Avx512Bf16 | Level::Amx => blocks_avx512(whole),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => blocks_avx2(whole),
            _ => blocks::<[f32; 8], 4>(whole),
        }
    }
}

/// Product with checked operands.
struct Block<'a> {
    c: *mut f32,
    old: *const f32,
    row_stride: usize,
    beta: f32,
    by: By<'a>,
    a: Mat<'a>,
    b: Mat<'a>,
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn blocks_avx512(whole: Block<'_>) {
    // SAFETY: the caller's guarantee.
    unsafe { blocks::<std::arch::x86_64::__m512, 8>(whole) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn blocks_avx2(whole: Block<'_>) {
    // SAFETY: the caller's guarantee.
    unsafe { blocks::<std::arch::x86_64::__m256, 4>(whole) }
}

/// Panel by panel of B, with tiles of `M` rows and two vectors.
///
/// # Safety
/// The pointers are good for the shapes of A and B; the machine has the instructions of `V`.
#[inline(always)]
unsafe fn blocks<V: Lanes, const M: usize>(whole: Block<'_>) {
    let Block { c, old, row_stride, beta, by, a, b } = whole;
    let (m, n, k) = (a.rows, b.columns, a.columns);
    let mut panel = std::mem::MaybeUninit::<[f32; DEPTH * WIDTH]>::uninit();
    let panel = panel.as_mut_ptr().cast::<f32>();
    // SAFETY: every index stays below the shapes, for which the pointers are good.
    unsafe {
        for l in (0..k.max(1)).step_by(DEPTH) {
            let depth = DEPTH.min(k - l);
            let (beta, old) = if l == 0 { (beta, old) } else { (1.0, c.cast_const()) };
            for j in (0..n).step_by(WIDTH) {
                let columns = WIDTH.min(n - j);
                let mut rows_of_b = b.data.as_ptr().wrapping_add(l * b.row_stride + j * b.column_stride);
                let mut b_stride = b.row_stride;
                if b.column_stride != 1 {
                    transpose::<V>(panel, rows_of_b, (b.column_stride, b.row_stride), columns, depth);
                    (rows_of_b, b_stride) = (panel.cast_const(), WIDTH);
                }
                let mut tile = Tile {
                    c: c.add(j),
                    old: old.add(j),
                    row_stride,
                    beta,
                    by,
                    a: a.data.as_ptr().wrapping_add(l * a.column_stride),
                    a_strides: (a.row_stride, a.column_stride),
                    b: rows_of_b,
                    b_stride,
                    depth,
                    first: 0,
                };
                while tile.first < m {
                    tile.first += match m - tile.first {
                        rows if rows >= M => tile.across::<V, M>(columns),
                        rows if rows >= 4 => tile.across::<V, 4>(columns),
                        2 | 3 => tile.across::<V, 2>(columns),
                        _ => tile.across::<V, 1>(columns),
                    };
                }
            }
        }
    }
}

/// Rows of C from `first` on, at the columns of one panel of B.
struct Tile<'a> {
    c: *mut f32,
    old: *const f32,
    row_stride: usize,
    beta: f32,
    by: By<'a>,
    a: *const f32,
    a_strides: (usize, usize),
    b: *const f32,
    b_stride: usize,
    depth: usize,
    first: usize,
}

impl Tile<'_> {
    /// `M` rows of all the columns; returns `M`.
    ///
    /// # Safety
    /// The caller's guarantee is that of [`blocks`].
    #[inline(always)]
    unsafe fn across<V: Lanes, const M: usize>(&self, columns: usize) -> usize {
        let mut j = 0;
        // SAFETY: the columns stay inside the panel; the rest is the caller's guarantee.
        unsafe {
            while j + 2 * V::N <= columns {
                self.fill::<V, M, 2, true>(j, 2 * V::N);
                j += 2 * V::N;
            }
            while j < columns {
                let width = V::N.min(columns - j);
                if width == V::N {
                    self.fill::<V, M, 1, true>(j, width);
                } else {
                    self.fill::<V, M, 1, false>(j, width);
                }
                j += width;
            }
        }
        M
    }

    /// `M` rows of `W` vectors at column j; a single vector that is not `FULL` has `width` lanes.
    ///
    /// # Safety
    /// The caller's guarantee is that of [`blocks`].
    #[inline(always)]
    unsafe fn fill<V: Lanes, const M: usize, const W: usize, const FULL: bool>(
        &self,
        j: usize,
        width: usize,
    ) {
        // SAFETY: the caller's guarantee; a part of a vector touches `width` elements only.
        unsafe {
            let mut sums = [[V::spread(0.0); W]; M];
            // With an inner size of 0, A and B may be empty: their pointers are moved but never read.
            let mut b = self.b.wrapping_add(j);
            let (down, along) = self.a_strides;
            let mut a = self.a.wrapping_add(self.first * down);
            for _ in 0..self.depth {
                let mut row = [V::spread(0.0); W];
                for (w, row) in row.iter_mut().enumerate() {
                    *row = if FULL { V::load(b.add(w * V::N)) } else { V::load_part(b, width) };
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let x = V::spread(*a.add(i * down));
                    for (sum, row) in sums.iter_mut().zip(row) {
                        *sum = V::multiply_add(x, row, *sum);
                    }
                }
                a = a.wrapping_add(along);
                b = b.wrapping_add(self.b_stride);
            }
            for (i, sums) in sums.iter().enumerate() {
                let at = (self.first + i) * self.row_stride + j;
                let by = match self.by {
                    By::All(by) => by,
                    By::Rows(factors) => *factors.get_unchecked(self.first + i),
                };
                for (w, sum) in sums.iter().enumerate() {
                    let (c, old) = (self.c.add(at + w * V::N), self.old.add(at + w * V::N));
                    let mut result = V::multiply(V::spread(by), *sum);
                    if self.beta != 0.0 {
                        let old = if FULL { V::load(old) } else { V::load_part(old, width) };
                        result = V::multiply_add(V::spread(self.beta), old, result);
                    }
                    if FULL { result.store(c) } else { result.store_part(c, width) }
                }
            }
        }
    }
}

/// Row l of the panel gets column l of a matrix [rows, depth] whose rows are `down` and columns `along`
/// apart.
///
/// # Safety
/// The source is good for that shape, the panel for DEPTH x WIDTH, which the shape does not exceed; the
/// machine has the instructions of `V`.
#[inline(always)]
unsafe fn transpose<V: Lanes>(
    panel: *mut f32,
    source: *const f32,
    (down, along): (usize, usize),
    rows: usize,
    depth: usize,
) {
    // SAFETY: the caller's guarantee.
    unsafe {
        let squares = if along == 1 { (rows / 8 * 8, depth / 8 * 8) } else { (0, 0) };
        for i in (0..squares.0).step_by(8) {
            for l in (0..squares.1).step_by(8) {
                V::transpose_8x8(panel.add(l * WIDTH + i), WIDTH, source.add(i * down + l), down);
            }
        }
        for i in 0..rows {
            for l in if i < squares.0 { squares.1 } else { 0 }..depth {
                *panel.add(l * WIDTH + i) = *source.add(i * down + l * along);
            }
        }
    }
}

/// A vector of f32.
///
/// # Safety
/// Every function needs a machine with the type's instructions; pointers are good for N elements, those of a
/// part for `n` <= N.
trait Lanes: Copy {
    const N: usize;
    unsafe fn spread(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn load_part(from: *const f32, n: usize) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn store_part(self, to: *mut f32, n: usize);
    unsafe fn multiply(a: Self, b: Self) -> Self;
    unsafe fn multiply_add(a: Self, b: Self, c: Self) -> Self;
    /// Eight rows of eight, whose rows are `to_stride` and `from_stride` apart.
    unsafe fn transpose_8x8(to: *mut f32, to_stride: usize, from: *const f32, from_stride: usize);
}

impl Lanes for [f32; 8] {
    const N: usize = 8;

    #[inline(always)]
    unsafe fn spread(x: f32) -> Self {
        [x; 8]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller's guarantee.
        unsafe { from.cast::<[f32; 8]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_part(from: *const f32, n: usize) -> Self {
        let mut lanes = [0.0; 8];
        // SAFETY: the caller's guarantee.
        lanes[..n].copy_from_slice(unsafe { std::slice::from_raw_parts(from, n) });
        lanes
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller's guarantee.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(self) }
    }

    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, n: usize) {
        // SAFETY: the caller's guarantee.
        unsafe { std::slice::from_raw_parts_mut(to, n) }.copy_from_slice(&self[..n]);
    }

    #[inline(always)]
    unsafe fn multiply(a: Self, b: Self) -> Self {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn multiply_add(a: Self, b: Self, c: Self) -> Self {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    unsafe fn transpose_8x8(to: *mut f32, to_stride: usize, from: *const f32, from_stride: usize) {
        for i in 0..8 {
            for j in 0..8 {
                // SAFETY: the caller's guarantee.
                unsafe { *to.add(j * to_stride + i) = *from.add(i * from_stride + j) };
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Lanes;

    // SAFETY of all that follows: the machine has the instructions and the pointers are good, by the caller's
    // guarantee.

    impl Lanes for __m512 {
        const N: usize = 16;

        #[inline(always)]
        unsafe fn spread(x: f32) -> Self {
            // SAFETY: see above.
            unsafe { _mm512_set1_ps(x) }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: see above.
            unsafe { _mm512_loadu_ps(from) }
        }

        #[inline(always)]
        unsafe fn load_part(from: *const f32, n: usize) -> Self {
            // SAFETY: see above; lanes outside the mask are not touched.
            unsafe { _mm512_maskz_loadu_ps(((1u32 << n) - 1) as u16, from) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: see above.
            unsafe { _mm512_storeu_ps(to, self) }
        }

        #[inline(always)]
        unsafe fn store_part(self, to: *mut f32, n: usize) {
            // SAFETY: see above; lanes outside the mask are not touched.
            unsafe { _mm512_mask_storeu_ps(to, ((1u32 << n) - 1) as u16, self) }
        }

        #[inline(always)]
        unsafe fn multiply(a: Self, b: Self) -> Self {
            // SAFETY: see above.
            unsafe { _mm512_mul_ps(a, b) }
        }

        #[inline(always)]
        unsafe fn multiply_add(a: Self, b: Self, c: Self) -> Self {
            // SAFETY: see above.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }

        #[inline(always)]
        unsafe fn transpose_8x8(to: *mut f32, to_stride: usize, from: *const f32, from_stride: usize) {
            // SAFETY: see above; AVX-512 has AVX2 in it.
            unsafe { __m256::transpose_8x8(to, to_stride, from, from_stride) }
        }
    }

    /// All bits in the first n lanes.
    #[inline(always)]
    unsafe fn first_lanes(n: usize) -> __m256i {
        // SAFETY: see above.
        unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
    }

    impl Lanes for __m256 {
        const N: usize = 8;

        #[inline(always)]
        unsafe fn spread(x: f32) -> Self {
            // SAFETY: see above.
            unsafe { _mm256_set1_ps(x) }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: see above.
            unsafe { _mm256_loadu_ps(from) }
        }

        #[inline(always)]
        unsafe fn load_part(from: *const f32, n: usize) -> Self {
            // SAFETY: see above; lanes outside the mask are not touched.
            unsafe { _mm256_maskload_ps(from, first_lanes(n)) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: see above.
            unsafe { _mm256_storeu_ps(to, self) }
        }

        #[inline(always)]
        unsafe fn store_part(self, to: *mut f32, n: usize) {
            // SAFETY: see above; lanes outside the mask are not touched.
            unsafe { _mm256_maskstore_ps(to, first_lanes(n), self) }
        }

        #[inline(always)]
        unsafe fn multiply(a: Self, b: Self) -> Self {
            // SAFETY: see above.
            unsafe { _mm256_mul_ps(a, b) }
        }

        #[inline(always)]
        unsafe fn multiply_add(a: Self, b: Self, c: Self) -> Self {
            // SAFETY: see above.
            unsafe { _mm256_fmadd_ps(a, b, c) }
        }

        #[inline(always)]
        unsafe fn transpose_8x8(to: *mut f32, to_stride: usize, from: *const f32, from_stride: usize) {
            // SAFETY: see above.
            unsafe {
                // Rows i and i + 4 in the halves of one register, four columns at a time.
                for half in 0..2 {
                    let mut rows = [_mm256_setzero_ps(); 4];
                    for (i, row) in rows.iter_mut().enumerate() {
                        let upper = _mm_loadu_ps(from.add(i * from_stride + 4 * half));
                        let lower = _mm_loadu_ps(from.add((i + 4) * from_stride + 4 * half));
                        *row = _mm256_set_m128(lower, upper);
                    }
                    let (a, b) = (_mm256_unpacklo_ps(rows[0], rows[1]), _mm256_unpackhi_ps(rows[0], rows[1]));
                    let (c, d) = (_mm256_unpacklo_ps(rows[2], rows[3]), _mm256_unpackhi_ps(rows[2], rows[3]));
                    let to = to.add(4 * half * to_stride);
                    _mm256_storeu_ps(to, _mm256_shuffle_ps::<0x44>(a, c));
                    _mm256_storeu_ps(to.add(to_stride), _mm256_shuffle_ps::<0xee>(a, c));
                    _mm256_storeu_ps(to.add(2 * to_stride), _mm256_shuffle_ps::<0x44>(b, d));
                    _mm256_storeu_ps(to.add(3 * to_stride), _mm256_shuffle_ps::<0xee>(b, d));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::matmul::tests::values;
    use crate::simd::detected;

    proptest! {
        #[test]
        fn any_shape_stride_and_transpose_agrees_with_a_triple_loop_at_every_level(
            m in 0usize..20, n in 0usize..70, k in prop_oneof![0usize..20, 120usize..140],
            ta in any::<bool>(), tb in any::<bool>(), gap in 0usize..3, onto in 0usize..3, rows in any::<bool>(),
        ) {
            let (ra, ca) = if ta { (k, m) } else { (m, k) };
            let (rb, cb) = if tb { (n, k) } else { (k, n) };
            let (a, b) = (values(ra * (ca + gap), 1), values(rb * (cb + gap), 2));
            let (before, other, factors) = (values(m * (n + gap), 3), values(m * (n + gap), 4), values(m, 5));
            let view = |data, rows, columns, t: bool| {
                let mat = Mat::new(data, rows, columns, columns + gap);
                if t { mat.t() } else { mat }
            };
            let onto = [Onto::Nothing, Onto::Itself(0.7), Onto::Other(-0.3, &other)][onto];
            let by = if rows { By::Rows(&factors) } else { By::All(0.5) };
            let mut fused: Option<Vec<f32>> = None;
            for level in [Level::Portable, Level::Avx2, Level::Avx512] {
                if level > detected() {
                    continue;
                }
                let mut c = before.clone();
                let (a, b) = (view(&a, ra, ca, ta), view(&b, rb, cb, tb));
                matmul_small_at(level, &mut c, n + gap, onto, by, a, b);
                for i in 0..m {
                    for j in 0..n + gap {
                        let at = i * (n + gap) + j;
                        if j >= n {
                            prop_assert_eq!(c[at], before[at]);
                            continue;
                        }
                        let sum: f64 = (0..k).map(|l| {
                            let x = a.data[i * a.row_stride + l * a.column_stride];
                            let y = b.data[l * b.row_stride + j * b.column_stride];
                            x as f64 * y as f64
                        }).sum();
                        let old = match onto {
                            Onto::Nothing => 0.0,
                            Onto::Itself(by) => by as f64 * before[at] as f64,
                            Onto::Other(by, other) => by as f64 * other[at] as f64,
                        };
                        let expected = old + sum * if rows { factors[i] as f64 } else { 0.5 };
                        prop_assert!((c[at] as f64 - expected).abs() < 1e-5, "{level:?}: {} {expected}", c[at]);
                    }
                }
                if level > Level::Portable {
                    let first = fused.get_or_insert_with(|| c.clone());
                    prop_assert_eq!(first, &c, "the same bits with any instructions that fuse");
                }
            }
        }
    }

    #[test]
    fn without_addition_the_old_content_is_not_read() {
        let mut c = [f32::NAN; 4];
        let (a, b) = (Mat::dense(&[1.0, 2.0], 2, 1), Mat::dense(&[3.0, 4.0], 1, 2));
        matmul_small(&mut c, 2, Onto::Nothing, By::All(1.0), a, b);
        assert_eq!(c, [3.0, 4.0, 6.0, 8.0]);
    }
}
