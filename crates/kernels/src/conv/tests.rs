//! The convolution against its formula in f64, packed and not, whole and token by token.

use half::bf16;
use proptest::prelude::*;

use super::*;
use crate::Scratch;
use crate::testing::{Values, assert_close, cast, gradient, inner, offsets, same_on_any_pool, wide};

/// (y, final states)
fn reference(x: &[f64], w: &[f64], state: &[f64], cu_seqlens: &[usize], dims: Dims) -> (Vec<f64>, Vec<f64>) {
    let Dims { channels, width } = dims;
    let (mut y, mut final_state) = (vec![0.0; x.len()], Vec::new());
    for (s, ends) in cu_seqlens.windows(2).enumerate() {
        let mut rows: Vec<&[f64]> =
            state[s * dims.state_len()..(s + 1) * dims.state_len()].chunks(channels).collect();
        rows.extend(x[ends[0] * channels..ends[1] * channels].chunks(channels));
        for t in 0..ends[1] - ends[0] {
            for c in 0..channels {
                let p: f64 = (0..width).map(|j| w[c * width + j] * rows[t + j][c]).sum();
                y[(ends[0] + t) * channels + c] = p / (1.0 + (-p).exp());
            }
        }
        final_state.extend(rows[rows.len() - (width - 1)..].concat());
    }
    (y, final_state)
}

struct Problem {
    dims: Dims,
    cu_seqlens: Vec<usize>,
    x: Vec<f64>,
    w: Vec<f64>,
    state: Vec<f64>,
    dy: Vec<f64>,
    dfinal: Vec<f64>,
}

impl Problem {
    fn new(channels: usize, width: usize, lengths: &[usize], seed: u64) -> Problem {
        let dims = Dims { channels, width };
        let cu_seqlens = offsets(lengths);
        let tokens = cu_seqlens[lengths.len()];
        let mut values = Values::new(seed);
        let states = lengths.len() * dims.state_len();
        Problem {
            dims,
            x: values.take(tokens * channels, 2.0),
            w: values.take(width * channels, 1.0),
            state: values.take(states, 2.0),
            dy: values.take(tokens * channels, 1.0),
            dfinal: values.take(states, 1.0),
            cu_seqlens,
        }
    }

    /// y, final state, dx, dw on top of 1, dstate
    #[allow(clippy::type_complexity)]
    fn run<T: Element, W: Element>(&self) -> (Vec<T>, Vec<T>, Vec<T>, Vec<f32>, Vec<T>) {
        let (x, w, state): (Vec<T>, Vec<W>, Vec<T>) = (cast(&self.x), cast(&self.w), cast(&self.state));
        let input = Input { x: &x, weight: &w, state: Some(&state), cu_seqlens: &self.cu_seqlens };
        let scratch = Scratch::new(conv_forward_scratch(self.dims).max(conv_backward_scratch(self.dims)));
        let planned = scratch.bytes();
        let (mut y, mut final_state) = (x.clone(), state.clone());
        conv_forward(&mut y, Some(&mut final_state), &input, self.dims, &scratch).unwrap();
        let (mut dx, mut dw, mut dstate) = (x.clone(), vec![1.0; w.len()], state.clone());
        let grads = Grads { dx: &mut dx, dweight: &mut dw, dstate: Some(&mut dstate) };
        let (dy, dfinal): (Vec<T>, Vec<T>) = (cast(&self.dy), cast(&self.dfinal));
        conv_backward(grads, &dy, Some(&dfinal), &input, self.dims, &scratch).unwrap();
        assert_eq!(scratch.bytes(), planned, "the scratch functions say what is needed");
        (y, final_state, dx, dw, dstate)
    }

    fn check<T: Element, W: Element>(&self) {
        let loss = |x: &[f64], w: &[f64], state: &[f64]| {
            let (y, final_state) = reference(x, w, state, &self.cu_seqlens, self.dims);
            inner(&y, &self.dy) + inner(&final_state, &self.dfinal)
        };
        let (x, w, state) = (&self.x, &self.w, &self.state);
        let (y_expected, final_expected) = reference(x, w, state, &self.cu_seqlens, self.dims);
        let (y, final_state, dx, dw, dstate) = self.run::<T, W>();
        assert_close("y", &y, &y_expected, 2e-6);
        assert_eq!(wide(&final_state), final_expected);
        assert_close("dx", &dx, &gradient(x, |x| loss(x, w, state)), 1e-5);
        assert_close("dstate", &dstate, &gradient(state, |state| loss(x, w, state)), 1e-5);
        let dw_expected: Vec<f64> = gradient(w, |w| loss(x, w, state)).iter().map(|g| g + 1.0).collect();
        assert_close("dw, on top of 1", &dw, &dw_expected, 1e-5);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_packing_width_and_channel_count_agrees_with_the_formula_and_its_gradients(
        channels in 1usize..6, width in 2usize..9,
        lengths in prop::collection::vec(0usize..14, 1..4), seed in any::<u64>(),
    ) {
        let problem = Problem::new(channels, width, &lengths, seed);
        problem.check::<f32, f32>();
        problem.check::<bf16, f32>();
        problem.check::<f32, bf16>();
    }

    #[test]
    fn a_packed_sequence_gives_the_bits_it_gives_alone(
        channels in 1usize..300, width in 2usize..9,
        lengths in prop::collection::vec(1usize..80, 2..4), seed in any::<u64>(),
    ) {
        let packed = Problem::new(channels, width, &lengths, seed);
        let (y, final_state, dx, _, dstate) = packed.run::<f32, f32>();
        for (s, ends) in packed.cu_seqlens.windows(2).enumerate() {
            let tokens = ends[0] * channels..ends[1] * channels;
            let states = s * packed.dims.state_len()..(s + 1) * packed.dims.state_len();
            let alone = Problem {
                dims: packed.dims,
                cu_seqlens: vec![0, ends[1] - ends[0]],
                x: packed.x[tokens.clone()].to_vec(),
                w: packed.w.clone(),
                state: packed.state[states.clone()].to_vec(),
                dy: packed.dy[tokens.clone()].to_vec(),
                dfinal: packed.dfinal[states.clone()].to_vec(),
            };
            let (y_alone, final_alone, dx_alone, _, dstate_alone) = alone.run::<f32, f32>();
            prop_assert_eq!(&y[tokens.clone()], &y_alone[..]);
            prop_assert_eq!(&dx[tokens], &dx_alone[..]);
            prop_assert_eq!(&final_state[states.clone()], &final_alone[..]);
            prop_assert_eq!(&dstate[states], &dstate_alone[..]);
        }
    }
}

#[test]
fn blocks_of_tokens_and_tiles_of_channels_leave_no_seam() {
    for (channels, lengths) in [(129, vec![70]), (3, vec![31, 33, 64, 1, 97])] {
        let problem = Problem::new(channels, 4, &lengths, 5);
        let (y, _, dx, dw, _) = problem.run::<f32, f32>();
        let state = &problem.state;
        let (expected, _) = reference(&problem.x, &problem.w, state, &problem.cu_seqlens, problem.dims);
        assert_close("y", &y, &expected, 2e-6);
        if channels == 3 {
            let loss = |x: &[f64], w: &[f64]| {
                let (y, last) = reference(x, w, state, &problem.cu_seqlens, problem.dims);
                inner(&y, &problem.dy) + inner(&last, &problem.dfinal)
            };
            assert_close("dx", &dx, &gradient(&problem.x, |x| loss(x, &problem.w)), 1e-5);
            let dw_expected: Vec<f64> =
                gradient(&problem.w, |w| loss(&problem.x, w)).iter().map(|g| g + 1.0).collect();
            assert_close("dw", &dw, &dw_expected, 1e-5);
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let problem = Problem::new(700, 4, &[50, 3, 41], 3);
    let (y, ..) = same_on_any_pool(|| problem.run::<f32, f32>());
    assert_eq!(y.len(), 700 * 94);
}

#[test]
fn token_by_token_gives_the_bits_of_the_whole_and_its_final_state() {
    for width in 2..=MAX_WIDTH {
        let problem = Problem::new(150, width, &[40], 9);
        let (y, final_state, ..) = problem.run::<bf16, f32>();
        let (x, w): (Vec<bf16>, Vec<f32>) = (cast(&problem.x), cast(&problem.w));
        let mut state: Vec<bf16> = cast(&problem.state);
        let mut step = vec![bf16::ZERO; 150];
        for (x, y) in x.chunks(150).zip(y.chunks(150)) {
            conv_step(&mut step, &mut state, x, &w, problem.dims).unwrap();
            assert_eq!(step, y);
        }
        assert_eq!(state, final_state);
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let (x, w) = ([1.0f32; 12], [1.0f32; 12]);
    let mut y = [0.0f32; 12];
    let scratch = Scratch::new(0);
    let mut run = |channels, width, cu_seqlens: &[usize], state: Option<&[f32]>| {
        let input = Input { x: &x, weight: &w, state, cu_seqlens };
        conv_forward(&mut y, None, &input, Dims { channels, width }, &scratch)
    };
    assert!(run(3, 4, &[0, 4], None).is_ok());
    assert!(run(3, 4, &[0, 4], Some(&x[..9])).is_ok());
    assert!(run(3, 4, &[0, 4], Some(&x)).is_err());
    assert!(run(12, 1, &[0, 1], None).is_err());
    assert!(run(0, 4, &[0, 4], None).is_err());
    assert!(run(3, 4, &[1, 4], None).is_err());
    assert!(run(3, 4, &[0, 3, 2], None).is_err());
    assert!(run(4, 4, &[0, 3], None).is_err());
}
