//! Softmax attention: projections, norms, rotation, attention, output gate, projection.
//!
//! ```text
//! q, k = rotate(norm(W_q x)), rotate(norm(W_k x))      v = W_v x, norm(W_v x) or norm(W_k x)
//! y = W_o (attention(q, k, v) * sigmoid(gate))         gate is next to each head's q in W_q x, or absent
//! ```
//! A layer may use the k and v of an earlier layer; their gradients are then added to those of that layer,
//! whose backward runs later.
//!
//! If the batch is divided over ranks, the queries see the keys and values of their sequence on earlier ranks
//! too. With a sliding window those inside it are gathered for the kernel and dropped after it; backward
//! gathers them again and returns their gradients. Without one the ranks divide the heads (heads.rs).

use std::borrow::Cow;
use std::sync::Arc;

use ballast_cluster::Kind;
use ballast_kernels::Element;
use ballast_kernels::attention::{self as kernel, Cache as KernelCache};
use ballast_kernels::elementwise::{accumulate, convert};
use ballast_kernels::glu::{Activation, glu_backward, glu_forward};
use ballast_kernels::norm::Saved as NormSaved;
use ballast_kernels::rotary::{Heads, rotary_backward, rotary_forward};

use super::heads::{self, Inputs};
use super::layer::Links;
use super::{Keep, Linear, Norm, bytes_of};
use crate::batch::Sequences;
use crate::config::{Attention as Shape, Config, Values};
use crate::context::{Context, Rows, Sent};
use crate::error::Result;
use crate::params::{Grads, Specs};
use crate::precision::Precision;
use crate::run::{Run, zeros};
use crate::site::Site;

#[derive(Clone, Debug)]
pub(crate) struct Attention {
    layer: usize,
    shape: Shape,
    /// Index of the run's rotary table for q and k.
    table: usize,
    q: Linear,
    q_norm: Option<Norm>,
    /// Projections and norms of k and v; `None` if the layer uses another layer's k and v.
    kv: Option<KeyValueLayers>,
    out: Linear,
}

#[derive(Clone, Debug)]
struct KeyValueLayers {
    k: Linear,
    k_norm: Option<Norm>,
    v: Option<Linear>,
    v_norm: Option<Norm>,
}

/// Keys and values after norms and rotation: [tokens, kv_heads, hd] each.
#[derive(Clone, Debug)]
pub(crate) struct KeyValues<A> {
    pub(crate) k: Arc<Vec<A>>,
    pub(crate) v: Arc<Vec<A>>,
}

/// Keys and values that the queries of a rank see: those of earlier ranks, then its own.
struct Visible<'a, A: Element> {
    /// [before + tokens, kv_heads, hd]
    k: Cow<'a, [A]>,
    /// [before + tokens, kv_heads, hd]
    v: Cow<'a, [A]>,
    before: usize,
}

/// Activations that forward saves, in addition to x.
#[derive(Clone, Debug, Default)]
pub(crate) struct Saved<A> {
    /// q before norm and rotation: [tokens, heads, hd]; empty without a norm
    q_raw: Vec<A>,
    /// [tokens, heads, hd]; empty without a gate
    gate: Vec<A>,
    /// k before norm and rotation: [tokens, kv_heads, hd]; empty without a norm
    k_raw: Vec<A>,
    /// v before the norm: [tokens, kv_heads, hd]; empty if v is computed from k_raw
    v_raw: Vec<A>,
    q_norm: NormSaved,
    k_norm: NormSaved,
    v_norm: NormSaved,
    /// [tokens, heads, hd]; recomputed if there is a norm
    q: Vec<A>,
    /// [tokens, kv_heads, hd] each; recomputed if k has a norm, `None` if another layer's
    kv: Option<KeyValues<A>>,
    /// [tokens, heads, hd]
    o: Vec<A>,
    /// Log-sum-exp of the logits
    attention: kernel::Saved,
    /// [tokens, heads, hd]; recomputed, empty without a gate
    gated: Vec<A>,
}

impl<A> Saved<A> {
    pub(crate) fn bytes(&self) -> usize {
        let own = [&self.q_raw, &self.gate, &self.k_raw, &self.v_raw, &self.q, &self.o, &self.gated];
        let kv = self.kv.as_ref().map_or(0, |kv| (kv.k.len() + kv.v.len()) * size_of::<A>());
        let norms = [&self.q_norm, &self.k_norm, &self.v_norm];
        bytes_of(&own) + kv + norms.map(NormSaved::bytes).iter().sum::<usize>() + self.attention.bytes()
    }
}

/// Keys and values of one sequence while decoding.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cache<A> {
    k: Vec<A>,
    v: Vec<A>,
}

impl<A> Cache<A> {
    pub(crate) fn bytes(&self) -> usize {
        (self.k.len() + self.v.len()) * size_of::<A>()
    }
}

impl Attention {
    pub(crate) fn new(
        specs: &mut Specs,
        name: &str,
        layer: usize,
        config: &Config,
        shape: &Shape,
        table: usize,
    ) -> Attention {
        let (h, hd) = (config.hidden, shape.head_dim);
        let kv_width = shape.kv_heads * hd;
        let linear = |specs: &mut Specs, part: &str, inputs, outputs| {
            Linear::new(specs, &format!("{name}.{part}"), inputs, outputs, shape.bias)
        };
        let norm = |specs: &mut Specs, part: &str| Norm::new(specs, &format!("{name}.{part}"), hd, config);
        let per_head = if shape.gated { 2 * hd } else { hd };
        let q = linear(specs, "q_proj", h, shape.heads * per_head);
        let q_norm = shape.qk_norm.then(|| norm(specs, "q_norm"));
        let kv = shape.shared_from.is_none().then(|| KeyValueLayers {
            k: linear(specs, "k_proj", h, kv_width),
            k_norm: shape.qk_norm.then(|| norm(specs, "k_norm")),
            v: (shape.values != Values::KeysNormed).then(|| linear(specs, "v_proj", h, kv_width)),
            v_norm: (shape.values != Values::Projected).then(|| Norm::weightless(hd, config)),
        });
        let out = linear(specs, "o_proj", shape.heads * hd, h);
        Attention { layer, shape: shape.clone(), table, q, q_norm, kv, out }
    }

    pub(crate) fn forward<A: Element>(
        &self,
        run: &Run<'_>,
        x: &[A],
        links: &mut Links<A>,
        caches: Option<&mut Vec<Cache<A>>>,
        shared_caches: Option<&[Cache<A>]>,
        keep: Keep,
    ) -> Result<(Vec<A>, Saved<A>)> {
        let layer = Some(self.layer);
        let mut saved = Saved::default();
        let (q_raw, gate) = self.split_gate(self.q.forward(run, x)?);
        let q = self.finish_queries(run, &mut saved.q_norm, &q_raw)?;
        let kv = match &self.kv {
            None => None,
            Some(layers) => Some(self.key_values(run, layers, &mut saved, x, keep)?),
        };
        run.see(layer, "self_attn.q", &q);
        if let Some(kv) = &kv {
            run.see(layer, "self_attn.k", &kv.k);
            run.see(layer, "self_attn.v", &kv.v);
        }
        let mut o = zeros(q.len());
        match (caches, shared_caches) {
            (Some(caches), _) => self.decode(run, &mut o, &q, kv.as_ref(), caches)?,
            (None, Some(caches)) => self.attend_caches(run, &mut o, &q, caches)?,
            (None, None) => {
                if let (Some(kv), true) = (&kv, links.is_shared(self.layer)) {
                    links.kv[self.layer] = Some(kv.clone());
                }
                let kv = kv.as_ref().unwrap_or_else(|| links.source(self.shape.shared_from));
                let options = self.options(run.precision);
                let to = keep.any().then_some(&mut saved.attention);
                if let Some(context) = self.divides_heads(run) {
                    let inputs = Inputs { q: &q, k: &kv.k, v: &kv.v };
                    heads::forward(run, context, &mut o, to, inputs, self.dims(), &options)?;
                } else {
                    let visible = self.visible(run, kv)?;
                    let input = self.input(run, &q, &visible);
                    self.see_logits(run, &input)?;
                    kernel::attention_forward(&mut o, to, &input, self.dims(), &options, run.scratch)?;
                }
            }
        }
        run.see(layer, "self_attn.o", &o);
        let gated = self.apply_gate(&o, &gate)?;
        let y = self.out.forward(run, if self.shape.gated { &gated } else { &o })?;
        if keep.any() {
            let cheap = self.shape.qk_norm;
            saved.q_raw = if self.shape.qk_norm { q_raw } else { Vec::new() };
            saved.gate = gate;
            saved.q = if cheap { keep.unless_recomputed(q) } else { q };
            saved.kv = kv.filter(|_| !cheap || keep == Keep::Everything);
            saved.o = o;
            saved.gated = keep.unless_recomputed(gated);
        }
        Ok((y, saved))
    }

    /// Adds the gradient of the input to dx.
    #[allow(clippy::too_many_arguments)] // run, then outputs, then inputs
    pub(crate) fn backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dx: &mut [f32],
        dy: &[A],
        x: &[A],
        links: &mut Links<A>,
        mut saved: Saved<A>,
    ) -> Result {
        let layer = Some(self.layer);
        if saved.q.is_empty() {
            saved.q = self.finish_queries(run, &mut NormSaved::default(), &saved.q_raw)?;
        }
        if let (None, Some(layers)) = (&saved.kv, &self.kv) {
            saved.kv = Some(self.finish_key_values(run, layers, &mut saved)?);
        }
        if self.shape.gated && saved.gated.is_empty() {
            saved.gated = self.apply_gate(&saved.o, &saved.gate)?;
        }
        let attended = if self.shape.gated { &saved.gated } else { &saved.o };
        let d_attended = self.out.backward_alone(run, grads, dy, attended)?;
        let (d_o, dgate) = if self.shape.gated {
            let (mut dgate, mut d_o) = (zeros(saved.gate.len()), std::mem::take(&mut saved.gated));
            glu_backward(&mut dgate, &mut d_o, &d_attended, &saved.gate, &saved.o, Activation::Sigmoid)?;
            (d_o, dgate)
        } else {
            (d_attended, Vec::new())
        };
        run.see_gradient(layer, "self_attn.o", &d_o);
        let kv = saved.kv.as_ref().unwrap_or_else(|| links.source(self.shape.shared_from));
        let (mut dq, dk, dv) = match &run.context {
            None => self.attend_backward(run, &d_o, kv, &saved)?,
            Some(context) if self.divides_heads(run).is_some() => {
                let inputs = Inputs { q: &saved.q, k: &kv.k, v: &kv.v };
                let (dims, options) = (self.dims(), self.options(run.precision));
                heads::backward(run, context, &d_o, &saved.o, inputs, &saved.attention, dims, &options)?
            }
            Some(context) => {
                let (dq, dk, dv) = self.attend_backward::<A, f32>(run, &d_o, kv, &saved)?;
                let (width, limit) = (self.shape.kv_heads * self.shape.head_dim, self.earlier_keys());
                let own = |mut all: Vec<f32>| -> Result<Vec<A>> {
                    let (earlier, own) = all.split_at_mut(run.sequences().before(limit) * width);
                    context.give_back(Kind::Attention, own, earlier, width, limit)?;
                    let mut rounded = zeros(own.len());
                    convert(&mut rounded, own)?;
                    Ok(rounded)
                };
                (dq, own(dk)?, own(dv)?)
            }
        };
        drop(d_o);
        run.see_gradient(layer, "self_attn.q", &dq);
        run.see_gradient(layer, "self_attn.k", &dk);
        run.see_gradient(layer, "self_attn.v", &dv);
        rotary_backward(&mut dq, &run.tables[self.table], self.heads(self.shape.heads))?;
        let dq = match &self.q_norm {
            Some(norm) => norm.backward(run, grads, &dq, &saved.q_raw, &saved.q_norm)?,
            None => dq,
        };
        let dq = self.join_gate(dq, dgate);
        self.q.backward(run, grads, dx, &dq, x)?;
        match &self.kv {
            None => links.add_gradients(self.shape.shared_from, &dk, &dv),
            Some(layers) => self.key_values_backward(run, grads, dx, layers, dk, dv, &saved, links, x),
        }
    }

    fn dims(&self) -> kernel::Dims {
        let hd = self.shape.head_dim;
        kernel::Dims { heads: self.shape.heads, kv_heads: self.shape.kv_heads, head_dim: hd, value_dim: hd }
    }

    fn options(&self, precision: &Precision) -> kernel::Options {
        kernel::Options {
            scale: Some(self.shape.scale),
            window: self.shape.window,
            soft_cap: self.shape.soft_cap,
            qk_product: precision.site(Site::QkProduct),
            logits: precision.site(Site::Logits),
            probabilities: precision.site(Site::Probabilities),
            gradient: precision.site(Site::AttentionGradient),
        }
    }

    fn input<'a, A: Element>(
        &self,
        run: &'a Run<'_>,
        q: &'a [A],
        visible: &'a Visible<'_, A>,
    ) -> kernel::Input<'a, A> {
        let Visible { k, v, before } = visible;
        kernel::Input { q, k, v, sinks: None, selected: None, before: *before, cu_seqlens: run.cu_seqlens() }
    }

    /// Returns the context if its ranks divide the heads.
    fn divides_heads<'a>(&self, run: &'a Run<'_>) -> Option<&'a Context<'a>> {
        run.context.as_ref().filter(|_| self.shape.window.is_none())
    }

    /// Most keys before the part that its queries see.
    fn earlier_keys(&self) -> Option<usize> {
        self.shape.window.map(|window| window.saturating_sub(1))
    }

    /// Adds the keys and values of earlier ranks.
    fn visible<'a, A: Element>(&self, run: &Run<'_>, kv: &'a KeyValues<A>) -> Result<Visible<'a, A>> {
        let Some(context) = &run.context else {
            return Ok(Visible { k: Cow::Borrowed(&kv.k), v: Cow::Borrowed(&kv.v), before: 0 });
        };
        let (width, limit) = (self.shape.kv_heads * self.shape.head_dim, self.earlier_keys());
        Ok(Visible {
            k: context.with_earlier(Kind::Attention, &kv.k, width, limit)?,
            v: context.with_earlier(Kind::Attention, &kv.v, width, limit)?,
            before: run.sequences().before(limit),
        })
    }

    /// Gradients of q, and of all visible keys and values.
    fn attend_backward<A: Element, K: Element>(
        &self,
        run: &Run<'_>,
        d_o: &[A],
        kv: &KeyValues<A>,
        saved: &Saved<A>,
    ) -> Result<(Vec<A>, Vec<K>, Vec<K>)> {
        let visible = self.visible(run, kv)?;
        let (mut dq, mut dk, mut dv) = (zeros(saved.q.len()), zeros(visible.k.len()), zeros(visible.v.len()));
        let input = self.input(run, &saved.q, &visible);
        let (dims, options) = (self.dims(), self.options(run.precision));
        let keys = visible.before + run.tokens();
        let mut workspace = vec![0.0; kernel::attention_backward_workspace::<A>(dims, keys)];
        let to = kernel::Grads { dq: &mut dq, dk: &mut dk, dv: &mut dv, dsinks: None };
        kernel::attention_backward(
            to,
            d_o,
            &saved.o,
            &input,
            &saved.attention,
            dims,
            &options,
            &mut workspace,
            run.scratch,
        )?;
        Ok((dq, dk, dv))
    }

    fn heads(&self, heads: usize) -> Heads {
        Heads { heads, width: self.shape.head_dim, offset: 0 }
    }

    /// Splits q and gate, which are adjacent in each head.
    fn split_gate<A: Element>(&self, both: Vec<A>) -> (Vec<A>, Vec<A>) {
        if !self.shape.gated {
            return (both, Vec::new());
        }
        let hd = self.shape.head_dim;
        let (mut q, mut gate) = (zeros(both.len() / 2), zeros(both.len() / 2));
        for ((q, gate), both) in q.chunks_mut(hd).zip(gate.chunks_mut(hd)).zip(both.chunks(2 * hd)) {
            q.copy_from_slice(&both[..hd]);
            gate.copy_from_slice(&both[hd..]);
        }
        (q, gate)
    }

    fn join_gate<A: Element>(&self, q: Vec<A>, gate: Vec<A>) -> Vec<A> {
        if !self.shape.gated {
            return q;
        }
        let hd = self.shape.head_dim;
        let mut both = zeros(2 * q.len());
        for ((q, gate), both) in q.chunks(hd).zip(gate.chunks(hd)).zip(both.chunks_mut(2 * hd)) {
            both[..hd].copy_from_slice(q);
            both[hd..].copy_from_slice(gate);
        }
        both
    }

    fn apply_gate<A: Element>(&self, o: &[A], gate: &[A]) -> Result<Vec<A>> {
        if !self.shape.gated {
            return Ok(Vec::new());
        }
        let mut gated = zeros(o.len());
        glu_forward(&mut gated, gate, o, Activation::Sigmoid)?;
        Ok(gated)
    }

    fn finish_queries<A: Element>(&self, run: &Run<'_>, saved: &mut NormSaved, raw: &[A]) -> Result<Vec<A>> {
        let mut q = match &self.q_norm {
            Some(norm) => {
                let (q, rstd) = norm.forward(run, raw)?;
                *saved = rstd;
                q
            }
            None => raw.to_vec(),
        };
        rotary_forward(&mut q, &run.tables[self.table], self.heads(self.shape.heads))?;
        Ok(q)
    }

    fn key_values<A: Element>(
        &self,
        run: &Run<'_>,
        layers: &KeyValueLayers,
        saved: &mut Saved<A>,
        x: &[A],
        keep: Keep,
    ) -> Result<KeyValues<A>> {
        match &layers.v {
            None => saved.k_raw = layers.k.forward(run, x)?,
            Some(v) => [saved.k_raw, saved.v_raw] = Linear::forward_many(run, [&layers.k, v], x)?,
        }
        let kv = self.finish_key_values(run, layers, saved)?;
        // A tensor before its norm is saved for the norm's backward, or to recompute k and v.
        let recomputed = keep != Keep::Everything && layers.k_norm.is_some();
        if !keep.any() || layers.k_norm.is_none() {
            saved.k_raw = Vec::new();
        }
        if !keep.any() || layers.v_norm.is_none() && !recomputed {
            saved.v_raw = Vec::new();
        }
        Ok(kv)
    }

    /// Computes k and v from the outputs of their projections: norms and rotation.
    fn finish_key_values<A: Element>(
        &self,
        run: &Run<'_>,
        layers: &KeyValueLayers,
        saved: &mut Saved<A>,
    ) -> Result<KeyValues<A>> {
        let mut k = match &layers.k_norm {
            Some(norm) => {
                let (k, rstd) = norm.forward(run, &saved.k_raw)?;
                saved.k_norm = rstd;
                k
            }
            None => saved.k_raw.clone(),
        };
        rotary_forward(&mut k, &run.tables[self.table], self.heads(self.shape.kv_heads))?;
        let v_raw = if layers.v.is_some() { &saved.v_raw } else { &saved.k_raw };
        let v = match &layers.v_norm {
            Some(norm) => {
                let (v, rstd) = norm.forward(run, v_raw)?;
                saved.v_norm = rstd;
                v
            }
            None => v_raw.clone(),
        };
        Ok(KeyValues { k: Arc::new(k), v: Arc::new(v) })
    }

    #[allow(clippy::too_many_arguments)] // run, then outputs, then inputs
    fn key_values_backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dx: &mut [f32],
        layers: &KeyValueLayers,
        mut dk: Vec<A>,
        mut dv: Vec<A>,
        saved: &Saved<A>,
        links: &mut Links<A>,
        x: &[A],
    ) -> Result {
        if let Some((more_k, more_v)) = links.take_gradients(self.layer) {
            for (own, mut more) in [(&mut dk, more_k), (&mut dv, more_v)] {
                accumulate(&mut more, own)?;
                convert(own, &more)?;
            }
        }
        rotary_backward(&mut dk, &run.tables[self.table], self.heads(self.shape.kv_heads))?;
        let dk = match &layers.k_norm {
            Some(norm) => norm.backward(run, grads, &dk, &saved.k_raw, &saved.k_norm)?,
            None => dk,
        };
        layers.k.backward(run, grads, dx, &dk, x)?;
        let v_raw = if layers.v.is_some() { &saved.v_raw } else { &saved.k_raw };
        let dv = match &layers.v_norm {
            Some(norm) => norm.backward(run, grads, &dv, v_raw, &saved.v_norm)?,
            None => dv,
        };
        layers.v.as_ref().unwrap_or(&layers.k).backward(run, grads, dx, &dv, x)
    }

    /// Appends the new keys and values to the caches and runs the attention on them.
    fn decode<A: Element>(
        &self,
        run: &Run<'_>,
        o: &mut [A],
        q: &[A],
        kv: Option<&KeyValues<A>>,
        caches: &mut [Cache<A>],
    ) -> Result {
        let Some(kv) = kv else { return Ok(()) };
        let width = self.shape.kv_heads * self.shape.head_dim;
        for (cache, ends) in caches.iter_mut().zip(run.cu_seqlens().windows(2)) {
            // Keys outside the window are dropped when the cache holds two windows; before the append, since
            // layers that share this cache still read it after this layer.
            let tokens = cache.k.len() / width;
            if let Some(window) = self.shape.window.filter(|window| tokens >= 2 * window) {
                cache.k.drain(..(tokens - window) * width);
                cache.v.drain(..(tokens - window) * width);
            }
            let new = ends[0] * width..ends[1] * width;
            cache.k.extend_from_slice(&kv.k[new.clone()]);
            cache.v.extend_from_slice(&kv.v[new.clone()]);
        }
        self.attend_caches(run, o, q, caches)
    }

    fn attend_caches<A: Element>(&self, run: &Run<'_>, o: &mut [A], q: &[A], caches: &[Cache<A>]) -> Result {
        let (dims, options) = (self.dims(), self.options(run.precision));
        let (width, kv_width) = (dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim);
        for (cache, ends) in caches.iter().zip(run.cu_seqlens().windows(2)) {
            let rows = ends[0] * width..ends[1] * width;
            let cache = KernelCache { k: &cache.k, v: &cache.v, len: cache.k.len() / kv_width };
            kernel::attention_decode(
                &mut o[rows.clone()],
                &q[rows],
                &cache,
                None,
                None,
                dims,
                &options,
                run.scratch,
            )?;
        }
        Ok(())
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

    /// Returns the bytes that forward saves.
    pub(crate) fn saved_bytes<A>(&self, tokens: usize, keep: Keep, precision: &Precision) -> usize {
        if !keep.any() {
            return 0;
        }
        let shape = &self.shape;
        let (q, kv) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let everything = keep == Keep::Everything;
        let own = self.kv.is_some();
        let normed_v = own && shape.values == Values::Normed;
        let mut elements = q; // o
        if shape.gated {
            elements += q + if everything { q } else { 0 };
        }
        if shape.qk_norm {
            elements += q + if own { kv } else { 0 };
        }
        let recomputed = !everything && shape.qk_norm && shape.values == Values::Projected;
        if normed_v || own && recomputed {
            elements += kv;
        }
        if everything || !shape.qk_norm {
            elements += q + if own { 2 * kv } else { 0 };
        }
        let mut rows = 0;
        if shape.qk_norm {
            rows += shape.heads + if own { shape.kv_heads } else { 0 };
        }
        if own && shape.values != Values::Projected {
            rows += shape.kv_heads;
        }
        tokens * (elements * size_of::<A>() + rows * 4)
            + kernel::saved_bytes(self.dims(), &self.options(precision), tokens)
    }

    /// Returns the bytes of keys and values that later layers use and that the layer itself does not save.
    pub(crate) fn linked_bytes<A>(&self, tokens: usize, keep: Keep) -> usize {
        let saves = keep == Keep::Everything || keep.any() && !self.shape.qk_norm;
        if saves { 0 } else { 2 * tokens * self.shape.kv_heads * self.shape.head_dim * size_of::<A>() }
    }

    /// Returns the temporary bytes of backward: gradients of o, the gate, q, k and v, the kernel's buffer,
    /// recomputed activations, and the keys and values of earlier ranks.
    pub(crate) fn transient<A: Element>(&self, sequences: Sequences<'_>, keep: Keep) -> usize {
        let tokens = sequences.tokens();
        let shape = &self.shape;
        let (q, kv) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let gated = if shape.gated { q } else { 0 };
        let recomputed = if keep == Keep::Everything || !shape.qk_norm { 0 } else { q + gated + 2 * kv };
        let plain = tokens * (recomputed + gated + 2 * q + 2 * kv) * size_of::<A>();
        if shape.window.is_none() && sequences.part.is_some() {
            let local = 4 * kernel::attention_backward_workspace::<A>(self.dims(), tokens);
            return plain + local.max(heads::transient::<A>(sequences, self.dims()));
        }
        let before = sequences.before(self.earlier_keys());
        let keys = before + tokens;
        let buffer = 4 * kernel::attention_backward_workspace::<A>(self.dims(), keys);
        let gathered = if before > 0 { 2 * kv * keys * size_of::<A>() } else { 0 };
        // The gradients of all keys in f32, if they are exchanged, beside the rounded ones.
        let exchanged = if sequences.part.is_some() { 4 * 2 * kv * keys } else { 0 };
        buffer + gathered + exchanged + plain
    }

    /// Returns the bytes that a rank sends.
    pub(crate) fn sent<A: Element>(&self, sequences: Sequences<'_>, precision: &Precision) -> Sent {
        let Some(part) = sequences.part else { return Sent::default() };
        if self.shape.window.is_none() {
            return heads::sent::<A>(sequences, self.dims(), &self.options(precision));
        }
        let (rows, row) =
            (Rows::new(part, self.earlier_keys()), 2 * self.shape.kv_heads * self.shape.head_dim);
        let forward = rows.later * row * size_of::<A>();
        Sent { forward, backward: forward + 4 * rows.earlier * row }
    }

    pub(crate) fn scratch<A: Element>(&self, tokens: usize) -> usize {
        let mut needs = vec![
            self.q.scratch(tokens),
            self.out.scratch(tokens),
            kernel::attention_forward_scratch::<A>(self.dims(), None),
            kernel::attention_backward_scratch::<A>(self.dims(), None),
        ];
        needs.extend(self.q_norm.iter().map(|norm| norm.scratch(tokens * self.shape.heads)));
        if let Some(kv) = &self.kv {
            needs.push(kv.k.scratch(tokens));
            needs.extend(kv.v.iter().map(|v| v.scratch(tokens)));
            needs.extend(kv.k_norm.iter().map(|norm| norm.scratch(tokens * self.shape.kv_heads)));
        }
        needs.into_iter().max().unwrap_or(0)
    }
}
