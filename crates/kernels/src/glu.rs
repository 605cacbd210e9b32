//! Gated linear units: h = act(gate) up, element by element, in f32.
//!
//! ```text
//! SwiGLU   act(x) = x s                    act'(x) = s + x s (1 - s),   s = sigmoid(x)
//! GeGLU    act(x) = x s                    act'(x) = s + x s (1 - s) 2 c (1 + 3 a x^2)
//!          s = (1 + tanh(u)) / 2 = sigmoid(2 u),  u = c (x + a x^3),  c = sqrt(2/pi),  a = 0.044715
//! sigmoid  act(x) = s                      act'(x) = s (1 - s)
//! dgate = dh up act'(gate)                 dup = dh act(gate)
//! ```
//!
//! GeGLU uses the sigmoid form because 1 + tanh(u) loses all digits for a gate far below zero.
//!
//! # Example
//! ```
//! use ballast_kernels::glu::{Activation, glu_backward, glu_forward};
//!
//! let (gate, up) = ([0.0f32, 10.0], [4.0, 3.0]);
//! let mut h = [0.0; 2];
//! glu_forward(&mut h, &gate, &up, Activation::Silu)?;
//! assert!(h[0] == 0.0 && (h[1] - 30.0).abs() < 2e-3);
//!
//! let (mut dgate, mut dup) = ([0.0; 2], [0.0; 2]);
//! glu_backward(&mut dgate, &mut dup, &[1.0, 1.0], &gate, &up, Activation::Silu)?;
//! assert!((dgate[0] - 2.0).abs() < 1e-6 && dup[0] == 0.0);
//! # Ok::<(), ballast_kernels::KernelError>(())
//! ```

use rayon::prelude::*;

use crate::Element;
use crate::error::{Result, check_len};
use crate::partition::ELEMENTS;
use crate::simd::{fma, sigmoid_f32, simd_fn};

/// Activation function of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x sigmoid(x): SwiGLU.
    Silu,
    /// The tanh form of gelu: GeGLU.
    GeluTanh,
    /// sigmoid(x): an output gate.
    Sigmoid,
}

/// sqrt(2/pi)
const C: f32 = 0.797_884_6;
/// The cubic term of the tanh form.
const A: f32 = 0.044_715;

/// (act(x), act'(x))
#[inline(always)]
fn silu_both<const FMA: bool>(x: f32) -> (f32, f32) {
    let s = sigmoid_f32::<FMA>(x);
    (x * s, s + x * s * (1.0 - s))
}

#[inline(always)]
fn sigmoid_both<const FMA: bool>(x: f32) -> (f32, f32) {
    let s = sigmoid_f32::<FMA>(x);
    (s, s * (1.0 - s))
}

#[inline(always)]
fn gelu_both<const FMA: bool>(x: f32) -> (f32, f32) {
    let square = x * x;
    let s = sigmoid_f32::<FMA>(2.0 * C * x * fma::<FMA>(A, square, 1.0));
    let bell = s * (1.0 - s);
    // For a large |x| the bell is 0 and x^2 may be infinite: their product must be 0.
    let slope = if bell == 0.0 { 0.0 } else { bell * 2.0 * C * fma::<FMA>(3.0 * A, square, 1.0) };
    (x * s, fma::<FMA>(x, slope, s))
}

/// h \[n\] = act(gate) up.
pub fn glu_forward<T: Element>(h: &mut [T], gate: &[T], up: &[T], activation: Activation) -> Result {
    check_len("gate", gate, h.len())?;
    check_len("up", up, h.len())?;
    let tasks = h.par_chunks_mut(ELEMENTS).zip(gate.par_chunks(ELEMENTS)).zip(up.par_chunks(ELEMENTS));
    tasks.for_each(|((h, gate), up)| match activation {
        Activation::Silu => swiglu(h, gate, up),
        Activation::GeluTanh => geglu(h, gate, up),
        Activation::Sigmoid => sigmoid_gate(h, gate, up),
    });
    Ok(())
}

/// dgate, dup \[n\] from dh and the gate and up of forward.
pub fn glu_backward<T: Element>(
    dgate: &mut [T],
    dup: &mut [T],
    dh: &[T],
    gate: &[T],
    up: &[T],
    activation: Activation,
) -> Result {
    check_len("dgate", dgate, dh.len())?;
    check_len("dup", dup, dh.len())?;
    check_len("gate", gate, dh.len())?;
    check_len("up", up, dh.len())?;
    let tasks = dgate
        .par_chunks_mut(ELEMENTS)
        .zip(dup.par_chunks_mut(ELEMENTS))
        .zip(dh.par_chunks(ELEMENTS))
        .zip(gate.par_chunks(ELEMENTS))
        .zip(up.par_chunks(ELEMENTS));
    tasks.for_each(|((((dgate, dup), dh), gate), up)| match activation {
        Activation::Silu => swiglu_backward(dgate, dup, dh, gate, up),
        Activation::GeluTanh => geglu_backward(dgate, dup, dh, gate, up),
        Activation::Sigmoid => sigmoid_gate_backward(dgate, dup, dh, gate, up),
    });
    Ok(())
}

macro_rules! gated {
    ($forward:ident, $backward:ident, $both:ident) => {
        simd_fn! {
            fn $forward<T: Element>(h: &mut [T], gate: &[T], up: &[T]) {
                for ((h, gate), up) in h.iter_mut().zip(gate).zip(up) {
                    *h = T::from_f32($both::<FMA>(gate.to_f32()).0 * up.to_f32());
                }
            }
        }

        simd_fn! {
            fn $backward<T: Element>(dgate: &mut [T], dup: &mut [T], dh: &[T], gate: &[T], up: &[T]) {
                for ((((dgate, dup), dh), gate), up) in dgate.iter_mut().zip(dup).zip(dh).zip(gate).zip(up) {
                    let (act, slope) = $both::<FMA>(gate.to_f32());
                    *dgate = T::from_f32(dh.to_f32() * up.to_f32() * slope);
                    *dup = T::from_f32(dh.to_f32() * act);
                }
            }
        }
    };
}

gated!(swiglu, swiglu_backward, silu_both);
gated!(geglu, geglu_backward, gelu_both);
gated!(sigmoid_gate, sigmoid_gate_backward, sigmoid_both);

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{Values, assert_close, assert_error, cast, gradient, inner, rms, same_on_any_pool};

    fn reference(gate: &[f64], up: &[f64], activation: Activation) -> Vec<f64> {
        let act = |x: f64| match activation {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Activation::GeluTanh => {
                0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
            }
        };
        gate.iter().zip(up).map(|(gate, up)| act(*gate) * up).collect()
    }

    fn check<T: Element>(n: usize, by: f64, activation: Activation, seed: u64) {
        let mut values = Values::new(seed);
        let (gate, up, dh) = (values.take(n, by), values.take(n, 1.0), values.take(n, 1.0));
        let (gate_t, up_t, dh_t): (Vec<T>, Vec<T>, Vec<T>) = (cast(&gate), cast(&up), cast(&dh));
        let (mut h, mut dgate, mut dup) = (gate_t.clone(), gate_t.clone(), gate_t.clone());
        glu_forward(&mut h, &gate_t, &up_t, activation).unwrap();
        glu_backward(&mut dgate, &mut dup, &dh_t, &gate_t, &up_t, activation).unwrap();
        // e^x carries the rounding of its argument: 2^-24 of each of its up to 100 units.
        assert_close("h", &h, &reference(&gate, &up, activation), 1e-5);
        let loss = |gate: &[f64], up: &[f64]| inner(&reference(gate, up, activation), &dh);
        // The slope passes through zero: its error is seen against slope 1.
        let size = rms(&dh.iter().zip(&up).map(|(dh, up)| dh * up).collect::<Vec<f64>>());
        assert_error("dgate", &dgate, &gradient(&gate, |gate| loss(gate, &up)), size, 1e-5);
        assert_close("dup", &dup, &gradient(&up, |up| loss(&gate, up)), 1e-5);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn both_units_and_their_gradients_agree_with_the_formula(
            n in 1usize..100, by in 0.1f64..12.0, seed in any::<u64>(),
        ) {
            for activation in [Activation::Silu, Activation::GeluTanh, Activation::Sigmoid] {
                check::<f32>(n, by, activation, seed);
                check::<bf16>(n, by, activation, seed);
            }
        }
    }

    #[test]
    fn huge_gates_have_the_limits_of_the_activation_and_finite_slopes() {
        let gate = [-1e30f32, -200.0, 200.0, 1e30];
        let one = [1.0f32; 4];
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let (mut h, mut dgate, mut dup) = ([0.0f32; 4], [0.0f32; 4], [0.0f32; 4]);
            glu_forward(&mut h, &gate, &one, activation).unwrap();
            glu_backward(&mut dgate, &mut dup, &one, &gate, &one, activation).unwrap();
            assert_eq!(h.map(|x| x + 0.0), [0.0, 0.0, 200.0, 1e30]);
            assert_eq!(dgate.map(|x| x + 0.0), [0.0, 0.0, 1.0, 1.0]);
            assert_eq!(dup, h);
        }
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits_across_tasks() {
        let n = 3 * ELEMENTS + 17;
        let mut values = Values::new(1);
        let (gate, up, dh): (Vec<bf16>, Vec<bf16>, Vec<bf16>) =
            (cast(&values.take(n, 4.0)), cast(&values.take(n, 1.0)), cast(&values.take(n, 1.0)));
        let (dgate, ..) = same_on_any_pool(|| {
            let (mut dgate, mut dup, mut h) = (gate.clone(), gate.clone(), gate.clone());
            glu_forward(&mut h, &gate, &up, Activation::GeluTanh).unwrap();
            glu_backward(&mut dgate, &mut dup, &dh, &gate, &up, Activation::GeluTanh).unwrap();
            (dgate, dup, h)
        });
        let last = |activation| {
            let (mut dgate, mut dup) = ([bf16::ZERO], [bf16::ZERO]);
            let at = n - 1..n;
            glu_backward(&mut dgate, &mut dup, &dh[at.clone()], &gate[at.clone()], &up[at], activation)
                .unwrap();
            dgate[0]
        };
        assert_eq!(dgate[n - 1], last(Activation::GeluTanh));
    }

    #[test]
    fn slices_of_different_lengths_are_refused() {
        let mut h = [0.0f32; 3];
        assert!(glu_forward(&mut h, &[1.0; 2], &[1.0; 3], Activation::Silu).is_err());
        assert!(glu_forward(&mut h, &[1.0; 3], &[1.0; 4], Activation::Silu).is_err());
    }
}
