//! Linear attention: projections, convolution, gates, gated delta rule, gated norm, projection.
//!
//! ```text
//! q, k, v = silu(conv(W_qkv x))        z = W_z x        a, b = W_a x, W_b x      in f32
//! g = -exp(A_log) softplus(a + dt_bias)                 beta = sigmoid(b)
//! o = gated_delta_rule(l2norm(q), l2norm(k), v, g, beta)
//! y = W_out (w o / rms(o) * silu(z))
//! ```
//! q, k and v are three linear layers on row ranges of one stored matrix, so that each output is contiguous.
//!
//! If the batch is divided over ranks, the convolution takes the W-1 rows before the part from the ranks
//! before it, and the delta rule hands its state from rank to rank, some heads at a time: rank r sends the
//! states of the first heads while it computes the next ones, so r + 1 starts behind r by the time of a few
//! heads, once in a forward pass and not in every layer. Backward does the same in reverse. The other way, to
//! compose the affine maps of the parts (S' = M S + B), needs two more passes over the tokens for M and B,
//! and is less accurate; see docs/numerics.md. The l2norm is per token and head, so it needs
//! nothing of other ranks.

mod pieces;

use ballast_kernels::conv::{self, Grads as ConvGrads, conv_backward, conv_forward, conv_step};
use ballast_kernels::elementwise::accumulate;
use ballast_kernels::gated_delta_rule::{self as gdn, L2NORM_EPS, L2Norm};
use ballast_kernels::norm::{
    Saved as NormSaved, gated_rms_norm_backward, gated_rms_norm_backward_scratch, gated_rms_norm_forward,
    l2norm_backward, l2norm_forward,
};
use ballast_kernels::{Element, Rounding};

use pieces::{PieceGrads, order_of};

use super::{Keep, Linear, bytes_of};
use crate::batch::Sequences;
use crate::config::{Config, LinearAttention as Shape};
use crate::context::{Rows, Sent};
use crate::error::Result;
use crate::params::{Grads, Id, Init, Protected, Specs, Weight};
use crate::precision::with_storage;
use crate::run::{Run, lower, zeros};
use crate::site::Site;

/// Number of parts of the convolution's channels: q, k and v.
const PARTS: usize = 3;

#[derive(Clone, Debug)]
pub(crate) struct LinearAttention {
    layer: usize,
    shape: Shape,
    eps: f32,
    /// Projections of q, k and v
    qkv: [Linear; PARTS],
    z: Linear,
    b: Linear,
    a: Linear,
    conv: Id<Weight>,
    a_log: Id<Protected>,
    dt_bias: Id<Protected>,
    norm: Id<Protected>,
    out: Linear,
}

/// Activations that forward saves, in addition to x.
#[derive(Clone, Debug, Default)]
pub(crate) struct Saved<A> {
    /// q, k, v before the convolution: [tokens, channels]
    unmixed: [Vec<A>; PARTS],
    /// Rows of q, k, v before the convolution that precede the part, zeros before the sequence: [W-1,
    /// channels]; empty unless the first sequence began on an earlier rank
    earlier: [Vec<A>; PARTS],
    /// q, k, v after the convolution; recomputed
    mixed: [Vec<A>; PARTS],
    /// [tokens, Hv dv]
    z: Vec<A>,
    /// [tokens, Hv]
    a: Vec<f32>,
    /// [tokens, Hv]
    b: Vec<f32>,
    /// [tokens, Hv]; recomputed
    g: Vec<f32>,
    /// [tokens, Hv]; recomputed
    beta: Vec<f32>,
    /// Saved by the delta rule, by piece: rstd of q and k, states
    rule: Vec<gdn::Saved<A>>,
    /// [tokens, Hv dv]
    o: Vec<A>,
    /// rstd of the heads of o
    norm: NormSaved,
    /// [tokens, Hv dv]; recomputed
    normed: Vec<A>,
}

impl<A> Saved<A> {
    pub(crate) fn bytes(&self) -> usize {
        let parts = self.unmixed.iter().chain(&self.earlier).chain(&self.mixed).map(|part| part.len());
        parts.sum::<usize>() * size_of::<A>()
            + bytes_of(&[&self.z, &self.o, &self.normed])
            + bytes_of(&[&self.a, &self.b, &self.g, &self.beta])
            + self.rule.iter().map(gdn::Saved::bytes).sum::<usize>()
            + self.norm.bytes()
    }
}

/// Decoding state of all sequences.
#[derive(Clone, Debug)]
pub(crate) struct State<A> {
    /// Last columns of q, k, v before the convolution: [sequences, W-1, channels]
    conv: [Vec<A>; PARTS],
    /// Recurrent state: [sequences, Hv, dk, dv]
    state: Vec<f32>,
}

impl<A> State<A> {
    pub(crate) fn bytes(&self) -> usize {
        self.conv.iter().map(|part| part.len() * size_of::<A>()).sum::<usize>() + 4 * self.state.len()
    }
}

/// Decay gate and write strength [tokens, Hv], or their gradients.
struct Gates {
    g: Vec<f32>,
    beta: Vec<f32>,
}

/// Inputs of the delta rule, for all tokens.
#[derive(Clone, Copy)]
struct RuleInputs<'a, A> {
    /// [tokens, Hk, dk]
    q: &'a [A],
    /// [tokens, Hk, dk]
    k: &'a [A],
    /// [tokens, Hv, dv]
    v: &'a [A],
    gates: &'a Gates,
}

impl<'a, A> RuleInputs<'a, A> {
    fn new(
        mixed: &'a [Vec<A>; PARTS],
        normalized: &'a Option<Normalized<A>>,
        gates: &'a Gates,
    ) -> RuleInputs<'a, A> {
        let (q, k) = normalized.as_ref().map_or((&mixed[0], &mixed[1]), |both| (&both.q, &both.k));
        RuleInputs { q, k, v: &mixed[2], gates }
    }
}

/// q and k normalized and rounded before the delta rule, if the site `l2norm` is lowered.
struct Normalized<A> {
    q: Vec<A>,
    k: Vec<A>,
    q_saved: NormSaved,
    k_saved: NormSaved,
}

impl LinearAttention {
    pub(crate) fn new(
        specs: &mut Specs,
        name: &str,
        layer: usize,
        config: &Config,
        shape: Shape,
    ) -> LinearAttention {
        let (kd, vd) = (shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim);
        let (h, hv) = (config.hidden, shape.value_heads);
        let qkv = Linear::new(specs, &format!("{name}.in_proj_qkv"), h, 2 * kd + vd, false);
        LinearAttention {
            layer,
            shape,
            eps: config.eps,
            qkv: [qkv.rows(0, kd), qkv.rows(kd, kd), qkv.rows(2 * kd, vd)],
            z: Linear::new(specs, &format!("{name}.in_proj_z"), h, vd, false),
            b: Linear::new(specs, &format!("{name}.in_proj_b"), h, hv, false),
            a: Linear::new(specs, &format!("{name}.in_proj_a"), h, hv, false),
            conv: specs.weight(
                format!("{name}.conv1d.weight"),
                &[2 * kd + vd, 1, shape.conv_width],
                Init::Normal,
            ),
            a_log: specs.protected(format!("{name}.A_log"), &[hv], Init::ALog),
            dt_bias: specs.protected(format!("{name}.dt_bias"), &[hv], Init::Ones),
            norm: specs.protected(format!("{name}.norm.weight"), &[shape.value_dim], Init::Ones),
            out: Linear::new(specs, &format!("{name}.out_proj"), vd, h, false),
        }
    }

    pub(crate) fn state<A: Element>(&self, sequences: usize) -> State<A> {
        State {
            conv: [0, 1, 2].map(|part| zeros(sequences * self.conv_dims(part).state_len())),
            state: zeros(sequences * self.shape.value_heads * self.dims().state_len()),
        }
    }

    pub(crate) fn forward<A: Element>(
        &self,
        run: &Run<'_>,
        x: &[A],
        mut state: Option<&mut State<A>>,
        keep: Keep,
    ) -> Result<(Vec<A>, Saved<A>)> {
        let layer = Some(self.layer);
        let [q, k, v] = &self.qkv;
        let [q, k, v, z] = Linear::forward_many::<A, A, 4>(run, [q, k, v, &self.z], x)?;
        let unmixed = [q, k, v];
        let [mut a, mut b] = Linear::forward_many::<f32, A, 2>(run, [&self.a, &self.b], x)?;
        lower(&mut a, run.precision.site(Site::GateProjections));
        lower(&mut b, run.precision.site(Site::GateProjections));
        let earlier = self.earlier(run, &unmixed)?;
        let mixed = self.convolve(run, &unmixed, &earlier, state.as_deref_mut())?;
        let gates = self.gates(run, &a, &b)?;
        for (name, part) in ["q", "k", "v"].into_iter().zip(&mixed) {
            run.see(layer, &format!("linear_attn.{name}"), part);
        }
        run.see(layer, "linear_attn.z", &z);
        run.see(layer, "linear_attn.a", &a);
        run.see(layer, "linear_attn.b", &b);
        run.see(layer, "linear_attn.g", &gates.g);
        run.see(layer, "linear_attn.beta", &gates.beta);
        let mut o = zeros(z.len());
        let mut rule = Vec::new();
        self.rule(run, &mut o, &mixed, &gates, state, keep.any().then_some(&mut rule))?;
        run.see(layer, "linear_attn.o", &o);
        let (mut normed, mut norm) = (zeros(o.len()), NormSaved::default());
        let weight = run.protected(self.norm);
        gated_rms_norm_forward(&mut normed, Some(&mut norm), &o, &z, weight, self.eps)?;
        run.see(layer, "linear_attn.norm", &normed);
        let y = self.out.forward(run, &normed)?;
        let saved = Saved {
            unmixed: unmixed.map(|part| keep.always(part)),
            earlier: earlier.map(|part| keep.always(part)),
            mixed: mixed.map(|part| keep.unless_recomputed(part)),
            z: keep.always(z),
            a: keep.always(a),
            b: keep.always(b),
            g: keep.unless_recomputed(gates.g),
            beta: keep.unless_recomputed(gates.beta),
            rule,
            o: keep.always(o),
            norm,
            normed: keep.unless_recomputed(normed),
        };
        Ok((y, saved))
    }

    /// Adds the gradient of the input to dx.
    pub(crate) fn backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dx: &mut [f32],
        dy: Vec<A>,
        x: &[A],
        saved: Saved<A>,
    ) -> Result {
        let layer = Some(self.layer);
        let Saved { unmixed, earlier, mut mixed, z, a, b, g, beta, rule, o, norm, mut normed } = saved;
        let mut gates = Gates { g, beta };
        let weight = run.protected(self.norm);
        if normed.is_empty() {
            normed = zeros(o.len());
            gated_rms_norm_forward(&mut normed, None, &o, &z, weight, self.eps)?;
        }
        let d_normed = self.out.backward_alone(run, grads, &dy, &normed)?;
        drop(dy);
        let (mut d_o, mut dz) = (normed, zeros(z.len()));
        let mut unused = vec![0.0; weight.len()];
        let dw = grads.of(self.norm).unwrap_or(&mut unused);
        gated_rms_norm_backward(&mut d_o, &mut dz, dw, &d_normed, &o, &z, weight, &norm, run.scratch)?;
        drop((d_normed, o));
        run.see_gradient(layer, "linear_attn.o", &d_o);
        self.z.backward(run, grads, dx, &dz, x)?;
        drop((z, dz));
        if gates.g.is_empty() {
            mixed = self.convolve(run, &unmixed, &earlier, None)?;
            gates = self.gates(run, &a, &b)?;
        }
        let (d_mixed, d_gates) = self.rule_backward(run, &d_o, &mixed, &gates, &rule)?;
        drop((d_o, mixed, rule));
        run.see_gradient(layer, "linear_attn.g", &d_gates.g);
        run.see_gradient(layer, "linear_attn.beta", &d_gates.beta);
        self.gates_backward(run, grads, dx, &d_gates, [&a, &b], x)?;
        self.convolve_backward(run, grads, dx, &d_mixed, &unmixed, &earlier, x)
    }

    fn dims(&self) -> gdn::Dims {
        gdn::Dims {
            key_heads: self.shape.key_heads,
            value_heads: self.shape.value_heads,
            key_dim: self.shape.key_dim,
            value_dim: self.shape.value_dim,
        }
    }

    fn conv_dims(&self, part: usize) -> conv::Dims {
        conv::Dims { channels: self.qkv[part].outputs(), width: self.shape.conv_width }
    }

    /// Returns the range of a part's taps in the convolution's weight.
    fn taps(&self, part: usize) -> std::ops::Range<usize> {
        let before: usize = self.qkv[..part].iter().map(Linear::outputs).sum();
        let width = self.shape.conv_width;
        before * width..(before + self.qkv[part].outputs()) * width
    }

    /// Returns true in decoding if every sequence has exactly one new token.
    fn is_step<A>(&self, run: &Run<'_>, state: &Option<&mut State<A>>) -> bool {
        state.is_some() && run.cu_seqlens().windows(2).all(|ends| ends[1] - ends[0] == 1)
    }

    fn convolve<A: Element>(
        &self,
        run: &Run<'_>,
        unmixed: &[Vec<A>; PARTS],
        earlier: &[Vec<A>; PARTS],
        mut state: Option<&mut State<A>>,
    ) -> Result<[Vec<A>; PARTS]> {
        let mut mixed = [0, 1, 2].map(|part| zeros::<A>(unmixed[part].len()));
        let step = self.is_step(run, &state);
        if run.context.is_some() {
            for (piece, part) in run.sequences().pieces().iter().flat_map(|p| [0, 1, 2].map(|part| (p, part)))
            {
                let (dims, taps) = (self.conv_dims(part), self.taps(part));
                let rows = piece.tokens.start * dims.channels..piece.tokens.end * dims.channels;
                with_storage!(Weight, run.weight(self.conv), |w| {
                    let input = conv::Input {
                        x: &unmixed[part][rows.clone()],
                        weight: &w[taps],
                        state: piece.began.then_some(&earlier[part][..]),
                        cu_seqlens: &piece.cu_seqlens,
                    };
                    conv_forward(&mut mixed[part][rows], None, &input, dims, run.scratch)?;
                });
            }
            return Ok(mixed);
        }
        for part in 0..PARTS {
            let (dims, taps) = (self.conv_dims(part), self.taps(part));
            let carried = state.as_deref_mut().map(|state| &mut state.conv[part]);
            with_storage!(Weight, run.weight(self.conv), |w| match carried {
                Some(carried) if step => {
                    let rows = mixed[part].chunks_mut(dims.channels).zip(unmixed[part].chunks(dims.channels));
                    for ((y, x), carried) in rows.zip(carried.chunks_mut(dims.state_len())) {
                        conv_step(y, carried, x, &w[taps.clone()], dims)?;
                    }
                }
                carried => {
                    let mut after = carried.as_ref().map(|carried| carried.to_vec());
                    let input = conv::Input {
                        x: &unmixed[part],
                        weight: &w[taps],
                        state: carried.as_deref().map(|carried| &carried[..]),
                        cu_seqlens: run.cu_seqlens(),
                    };
                    conv_forward(&mut mixed[part], after.as_deref_mut(), &input, dims, run.scratch)?;
                    if let (Some(carried), Some(after)) = (carried, after) {
                        *carried = after;
                    }
                }
            });
        }
        Ok(mixed)
    }

    #[allow(clippy::too_many_arguments)] // run, then outputs, then inputs
    fn convolve_backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dx: &mut [f32],
        d_mixed: &[Vec<A>; PARTS],
        unmixed: &[Vec<A>; PARTS],
        earlier: &[Vec<A>; PARTS],
        x: &[A],
    ) -> Result {
        let pieces = run.sequences().pieces();
        for part in 0..PARTS {
            let (dims, taps) = (self.conv_dims(part), self.taps(part));
            let d_final =
                self.earlier_backward(run, &pieces, &d_mixed[part], &unmixed[part], &earlier[part], part)?;
            let mut d_unmixed = zeros::<A>(unmixed[part].len());
            let mut unused = vec![0.0; taps.len()];
            let dweight = grads.of(self.conv).map_or(&mut unused[..], |dw| &mut dw[taps.clone()]);
            for piece in &pieces {
                let rows = piece.tokens.start * dims.channels..piece.tokens.end * dims.channels;
                with_storage!(Weight, run.weight(self.conv), |w| {
                    let input = conv::Input {
                        x: &unmixed[part][rows.clone()],
                        weight: &w[taps.clone()],
                        state: piece.began.then_some(&earlier[part][..]),
                        cu_seqlens: &piece.cu_seqlens,
                    };
                    let to = ConvGrads { dx: &mut d_unmixed[rows.clone()], dweight, dstate: None };
                    let d_final = piece.goes_on.then_some(&d_final[..]);
                    conv_backward(to, &d_mixed[part][rows], d_final, &input, dims, run.scratch)?;
                });
            }
            self.qkv[part].backward(run, grads, dx, &d_unmixed, x)?;
        }
        Ok(())
    }

    fn gates(&self, run: &Run<'_>, a: &[f32], b: &[f32]) -> Result<Gates> {
        let (mut g, mut beta) = (zeros(a.len()), zeros(b.len()));
        let (a_log, dt_bias) = (run.protected(self.a_log), run.protected(self.dt_bias));
        gdn::gates_forward(&mut g, &mut beta, a, b, a_log, dt_bias)?;
        lower(&mut g, run.precision.site(Site::DecayGate));
        lower(&mut beta, run.precision.site(Site::Beta));
        Ok(Gates { g, beta })
    }

    fn gates_backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dx: &mut [f32],
        d_gates: &Gates,
        [a, b]: [&[f32]; 2],
        x: &[A],
    ) -> Result {
        let Gates { g: dg, beta: dbeta } = d_gates;
        let (mut da, mut db) = (vec![0.0; a.len()], vec![0.0; b.len()]);
        let (a_log, dt_bias) = (run.protected(self.a_log), run.protected(self.dt_bias));
        let (mut da_log, mut ddt_bias) = (vec![0.0; a_log.len()], vec![0.0; dt_bias.len()]);
        gdn::gates_backward(&mut da, &mut db, &mut da_log, &mut ddt_bias, dg, dbeta, a, b, a_log, dt_bias)?;
        for (id, gradient) in [(self.a_log, da_log), (self.dt_bias, ddt_bias)] {
            if let Some(sum) = grads.of(id) {
                accumulate(sum, &gradient)?;
            }
        }
        self.a.backward(run, grads, dx, &da, x)?;
        self.b.backward(run, grads, dx, &db, x)
    }

    fn options(&self, run: &Run<'_>) -> gdn::Options {
        let l2norm =
            if run.precision.site(Site::L2Norm) == Rounding::F32 { L2Norm::Inside } else { L2Norm::Off };
        gdn::Options { l2norm, state: run.precision.site(Site::State), ..gdn::Options::default() }
    }

    /// Normalizes and rounds q and k before the delta rule; `None` if the kernel normalizes them.
    fn normalize<A: Element>(&self, run: &Run<'_>, mixed: &[Vec<A>; PARTS]) -> Result<Option<Normalized<A>>> {
        if run.precision.site(Site::L2Norm) == Rounding::F32 {
            return Ok(None);
        }
        let one = |x: &Vec<A>| -> Result<(Vec<A>, NormSaved)> {
            let (mut y, mut saved) = (zeros(x.len()), NormSaved::default());
            l2norm_forward(&mut y, Some(&mut saved), x, L2NORM_EPS, self.shape.key_dim)?;
            lower(&mut y, run.precision.site(Site::L2Norm));
            Ok((y, saved))
        };
        let ((q, q_saved), (k, k_saved)) = (one(&mixed[0])?, one(&mixed[1])?);
        Ok(Some(Normalized { q, k, q_saved, k_saved }))
    }

    fn rule<A: Element>(
        &self,
        run: &Run<'_>,
        o: &mut [A],
        mixed: &[Vec<A>; PARTS],
        gates: &Gates,
        state: Option<&mut State<A>>,
        saved: Option<&mut Vec<gdn::Saved<A>>>,
    ) -> Result {
        let normalized = self.normalize(run, mixed)?;
        let inputs = RuleInputs::new(mixed, &normalized, gates);
        let step = self.is_step(run, &state);
        let Some(state) = state else {
            return self.rule_pieces(run, o, inputs, saved);
        };
        if step {
            self.steps(run, o, &mut state.state, inputs)?;
        } else {
            let (dims, options) = (self.dims(), self.options(run));
            let RuleInputs { q, k, v, gates: Gates { g, beta } } = inputs;
            let gates = gdn::Gates::Given { g, beta };
            let h0 = state.state.clone();
            let input = gdn::Input { q, k, v, gates, h0: Some(&h0), cu_seqlens: run.cu_seqlens() };
            let output = gdn::Output { o, ht: Some(&mut state.state) };
            gdn::gated_delta_rule_forward(output, None, &input, dims, &options, run.scratch)?;
        }
        Ok(())
    }

    /// Runs the delta rule on one token of every sequence.
    fn steps<A: Element>(
        &self,
        run: &Run<'_>,
        o: &mut [A],
        states: &mut [f32],
        inputs: RuleInputs<'_, A>,
    ) -> Result {
        let RuleInputs { q, k, v, gates: Gates { g, beta } } = inputs;
        let (dims, options) = (self.dims(), self.options(run));
        let (kd, vd, hv) =
            (dims.key_heads * dims.key_dim, dims.value_heads * dims.value_dim, dims.value_heads);
        for (i, state) in states.chunks_mut(hv * dims.state_len()).enumerate() {
            let (keys, values, heads) = (i * kd..(i + 1) * kd, i * vd..(i + 1) * vd, i * hv..(i + 1) * hv);
            gdn::gated_delta_rule_step(
                &mut o[values.clone()],
                state,
                &q[keys.clone()],
                &k[keys],
                &v[values],
                &g[heads.clone()],
                &beta[heads],
                dims,
                &options,
                run.scratch,
            )?;
        }
        Ok(())
    }

    /// Gradients of q, k and v after the convolution, and of the gates.
    fn rule_backward<A: Element>(
        &self,
        run: &Run<'_>,
        d_o: &[A],
        mixed: &[Vec<A>; PARTS],
        gates: &Gates,
        saved: &[gdn::Saved<A>],
    ) -> Result<([Vec<A>; PARTS], Gates)> {
        let mut d_mixed = [0, 1, 2].map(|part| zeros::<A>(mixed[part].len()));
        let mut d_gates = Gates { g: zeros(gates.g.len()), beta: zeros(gates.beta.len()) };
        let normalized = self.normalize(run, mixed)?;
        let inputs = RuleInputs::new(mixed, &normalized, gates);
        let pieces = run.sequences().pieces();
        // The one that began earlier runs first, because the rank before waits for its gradient; the one that
        // continues on the next rank waits itself.
        for number in order_of(&pieces, |piece| (piece.goes_on, !piece.began)) {
            let piece = &pieces[number];
            let (keys, values, heads) = (self.keys(piece), self.values(piece), self.heads(piece));
            let [dq, dk, dv] = &mut d_mixed;
            let to = PieceGrads {
                dq: &mut dq[keys.clone()],
                dk: &mut dk[keys],
                dv: &mut dv[values.clone()],
                dg: &mut d_gates.g[heads.clone()],
                dbeta: &mut d_gates.beta[heads],
            };
            let input = self.piece_input(piece, inputs);
            self.piece_backward(run, to, &d_o[values], &input, &saved[number], piece)?;
        }
        if let Some(normalized) = &normalized {
            for (part, saved) in [&normalized.q_saved, &normalized.k_saved].into_iter().enumerate() {
                let dy = d_mixed[part].clone();
                l2norm_backward(&mut d_mixed[part], &dy, &mixed[part], saved, self.shape.key_dim)?;
            }
        }
        Ok((d_mixed, d_gates))
    }

    /// Returns the bytes that forward saves for these sequences.
    pub(crate) fn saved_bytes<A: Element>(
        &self,
        sequences: Sequences<'_>,
        keep: Keep,
        l2norm: Rounding,
    ) -> usize {
        if !keep.any() {
            return 0;
        }
        let tokens = sequences.tokens();
        let channels: usize = self.qkv.iter().map(Linear::outputs).sum();
        let (vd, hv) = (self.z.outputs(), self.shape.value_heads);
        let l2norm = if l2norm == Rounding::F32 { L2Norm::Inside } else { L2Norm::Off };
        let options = gdn::Options { l2norm, ..gdn::Options::default() };
        let expensive = (channels + 2 * vd) * size_of::<A>() + 3 * hv * 4;
        let cheap = (channels + vd) * size_of::<A>() + 2 * hv * 4;
        let per_token = expensive + if keep == Keep::Everything { cheap } else { 0 };
        let earlier = if sequences.before(Some(1)) > 0 { self.shape.conv_width - 1 } else { 0 };
        tokens * per_token
            + earlier * channels * size_of::<A>()
            + gdn::saved_bytes::<A>(self.dims(), &options, sequences.cu_seqlens)
    }

    /// Returns the bytes that a rank sends.
    pub(crate) fn sent<A>(&self, sequences: Sequences<'_>) -> Sent {
        let Some(part) = sequences.part else { return Sent::default() };
        let rows = Rows::new(part, Some(self.shape.conv_width - 1));
        let channels: usize = self.qkv.iter().map(Linear::outputs).sum();
        let state = |exchanged: bool| {
            if exchanged { 4 * self.shape.value_heads * self.dims().state_len() } else { 0 }
        };
        let pieces = sequences.pieces();
        Sent {
            forward: rows.later * channels * size_of::<A>() + state(pieces.iter().any(|piece| piece.goes_on)),
            backward: 4 * rows.earlier * channels + state(pieces.iter().any(|piece| piece.began)),
        }
    }

    /// Returns the temporary bytes of backward, beyond the saved ones and dy: the gradients of o and z, or the
    /// gradients of q, k and v when o, z and dy are freed; and recomputed activations.
    pub(crate) fn transient<A>(&self, tokens: usize, keep: Keep) -> usize {
        let channels: usize = self.qkv.iter().map(Linear::outputs).sum();
        let (vd, hv) = (self.z.outputs(), self.shape.value_heads);
        let (mixed, normed) = if keep == Keep::Everything { (0, 0) } else { (channels, vd) };
        let freed = 2 * vd + self.out.outputs();
        let wide = (normed + 2 * vd).max((normed + mixed + channels).saturating_sub(freed));
        tokens * (4 * 4 * hv + wide * size_of::<A>())
    }

    pub(crate) fn scratch(&self, tokens: usize) -> usize {
        let (dims, options) = (self.dims(), gdn::Options::default());
        let linears = self.qkv.iter().chain([&self.z, &self.a, &self.b, &self.out]);
        let convs = (0..PARTS).map(|part| conv::conv_backward_scratch(self.conv_dims(part)));
        linears
            .map(|linear| linear.scratch(tokens))
            .chain(convs)
            .chain([
                gdn::gated_delta_rule_forward_scratch(dims, &options),
                gdn::gated_delta_rule_backward_scratch(dims, &options),
                gdn::gated_delta_rule_step_scratch(dims),
                gated_rms_norm_backward_scratch(tokens * dims.value_heads, dims.value_dim),
            ])
            .max()
            .unwrap_or(0)
    }
}
