//! Measurements of a run relative to the reference.

pub mod attention;
pub mod decay;
pub mod indexer;
pub mod output;
pub mod position;

/// Difference of tensor a from tensor b.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Difference {
    /// RMS(a - b) / RMS(b); 0 if they are equal, also if b is zero.
    pub error: f64,
    /// Largest |a - b|.
    pub max_abs: f64,
    /// Largest |b|.
    pub largest: f64,
    /// <a, b> / (|a| |b|); 1 if both are zero.
    pub cosine: f64,
    /// Number of non-finite values of a where b is finite.
    pub not_finite: usize,
    /// Sum of (a - b)^2.
    pub squared: f64,
    /// Sum of b^2.
    pub reference: f64,
}

/// RMS(a - b) / RMS(b) from the sums of (a - b)^2 and b^2.
fn relative(squared: f64, reference: f64) -> f64 {
    if squared == 0.0 { 0.0 } else { (squared / reference).sqrt() }
}

/// Error of several tensors taken as one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Together {
    tensors: usize,
    squared: f64,
    reference: f64,
}

impl Together {
    /// Adds a tensor.
    pub fn add(&mut self, difference: &Difference) {
        self.tensors += 1;
        self.squared += difference.squared;
        self.reference += difference.reference;
    }

    /// RMS(a - b) / RMS(b) of all tensors; `None` without any.
    pub fn error(&self) -> Option<f64> {
        (self.tensors > 0).then(|| relative(self.squared, self.reference))
    }
}

/// Computes the difference of a from b, which has the same length.
pub fn difference(a: &[f64], b: &[f64]) -> Difference {
    let mut found = Difference::default();
    let (mut along, mut own) = (0.0, 0.0);
    for (a, b) in a.iter().zip(b) {
        found.not_finite += (!a.is_finite() && b.is_finite()) as usize;
        let apart = if a == b { 0.0 } else { (a - b).abs() };
        found.squared += apart * apart;
        found.reference += b * b;
        // f64::max would drop a NaN.
        found.max_abs = if apart > found.max_abs || apart.is_nan() { apart } else { found.max_abs };
        found.largest = found.largest.max(b.abs());
        along += a * b;
        own += a * a;
    }
    found.error = relative(found.squared, found.reference);
    found.cosine =
        if own == 0.0 && found.reference == 0.0 { 1.0 } else { along / (own * found.reference).sqrt() };
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_tensors_are_not_apart_and_opposite_ones_are_two() {
        let a = [1.0, -2.0, 0.0];
        let same = difference(&a, &a);
        assert_eq!((same.error, same.max_abs, same.largest), (0.0, 0.0, 2.0));
        let other = difference(&a.map(|x| -x), &a);
        assert!((other.error - 2.0).abs() < 1e-15 && (other.cosine + 1.0).abs() < 1e-15);
        assert_eq!(difference(&[0.0], &[0.0]).cosine, 1.0);
    }

    #[test]
    fn non_finite_values_are_counted() {
        let found = difference(&[1.0, f64::NAN, 3.0], &[1.0, 2.0, 3.0]);
        assert_eq!(found.not_finite, 1);
        assert!(found.max_abs.is_nan() && found.error.is_nan());
        assert_eq!(difference(&[f64::INFINITY], &[1.0]).max_abs, f64::INFINITY);
    }
}
