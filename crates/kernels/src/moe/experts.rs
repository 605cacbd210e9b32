//! Experts, forward and backward: gather, gate and up, gated unit, down, weighted sum.

use rayon::prelude::*;

use super::route::check_routing;
use super::{Dims, Dispatch, Routing, check_dims};
use crate::error::{Result, check, check_len, check_shape};
use crate::glu::{Activation, glu_backward, glu_forward};
use crate::linear::{self, linear_backward_input, linear_backward_weight, linear_forward, linear_scratch};
use crate::scratch::{check_workspace, take};
use crate::{Element, Scratch};

/// Weights of all experts.
#[derive(Clone, Copy, Debug)]
pub struct Experts<'a, W> {
    /// [E, 2 Im, H]: rows of gate, then rows of up
    pub gate_up: &'a [W],
    /// [E, H, Im]
    pub down: &'a [W],
    /// Activation of the gated unit.
    pub activation: Activation,
}

/// Gradients of the experts.
pub struct ExpertsGrads<'a, T> {
    /// [tokens, H], written
    pub dx: &'a mut [T],
    /// [tokens, k], written: for [`super::route_backward`]
    pub dweights: &'a mut [f32],
    /// [E, 2 Im, H], accumulated; empty to skip
    pub dgate_up: &'a mut [f32],
    /// [E, H, Im], accumulated; empty to skip
    pub ddown: &'a mut [f32],
}

/// Values that forward saves for backward, in addition to x, the routing and the dispatch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Saved<T> {
    /// [tokens * k, Im], in the order of the dispatch
    pub gate: Vec<T>,
    /// [tokens * k, Im], in the order of the dispatch
    pub up: Vec<T>,
}

impl<T> Saved<T> {
    /// Size of all fields in bytes.
    pub fn bytes(&self) -> usize {
        (self.gate.len() + self.up.len()) * size_of::<T>()
    }
}

/// Bytes of a [`Saved`] that forward has filled.
pub fn saved_bytes<T: Element>(dims: Dims, tokens: usize) -> usize {
    2 * tokens * dims.top_k * dims.intermediate * size_of::<T>()
}

/// Number of f32 of one scratch slot of [`experts_forward`] and [`experts_backward`].
pub fn experts_scratch(dims: Dims, tokens: usize) -> usize {
    let up = linear::Dims { inputs: dims.hidden, outputs: dims.intermediate };
    let down = linear::Dims { inputs: dims.intermediate, outputs: dims.hidden };
    linear_scratch(up, tokens).max(linear_scratch(down, tokens))
}

/// Weights and slots of one expert.
struct Expert<'a, W> {
    gate: &'a [W],
    up: &'a [W],
    down: &'a [W],
    begin: usize,
    slots: &'a [u32],
}

impl<'a, W> Expert<'a, W> {
    /// Experts with tokens, by index.
    fn all(
        experts: &'a Experts<'a, W>,
        dispatch: &'a Dispatch,
        dims: Dims,
    ) -> impl Iterator<Item = (usize, Expert<'a, W>)> {
        let len = dims.hidden * dims.intermediate;
        let busy = (0..dims.experts).filter(|e| dispatch.offsets[*e] < dispatch.offsets[e + 1]);
        busy.map(move |e| {
            let (gate, up) = experts.gate_up[2 * e * len..2 * (e + 1) * len].split_at(len);
            let begin = dispatch.offsets[e];
            let slots = &dispatch.slots[begin..dispatch.offsets[e + 1]];
            (e, Expert { gate, up, down: &experts.down[e * len..(e + 1) * len], begin, slots })
        })
    }
}

/// Size of gate or up of the busiest expert, in f32.
fn unsaved_len<T>(dispatch: &Dispatch, dims: Dims) -> usize {
    (dispatch.largest_load() * dims.intermediate * size_of::<T>()).div_ceil(size_of::<f32>())
}

/// Number of f32 of the workspace of [`experts_forward`]; `saves` is true if a [`Saved`] is passed.
/// Without one, the workspace also holds gate and up of one expert.
pub fn experts_forward_workspace<T: Element>(dispatch: &Dispatch, dims: Dims, saves: bool) -> usize {
    let Dims { top_k, hidden, intermediate, .. } = dims;
    let unsaved = if saves { 0 } else { 2 * unsaved_len::<T>(dispatch, dims) };
    let tokens = dispatch.slots.len() / top_k;
    tokens * hidden + dispatch.largest_load() * (2 * hidden + intermediate) + unsaved
}

/// Number of f32 of the workspace of [`experts_backward`].
pub fn experts_backward_workspace(dispatch: &Dispatch, dims: Dims) -> usize {
    let Dims { top_k, hidden, intermediate, .. } = dims;
    let tokens = dispatch.slots.len() / top_k;
    tokens * hidden + dispatch.largest_load() * (3 * hidden + 6 * intermediate)
}

/// y [tokens, H] from x [tokens, H]; `saved` takes what backward needs.
pub fn experts_forward<T: Element, W: Element>(
    y: &mut [T],
    mut saved: Option<&mut Saved<T>>,
    x: &[T],
    routing: &Routing,
    dispatch: &Dispatch,
    experts: &Experts<'_, W>,
    dims: Dims,
    workspace: &mut [f32],
    scratch: &Scratch,
) -> Result {
    let tokens = check_experts(x, routing, dispatch, experts, dims)?;
    check_len("y", y, x.len())?;
    let Dims { top_k, hidden, intermediate, .. } = dims;
    let (up_dims, down_dims) = linear_dims(dims);
    if let Some(saved) = saved.as_deref_mut() {
        saved.gate.resize(dispatch.slots.len() * intermediate, T::default());
        saved.up.resize(dispatch.slots.len() * intermediate, T::default());
    }
    check_workspace(workspace, experts_forward_workspace::<T>(dispatch, dims, saved.is_some()))?;
    let (load, mut rest) = (dispatch.largest_load(), workspace);
    let sums = take(&mut rest, tokens * hidden);
    let rows = take(&mut rest, load * hidden);
    let out = take(&mut rest, load * hidden);
    let h = take(&mut rest, load * intermediate);
    let unsaved = if saved.is_some() { 0 } else { unsaved_len::<T>(dispatch, dims) };
    let gate_rows: &mut [T] = bytemuck::cast_slice_mut(take(&mut rest, unsaved));
    let up_rows: &mut [T] = bytemuck::cast_slice_mut(take(&mut rest, unsaved));
    sums.fill(0.0);
    for (_, expert) in Expert::all(experts, dispatch, dims) {
        let n = expert.slots.len();
        let (rows, out, h) = (&mut rows[..n * hidden], &mut out[..n * hidden], &mut h[..n * intermediate]);
        let kept = expert.begin * intermediate..(expert.begin + n) * intermediate;
        let (gate, up) = match saved.as_deref_mut() {
            Some(saved) => (&mut saved.gate[kept.clone()], &mut saved.up[kept]),
            None => (&mut gate_rows[..n * intermediate], &mut up_rows[..n * intermediate]),
        };
        Dispatch::gather(rows, expert.slots, x, top_k, hidden);
        linear_forward(gate, rows, expert.gate, None, up_dims, scratch)?;
        linear_forward(up, rows, expert.up, None, up_dims, scratch)?;
        unit(h, gate, up, experts.activation)?;
        linear_forward(out, h, expert.down, None, down_dims, scratch)?;
        Dispatch::scatter(sums, expert.slots, out, |slot| routing.weights[slot as usize], top_k, hidden);
    }
    store(y, sums);
    Ok(())
}

/// All gradients from dy [tokens, H], x and `saved` of forward.
pub fn experts_backward<T: Element, W: Element>(
    grads: ExpertsGrads<'_, T>,
    dy: &[T],
    x: &[T],
    saved: &Saved<T>,
    routing: &Routing,
    dispatch: &Dispatch,
    experts: &Experts<'_, W>,
    dims: Dims,
    workspace: &mut [f32],
    scratch: &Scratch,
) -> Result {
    let tokens = check_experts(x, routing, dispatch, experts, dims)?;
    let Dims { top_k, hidden, intermediate, .. } = dims;
    check_len("dy", dy, x.len())?;
    check_len("dx", grads.dx, x.len())?;
    check_shape("dweights", grads.dweights, [tokens, top_k])?;
    let (learns_up, learns_down) = (!grads.dgate_up.is_empty(), !grads.ddown.is_empty());
    check_len("dgate_up", grads.dgate_up, if learns_up { experts.gate_up.len() } else { 0 })?;
    check_len("ddown", grads.ddown, if learns_down { experts.down.len() } else { 0 })?;
    check_shape("saved gate", &saved.gate, [dispatch.slots.len(), intermediate])?;
    check_shape("saved up", &saved.up, [dispatch.slots.len(), intermediate])?;
    let (up_dims, down_dims) = linear_dims(dims);
    check_workspace(workspace, experts_backward_workspace(dispatch, dims))?;
    let (load, mut rest) = (dispatch.largest_load(), workspace);
    let sums = take(&mut rest, tokens * hidden);
    let mut wide = [(); 3].map(|_| take(&mut rest, load * hidden));
    let mut inner = [(); 6].map(|_| take(&mut rest, load * intermediate));
    sums.fill(0.0);
    let len = hidden * intermediate;
    for (e, expert) in Expert::all(experts, dispatch, dims) {
        let n = expert.slots.len();
        let [rows, drows, part] = wide.each_mut().map(|buffer| &mut buffer[..n * hidden]);
        let [gate, up, h, dh, dgate, dup] = inner.each_mut().map(|buffer| &mut buffer[..n * intermediate]);
        let kept = expert.begin * intermediate..(expert.begin + n) * intermediate;
        T::load(gate, &saved.gate[kept.clone()]);
        T::load(up, &saved.up[kept]);
        Dispatch::gather(rows, expert.slots, x, top_k, hidden);
        Dispatch::gather(drows, expert.slots, dy, top_k, hidden);
        glu_forward(h, gate, up, experts.activation)?;
        // a = D^T dy;  dw = <a, h>;  dh = w a;  h becomes w h
        linear_backward_input(dh, drows, expert.down, down_dims, scratch)?;
        for (i, slot) in expert.slots.iter().enumerate() {
            let row = i * intermediate..(i + 1) * intermediate;
            let weight = routing.weights[*slot as usize];
            grads.dweights[*slot as usize] = crate::simd::dot(&dh[row.clone()], &h[row.clone()]);
            h[row.clone()].iter_mut().chain(&mut dh[row]).for_each(|x| *x *= weight);
        }
        if learns_down {
            let dw = &mut grads.ddown[e * len..(e + 1) * len];
            linear_backward_weight(dw, None, drows, h, down_dims, scratch)?;
        }
        glu_backward(dgate, dup, dh, gate, up, experts.activation)?;
        for (part_of, d, w) in [(2 * e, dgate, expert.gate), (2 * e + 1, dup, expert.up)] {
            if learns_up {
                let dw = &mut grads.dgate_up[part_of * len..(part_of + 1) * len];
                linear_backward_weight(dw, None, d, rows, up_dims, scratch)?;
            }
            linear_backward_input(part, d, w, up_dims, scratch)?;
            Dispatch::scatter(sums, expert.slots, part, |_| 1.0, top_k, hidden);
        }
    }
    store(grads.dx, sums);
    Ok(())
}

/// h = act(gate) up, from stored gate and up into f32.
fn unit<T: Element>(h: &mut [f32], gate: &[T], up: &[T], activation: Activation) -> Result {
    if let (Some(gate), Some(up)) = (T::as_f32(gate), T::as_f32(up)) {
        return glu_forward(h, gate, up, activation);
    }
    const N: usize = 256;
    h.par_chunks_mut(N).zip(gate.par_chunks(N)).zip(up.par_chunks(N)).with_min_len(64).try_for_each(
        |((h, gate), up)| {
            let (mut g, mut u) = ([0f32; N], [0f32; N]);
            let (g, u) = (&mut g[..h.len()], &mut u[..h.len()]);
            T::load(g, gate);
            T::load(u, up);
            glu_forward(h, g, u, activation)
        },
    )
}

fn store<T: Element>(y: &mut [T], sums: &[f32]) {
    let n = crate::partition::ELEMENTS;
    y.par_chunks_mut(n).zip(sums.par_chunks(n)).for_each(|(y, sums)| T::store(y, sums));
}

fn linear_dims(dims: Dims) -> (linear::Dims, linear::Dims) {
    let Dims { hidden, intermediate, .. } = dims;
    (
        linear::Dims { inputs: hidden, outputs: intermediate },
        linear::Dims { inputs: intermediate, outputs: hidden },
    )
}

/// Returns the number of tokens.
fn check_experts<T, W>(
    x: &[T],
    routing: &Routing,
    dispatch: &Dispatch,
    experts: &Experts<'_, W>,
    dims: Dims,
) -> Result<usize> {
    check_dims(dims)?;
    check(x.len().is_multiple_of(dims.hidden), || {
        format!("x has {} elements, not a multiple of hidden, {}", x.len(), dims.hidden)
    })?;
    let tokens = x.len() / dims.hidden;
    check_routing(routing, tokens, dims)?;
    check(*dispatch == Dispatch::new(routing, dims)?, || "dispatch does not match the routing".into())?;
    check_shape("gate_up", experts.gate_up, [2, dims.experts, dims.hidden, dims.intermediate])?;
    check_shape("down", experts.down, [dims.experts, dims.hidden, dims.intermediate])?;
    Ok(tokens)
}
