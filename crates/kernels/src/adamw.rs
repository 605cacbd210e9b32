//! AdamW as in torch.optim.AdamW, and gradient clipping by the global norm.
//!
//! Step t >= 1. Tensors are f32; the scalar factors are computed in f64 and rounded:
//! ```text
//! w = w (1 - lr weight_decay)
//! m = m + (1 - beta1) (g - m)                v = beta2 v + (1 - beta2) g^2
//! w = w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//! ```
//! The master weight is f32. The model's bf16 copy, if there is one, is rounded from the master after each
//! step, so an update smaller than half a bf16 step is not lost.
//!
//! The global norm is a sum of squares in f64, block by block in a fixed order. A non-finite norm is an
//! error, and nothing is scaled: otherwise clipping would spread one bad gradient over every parameter.
//!
//! # Example
//! ```
//! use ballast_kernels::adamw::{Options, adamw_step, clip};
//!
//! let options = Options { lr: 0.1, weight_decay: 0.0, ..Options::default() };
//! let (mut w, mut m, mut v, mut g) = ([1.0], [0.0], [0.0], [3.0]);
//! let norm = clip(&mut [&mut g], 1.0)?;
//! assert!(norm == 3.0 && (g[0] - 1.0).abs() < 1e-5);
//! adamw_step(&mut w, &mut m, &mut v, &g, 1.0, 1, &options)?;
//! assert!((w[0] - 0.9).abs() < 1e-6, "the first step has the length of the learning rate");
//! # Ok::<(), ballast_kernels::KernelError>(())
//! ```

use rayon::prelude::*;

use crate::Element;
use crate::error::{KernelError, Result, check, check_len};
use crate::partition::ELEMENTS;
use crate::simd::{fma, simd_fn};

/// Settings of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

impl Default for Options {
    fn default() -> Options {
        Options { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 1e-2 }
    }
}

/// The factors of one step, rounded to f32.
#[derive(Clone, Copy)]
struct Factors {
    keep: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    root_correction: f32,
    eps: f32,
    step_size: f32,
}

impl Factors {
    fn new(options: &Options, step: u32) -> Result<Factors> {
        let Options { lr, beta1, beta2, eps, weight_decay } = *options;
        check(step > 0, || "AdamW step must be 1 or more, got 0".into())?;
        check((0.0..1.0).contains(&beta1) && (0.0..1.0).contains(&beta2), || {
            format!("AdamW beta1 and beta2 must be at least 0 and below 1, got {beta1} and {beta2}")
        })?;
        check(eps >= 0.0 && lr.is_finite() && weight_decay.is_finite(), || {
            format!(
                "AdamW needs a finite lr and weight decay and eps >= 0, got lr {lr}, weight decay {weight_decay}, eps {eps}"
            )
        })?;
        let step = step as f64;
        Ok(Factors {
            keep: (1.0 - lr * weight_decay) as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            root_correction: (1.0 - beta2.powf(step)).sqrt() as f32,
            eps: eps as f32,
            step_size: (lr / (1.0 - beta1.powf(step))) as f32,
        })
    }
}

/// Updates w \[n\] and its moments m and v \[n\] with the gradient g \[n\] times `scale` (for clipping, see
/// [`clip_factor`]). Steps count from 1.
pub fn adamw_step(
    w: &mut [f32],
    m: &mut [f32],
    v: &mut [f32],
    g: &[f32],
    scale: f32,
    step: u32,
    options: &Options,
) -> Result {
    adamw_step_with_copy::<f32>(w, None, m, v, g, scale, step, options)
}

/// [`adamw_step`] that also rounds the new w into `copy` \[n\], the model's weight.
pub fn adamw_step_with_copy<T: Element>(
    w: &mut [f32],
    copy: Option<&mut [T]>,
    m: &mut [f32],
    v: &mut [f32],
    g: &[f32],
    scale: f32,
    step: u32,
    options: &Options,
) -> Result {
    let n = w.len();
    check_len("m", m, n)?;
    check_len("v", v, n)?;
    check_len("g", g, n)?;
    if let Some(copy) = &copy {
        check_len("copy", copy, n)?;
    }
    let factors = Factors::new(options, step)?;
    let blocks = w
        .par_chunks_mut(ELEMENTS)
        .zip(m.par_chunks_mut(ELEMENTS))
        .zip(v.par_chunks_mut(ELEMENTS))
        .zip(g.par_chunks(ELEMENTS));
    match copy {
        None => blocks.for_each(|(((w, m), v), g)| update(w, m, v, g, scale, factors)),
        Some(copy) => blocks.zip(copy.par_chunks_mut(ELEMENTS)).for_each(|((((w, m), v), g), copy)| {
            update(w, m, v, g, scale, factors);
            T::store(copy, w);
        }),
    }
    Ok(())
}

/// Index of the first element that [`adamw_step_with_copy`] with these arguments would leave with a
/// non-finite moment, or would move from a finite value to one that is non-finite in `T`, the model's storage
/// type. Changes nothing.
pub fn adamw_fault<T: Element>(
    w: &[f32],
    m: &[f32],
    v: &[f32],
    g: &[f32],
    scale: f32,
    step: u32,
    options: &Options,
) -> Result<Option<usize>> {
    let n = w.len();
    check_len("m", m, n)?;
    check_len("v", v, n)?;
    check_len("g", g, n)?;
    let f = Factors::new(options, step)?;
    let blocks = w
        .par_chunks(ELEMENTS)
        .zip(m.par_chunks(ELEMENTS))
        .zip(v.par_chunks(ELEMENTS))
        .zip(g.par_chunks(ELEMENTS))
        .enumerate();
    let first = blocks.filter(|(_, (((w, m), v), g))| !stays_finite::<T>(w, m, v, g, scale, f)).map(
        |(block, (((w, m), v), g))| {
            let is_faulty =
                |i: &usize| !stays_finite::<T>(&w[*i..=*i], &m[*i..=*i], &v[*i..=*i], &g[*i..=*i], scale, f);
            block * ELEMENTS + (0..w.len()).find(is_faulty).unwrap_or(0)
        },
    );
    Ok(first.min())
}

/// The new w, m and v of one element; g is scaled already.
#[inline(always)]
fn updated<const FMA: bool>(w: f32, m: f32, v: f32, g: f32, f: &Factors) -> (f32, f32, f32) {
    let m = fma::<FMA>(f.one_minus_beta1, g - m, m);
    let v = fma::<FMA>(f.one_minus_beta2 * g, g, f.beta2 * v);
    let root = v.sqrt() / f.root_correction + f.eps;
    (fma::<FMA>(-f.step_size, m / root, w * f.keep), m, v)
}

simd_fn! {
    fn update(w: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32], scale: f32, f: Factors) {
        for (((w, m), v), g) in w.iter_mut().zip(m).zip(v).zip(g) {
            (*w, *m, *v) = updated::<FMA>(*w, *m, *v, g * scale, &f);
        }
    }
}

simd_fn! {
    fn stays_finite<T: Element>(w: &[f32], m: &[f32], v: &[f32], g: &[f32], scale: f32, f: Factors) -> bool {
        let mut all = true;
        for (((old, m), v), g) in w.iter().zip(m).zip(v).zip(g) {
            let (w, m, v) = updated::<FMA>(*old, *m, *v, g * scale, &f);
            let is_kept = T::from_f32(w).to_f32().is_finite() | !old.is_finite();
            all &= is_kept & m.is_finite() & v.is_finite();
        }
        all
    }
}

/// Global norm: square root of the sum of squares of all gradients, in f64, tensor by tensor in the order
/// given.
pub fn global_norm(gradients: &[&[f32]]) -> f64 {
    let squares = |g: &&[f32]| -> f64 { block_squares(g).iter().sum() };
    gradients.iter().map(squares).sum::<f64>().sqrt()
}

/// Elements of a block of [`block_squares`]. An update of AdamW divides its work in the same blocks.
pub const BLOCK: usize = ELEMENTS;

/// Sum of squares of each block of [`BLOCK`] elements. The sum over the blocks is the squared norm, also where
/// several processes have the blocks of one gradient.
pub fn block_squares(g: &[f32]) -> Vec<f64> {
    g.par_chunks(BLOCK).map(sum_of_squares).collect()
}

simd_fn! {
    fn sum_of_squares(g: &[f32]) -> f64 {
        let mut lanes = [0f64; 8];
        let (g, rest) = g.as_chunks::<8>();
        for g in g {
            for i in 0..8 {
                lanes[i] += g[i] as f64 * g[i] as f64;
            }
        }
        for (lane, g) in lanes.iter_mut().zip(rest) {
            *lane += *g as f64 * *g as f64;
        }
        lanes.iter().sum()
    }
}

/// Clipping factor of torch.nn.utils.clip_grad_norm_: min(1, limit / (norm + 1e-6)). Returns an error for a
/// non-finite norm.
pub fn clip_factor(norm: f64, limit: f64) -> Result<f32> {
    check(limit > 0.0, || format!("clipping limit must be above 0, got {limit}"))?;
    if norm.is_finite() {
        Ok((limit / (norm + 1e-6)).min(1.0) as f32)
    } else {
        Err(KernelError::Norm(norm.to_string()))
    }
}

simd_fn! {
    fn scale_all(g: &mut [f32], factor: f32) {
        for g in g {
            *g *= factor;
        }
    }
}

/// Scales all gradients so that their global norm is at most `limit`, and returns the norm before. On an
/// error nothing is changed.
pub fn clip(gradients: &mut [&mut [f32]], limit: f64) -> Result<f64> {
    let norm = global_norm(&gradients.iter().map(|g| &**g).collect::<Vec<_>>());
    let factor = clip_factor(norm, limit)?;
    if factor < 1.0 {
        for g in gradients {
            g.par_chunks_mut(ELEMENTS).for_each(|g| scale_all(g, factor));
        }
    }
    Ok(norm)
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{Values, assert_close, cast, same_on_any_pool, wide};

    /// w after `steps` steps with gradients g + 0.1 w, in f64.
    fn reference(w: &[f64], g: &[f64], steps: u32, o: &Options) -> Vec<f64> {
        let (mut w, mut m, mut v) = (w.to_vec(), vec![0.0; w.len()], vec![0.0; w.len()]);
        for t in 1..=steps as i32 {
            for i in 0..w.len() {
                let g = g[i] + 0.1 * w[i];
                w[i] *= 1.0 - o.lr * o.weight_decay;
                m[i] = o.beta1 * m[i] + (1.0 - o.beta1) * g;
                v[i] = o.beta2 * v[i] + (1.0 - o.beta2) * g * g;
                let (m_hat, v_hat) = (m[i] / (1.0 - o.beta1.powi(t)), v[i] / (1.0 - o.beta2.powi(t)));
                w[i] -= o.lr * m_hat / (v_hat.sqrt() + o.eps);
            }
        }
        w
    }

    fn train(w: &[f64], g: &[f64], steps: u32, o: &Options) -> (Vec<f32>, Vec<bf16>) {
        let (mut w, g): (Vec<f32>, Vec<f32>) = (cast(w), cast(g));
        let (mut m, mut v, mut copy) = (vec![0.0; w.len()], vec![0.0; w.len()], vec![bf16::ZERO; w.len()]);
        for step in 1..=steps {
            let g: Vec<f32> = g.iter().zip(&w).map(|(g, w)| g + 0.1 * w).collect();
            adamw_step_with_copy(&mut w, Some(&mut copy), &mut m, &mut v, &g, 1.0, step, o).unwrap();
        }
        (w, copy)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn steps_agree_with_the_formula(n in 1usize..50, steps in 1u32..20, lr in 1e-4f64..1e-1, seed in any::<u64>()) {
            let o = Options { lr, weight_decay: 0.1, beta2: 0.95, ..Options::default() };
            let mut values = Values::new(seed);
            let (w, g) = (values.take(n, 1.0), values.take(n, 1.0));
            let (got, copy) = train(&w, &g, steps, &o);
            assert_close("w", &got, &reference(&w, &g, steps, &o), 2e-5);
            prop_assert_eq!(copy, cast::<bf16>(&wide(&got)));
        }

        #[test]
        fn clipped_gradients_have_the_norm_asked_for(
            a in 1usize..200, b in 0usize..200, by in 0.001f64..100.0, limit in 0.01f64..10.0, seed in any::<u64>(),
        ) {
            let mut values = Values::new(seed);
            let (mut x, mut y): (Vec<f32>, Vec<f32>) = (cast(&values.take(a, by)), cast(&values.take(b, by)));
            let before: f64 = wide(&x).iter().chain(&wide(&y)).map(|x| x * x).sum::<f64>().sqrt();
            let norm = clip(&mut [&mut x, &mut y], limit).unwrap();
            prop_assert!((norm - before).abs() <= 1e-12 * before);
            let after = global_norm(&[&x, &y]);
            prop_assert!((after - before.min(limit)).abs() <= 1e-3 * limit.min(before) + 2e-6, "{} {}", after, before);
        }
    }

    #[test]
    fn five_steps_give_what_torch_gives() {
        let o = Options { lr: 0.01, beta2: 0.95, weight_decay: 0.1, ..Options::default() };
        let (mut w, mut m, mut v) = ([1.0, -2.0, 0.5, 3e-3], [0.0; 4], [0.0; 4]);
        for step in 1..=5 {
            let s = step as f32;
            let g = [0.5 * s, -0.25, 1e-4 * s, -3.0 / s];
            adamw_step(&mut w, &mut m, &mut v, &g, 1.0, step, &o).unwrap();
        }
        assert_close("w", &w, &[9.472571611e-1, -1.940120101, 4.497546256e-1, 4.763359204e-2], 1e-7);
        let m_expected = [6.572049856e-1, -1.023774967e-1, 1.314410038e-4, -5.146800280e-1];
        assert_close("m", &m, &m_expected, 1e-7);
        let v_expected = [6.570813060e-1, 1.413869020e-2, 2.628325468e-8, 5.528262258e-1];
        assert_close("v", &v, &v_expected, 1e-7);
    }

    #[test]
    fn a_small_update_reaches_the_master_even_if_bf16_cannot_show_it() {
        let o = Options { lr: 1e-5, weight_decay: 0.0, ..Options::default() };
        let (mut w, mut m, mut v, mut copy) = ([1.0f32], [0.0], [0.0], [bf16::ONE]);
        for step in 1..=1000 {
            adamw_step_with_copy(&mut w, Some(&mut copy), &mut m, &mut v, &[1.0], 1.0, step, &o).unwrap();
        }
        assert!((w[0] - 0.99).abs() < 1e-4, "{}", w[0]);
        assert!(copy[0] < bf16::ONE);
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let n = 3 * ELEMENTS + 5;
        let mut values = Values::new(1);
        let (w, g) = (values.take(n, 1.0), values.take(n, 1.0));
        same_on_any_pool(|| {
            let narrow: Vec<f32> = cast(&g);
            let (mut x, mut y) = (narrow.clone(), narrow[..77].to_vec());
            let norm = clip(&mut [&mut x, &mut y], 0.5).unwrap();
            assert_eq!(norm, global_norm(&[&narrow, &narrow[..77]]));
            (train(&w, &g, 3, &Options::default()), x, y, norm.to_bits())
        });
    }

    #[test]
    fn a_norm_that_is_not_finite_is_an_error_and_nothing_is_scaled() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (mut x, mut y) = (vec![100.0f32; 5], vec![bad; 1]);
            let error = clip(&mut [&mut x, &mut y], 1.0).unwrap_err();
            let name = if bad.is_nan() { "NaN" } else { "inf" };
            assert_eq!(error.to_string(), format!("gradient norm is non-finite: {name}"));
            assert_eq!(x, [100.0; 5]);
        }
        assert!(clip_factor(1.0, 0.0).is_err());
    }

    #[test]
    fn the_first_element_that_a_step_would_make_non_finite_is_found() {
        let n = 2 * ELEMENTS + 3;
        let at = ELEMENTS + 7;
        let fault = |w: f32, g: f32, o: &Options| {
            let (mut all_w, mut all_g) = (vec![1.0f32; n], vec![0.5f32; n]);
            (all_w[at], all_g[at], all_g[n - 1]) = (w, g, g);
            let (m, v) = (vec![0.0; n], vec![0.0; n]);
            let narrow = adamw_fault::<bf16>(&all_w, &m, &v, &all_g, 1.0, 1, o).unwrap();
            (adamw_fault::<f32>(&all_w, &m, &v, &all_g, 1.0, 1, o).unwrap(), narrow)
        };
        let o = Options::default();
        assert_eq!(fault(1.0, 0.0, &o), (None, None));
        assert_eq!(fault(1.0, 0.0, &Options { eps: 1e-50, ..o }), (Some(at), Some(at)), "0 / 0");
        assert_eq!(fault(f32::NAN, 0.0, &o), (None, None), "the step did not make it so");
        assert_eq!(fault(1.0, 1e30, &o), (Some(at), Some(at)), "the second moment overflows");
        let o = Options { weight_decay: 0.0, ..o };
        assert_eq!(fault(3.4e38, 0.5, &o), (None, Some(at)), "f32 holds it, bf16 rounds it to infinity");
    }

    #[test]
    fn settings_that_make_no_sense_are_refused() {
        let run = |step, o: &Options| adamw_step(&mut [1.0], &mut [0.0], &mut [0.0], &[1.0], 1.0, step, o);
        assert!(run(1, &Options::default()).is_ok());
        assert!(run(0, &Options::default()).is_err());
        assert!(run(1, &Options { beta1: 1.0, ..Options::default() }).is_err());
        assert!(run(1, &Options { lr: f64::NAN, ..Options::default() }).is_err());
        let (mut w, mut m, mut v) = ([1.0], [0.0; 2], [0.0]);
        assert!(adamw_step(&mut w, &mut m, &mut v, &[1.0], 1.0, 1, &Options::default()).is_err());
    }
}
