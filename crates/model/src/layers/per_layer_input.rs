//! Per-layer inputs (Gemma 4): every layer has an additional input, computed from the token ids and the
//! embeddings.
//!
//! P is the width per layer, L the number of layers, x the embeddings:
//! ```text
//! token   = E_p[id] sqrt(P)                          [tokens, L, P]
//! context = norm(W_c x H^-1/2)                       [tokens, L, P], normed over P
//! input_l = (token_l + context_l) 2^-1/2
//! in the layer   x = x + after(W_p (gelu(W_g x) * input_l))
//! ```

use ballast_kernels::elementwise::{accumulate_rounded, add_assign, round, scale};
use ballast_kernels::embedding::{embedding_backward, embedding_backward_workspace, embedding_forward};
use ballast_kernels::glu::{Activation, glu_backward, glu_forward};
use ballast_kernels::norm::Saved as NormSaved;
use ballast_kernels::{Element, Rounding};

use super::residual::narrowed;
use super::{Keep, Linear, Norm, bytes_of};
use crate::config::{Config, PerLayerInputs as Shape};
use crate::error::Result;
use crate::params::{Grads, Id, Init, Specs, Weight};
use crate::precision::{Storage, with_storage};
use crate::run::{Run, zeros};
use crate::site::Site;

const HALF_ROOT: f32 = std::f32::consts::FRAC_1_SQRT_2;

/// Computes the inputs of all layers.
#[derive(Clone, Debug)]
pub(crate) struct PerLayerInputs {
    width: usize,
    layers: usize,
    hidden: usize,
    embedding: Id<Weight>,
    projection: Linear,
    norm: Norm,
}

/// Activations that forward saves, in addition to the embeddings.
#[derive(Clone, Debug, Default)]
pub(crate) struct InputsSaved<A> {
    /// [tokens, L P]
    projected: Vec<A>,
    norm: NormSaved,
}

impl<A> InputsSaved<A> {
    pub(crate) fn bytes(&self) -> usize {
        bytes_of(&[&self.projected]) + self.norm.bytes()
    }
}

impl PerLayerInputs {
    pub(crate) fn new(specs: &mut Specs, config: &Config, shape: Shape) -> PerLayerInputs {
        let (width, layers, hidden) = (shape.width, config.layers.len(), config.hidden);
        let all = layers * width;
        PerLayerInputs {
            width,
            layers,
            hidden,
            embedding: specs.weight(
                "embed_tokens_per_layer.weight".into(),
                &[shape.vocabulary, all],
                Init::Embedding,
            ),
            projection: Linear::new(specs, "per_layer_model_projection", hidden, all, false),
            norm: Norm::new(specs, "per_layer_projection_norm", width, config),
        }
    }

    /// Returns the inputs [tokens, P], by layer.
    pub(crate) fn forward<A: Element>(
        &self,
        run: &Run<'_>,
        x: &[A],
        keep: Keep,
    ) -> Result<(Vec<Vec<A>>, InputsSaved<A>)> {
        let all = self.layers * self.width;
        let mut projected: Vec<A> = self.projection.forward(run, x)?;
        scale(&mut projected, self.context_scale());
        let (mut inputs, norm) = self.norm.forward(run, &projected)?;
        let mut token = zeros(inputs.len());
        with_storage!(Weight, run.weight(self.embedding), |w| {
            embedding_forward(&mut token, &run.batch.ids, w, self.token_scale(run), all)?;
        });
        add_assign(&mut inputs, &token)?;
        scale(&mut inputs, HALF_ROOT);
        run.see(None, "per_layer_inputs", &inputs);
        let part = |layer: usize| {
            let rows = inputs.chunks_exact(all);
            rows.flat_map(|row| &row[layer * self.width..(layer + 1) * self.width]).copied().collect()
        };
        let by_layer = (0..self.layers).map(part).collect();
        Ok((by_layer, InputsSaved { projected: keep.always(projected), norm }))
    }

    /// Adds the gradient of the embeddings to dx; `d_inputs` are the gradients of the inputs, by layer.
    pub(crate) fn backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dx: &mut [f32],
        d_inputs: &[Vec<A>],
        x: &[A],
        saved: &InputsSaved<A>,
    ) -> Result {
        let all = self.layers * self.width;
        let mut d: Vec<A> = zeros(run.tokens() * all);
        for (layer, part) in d_inputs.iter().enumerate() {
            for (row, part) in d.chunks_exact_mut(all).zip(part.chunks_exact(self.width)) {
                row[layer * self.width..(layer + 1) * self.width].copy_from_slice(part);
            }
        }
        scale(&mut d, HALF_ROOT);
        let mut d_projected = self.norm.backward(run, grads, &d, &saved.projected, &saved.norm)?;
        scale(&mut d_projected, self.context_scale());
        self.projection.backward(run, grads, dx, &d_projected, x)?;
        if let Some(dw) = grads.of(self.embedding) {
            run.forget_padding(&mut d);
            let mut workspace = vec![0.0; embedding_backward_workspace(run.tokens())];
            embedding_backward(dw, &d, &run.batch.ids, self.token_scale(run), all, &mut workspace)?;
        }
        Ok(())
    }

    fn context_scale(&self) -> f32 {
        (self.hidden as f32).powf(-0.5)
    }

    fn token_scale(&self, run: &Run<'_>) -> f32 {
        let scale = (self.width as f32).sqrt();
        if run.precision.params == Storage::Bf16 { Rounding::Bf16.round(scale) } else { scale }
    }

    /// Returns the bytes that forward saves, including the inputs themselves.
    pub(crate) fn saved_bytes<A>(&self, tokens: usize, keep: Keep) -> usize {
        let tensor = tokens * self.layers * self.width * size_of::<A>();
        let kept = if keep.any() { tensor } else { 0 };
        kept + tensor + 4 * tokens * self.layers
    }

    pub(crate) fn scratch(&self, tokens: usize) -> usize {
        self.projection.scratch(tokens).max(self.norm.scratch(tokens * self.layers))
    }
}

/// Adds the input of one layer to the residual stream.
#[derive(Clone, Debug)]
pub(crate) struct PerLayerInput {
    gate: Linear,
    projection: Linear,
    after: Norm,
}

/// Activations that forward saves, in addition to the input.
#[derive(Clone, Debug, Default)]
pub(crate) struct Saved<A> {
    /// Stream before this part, in the type of activations: [tokens, H]
    x: Vec<A>,
    /// [tokens, P]
    gate: Vec<A>,
    /// [tokens, P]; recomputed
    inner: Vec<A>,
    /// [tokens, H]
    projected: Vec<A>,
    norm: NormSaved,
}

impl<A> Saved<A> {
    pub(crate) fn bytes(&self) -> usize {
        bytes_of(&[&self.x, &self.gate, &self.inner, &self.projected]) + self.norm.bytes()
    }
}

impl PerLayerInput {
    pub(crate) fn new(specs: &mut Specs, name: &str, config: &Config, width: usize) -> PerLayerInput {
        let h = config.hidden;
        PerLayerInput {
            gate: Linear::new(specs, &format!("{name}.per_layer_input_gate"), h, width, false),
            projection: Linear::new(specs, &format!("{name}.per_layer_projection"), width, h, false),
            after: Norm::new(specs, &format!("{name}.post_per_layer_input_norm"), h, config),
        }
    }

    /// Adds the gated and projected input to the stream.
    pub(crate) fn forward<A: Element>(
        &self,
        run: &Run<'_>,
        stream: &mut [f32],
        input: &[A],
        keep: Keep,
    ) -> Result<Saved<A>> {
        let x: Vec<A> = narrowed(stream)?;
        let gate: Vec<A> = self.gate.forward(run, &x)?;
        let mut inner = zeros(gate.len());
        glu_forward(&mut inner, &gate, input, Activation::GeluTanh)?;
        let projected: Vec<A> = self.projection.forward(run, &inner)?;
        let (y, norm): (Vec<A>, _) = self.after.forward(run, &projected)?;
        accumulate_rounded(stream, &y, run.precision.site(Site::Residual))?;
        Ok(Saved {
            x: keep.always(x),
            gate: keep.always(gate),
            inner: keep.unless_recomputed(inner),
            projected: keep.always(projected),
            norm,
        })
    }

    /// Replaces the gradient of the stream after this part by the gradient before it; returns the gradient of
    /// the input.
    pub(crate) fn backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        d_stream: &mut [f32],
        input: &[A],
        saved: Saved<A>,
    ) -> Result<Vec<A>> {
        let Saved { x, gate, mut inner, projected, norm } = saved;
        if inner.is_empty() {
            inner = zeros(gate.len());
            glu_forward(&mut inner, &gate, input, Activation::GeluTanh)?;
        }
        let d_projected = self.after.backward(run, grads, d_stream, &projected, &norm)?;
        let d_inner = self.projection.backward_alone(run, grads, &d_projected, &inner)?;
        let (mut dgate, mut d_input) = (inner, zeros(gate.len()));
        glu_backward(&mut dgate, &mut d_input, &d_inner, &gate, input, Activation::GeluTanh)?;
        self.gate.backward(run, grads, d_stream, &dgate, &x)?;
        round(d_stream, run.precision.site(Site::Residual));
        Ok(d_input)
    }

    /// Returns the bytes that forward saves.
    pub(crate) fn saved_bytes<A>(&self, tokens: usize, hidden: usize, keep: Keep) -> usize {
        if !keep.any() {
            return 0;
        }
        let narrow = if keep == Keep::Everything { 2 } else { 1 } * self.gate.outputs();
        tokens * ((2 * hidden + narrow) * size_of::<A>() + 4)
    }

    /// Returns the temporary bytes of backward, without the stream's gradient: gradients of the projection,
    /// of the gated unit and of its factors.
    pub(crate) fn transient<A>(&self, tokens: usize, hidden: usize) -> usize {
        tokens * (hidden + 3 * self.gate.outputs()) * size_of::<A>()
    }

    pub(crate) fn scratch(&self, tokens: usize) -> usize {
        self.gate.scratch(tokens).max(self.projection.scratch(tokens)).max(self.after.scratch(tokens))
    }
}
