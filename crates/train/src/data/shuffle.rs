//! Order from a seed, without tables.
//!
//! Every choice is a hash of the seed, of what is chosen, and of a counter, so that a place in a stream is its counters.
//!
//! The permutation of 0..n is a Feistel network on 2b bits, the fewest with 4^b >= n: a round takes the halves (l, r) to
//! (r, l ^ f(r)), which can be undone whatever f is, so the network permutes 0..4^b. A value from n on is sent through
//! again until it falls below n; since the cycle that it runs through returns to its start below n, this ends, and what it
//! does to 0..n is a permutation. On average fewer than four passes are needed.

/// What a hash is for: the same counters choose different things independently.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    /// The file of the next document.
    File,
    /// The order of an epoch.
    Epoch,
    /// The documents that are held out.
    Split,
    /// What a document of the embedded task is made of.
    Task,
}

/// A hash of the seed and counters.
pub(crate) fn hash(seed: u64, purpose: Purpose, counters: [u64; 2]) -> u64 {
    counters.into_iter().fold(mix(mix(seed) ^ purpose as u64), |hash, counter| mix(hash ^ counter))
}

/// Uniform in [0, 1).
pub(crate) fn unit(hash: u64) -> f64 {
    (hash >> 11) as f64 / (1u64 << 53) as f64
}

/// Uniform in 0..n, up to a part n / 2^64.
pub(crate) fn below(hash: u64, n: u64) -> u64 {
    ((hash as u128 * n as u128) >> 64) as u64
}

/// One step of splitmix64: every bit of the result depends on every bit of `x`.
fn mix(x: u64) -> u64 {
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
    /// Bits of a half.
    bits: u32,
}

const ROUNDS: u64 = 6;

impl Permutation {
    /// The one that belongs to `key`.
    pub fn new(n: u64, key: u64) -> Permutation {
        let bits = (u64::BITS - n.saturating_sub(1).leading_zeros()).div_ceil(2);
        Permutation { n, key, bits }
    }

    /// Where it sends `k`, which must be below n.
    pub fn at(&self, k: u64) -> u64 {
        debug_assert!(k < self.n);
        let mut value = self.pass(k);
        while value >= self.n {
            value = self.pass(value);
        }
        value
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

    #[test]
    fn neighbours_part() {
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
