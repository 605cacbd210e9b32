//! Errors by position in the sequence, in buckets of doubling size: 0, 1, 2..4, 4..8, ...

use std::collections::BTreeMap;
use std::ops::Range;

use ballast_model::Batch;

/// Positions of a bucket.
pub fn range(bucket: usize) -> Range<usize> {
    if bucket == 0 { 0..1 } else { 1 << (bucket - 1)..1 << bucket }
}

/// Bucket of a position.
pub fn bucket(position: usize) -> usize {
    (usize::BITS - position.leading_zeros()) as usize
}

/// Bucket of each token.
pub fn buckets(batch: &Batch) -> Vec<usize> {
    batch.positions.iter().map(|position| bucket(*position as usize)).collect()
}

/// Mean of per-token values in every nonempty bucket.
pub fn means(values: &[f64], buckets: &[usize]) -> Vec<(Range<usize>, f64)> {
    let mut sums: BTreeMap<usize, (usize, f64)> = BTreeMap::new();
    for (value, bucket) in values.iter().zip(buckets) {
        let (count, sum) = sums.entry(*bucket).or_default();
        (*count, *sum) = (*count + 1, *sum + value);
    }
    sums.into_iter().map(|(bucket, (count, sum))| (range(bucket), sum / count as f64)).collect()
}

/// Sums of squared differences and of squares of the reference, by bucket.
#[derive(Clone, Debug, Default)]
pub struct Sums {
    apart: Vec<f64>,
    reference: Vec<f64>,
}

impl Sums {
    /// Sums over tensors a and b [tokens, ...].
    pub fn new(a: &[f64], b: &[f64], buckets: &[usize]) -> Sums {
        let count = buckets.iter().max().map_or(0, |last| last + 1);
        let mut sums = Sums { apart: vec![0.0; count], reference: vec![0.0; count] };
        let width = (b.len() / buckets.len().max(1)).max(1);
        for ((a, b), bucket) in a.chunks(width).zip(b.chunks(width)).zip(buckets) {
            for (a, b) in a.iter().zip(b) {
                sums.apart[*bucket] += (a - b) * (a - b);
                sums.reference[*bucket] += b * b;
            }
        }
        sums
    }

    /// RMS(a - b) / RMS(b) by bucket.
    pub fn errors(&self) -> Vec<f64> {
        self.apart.iter().zip(&self.reference).map(|(apart, b)| super::relative(*apart, *b)).collect()
    }
}

/// RMS of errors over several tensors (layers), by bucket.
#[derive(Clone, Debug, Default)]
pub struct MeanErrors {
    squares: Vec<f64>,
    tensors: usize,
}

impl MeanErrors {
    /// Adds one tensor's errors.
    pub fn add(&mut self, errors: &[f64]) {
        self.squares.resize(errors.len().max(self.squares.len()), 0.0);
        for (sum, error) in self.squares.iter_mut().zip(errors) {
            *sum += error * error;
        }
        self.tensors += 1;
    }

    /// RMS of the added errors; `None` without any.
    pub fn error(&self, bucket: usize) -> Option<f64> {
        (self.tensors > 0).then(|| (self.squares[bucket] / self.tensors as f64).sqrt())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_position_is_in_the_range_of_its_bucket() {
        for position in 0..5000 {
            assert!(range(bucket(position)).contains(&position), "{position}");
        }
    }

    #[test]
    fn means_are_those_of_the_buckets_that_there_are() {
        assert_eq!(means(&[1.0, 2.0, 5.0, 3.0], &[0, 2, 2, 0]), [(0..1, 2.0), (2..4, 3.5)]);
        assert!(means(&[], &[0, 1]).is_empty());
    }

    #[test]
    fn an_error_is_counted_where_it_is() {
        let (a, b) = ([1.0, 1.0, 1.0, 3.0], [1.0; 4]);
        assert_eq!(Sums::new(&a, &b, &[0, 1, 2, 2]).errors(), [0.0, 0.0, 2f64.sqrt()]);
    }
}
