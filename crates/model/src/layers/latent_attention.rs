//! Latent attention (MLA): low-rank queries, keys and values, over the keys that an indexer selects.
//!
//! ```text
//! q_resid = norm(W_qa x)                       q = W_qb q_resid, each head nope | rope
//! c | k_rope = W_kva x                         k_nope | v of each head = W_kvb norm(c)
//! rope parts rotated, interleaved              k = k_nope | k_rope, one k_rope for all heads
//! y = W_o attention(q, k, v)                   over the keys that the indexer selects
//! ```
//! The gradient of k_rope is summed over the heads. If no sequence is longer than the indexer's topk, every
//! query attends to all earlier keys and no scores are computed. The dense stage of the indexer's training
//! has no selection.
//!
//! If the batch is divided over ranks, norm(c) and the rotated k_rope of the sequence's tokens on earlier
//! ranks are gathered and expanded here, which is less to send than k and v by the same factor as below; the
//! gradients that are returned are those of norm(c) and k_rope, in f32. W_kvb gets its gradient where the
//! keys were used. The indexer's keys are gathered too, so the selection is that of one rank.
//!
//! Decoding caches k and v, not c: the kernel reads keys in place, and with c every step would multiply all
//! cached tokens by W_kvb again. This costs memory: heads (nope + rope + v) elements per token instead of the
//! kv_rank + rope of c and k_rope. In the released shape that is 40960 instead of 576, or 80 KiB per token
//! and layer in bf16.

use std::borrow::Cow;

use ballast_cluster::Kind;
use ballast_kernels::Element;
use ballast_kernels::attention::{self as kernel, Cache as KernelCache, Selected};
use ballast_kernels::elementwise::convert;
use ballast_kernels::indexer::Target;
use ballast_kernels::norm::Saved as NormSaved;
use ballast_kernels::rotary::{Heads, rotary_backward, rotary_forward};

use super::heads::Inputs;
use super::indexer::{self, Indexer};
use super::{Keep, Linear, Norm, bytes_of};
use crate::batch::Sequences;
use crate::config::{Config, LatentAttention as Shape};
use crate::context::{Rows, Sent};
use crate::error::Result;
use crate::model::IndexerStage;
use crate::params::{Grads, Specs};
use crate::precision::Precision;
use crate::run::{Run, zeros};
use crate::site::Site;

/// Epsilon of the norms of q_resid and c; the configuration's is for the other norms.
const EPS: f32 = 1e-6;

#[derive(Clone, Debug)]
pub(crate) struct LatentAttention {
    layer: usize,
    shape: Shape,
    /// Index of the run's rotary table for q and k.
    table: usize,
    q_a: Linear,
    q_norm: Norm,
    q_b: Linear,
    kv_a: Linear,
    kv_norm: Norm,
    kv_b: Linear,
    out: Linear,
    indexer: Indexer,
}

/// Activations that forward saves, in addition to x.
#[derive(Clone, Debug, Default)]
pub(crate) struct Saved<A> {
    /// W_qa x: [tokens, q_rank]
    q_low: Vec<A>,
    q_norm: NormSaved,
    /// [tokens, q_rank]; recomputed
    q_resid: Vec<A>,
    /// c: [tokens, kv_rank]
    kv_low: Vec<A>,
    kv_norm: NormSaved,
    /// [tokens, kv_rank]; recomputed
    kv_normed: Vec<A>,
    /// [tokens, heads, nope + rope], rotated
    q: Vec<A>,
    /// [tokens, heads, nope + rope], rotated
    k: Vec<A>,
    /// [tokens, heads, vd]
    v: Vec<A>,
    /// Selected keys: [tokens, topk]; empty if every query attends to all keys
    selected: Vec<u32>,
    /// [tokens, heads, vd]
    o: Vec<A>,
    /// Log-sum-exp of the logits
    attention: kernel::Saved,
    /// Tensors of the indexer; empty unless it is trained
    indexer: indexer::Saved<A>,
}

impl<A> Saved<A> {
    pub(crate) fn bytes(&self) -> usize {
        let low = [&self.q_low, &self.q_resid, &self.kv_low, &self.kv_normed];
        bytes_of(&low)
            + bytes_of(&[&self.q, &self.k, &self.v, &self.o])
            + bytes_of(&[&self.selected])
            + self.q_norm.bytes()
            + self.kv_norm.bytes()
            + self.attention.bytes()
            + self.indexer.bytes()
    }
}

/// Keys and values that the queries of a rank see: those of earlier ranks, then its own.
struct Visible<'a, A: Element> {
    /// norm(c) of earlier ranks: [before, kv_rank]
    kv_normed: Vec<A>,
    /// [before + tokens, heads, nope + rope]
    k: Cow<'a, [A]>,
    /// [before + tokens, heads, vd]
    v: Cow<'a, [A]>,
    before: usize,
}

/// Cache of one sequence in decoding.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cache<A> {
    /// [cached, heads, nope + rope]
    k: Vec<A>,
    /// [cached, heads, vd]
    v: Vec<A>,
    /// The indexer's keys: [cached, d]
    index: Vec<A>,
}

impl<A> Cache<A> {
    pub(crate) fn bytes(&self) -> usize {
        bytes_of(&[&self.k, &self.v, &self.index])
    }
}

/// Indices of the run's rotary tables.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tables {
    /// Table for q and k of the attention
    pub(crate) attention: usize,
    /// Table for q and k of the indexer
    pub(crate) indexer: usize,
}

impl LatentAttention {
    pub(crate) fn new(
        specs: &mut Specs,
        name: &str,
        layer: usize,
        config: &Config,
        shape: &Shape,
        tables: Tables,
    ) -> LatentAttention {
        let (h, heads, bias) = (config.hidden, shape.heads, shape.bias);
        let linear = |specs: &mut Specs, part: &str, inputs, outputs, bias| {
            Linear::new(specs, &format!("{name}.{part}"), inputs, outputs, bias)
        };
        let norm = |specs: &mut Specs, part: &str, width| {
            Norm::with_eps(specs, &format!("{name}.{part}"), width, config, EPS)
        };
        let (qk, kv) = (shape.nope_dim + shape.rope_dim, shape.nope_dim + shape.value_dim);
        LatentAttention {
            layer,
            shape: shape.clone(),
            table: tables.attention,
            q_a: linear(specs, "q_a_proj", h, shape.q_rank, bias),
            q_norm: norm(specs, "q_a_layernorm", shape.q_rank),
            q_b: linear(specs, "q_b_proj", shape.q_rank, heads * qk, false),
            kv_a: linear(specs, "kv_a_proj_with_mqa", h, shape.kv_rank + shape.rope_dim, bias),
            kv_norm: norm(specs, "kv_a_layernorm", shape.kv_rank),
            kv_b: linear(specs, "kv_b_proj", shape.kv_rank, heads * kv, false),
            out: linear(specs, "o_proj", heads * shape.value_dim, h, bias),
            indexer: Indexer::new(specs, &format!("{name}.indexer"), layer, config, shape, tables.indexer),
        }
    }

    pub(crate) fn forward<A: Element>(
        &self,
        run: &Run<'_>,
        x: &[A],
        caches: Option<&mut Vec<Cache<A>>>,
        keep: Keep,
    ) -> Result<(Vec<A>, Saved<A>)> {
        let layer = Some(self.layer);
        let q_low: Vec<A> = self.q_a.forward(run, x)?;
        let (q_resid, q_norm) = self.q_norm.forward(run, &q_low)?;
        let mut q: Vec<A> = self.q_b.forward(run, &q_resid)?;
        rotary_forward(&mut q, &run.tables[self.table], self.query_heads())?;
        let (kv_low, mut k_rope) = self.split_low(self.kv_a.forward(run, x)?);
        rotary_forward(&mut k_rope, &run.tables[self.table], self.shared_key())?;
        let (kv_normed, kv_norm) = self.kv_norm.forward(run, &kv_low)?;
        let (k, v) = self.expand(self.kv_b.forward(run, &kv_normed)?, &k_rope);
        run.see(layer, "self_attn.q", &q);
        run.see(layer, "self_attn.k", &k);
        run.see(layer, "self_attn.v", &v);
        let mut saved = Saved::default();
        let mut o = zeros(v.len());
        match caches {
            Some(caches) => self.decode(run, &mut o, Inputs { q: &q, k: &k, v: &v }, x, &q_resid, caches)?,
            None => {
                (saved.selected, saved.indexer) = self.select(run, x, &q_resid, keep)?;
                let visible = self.visible(run, &kv_normed, &k_rope, &k, &v)?;
                let input = self.input(run, &q, &visible, &saved.selected);
                self.see_logits(run, &input)?;
                let options = self.options(run.precision);
                let to = keep.any().then_some(&mut saved.attention);
                kernel::attention_forward(&mut o, to, &input, self.dims(), &options, run.scratch)?;
            }
        }
        run.see(layer, "self_attn.o", &o);
        let y = self.out.forward(run, &o)?;
        if keep.any() {
            (saved.q_low, saved.q_norm, saved.q_resid) = (q_low, q_norm, keep.unless_recomputed(q_resid));
            (saved.kv_low, saved.kv_norm, saved.kv_normed) =
                (kv_low, kv_norm, keep.unless_recomputed(kv_normed));
            (saved.q, saved.k, saved.v, saved.o) = (q, k, v, o);
        } else {
            saved.selected = Vec::new();
        }
        Ok((y, saved))
    }

    /// Adds the gradient of the input to dx. If the indexer is trained, adds its loss and gradients too.
    pub(crate) fn backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dx: &mut [f32],
        dy: &[A],
        x: &[A],
        mut saved: Saved<A>,
    ) -> Result {
        let layer = Some(self.layer);
        if saved.q_resid.is_empty() {
            saved.q_resid = self.q_norm.forward(run, &saved.q_low)?.0;
            saved.kv_normed = self.kv_norm.forward(run, &saved.kv_low)?.0;
        }
        let kept = std::mem::take(&mut saved.indexer);
        let k_rope = if run.context.is_some() { self.shared_rope(&saved.k) } else { Vec::new() };
        let visible = self.visible(run, &saved.kv_normed, &k_rope, &saved.k, &saved.v)?;
        self.train_indexer(run, grads, x, &saved, &visible, kept)?;
        let d_o = self.out.backward_alone(run, grads, dy, &saved.o)?;
        run.see_gradient(layer, "self_attn.o", &d_o);
        let (mut dq, mut dk, mut dv) = (zeros(saved.q.len()), zeros(visible.k.len()), zeros(visible.v.len()));
        {
            let input = self.input(run, &saved.q, &visible, &saved.selected);
            let (dims, options) = (self.dims(), self.options(run.precision));
            let keys = visible.before + run.tokens();
            let mut workspace = vec![0.0; kernel::attention_backward_workspace::<A>(dims, keys)];
            let to = kernel::Grads { dq: &mut dq, dk: &mut dk, dv: &mut dv, dsinks: None };
            kernel::attention_backward(
                to,
                &d_o,
                &saved.o,
                &input,
                &saved.attention,
                dims,
                &options,
                &mut workspace,
                run.scratch,
            )?;
        }
        drop(d_o);
        let Visible { kv_normed, before, .. } = visible;
        run.see_gradient(layer, "self_attn.q", &dq);
        run.see_gradient(layer, "self_attn.k", &dk[before * (dk.len() / (before + run.tokens()).max(1))..]);
        run.see_gradient(layer, "self_attn.v", &dv[before * (dv.len() / (before + run.tokens()).max(1))..]);
        rotary_backward(&mut dq, &run.tables[self.table], self.query_heads())?;
        let dq_resid = self.q_b.backward_alone(run, grads, &dq, &saved.q_resid)?;
        let dq_low = self.q_norm.backward(run, grads, &dq_resid, &saved.q_low, &saved.q_norm)?;
        self.q_a.backward(run, grads, dx, &dq_low, x)?;
        drop((dq, dq_resid, dq_low));
        let (dkv, mut dk_rope) = self.gather(&dk, &dv);
        drop((dk, dv));
        let dkv_normed = match &run.context {
            None => self.kv_b.backward_alone(run, grads, &dkv, &saved.kv_normed)?,
            Some(_) => self.expand_backward(run, grads, &dkv, &mut dk_rope, kv_normed, &saved.kv_normed)?,
        };
        rotary_backward(&mut dk_rope, &run.tables[self.table], self.shared_key())?;
        let dkv_low = self.kv_norm.backward(run, grads, &dkv_normed, &saved.kv_low, &saved.kv_norm)?;
        let d_low = self.join_low(&dkv_low, &dk_rope)?;
        self.kv_a.backward(run, grads, dx, &d_low, x)
    }

    /// Returns the selected keys of every query, empty if every query attends to all keys, and the indexer's
    /// tensors for backward.
    fn select<A: Element>(
        &self,
        run: &Run<'_>,
        x: &[A],
        q_resid: &[A],
        keep: Keep,
    ) -> Result<(Vec<u32>, indexer::Saved<A>)> {
        let dense =
            run.tally.indexer.as_ref().is_some_and(|training| training.loss.stage == IndexerStage::Dense);
        // All ranks of a context decide alike, because they exchange keys.
        let selects = !dense && self.selects(run.sequences().whole());
        if !selects && run.tally.indexer.is_none() && run.probe.is_none() {
            return Ok((Vec::new(), indexer::Saved::default()));
        }
        let indexer = self.indexer.forward(run, x, q_resid, true)?;
        let selected = if selects {
            self.indexer.select(run, &indexer)?
        } else {
            // No keys are exchanged for a probe, which one rank alone may have.
            self.indexer.see_scores(run, &indexer, &indexer.k)?;
            Vec::new()
        };
        let kept = run.tally.indexer.is_some() && keep.any();
        Ok((selected, if kept { indexer.kept(keep) } else { indexer::Saved::default() }))
    }

    /// Returns true if a sequence has more keys than the indexer's topk.
    fn selects(&self, cu_seqlens: &[usize]) -> bool {
        cu_seqlens.windows(2).any(|ends| ends[1] - ends[0] > self.shape.index_topk)
    }

    /// Adds the indexer's loss and gradients, if the run trains it.
    fn train_indexer<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        x: &[A],
        saved: &Saved<A>,
        visible: &Visible<'_, A>,
        kept: indexer::Saved<A>,
    ) -> Result {
        let Some(training) = &run.tally.indexer else { return Ok(()) };
        let input = self.input(run, &saved.q, visible, &saved.selected);
        let options = self.options(run.precision);
        let target = Target { input: &input, saved: &saved.attention, dims: self.dims(), options: &options };
        let loss =
            self.indexer.backward(run, grads, &target, x, &saved.q_resid, kept, training.loss.scale)?;
        training.sum.set(training.sum.get() + loss as f64);
        Ok(())
    }

    /// Appends the new tokens to the caches and runs the attention on them.
    fn decode<A: Element>(
        &self,
        run: &Run<'_>,
        o: &mut [A],
        Inputs { q, k, v }: Inputs<'_, A>,
        x: &[A],
        q_resid: &[A],
        caches: &mut [Cache<A>],
    ) -> Result {
        let (dims, options) = (self.dims(), self.options(run.precision));
        let (k_width, v_width) = (dims.heads * dims.head_dim, dims.heads * dims.value_dim);
        let topk = self.shape.index_topk;
        let selects =
            |(cache, ends): (&Cache<A>, &[usize])| cache.k.len() / k_width + ends[1] - ends[0] > topk;
        let scored = caches.iter().zip(run.cu_seqlens().windows(2)).any(selects);
        let new = self.indexer.forward(run, x, q_resid, scored)?;
        let index = self.shape.index_dim;
        for (cache, ends) in caches.iter_mut().zip(run.cu_seqlens().windows(2)) {
            let rows = |width: usize| ends[0] * width..ends[1] * width;
            cache.k.extend_from_slice(&k[rows(k_width)]);
            cache.v.extend_from_slice(&v[rows(v_width)]);
            cache.index.extend_from_slice(&new.k[rows(index)]);
            let len = cache.k.len() / k_width;
            let keys = match len > topk {
                true => self.indexer.select_cached(run, &new, ends[0]..ends[1], &cache.index)?,
                false => Vec::new(),
            };
            kernel::attention_decode(
                &mut o[rows(v_width)],
                &q[rows(k_width)],
                &KernelCache { k: &cache.k, v: &cache.v, len },
                None,
                self.selected(&keys),
                dims,
                &options,
                run.scratch,
            )?;
        }
        Ok(())
    }

    fn dims(&self) -> kernel::Dims {
        let Shape { heads, nope_dim, rope_dim, value_dim, .. } = self.shape;
        kernel::Dims { heads, kv_heads: heads, head_dim: nope_dim + rope_dim, value_dim }
    }

    fn options(&self, precision: &Precision) -> kernel::Options {
        kernel::Options {
            scale: Some(self.shape.scale),
            qk_product: precision.site(Site::QkProduct),
            logits: precision.site(Site::Logits),
            probabilities: precision.site(Site::Probabilities),
            gradient: precision.site(Site::AttentionGradient),
            ..kernel::Options::default()
        }
    }

    fn input<'a, A: Element>(
        &self,
        run: &'a Run<'_>,
        q: &'a [A],
        visible: &'a Visible<'_, A>,
        selected: &'a [u32],
    ) -> kernel::Input<'a, A> {
        let (Visible { k, v, before, .. }, selected) = (visible, self.selected(selected));
        kernel::Input { q, k, v, sinks: None, selected, before: *before, cu_seqlens: run.cu_seqlens() }
    }

    /// Adds the keys and values of earlier ranks, expanded from their norm(c) and rotated k_rope; the
    /// arguments are the rank's own.
    fn visible<'a, A: Element>(
        &self,
        run: &Run<'_>,
        kv_normed: &[A],
        k_rope: &[A],
        k: &'a [A],
        v: &'a [A],
    ) -> Result<Visible<'a, A>> {
        let own = Visible { kv_normed: Vec::new(), k: Cow::Borrowed(k), v: Cow::Borrowed(v), before: 0 };
        let Some(context) = &run.context else { return Ok(own) };
        let kv_normed = context.earlier(Kind::Attention, kv_normed, self.shape.kv_rank, None)?;
        let k_rope = context.earlier(Kind::Attention, k_rope, self.shape.rope_dim, None)?;
        if kv_normed.is_empty() {
            return Ok(own);
        }
        let (mut all_k, mut all_v) = self.expand(self.kv_b.forward(run, &kv_normed)?, &k_rope);
        all_k.extend_from_slice(k);
        all_v.extend_from_slice(v);
        let before = run.sequences().before(None);
        Ok(Visible { kv_normed, k: Cow::Owned(all_k), v: Cow::Owned(all_v), before })
    }

    /// The rotated k_rope of k, which all heads share.
    fn shared_rope<A: Element>(&self, k: &[A]) -> Vec<A> {
        let Shape { heads, nope_dim, rope_dim, .. } = self.shape;
        let rows = k.chunks_exact(heads * (nope_dim + rope_dim));
        rows.flat_map(|row| &row[nope_dim..nope_dim + rope_dim]).copied().collect()
    }

    /// Backward of the expansion of all visible keys: returns the gradient of the rank's own norm(c) [tokens,
    /// kv_rank] and leaves that of its own k_rope in `dk_rope`. `earlier` is the norm(c) of earlier ranks,
    /// which get their gradients.
    fn expand_backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dkv: &[A],
        dk_rope: &mut Vec<f32>,
        earlier: Vec<A>,
        own: &[A],
    ) -> Result<Vec<A>> {
        let Shape { kv_rank, rope_dim, .. } = self.shape;
        let before = earlier.len() / kv_rank;
        let mut all = earlier;
        all.extend_from_slice(own);
        let mut d_all = vec![0.0; all.len()];
        self.kv_b.backward(run, grads, &mut d_all, dkv, &all)?;
        drop(all);
        let mut d_own = d_all.split_off(before * kv_rank);
        let mut d_own_rope = dk_rope.split_off(before * rope_dim);
        if let Some(context) = &run.context {
            context.give_back(Kind::Attention, &mut d_own, &d_all, kv_rank, None)?;
            context.give_back(Kind::Attention, &mut d_own_rope, dk_rope, rope_dim, None)?;
        }
        *dk_rope = d_own_rope;
        let mut rounded = zeros(d_own.len());
        convert(&mut rounded, &d_own)?;
        Ok(rounded)
    }

    fn selected<'a>(&self, keys: &'a [u32]) -> Option<Selected<'a>> {
        (!keys.is_empty()).then_some(Selected { keys, topk: self.shape.index_topk })
    }

    fn query_heads(&self) -> Heads {
        let Shape { heads, nope_dim, rope_dim, .. } = self.shape;
        Heads { heads, width: nope_dim + rope_dim, offset: nope_dim }
    }

    fn shared_key(&self) -> Heads {
        Heads { heads: 1, width: self.shape.rope_dim, offset: 0 }
    }

    /// Splits c and k_rope.
    fn split_low<A: Element>(&self, both: Vec<A>) -> (Vec<A>, Vec<A>) {
        let Shape { kv_rank, rope_dim, .. } = self.shape;
        let rows = both.chunks_exact(kv_rank + rope_dim);
        let (low, rope): (Vec<&[A]>, Vec<&[A]>) = rows.map(|row| row.split_at(kv_rank)).unzip();
        (low.concat(), rope.concat())
    }

    /// Joins the gradients of c and k_rope: [tokens, kv_rank + rope].
    fn join_low<A: Element>(&self, dkv_low: &[A], dk_rope: &[f32]) -> Result<Vec<A>> {
        let Shape { kv_rank, rope_dim, .. } = self.shape;
        let mut both = zeros(dkv_low.len() + dk_rope.len());
        let parts = dkv_low.chunks_exact(kv_rank).zip(dk_rope.chunks_exact(rope_dim));
        for (row, (low, rope)) in both.chunks_exact_mut(kv_rank + rope_dim).zip(parts) {
            row[..kv_rank].copy_from_slice(low);
            convert(&mut row[kv_rank..], rope)?;
        }
        Ok(both)
    }

    /// Builds k [tokens, heads, nope + rope] and v [tokens, heads, vd] from kv [tokens, heads, nope + vd] and
    /// the shared k_rope.
    fn expand<A: Element>(&self, kv: Vec<A>, k_rope: &[A]) -> (Vec<A>, Vec<A>) {
        let Shape { heads, nope_dim, rope_dim, value_dim, .. } = self.shape;
        let tokens = k_rope.len() / rope_dim;
        let (qk, width) = (nope_dim + rope_dim, nope_dim + value_dim);
        let (mut k, mut v) = (zeros(tokens * heads * qk), zeros(tokens * heads * value_dim));
        let parts = k.chunks_exact_mut(qk).zip(v.chunks_exact_mut(value_dim)).zip(kv.chunks_exact(width));
        for (i, ((k, v), kv)) in parts.enumerate() {
            let token = i / heads;
            k[..nope_dim].copy_from_slice(&kv[..nope_dim]);
            k[nope_dim..].copy_from_slice(&k_rope[token * rope_dim..(token + 1) * rope_dim]);
            v.copy_from_slice(&kv[nope_dim..]);
        }
        (k, v)
    }

    /// Returns the gradients of kv and of k_rope, the latter summed over the heads.
    fn gather<A: Element>(&self, dk: &[A], dv: &[A]) -> (Vec<A>, Vec<f32>) {
        let Shape { heads, nope_dim, rope_dim, value_dim, .. } = self.shape;
        let (qk, width) = (nope_dim + rope_dim, nope_dim + value_dim);
        let rows = dk.len() / qk;
        let (mut dkv, mut dk_rope) = (zeros(rows * width), vec![0.0; rows / heads * rope_dim]);
        let parts = dkv.chunks_exact_mut(width).zip(dk.chunks_exact(qk)).zip(dv.chunks_exact(value_dim));
        for (i, ((dkv, dk), dv)) in parts.enumerate() {
            dkv[..nope_dim].copy_from_slice(&dk[..nope_dim]);
            dkv[nope_dim..].copy_from_slice(dv);
            let token = i / heads;
            let sum = &mut dk_rope[token * rope_dim..(token + 1) * rope_dim];
            for (sum, dk) in sum.iter_mut().zip(&dk[nope_dim..]) {
                *sum += dk.to_f32();
            }
        }
        (dkv, dk_rope)
    }

    /// Computes the logits of every sequence [heads, tokens, tokens] if the probe wants them; the kernel does
    /// not store them.
    fn see_logits<A: Element>(&self, run: &Run<'_>, input: &kernel::Input<'_, A>) -> Result {
        if run.wanted(self.layer, "self_attn.logits") {
            let logits = kernel::attention_logits(input, self.dims(), &self.options(run.precision))?;
            run.show("", Some(self.layer), "self_attn.logits", &logits, &[logits.len()]);
        }
        Ok(())
    }

    /// Returns the bytes that forward saves for these sequences; `stage` is the stage of the indexer's
    /// training, if any.
    pub(crate) fn saved_bytes<A>(
        &self,
        sequences: Sequences<'_>,
        keep: Keep,
        precision: &Precision,
        stage: Option<IndexerStage>,
    ) -> usize {
        if !keep.any() {
            return 0;
        }
        let (tokens, dims, shape) = (sequences.tokens(), self.dims(), &self.shape);
        let low = shape.q_rank + shape.kv_rank;
        let lows = if keep == Keep::Everything { 2 * low } else { low };
        let elements = lows + 2 * dims.heads * (dims.head_dim + dims.value_dim);
        let selects = stage != Some(IndexerStage::Dense) && self.selects(sequences.whole());
        let selected = if selects { shape.index_topk } else { 0 };
        let indexer = stage.map_or(0, |_| self.indexer.saved_bytes::<A>(tokens, keep));
        tokens * (elements * size_of::<A>() + 4 * (2 + selected))
            + kernel::saved_bytes(dims, &self.options(precision), tokens)
            + indexer
    }

    /// Returns the temporary bytes of backward: gradients of o, q, k and v, the larger of the attention's and
    /// the indexer's buffers, recomputed activations, and all that is expanded for earlier ranks' keys.
    pub(crate) fn transient<A: Element>(
        &self,
        sequences: Sequences<'_>,
        keep: Keep,
        stage: Option<IndexerStage>,
    ) -> usize {
        let (tokens, before) = (sequences.tokens(), sequences.before(None));
        let keys = tokens + before;
        let (dims, shape) = (self.dims(), &self.shape);
        let recomputed = if keep == Keep::Everything { 0 } else { shape.q_rank + shape.kv_rank };
        let elements = recomputed + 2 * dims.heads * (dims.head_dim + dims.value_dim);
        let buffer = 4 * kernel::attention_backward_workspace::<A>(dims, keys);
        let indexer = stage.map_or(0, |_| self.indexer.transient::<A>(sequences));
        // k and v of all keys, gradients of the earlier ones, and the earlier latent rows
        let expanded = dims.heads * (dims.head_dim + dims.value_dim);
        let gathered = if before > 0 { (keys + before) * expanded + before * shape.kv_rank } else { 0 };
        (tokens * elements + gathered) * size_of::<A>() + buffer.max(indexer)
    }

    /// Returns the bytes that a rank sends; `stage` is the stage of the indexer's training, if any.
    pub(crate) fn sent<A: Element>(&self, sequences: Sequences<'_>, stage: Option<IndexerStage>) -> Sent {
        let Some(part) = sequences.part else { return Sent::default() };
        let (rows, shape) = (Rows::new(part, None), &self.shape);
        let latent = shape.kv_rank + shape.rope_dim;
        let selects = stage != Some(IndexerStage::Dense) && self.selects(sequences.whole());
        let selection = if selects { shape.index_dim } else { 0 };
        let training = stage.map_or(0, |_| shape.index_dim);
        Sent {
            forward: rows.later * (latent + selection) * size_of::<A>(),
            backward: (rows.later * size_of::<A>() + 4 * rows.earlier) * (latent + training),
        }
    }

    pub(crate) fn scratch<A: Element>(&self, tokens: usize, before: usize) -> usize {
        let (dims, topk) = (self.dims(), Some(self.shape.index_topk));
        let linears = [&self.q_a, &self.q_b, &self.kv_a, &self.kv_b, &self.out];
        linears
            .map(|linear| linear.scratch(tokens))
            .into_iter()
            .chain([
                self.q_norm.scratch(tokens),
                self.kv_norm.scratch(tokens),
                kernel::attention_forward_scratch::<A>(dims, topk),
                kernel::attention_backward_scratch::<A>(dims, topk),
                self.kv_b.scratch(tokens + before),
                self.indexer.scratch::<A>(tokens, tokens + before, dims),
            ])
            .max()
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests;
