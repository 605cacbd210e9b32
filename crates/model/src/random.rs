//! Random numbers, reproducible for any number of threads.

use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng};

/// xoshiro256++, seeded with splitmix64.
pub(crate) struct Rng(Xoshiro256PlusPlus);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(Xoshiro256PlusPlus::seed_from_u64(seed))
    }

    /// Creates the generator of one part of a named tensor, independent of other tensors and parts. The seed
    /// is hashed with a local FNV-1a, not one from a crate: a different hash would change the weights of
    /// every new model.
    pub(crate) fn of(seed: u64, name: &str, part: u64) -> Rng {
        let bytes = seed.to_le_bytes().into_iter().chain(part.to_le_bytes()).chain(name.bytes());
        Rng::new(bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ byte as u64).wrapping_mul(0x0000_0100_0000_01b3)
        }))
    }

    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Draws uniformly from [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Draws two independent standard normals (Box-Muller).
    pub(crate) fn normals(&mut self) -> [f64; 2] {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * self.unit()).sin_cos();
        [radius * cos, radius * sin]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normals_have_the_moments_of_the_normal_distribution() {
        let mut rng = Rng::of(3, "x", 0);
        let values: Vec<f64> = (0..50_000).flat_map(|_| rng.normals()).collect();
        let moment = |power: i32| values.iter().map(|x| x.powi(power)).sum::<f64>() / values.len() as f64;
        // Standard errors over 100,000 draws: 0.003, 0.0045, 0.012, 0.03.
        for (power, expected, error) in [(1, 0.0, 0.003), (2, 1.0, 0.0045), (3, 0.0, 0.012), (4, 3.0, 0.03)] {
            let found = moment(power);
            assert!((found - expected).abs() < 4.0 * error, "moment {power}: {found}");
        }
    }

    /// The numbers that every earlier version drew: weights of new models follow from them.
    #[test]
    fn the_stream_stays_as_it_is() {
        let mut rng = Rng::of(1, "a", 0);
        let expected = [0xee42_8bfd_c39f_3eab, 0xc162_c168_5e60_cd50, 0xb1cb_86fc_9c3a_b4f7];
        assert_eq!([(); 3].map(|()| rng.next()), expected);
    }

    #[test]
    fn names_seeds_and_parts_have_numbers_of_their_own() {
        let first = |seed, name, part| Rng::of(seed, name, part).next();
        let all = [first(1, "a", 0), first(2, "a", 0), first(1, "b", 0), first(1, "a", 1)];
        for (i, x) in all.iter().enumerate() {
            assert!(!all[i + 1..].contains(x));
        }
        assert_eq!(first(1, "a", 0), all[0]);
    }
}
