//! Random numbers: the same on every run, whatever the number of threads.

/// xoshiro256++ of Blackman and Vigna, seeded with splitmix64.
pub(crate) struct Rng([u64; 4]);

impl Rng {
    pub(crate) fn new(mut seed: u64) -> Rng {
        Rng([(); 4].map(|()| {
            seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = seed;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        }))
    }

    /// The numbers of a part of a named tensor: neither other tensors nor other parts change them. The name goes in by
    /// FNV-1a.
    pub(crate) fn of(seed: u64, name: &str, part: u64) -> Rng {
        let bytes = seed.to_le_bytes().into_iter().chain(part.to_le_bytes()).chain(name.bytes());
        Rng::new(bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ byte as u64).wrapping_mul(0x0000_0100_0000_01b3)
        }))
    }

    fn next(&mut self) -> u64 {
        let s = &mut self.0;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// Uniform in [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Two independent standard normals, by Box and Muller.
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
