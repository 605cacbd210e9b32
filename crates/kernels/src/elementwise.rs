//! Element-wise and row-wise sums and products, in f32.
//!
//! ```text
//! add          y = a + b
//! accumulate   y += x                                 y in f32
//! accumulate_rounded   y = r(y + x)                   y in f32, r a rounding
//! round        y = r(y)                               y in f32
//! scale        y = s y
//! scale_rows   y_t = x_t r_t                          dx_t = dy_t r_t        dr_t = <dy_t, x_t>
//! ```
//!
//! # Example
//! ```
//! use ballast_kernels::elementwise::{row_products, scale_rows};
//!
//! let (x, factors, width) = ([1.0f32, 2.0, 3.0, 4.0], [10.0, 0.5], 2);
//! let (mut y, mut d_factors) = ([0.0; 4], [0.0; 2]);
//! scale_rows(&mut y, &x, &factors, width)?;
//! assert_eq!(y, [10.0, 20.0, 1.5, 2.0]);
//! row_products(&mut d_factors, &[1.0; 4], &x, width)?;
//! assert_eq!(d_factors, [3.0, 7.0]);
//! # Ok::<(), ballast_kernels::KernelError>(())
//! ```

use rayon::prelude::*;

use crate::error::{Result, check, check_len, check_shape};
use crate::partition::{ELEMENTS, task_rows};
use crate::rounding::{to_bf16, to_f16};
use crate::simd::simd_fn;
use crate::{Element, Rounding};

/// y = a + b.
pub fn add<T: Element>(y: &mut [T], a: &[T], b: &[T]) -> Result {
    check_len("a", a, y.len())?;
    check_len("b", b, y.len())?;
    let tasks = y.par_chunks_mut(ELEMENTS).zip(a.par_chunks(ELEMENTS)).zip(b.par_chunks(ELEMENTS));
    tasks.for_each(|((y, a), b)| add_all(y, a, b));
    Ok(())
}

/// y += x.
pub fn add_assign<T: Element>(y: &mut [T], x: &[T]) -> Result {
    check_len("x", x, y.len())?;
    y.par_chunks_mut(ELEMENTS).zip(x.par_chunks(ELEMENTS)).for_each(|(y, x)| add_to(y, x));
    Ok(())
}

/// y += x, y in f32.
pub fn accumulate<T: Element>(y: &mut [f32], x: &[T]) -> Result {
    check_len("x", x, y.len())?;
    y.par_chunks_mut(ELEMENTS).zip(x.par_chunks(ELEMENTS)).for_each(|(y, x)| accumulate_all(y, x));
    Ok(())
}

/// y = r(y + x), y in f32.
pub fn accumulate_rounded<T: Element>(y: &mut [f32], x: &[T], rounding: Rounding) -> Result {
    check_len("x", x, y.len())?;
    let tasks = y.par_chunks_mut(ELEMENTS).zip(x.par_chunks(ELEMENTS));
    tasks.for_each(|(y, x)| match rounding {
        Rounding::F32 => accumulate_all(y, x),
        Rounding::Bf16 => accumulate_bf16(y, x),
        Rounding::F16 => accumulate_f16(y, x),
    });
    Ok(())
}

/// y = r(y).
pub fn round(y: &mut [f32], rounding: Rounding) {
    if rounding != Rounding::F32 {
        y.par_chunks_mut(ELEMENTS).for_each(|y| rounding.round_all(y));
    }
}

/// y = x, rounded to the storage type of y.
pub fn convert<T: Element>(y: &mut [T], x: &[f32]) -> Result {
    check_len("x", x, y.len())?;
    y.par_chunks_mut(ELEMENTS).zip(x.par_chunks(ELEMENTS)).for_each(|(y, x)| T::store(y, x));
    Ok(())
}

/// y = s y.
pub fn scale<T: Element>(y: &mut [T], by: f32) {
    y.par_chunks_mut(ELEMENTS).for_each(|y| scale_all(y, by));
}

/// y [rows, width] = x, each row times its factor.
pub fn scale_rows<T: Element>(y: &mut [T], x: &[T], factors: &[f32], width: usize) -> Result {
    check_rows(x, factors, width)?;
    check_len("y", y, x.len())?;
    let rows = task_rows(width);
    let tasks = y.par_chunks_mut(rows * width).zip(x.par_chunks(rows * width)).zip(factors.par_chunks(rows));
    tasks.for_each(|((y, x), factors)| {
        for ((y, x), factor) in y.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(factors) {
            scale_into(y, x, *factor);
        }
    });
    Ok(())
}

/// Inner product <dy, x> of each row: the gradient of the factors of [`scale_rows`].
pub fn row_products<T: Element>(d_factors: &mut [f32], dy: &[T], x: &[T], width: usize) -> Result {
    check_rows(x, d_factors, width)?;
    check_len("dy", dy, x.len())?;
    let rows = task_rows(width);
    let tasks =
        d_factors.par_chunks_mut(rows).zip(dy.par_chunks(rows * width)).zip(x.par_chunks(rows * width));
    tasks.for_each(|((d_factors, dy), x)| {
        for ((d, dy), x) in d_factors.iter_mut().zip(dy.chunks_exact(width)).zip(x.chunks_exact(width)) {
            *d = dy.iter().zip(x).map(|(dy, x)| dy.to_f32() as f64 * x.to_f32() as f64).sum::<f64>() as f32;
        }
    });
    Ok(())
}

fn check_rows<T>(x: &[T], factors: &[f32], width: usize) -> Result {
    check(width > 0, || "width must be 1 or more, got 0".into())?;
    check_shape("x", x, [factors.len(), width])
}

simd_fn! {
    fn add_all<T: Element>(y: &mut [T], a: &[T], b: &[T]) {
        for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
            *y = T::from_f32(a.to_f32() + b.to_f32());
        }
    }
}

simd_fn! {
    fn add_to<T: Element>(y: &mut [T], x: &[T]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = T::from_f32(y.to_f32() + x.to_f32());
        }
    }
}

simd_fn! {
    fn accumulate_all<T: Element>(y: &mut [f32], x: &[T]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y += x.to_f32();
        }
    }
}

simd_fn! {
    fn accumulate_bf16<T: Element>(y: &mut [f32], x: &[T]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = to_bf16(*y + x.to_f32());
        }
    }
}

simd_fn! {
    fn accumulate_f16<T: Element>(y: &mut [f32], x: &[T]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = to_f16(*y + x.to_f32());
        }
    }
}

simd_fn! {
    fn scale_all<T: Element>(y: &mut [T], by: f32) {
        for y in y {
            *y = T::from_f32(y.to_f32() * by);
        }
    }
}

simd_fn! {
    fn scale_into<T: Element>(y: &mut [T], x: &[T], by: f32) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = T::from_f32(x.to_f32() * by);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::testing::{Values, assert_close, cast, same_on_any_pool, wide};

    fn check_all<T: Element>() {
        let (rows, width) = (1031, 33);
        let mut values = Values::new(3);
        let (a, b) = (values.take(rows * width, 1.0), values.take(rows * width, 1.0));
        let factors = values.take(rows, 2.0);
        let (a_t, b_t): (Vec<T>, Vec<T>) = (cast(&a), cast(&b));
        let factors_f32: Vec<f32> = cast(&factors);
        let zip = |f: fn(f64, f64) -> f64| -> Vec<f64> { a.iter().zip(&b).map(|(a, b)| f(*a, *b)).collect() };
        let mut y = a_t.clone();
        add(&mut y, &a_t, &b_t).unwrap();
        assert_close("add", &y, &zip(|a, b| a + b), 1e-6);
        let mut y = a_t.clone();
        add_assign(&mut y, &b_t).unwrap();
        assert_close("add_assign", &y, &zip(|a, b| a + b), 1e-6);
        let mut sum: Vec<f32> = cast(&a);
        accumulate(&mut sum, &b_t).unwrap();
        assert_close("accumulate", &sum, &zip(|a, b| a + b), 1e-6);
        for rounding in [Rounding::F32, Rounding::Bf16, Rounding::F16] {
            let (mut rounded, mut apart): (Vec<f32>, Vec<f32>) = (cast(&a), cast(&a));
            accumulate_rounded(&mut rounded, &b_t, rounding).unwrap();
            accumulate(&mut apart, &b_t).unwrap();
            round(&mut apart, rounding);
            assert!(rounded == apart && apart.iter().zip(&sum).all(|(y, x)| *y == rounding.round(*x)));
        }
        convert(&mut y, &sum).unwrap();
        assert_close("convert", &y, &wide(&sum), 1e-6);
        let mut y = a_t.clone();
        scale(&mut y, 0.5);
        assert_close("scale", &y, &zip(|a, _| 0.5 * a), 1e-6);
        scale_rows(&mut y, &a_t, &factors_f32, width).unwrap();
        let expected: Vec<f64> = a.iter().enumerate().map(|(i, a)| a * factors[i / width]).collect();
        assert_close("scale_rows", &y, &expected, 1e-6);
        let mut d = vec![f32::NAN; rows];
        row_products(&mut d, &b_t, &a_t, width).unwrap();
        let expected: Vec<f64> = zip(|a, b| a * b).chunks(width).map(|row| row.iter().sum()).collect();
        assert_close("row_products", &d, &expected, 1e-6);
    }

    #[test]
    fn every_operation_is_its_formula_in_both_types() {
        check_all::<f32>();
        check_all::<bf16>();
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let x: Vec<bf16> = cast(&Values::new(1).take(3 * ELEMENTS + 5, 1.0));
        same_on_any_pool(|| {
            let (mut y, mut sum) = (x.clone(), vec![1.0f32; x.len()]);
            add_assign(&mut y, &x).unwrap();
            accumulate(&mut sum, &y).unwrap();
            (y, sum)
        });
    }
}
