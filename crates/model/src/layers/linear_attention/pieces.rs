//! Linear attention on a part of a batch: what the ranks exchange.

use ballast_cluster::Kind;
use ballast_kernels::Element;
use ballast_kernels::conv::{self, Grads as ConvGrads, conv_backward};
use ballast_kernels::elementwise::convert;
use ballast_kernels::gated_delta_rule as gdn;

use super::{Gates, LinearAttention, PARTS, RuleInputs};
use crate::batch::Piece;
use crate::context::Neighbor;
use crate::error::Result;
use crate::params::Weight;
use crate::precision::with_storage;
use crate::run::{Run, zeros};

impl LinearAttention {
    /// Rows of q, k, v before the convolution that precede the part: [W-1, channels], zeros before the
    /// sequence; empty if the first sequence begins here.
    pub(super) fn earlier<A: Element>(
        &self,
        run: &Run<'_>,
        unmixed: &[Vec<A>; PARTS],
    ) -> Result<[Vec<A>; PARTS]> {
        let mut earlier = [const { Vec::new() }; PARTS];
        let Some(context) = &run.context else { return Ok(earlier) };
        for part in 0..PARTS {
            let dims = self.conv_dims(part);
            let rows = context.earlier(Kind::States, &unmixed[part], dims.channels, Some(dims.width - 1))?;
            if !rows.is_empty() {
                let mut padded = zeros(dims.state_len() - rows.len());
                padded.extend(rows);
                earlier[part] = padded;
            }
        }
        Ok(earlier)
    }

    /// Sends the gradient of the rows of [`LinearAttention::earlier`] to their owners. Returns the gradient
    /// [W-1, channels] that later ranks send for the last rows of the part; empty without a context.
    pub(super) fn earlier_backward<A: Element>(
        &self,
        run: &Run<'_>,
        pieces: &[Piece],
        d_mixed: &[A],
        unmixed: &[A],
        earlier: &[A],
        part: usize,
    ) -> Result<Vec<A>> {
        let Some(context) = &run.context else { return Ok(Vec::new()) };
        let (dims, taps) = (self.conv_dims(part), self.taps(part));
        let limit = dims.width - 1;
        let mut d_earlier = zeros::<A>(earlier.len());
        if let Some(first) = pieces.first().filter(|piece| piece.began) {
            // The first W-1 tokens alone depend on these rows, so the other ranks need not wait for the rest.
            let tokens = limit.min(first.tokens.len());
            let rows = ..tokens * dims.channels;
            let (mut unused, mut dweight) = (zeros::<A>(tokens * dims.channels), vec![0.0; taps.len()]);
            with_storage!(Weight, run.weight(self.conv), |w| {
                let input = conv::Input {
                    x: &unmixed[rows],
                    weight: &w[taps],
                    state: Some(earlier),
                    cu_seqlens: &[0, tokens],
                };
                let to = ConvGrads { dx: &mut unused, dweight: &mut dweight, dstate: Some(&mut d_earlier) };
                conv_backward(to, &d_mixed[rows], None, &input, dims, run.scratch)?;
            });
        }
        let mut wide = vec![0.0; d_earlier.len()];
        A::load(&mut wide, &d_earlier);
        let known = run.sequences().before(Some(limit)) * dims.channels;
        let last = pieces.last().map_or(0, |piece| limit.min(piece.tokens.len()));
        let mut own = vec![0.0; last * dims.channels];
        let sent = &wide[wide.len() - known..];
        context.give_back(Kind::States, &mut own, sent, dims.channels, Some(limit))?;
        let mut d_final = zeros::<A>(dims.state_len());
        let from = d_final.len() - own.len();
        convert(&mut d_final[from..], &own)?;
        Ok(d_final)
    }

    /// Runs the delta rule on whole sequences and on those that cross the boundaries of the part. The one
    /// that continues on the next rank runs first, because that rank waits for its state; the one that began
    /// earlier runs last, because it waits itself.
    pub(super) fn rule_pieces<A: Element>(
        &self,
        run: &Run<'_>,
        o: &mut [A],
        inputs: RuleInputs<'_, A>,
        saved: Option<&mut Vec<gdn::Saved<A>>>,
    ) -> Result {
        let pieces = run.sequences().pieces();
        let mut kept: Vec<gdn::Saved<A>> = vec![gdn::Saved::default(); pieces.len()];
        for number in order_of(&pieces, |piece| (piece.began, !piece.goes_on)) {
            let piece = &pieces[number];
            let view = self.piece_input(piece, inputs);
            let o = &mut o[self.values(piece)];
            let mut keep = saved.is_some().then_some(&mut kept[number]);
            let Some(context) = run.context.as_ref().filter(|_| piece.began || piece.goes_on) else {
                let output = gdn::Output { o, ht: None };
                let (dims, options) = (self.dims(), self.options(run));
                gdn::gated_delta_rule_forward(output, keep, &view, dims, &options, run.scratch)?;
                continue;
            };
            let (mut h0, mut ht) = (self.states(piece.began), self.states(piece.goes_on));
            let len = self.group_state_len();
            let mut receives = Vec::new();
            for _ in h0.chunks(len) {
                receives.push(context.receive_state(Neighbor::Before, len)?);
            }
            let mut receives = receives.into_iter();
            for heads in self.head_blocks() {
                for (state, receive) in h0.chunks_mut(len).skip(heads.0).zip(receives.by_ref().take(heads.1))
                {
                    context.wait_state(state, receive)?;
                }
                let h0 = piece.began.then_some(&h0[..]);
                let output = gdn::Output { o: &mut *o, ht: piece.goes_on.then_some(&mut ht[..]) };
                let (dims, options) = (self.dims(), gdn::Options { heads: Some(heads), ..self.options(run) });
                let input = gdn::Input { h0, ..view };
                gdn::gated_delta_rule_forward(
                    output,
                    keep.as_deref_mut(),
                    &input,
                    dims,
                    &options,
                    run.scratch,
                )?;
                for state in ht.chunks(len).skip(heads.0).take(heads.1) {
                    context.send_state(Neighbor::After, state)?;
                }
            }
        }
        if let Some(saved) = saved {
            *saved = kept;
        }
        Ok(())
    }

    /// Inputs of a piece.
    pub(super) fn piece_input<'a, A: Element>(
        &self,
        piece: &'a Piece,
        inputs: RuleInputs<'a, A>,
    ) -> gdn::Input<'a, A> {
        let RuleInputs { q, k, v, gates: Gates { g, beta } } = inputs;
        let (keys, heads) = (self.keys(piece), self.heads(piece));
        gdn::Input {
            q: &q[keys.clone()],
            k: &k[keys],
            v: &v[self.values(piece)],
            gates: gdn::Gates::Given { g: &g[heads.clone()], beta: &beta[heads] },
            h0: None,
            cu_seqlens: &piece.cu_seqlens,
        }
    }

    /// Ranges of a piece in tensors [tokens, Hk dk], [tokens, Hv dv] and [tokens, Hv].
    pub(super) fn keys(&self, piece: &Piece) -> std::ops::Range<usize> {
        let width = self.shape.key_heads * self.shape.key_dim;
        piece.tokens.start * width..piece.tokens.end * width
    }

    pub(super) fn values(&self, piece: &Piece) -> std::ops::Range<usize> {
        let width = self.shape.value_heads * self.shape.value_dim;
        piece.tokens.start * width..piece.tokens.end * width
    }

    pub(super) fn heads(&self, piece: &Piece) -> std::ops::Range<usize> {
        piece.tokens.start * self.shape.value_heads..piece.tokens.end * self.shape.value_heads
    }

    /// States of one sequence [Hv, dk, dv], if it has some to exchange.
    fn states(&self, exchanged: bool) -> Vec<f32> {
        vec![0.0; if exchanged { self.shape.value_heads * self.dims().state_len() } else { 0 }]
    }

    /// Elements of the states of the value heads of one key head.
    fn group_state_len(&self) -> usize {
        self.dims().group() * self.dims().state_len()
    }

    /// Key heads that are computed together, each as its first head and their number: as many as there are
    /// threads. Heads do not depend on each other, so the bits do not depend on this; messages are by head.
    fn head_blocks(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (heads, step) = (self.shape.key_heads, rayon::current_num_threads().max(1));
        (0..heads).step_by(step).map(move |first| (first, step.min(heads - first)))
    }

    /// Runs the backward of a piece, some heads at a time if it exchanges states.
    pub(super) fn piece_backward<A: Element>(
        &self,
        run: &Run<'_>,
        to: PieceGrads<'_, A>,
        d_o: &[A],
        input: &gdn::Input<'_, A>,
        saved: &gdn::Saved<A>,
        piece: &Piece,
    ) -> Result {
        let PieceGrads { dq, dk, dv, dg, dbeta } = to;
        let dims = self.dims();
        let Some(context) = run.context.as_ref().filter(|_| piece.began || piece.goes_on) else {
            let grads = gdn::Grads { dq, dk, dv, gates: gdn::GateGrads::Given { dg, dbeta }, dh0: None };
            let options = self.options(run);
            gdn::gated_delta_rule_backward(grads, d_o, None, input, saved, dims, &options, run.scratch)?;
            return Ok(());
        };
        let (mut dh0, mut dht) = (self.states(piece.began), self.states(piece.goes_on));
        let len = self.group_state_len();
        let mut receives = Vec::new();
        for _ in dht.chunks(len) {
            receives.push(context.receive_state(Neighbor::After, len)?);
        }
        let mut receives = receives.into_iter();
        for heads in self.head_blocks() {
            for (state, receive) in dht.chunks_mut(len).skip(heads.0).zip(receives.by_ref().take(heads.1)) {
                context.wait_state(state, receive)?;
            }
            let dht = piece.goes_on.then_some(&dht[..]);
            let options = gdn::Options { heads: Some(heads), ..self.options(run) };
            let gates = gdn::GateGrads::Given { dg: &mut *dg, dbeta: &mut *dbeta };
            let to_h0 = piece.began.then_some(&mut dh0[..]);
            let grads = gdn::Grads { dq: &mut *dq, dk: &mut *dk, dv: &mut *dv, gates, dh0: to_h0 };
            gdn::gated_delta_rule_backward(grads, d_o, dht, input, saved, dims, &options, run.scratch)?;
            for state in dh0.chunks(len).skip(heads.0).take(heads.1) {
                context.send_state(Neighbor::Before, state)?;
            }
        }
        Ok(())
    }
}

/// Gradients of a piece.
pub(super) struct PieceGrads<'a, A> {
    pub(super) dq: &'a mut [A],
    pub(super) dk: &'a mut [A],
    pub(super) dv: &'a mut [A],
    pub(super) dg: &'a mut [f32],
    pub(super) dbeta: &'a mut [f32],
}

/// Numbers of the pieces, sorted by a key.
pub(super) fn order_of(pieces: &[Piece], key: impl Fn(&Piece) -> (bool, bool)) -> Vec<usize> {
    let mut order: Vec<usize> = (0..pieces.len()).collect();
    order.sort_by_key(|number| key(&pieces[*number]));
    order
}
