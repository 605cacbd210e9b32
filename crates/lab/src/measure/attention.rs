//! Attention logits of sampled queries, computed from q and k: range, resolution, top keys.
//!
//! ```text
//! x[i,j] = scale <q_i, k_j>,  then cap tanh(x / cap),   rounded as in the run
//! ```
//! Keys are all causal keys inside the window that the indexer, if any, chooses.

use ballast_kernels::Rounding;
use ballast_model::config::{Attention, LatentAttention, Mixer};
use ballast_model::{Batch, Precision, Site};
use rayon::prelude::*;

use super::indexer::Scores;
use super::output::argmax;
use crate::findings::{AttentionError, LogitRange};

/// Sampled queries per head.
const QUERIES: usize = 64;

const BINS: usize = 40;

/// Dimensions and parameters of a layer's logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    scale: f32,
    window: Option<usize>,
    soft_cap: Option<f32>,
    /// Layer whose keys are used.
    pub keys_of: usize,
}

impl Shape {
    /// Returns the shape of a layer; `None` for linear attention.
    pub fn of(layer: usize, mixer: &Mixer) -> Option<Shape> {
        match mixer {
            Mixer::Linear(_) => None,
            Mixer::Softmax(Attention {
                heads,
                kv_heads,
                head_dim,
                scale,
                window,
                soft_cap,
                shared_from,
                ..
            }) => Some(Shape {
                heads: *heads,
                kv_heads: *kv_heads,
                head_dim: *head_dim,
                scale: *scale,
                window: *window,
                soft_cap: *soft_cap,
                keys_of: shared_from.unwrap_or(layer),
            }),
            Mixer::Latent(LatentAttention { heads, nope_dim, rope_dim, scale, .. }) => Some(Shape {
                heads: *heads,
                kv_heads: *heads,
                head_dim: nope_dim + rope_dim,
                scale: *scale,
                window: None,
                soft_cap: None,
                keys_of: layer,
            }),
        }
    }
}

/// Rounding of a run at the sites of attention logits.
#[derive(Clone, Copy, Debug)]
pub struct Roundings {
    qk_product: Rounding,
    logits: Rounding,
}

impl Roundings {
    /// Returns the rounding of a precision.
    pub fn of(precision: &Precision) -> Roundings {
        Roundings { qk_product: precision.site(Site::QkProduct), logits: precision.site(Site::Logits) }
    }
}

/// Logits of sampled queries, one row per query and head; `None` for a key that the indexer does not choose.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows(pub Vec<Vec<Option<f64>>>);

impl Rows {
    /// Computes logits from q [tokens, heads, d], k [tokens, kv_heads, d] and the indexer's scores, if any.
    /// Without `rounds` they are f64.
    pub fn new(
        q: &[f64],
        k: &[f64],
        shape: &Shape,
        batch: &Batch,
        scores: Option<Scores<'_>>,
        rounds: Option<Roundings>,
    ) -> Rows {
        let d = shape.head_dim;
        let query = |(begin, i): (usize, usize)| {
            let first = shape.window.map_or(0, |window| (i + 1).saturating_sub(window));
            let chosen = scores.as_ref().map(|scores| scores.keys(begin, i));
            let is_chosen =
                |j: usize| chosen.as_ref().is_none_or(|keys| keys.binary_search(&(j as u32)).is_ok());
            let row = |head: usize| -> Vec<Option<f64>> {
                let q = &q[((begin + i) * shape.heads + head) * d..][..d];
                let kv = head / (shape.heads / shape.kv_heads);
                let of_key = |j: usize| {
                    let k = &k[((begin + j) * shape.kv_heads + kv) * d..][..d];
                    logit(q.iter().zip(k).map(|(q, k)| q * k).sum(), shape, rounds)
                };
                (first..=i).map(|j| is_chosen(j).then(|| of_key(j))).collect()
            };
            (0..shape.heads).map(row).collect::<Vec<_>>()
        };
        let queries: Vec<(usize, usize)> = sample(batch).collect();
        Rows(queries.into_par_iter().flat_map_iter(query).collect())
    }

    /// Describes the range of the logits.
    pub fn range(&self, layer: usize) -> LogitRange {
        let all = || self.0.iter().flatten().flatten().copied();
        let (min, max) = (all().fold(f64::INFINITY, f64::min), all().fold(f64::NEG_INFINITY, f64::max));
        let largest = min.abs().max(max.abs());
        let width = (max - min) / BINS as f64;
        let mut counts = vec![0u64; BINS];
        for x in all() {
            let bin = if width > 0.0 { ((x - min) / width) as usize } else { 0 };
            counts[bin.min(BINS - 1)] += 1;
        }
        LogitRange {
            layer,
            min,
            max,
            largest,
            bf16_ulp: Rounding::Bf16.ulp(largest).unwrap_or(f64::INFINITY),
            f16_ulp: Rounding::F16.ulp(largest),
            histogram: (0..BINS).map(|bin| (min + bin as f64 * width, counts[bin])).collect(),
            rows: self.0.len(),
        }
    }

    /// Compares the logits with the reference's.
    pub fn compare(&self, reference: &Rows, layer: usize) -> AttentionError {
        let (mut largest, mut max_abs, mut changed, mut ties) = (0f64, 0f64, 0, 0);
        for (row, exact) in self.0.iter().zip(&reference.0) {
            for (x, exact) in row.iter().zip(exact).filter_map(|(x, exact)| Some(((*x)?, *exact))) {
                // A key that only one of them chose cannot be compared.
                let apart = exact.map_or(0.0, |exact| if x == exact { 0.0 } else { (x - exact).abs() });
                max_abs = if apart > max_abs || apart.is_nan() { apart } else { max_abs };
                largest = if x.abs() > largest || x.is_nan() { x.abs() } else { largest };
            }
            let top = |row: &[Option<f64>]| {
                argmax(&row.iter().map(|x| x.unwrap_or(f64::NEG_INFINITY)).collect::<Vec<f64>>())
            };
            let best = top(row);
            changed += (best != top(exact)) as usize;
            ties += (row.iter().filter(|x| x.is_some() && **x == row[best]).count() > 1) as usize;
        }
        let share = |count: usize| count as f64 / self.0.len().max(1) as f64;
        AttentionError { layer, largest, max_abs, top_key_changed: share(changed), ties: share(ties) }
    }
}

/// The logit as the kernel computes it: see `ballast_kernels::attention::attention_logits`.
fn logit(product: f64, shape: &Shape, rounds: Option<Roundings>) -> f64 {
    let Some(Roundings { qk_product, logits }) = rounds else {
        let x = product * shape.scale as f64;
        return shape.soft_cap.map_or(x, |cap| cap as f64 * (x / cap as f64).tanh());
    };
    let mut x = qk_product.round(product as f32 * shape.scale);
    if let Some(cap) = shape.soft_cap {
        x = qk_product.round(cap * (x / cap).tanh());
    }
    logits.round(x) as f64
}

/// Samples queries as (start of the sequence, position in it), evenly over all tokens but the first of each
/// sequence, which sees only itself.
fn sample(batch: &Batch) -> impl Iterator<Item = (usize, usize)> {
    let all: Vec<(usize, usize)> = batch
        .cu_seqlens
        .windows(2)
        .flat_map(|ends| (1..ends[1] - ends[0]).map(move |i| (ends[0], i)))
        .collect();
    let taken = all.len().min(QUERIES);
    // The last token is always sampled.
    (0..taken).map(move |n| all[(n + 1) * all.len() / taken - 1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_even_and_has_the_longest_row() {
        let batch = Batch::packed(vec![0; 1000], vec![0, 1000]).unwrap();
        let rows: Vec<_> = sample(&batch).collect();
        assert_eq!((rows.len(), rows[63]), (QUERIES, (0, 999)));
        let short = Batch::packed(vec![0; 5], vec![0, 1, 5]).unwrap();
        assert_eq!(sample(&short).collect::<Vec<_>>(), [(1, 1), (1, 2), (1, 3)]);
    }

    #[test]
    fn rounding_makes_ties_and_moves_the_largest_key() {
        let rows = |rows: [[f64; 2]; 2]| Rows(rows.map(|row| row.map(Some).to_vec()).to_vec());
        let reference = rows([[300.0, 300.4], [5.0, 1.0]]);
        let rounded = rows([[300.0, 300.0], [5.0, 1.0]]);
        let found = rounded.compare(&reference, 3);
        assert_eq!((found.top_key_changed, found.ties), (0.5, 0.5));
        assert!((found.max_abs - 0.4).abs() < 1e-9);
        let range = reference.range(3);
        assert_eq!((range.min, range.max, range.bf16_ulp), (1.0, 300.4, 2.0));
        assert_eq!(range.histogram.iter().map(|(_, n)| n).sum::<u64>(), 4);
    }

    #[test]
    fn a_key_that_an_indexer_leaves_out_is_not_there() {
        let reference = Rows(vec![vec![Some(1.0), None, Some(-2.0)]]);
        assert_eq!((reference.range(0).min, reference.range(0).max), (-2.0, 1.0));
        let other = Rows(vec![vec![None, Some(9.0), Some(-2.5)]]);
        let found = other.compare(&reference, 0);
        assert_eq!((found.largest, found.max_abs, found.top_key_changed, found.ties), (9.0, 0.5, 1.0, 0.0));
    }
}
