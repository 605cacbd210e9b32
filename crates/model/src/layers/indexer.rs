//! Indexer of latent attention: selects the keys of each query, and has its own training loss.
//!
//! ```text
//! q = rotate(W_q q_resid)      k = rotate(LayerNorm(W_k x))      rotates the first dimensions, half-split
//! w = heads^-1/2 W_w x         in f32, W_w protected
//! ```
//! Scores, selection and loss are in the kernel [`ballast_kernels::indexer`]. The inputs are detached: the
//! indexer sends no gradient to x or q_resid, and is trained only by its own loss. If the batch is divided
//! over ranks, keys of the sequence on earlier ranks are gathered, so scores, selection and loss are those of
//! one rank.

use std::borrow::Cow;

use ballast_cluster::Kind;
use ballast_kernels::Element;
use ballast_kernels::elementwise::{accumulate, convert, scale};
use ballast_kernels::indexer as kernel;
use ballast_kernels::norm::{
    Saved as NormSaved, layer_norm_backward, layer_norm_backward_scratch, layer_norm_forward,
};
use ballast_kernels::rotary::{Heads, rotary_backward, rotary_forward};

use super::{Keep, Linear, bytes_of};
use crate::batch::Sequences;
use crate::config::{Config, LatentAttention as Shape};
use crate::error::Result;
use crate::params::{Grads, Id, Init, Protected, Specs, Weight};
use crate::precision::with_storage;
use crate::run::{Run, lower, zeros};
use crate::site::Site;

/// Epsilon of the LayerNorm of k.
const EPS: f32 = 1e-6;

#[derive(Clone, Debug)]
pub(crate) struct Indexer {
    layer: usize,
    dims: kernel::Dims,
    topk: usize,
    /// Index of the run's rotary table for q and k.
    table: usize,
    q: Linear,
    k: Linear,
    k_norm: LayerNorm,
    weights: Linear<Protected>,
}

#[derive(Clone, Copy, Debug)]
struct LayerNorm {
    weight: Id<Weight>,
    bias: Id<Weight>,
}

/// Inputs of the scores; saved for backward if the indexer is trained.
#[derive(Clone, Debug, Default)]
pub(crate) struct Saved<A> {
    /// [tokens, heads, d]; empty if every query attends to all keys
    q: Vec<A>,
    /// [tokens, heads]; empty if every query attends to all keys
    w: Vec<f32>,
    /// k before norm and rotation: [tokens, d]
    k_raw: Vec<A>,
    /// rstd and mean of k_raw
    k_norm: NormSaved,
    /// [tokens, d]; recomputed
    pub(crate) k: Vec<A>,
}

impl<A> Saved<A> {
    pub(crate) fn bytes(&self) -> usize {
        bytes_of(&[&self.q, &self.k_raw, &self.k]) + bytes_of(&[&self.w]) + self.k_norm.bytes()
    }

    /// Drops the tensors that backward recomputes.
    pub(crate) fn kept(mut self, keep: Keep) -> Saved<A> {
        self.k = keep.unless_recomputed(self.k);
        self
    }
}

impl Indexer {
    pub(crate) fn new(
        specs: &mut Specs,
        name: &str,
        layer: usize,
        config: &Config,
        shape: &Shape,
        table: usize,
    ) -> Indexer {
        let dims = kernel::Dims { heads: shape.index_heads, dim: shape.index_dim };
        let h = config.hidden;
        Indexer {
            layer,
            dims,
            topk: shape.index_topk,
            table,
            q: Linear::new(specs, &format!("{name}.wq_b"), shape.q_rank, dims.heads * dims.dim, false),
            k: Linear::new(specs, &format!("{name}.wk"), h, dims.dim, false),
            k_norm: LayerNorm {
                weight: specs.weight(format!("{name}.k_norm.weight"), &[dims.dim], Init::Ones),
                bias: specs.weight(format!("{name}.k_norm.bias"), &[dims.dim], Init::Zeros),
            },
            weights: Linear::protected(specs, &format!("{name}.weights_proj"), h, dims.heads),
        }
    }

    /// Computes the keys, and if `scored` the queries and head weights, from x [tokens, H] and q_resid
    /// [tokens, q_rank].
    pub(crate) fn forward<A: Element>(
        &self,
        run: &Run<'_>,
        x: &[A],
        q_resid: &[A],
        scored: bool,
    ) -> Result<Saved<A>> {
        let layer = Some(self.layer);
        let mut saved = Saved { k_raw: self.k.forward(run, x)?, ..Saved::default() };
        (saved.k, saved.k_norm) = self.finish_keys(run, &saved.k_raw)?;
        run.see(layer, "self_attn.indexer.k", &saved.k);
        if scored {
            saved.q = self.q.forward(run, q_resid)?;
            rotary_forward(&mut saved.q, &run.tables[self.table], self.heads(self.dims.heads))?;
            saved.w = self.weights.forward(run, x)?;
            scale(&mut saved.w, self.weight_factor());
            run.see(layer, "self_attn.indexer.q", &saved.q);
            run.see(layer, "self_attn.indexer.w", &saved.w);
        }
        Ok(saved)
    }

    /// Computes k from k_raw; returns it with the statistics of the norm.
    fn finish_keys<A: Element>(&self, run: &Run<'_>, raw: &[A]) -> Result<(Vec<A>, NormSaved)> {
        let (mut k, mut saved) = (zeros(raw.len()), NormSaved::default());
        match (run.weight(self.k_norm.weight), run.weight(self.k_norm.bias)) {
            (Weight::F32(weight), Weight::F32(bias)) => {
                layer_norm_forward(&mut k, Some(&mut saved), raw, weight, bias, EPS)?;
            }
            (Weight::Bf16(weight), Weight::Bf16(bias)) => {
                layer_norm_forward(&mut k, Some(&mut saved), raw, weight, bias, EPS)?;
            }
            _ => unreachable!("all weights have one storage type"),
        }
        lower(&mut k, run.precision.site(Site::Norms));
        rotary_forward(&mut k, &run.tables[self.table], self.heads(1))?;
        Ok((k, saved))
    }

    /// Selects the keys of every query: [tokens, topk].
    pub(crate) fn select<A: Element>(&self, run: &Run<'_>, saved: &Saved<A>) -> Result<Vec<u32>> {
        let mut selected = vec![0; run.tokens() * self.topk];
        let options = self.options(run, 0.0);
        let keys = self.visible(run, &saved.k)?;
        self.see_scores(run, saved, &keys)?;
        kernel::indexer_topk(
            &mut selected,
            &self.input(run, saved, &keys),
            self.dims,
            &options,
            self.topk,
            run.scratch,
        )?;
        Ok(selected)
    }

    /// Selects the keys of a sequence's new tokens, the rows `new` of the run, among all cached keys: [new,
    /// topk].
    pub(crate) fn select_cached<A: Element>(
        &self,
        run: &Run<'_>,
        saved: &Saved<A>,
        new: std::ops::Range<usize>,
        cached: &[A],
    ) -> Result<Vec<u32>> {
        let (heads, dim) = (self.dims.heads, self.dims.dim);
        let mut selected = vec![0; new.len() * self.topk];
        kernel::indexer_topk_decode(
            &mut selected,
            &saved.q[new.start * heads * dim..new.end * heads * dim],
            &saved.w[new.start * heads..new.end * heads],
            cached,
            cached.len() / dim,
            self.dims,
            &self.options(run, 0.0),
            self.topk,
            run.scratch,
        )?;
        Ok(selected)
    }

    /// Returns the loss of the indexer against the attention distribution `target`; adds the gradients of its
    /// parameters.
    #[allow(clippy::too_many_arguments)] // run, then outputs, then inputs
    pub(crate) fn backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        target: &kernel::Target<'_, A>,
        x: &[A],
        q_resid: &[A],
        mut saved: Saved<A>,
        loss_scale: f32,
    ) -> Result<f32> {
        if saved.k.is_empty() {
            saved.k = self.finish_keys(run, &saved.k_raw)?.0;
        }
        let (mut dq, mut dw) = (zeros(saved.q.len()), zeros(saved.w.len()));
        let (loss, mut dk) = match &run.context {
            None => self.loss(run, &mut dq, &mut dw, target, &saved, loss_scale)?,
            Some(context) => {
                // The kernel divides by the rank's own tokens; the mean is over those of all ranks.
                let sequences = run.sequences();
                let share = sequences.tokens() as f64 / sequences.tokens_in_whole() as f64;
                let scale = (loss_scale as f64 * share) as f32;
                let (loss, mut all) = self.loss::<A, f32>(run, &mut dq, &mut dw, target, &saved, scale)?;
                let (earlier, own) = all.split_at_mut(sequences.before(None) * self.dims.dim);
                context.give_back(Kind::Attention, own, earlier, self.dims.dim, None)?;
                let mut dk = zeros(own.len());
                convert(&mut dk, own)?;
                (loss, dk)
            }
        };
        run.see_gradient(Some(self.layer), "self_attn.indexer.q", &dq);
        run.see_gradient(Some(self.layer), "self_attn.indexer.k", &dk);
        run.see_gradient(Some(self.layer), "self_attn.indexer.w", &dw);
        rotary_backward(&mut dq, &run.tables[self.table], self.heads(self.dims.heads))?;
        self.q.backward_weight(run, grads, &dq, q_resid)?;
        scale(&mut dw, self.weight_factor());
        self.weights.backward_weight(run, grads, &dw, x)?;
        rotary_backward(&mut dk, &run.tables[self.table], self.heads(1))?;
        let dk_raw = self.norm_backward(run, grads, &dk, &saved)?;
        self.k.backward_weight(run, grads, &dk_raw, x)?;
        Ok(loss)
    }

    /// Computes the loss and its gradients of q, w and all visible keys; returns the loss and the last.
    fn loss<A: Element, K: Element>(
        &self,
        run: &Run<'_>,
        dq: &mut [A],
        dw: &mut [f32],
        target: &kernel::Target<'_, A>,
        saved: &Saved<A>,
        loss_scale: f32,
    ) -> Result<(f32, Vec<K>)> {
        let keys = self.visible(run, &saved.k)?;
        let (input, options) = (self.input(run, saved, &keys), self.options(run, loss_scale));
        let mut dk = zeros(keys.len());
        let mut workspace = vec![0.0; kernel::indexer_loss_workspace(self.dims, input.before + run.tokens())];
        let to = kernel::Grads { dq, dk: &mut dk, dw };
        let scratch = run.scratch;
        let loss =
            kernel::indexer_loss(Some(to), &input, target, self.dims, &options, &mut workspace, scratch)?;
        Ok((loss, dk))
    }

    /// Keys [before + tokens, d] that the queries of this rank see: those of earlier ranks, then its own.
    fn visible<'a, A: Element>(&self, run: &Run<'_>, k: &'a [A]) -> Result<Cow<'a, [A]>> {
        match &run.context {
            None => Ok(Cow::Borrowed(k)),
            Some(context) => context.with_earlier(Kind::Attention, k, self.dims.dim, None),
        }
    }

    fn norm_backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dk: &[A],
        saved: &Saved<A>,
    ) -> Result<Vec<A>> {
        let LayerNorm { weight, bias } = self.k_norm;
        let mut dk_raw = zeros(dk.len());
        let (mut dweight, mut dbias) = (vec![0.0; self.dims.dim], vec![0.0; self.dims.dim]);
        let (raw, kept) = (&saved.k_raw, &saved.k_norm);
        with_storage!(Weight, run.weight(weight), |w| {
            layer_norm_backward(&mut dk_raw, &mut dweight, &mut dbias, dk, raw, w, kept, run.scratch)?;
        });
        for (id, gradient) in [(weight, dweight), (bias, dbias)] {
            if let Some(sum) = grads.of(id) {
                accumulate(sum, &gradient)?;
            }
        }
        Ok(dk_raw)
    }

    /// Computes the scores of every sequence [queries, keys], 0 for future keys, if the probe wants them.
    pub(crate) fn see_scores<A: Element>(&self, run: &Run<'_>, saved: &Saved<A>, keys: &[A]) -> Result {
        if !run.wanted(self.layer, "self_attn.indexer.scores") {
            return Ok(());
        }
        let (input, options) = (self.input(run, saved, keys), self.options(run, 0.0));
        let mut all = Vec::new();
        for (sequence, ends) in run.cu_seqlens().windows(2).enumerate() {
            let before = if sequence == 0 { input.before } else { 0 };
            let tokens = before + ends[1] - ends[0];
            let mut scores = vec![0.0; (ends[1] - ends[0]) * tokens];
            kernel::indexer_scores(
                &mut scores,
                &input,
                self.dims,
                &options,
                sequence,
                before..tokens,
                run.scratch,
            )?;
            for (t, row) in scores.chunks_mut(tokens.max(1)).enumerate() {
                row[before + t + 1..].fill(0.0);
            }
            all.extend(scores);
        }
        run.show("", Some(self.layer), "self_attn.indexer.scores", &all, &[all.len()]);
        Ok(())
    }

    /// Inputs of the kernel; `keys` are the visible keys.
    fn input<'a, A: Element>(
        &self,
        run: &'a Run<'_>,
        saved: &'a Saved<A>,
        keys: &'a [A],
    ) -> kernel::Input<'a, A> {
        let before = (keys.len() - saved.k.len()) / self.dims.dim;
        kernel::Input { q: &saved.q, k: keys, w: &saved.w, before, cu_seqlens: run.cu_seqlens() }
    }

    fn options(&self, run: &Run<'_>, loss_scale: f32) -> kernel::Options {
        kernel::Options { logits: run.precision.site(Site::IndexerLogits), loss_scale, ties: run.ties }
    }

    fn heads(&self, heads: usize) -> Heads {
        Heads { heads, width: self.dims.dim, offset: 0 }
    }

    /// heads^-1/2
    fn weight_factor(&self) -> f32 {
        (self.dims.heads as f32).powf(-0.5)
    }

    /// Returns the bytes that forward saves if the indexer is trained.
    pub(crate) fn saved_bytes<A>(&self, tokens: usize, keep: Keep) -> usize {
        let kernel::Dims { heads, dim } = self.dims;
        let keys = if keep == Keep::Everything { 2 } else { 1 };
        tokens * ((heads + keys) * dim * size_of::<A>() + (heads + 2) * 4)
    }

    /// Returns the temporary bytes of backward: gradients of q, k and w, the kernel's buffer, and the keys of
    /// earlier ranks.
    pub(crate) fn transient<A>(&self, sequences: Sequences<'_>) -> usize {
        let kernel::Dims { heads, dim } = self.dims;
        let (tokens, before) = (sequences.tokens(), sequences.before(None));
        let keys = tokens + before;
        let gathered = if before > 0 { keys * dim * size_of::<A>() } else { 0 };
        // The gradients of all keys in f32, if they are exchanged.
        let exchanged = if sequences.part.is_some() { 4 * keys * dim } else { 0 };
        let gradients = tokens * ((heads + 2) * dim * size_of::<A>() + 4 * heads);
        gradients + gathered + exchanged + 4 * kernel::indexer_loss_workspace(self.dims, keys)
    }

    /// Returns the f32 elements that one slot of scratch needs, for sequences of at most `longest` keys.
    pub(crate) fn scratch<A: Element>(
        &self,
        tokens: usize,
        longest: usize,
        attention: ballast_kernels::attention::Dims,
    ) -> usize {
        [
            self.q.scratch(tokens),
            self.k.scratch(tokens),
            self.weights.scratch(tokens),
            layer_norm_backward_scratch(tokens, self.dims.dim),
            kernel::indexer_topk_scratch::<A>(self.dims, longest),
            kernel::indexer_loss_scratch::<A>(self.dims, attention, longest, None),
            kernel::indexer_loss_scratch::<A>(self.dims, attention, longest, Some(self.topk)),
        ]
        .into_iter()
        .max()
        .unwrap_or(0)
    }
}
