//! Shuffling from a seed, without tables.
//!
//! Every choice is a hash of the seed, a purpose and counters, so that the counters alone are a position in a
//! stream.
//!
//! The permutation of 0..n is a Feistel network on 2b bits, the fewest with 4^b >= n: a round takes the
//! halves (l, r) to (r, l ^ f(r)), which can be undone whatever f is, so the network permutes 0..4^b. A value
//! of n or more is sent through again until it falls below n. This ends, because its cycle returns to a start
//! below n, and the result permutes 0..n. On average fewer than four passes are needed.
//!
//! A network on few bits favors some orders. Up to [`SMALL`] numbers are shuffled by n - 1 exchanges instead
//! (Fisher and Yates), which gives every order equally often: for i from n - 1 down to 1, places i and j_i <=
//! i are exchanged. The value at place k is found by following k through the exchanges, the last one first.

/// Purpose of a hash: makes choices with the same counters independent.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    /// The file of the next document.
    File,
    /// The order of an epoch.
    Epoch,
    /// The documents that are held out.
    Split,
    /// The content of a document of the embedded task.
    Task,
    /// The rounding of optimizer state.
    Moments,
}

/// A hash of the seed and counters.
pub(crate) fn hash(seed: u64, purpose: Purpose, counters: [u64; 2]) -> u64 {
    counters.into_iter().fold(mix(mix(seed) ^ purpose as u64), |hash, counter| mix(hash ^ counter))
}

/// Uniform in [0, 1).
pub(crate) fn unit(hash: u64) -> f64 {
    (hash >> 11) as f64 / (1u64 << 53) as f64
}

/// Uniform in 0..n, up to an error of n / 2^64.
pub(crate) fn below(hash: u64, n: u64) -> u64 {
    ((hash as u128 * n as u128) >> 64) as u64
}

/// One step of splitmix64: every bit of the result depends on every bit of `x`. Our own, because it is a hash
/// of counters and not a stream, and because another one would change the order of the documents of existing
/// runs.
pub(crate) fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A permutation of 0..n.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    n: u64,
    key: u64,
    /// Number of bits of a half.
    bits: u32,
}

const ROUNDS: u64 = 6;

/// Most numbers that are shuffled by exchanges: an element takes n hashes, which is cheap beside reading a
/// document.
const SMALL: u64 = 1024;

impl Permutation {
    /// The permutation of a key.
    pub fn new(n: u64, key: u64) -> Permutation {
        let bits = (u64::BITS - n.saturating_sub(1).leading_zeros()).div_ceil(2);
        Permutation { n, key, bits }
    }

    /// The image of `k`, which must be below n.
    pub fn at(&self, k: u64) -> u64 {
        debug_assert!(k < self.n);
        if self.n <= SMALL {
            return self.exchanged(k);
        }
        let mut value = self.pass(k);
        while value >= self.n {
            value = self.pass(value);
        }
        value
    }

    fn exchanged(&self, k: u64) -> u64 {
        let key = mix(self.key);
        (1..self.n).fold(k, |place, i| match below(mix(key ^ i), i + 1) {
            j if place == i => j,
            j if place == j => i,
            _ => place,
        })
    }

    fn pass(&self, value: u64) -> u64 {
        let mask = (1u64 << self.bits) - 1;
        let (mut left, mut right) = (value >> self.bits, value & mask);
        for round in 0..ROUNDS {
            let mixed = mix(mix(self.key ^ round) ^ right) & mask;
            (left, right) = (right, left ^ mixed);
        }
        left << self.bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_permutation_is_a_permutation(n in 1u64..3000, key: u64) {
            let permutation = Permutation::new(n, key);
            let mut seen = vec![false; n as usize];
            for k in 0..n {
                let place = &mut seen[permutation.at(k) as usize];
                prop_assert!(!*place);
                *place = true;
            }
        }

        #[test]
        fn large_permutations_stay_inside(n in 1u64.., key: u64, k: u64) {
            prop_assert!(Permutation::new(n, key).at(k % n) < n);
        }
    }

    #[test]
    fn every_number_goes_everywhere_equally_often() {
        const N: u64 = 10;
        const KEYS: u64 = 20_000;
        let mut counts = [[0u64; N as usize]; N as usize];
        for key in 0..KEYS {
            for k in 0..N {
                counts[k as usize][Permutation::new(N, mix(key)).at(k) as usize] += 1;
            }
        }
        let expected = (KEYS / N) as f64;
        let chi: f64 = counts.iter().flatten().map(|n| (*n as f64 - expected).powi(2) / expected).sum();
        // 81 degrees of freedom: mean 81, deviation 12.7.
        assert!(chi < 81.0 + 5.0 * 12.7, "{chi}");
    }

    /// The chi-square statistic of counts that should be equal, in deviations from its mean.
    fn unevenness(counts: &[u64]) -> f64 {
        let expected = counts.iter().sum::<u64>() as f64 / counts.len() as f64;
        let chi: f64 = counts.iter().map(|n| (*n as f64 - expected).powi(2) / expected).sum();
        let freedom = counts.len() as f64 - 1.0;
        (chi - freedom) / (2.0 * freedom).sqrt()
    }

    #[test]
    fn every_order_of_few_documents_comes_equally_often() {
        for n in 2..=6u64 {
            let mut counts = std::collections::BTreeMap::<Vec<u64>, u64>::new();
            let orders: u64 = (1..=n).product();
            // Keys as an epoch has them: hashes of seed, epoch and file.
            for seed in 0..200 * orders {
                let permutation = Permutation::new(n, hash(seed, Purpose::Epoch, [seed % 3, 0]));
                *counts.entry((0..n).map(|k| permutation.at(k)).collect()).or_default() += 1;
            }
            assert_eq!(counts.len() as u64, orders, "n = {n}");
            let off = unevenness(&counts.into_values().collect::<Vec<_>>());
            assert!(off.abs() < 4.0, "n = {n}: {off} deviations");
        }
    }

    #[test]
    fn two_neighbors_come_to_any_two_places_equally_often() {
        // The largest that is exchanged would take too many keys; the network is judged at sizes of its own.
        for (n, cells) in [(12, 12), (SMALL + 1, 25), (5000, 25)] {
            let mut counts = vec![0u64; cells * cells];
            let cell = |place: u64| (place as u128 * cells as u128 / n as u128) as usize;
            for key in 0..60_000 {
                let permutation = Permutation::new(n, mix(key));
                counts[cell(permutation.at(0)) * cells + cell(permutation.at(1))] += 1;
            }
            if cells as u64 == n {
                let apart = |at: &usize| at / cells != at % cells;
                counts = (0..counts.len()).filter(apart).map(|at| counts[at]).collect();
            }
            // Cells of unequal size, and two places that are never the same, are within this bound.
            assert!(unevenness(&counts).abs() < 6.0, "n = {n}: {} deviations", unevenness(&counts));
        }
    }

    #[test]
    fn neighbors_part() {
        let permutation = Permutation::new(100_000, 7);
        let near = (1..100_000).filter(|k| permutation.at(*k).abs_diff(permutation.at(k - 1)) < 1000).count();
        // Of two independent places, 2 % are that close.
        assert!((1700..2300).contains(&near), "{near}");
    }

    #[test]
    fn purposes_and_counters_are_independent() {
        let hashes: std::collections::HashSet<u64> = [Purpose::File, Purpose::Epoch, Purpose::Split]
            .into_iter()
            .flat_map(|purpose| (0..10).flat_map(move |a| (0..10).map(move |b| hash(3, purpose, [a, b]))))
            .collect();
        assert_eq!(hashes.len(), 300);
        assert!((0..1000).all(|k| below(mix(k), 7) < 7 && (0.0..1.0).contains(&unit(mix(k)))));
    }
}
