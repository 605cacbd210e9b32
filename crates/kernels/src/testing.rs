//! Helpers of the tests: values, error measures, numeric gradients, runs on several thread pools.

use half::bf16;

use crate::Element;

/// Pseudo-random values that are exact in bf16, so that every storage type and the f64 reference see the same
/// ones.
pub(crate) struct Values(u64);

impl Values {
    pub(crate) fn new(seed: u64) -> Values {
        Values(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    /// `n` values in [-by, by].
    pub(crate) fn take(&mut self, n: usize, by: f64) -> Vec<f64> {
        (0..n)
            .map(|_| {
                let x = (self.next() as f64 / (1u64 << 31) as f64) * 2.0 - 1.0;
                bf16::from_f64(x * by).to_f64()
            })
            .collect()
    }
}

pub(crate) fn cast<T: Element>(x: &[f64]) -> Vec<T> {
    x.iter().map(|x| T::from_f32(*x as f32)).collect()
}

pub(crate) fn wide<T: Element>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| x.to_f32() as f64).collect()
}

pub(crate) fn rms(x: &[f64]) -> f64 {
    (x.iter().map(|x| x * x).sum::<f64>() / x.len().max(1) as f64).sqrt()
}

/// Asserts RMS(a-b) <= limit (RMS(b) + 1e-8); for bf16 storage the limit is at least the rounding of bf16.
pub(crate) fn assert_close<T: Element>(name: &str, got: &[T], expected: &[f64], limit: f64) {
    assert_error(name, got, expected, rms(expected), limit);
}

/// Asserts RMS(a-b) <= limit (size + 1e-8), with the `size` of the terms of sums that may cancel.
pub(crate) fn assert_error<T: Element>(name: &str, got: &[T], expected: &[f64], size: f64, limit: f64) {
    assert_eq!(got.len(), expected.len(), "{name}");
    let limit = if T::NAME == "BF16" { limit.max(4e-3) } else { limit };
    let difference: Vec<f64> = wide(got).iter().zip(expected).map(|(a, b)| a - b).collect();
    let ratio = rms(&difference) / (size + 1e-8);
    assert!(ratio <= limit, "{name} ({}): relative error {ratio:e}", T::NAME);
}

/// df/dx by central differences, in f64.
pub(crate) fn gradient(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    const H: f64 = 1e-5;
    let mut x = x.to_vec();
    (0..x.len())
        .map(|i| {
            let centre = x[i];
            x[i] = centre + H;
            let above = f(&x);
            x[i] = centre - H;
            let below = f(&x);
            x[i] = centre;
            (above - below) / (2.0 * H)
        })
        .collect()
}

/// Sum of a_i b_i.
pub(crate) fn inner(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Returns the result of `run`; fails unless it is the same on pools of 1, 2, 3 and 8 threads.
pub(crate) fn same_on_any_pool<R: PartialEq + Send>(run: impl Fn() -> R + Sync) -> R {
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(&run)
    };
    let one = on(1);
    for threads in [2, 3, 8] {
        assert!(on(threads) == one, "{threads} threads give other bits than one");
    }
    one
}

/// Prefix sums from 0.
pub(crate) fn offsets(lengths: &[usize]) -> Vec<usize> {
    let mut cu_seqlens = vec![0];
    for length in lengths {
        cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + length);
    }
    cu_seqlens
}
