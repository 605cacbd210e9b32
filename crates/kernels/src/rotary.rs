//! Rotary position embedding, in place.
//!
//! Pair i of a head is rotated by the angle a = position f_i:
//! ```text
//! (x, y) -> m (x cos a - y sin a,  x sin a + y cos a)          backward: the same with -a
//! half-split    pairs (i, i + n/2)         interleaved    pairs (2i, 2i + 1)         of the n rotated dimensions
//! f_i = base^(-2i/n)                       linear         f_i / factor
//! proportional  n = head_dim, the first int(partial head_dim // 2) frequencies base^(-2i/n), zero for the rest
//! yarn          f_i (1 - ramp_i + ramp_i / factor), ramp from 0 to 1 between the dimensions that rotate beta_fast
//!               and beta_slow times in the original context;  m the attention factor
//! ```
//! Frequencies are computed in f64 and rounded to f32. An angle is the f32 product of position and frequency,
//! as models are trained with; its sine and cosine are computed in f64. A [`Table`] is computed once for the
//! positions of a batch and used by every layer. Each token has its own position, so packed sequences can
//! restart at any position.
//!
//! DeepSeek in transformers permutes interleaved pairs while it rotates; here they stay in place. The
//! products of q and k are the same.
//!
//! # Example
//! ```
//! use ballast_kernels::rotary::{Frequencies, Heads, Layout, Rotary, rotary_backward, rotary_forward};
//!
//! let rotary = Rotary::new(Frequencies::Plain { dims: 2 }, 1e4, Layout::HalfSplit)?;
//! let table = rotary.table(&[0, 1]);
//! let heads = Heads { heads: 1, width: 2, offset: 0 };
//! let mut x = [1.0f32, 0.0, 1.0, 0.0];
//! rotary_forward(&mut x, &table, heads)?;
//! assert_eq!(x, [1.0, 0.0, 1f32.cos(), 1f32.sin()]);
//! rotary_backward(&mut x, &table, heads)?;
//! assert!((x[2] - 1.0).abs() < 1e-6 && x[3].abs() < 1e-6);
//! # Ok::<(), ballast_kernels::KernelError>(())
//! ```

use rayon::prelude::*;

use crate::Element;
use crate::error::{Result, check, check_shape};
use crate::partition::task_rows;
use crate::simd::{fma, simd_fn};

/// Positions of the two elements of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// (i, i + n/2), "rotate half".
    HalfSplit,
    /// (2i, 2i + 1).
    Interleaved,
}

/// Settings of yarn, named as in transformers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// New context length divided by the original one.
    pub factor: f64,
    /// Context length of pretraining.
    pub original_context: usize,
    /// Dimensions with more rotations than this keep their frequency; usually 32.
    pub beta_fast: f64,
    /// Dimensions with fewer rotations than this have their frequency divided by `factor`; usually 1.
    pub beta_slow: f64,
    /// If `mscale_all_dim` is set too, the attention factor is the quotient of their [`yarn_mscale`].
    pub mscale: Option<f64>,
    /// See `mscale`.
    pub mscale_all_dim: Option<f64>,
    /// Attention factor; overrides the one computed from the other settings.
    pub attention_factor: Option<f64>,
    /// If true, the limits of the ramp are rounded outward to whole dimensions (true in most models).
    pub truncate: bool,
}

impl Yarn {
    /// Returns the usual settings.
    pub fn new(factor: f64, original_context: usize) -> Yarn {
        Yarn {
            factor,
            original_context,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: None,
            mscale_all_dim: None,
            attention_factor: None,
            truncate: true,
        }
    }

    fn attention_factor(&self) -> f64 {
        match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(factor), _, _) => factor,
            (None, Some(a), Some(b)) if a != 0.0 && b != 0.0 => {
                yarn_mscale(self.factor, a) / yarn_mscale(self.factor, b)
            }
            _ => yarn_mscale(self.factor, 1.0),
        }
    }
}

/// 0.1 mscale ln(factor) + 1, or 1 for a factor of at most 1. DeepSeek multiplies its softmax scale by the
/// square of this with `mscale_all_dim`.
pub fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

/// Formula of the frequencies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Frequencies {
    /// base^(-2i/n)
    Plain {
        /// n: dimensions that rotate.
        dims: usize,
    },
    /// base^(-2i/n) / factor
    Linear {
        /// n: dimensions that rotate.
        dims: usize,
        /// Divisor of the frequencies.
        factor: f64,
    },
    /// See [`Yarn`].
    Yarn {
        /// n: dimensions that rotate.
        dims: usize,
        /// The other settings.
        yarn: Yarn,
    },
    /// Over the full width of the head, with a frequency of 0 for most pairs (full-attention layers of Gemma
    /// 4).
    Proportional {
        /// Width of a head.
        head_dim: usize,
        /// Fraction of the pairs that rotate, 0 to 1.
        partial: f64,
        /// Divisor of the frequencies; usually 1.
        factor: f64,
    },
}

/// A rotation: frequencies, layout, attention factor.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    inv_freq: Vec<f32>,
    attention_factor: f32,
    layout: Layout,
}

impl Rotary {
    /// Computes the frequencies.
    pub fn new(frequencies: Frequencies, base: f64, layout: Layout) -> Result<Rotary> {
        let (dims, factor) = match frequencies {
            Frequencies::Plain { dims } => (dims, 1.0),
            Frequencies::Linear { dims, factor } => (dims, factor),
            Frequencies::Yarn { dims, yarn } => (dims, yarn.factor),
            Frequencies::Proportional { head_dim, factor, .. } => (head_dim, factor),
        };
        check(dims > 0 && dims.is_multiple_of(2), || {
            format!("rotated dimensions must be even and above 0, got {dims}")
        })?;
        check(base > 1.0 && base.is_finite(), || format!("rotary base must be above 1, got {base}"))?;
        check(factor > 0.0 && factor.is_finite(), || format!("rotary factor must be above 0, got {factor}"))?;
        let plain = |i: usize| base.powf(-2.0 * i as f64 / dims as f64);
        let mut attention_factor = 1.0;
        let inv_freq: Vec<f64> = match frequencies {
            Frequencies::Plain { .. } => (0..dims / 2).map(plain).collect(),
            Frequencies::Linear { factor, .. } => (0..dims / 2).map(|i| plain(i) / factor).collect(),
            Frequencies::Yarn { yarn, .. } => {
                check(yarn.original_context > 0, || "yarn original_context must be above 0, got 0".into())?;
                attention_factor = yarn.attention_factor();
                let (low, high) = yarn_range(&yarn, dims, base);
                let ramp = |i: usize| ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                (0..dims / 2).map(|i| plain(i) * (1.0 - ramp(i) + ramp(i) / yarn.factor)).collect()
            }
            Frequencies::Proportional { partial, factor, .. } => {
                check((0.0..=1.0).contains(&partial), || {
                    format!("rotary partial must be 0 to 1, got {partial}")
                })?;
                let turning = (partial * dims as f64 / 2.0).floor() as usize;
                (0..dims / 2).map(|i| if i < turning { plain(i) / factor } else { 0.0 }).collect()
            }
        };
        Ok(Rotary {
            inv_freq: inv_freq.into_iter().map(|f| f as f32).collect(),
            attention_factor: attention_factor as f32,
            layout,
        })
    }

    /// Frequency f_i of every pair.
    pub fn inv_freq(&self) -> &[f32] {
        &self.inv_freq
    }

    /// m: factor of the rotated values.
    pub fn attention_factor(&self) -> f32 {
        self.attention_factor
    }

    /// n: dimensions that rotate.
    pub fn dims(&self) -> usize {
        2 * self.inv_freq.len()
    }

    /// Computes the sines and cosines of these positions.
    pub fn table(&self, positions: &[u32]) -> Table {
        // A pair with frequency 0 needs no entry unless it is scaled.
        let still = self.inv_freq.iter().rev().take_while(|f| **f == 0.0).count();
        let pairs = self.inv_freq.len() - if self.attention_factor == 1.0 { still } else { 0 };
        let mut cos_sin = vec![0.0; positions.len() * 2 * pairs];
        if pairs > 0 {
            cos_sin.par_chunks_mut(2 * pairs).zip(positions).for_each(|(row, position)| {
                let (cos, sin) = row.split_at_mut(pairs);
                for ((cos, sin), f) in cos.iter_mut().zip(sin).zip(&self.inv_freq) {
                    let (s, c) = ((*position as f32 * f) as f64).sin_cos();
                    *cos = (c * self.attention_factor as f64) as f32;
                    *sin = (s * self.attention_factor as f64) as f32;
                }
            });
        }
        Table { cos_sin, tokens: positions.len(), pairs, half: self.inv_freq.len(), layout: self.layout }
    }
}

/// First and last pair of yarn's ramp.
fn yarn_range(yarn: &Yarn, dims: usize, base: f64) -> (f64, f64) {
    let pair = |turns: f64| {
        let context = yarn.original_context as f64;
        dims as f64 * (context / (turns * 2.0 * std::f64::consts::PI)).ln() / (2.0 * base.ln())
    };
    let (mut low, mut high) = (pair(yarn.beta_fast), pair(yarn.beta_slow));
    if yarn.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dims as f64 - 1.0));
    // Transformers avoids a division by zero this way; kept for equal results.
    if low == high { (low, high + 0.001) } else { (low, high) }
}

/// Cosines and sines of a batch, the attention factor included.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// [tokens, 2, pairs]
    cos_sin: Vec<f32>,
    tokens: usize,
    /// Number of pairs that rotate.
    pairs: usize,
    /// Number of all pairs: the distance between the elements of a half-split pair.
    half: usize,
    layout: Layout,
}

impl Table {
    /// Bytes of the table.
    pub fn bytes(&self) -> usize {
        self.cos_sin.len() * size_of::<f32>()
    }
}

/// Layout of the rotated elements in a tensor [tokens, heads, width].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Heads per token.
    pub heads: usize,
    /// Elements per head, including those that are not rotated.
    pub width: usize,
    /// First rotated element of a head.
    pub offset: usize,
}

/// Rotates x [tokens, heads, width] in place.
pub fn rotary_forward<T: Element>(x: &mut [T], table: &Table, heads: Heads) -> Result {
    rotate(x, table, heads, 1.0)
}

/// Replaces the gradient of the rotated x by the gradient of x, in place.
pub fn rotary_backward<T: Element>(dx: &mut [T], table: &Table, heads: Heads) -> Result {
    rotate(dx, table, heads, -1.0)
}

fn rotate<T: Element>(x: &mut [T], table: &Table, heads: Heads, direction: f32) -> Result {
    let Heads { heads, width, offset } = heads;
    check(heads > 0 && offset + 2 * table.half <= width, || {
        format!(
            "{heads} heads of width {width} cannot hold {} rotated dimensions from {offset} on",
            2 * table.half
        )
    })?;
    let row = heads * width;
    check_shape("x", x, [table.tokens, row])?;
    if table.pairs == 0 {
        return Ok(());
    }
    let rows = task_rows(row);
    x.par_chunks_mut(rows * row).zip(table.cos_sin.par_chunks(rows * 2 * table.pairs)).for_each(
        |(x, cos_sin)| {
            for (x, cos_sin) in x.chunks_mut(row).zip(cos_sin.chunks(2 * table.pairs)) {
                let (cos, sin) = cos_sin.split_at(table.pairs);
                for head in x.chunks_mut(width) {
                    let head = &mut head[offset..offset + 2 * table.half];
                    match table.layout {
                        Layout::HalfSplit => {
                            let (a, b) = head.split_at_mut(table.half);
                            rotate_halves(&mut a[..table.pairs], &mut b[..table.pairs], cos, sin, direction);
                        }
                        Layout::Interleaved => rotate_pairs(head, cos, sin, direction),
                    }
                }
            }
        },
    );
    Ok(())
}

simd_fn! {
    fn rotate_halves<T: Element>(a: &mut [T], b: &mut [T], cos: &[f32], sin: &[f32], direction: f32) {
        for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
            let (x, y, sin) = (a.to_f32(), b.to_f32(), sin * direction);
            *a = T::from_f32(fma::<FMA>(x, *cos, -(y * sin)));
            *b = T::from_f32(fma::<FMA>(y, *cos, x * sin));
        }
    }
}

simd_fn! {
    fn rotate_pairs<T: Element>(head: &mut [T], cos: &[f32], sin: &[f32], direction: f32) {
        for ((pair, cos), sin) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
            let (x, y, sin) = (pair[0].to_f32(), pair[1].to_f32(), sin * direction);
            pair[0] = T::from_f32(fma::<FMA>(x, *cos, -(y * sin)));
            pair[1] = T::from_f32(fma::<FMA>(y, *cos, x * sin));
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{Values, assert_close, cast, gradient, inner, same_on_any_pool, wide};

    fn reference(x: &[f64], positions: &[u32], heads: Heads, rotary: &Rotary) -> Vec<f64> {
        let mut y = x.to_vec();
        let (half, m) = (rotary.inv_freq.len(), rotary.attention_factor as f64);
        for (t, position) in positions.iter().enumerate() {
            for h in 0..heads.heads {
                let head = &mut y[(t * heads.heads + h) * heads.width + heads.offset..];
                for (i, f) in rotary.inv_freq.iter().enumerate() {
                    let (i, j) = match rotary.layout {
                        Layout::HalfSplit => (i, i + half),
                        Layout::Interleaved => (2 * i, 2 * i + 1),
                    };
                    let (sin, cos) = ((*position as f32 * f) as f64).sin_cos();
                    (head[i], head[j]) =
                        (m * (head[i] * cos - head[j] * sin), m * (head[j] * cos + head[i] * sin));
                }
            }
        }
        y
    }

    fn check_one<T: Element>(rotary: &Rotary, heads: Heads, positions: &[u32], seed: u64) {
        let mut values = Values::new(seed);
        let n = positions.len() * heads.heads * heads.width;
        let (x, dy) = (values.take(n, 2.0), values.take(n, 1.0));
        let table = rotary.table(positions);
        let (mut y, mut dx): (Vec<T>, Vec<T>) = (cast(&x), cast(&dy));
        rotary_forward(&mut y, &table, heads).unwrap();
        rotary_backward(&mut dx, &table, heads).unwrap();
        assert_close("y", &y, &reference(&x, positions, heads, rotary), 1e-6);
        let loss = |x: &[f64]| inner(&reference(x, positions, heads, rotary), &dy);
        assert_close("dx", &dx, &gradient(&x, loss), 1e-5);
    }

    fn kinds(dims: usize) -> [Frequencies; 4] {
        [
            Frequencies::Plain { dims },
            Frequencies::Linear { dims, factor: 8.0 },
            Frequencies::Yarn { dims, yarn: Yarn::new(4.0, 512) },
            Frequencies::Proportional { head_dim: dims, partial: 0.25, factor: 1.0 },
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn every_kind_and_its_gradient_agree_with_the_formula(
            half in 1usize..12, heads in 1usize..4, offset in 0usize..5, rest in 0usize..5, kind in 0usize..4,
            positions in prop::collection::vec(0u32..5000, 0..5), interleaved in any::<bool>(), seed in any::<u64>(),
        ) {
            let layout = if interleaved { Layout::Interleaved } else { Layout::HalfSplit };
            let rotary = Rotary::new(kinds(2 * half)[kind], 10000.0, layout).unwrap();
            let heads = Heads { heads, width: offset + 2 * half + rest, offset };
            check_one::<f32>(&rotary, heads, &positions, seed);
            check_one::<bf16>(&rotary, heads, &positions, seed);
        }

        #[test]
        fn scores_depend_on_the_distance_alone(
            a in 0u32..3000, b in 0u32..3000, shift in 0u32..3000, interleaved in any::<bool>(), seed in any::<u64>(),
        ) {
            let layout = if interleaved { Layout::Interleaved } else { Layout::HalfSplit };
            let rotary = Rotary::new(Frequencies::Plain { dims: 16 }, 10000.0, layout).unwrap();
            let mut values = Values::new(seed);
            let (q, k): (Vec<f32>, Vec<f32>) = (cast(&values.take(16, 1.0)), cast(&values.take(16, 1.0)));
            let heads = Heads { heads: 1, width: 16, offset: 0 };
            let score = |a: u32, b: u32| {
                let (mut q, mut k) = (q.clone(), k.clone());
                rotary_forward(&mut q, &rotary.table(&[a]), heads).unwrap();
                rotary_forward(&mut k, &rotary.table(&[b]), heads).unwrap();
                inner(&wide(&q), &wide(&k))
            };
            prop_assert!((score(a, b) - score(a + shift, b + shift)).abs() < 5e-3);
        }
    }

    #[test]
    fn frequencies_are_those_of_transformers() {
        let deepseek = Yarn { mscale: Some(1.0), mscale_all_dim: Some(1.0), ..Yarn::new(40.0, 4096) };
        #[allow(clippy::type_complexity)]
        let cases: [(Frequencies, f64, f64, &[(usize, f64)]); 4] = [
            (
                Frequencies::Yarn { dims: 64, yarn: deepseek },
                1e4,
                1.0,
                &[
                    (0, 1.0),
                    (1, 7.498942018e-1),
                    (10, 5.623412877e-2),
                    (11, 3.900692612e-2),
                    (15, 8.334509097e-3),
                    (20, 7.905694074e-4),
                    (22, 1.778279402e-4),
                    (23, 3.333803397e-5),
                    (31, 3.333803534e-6),
                ],
            ),
            (
                Frequencies::Yarn { dims: 128, yarn: Yarn::new(4.0, 32768) },
                1e6,
                1.138629436111989,
                &[
                    (0, 1.0),
                    (23, 6.978305988e-3),
                    (30, 1.064360957e-3),
                    (40, 4.445698505e-5),
                    (63, 3.102344408e-7),
                ],
            ),
            (
                Frequencies::Proportional { head_dim: 512, partial: 0.25, factor: 1.0 },
                1e6,
                1.0,
                &[(0, 1.0), (1, 9.474635124e-1), (63, 3.337624669e-2), (64, 0.0), (255, 0.0)],
            ),
            (
                Frequencies::Linear { dims: 256, factor: 8.0 },
                1e6,
                1.0,
                &[(0, 0.125), (1, 1.122108921e-1), (64, 1.250000059e-4), (127, 1.392467368e-7)],
            ),
        ];
        for (frequencies, base, attention_factor, expected) in cases {
            let rotary = Rotary::new(frequencies, base, Layout::HalfSplit).unwrap();
            assert!((rotary.attention_factor() as f64 - attention_factor).abs() < 1e-7);
            for (i, f) in expected {
                let got = rotary.inv_freq()[*i] as f64;
                assert!((got - f).abs() <= 2e-6 * f, "{frequencies:?} at {i}: {got:e}, not {f:e}");
            }
        }
        assert!((yarn_mscale(40.0, 1.0) - 1.3688879454).abs() < 1e-9);
    }

    #[test]
    fn pairs_that_stand_still_keep_their_bits_and_cost_no_table() {
        let frequencies = Frequencies::Proportional { head_dim: 32, partial: 0.25, factor: 1.0 };
        let rotary = Rotary::new(frequencies, 1e6, Layout::HalfSplit).unwrap();
        let table = rotary.table(&[77]);
        assert_eq!(table.bytes(), 2 * 4 * 4);
        let x: Vec<f32> = cast(&Values::new(1).take(32, 1.0));
        let mut y = x.clone();
        rotary_forward(&mut y, &table, Heads { heads: 1, width: 32, offset: 0 }).unwrap();
        assert_eq!((&x[4..16], &x[20..]), (&y[4..16], &y[20..]));
        assert!((0..4).all(|i| x[i] != y[i] && x[16 + i] != y[16 + i]));
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let rotary = Rotary::new(Frequencies::Plain { dims: 64 }, 1e7, Layout::HalfSplit).unwrap();
        let positions: Vec<u32> = (0..300).map(|t| t % 170).collect();
        let x: Vec<f32> = cast(&Values::new(2).take(300 * 8 * 256, 1.0));
        same_on_any_pool(|| {
            let mut x = x.clone();
            rotary_forward(&mut x, &rotary.table(&positions), Heads { heads: 8, width: 256, offset: 0 })
                .unwrap();
            x
        });
    }

    #[test]
    fn settings_and_shapes_that_make_no_sense_are_refused() {
        let new = |frequencies, base| Rotary::new(frequencies, base, Layout::HalfSplit);
        assert!(new(Frequencies::Plain { dims: 3 }, 1e4).is_err());
        assert!(new(Frequencies::Plain { dims: 0 }, 1e4).is_err());
        assert!(new(Frequencies::Plain { dims: 4 }, f64::NAN).is_err());
        assert!(new(Frequencies::Linear { dims: 4, factor: 0.0 }, 1e4).is_err());
        assert!(new(Frequencies::Proportional { head_dim: 4, partial: 1.5, factor: 1.0 }, 1e4).is_err());
        let table = new(Frequencies::Plain { dims: 4 }, 1e4).unwrap().table(&[0, 1]);
        let mut x = [0.0f32; 8];
        assert!(rotary_forward(&mut x, &table, Heads { heads: 1, width: 4, offset: 0 }).is_ok());
        assert!(rotary_forward(&mut x, &table, Heads { heads: 1, width: 4, offset: 1 }).is_err());
        assert!(rotary_forward(&mut x[..7], &table, Heads { heads: 1, width: 4, offset: 0 }).is_err());
    }
}
