//! Functions compiled twice, portable and with AVX2+FMA, and chosen at run time.
//!
//! A function declared with `simd_fn!` is an ordinary loop over slices. It is compiled once for any machine
//! and once with AVX2 and FMA, where the compiler vectorizes it; one test at run time chooses. The
//! environment variable `BALLAST_SIMD` (`portable`, `avx2`, `avx512`, `avx512bf16` or `amx`) sets an upper limit.
//! Levels may differ in the last bit, because a fused multiply-add rounds once; each is deterministic.
//!
//! The transcendental functions are here because they must vectorize: they are polynomials without branches.
//! Largest errors, measured over the whole range by the tests: exp 1.1 ulp, sigmoid 3, silu 3, tanh 3, ln_1p
//! 2, softplus 3.

use std::sync::OnceLock;

use crate::Element;

/// Instruction set of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Any machine.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX2, FMA and AVX-512F; the latter for small products only.
    Avx512,
    /// Also AVX512-BF16 and AVX-512BW, for products of bf16 only.
    Avx512Bf16,
    /// Also AMX for bf16, for large products of any type.
    Amx,
}

/// Highest level of this machine.
pub(crate) fn detected() -> Level {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        if has!("avx2") && has!("fma") {
            return match (has!("avx512f"), has!("avx512bw") && has!("avx512bf16")) {
                (true, true) if has_amx() => Level::Amx,
                (true, true) => Level::Avx512Bf16,
                (true, false) => Level::Avx512,
                (false, _) => Level::Avx2,
            };
        }
    }
    Level::Portable
}

/// Returns true if the processor has AMX for bf16 and the system lets this process use it. The first call asks
/// for the permission, which then holds for all threads.
#[cfg(target_arch = "x86_64")]
fn has_amx() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        // Leaf 7, EDX: AMX-BF16 and AMX-TILE.
        const AMX: u32 = 1 << 22 | 1 << 24;
        let has = std::arch::x86_64::__cpuid_count(7, 0).edx & AMX == AMX;
        has && may_use_tiles()
    })
}

/// Asks Linux for the registers of AMX, which it gives only to a process that asks.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn may_use_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and changes only what this process may use.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn may_use_tiles() -> bool {
    false
}

/// Values of `BALLAST_SIMD`.
const NAMES: [(&str, Level); 5] = [
    ("portable", Level::Portable),
    ("avx2", Level::Avx2),
    ("avx512", Level::Avx512),
    ("avx512bf16", Level::Avx512Bf16),
    ("amx", Level::Amx),
];

/// Returns an error if `BALLAST_SIMD` has a value without a meaning. Programs call it once: [`level`] cannot fail,
/// and takes such a value for none.
pub fn check_setting() -> Result<(), String> {
    match std::env::var_os("BALLAST_SIMD") {
        Some(value) if !value.is_empty() && !NAMES.iter().any(|(name, _)| value == *name) => {
            let names = NAMES.map(|(name, _)| name).join(", ");
            Err(format!("BALLAST_SIMD must be one of {names}, got {value:?}; unset it for the fastest"))
        }
        _ => Ok(()),
    }
}

/// Level in use: the fastest of this machine, limited by `BALLAST_SIMD`.
pub fn level() -> Level {
    static CHOICE: OnceLock<Level> = OnceLock::new();
    *CHOICE.get_or_init(|| {
        let asked = std::env::var_os("BALLAST_SIMD");
        let limit = NAMES.iter().find(|(name, _)| asked.as_ref().is_some_and(|asked| asked == *name));
        match (limit, detected()) {
            (Some((_, limit)), found) if *limit < Level::Amx => found.min(*limit),
            (_, Level::Avx512Bf16) if is_intel() => Level::Avx512,
            (_, found) => found,
        }
    })
}

/// Returns true on Intel processors, whose AVX512-BF16 multiplies at 0.6 of the rate of f32.
fn is_intel() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::x86_64::__cpuid(0).ebx == u32::from_le_bytes(*b"Genu");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Returns true if the AVX2+FMA versions run.
pub(crate) fn vectorized() -> bool {
    level() >= Level::Avx2
}

/// a * b + c; `FMA` says whether the machine fuses it in one instruction.
#[inline(always)]
pub(crate) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Declares a function that is compiled twice. Inside the body the constant `FMA` is in scope. Type
/// parameters are allowed, so that a loop can read f32 and bf16 directly.
macro_rules! simd_fn {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$($t:ident: $bound:path),+>)?
        ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name $(<$($t: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(unused)]
            fn body<$($($t: $bound,)+)? const FMA: bool>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2 $(<$($t: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
                body::<$($($t,)+)? true>($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            if $crate::simd::vectorized() {
                // SAFETY: `vectorized` has found AVX2 and FMA on this machine.
                return unsafe { avx2 $(::<$($t),+>)? ($($arg),*) };
            }
            body::<$($($t,)+)? false>($($arg),*)
        }
    };
}
pub(crate) use simd_fn;

/// 1.5 * 2^23: adding it rounds an f32 to a whole number.
const ROUND: f32 = 12_582_912.0;

/// e^x; 0 below -103.97, infinite above 88.73.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by a polynomial, 2^n by its bits, in two factors so that
/// subnormal results come out right.
#[inline(always)]
pub(crate) fn exp_f32<const FMA: bool>(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-104.0, 89.0);
    let shifted = fma::<FMA>(clamped, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = fma::<FMA>(n, -LN2_LOW, fma::<FMA>(n, -LN2_HIGH, clamped));
    let mut p = 1.987_569_1e-4;
    p = fma::<FMA>(p, r, 1.398_199_9e-3);
    p = fma::<FMA>(p, r, 8.333_452e-3);
    p = fma::<FMA>(p, r, 4.166_579_6e-2);
    p = fma::<FMA>(p, r, 1.666_666_5e-1);
    p = fma::<FMA>(p, r, 0.5);
    let e = fma::<FMA>(p, r * r, r) + 1.0;
    // The bits after the rounding are n; a conversion would be scalar, because it must saturate.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
    let result = e * power(half) * power(n - half);
    if x.is_nan() { x } else { result }
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub(crate) fn sigmoid_f32<const FMA: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exp_f32::<FMA>(-x))
}

/// x / (1 + e^-x).
#[inline(always)]
pub(crate) fn silu_f32<const FMA: bool>(x: f32) -> f32 {
    x * sigmoid_f32::<FMA>(x)
}

/// tanh x: an odd polynomial below 0.625, else 1 - 2 / (e^2|x| + 1) with the sign of x.
#[inline(always)]
pub(crate) fn tanh_f32<const FMA: bool>(x: f32) -> f32 {
    let s = x * x;
    let mut p = -5.704_988_7e-3;
    p = fma::<FMA>(p, s, 2.063_909e-2);
    p = fma::<FMA>(p, s, -5.373_971_5e-2);
    p = fma::<FMA>(p, s, 1.333_144_2e-1);
    p = fma::<FMA>(p, s, -3.333_328e-1);
    let small = fma::<FMA>(p * s, x, x);
    let large = 1.0 - 2.0 / (exp_f32::<FMA>(2.0 * x.abs()) + 1.0);
    (if x.abs() < 0.625 { small } else { large }).copysign(x)
}

/// ln(1 + u) for u >= 0.
///
/// w = 1 + u = 2^n m with m in [sqrt(1/2), sqrt 2); ln m by a polynomial in m - 1, plus what rounding took
/// from w.
#[inline(always)]
pub(crate) fn ln_1p_f32<const FMA: bool>(u: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let w = 1.0 + u;
    let lost = (u - (w - 1.0)) / w;
    let bits = w.to_bits();
    // Subtracting the bits of sqrt(1/2) splits the exponent so that m lies around 1.
    let n = (bits.wrapping_sub(0x3f35_04f3) as i32) >> 23;
    let m = f32::from_bits(bits.wrapping_sub((n << 23) as u32));
    let f = m - 1.0;
    let mut p = 7.037_683_6e-2;
    p = fma::<FMA>(p, f, -1.151_461e-1);
    p = fma::<FMA>(p, f, 1.167_699_9e-1);
    p = fma::<FMA>(p, f, -1.242_014_1e-1);
    p = fma::<FMA>(p, f, 1.424_932_3e-1);
    p = fma::<FMA>(p, f, -1.666_805_8e-1);
    p = fma::<FMA>(p, f, 2.000_071_5e-1);
    p = fma::<FMA>(p, f, -2.499_999_4e-1);
    p = fma::<FMA>(p, f, 3.333_333e-1);
    let z = f * f;
    let n = n as f32;
    let tail = fma::<FMA>(n, LN2_LOW, fma::<FMA>(p * f, z, -0.5 * z)) + lost;
    let result = fma::<FMA>(n, LN2_HIGH, f + tail);
    if u.is_infinite() { u } else { result }
}

/// ln(1 + e^x); x itself above 20, as the gated delta rule defines it.
#[inline(always)]
pub(crate) fn softplus_f32<const FMA: bool>(x: f32) -> f32 {
    let soft = ln_1p_f32::<FMA>(exp_f32::<FMA>(x.min(20.0)));
    if x > 20.0 || x.is_nan() { x } else { soft }
}

macro_rules! in_place {
    ($(#[$meta:meta])* $name:ident, $scalar:ident) => {
        simd_fn! {
            $(#[$meta])*
            pub fn $name(values: &mut [f32]) {
                for x in values {
                    *x = $scalar::<FMA>(*x);
                }
            }
        }
    };
}

in_place!(
    /// e^x of every value.
    exp, exp_f32
);
in_place!(
    /// Logistic function of every value.
    sigmoid, sigmoid_f32
);
in_place!(
    /// x sigmoid(x) of every value.
    silu, silu_f32
);
in_place!(
    /// Hyperbolic tangent of every value.
    tanh, tanh_f32
);
in_place!(
    /// ln(1 + u) of every value, which must not be negative.
    ln_1p, ln_1p_f32
);
in_place!(
    /// ln(1 + e^x) of every value; x itself above 20.
    softplus, softplus_f32
);

/// Sums in [`dot`] and [`sum_of_squares`] are kept in this many lanes, so that they vectorize. Both
/// versions give the same result but for fused rounding.
const LANES: usize = 16;

simd_fn! {
    /// Sum of x_i y_i.
    pub fn dot(x: &[f32], y: &[f32]) -> f32 {
        dot_body::<FMA>(x, y)
    }
}

/// [`dot`], for use inside another vectorized function.
#[inline(always)]
pub(crate) fn dot_body<const FMA: bool>(x: &[f32], y: &[f32]) -> f32 {
    assert_eq!(x.len(), y.len());
    let mut lanes = [0f32; LANES];
    let (xs, ys) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    let (xr, yr) = (xs.remainder(), ys.remainder());
    for (a, b) in xs.zip(ys) {
        for i in 0..LANES {
            lanes[i] = fma::<FMA>(a[i], b[i], lanes[i]);
        }
    }
    for i in 0..xr.len() {
        lanes[i] = fma::<FMA>(xr[i], yr[i], lanes[i]);
    }
    sum_lanes(lanes)
}

/// Sum of x_i^2.
pub(crate) fn sum_of_squares(x: &[f32]) -> f32 {
    dot(x, x)
}

simd_fn! {
    /// y_i += a x_i.
    pub fn axpy(y: &mut [f32], a: f32, x: &[f32]) {
        assert_eq!(x.len(), y.len());
        for (y, x) in y.iter_mut().zip(x) {
            *y = fma::<FMA>(a, *x, *y);
        }
    }
}

simd_fn! {
    /// y_i = a x_i.
    pub fn scale_into(y: &mut [f32], a: f32, x: &[f32]) {
        assert_eq!(x.len(), y.len());
        for (y, x) in y.iter_mut().zip(x) {
            *y = a * *x;
        }
    }
}

/// Sum of f(a_i, b_i, c_i) in the lanes of [`dot`]; the slices are equally long and stored in any type. A
/// term that ignores an argument costs nothing for it.
#[inline(always)]
pub(crate) fn sum_by<A: Element, B: Element, C: Element>(
    a: &[A],
    b: &[B],
    c: &[C],
    f: impl Fn(f32, f32, f32) -> f32,
) -> f32 {
    sum_by_four(a, b, c, c, |a, b, c, _| f(a, b, c))
}

/// [`sum_by`] of four slices.
#[inline(always)]
pub(crate) fn sum_by_four<A: Element, B: Element, C: Element, D: Element>(
    a: &[A],
    b: &[B],
    c: &[C],
    d: &[D],
    f: impl Fn(f32, f32, f32, f32) -> f32,
) -> f32 {
    assert!(a.len() == b.len() && b.len() == c.len() && c.len() == d.len());
    let mut lanes = [0f32; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let ((c, c_rest), (d, d_rest)) = (c.as_chunks::<LANES>(), d.as_chunks::<LANES>());
    for (((a, b), c), d) in a.iter().zip(b).zip(c).zip(d) {
        for i in 0..LANES {
            lanes[i] += f(a[i].to_f32(), b[i].to_f32(), c[i].to_f32(), d[i].to_f32());
        }
    }
    let rest = a_rest.iter().zip(b_rest).zip(c_rest).zip(d_rest);
    for (lane, (((a, b), c), d)) in lanes.iter_mut().zip(rest) {
        *lane += f(a.to_f32(), b.to_f32(), c.to_f32(), d.to_f32());
    }
    sum_lanes(lanes)
}

simd_fn! {
    /// Row i of y [rows, width] is row i of x times `factors[i]`.
    pub fn scale_rows_into(y: &mut [f32], factors: &[f32], x: &[f32], width: usize) {
        for ((y, x), by) in y.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(factors) {
            for (y, x) in y.iter_mut().zip(x) {
                *y = *by * *x;
            }
        }
    }
}

/// Bytes of a cache line.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Prefetches a slice that will be needed soon.
#[inline(always)]
pub(crate) fn prefetch<T>(slice: &[T]) {
    #[cfg(target_arch = "x86_64")]
    {
        // A slice that begins inside a line may end in one more line.
        let begin = slice.as_ptr().cast::<i8>();
        let skew = begin as usize % LINE;
        for at in (0..skew + std::mem::size_of_val(slice)).step_by(LINE) {
            // SAFETY: a prefetch only fills a cache, whatever the address; this address is inside the slice.
            unsafe {
                use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
                _mm_prefetch::<_MM_HINT_T1>(begin.wrapping_add(at).wrapping_sub(skew));
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = slice;
}

#[inline(always)]
pub(crate) fn sum_lanes(lanes: [f32; LANES]) -> f32 {
    let mut sums = lanes;
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance in units in the last place of the f32 nearest to `exact`.
    fn ulps(got: f32, exact: f64) -> f64 {
        let near = exact as f32;
        if got == near || near.is_infinite() && got.is_infinite() {
            return 0.0;
        }
        let next = f32::from_bits(near.abs().to_bits() + 1) as f64 - near.abs() as f64;
        (got as f64 - exact).abs() / next
    }

    /// Largest error over every 97th f32 between the limits.
    fn worst(low: f32, high: f32, f: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64) -> f64 {
        let mut worst = 0f64;
        for bits in (0..=u32::MAX).step_by(97) {
            let x = f32::from_bits(bits);
            if x >= low && x <= high {
                let error = ulps(f(x), exact(x as f64));
                assert!(!error.is_nan(), "{x:e}");
                worst = worst.max(error);
            }
        }
        worst
    }

    #[test]
    fn the_functions_are_as_exact_as_stated_in_both_compilations() {
        let softplus_exact = |x: f64| if x > 20.0 { x } else { x.exp().ln_1p() };
        for (name, worst, limit) in [
            ("exp", worst(-103.0, 88.7, exp_f32::<false>, f64::exp), 1.1),
            ("exp fma", worst(-103.0, 88.7, exp_f32::<true>, f64::exp), 1.1),
            ("sigmoid", worst(-80.0, 80.0, sigmoid_f32::<false>, |x| 1.0 / (1.0 + (-x).exp())), 3.0),
            ("silu", worst(-80.0, 80.0, silu_f32::<false>, |x| x / (1.0 + (-x).exp())), 3.0),
            ("tanh", worst(-100.0, 100.0, tanh_f32::<false>, f64::tanh), 3.0),
            ("tanh fma", worst(-100.0, 100.0, tanh_f32::<true>, f64::tanh), 3.0),
            ("ln_1p", worst(0.0, f32::MAX, ln_1p_f32::<false>, f64::ln_1p), 2.0),
            ("ln_1p fma", worst(0.0, f32::MAX, ln_1p_f32::<true>, f64::ln_1p), 2.0),
            ("softplus", worst(-80.0, 100.0, softplus_f32::<false>, softplus_exact), 3.0),
        ] {
            println!("{name}: {worst:.3} ulp");
            assert!(worst <= limit, "{name}: {worst} ulp");
        }
    }

    #[test]
    fn extreme_arguments_have_their_limits() {
        let inf = f32::INFINITY;
        assert_eq!((exp_f32::<false>(-inf), exp_f32::<false>(inf), exp_f32::<false>(0.0)), (0.0, inf, 1.0));
        assert_eq!((exp_f32::<false>(-1e30), exp_f32::<false>(1e30)), (0.0, inf));
        assert!(exp_f32::<false>(f32::NAN).is_nan() && softplus_f32::<false>(f32::NAN).is_nan());
        assert_eq!((sigmoid_f32::<false>(-inf), sigmoid_f32::<false>(inf)), (0.0, 1.0));
        assert_eq!(
            (tanh_f32::<false>(-inf), tanh_f32::<false>(inf), tanh_f32::<false>(-0.0).to_bits()),
            (-1.0, 1.0, (-0.0f32).to_bits())
        );
        assert_eq!((softplus_f32::<false>(-1e4), softplus_f32::<false>(1e4)), (0.0, 1e4));
        assert_eq!(ln_1p_f32::<false>(inf), inf);
    }

    #[test]
    fn slices_of_any_length_agree_with_single_values() {
        for n in [0, 1, 7, 8, 15, 16, 17, 100] {
            let x: Vec<f32> = (0..n).map(|i| (i as f32 * 0.7).sin() * 5.0).collect();
            let mut y = x.clone();
            exp(&mut y);
            for (x, y) in x.iter().zip(&y) {
                assert!(ulps(*y, (*x as f64).exp()) <= 1.1);
            }
            let exact: f64 = x.iter().map(|x| *x as f64 * *x as f64).sum();
            assert!((sum_of_squares(&x) as f64 - exact).abs() <= 1e-6 * exact + 1e-12);
        }
    }
}
