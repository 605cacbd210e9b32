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
    let mut check = |add: bool, left: Left<'_>, factor: &dyn Fn(usize, usize) -> f32, b: &Matrix<bf16>| {
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
        unsafe { matmul_tile_amx(sums, a.side(true), b.side(false), (1, 1, k), &mut panels, &mut |_| {}) };
    });
    let problem = result.unwrap_err();
    assert!(problem.downcast_ref::<&str>().is_some_and(|problem| problem.contains("several blocks")));
}

#[test]
fn tiles_fit_the_panels_and_keep_all_threads_busy() {
    for threads in [1, 2, 7, 64] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        for (m, n, k) in [(1, 1, 1), (24, 3584, 1024), (1024, 3584, 1024), (1024, 1024, 3584), (9, 5000, 400)]
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
