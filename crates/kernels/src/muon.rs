//! Muon as torch.optim.Muon computes it: momentum, orthogonalized by Newton-Schulz steps.
//!
//! For a matrix W [rows, columns], its gradient G and its momentum M, all in f32, scalars in f64 and then
//! rounded:
//! ```text
//! M = M + (1 - mu) (G - M)
//! U = M + (1 - mu) (G - M) with Nesterov momentum, else M
//! X = U / max(|U|, eps)                         |U|: Frobenius norm in f64, so no singular value of X exceeds 1
//! `ns_steps` times   A = X X^T    B = b A + c A^2    X = a X + B X       rows <= columns
//!                    A = X^T X    B = b A + c A^2    X = a X + X B       rows > columns
//! W = (1 - lr weight_decay) W - lr ratio(rows, columns) X
//! ```
//! A step leaves the singular vectors of X and takes each singular value s to p(s) = a s + b s^3 + c s^5. The
//! default coefficients have a steep slope at 0: five steps take every s above 0.003 to between 0.68 and
//! 1.21, not to 1 exactly.
//!
//! The steps run in f32 (torch runs them in bf16). A matrix of zeros stays zero.
//!
//! A stored tensor may hold several matrices: experts stacked, or q, k and v in one projection. [`Parts`]
//! says which rows make which matrix; each is orthogonalized by itself, and its own shape goes into the
//! ratio.

use std::ops::Range;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::Element;
use crate::adamw::global_norm;
use crate::error::{Result, check, check_len, check_shape, elements};
use crate::matmul::{Mat, matmul_strided};
use crate::partition::ELEMENTS;
use crate::scratch::take;

/// Fewest rows of a product that one task computes: below it, packing the operands costs more than it gains.
const MIN_ROWS: usize = 32;

/// Tasks that a large product is divided into.
const TASKS: usize = 16;

/// Most Newton-Schulz steps.
const MOST_STEPS: usize = 99;

/// Factor of the learning rate by the shape of a matrix. serde has the names of torch.optim.Muon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdjustLr {
    /// sqrt(max(1, rows / columns)), the rule of the first implementation of Muon.
    Original,
    /// 0.2 sqrt(max(rows, columns)): updates get the RMS of AdamW's, so that its learning rates can be used.
    #[default]
    #[serde(rename = "match_rms_adamw")]
    MatchRmsAdamW,
    /// sqrt(rows / columns).
    SpectralUnclamped,
}

impl AdjustLr {
    /// The factor for a matrix [rows, columns].
    pub fn ratio(self, rows: usize, columns: usize) -> f64 {
        let (rows, columns) = (rows as f64, columns as f64);
        match self {
            AdjustLr::Original => (rows / columns).max(1.0).sqrt(),
            AdjustLr::MatchRmsAdamW => 0.2 * rows.max(columns).sqrt(),
            AdjustLr::SpectralUnclamped => (rows / columns).sqrt(),
        }
    }
}

/// Settings of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Learning rate, before [`Options::adjust_lr`].
    pub lr: f64,
    /// mu, decay of the momentum.
    pub momentum: f64,
    /// True for Nesterov momentum.
    pub nesterov: bool,
    /// Decoupled weight decay; its learning rate is not adjusted.
    pub weight_decay: f64,
    /// Smallest norm that U is divided by.
    pub eps: f64,
    /// Number of Newton-Schulz steps.
    pub ns_steps: usize,
    /// a, b, c of a Newton-Schulz step.
    pub ns_coefficients: [f64; 3],
    /// Factor of the learning rate by shape.
    pub adjust_lr: AdjustLr,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            lr: 1e-3,
            momentum: 0.95,
            nesterov: true,
            weight_decay: 0.1,
            eps: 1e-7,
            ns_steps: 5,
            ns_coefficients: [3.4445, -4.775, 2.0315],
            adjust_lr: AdjustLr::default(),
        }
    }
}

impl Options {
    fn check(&self) -> Result {
        let Options { lr, momentum, weight_decay, eps, ns_steps, ns_coefficients, .. } = *self;
        check((0.0..1.0).contains(&momentum), || {
            format!("Muon: momentum must be from 0 to below 1, got {momentum}")
        })?;
        check(eps > 0.0 && eps.is_finite(), || format!("Muon: eps must be above 0, got {eps}"))?;
        check(lr.is_finite() && weight_decay.is_finite(), || {
            format!("Muon: lr and weight decay must be finite, got {lr} and {weight_decay}")
        })?;
        check(ns_steps <= MOST_STEPS, || {
            format!("Muon: ns_steps must be at most {MOST_STEPS}, got {ns_steps}")
        })?;
        check(ns_coefficients.iter().all(|c| c.is_finite()), || {
            format!("Muon: ns_coefficients must be finite, got {ns_coefficients:?}")
        })
    }

    /// An upper bound of the singular values after all steps, if it is small in every step. In exact
    /// arithmetic; the caller leaves room for rounding.
    fn spectral_bound(&self) -> Option<f64> {
        let [a, b, c] = self.ns_coefficients;
        let p = |s: f64| (s * (a + s * s * (b + s * s * c))).abs();
        // Extrema of p: a + 3 b t + 5 c t^2 = 0 with t = s^2.
        let root = (9.0 * b * b - 20.0 * a * c).sqrt();
        let extrema = [(-3.0 * b + root) / (10.0 * c), (-3.0 * b - root) / (10.0 * c), -a / (3.0 * b)];
        let mut bound = 1.0f64;
        for _ in 0..self.ns_steps {
            let inside = extrema.iter().map(|t| t.sqrt()).filter(|s| *s < bound);
            bound = inside.map(p).fold(p(bound), f64::max);
            if bound.is_nan() || bound > 4.0 {
                return None;
            }
        }
        Some(bound)
    }
}

/// The matrices that a stored tensor consists of: rows of `columns` elements, each row in exactly one matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parts {
    rows: usize,
    columns: usize,
    /// Row ranges of each matrix, in order.
    matrices: Vec<Vec<Range<usize>>>,
}

impl Parts {
    /// One matrix [rows, columns].
    pub fn whole(rows: usize, columns: usize) -> Parts {
        Parts { rows, columns, matrices: vec![vec![0..rows]] }
    }

    /// These matrices, each made of row ranges. An error unless every row belongs to exactly one.
    pub fn new(rows: usize, columns: usize, matrices: Vec<Vec<Range<usize>>>) -> Result<Parts> {
        let mut ranges: Vec<&Range<usize>> = matrices.iter().flatten().filter(|r| !r.is_empty()).collect();
        ranges.sort_by_key(|range| range.start);
        let end = ranges.iter().try_fold(0, |end, range| (range.start == end).then_some(range.end));
        check(end == Some(rows), || {
            format!("Muon: each of {rows} rows must belong to exactly one matrix, got {matrices:?}")
        })?;
        Ok(Parts { rows, columns, matrices })
    }

    /// Shapes of the matrices.
    pub fn shapes(&self) -> impl Iterator<Item = [usize; 2]> {
        self.matrices.iter().map(|ranges| [height(ranges), self.columns])
    }

    fn check<T>(&self, name: &'static str, values: &[T]) -> Result {
        check_shape(name, values, [self.rows, self.columns])
    }

    /// Element ranges in the tensor of the rows of a matrix.
    fn spans(&self, ranges: &[Range<usize>]) -> impl Iterator<Item = Range<usize>> {
        ranges.iter().map(|rows| rows.start * self.columns..rows.end * self.columns)
    }
}

fn height(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(|range| range.len()).sum()
}

/// Number of f32 of workspace that [`newton_schulz`] needs.
pub fn newton_schulz_workspace(rows: usize, columns: usize) -> usize {
    let small = rows.min(columns);
    rows * columns + 2 * small * small
}

/// Number of f32 of workspace that [`muon_step`] needs. It is one buffer, not one per thread: all threads
/// work on one matrix.
pub fn muon_step_workspace(parts: &Parts) -> usize {
    let needed = |[rows, columns]: [usize; 2]| rows * columns + newton_schulz_workspace(rows, columns);
    parts.shapes().map(needed).max().unwrap_or(0)
}

/// Orthogonalizes x [rows, columns] in place: X / max(|X|, eps), then the steps of the module's header.
pub fn newton_schulz(
    x: &mut [f32],
    rows: usize,
    columns: usize,
    coefficients: [f64; 3],
    steps: usize,
    eps: f64,
    workspace: &mut [f32],
) -> Result {
    check_shape("x", x, [rows, columns])?;
    check_len("workspace", workspace, newton_schulz_workspace(rows, columns))?;
    if x.is_empty() {
        return Ok(());
    }
    // In f64: a norm of finite f32 may exceed f32.
    let norm = global_norm(&[x]).max(eps);
    x.par_chunks_mut(ELEMENTS).for_each(|x| x.iter_mut().for_each(|x| *x = (*x as f64 / norm) as f32));
    let [a, b, c] = coefficients.map(|c| c as f32);
    let (small, is_tall) = (rows.min(columns), rows > columns);
    let mut rest = workspace;
    let gram = take(&mut rest, small * small);
    let polynomial = take(&mut rest, small * small);
    let (mut now, mut next) = (x, take(&mut rest, rows * columns));
    for _ in 0..steps {
        let x = Mat::dense(now, rows, columns);
        let (left, right) = if is_tall { (x.t(), x) } else { (x, x.t()) };
        product(gram, 1.0, left, right, 0.0);
        polynomial.copy_from_slice(gram);
        let gram = Mat::dense(gram, small, small);
        product(polynomial, c, gram, gram, b);
        let polynomial = Mat::dense(polynomial, small, small);
        next.copy_from_slice(now);
        let (left, right) = if is_tall { (x, polynomial) } else { (polynomial, x) };
        product(next, 1.0, left, right, a);
        std::mem::swap(&mut now, &mut next);
    }
    // After an odd number of steps the result lies in the workspace, and `next` is the caller's x.
    if steps % 2 == 1 {
        next.copy_from_slice(now);
    }
    Ok(())
}

/// Dense C = alpha A B + beta C, by blocks of rows whose number depends on the shape alone.
fn product(c: &mut [f32], alpha: f32, a: Mat<'_>, b: Mat<'_>, beta: f32) {
    let (block, columns) = (a.rows().div_ceil(TASKS).max(MIN_ROWS), b.columns());
    c.par_chunks_mut(block * columns).enumerate().for_each(|(i, c)| {
        let rows = i * block..i * block + c.len() / columns;
        matmul_strided(c, columns, alpha, a.part(rows, 0..a.columns()), b, beta);
    });
}

/// Factors of the momentum, rounded to f32.
#[derive(Clone, Copy)]
struct Momentum {
    one_minus_mu: f32,
    nesterov: bool,
    scale: f32,
}

impl Momentum {
    fn new(options: &Options, scale: f32) -> Momentum {
        Momentum { one_minus_mu: (1.0 - options.momentum) as f32, nesterov: options.nesterov, scale }
    }

    /// The new momentum of an element.
    #[inline(always)]
    fn new_m(&self, m: f32, g: f32) -> f32 {
        m + self.one_minus_mu * (g * self.scale - m)
    }

    /// U of an element.
    #[inline(always)]
    fn direction(&self, m: f32, g: f32) -> f32 {
        let m = self.new_m(m, g);
        if self.nesterov { m + self.one_minus_mu * (g * self.scale - m) } else { m }
    }

    /// x = U of the rows of a matrix, from the old momentum.
    fn gather(&self, x: &mut [f32], spans: impl Iterator<Item = Range<usize>>, m: &[f32], g: &[f32]) {
        let mut rest = x;
        for span in spans {
            let rows = take(&mut rest, span.len());
            let old = m[span.clone()].par_chunks(ELEMENTS).zip(g[span].par_chunks(ELEMENTS));
            rows.par_chunks_mut(ELEMENTS).zip(old).for_each(|(x, (m, g))| {
                for (x, (m, g)) in x.iter_mut().zip(m.iter().zip(g)) {
                    *x = self.direction(*m, *g);
                }
            });
        }
    }
}

/// 1 - lr weight_decay, and the adjusted learning rate of a matrix.
fn factors(options: &Options, [rows, columns]: [usize; 2]) -> (f32, f32) {
    let keep = 1.0 - options.lr * options.weight_decay;
    (keep as f32, (options.lr * options.adjust_lr.ratio(rows, columns)) as f32)
}

/// One step on w [rows, columns] and its momentum m, from its gradient g times `scale` (the factor of
/// [`clip`](crate::adamw::clip)); `copy`, if given, gets the new w, rounded.
pub fn muon_step<T: Element>(
    w: &mut [f32],
    mut copy: Option<&mut [T]>,
    m: &mut [f32],
    g: &[f32],
    scale: f32,
    parts: &Parts,
    options: &Options,
    workspace: &mut [f32],
) -> Result {
    options.check()?;
    check_arguments(w, m, g, parts)?;
    if let Some(copy) = &copy {
        parts.check("copy", copy)?;
    }
    check_len("workspace", workspace, muon_step_workspace(parts))?;
    let momentum = Momentum::new(options, scale);
    for (ranges, shape) in parts.matrices.iter().zip(parts.shapes()) {
        let x = orthogonalized(momentum, parts, ranges, shape, m, g, options, workspace)?;
        let (keep, lr) = factors(options, shape);
        let mut rest = &*x;
        for span in parts.spans(ranges) {
            let (x, after) = rest.split_at(span.len());
            rest = after;
            let w = &mut w[span.clone()];
            let blocks = w.par_chunks_mut(ELEMENTS).zip(x.par_chunks(ELEMENTS));
            match copy.as_deref_mut() {
                None => blocks.for_each(|(w, x)| descend(w, x, keep, lr)),
                Some(copy) => {
                    blocks.zip(copy[span].par_chunks_mut(ELEMENTS)).for_each(|((w, x), copy)| {
                        descend(w, x, keep, lr);
                        T::store(copy, w);
                    });
                }
            }
        }
    }
    m.par_chunks_mut(ELEMENTS).zip(g.par_chunks(ELEMENTS)).for_each(|(m, g)| {
        m.iter_mut().zip(g).for_each(|(m, g)| *m = momentum.new_m(*m, *g));
    });
    Ok(())
}

fn check_arguments(w: &[f32], m: &[f32], g: &[f32], parts: &Parts) -> Result {
    parts.check("w", w)?;
    parts.check("m", m)?;
    parts.check("g", g)?;
    // The workspace has at most four times as many elements as w.
    let most = elements("w", [4, parts.rows.max(1), parts.columns.max(1)]);
    most.map(|_| ())
}

fn descend(w: &mut [f32], x: &[f32], keep: f32, lr: f32) {
    w.iter_mut().zip(x).for_each(|(w, x)| *w = descended(*w, *x, keep, lr));
}

#[inline(always)]
fn descended(w: f32, x: f32, keep: f32, lr: f32) -> f32 {
    w * keep - lr * x
}

/// The orthogonalized U of one matrix, in the front of `workspace`.
fn orthogonalized<'s>(
    momentum: Momentum,
    parts: &Parts,
    ranges: &[Range<usize>],
    [rows, columns]: [usize; 2],
    m: &[f32],
    g: &[f32],
    options: &Options,
    workspace: &'s mut [f32],
) -> Result<&'s mut [f32]> {
    let mut rest = workspace;
    let x = take(&mut rest, rows * columns);
    momentum.gather(x, parts.spans(ranges), m, g);
    let workspace = &mut rest[..newton_schulz_workspace(rows, columns)];
    let Options { ns_coefficients, ns_steps, eps, .. } = *options;
    newton_schulz(x, rows, columns, ns_coefficients, ns_steps, eps, workspace)?;
    Ok(x)
}

/// An element that [`muon_step`] would leave non-finite.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fault {
    /// Index of the element.
    pub element: usize,
    /// Value it would get, in f32; NaN if its momentum is non-finite.
    pub value: f32,
    /// Momentum it would get.
    pub momentum: f32,
}

/// The first element that [`muon_step`] with these arguments would leave with a non-finite momentum, or would
/// take from a finite value to one that is non-finite in `T`, which the model runs on. Changes nothing.
///
/// If the coefficients bound the singular values and w is far from overflow, the answer needs no
/// orthogonalization. Otherwise the step is computed in `workspace`, which is resized as needed.
pub fn muon_fault<T: Element>(
    w: &[f32],
    m: &[f32],
    g: &[f32],
    scale: f32,
    parts: &Parts,
    options: &Options,
    workspace: &mut Vec<f32>,
) -> Result<Option<Fault>> {
    options.check()?;
    check_arguments(w, m, g, parts)?;
    let momentum = Momentum::new(options, scale);
    let pairs = m.par_iter().with_min_len(ELEMENTS).zip(g.par_iter().with_min_len(ELEMENTS));
    let is_bad = |(m, g): (&f32, &f32)| {
        !(momentum.new_m(*m, *g).is_finite() && momentum.direction(*m, *g).is_finite())
    };
    if let Some(element) = pairs.position_first(is_bad) {
        let new = momentum.new_m(m[element], g[element]);
        return Ok(Some(Fault { element, value: f32::NAN, momentum: new }));
    }
    if is_harmless(w, parts, options) {
        return Ok(None);
    }
    workspace.clear();
    workspace.resize(muon_step_workspace(parts), 0.0);
    let mut first: Option<Fault> = None;
    for (ranges, shape) in parts.matrices.iter().zip(parts.shapes()) {
        let x = orthogonalized(momentum, parts, ranges, shape, m, g, options, workspace)?;
        let (keep, lr) = factors(options, shape);
        for (element, x) in parts.spans(ranges).flatten().zip(x.iter()) {
            let value = descended(w[element], *x, keep, lr);
            let is_kept = T::from_f32(value).to_f32().is_finite() || !w[element].is_finite();
            if !is_kept && first.is_none_or(|fault| element < fault.element) {
                let momentum = momentum.new_m(m[element], g[element]);
                first = Some(Fault { element, value, momentum });
                break;
            }
        }
    }
    Ok(first)
}

/// Returns true if no step with these options can make a finite w non-finite, for any finite U.
fn is_harmless(w: &[f32], parts: &Parts, options: &Options) -> bool {
    // Largest finite bf16 and f32: 3.4e38.
    const FAR: f64 = 1e38;
    let Some(bound) = options.spectral_bound() else { return false };
    let finite = w.par_iter().with_min_len(ELEMENTS).filter(|w| w.is_finite());
    let largest = finite.map(|w| w.abs()).reduce(|| 0.0, f32::max) as f64;
    // An element is at most the spectral norm; twice that leaves room for rounding.
    parts.shapes().all(|shape| {
        let (keep, lr) = factors(options, shape);
        largest * keep.abs() as f64 + 2.0 * bound * lr.abs() as f64 <= FAR
    })
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;
    use crate::matmul::matmul_f64;
    use crate::testing::{Values, assert_close, cast, same_on_any_pool, wide};

    /// The steps of the header, plainly, in f64.
    fn reference(u: &[f64], rows: usize, columns: usize, o: &Options) -> Vec<f64> {
        let [a, b, c] = o.ns_coefficients;
        let norm = u.iter().map(|x| x * x).sum::<f64>().sqrt().max(o.eps);
        let mut x: Vec<f64> = u.iter().map(|x| x / norm).collect();
        for _ in 0..o.ns_steps {
            let view = Mat::dense(&x, rows, columns);
            let mut gram = vec![0.0; rows * rows];
            matmul_f64(&mut gram, rows, 1.0, view, view.t(), 0.0);
            let mut polynomial = gram.clone();
            let square = Mat::dense(&gram, rows, rows);
            matmul_f64(&mut polynomial, rows, c, square, square, b);
            let mut next = x.clone();
            matmul_f64(&mut next, columns, 1.0, Mat::dense(&polynomial, rows, rows), view, a);
            x = next;
        }
        x
    }

    fn orthogonalize(u: &[f64], rows: usize, columns: usize, o: &Options) -> Vec<f32> {
        let mut x: Vec<f32> = cast(u);
        let mut workspace = vec![f32::NAN; newton_schulz_workspace(rows, columns)];
        newton_schulz(&mut x, rows, columns, o.ns_coefficients, o.ns_steps, o.eps, &mut workspace).unwrap();
        x
    }

    /// Singular values by one-sided Jacobi rotations of the shorter side.
    fn singular_values(x: &[f64], rows: usize, columns: usize) -> Vec<f64> {
        let mut vectors: Vec<Vec<f64>> = if rows <= columns {
            x.chunks(columns).map(<[f64]>::to_vec).collect()
        } else {
            (0..columns).map(|j| (0..rows).map(|i| x[i * columns + j]).collect()).collect()
        };
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        for _ in 0..30 {
            for i in 0..vectors.len() {
                for j in 0..i {
                    let [p, q, r] = [(i, i), (j, j), (i, j)].map(|(i, j)| dot(&vectors[i], &vectors[j]));
                    if r.abs() <= 1e-15 * (p * q).sqrt() {
                        continue;
                    }
                    let zeta = (q - p) / (2.0 * r);
                    let t = zeta.signum() / (zeta.abs() + (1.0 + zeta * zeta).sqrt());
                    let cos = 1.0 / (1.0 + t * t).sqrt();
                    let sin = cos * t;
                    for k in 0..vectors[i].len() {
                        let (x, y) = (vectors[i][k], vectors[j][k]);
                        (vectors[i][k], vectors[j][k]) = (cos * x - sin * y, sin * x + cos * y);
                    }
                }
            }
        }
        vectors.iter().map(|v| dot(v, v).sqrt()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn any_shape_agrees_with_the_formula(rows in 1usize..40, columns in 1usize..40, steps in 0usize..7, seed in any::<u64>()) {
            let u = Values::new(seed).take(rows * columns, 1.0);
            let o = Options { ns_steps: steps, ..Options::default() };
            assert_close("x", &orthogonalize(&u, rows, columns, &o), &reference(&u, rows, columns, &o), 3e-5);
        }

        #[test]
        fn singular_values_come_near_one(rows in 1usize..30, columns in 1usize..30, by in -20i32..20, seed in any::<u64>()) {
            let size = 2f64.powi(by);
            let u = Values::new(seed).take(rows * columns, size);
            prop_assume!(u.iter().any(|u| u.abs() > 1e-3 * size));
            let norm = u.iter().map(|x| x * x).sum::<f64>().sqrt();
            let o = Options { eps: 1e-30, ..Options::default() };
            let mut before = singular_values(&u, rows, columns);
            let mut after = singular_values(&wide(&orthogonalize(&u, rows, columns, &o)), rows, columns);
            before.sort_by(f64::total_cmp);
            after.sort_by(f64::total_cmp);
            prop_assert!(after.iter().all(|s| *s < 1.22), "{:?}", after);
            let large = before.iter().filter(|s| **s > 0.003 * norm).count();
            prop_assert!(after[after.len() - large..].iter().all(|s| *s > 0.67), "{:?} {:?}", before, after);
        }

        #[test]
        fn parts_are_updated_as_if_each_were_a_tensor(
            head in 1usize..5, heads in 1usize..4, columns in 1usize..20, nesterov in any::<bool>(), seed in any::<u64>(),
        ) {
            // q and a gate of each head beside each other, as q_proj of a gated attention has them.
            let rows = 2 * head * heads;
            let part = |j: usize| (0..heads).map(|i| (2 * i + j) * head..(2 * i + j + 1) * head).collect::<Vec<_>>();
            let parts = Parts::new(rows, columns, vec![part(0), part(1)]).unwrap();
            let o = Options { nesterov, lr: 0.02, ..Options::default() };
            let mut values = Values::new(seed);
            let [w, m, g] = [(); 3].map(|()| cast::<f32>(&values.take(rows * columns, 1.0)));
            let run = |w: &[f32], m: &[f32], g: &[f32], parts: &Parts| {
                let (mut w, mut m, mut copy) = (w.to_vec(), m.to_vec(), vec![bf16::ZERO; w.len()]);
                let mut workspace = vec![f32::NAN; muon_step_workspace(parts)];
                muon_step(&mut w, Some(&mut copy), &mut m, g, 0.5, parts, &o, &mut workspace).unwrap();
                assert_eq!(copy, cast::<bf16>(&wide(&w)));
                (w, m)
            };
            let (got_w, got_m) = run(&w, &m, &g, &parts);
            for j in 0..2 {
                let rows_of = |x: &[f32]| -> Vec<f32> { parts.spans(&part(j)).flat_map(|span| x[span].to_vec()).collect() };
                let alone = run(&rows_of(&w), &rows_of(&m), &rows_of(&g), &Parts::whole(head * heads, columns));
                prop_assert_eq!(alone, (rows_of(&got_w), rows_of(&got_m)));
            }
        }
    }

    #[test]
    fn zeros_stay_zero_and_a_lost_rank_stays_lost() {
        for (rows, columns) in [(1, 1), (1, 7), (7, 1), (5, 9), (9, 5), (64, 33)] {
            let o = Options::default();
            assert!(orthogonalize(&vec![0.0; rows * columns], rows, columns, &o).iter().all(|x| *x == 0.0));
            // An outer product: one singular value.
            let mut values = Values::new(7);
            let (a, b) = (values.take(rows, 1.0), values.take(columns, 1.0));
            let u: Vec<f64> = a.iter().flat_map(|a| b.iter().map(move |b| a * b)).collect();
            let x = orthogonalize(&u, rows, columns, &o);
            let mut s = singular_values(&wide(&x), rows, columns);
            s.sort_by(|a, b| b.total_cmp(a));
            assert!(s[0] > 0.67 && s[0] < 1.22 && s[1..].iter().all(|s| *s < 1e-3), "{s:?}");
        }
        assert!(orthogonalize(&[], 0, 5, &Options::default()).is_empty());
    }

    #[test]
    fn values_near_the_limits_of_f32_are_orthogonalized() {
        for size in [3e38, 1e-38, 1e-44] {
            let u: Vec<f64> = [1.0, 0.5, -0.5, 1.0].iter().map(|x| x * size).collect();
            let x = orthogonalize(&u, 2, 2, &Options { eps: 1e-60, ..Options::default() });
            let s = singular_values(&wide(&x), 2, 2);
            assert!(s.iter().all(|s| *s > 0.67 && *s < 1.22), "{size}: {s:?}");
        }
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        for (rows, columns) in [(150, 260), (260, 150), (70, 1)] {
            let mut values = Values::new(3);
            let [w, m, g] = [(); 3].map(|()| cast::<f32>(&values.take(rows * columns, 1.0)));
            let parts = Parts::new(rows, columns, vec![vec![0..50], vec![50..rows]]).unwrap();
            same_on_any_pool(|| {
                let (mut w, mut m) = (w.clone(), m.clone());
                let mut workspace = vec![0.0; muon_step_workspace(&parts)];
                let o = Options::default();
                muon_step::<f32>(&mut w, None, &mut m, &g, 1.0, &parts, &o, &mut workspace).unwrap();
                [w, m].map(|x| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>())
            });
        }
    }

    #[test]
    fn the_first_element_that_a_step_would_make_non_finite_is_found() {
        let parts = Parts::new(4, 3, vec![vec![0..1, 3..4], vec![1..3]]).unwrap();
        let fault = |w: f32, m: f32, g: f32, o: &Options| {
            let (mut all_w, mut all_m, mut all_g) = (vec![1.0f32; 12], vec![0.1f32; 12], vec![0.5f32; 12]);
            (all_w[10], all_m[10], all_g[10]) = (w, m, g);
            (all_w[4], all_w[11]) = (w, w);
            let wide = muon_fault::<f32>(&all_w, &all_m, &all_g, 1.0, &parts, o, &mut Vec::new()).unwrap();
            let narrow = muon_fault::<bf16>(&all_w, &all_m, &all_g, 1.0, &parts, o, &mut Vec::new()).unwrap();
            // What is found is what a step does.
            let mut workspace = vec![0.0; muon_step_workspace(&parts)];
            muon_step::<f32>(&mut all_w, None, &mut all_m, &all_g, 1.0, &parts, o, &mut workspace).unwrap();
            let bad = (0..12).find(|i| !(all_w[*i].is_finite() && all_m[*i].is_finite()));
            (wide.map(|fault| fault.element), narrow.map(|fault| fault.element), bad)
        };
        let o = Options { weight_decay: 0.0, ..Options::default() };
        assert_eq!(fault(1.0, 0.1, 0.5, &o), (None, None, None));
        let (wide, narrow, _) = fault(f32::NAN, 0.1, 0.5, &o);
        assert_eq!((wide, narrow), (None, None), "the step did not make it so");
        assert_eq!(fault(1.0, 3e38, -3e38, &o).0, Some(10), "the momentum overflows");
        assert_eq!(fault(1.0, 0.1, f32::INFINITY, &o).0, Some(10));
        assert_eq!(
            fault(3.4e38, 0.1, 0.5, &o),
            (None, Some(4), None),
            "f32 holds it, bf16 rounds it to infinity"
        );
        let wild = Options { ns_coefficients: [1e9, 1e9, 1e9], ..o };
        let (wide, narrow, bad) = fault(1.0, 0.1, 0.5, &wild);
        assert!(
            wide.is_some() && wide == narrow && wide == bad,
            "{wide:?} {bad:?}: the steps themselves overflow"
        );
    }

    #[test]
    fn the_default_coefficients_bound_the_singular_values() {
        let bound = Options::default().spectral_bound().unwrap();
        assert!((bound - 1.2024).abs() < 1e-3, "{bound}");
        let classical = Options { ns_coefficients: [1.5, -0.5, 0.0], ..Options::default() };
        assert!((classical.spectral_bound().unwrap() - 1.0).abs() < 1e-12);
        assert_eq!(Options { ns_coefficients: [9.0, 0.0, 0.0], ..Options::default() }.spectral_bound(), None);
    }

    #[test]
    fn learning_rates_are_adjusted_as_in_torch() {
        assert_eq!(AdjustLr::Original.ratio(16, 4), 2.0);
        assert_eq!(AdjustLr::Original.ratio(4, 16), 1.0);
        assert_eq!(AdjustLr::MatchRmsAdamW.ratio(4, 16), 0.8);
        assert_eq!(AdjustLr::SpectralUnclamped.ratio(4, 16), 0.5);
    }

    #[test]
    fn settings_and_parts_that_make_no_sense_are_refused() {
        let parts = Parts::whole(1, 1);
        let run = |o: &Options| {
            let mut workspace = vec![0.0; muon_step_workspace(&parts)];
            muon_step::<f32>(&mut [1.0], None, &mut [0.0], &[1.0], 1.0, &parts, o, &mut workspace)
        };
        let o = Options::default();
        assert!(run(&o).is_ok());
        assert!(run(&Options { momentum: 1.0, ..o }).is_err());
        assert!(run(&Options { eps: 0.0, ..o }).is_err());
        assert!(run(&Options { lr: f64::NAN, ..o }).is_err());
        assert!(run(&Options { ns_steps: 100, ..o }).is_err());
        assert!(run(&Options { ns_coefficients: [1.0, f64::NAN, 0.0], ..o }).is_err());
        for matrices in [vec![vec![0..3]], vec![vec![0..2], vec![1..4]], vec![vec![0..1], vec![2..4]], vec![]]
        {
            assert!(Parts::new(4, 2, matrices).is_err());
        }
        assert!(Parts::new(4, 2, vec![vec![2..4], vec![0..2]]).is_ok());
    }
}
