//! Matrix products on one thread.
//!
//! C = alpha A B + beta C, where A, B and C are strided views. The result depends on shapes and values alone.
//! Products go to the `gemm` crates, which pack their operands, but for these: the module `small` multiplies
//! blocks that are in a cache already, `packed` tiles of large linear layers on AVX2, `bf16` two operands stored
//! in bf16, `amx` tiles on AMX. [`matmul_f64`] is for references in f64.
//!
//! # Example
//! ```
//! use ballast_kernels::matmul::{Mat, matmul, matmul_add};
//!
//! let (a, b, mut c) = ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0], [0.0; 2]);
//! let (a, b) = (Mat::dense(&a, 2, 2), Mat::dense(&b, 2, 1));
//! matmul(&mut c, 1.0, a, b);
//! assert_eq!(c, [17.0, 39.0]);
//! matmul_add(&mut c, 2.0, a.t(), b);
//! assert_eq!(c, [63.0, 107.0]);
//! ```

mod amx;
mod bf16;
mod packed;
mod small;

pub(crate) use amx::{
    AMX_STRIP, Left, SCRATCH as AMX_SCRATCH, Sums, amx_tile, is_amx, is_one_block, matmul_amx,
    matmul_tile_amx,
};
pub(crate) use bf16::{SCRATCH as BF16_SCRATCH, dot_bf16, matmul_tile_bf16};
pub(crate) use packed::{SCRATCH as PACKED_SCRATCH, is_packed, matmul_tile_packed};
pub(crate) use small::{By, Onto, matmul_small};

use std::ops::Range;

use gemm_common::Parallelism;

use crate::shared::Shared;

/// A matrix inside a slice: element (i, j) is `data[i * row_stride + j * column_stride]`.
#[derive(Clone, Copy)]
pub struct Mat<'a, T = f32> {
    data: &'a [T],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T> Mat<'a, T> {
    /// Row-major matrix with `row_stride` elements from row to row.
    ///
    /// # Panics
    /// If the slice is too short.
    pub fn new(data: &'a [T], rows: usize, columns: usize, row_stride: usize) -> Mat<'a, T> {
        assert!(
            extent(rows, columns, row_stride).is_some_and(|needed| needed <= data.len()),
            "a {rows}x{columns} matrix with row stride {row_stride} does not fit in {} elements",
            data.len()
        );
        // The stride of a single row may be any number. It is replaced, so that it is never multiplied.
        let row_stride = if rows > 1 && columns > 0 { row_stride } else { columns };
        Mat { data, rows, columns, row_stride, column_stride: 1 }
    }

    /// Row-major matrix without gaps.
    pub fn dense(data: &'a [T], rows: usize, columns: usize) -> Mat<'a, T> {
        Mat::new(data, rows, columns, columns)
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Row i.
    ///
    /// # Panics
    /// If the rows are not contiguous, or there is no such row.
    pub fn row(&self, i: usize) -> &'a [T] {
        assert!(self.column_stride == 1 && i < self.rows, "row {i} of {}", self.rows);
        &self.data[i * self.row_stride..i * self.row_stride + self.columns]
    }

    /// Block of these rows and columns.
    ///
    /// # Panics
    /// If the block is not inside.
    pub fn part(self, rows: Range<usize>, columns: Range<usize>) -> Mat<'a, T> {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        assert!(
            columns.start <= columns.end && columns.end <= self.columns,
            "columns {columns:?} of {}",
            self.columns
        );
        let data = if rows.is_empty() || columns.is_empty() {
            &[]
        } else {
            &self.data[rows.start * self.row_stride + columns.start * self.column_stride..]
        };
        Mat { data, rows: rows.len(), columns: columns.len(), ..self }
    }

    /// Transpose; no data is moved.
    pub fn t(self) -> Mat<'a, T> {
        Mat {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// The matrix as a left factor; its transpose is one as a right factor.
    fn side(self) -> Side<'a, T> {
        let outer_first = self.column_stride == 1;
        let stride = if outer_first { self.row_stride } else { self.column_stride };
        Side { data: self.data, stride, outer_first }
    }
}

/// A or B, seen from its outer index o (a row of A, a column of B) and the inner index l.
#[derive(Clone, Copy)]
pub(crate) struct Side<'a, T> {
    pub(crate) data: &'a [T],
    /// Stride of the index that is stored first.
    pub(crate) stride: usize,
    /// True if (o, l) is at `o * stride + l`, false if it is at `l * stride + o`.
    pub(crate) outer_first: bool,
}

/// Tile of C [m, n] whose rows are `row_stride` apart, while other threads write other tiles.
#[derive(Clone, Copy)]
struct Tile {
    c: *mut f32,
    row_stride: usize,
    m: usize,
    n: usize,
}

impl Tile {
    /// Tile from element `begin` of C on.
    ///
    /// # Panics
    /// If the tile is not inside C, or its rows overlap.
    fn new(c: &Shared<'_, f32>, begin: usize, row_stride: usize, m: usize, n: usize) -> Tile {
        assert!(row_stride >= n, "rows of C overlap");
        let c = c.pointer(begin, extent(m, n, row_stride).expect("C is too short"));
        Tile { c, row_stride, m, n }
    }
}

/// Returns true if it pays to pack the operands of a product C [m, n] = A [m, k] B [k, n] in our own order.
fn is_large((m, n, k): (usize, usize, usize)) -> bool {
    const FEWEST_ROWS: usize = 24;
    const FEWEST_PRODUCTS: usize = 1 << 24;
    m >= FEWEST_ROWS && m.saturating_mul(n).saturating_mul(k) >= FEWEST_PRODUCTS
}

/// Number of elements from the first to the last of a row-major matrix, including gaps between rows; `None`
/// if it does not fit in a `usize`. Unsafe code relies on it: every offset of an element is below it and does
/// not wrap.
fn extent(rows: usize, columns: usize, row_stride: usize) -> Option<usize> {
    if rows == 0 || columns == 0 { Some(0) } else { (rows - 1).checked_mul(row_stride)?.checked_add(columns) }
}

/// Row-major C [rows, columns] = alpha A B + beta C, where C's rows are `row_stride` apart. With beta = 0 the
/// old content of C is not read.
///
/// # Panics
/// If the shapes do not match.
pub fn matmul_strided(c: &mut [f32], row_stride: usize, alpha: f32, a: Mat<'_>, b: Mat<'_>, beta: f32) {
    strided(c, row_stride, alpha, a, b, beta);
}

/// [`matmul_strided`] in f64.
///
/// # Panics
/// If the shapes do not match.
pub fn matmul_f64(c: &mut [f64], row_stride: usize, alpha: f64, a: Mat<'_, f64>, b: Mat<'_, f64>, beta: f64) {
    strided(c, row_stride, alpha, a, b, beta);
}

fn strided<T: Real>(c: &mut [T], row_stride: usize, alpha: T, a: Mat<'_, T>, b: Mat<'_, T>, beta: T) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    assert_eq!(k, b.rows, "inner sizes");
    if m == 0 || n == 0 {
        return;
    }
    let fits = extent(m, n, row_stride).is_some_and(|needed| needed <= c.len());
    assert!(row_stride >= n && fits, "C is too short");
    // SAFETY: the lines above have checked C, which is borrowed mutably, so it overlaps neither A nor B.
    unsafe { product(c.as_mut_ptr(), row_stride, alpha, a, b, beta) }
}

/// [`matmul_strided`] into a tile of C whose first element is `begin`, while other threads write other tiles.
///
/// # Safety
/// No part of the tile's rows, gaps between rows excepted, may be read or written elsewhere during the call.
///
/// # Panics
/// If the shapes do not match.
pub(crate) unsafe fn matmul_tile(
    c: &Shared<'_, f32>,
    begin: usize,
    row_stride: usize,
    a: Mat<'_>,
    b: Mat<'_>,
    beta: f32,
) {
    let (m, n) = (a.rows, b.columns);
    assert_eq!(a.columns, b.rows, "inner sizes");
    if m == 0 || n == 0 {
        return;
    }
    let tile = Tile::new(c, begin, row_stride, m, n);
    // SAFETY: the tile lies inside C; exclusive by the caller's guarantee.
    unsafe { product(tile.c, row_stride, 1.0, a, b, beta) }
}

/// # Safety
/// `c` points to m rows of n elements, `row_stride` apart, that nothing else uses.
unsafe fn product<T: Real>(c: *mut T, row_stride: usize, alpha: T, a: Mat<'_, T>, b: Mat<'_, T>, beta: T) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    let row_stride = if m > 1 { row_stride } else { n };
    let reads_c = beta != T::default();
    let (a_data, a_columns, a_rows) = (a.data.as_ptr(), a.column_stride as isize, a.row_stride as isize);
    let (b_data, b_columns, b_rows) = (b.data.as_ptr(), b.column_stride as isize, b.row_stride as isize);
    let (gemm, none, stride) = (T::gemm(), Parallelism::None, row_stride as isize);
    // SAFETY: every element of A and B that the product touches lies inside its slice, as `Mat::new` has
    // checked; C by the caller's guarantee.
    unsafe {
        // The microkernels prefer a column-major C. A row-major C is computed as C^T = B^T A^T.
        if stride > 1 {
            gemm(
                n, m, k, c, stride, 1, reads_c, b_data, b_rows, b_columns, a_data, a_rows, a_columns, beta,
                alpha, false, false, false, none,
            );
        } else {
            gemm(
                m, n, k, c, 1, stride, reads_c, a_data, a_columns, a_rows, b_data, b_columns, b_rows, beta,
                alpha, false, false, false, none,
            );
        }
    }
}

/// C [m, n] = beta C + alpha A B in the arguments of the `gemm` crates: m, n, k; C, its column and row
/// stride, and whether it is read; A and B with their strides; beta, alpha; three flags for complex numbers;
/// the parallelism.
type Gemm<T> = unsafe fn(
    usize,
    usize,
    usize,
    *mut T,
    isize,
    isize,
    bool,
    *const T,
    isize,
    isize,
    *const T,
    isize,
    isize,
    T,
    T,
    bool,
    bool,
    bool,
    Parallelism,
);

/// A type that the `gemm` crates multiply.
trait Real: Copy + Default + PartialEq {
    /// The product for this machine's instruction set.
    fn gemm() -> Gemm<Self>;
}

impl Real for f32 {
    fn gemm() -> Gemm<f32> {
        gemm_f32::gemm::f32::get_gemm_fn()
    }
}

impl Real for f64 {
    fn gemm() -> Gemm<f64> {
        gemm_f64::gemm::f64::get_gemm_fn()
    }
}

/// Dense C = alpha A B.
pub fn matmul(c: &mut [f32], alpha: f32, a: Mat<'_>, b: Mat<'_>) {
    matmul_strided(c, b.columns, alpha, a, b, 0.0);
}

/// Dense C += alpha A B.
pub fn matmul_add(c: &mut [f32], alpha: f32, a: Mat<'_>, b: Mat<'_>) {
    matmul_strided(c, b.columns, alpha, a, b, 1.0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Element;
    use proptest::prelude::*;

    pub(super) fn values(n: usize, seed: u32) -> Vec<f32> {
        (0..n as u32)
            .map(|i| ((i.wrapping_mul(2654435761).wrapping_add(seed) >> 16) as f32 / 65536.0) - 0.5)
            .collect()
    }

    /// A matrix [rows, columns], stored by rows or transposed, and its values in f32.
    pub(super) struct Matrix<T> {
        pub(super) stored: Vec<T>,
        wide: Vec<f32>,
        pub(super) rows: usize,
        pub(super) columns: usize,
        transposed: bool,
    }

    impl<T: Element> Matrix<T> {
        /// Values that need all bits of an f32.
        pub(super) fn new(rows: usize, columns: usize, transposed: bool, seed: u32) -> Matrix<T> {
            let stored = values(rows * columns, seed).into_iter().map(|x| T::from_f32(x / 3.0)).collect();
            Matrix::from_stored(stored, rows, columns, transposed)
        }

        pub(super) fn from_stored(
            stored: Vec<T>,
            rows: usize,
            columns: usize,
            transposed: bool,
        ) -> Matrix<T> {
            let wide = stored.iter().map(|x| x.to_f32()).collect();
            Matrix { stored, wide, rows, columns, transposed }
        }

        pub(super) fn side(&self, outer_is_row: bool) -> Side<'_, T> {
            let stride = if self.transposed { self.rows } else { self.columns };
            Side { data: &self.stored, stride, outer_first: outer_is_row != self.transposed }
        }

        pub(super) fn mat(&self) -> Mat<'_> {
            match self.transposed {
                true => Mat::dense(&self.wide, self.columns, self.rows).t(),
                false => Mat::dense(&self.wide, self.rows, self.columns),
            }
        }

        pub(super) fn stored_mat(&self) -> Mat<'_, T> {
            match self.transposed {
                true => Mat::dense(&self.stored, self.columns, self.rows).t(),
                false => Mat::dense(&self.stored, self.rows, self.columns),
            }
        }

        pub(super) fn at(&self, i: usize, j: usize) -> f32 {
            self.wide[self.index(i, j)]
        }

        pub(super) fn set(&mut self, i: usize, j: usize, value: f32) {
            let at = self.index(i, j);
            (self.stored[at], self.wide[at]) = (T::from_f32(value), value);
        }

        fn index(&self, i: usize, j: usize) -> usize {
            if self.transposed { j * self.rows + i } else { i * self.columns + j }
        }
    }

    /// Root mean square error of C = A B without gaps, against f64.
    pub(super) fn rms_error<T: Element>(c: &[f32], a: &Matrix<T>, b: &Matrix<T>) -> f64 {
        let exact = |i, j| -> f64 { (0..a.columns).map(|l| a.at(i, l) as f64 * b.at(l, j) as f64).sum() };
        let error = |(at, c): (usize, &f32)| *c as f64 - exact(at / b.columns, at % b.columns);
        (c.iter().enumerate().map(error).map(|e| e * e).sum::<f64>() / c.len() as f64).sqrt()
    }

    /// Asserts that `call` refuses a tile that is too large or outside of C, and panels that are too short. Its
    /// arguments are C, its row stride, both operands, the shape and the panels.
    pub(super) fn assert_refusals(
        scratch: usize,
        call: impl Fn(&Shared<'_, f32>, usize, Side<'_, f32>, (usize, usize, usize), &mut [f32]),
    ) {
        let data = vec![0f32; 600 * 40];
        let side = Side { data: &data[..], stride: 40, outer_first: true };
        let refused = |c: usize, shape, stride, panels: usize| {
            let (mut c, mut panels) = (vec![0.0; c], vec![0.0; panels]);
            let call = || call(&Shared::new(&mut c), stride, side, shape, &mut panels);
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err()
        };
        assert!(refused(600 * 32, (32, 600, 8), 600, scratch), "too many columns");
        assert!(refused(32 * 32 - 1, (32, 32, 8), 32, scratch), "C is too short");
        assert!(refused(32 * 32, (32, 32, 8), 31, scratch), "rows of C overlap");
        assert!(refused(32 * 32, (32, 32, 8), 32, scratch - 1), "panels are too short");
        assert!(!refused(32 * 32, (32, 32, 8), 32, scratch));
    }

    proptest! {
        #[test]
        fn any_shape_stride_and_transpose_agrees_with_a_triple_loop(
            m in 0usize..20, n in 0usize..20, k in 0usize..20,
            ta in any::<bool>(), tb in any::<bool>(), add in any::<bool>(), gap in 0usize..3,
        ) {
            let (ra, ca) = if ta { (k, m) } else { (m, k) };
            let (rb, cb) = if tb { (n, k) } else { (k, n) };
            let (a, b) = (values(ra * (ca + gap), 1), values(rb * (cb + gap), 2));
            let mut c = values(m * (n + gap), 3);
            let before = c.clone();
            let view = |data, rows, columns, t: bool| {
                let mat = Mat::new(data, rows, columns, columns + gap);
                if t { mat.t() } else { mat }
            };
            matmul_strided(&mut c, n + gap, 0.5, view(&a, ra, ca, ta), view(&b, rb, cb, tb), if add { 1.0 } else { 0.0 });
            for i in 0..m {
                for j in 0..n + gap {
                    let old = before[i * (n + gap) + j] as f64;
                    if j >= n {
                        prop_assert_eq!(c[i * (n + gap) + j] as f64, old);
                        continue;
                    }
                    let sum: f64 = (0..k).map(|l| {
                        let x = if ta { a[l * (ca + gap) + i] } else { a[i * (ca + gap) + l] };
                        let y = if tb { b[j * (cb + gap) + l] } else { b[l * (cb + gap) + j] };
                        x as f64 * y as f64
                    }).sum();
                    let expected = 0.5 * sum + if add { old } else { 0.0 };
                    prop_assert!((c[i * (n + gap) + j] as f64 - expected).abs() < 1e-5);
                }
            }
        }
    }

    #[test]
    fn a_part_has_the_rows_and_columns_asked_for_also_of_a_transpose() {
        let data: Vec<f32> = (0..12).map(|x| x as f32).collect();
        let part = Mat::dense(&data, 3, 4).part(1..3, 2..4);
        assert_eq!((part.row(0), part.row(1)), (&[6.0, 7.0][..], &[10.0, 11.0][..]));
        let part = Mat::dense(&data, 3, 4).t().part(2..4, 1..3).t();
        assert_eq!((part.row(0), part.row(1)), (&[6.0, 7.0][..], &[10.0, 11.0][..]));
        assert_eq!(Mat::dense(&data, 3, 4).part(3..3, 0..4).rows(), 0);
    }

    #[test]
    fn in_f64_no_digit_of_f32_is_lost() {
        let (a, b) = (values(40 * 70, 1), values(50 * 70, 2));
        let [wide_a, wide_b] = [&a, &b].map(|x| x.iter().map(|x| *x as f64).collect::<Vec<f64>>());
        let (gap, mut c) = (3, vec![1.0; 40 * 53]);
        let (rows, columns) = (Mat::dense(&wide_a, 40, 70), Mat::dense(&wide_b, 50, 70).t());
        matmul_f64(&mut c, 50 + gap, 2.0, rows, columns, 1.0);
        for (i, row) in c.chunks(50 + gap).enumerate() {
            for (j, got) in row[..50].iter().enumerate() {
                let products = (0..70).map(|l| a[i * 70 + l] as f64 * b[j * 70 + l] as f64);
                assert!((got - 1.0 - 2.0 * products.sum::<f64>()).abs() < 1e-13);
            }
            assert_eq!(row[50..], [1.0; 3]);
        }
    }

    #[test]
    fn without_addition_the_old_content_is_not_read() {
        let mut c = [f32::NAN; 4];
        matmul(&mut c, 1.0, Mat::dense(&[1.0, 2.0], 2, 1), Mat::dense(&[3.0, 4.0], 1, 2));
        assert_eq!(c, [3.0, 4.0, 6.0, 8.0]);
    }

    /// Each shape is far larger than its slice, and its size wraps to 0 or to a small number.
    #[test]
    fn a_size_that_wraps_is_refused() {
        let half = 1usize << (usize::BITS / 2);
        let huge = usize::MAX / 2 + 2;
        let refused = |call: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err();
        assert!(refused(&|| _ = Mat::dense(&[0f32; 0], half, half)));
        assert!(refused(&|| _ = Mat::dense(&[0.0f64; 4], half, half)));
        assert!(refused(&|| _ = Mat::new(&[0f32; 4], 3, 2, huge)));
        assert!(refused(&|| _ = Mat::new(&[0f32; 4], 2, 2, usize::MAX)));
        let (a, b) = (Mat::dense(&[1.0, 2.0, 3.0], 3, 1), Mat::dense(&[4.0], 1, 1));
        assert!(refused(&|| matmul_strided(&mut [0.0; 4], huge, 1.0, a, b, 0.0)));
        assert!(refused(&|| matmul_small(&mut [0.0; 4], huge, Onto::Nothing, By::All(1.0), a, b)));
        // SAFETY: C is this call's alone.
        assert!(refused(&|| unsafe { matmul_tile(&Shared::new(&mut [0.0; 4]), 0, huge, a, b, 0.0) }));
    }

    #[test]
    fn empty_matrices_of_any_stride_make_zeros_and_are_never_read() {
        let (a, b) = (Mat::new(&[], 3, 0, usize::MAX), Mat::new(&[], 0, 40, usize::MAX));
        let mut c = [1.0f32; 120];
        matmul_small(&mut c, 40, Onto::Nothing, By::All(1.0), a, b);
        assert_eq!(c, [0.0; 120]);
        let part = Mat::new(&[0f32; 4], 1, 4, usize::MAX).part(1..1, 0..4);
        assert_eq!((part.rows(), part.columns()), (0, 4));
    }
}
